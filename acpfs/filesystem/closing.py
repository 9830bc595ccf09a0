"""How a descriptor came to be closed: by its program, by the end of its process, or because that
was killed.

The kernel closes what a process has open when that ends, from one of its threads, and says so no
more than it says why. What /proc/PID/stat and status tell everybody is enough for nearly all: the
kernel marks a thread that ends, and one that is ended by a signal. But the threads of a process of
several are ended by a signal too when one of them calls exit; so it takes one more thing that only
a killed process has: a deadly signal that waits for the whole process, or a core dump. A program
that closes by its exec has not ended, and its `stat` is not to be read: see `has_memory`. (Exit
codes would say it, but take CAP_SYS_PTRACE.) Where it cannot be told, it counts as no kill: a
signal to one thread only (cgroup.kill, a crash of a thread other than the first), a process of
another PID namespace, a /proc with hidepid. Knows /proc and nothing else; thread-safe.
"""

from __future__ import annotations

import enum
from pathlib import Path

from acpfs.processes import GONE, PROC, directory_of, has_memory, is_ended_by_signal, stat_of

_EXITING = 0x4
_DUMPED_CORE = 0x200
_SIGNALED = 0x400
"""Flags of a thread (PF_EXITING, PF_DUMPCORE, PF_SIGNALED); their values are older than this
century.
"""
_ENDED = ("Z", GONE)


class Closing(enum.Enum):
    """Who closed a descriptor."""

    CALL = "call"
    """The program, with close(2) or the like; or it cannot be told."""
    END = "end"
    """Nobody: its process ended, by itself as far as can be told."""
    KILL = "kill"
    """Nobody: its process was killed."""


def closing_of(pid: int, proc: Path = PROC) -> Closing:
    """How the thread `pid`, whose close is not answered yet, comes to close; `pid` 0: not known.

    Where it is not told which thread of a process closes, `pid` is that of the process, which is
    its first thread's.
    """
    thread = directory_of(pid, proc)
    try:
        return Closing.CALL if thread is None else _closing_of(thread)
    except (OSError, ValueError, IndexError, KeyError):
        return Closing.CALL


def _closing_of(thread: Path) -> Closing:
    if has_memory(thread):
        return (
            Closing.CALL
        )  # by far the most: one file of /proc, however many threads the process has
    state, flags = _state_and_flags(thread)
    if not flags & _EXITING:
        return Closing.CALL
    directories = list((thread / "task").iterdir())
    has_ended = state in _ENDED
    if has_ended and any(_is_alive(task) for task in directories):
        return Closing.CALL  # its first thread has ended alone
    tasks = {task: _state_and_flags(task) for task in directories}
    closers = [task for task, (now, _flags) in tasks.items() if now not in _ENDED]
    if not closers:
        return Closing.CALL  # it has closed what it had already, and somebody else has a copy
    has_dumped = any(others & _DUMPED_CORE for _now, others in tasks.values())
    # A first thread that has ended is not the one that closes, and did so perhaps long before.
    for task in closers if has_ended else [thread]:
        if tasks.get(task, (state, flags))[1] & _SIGNALED and (has_dumped or _is_killed(task)):
            return Closing.KILL
    return Closing.END


def _is_alive(task: Path) -> bool:
    """Whether a thread goes on; one of several may be gone meanwhile."""
    try:
        return has_memory(task)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _is_killed(task: Path) -> bool:
    """Whether a deadly signal waits for its process."""
    try:
        return is_ended_by_signal(task)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _state_and_flags(task: Path) -> tuple[str, int]:
    fields = stat_of(task)
    return (GONE, 0) if fields == [GONE] else (fields[0], int(fields[6]))
