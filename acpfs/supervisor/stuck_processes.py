"""What is left of a killed process one of whose threads is in a call that does not return: not
ended, and never to run again.

SIGKILL ends a thread when it next leaves the kernel. One that waits uninterruptibly for the backing
directory (a FUSE or NFS server that has the request and does not answer, a frozen file system)
stays, and so does the process: its pidfd does not become readable, and its descriptors and POSIX
locks stay taken. It executes no instruction of ours any more, but the call itself may still be
carried out. The supervisor's; the standard library only, no thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from acpfs.descriptors import readable
from acpfs.processes import state_of

STUCK = "remains"
"""Name under which the supervisor keeps the pidfds of such processes."""
STUCK_S = 0.25
"""A large read or write is uninterruptible for as long as its memory is copied; what takes longer
than this is not that.
"""
LOOK_AGAIN_S = 0.05
STUCK_MAX = 16
"""Each pins its descriptors and a thread's memory: with so many, the next worker waits until one of
them has ended.
"""
_SIGKILL_PENDING = 1 << 8


def thread_end(thread: int) -> int:
    """Descriptor that is readable when a thread has ended, whatever the others do; -1: it has, or
    before Linux 6.9.
    """
    try:
        return os.pidfd_open(thread, os.O_EXCL)  # PIDFD_THREAD
    except OSError:
        return -1


def number_of(pidfd: int) -> int:
    """The process of a descriptor; -1: it has ended."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1


def left_threads(pid: int) -> list[int]:
    """Those of a stuck process that are in a call."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(task.name) for task in tasks.iterdir() if state_of(task) not in "ZX"]


def has_thread(pid: int, thread: int) -> bool:
    """Whether it is in its call still."""
    return state_of(Path(f"/proc/{pid}/task/{thread}")) not in "ZX"


def is_stuck(pid: int) -> bool:
    """Whether nothing is left of a killed process but threads in uninterruptible calls."""
    try:
        if state_of(Path(f"/proc/{pid}")) not in "ZX" and not _is_killed(
            pid
        ):  # Python's main thread never ends before the process does
            return False
        states = {state_of(task) for task in Path(f"/proc/{pid}/task").iterdir()}
    except OSError:
        return False
    return "D" in states and states <= {"D", "Z", "X"}


def _is_killed(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("SigPnd:"):
            return bool(int(line.split()[1], 16) & _SIGKILL_PENDING)
    return False


def has_ended(pidfd: int) -> bool:
    """Whether the process is gone, and its calls with it."""
    return readable(pidfd, 0)


def wait_ended(pidfds: Sequence[int]) -> None:
    """Wait, without a limit, until the calls of all these have come back."""
    for pidfd in pidfds:
        readable(pidfd, None)
