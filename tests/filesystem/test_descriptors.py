"""An application that opens files without end gets an error; the drain does not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.records import Attributes, OpenFile
from acpfs.ram import descriptor_limits
from acpfs.types import ROOT
from tests.filesystem.world import CALLER, world


@pytest.mark.clause("S220")
def test_open_files_leave_descriptors_for_the_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            await w.write(b"waits for the drain", b"x")
            lowest = os.eventfd(0, os.EFD_CLOEXEC)
            os.close(lowest)
            monkeypatch.setattr(descriptor_limits, "limit", lambda: 2 * lowest + 200)
            opened: list[tuple[OpenFile, Attributes]] = []
            why = 0
            while not why:
                try:
                    opened.append(await w.create(b"f%d" % len(opened)))
                except OSError as error:
                    why = error.errno or 0
            assert why == errno.ENFILE
            assert len(opened) > 20
            assert b"f%d" % len(opened) not in await w.names(), "half made"
            with pytest.raises(OSError):
                await w.do(w.fs.open(opened[0][1].ino, os.O_RDONLY, CALLER))
            await w.drained()
            assert (w.backing / "waits for the drain").read_bytes() == b"x"
            for one, _attributes in opened:
                await w.close(one)
            await w.close((await w.create(b"again"))[0])
            await w.do(w.fs.unlink(ROOT, b"again"))

    trio.run(main)
