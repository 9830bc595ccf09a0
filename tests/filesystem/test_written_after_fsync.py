"""A large file that the kernel goes on writing to after its fsync, while that version waits to be
streamed: exception X11.

The test is the kernel: it writes to the descriptor that an open in the passthrough lane hands out.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.content.contents import COPY_AT_FREEZE_BYTES_MAX
from acpfs.filesystem.records import Lane
from tests.filesystem.world import world

SMALL = COPY_AT_FREEZE_BYTES_MAX
LARGE = COPY_AT_FREEZE_BYTES_MAX + 1


@pytest.mark.parametrize(("size", "later"), [(SMALL, b""), (LARGE, b"later")])
@pytest.mark.clause("S180", "X11")
def test_a_version_has_what_was_synced_and_a_large_one_perhaps_later_writes(
    tmp_path: Path, size: int, later: bytes
) -> None:
    synced = b"s" * size

    async def main() -> None:
        async with world(
            tmp_path, unknown_bytes=1 << 20, budget_bytes=128 << 20, max_dirty_age_s=0
        ) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            opened, _ = await w.create(b"f")
            assert opened.lane is Lane.PASSTHROUGH
            os.pwrite(opened.backing_fd, synced, 0)
            await w.do(w.fs.fsync(opened.handle, False))
            os.pwrite(opened.backing_fd, b"later", 0)
            await w.drained()
            assert (w.backing / "f").read_bytes() == later + synced[len(later) :]
            await w.close(opened)
            await w.drained()
            assert (w.backing / "f").read_bytes() == b"later" + synced[5:]

    trio.run(main)
