"""What a supervisor keeps for the next worker: descriptors by name, each in the stores too that
outlive the supervisor.

Owns the descriptors; what the names mean is the worker's affair. The supervisor's; standard library
only, no thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from acpfs.supervisor import stuck_processes
from acpfs.supervisor.stuck_processes import STUCK

Store = Callable[[str, Sequence[int]], None]
"""Is told of the descriptors that lie under a name from now on; none: the name is gone."""


class KeptDescriptors(dict[str, list[int]]):
    """Descriptors by name."""

    def __init__(self, *stores: Store) -> None:
        super().__init__()
        self._stores = stores

    def names(self) -> list[list[Any]]:
        """Each name with how many descriptors it has, in the order of `all`."""
        return [[name, len(fds)] for name, fds in self.items()]

    def put(self, name: str, fds: Sequence[int]) -> None:
        """Copies for the next worker only: the stores are not told. None: away with the name."""
        for old in self.pop(name, ()):
            os.close(old)
        if fds:
            self[name] = [os.dup(fd) for fd in fds]

    def all(self) -> list[int]:
        """Every descriptor."""
        return [fd for fds in self.values() for fd in fds]

    def keep(self, names: Iterable[Sequence[Any]], fds: Sequence[int]) -> None:
        """Put descriptors under names, each in place of what was kept there."""
        position = 0
        for name, count in names:
            for old in self.get(name, ()):
                os.close(old)
            self[name] = list(fds[position : position + count])
            position += count
            self._store(name)
            if not count:
                del self[name]

    def leave_behind(self, pidfd: int) -> None:
        """A worker that may never end: the next one is to know of it."""
        self.setdefault(STUCK, []).append(os.dup(pidfd))
        self._store(STUCK)

    def bury(self) -> None:
        """Forget those whose calls came back."""
        ended = [fd for fd in self.get(STUCK, ()) if stuck_processes.has_ended(fd)]
        for fd in ended:
            self[STUCK].remove(fd)
            os.close(fd)
        if ended:
            self._store(STUCK)

    def unlock(self) -> None:
        """What has not ended has copies of the descriptors: the next mount is not to wait for its
        locks.
        """
        for fd in self.all():
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)

    def let_go(self) -> None:
        """Nothing of it is this supervisor's any more; what is locked stays locked, and the stores
        are not told.
        """
        for fd in self.all():
            os.close(fd)
        self.clear()

    def _store(self, name: str) -> None:
        for store in self._stores:
            store(name, self[name])
