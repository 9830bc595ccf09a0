"""Whether the close of a descriptor was the close of its file: what /proc tells of who opened it,
and of copies that others have.

The kernel says that a descriptor was closed (FLUSH), and when the last copy of it is gone
(RELEASE). A child that inherits one closes it by its exec; another child keeps it open for hours,
and never uses it. So where RELEASE does not come, this is asked: has the process that opened the
file, and wrote it, a descriptor of it left? What cannot be told (a process in another PID
namespace, a /proc that does not show it, one that others have written for) is no close; no clock
decides it. Nor is what nobody explains: where RELEASE does not come and no process that is seen has
a copy, something unseen has one that may write (a mapping, a descriptor that is on its way through
a socket, a file of an io_uring, a thread with a table of its own, a process of another PID
namespace).

Knows /proc and nothing else; asks the mount nothing, since `fdinfo` has inode numbers without a
call on the file. Thread-safe.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from acpfs.backing.calls import CallPool
from acpfs.filesystem.closing import Closing
from acpfs.processes import (
    PROC,
    descriptor_facts,
    directory_of,
    has_ended,
    mounts_without_names,
    stat_of,
)
from acpfs.ram.mounts import mount_table
from acpfs.runtime.threads import Running, Threads
from acpfs.types import Ino

FILE_SYSTEM = "fuse.acpfs"
"""As the mount table names it."""
KNOWN_MAX = 4096
"""Threads, and places of descriptors, that are remembered."""
IN_EXEC_S = 0.5
"""Who has not answered then is taken for a program of its own, which keeps its file back: it is
asked again.
"""
ASKED_MAX = 16
_START_OF_STACK = 25
"""Of the fields of /proc/PID/stat behind the name.

It stays over a fork, and is another one after an exec.
"""


class Left(enum.Enum):
    """What a process has of a file."""

    SOME = "some"
    """A descriptor that can write."""
    NONE = "none"
    GONE = "gone"
    """It has ended."""
    PERHAPS = "perhaps"
    """One of a file of that number, but of a mount that cannot be told: it was taken away, or is
    not seen from there.
    """
    UNKNOWN = "unknown"


class Copies(enum.Enum):
    """Who else has a descriptor of a file that can write, as far as is seen."""

    NONE_SEEN = "none seen"
    BY_CHANCE = "by chance"
    """Only children that have been forked and did no exec since, as those that load data."""
    PERHAPS = "perhaps"
    """Of none of them can it be told: what a process has may be a file of another mount."""
    PROGRAM = "program"
    """Another program."""


@dataclass(frozen=True, slots=True)
class Close:
    """A close after which the kernel's RELEASE has not come."""

    ino: Ino
    process: int
    """Which opened the file; 0: not known."""
    by_opener: bool
    """That one's own close was seen, and not only one of somebody else."""
    others_wrote: bool
    """Some other process was seen to write through the descriptor."""
    sees_writers: bool
    """Whether it would have been."""
    ended: bool = False
    """The session is over: whoever has a copy cannot write any more."""


@dataclass(frozen=True, slots=True)
class Callers:
    """What is asked of the processes that open files, write and close them."""

    openers: Openers
    closing_of: Callable[[int], Closing]
    """How a thread comes to close what it has open."""
    threads: CallPool
    """In which it is asked."""


