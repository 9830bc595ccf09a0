"""Which process of /proc makes a call; that this cannot always be told, and then nothing may be
read. And what a task is at.

The kernel reports a caller by its number in the PID namespace of the mount. It reports 0 for one
that has no number there: the daemon runs in a container, and the caller in another one. A /proc
that was mounted in another namespace counts differently: the same number is somebody else there.
Thread-safe.

Who is in an exec keeps a lock (`exec_update_lock`) while it closes its files, and each close of a
file of this mount waits for this process. What waits for that lock, by how Linux 6.18.44 behaves:
`stat`, `environ`, `maps`, `smaps`, `auxv`, `io`, `wchan`, `stack`, `syscall`, `personality`,
`map_files`, and each of the links `exe`, `cwd`, `root`, `fd/N`, `ns/NAME`, be it only read. What
takes no lock: `status`, `statm`, `cmdline`, `comm`, `limits`, `mountinfo`, `cgroup`, `sched`,
`fdinfo/N`, and the names in `fd`, `fdinfo` and `task`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import socket
from pathlib import Path

PROC = Path("/proc")
GONE = "X"
"""The state of a task that has ended, as the kernel calls it while it ends."""
_KILL = 1 << 8
_HARMLESS = sum(1 << (number - 1) for number in (17, 18, 19, 20, 21, 22, 23, 28))
"""SIGCHLD, SIGCONT, the four that stop, SIGURG, SIGWINCH: they end nobody.

Signals of real time, from 32 on, are deadly as well.
"""


def directory_of(pid: int, proc: Path = PROC) -> Path | None:
    """Where /proc tells of a caller; None: it cannot be told which process that is.

    The directory may be hidden, or gone.
    """
    return proc / str(pid) if pid and _counts_like_us(proc, os.getpid()) else None


@functools.lru_cache(maxsize=4)
def _counts_like_us(proc: Path, own: int) -> bool:
    """Whether this /proc was mounted in the PID namespace of this process, which is the mount's."""
    try:
        return os.readlink(proc / "self") == str(own)
    except OSError:
        return False


def stat_of(task: Path) -> list[str]:
    """What /proc/PID/stat says of a process or a thread behind its name, the state first; of one
    that has ended, that alone.

    Raises:
        OSError: /proc does not show it.
    """
    try:
        text = (task / "stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return [GONE]
    return text.rpartition(")")[2].split()


def has_ended(task: Path) -> bool:
    """Whether it has, be it that nobody has heard of that yet.

    By `status`, for the sake of those that are in an exec: see `has_memory`.

    Raises:
        OSError: /proc does not show it.
    """
    return state_of(task) in ("Z", GONE)


def state_of(task: Path) -> str:
    """One letter; of one that is not there any more `GONE`."""
    try:
        text = _status_of(task)
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    return text.partition("\nState:\t")[2][:1]


def has_memory(thread: Path) -> bool:
    """Whether it has, as all have that do not end.

    To be asked before `stat_of` of who waits for an answer of this process: one that closes files
    by its exec has a lock meanwhile (`exec_update_lock`) that `stat` waits for, as `maps` and
    `environ` do. So each would wait for the other, and for both whoever lists processes. `status`
    takes no lock.

    Raises:
        OSError: it is gone, or /proc does not show it.
    """
    return "\nVmSize:" in _status_of(thread)


def _status_of(task: Path) -> str:
    return (task / "status").read_text(encoding="ascii", errors="replace")


def descriptor_facts(task: Path, number: str) -> dict[str, str]:
    """What `fdinfo` says of a descriptor; empty when it is closed already.

    Raises:
        OSError: /proc does not show it.
    """
    try:
        text = (task / "fdinfo" / number).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n"))
    return {name: value.strip() for name, _colon, value in pairs}


@functools.cache
def mounts_without_names() -> frozenset[int]:
    """Numbers of the mounts that the kernel has for itself, of what is no file of any directory:
    sockets, pipes, and so on. They are the same in every process, for as long as the machine runs.
    """
    fds = [
        os.memfd_create("acpfs"),
        *os.pipe(),
        socket.socket(socket.AF_UNIX).detach(),
        _of_no_file_system(),
    ]
    with contextlib.suppress(OSError):  # before Linux 5.3 there are none
        fds.append(os.pidfd_open(os.getpid()))
    try:
        facts = [descriptor_facts(PROC / "self", str(fd)) for fd in fds]
        return frozenset(int(one["mnt_id"]) for one in facts)
    finally:
        for fd in fds:
            os.close(fd)


def _of_no_file_system() -> int:
    with select.epoll() as made:
        return os.dup(made.fileno())


def filesystem_ids(thread: Path) -> tuple[int, int]:
    """User and group by which file systems know it (proc_pid_status(5): the last of four).

    Raises:
        OSError: it is gone, or /proc does not show it.
    """
    text = _status_of(thread)
    try:
        uid, gid = (
            int(text.partition(f"\n{field}:")[2].partition("\n")[0].split()[3])
            for field in ("Uid", "Gid")
        )
    except (IndexError, ValueError) as error:
        raise OSError(errno.ENODATA, f"{thread}/status does not tell of its user") from error
    return uid, gid


def tasks_in_calls(process: Path) -> list[Path]:
    """Threads that wait in the kernel, and do not listen to signals.

    By `status`, too: one of them may be in an exec that waits for this very mount.
    """
    return [task for task in (process / "task").iterdir() if state_of(task) == "D"]


def is_ended_by_signal(thread: Path, *, own: bool = False) -> bool:
    """Whether a signal waits for the process of a thread that ends it; `own`: or for the thread
    itself, which an exit of another one sends.

    A deadly signal reaches every thread as SIGKILL, but for one case: the only thread of a process
    sleeps, and has a signal already that it catches. Then what comes next only waits beside that
    one, and the kernel does not call it deadly before the thread runs again.

    Raises:
        OSError: it is gone, or /proc does not show it.
    """
    text = _status_of(thread)
    fields = {name: value for name, _, value in (line.partition(":") for line in text.splitlines())}
    try:
        pending, blocked, ignored, caught, sent = (
            int(fields[name], 16) for name in ("ShdPnd", "SigBlk", "SigIgn", "SigCgt", "SigPnd")
        )
    except (KeyError, ValueError) as error:
        raise OSError(errno.ENODATA, f"{thread}/status does not tell of signals") from error
    is_deadly = bool(pending & _KILL or pending & ~(blocked | ignored | caught | _HARMLESS))
    return is_deadly or (own and bool(sent & _KILL))
