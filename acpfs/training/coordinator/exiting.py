"""Which of this node's ranks the kernel has begun to end.

A killed process closes its sockets only after the kernel has freed its memory, 0.6 s per GiB; that
it is exiting stands in its /proc/PID/stat at once. The file is kept open: it stays this process's,
whoever gets the number next. Not thread-safe.
"""

from __future__ import annotations

import os

POLL_S = 0.05
_PF_EXITING = 0x4
_FLAGS = 6
_USER = 11
_SYSTEM = 12
_STARTED = 19
_STATUS = 49
"""Fields 9, 14, 15, 22 and 52 of proc(5), counted behind the name's closing bracket."""
_STAT_BYTES_MAX = 4096


class Processes:
    """Ranks of this node."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._pids: dict[int, int] = {}

    def watch(self, rank: int, pid: int, started: int) -> bool:
        """Look at a rank from now on.

        False: it is not to be seen from here; its connection's end must do.
        """
        self.forget(rank)
        try:
            descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        fields = _fields(descriptor)
        if fields is None or int(fields[_STARTED]) != started:  # another PID namespace's number
            os.close(descriptor)
            return False
        self._open[rank] = descriptor
        self._pids[rank] = pid
        return True

    def forget(self, rank: int) -> None:
        """Look no more."""
        descriptor = self._open.pop(rank, None)
        if descriptor is not None:
            os.close(descriptor)
            del self._pids[rank]

    @property
    def are_watched(self) -> bool:
        """Whether a process is looked at, and lives as far as is known."""
        return bool(self._open)

    def pid(self, rank: int) -> int | None:
        """Of a rank that is looked at."""
        return self._pids.get(rank)

    def ticks(self, rank: int) -> int | None:
        """Processor time that a rank has used; None: it is not looked at, or ends."""
        fields = _fields(self._open[rank]) if rank in self._open else None
        return (
            None
            if fields is None or int(fields[_FLAGS]) & _PF_EXITING
            else int(fields[_USER]) + int(fields[_SYSTEM])
        )

    def exiting(self) -> list[int]:
        """Ranks whose processes end or have ended; told once."""
        found = [
            rank
            for rank, descriptor in self._open.items()
            if (fields := _fields(descriptor)) is None or int(fields[_FLAGS]) & _PF_EXITING
        ]
        for rank in found:
            self.forget(rank)
        return found

    def close(self) -> None:
        """Look at nobody."""
        for rank in list(self._open):
            self.forget(rank)


def status_of_exiting(pid: int) -> int:
    """What wait(2) will say of a process that the kernel has begun to end; 0: it ends in order, or
    nobody may know yet.

    Raises:
        OSError: there is none any more.
    """
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        fields = _fields(file.fileno())
    return int(fields[_STATUS]) if fields is not None and int(fields[_FLAGS]) & _PF_EXITING else 0


def started_at(pid: int) -> int:
    """When a process began, in clock ticks: what HELLO says of its own.

    Raises:
        ProcessLookupError: there is none.
    """
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        fields = _fields(file.fileno())
    if fields is None:
        raise ProcessLookupError(f"no process {pid}")
    return int(fields[_STARTED])


def _fields(descriptor: int) -> list[bytes] | None:
    """Those behind the name, which may have spaces and brackets; None: the process is gone."""
    try:
        return os.pread(descriptor, _STAT_BYTES_MAX, 0).rpartition(b")")[2].split()
    except ProcessLookupError:
        return None
