"""Other processes and other users for tests: run a function in a forked child, perhaps as somebody
else; have processes stand still.

The parent gets what the function returned or raised.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from acpfs.descriptors import readable
from acpfs.processes import PROC

T = TypeVar("T")
CHILD_TIMEOUT_S = 240.0
LOOK_AGAIN_S = 0.005
GO_ON = {"R", "S"}
"""States of threads that a stop has not reached."""
NOBODY = 65534
SOMEBODY = 12345
"""Users without privilege; SOMEBODY has no entry in any user database, which a file system must not
care about.
"""


def stop_processes(pids: Iterable[int]) -> None:
    """SIGSTOP, and wait until they stand still; one that has ended does not matter.

    The kernel has one thread of a process stop the others, and where a machine is busy that one
    gets no processor for a second. Until then the others go on: a worker answered what was to hang.
    Who is in a call that no signal ends (D) stops behind it, and answers nobody before.

    Raises:
        TimeoutError: one of them does not.
    """
    told = list(pids)
    for pid in told:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + CHILD_TIMEOUT_S
    while going := [pid for pid in told if GO_ON & set(_states_of(pid))]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {going} do not stop")
        threading.Event().wait(LOOK_AGAIN_S)


def _states_of(pid: int) -> Iterator[str]:
    """One letter for each thread."""
    for stat in PROC.glob(f"{pid}/task/*/stat"):
        with contextlib.suppress(OSError):
            yield stat.read_text(errors="replace").rpartition(")")[2].split()[0]


class Child:
    """A function running in a forked process; `result()` waits for it."""

    def __init__(
        self, function: Callable[[], Any], uid: int = 0, gid: int = 0, groups: tuple[int, ...] = ()
    ) -> None:
        read_fd, write_fd = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # 3.12 warns of fork beside threads; the child does little and execs nothing
            self.pid = os.fork()
        if self.pid == 0:
            os.close(read_fd)
            _run(function, write_fd, uid, gid, groups)
        os.close(write_fd)
        self._fd = read_fd

    def running(self, for_s: float = 0.2) -> bool:
        """Whether it still runs after `for_s`; for checks that something blocks."""
        return not readable(self._fd, for_s)

    def kill(self) -> None:
        """End it now, whatever it does."""
        os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)
        os.waitpid(self.pid, 0)

    def result(self, timeout_s: float = CHILD_TIMEOUT_S) -> Any:
        """What the function returned, or raise what it raised."""
        data = b""
        try:
            while readable(self._fd, timeout_s):
                chunk = os.read(self._fd, 1 << 20)
                if not chunk:
                    break
                data += chunk
            else:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"the child did not end within {timeout_s} s")
        finally:
            os.close(self._fd)
            os.waitpid(self.pid, 0)
        if not data:
            raise RuntimeError("the child died")
        good, value = pickle.loads(data)
        if good:
            return value
        raise value


def sleeps(thread: threading.Thread) -> bool:
    """Whether it waits in the kernel.

    One that waits for a processor does not, however long the machine lets it.
    """
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(
        encoding="ascii", errors="replace"
    )
    return stat.rpartition(")")[2].split()[0] == "S"


def _run(
    function: Callable[[], Any], write_fd: int, uid: int, gid: int, groups: tuple[int, ...]
) -> None:
    try:
        if uid or gid:
            os.setgroups(list(groups))
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        answer = (True, function())
    except BaseException as error:  # noqa: BLE001 — whatever it was, the parent is to hear of it
        answer = (
            False,
            OSError(error.errno, error.strerror)
            if isinstance(error, OSError)
            else RuntimeError(repr(error)),
        )
    try:
        with os.fdopen(write_fd, "wb") as stream:
            pickle.dump(answer, stream)
    finally:
        os._exit(0)


def in_child(
    function: Callable[[], T], uid: int = 0, gid: int = 0, groups: tuple[int, ...] = ()
) -> T:
    """Run a function in a child and return what it returned."""
    value: T = Child(function, uid, gid, groups).result()
    return value


def errno_as(
    uid: int, function: Callable[[], object], gid: int | None = None, groups: tuple[int, ...] = ()
) -> int:
    """errno that a function ends with when somebody else calls it; 0 for success."""
    try:
        in_child(function, uid, uid if gid is None else gid, groups)
    except OSError as error:
        return error.errno or -1
    return 0
