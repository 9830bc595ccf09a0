"""A full storage is asked for room, and not sent the same bytes at each try: counted in what is
written to the backing directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import SpaceInfo
from acpfs.runtime.given import Runtime
from tests.filesystem.test_outgrown import MIB, patterned
from tests.filesystem.test_slow_backing import until
from tests.filesystem.world import World, run

pytestmark = pytest.mark.clause("S434")

FILE_BYTES = 6 * MIB
TRIES = 40


class SmallDisk(BackingDirectory):
    """Has room for so much; counts what it is sent."""

    sets_aside = True

    def __init__(self, root: Path, node_id: str, runtime: Runtime) -> None:
        super().__init__(root, node_id, runtime)
        self._root_path = root
        self._guard = threading.Lock()
        self.capacity_bytes = 10 * MIB
        self.sent_bytes = 0

    def _left(self) -> int:
        taken = 0
        for directory, _directories, files in os.walk(self._root_path):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # others remove files meanwhile
                    taken += os.lstat(os.path.join(directory, name)).st_size
        return self.capacity_bytes - taken

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        with self._guard:
            if self._left() < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.sent_bytes += len(data)
            return super().write(fd, data, offset)

    def make_room(self, fd: int, size: int) -> bool:
        with self._guard:
            if self.sets_aside and self._left() < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.sets_aside

    def space(self) -> SpaceInfo:
        with self._guard:
            left = max(0, self._left()) // 4096
        return SpaceInfo(4096, 1 << 20, left, left, 1000, 1000, 255)


class SaysOnlyHowMuchIsFree(SmallDisk):
    """As NFSv3 and many FUSE file systems: nothing can be set aside."""

    sets_aside = False


@pytest.mark.parametrize("disk", [SmallDisk, SaysOnlyHowMuchIsFree])
def test_what_has_no_room_is_not_sent_again_at_each_try(
    tmp_path: Path, disk: type[SmallDisk]
) -> None:
    async def scenario(w: World) -> None:
        assert isinstance(w.lower, SmallDisk)
        for number in range(3):
            await w.write(b"shard-%d" % number, patterned(FILE_BYTES, seed=number))
        await until(lambda: w.engine.statistics().counters.retries >= TRIES)
        tries = w.engine.statistics().counters.retries
        anyway = 0 if w.lower.sets_aside else FILE_BYTES * (tries // 8 + 3)
        # one at a time: what this disk sets aside is nobody's before it is written
        assert w.lower.sent_bytes <= 4 * FILE_BYTES + anyway
        w.lower.capacity_bytes = 100 * MIB
        await w.drained()
        for number in range(3):
            stored = (w.backing / f"shard-{number}").read_bytes()
            assert stored == patterned(FILE_BYTES, seed=number)

    run(tmp_path, scenario, make_lower=disk, hold=False, streams=1)
