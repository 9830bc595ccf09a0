"""Who holds a lock file of this machine: a mount that lives, or what is left of one that was
killed.

A killed process one of whose threads waits uninterruptibly for the storage does not end, and keeps
its descriptors and so its locks. Whoever wants such a lock is told of that: nothing can be done
here until that call returns. Reads /proc and nothing else; knows nothing of mounts. Needs no lock,
and waits for nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from acpfs.processes import PROC, descriptor_facts, has_ended, tasks_in_calls

_KILL_PENDING = 1 << 8
_LAST_RAN_MS = re.compile(r"^se\.exec_start\s*:\s*([0-9.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A process that has the file open."""

    pid: int
    hangs: bool
    """Whether it was killed, and is still in a call that does not come back."""
    since: float | None
    """Seconds since the epoch: when that thread last ran; None: it does not hang, or the kernel
    does not say.
    """


def holders(fd: int, helpers: Container[str]) -> list[LockHolder]:
    """Other processes that have the file of a descriptor open, those that hang first.

    Those of other users are seen by root alone. `helpers`: file names of programs that are left
    out: they have it from the process that they help, and end with that one.
    """
    facts = descriptor_facts(PROC / "self", str(fd))
    if "ino" in facts:
        wanted = (facts["mnt_id"], facts["ino"])
        has_open = _has_descriptor
    else:
        wanted = ("", os.readlink(f"/proc/self/fd/{fd}"))
        has_open = _has_link
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    found = [
        _holder(pid)
        for pid in pids
        if pid != os.getpid() and has_open(pid, wanted) and not _runs(pid, helpers)
    ]
    return sorted(found, key=lambda holder: not holder.hangs)


def _has_descriptor(pid: int, wanted: tuple[str, str]) -> bool:
    """By what the kernel says of its descriptors: to ask after the file could hang as the storage
    does, and who is in an exec keeps the links locked.
    """
    process = PROC / str(pid)
    with contextlib.suppress(OSError):
        for name in os.listdir(process / "fdinfo"):
            with contextlib.suppress(OSError):
                facts = descriptor_facts(process, name)
                if (facts.get("mnt_id"), facts.get("ino")) == wanted:
                    return True
    return False


def _has_link(pid: int, wanted: tuple[str, str]) -> bool:
    """Before Linux 5.14, where that does not say which file it is."""
    fds = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(fds):
            with contextlib.suppress(OSError):
                if os.readlink(f"{fds}/{name}") == wanted[1]:
                    return True
    return False


def _runs(pid: int, programs: Container[str]) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return any(os.path.basename(os.fsdecode(word)) in programs for word in words)
    return False


def _holder(pid: int) -> LockHolder:
    with contextlib.suppress(OSError):
        if _is_killed(pid):
            waiting = tasks_in_calls(PROC / str(pid))
            since = [at for task in waiting if (at := _last_ran_at(task)) is not None]
            return LockHolder(pid, bool(waiting), min(since, default=None))
    return LockHolder(pid, False, None)


def _is_killed(pid: int) -> bool:
    """Its main thread has ended, or is to; Python's never ends before the process does."""
    if has_ended(PROC / str(pid)):
        return True
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(signals & _KILL_PENDING for signals in pending)


def _last_ran_at(task: Path) -> float | None:
    """By the scheduler's clock, which runs since the machine was started, as the monotonic one
    does.
    """
    with contextlib.suppress(OSError):
        found = _LAST_RAN_MS.search((task / "sched").read_text(errors="replace"))
        if found is not None:
            return time.time() - max(0.0, time.monotonic() - float(found[1]) / 1000)
    return None
