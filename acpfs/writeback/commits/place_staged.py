"""Renaming a staging file into place, also where it lies on another file system than its target.

That is so for what did not fit into RAM, which is staged before it has a place, and where a directory was moved after something was staged
for it. Used in the commit thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from threading import RLock

from acpfs.backing.lower import Lower, LowerPath
from acpfs.ram.state import StateDatabase
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Version


class PlaceStaged:
    """See above."""

    def __init__(
        self, lower: Lower, log: OperationLog, state: StateDatabase, lock: RLock, restaged: Callable[[Version, str], None]
    ) -> None:
        """`restaged`: see `Listener`."""
        self._lower, self._log, self._state, self._lock, self._restaged = lower, log, state, lock, restaged

    def place(self, version: Version, target: LowerPath) -> LowerPath:
        """Returns where it was staged.

        A copy is what the version is staged as before it is renamed: who comes after a crash knows it by its number. What it was made of
        is removed last, for it may be all that there is of the file.
        """
        before = version.staging_name
        staging = self._lower.staging_path(before)
        try:
            self._lower.rename(staging, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        else:
            return staging
        self._stage_as(version, self._lower.bring_near(before, target))
        staging = self.place(version, target)
        self._lower.remove_staging(before)
        return staging

    def _stage_as(self, version: Version, name: str) -> None:
        number = self._lower.lstat(self._lower.staging_path(name)).ino
        with self._lock:
            before, version.staging_name, version.staging_ino = version.staging_name, name, number
            self._restaged(version, before)
            self._log.save_version(version)
            self._state.must_commit()