class Stacks:
    """Where stacks of processes begin, as far as no exec keeps that locked (`processes`), which may
    wait for an answer of this daemon.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._asked: dict[Path, Running] = {}
        """Processes that are asked in a thread of their own, which may take as long as an exec."""

    def start_of(self, process: Path) -> int:
        """0: that is not known, or not yet."""
        found = [0]
        with self._lock:
            self._asked = {one: asks for one, asks in self._asked.items() if asks.is_alive()}
            if process in self._asked or len(self._asked) >= ASKED_MAX:
                return 0
            asks = self._threads.start("stack", self._ask, process, found)
            self._asked[process] = asks
        asks.join(IN_EXEC_S)
        return found[0]

    @staticmethod
    def _ask(process: Path, found: list[int]) -> None:
        with contextlib.suppress(OSError, ValueError):
            fields = stat_of(process)
            found[0] = int(fields[_START_OF_STACK]) if len(fields) > _START_OF_STACK else 0


class Openers:
    """Looks at the processes that open files."""

    def __init__(self, source: str, threads: Threads, proc: Path = PROC) -> None:
        """`source`: of the mount, in the mount table. `threads`: one of them asks what an exec
        locks.
        """
        self._source = source
        self._stacks = Stacks(threads)
        self._proc = proc
        self._processes: dict[int, int] = {}
        """Thread → its process."""
        self._numbers: dict[tuple[str, Ino], str] = {}
        """Directory of a task and file → where it had a descriptor of it when that was looked
        for.
        """

    def process_of(self, thread: int) -> int:
        """The process of a thread that makes a call, as the kernel reports it; 0: cannot be told.

        Asked at each open for writing: 2 us for the first thread of a process, and as much for
        others that are known.
        """
        directory = directory_of(thread, self._proc)
        if directory is None:
            return 0
        known = self._processes.get(thread)
        if known is not None and os.path.exists(f"{self._proc}/{known}/task/{thread}"):
            return known
        process = thread if _is_first(thread) else _process_in(directory)
        if len(self._processes) >= KNOWN_MAX:
            self._processes.clear()
        self._processes[thread] = process
        return process

    def counts(self, close: Close) -> bool:
        """Whether it was the close of the file: who wrote has none of it left, and gave none to a
        program that goes on writing.
        """
        if not close.process or close.others_wrote:
            return False
        left = self.left(close.process, close.ino)
        if left is Left.GONE:
            # Nothing tells which copies of one that has ended were made by chance.
            if not close.by_opener or not (close.sees_writers or close.ended):
                return False
        elif left is not Left.NONE:
            return False
        copies = self._copies(close.process, close.ino)
        if copies is Copies.NONE_SEEN:
            # Something has one, or RELEASE would have come; only where nobody can write any more
            # nothing is to be explained.
            return close.ended
        if copies is Copies.PERHAPS:
            # It does not explain why RELEASE stays away: something unseen may write.
            return close.ended and close.sees_writers
        return close.sees_writers or copies is Copies.BY_CHANCE

    def left(self, process: int, ino: Ino) -> Left:
        """What a process has of a file."""
        directory = directory_of(process, self._proc)
        if directory is None:
            return Left.UNKNOWN
        # Twice: a descriptor that is moved meanwhile to a number that was looked at already is
        # missed.
        first = self._look(directory, ino)
        return self._look(directory, ino) if first is Left.NONE else first

    def _look(self, directory: Path, ino: Ino) -> Left:
        try:
            task = _live_task(directory)
            if task is None:
                return Left.GONE
            return Left.SOME if self._has(task, ino) else Left.NONE
        except (FileNotFoundError, ProcessLookupError):
            return Left.UNKNOWN if directory.exists() else Left.GONE
        except LookupError:
            return Left.PERHAPS
        except (OSError, ValueError):
            return Left.UNKNOWN

    def _has(self, task: Path, ino: Ino) -> bool:
        """Whether a task has a descriptor of the file that can write.

        Raises:
            OSError: it cannot be told.
            LookupError: it is of a mount that this process does not see, or, before Linux 5.14, of
                any file of this mount.
        """
        key = (str(task), ino)
        known = self._numbers.pop(key, None)
        for number in (*([] if known is None else [known]), *os.listdir(task / "fdinfo")):
            facts = descriptor_facts(task, number)
            if not facts or facts.get("ino", str(ino)) != str(ino):
                continue
            if int(facts["flags"], 8) & os.O_ACCMODE == os.O_RDONLY:
                continue
            if int(facts["mnt_id"]) in mounts_without_names():  # a socket, a pipe
                continue
            mounts = {one.number: one for one in mount_table(task / "mountinfo")}
            mount = mounts[int(facts["mnt_id"])]
            if (mount.kind, mount.source) == (FILE_SYSTEM, self._source):
                if "ino" not in facts:
                    raise LookupError(number)
                if len(self._numbers) >= KNOWN_MAX:
                    self._numbers.clear()
                self._numbers[key] = number
                return True
        return False

    def has_any_but(self, processes: Collection[int], ino: Ino) -> bool:
        """Whether some process that is seen has a descriptor of the file that can write, but for
        these.
        """
        return next(self._others(processes, ino), None) is not None

    def _others(self, processes: Collection[int], ino: Ino) -> Iterator[tuple[int, Left]]:
        """Processes that have a descriptor of it, or perhaps have one."""
        for name in os.listdir(self._proc):
            if not name.isdigit() or int(name) in processes:
                continue
            left = self.left(int(name), ino)
            if left in (Left.SOME, Left.PERHAPS):
                yield int(name), left

    def _copies(self, process: int, ino: Ino) -> Copies:
        """Who else has a descriptor of the file that `process` opened."""
        own = self._stacks.start_of(self._proc / str(process))
        found = Copies.NONE_SEEN
        for other, left in self._others((process,), ino):
            if left is Left.PERHAPS:
                found = Copies.PERHAPS
            elif not own or self._stacks.start_of(self._proc / str(other)) != own:
                return Copies.PROGRAM
            elif found is not Copies.PERHAPS:
                found = Copies.BY_CHANCE
        return found


def _is_first(thread: int) -> bool:
    try:
        os.close(os.pidfd_open(thread))
    except OSError:
        return False
    return True


def _process_in(thread: Path) -> int:
    try:
        lines = (thread / "status").read_text(encoding="ascii", errors="replace").split("\n")
        return next(int(line.split()[1]) for line in lines if line.startswith("Tgid:"))
    except (OSError, ValueError, StopIteration):
        return 0


def _live_task(directory: Path) -> Path | None:
    """One that has the descriptors; the first thread of a process may have ended before the
    others.
    """
    for task in sorted((directory / "task").iterdir(), key=lambda one: one.name != directory.name):
        if not has_ended(task):
            return task
    return None
