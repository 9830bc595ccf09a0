"""Doubles for the parts below the transport: a lower layer that is a plain directory, and no
write-back engine at all.

Everything stays in the RAM tier; the operation log only grows. The file system itself is the real
one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from acpfs.backing import filling
from acpfs.backing.attributes import lower_stat
from acpfs.backing.calls import CallPool
from acpfs.backing.lower import (
    LowerEntry,
    LowerPath,
    LowerStat,
    LowerToRead,
    Note,
    SpaceInfo,
    lstat_each,
)
from acpfs.backing.quirks import Features
from acpfs.config import Settings
from acpfs.filesystem.construction import FileSystemParts, Pools, Surroundings
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.upper import UpperLayer
from acpfs.ram.kept import Kept
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from tests.rig.runtime import REAL

HANGS_SUFFIX = ".hangs"
"""Of a file beside the directory, made when a call hangs: what the kernel says of a request does
not tell whether it was read.
"""


class PlainLowerDouble(LowerToRead):
    """The reading half of `Lower` over a directory; nothing is ever written to it.

    Explicitly so: mypy says where it has not all of that half.
    """

    features = Features()

    def __init__(self, top: Path, hanging_name: bytes = b"") -> None:
        self._top = os.fsencode(top)
        self._hanging_name = hanging_name

    def _path(self, path: LowerPath) -> bytes:
        return b"/".join((self._top, *path))

    def lstat(self, path: LowerPath) -> LowerStat:
        if path and path[-1] == self._hanging_name:
            Path(os.fsdecode(self._top) + HANGS_SUFFIX).touch()
            threading.Event().wait()
        return lower_stat(os.lstat(self._path(path)))

    def lstat_many(self, directory: LowerPath, names: Sequence[bytes]) -> list[LowerStat | None]:
        return lstat_each(self.lstat, directory, names)

    def stat_fd(self, fd: int) -> LowerStat:
        return lower_stat(os.fstat(fd))

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def digest(self, path: LowerPath) -> str:
        return ""

    def note(self, path: LowerPath) -> Note | None:
        return None

    def noted(self, fd: int) -> Note | None:
        return None

    def cached_bytes(self, fd: int) -> int | None:
        return filling.cached_bytes(fd)

    def expect_bulk(self, fd: int) -> None:
        """Nothing to prepare."""

    def listdir(self, path: LowerPath) -> list[LowerEntry]:
        with os.scandir(self._path(path)) as entries:
            return [
                LowerEntry(e.name, e.inode(), e.stat(follow_symlinks=False).st_mode & 0o170000)
                for e in entries
            ]

    def open_read(self, path: LowerPath) -> int:
        return os.open(self._path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def open_uncached(self, path: LowerPath) -> int:
        return self.open_read(path)

    def readlink(self, path: LowerPath) -> bytes:
        return os.readlink(self._path(path))

    def xattrs(self, path: LowerPath) -> dict[bytes, bytes]:
        return {}

    def space(self) -> SpaceInfo:
        st = os.statvfs(self._top)
        return SpaceInfo(
            st.f_frsize, st.f_blocks, st.f_bfree, st.f_bavail, st.f_files, st.f_ffree, st.f_namemax
        )


def file_system(
    backing: Path,
    tier_directory: Path,
    mountpoint: Path,
    budget_bytes: int = 4 << 30,
    hanging_name: bytes = b"",
    session: str = "",
) -> FileSystemParts:
    """The real file system's parts over `PlainLowerDouble`, started.

    `session`: of the worker whose session it takes over.
    """
    settings = Settings(backing=backing, mountpoint=mountpoint)
    state = StateDatabase(tier_directory / "state.db", REAL)
    tier = Tier(tier_directory, budget_bytes, REAL, when_safe=state.after_commit)
    log = OperationLog(state, REAL.clock)
    calls = CallPool("requests", 4, REAL)
    copies = CallPool("copies", 2, REAL)
    lower = PlainLowerDouble(backing, hanging_name)
    # Files of which nothing is known are admitted to the passthrough lane too, which is what is
    # tested.
    kept = Kept(tier_directory / "kept", session)
    parts = FileSystemParts(
        settings,
        UpperLayer(state, tier, log, LowerTree(state), REAL),
        lower,  # type: ignore[arg-type]
        Pools(calls, copies, calls),
        surroundings=Surroundings(unknown_bytes=0),
        kept=kept,
    )
    parts.steps.run(FileSystem(parts).start())
    return parts
