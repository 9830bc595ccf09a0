"""How long a file may be: what is only holes must not hold up the drain for years."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from acpfs.backing.lower import SpaceInfo
from acpfs.filesystem import files
from acpfs.filesystem.records import AttributeChange
from tests.filesystem.world import CALLER, world

HUGE = 7 << 60


@pytest.mark.clause("S33")
def test_longer_than_the_backing_file_system_is_large_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = 1 << 32  # the RAM tier of this test may lie on ext4, which has an end of its own
    monkeypatch.setattr(files, "FILE_BYTES_MAX", always)

    async def main() -> None:
        async with world(tmp_path) as w:
            ino = await w.write(b"f", b"x")
            opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))

            async def truncated(size: int) -> None:
                await w.do(w.fs.setattr(ino, AttributeChange(size=size), opened.handle, CALLER))

            for call in (
                lambda: truncated(HUGE),
                lambda: w.do(w.fs.write(opened.handle, HUGE, b"x")),
                lambda: w.do(w.fs.fallocate(opened.handle, 1, HUGE, 4096)),
            ):
                with pytest.raises(OSError) as refused:
                    await call()
                assert refused.value.errno == errno.EFBIG
            assert (await w.do(w.fs.getattr(ino))).size == 1
            w.inner.space.learn(SpaceInfo(4096, 1 << 10, 0, 0, 0, 0, 255))
            await truncated(always)
            with pytest.raises(OSError):
                await truncated(always + 1)
            w.inner.space.learn(SpaceInfo(4096, 1 << 21, 0, 0, 0, 0, 255))
            await truncated(2 * always)
            w.inner.space.learn(SpaceInfo(4096, 1 << 10, 0, 0, 0, 0, 255))
            await w.do(w.fs.write(opened.handle, 2 * always - 1, b"x"))  # it is that long already
            await truncated(2 * always - 1)
            await truncated(1)
            await w.close(opened)
            await w.drained()
            assert (w.backing / "f").read_bytes() == b"x"

    trio.run(main)
