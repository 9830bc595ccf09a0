"""Spill directory: copies of versions on a local disk, one file each, in a directory that only
acpfs can enter.

Owns names and file calls; does not know why a copy is made, nor what it takes of the budget
(`writeback.sources.spill`). Every call may hang with the disk: they are made on threads of a pool,
never under the file system's lock. Thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from acpfs.errors import MachineError, RefusedError
from acpfs.runtime.chance import Chance
from acpfs.types import VersionId

MIRROR_PREFIX = "mirror-"
"""Names of the journals that lie beside the copies (`writeback.sources.mirror`)."""


class SpillDirectory:
    """Files below `<spill>/acpfs-<volume>-<node>`."""

    def __init__(self, path: Path, chance: Chance) -> None:
        """Touches nothing: the disk may hang."""
        self._chance = chance
        self.path = path

    def prepare(self) -> None:
        """Make the directory if it is not there.

        What it lies in must be: a disk that is not mounted is not written beneath.

        Raises:
            MachineError: it cannot be made.
            RefusedError: it is not ours alone.
        """
        try:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            st = self.path.lstat()
        except OSError as error:
            raise MachineError(f"spill directory {self.path.parent}: {error.strerror}") from error
        if not stat.S_ISDIR(st.st_mode) or st.st_uid != os.getuid() or st.st_mode & 0o077:
            raise RefusedError(f"{self.path} is not a private directory of this user")

    def new_name(self, vid: VersionId) -> str:
        """Never used before: a thread of a dead worker that still hangs in a call on an older file
        cannot harm this one.
        """
        return f"{vid}-{self._chance.token(6)}"

    def create(self, name: str) -> int:
        """A new file; the caller closes the descriptor."""
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path / name, flags, 0o600)

    def open(self, name: str) -> int:
        """An existing file, for reading; the caller closes the descriptor."""
        return os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def size(self, name: str) -> int:
        """Of a file; -1 when it is not there."""
        try:
            return os.stat(self.path / name, follow_symlinks=False).st_size
        except FileNotFoundError:
            return -1

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / name)

    def names(self) -> list[str]:
        """All files; none when the directory is not there."""
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def sync_names(self) -> None:
        """Have the names that were made on stable storage."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self) -> int:
        """What the file system still takes from this user."""
        info = os.statvfs(self.path)
        return info.f_bavail * info.f_frsize

    def give_up(self) -> None:
        """Remove everything; called when nothing is left in it that the backing directory has not
        got.
        """
        for name in self.names():
            self.remove(name)
        with contextlib.suppress(OSError):
            self.path.rmdir()
