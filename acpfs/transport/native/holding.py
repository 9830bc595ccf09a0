"""Holding writers of the passthrough lane: the thread that looks when to, and the processes that
take inode locks.

Implements `filesystem.hold.Holder`. Recognises the calls by which its processes take locks: a
SETATTR that changes nothing, from one of their threads. They outlive the worker: whoever keeps the
session keeps their channels too (`Keep`), and they take all locks by themselves when they do not
hear of the worker in time. `take` and `look_soon` are called under the file system's lock and only
leave a note; the rest is the thread's own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from acpfs.filesystem.admission import Net
from acpfs.filesystem.filesystem import FileSystem
from acpfs.logger import get_logger
from acpfs.ram.mounts import clone
from acpfs.runtime.threads import THREADS, Running
from acpfs.transport.native import hold_process
from acpfs.types import Ino

END_WAIT_S = 2.0
GRACE_S = 0.05
"""How much later than it said a worker may look again before it counts as gone: what writers can
write until then (a few hundred MB) goes into the slack of the tmpfs, and a machine in heavy use
does not often stop a thread for longer.
"""
TELL_AGAIN_S = 0.05
"""After a message for which a process had no room."""
BEGIN_AGAIN_S = 0.02
"""After the machine had no process left, or a look failed: a writer fills a slack in less than a
second.
"""
BEGIN_S = 1.0
"""So long after the mount, or with the first writer: until then it would keep others from a
processor.
"""
WATCHED_MAX = 4096
"""Files in one message."""

log = get_logger(__name__)

Keep = Callable[[int, Sequence[int]], None]
"""Has the descriptors of a process kept for the next worker: which process (0 or 1), and its
channel and pidfd; none: it is gone.
"""


def net() -> Net:
    """Whether what this process starts can open files by number, and is handed locks in turn, as
    the real-time task that it wants to be.
    """
    told = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    if told is None or not int(told[1], 16) >> hold_process.CAP_DAC_READ_SEARCH & 1:
        return Net.NONE
    policy = os.sched_getscheduler(0)
    priority = os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return Net.NONE
    os.sched_setscheduler(0, policy, priority)
    return Net.HOLDS


class HoldProcess:
    """One process that takes locks."""

    def __init__(
        self, channel: socket.socket, pidfd: int, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Of this worker (`child`), or of an earlier one."""
        channel.setblocking(False)
        self._channel = channel
        self.pidfd = pidfd
        self._child = child
        told = re.search(
            r"^Pid:\s*(\d+)", Path(f"/proc/self/fdinfo/{pidfd}").read_text(), re.MULTILINE
        )
        self.pid = int(told[1]) if told else 0
        self.watched: frozenset[Ino] | None = frozenset() if child is not None else None
        """What it was told to watch; None: an earlier worker told it something."""

    @classmethod
    def start(cls) -> HoldProcess:
        """A new one.

        Raises:
            OSError: the machine has no process or descriptor left.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            command = [
                sys.executable,
                "-I",
                "-S",
                os.fspath(Path(hold_process.__file__)),
                str(theirs.fileno()),
            ]
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
            undo.callback(child.wait)
            undo.callback(child.kill)
            process = cls(ours, os.pidfd_open(child.pid), child)
            undo.pop_all()
        return process

    @classmethod
    def kept(cls, fds: Sequence[int]) -> HoldProcess | None:
        """One that an earlier worker started, from copies of what was kept of it; None: it has
        ended.
        """
        copies = sorted(
            (os.dup(fd) for fd in fds), key=lambda fd: not stat.S_ISSOCK(os.fstat(fd).st_mode)
        )
        with contextlib.suppress(OSError, ValueError):
            channel, pidfd = copies
            process = cls(socket.socket(fileno=channel), pidfd)
            if not process.has_ended():
                return process
        for fd in copies:
            with contextlib.suppress(OSError):
                os.close(fd)
        return None

    def fds(self) -> list[int]:
        """For whoever keeps them."""
        return [self._channel.fileno(), self.pidfd]

    def has_ended(self) -> bool:
        """Whether it is gone, and all its threads."""
        waiting = select.poll()
        waiting.register(self.pidfd, select.POLLIN)
        return bool(waiting.poll(0))

    def tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> bool:
        """Send a message; False: not now.

        One that does not listen is not waited for, nor memory that the machine has not got.
        """
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], list(fds))
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Kill it, and let go of it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(END_WAIT_S)
        self._channel.close()
        os.close(self.pidfd)


class Holding:
    """Holds files, for one session."""

    def __init__(
        self,
        fs: FileSystem,
        kept: Sequence[Sequence[int]] = (),
        keep: Keep = lambda _number, _fds: None,
    ) -> None:
        """Starts nothing; `start` does. `kept`: descriptors of an earlier worker's processes."""
        self._fs = fs
        self._keep = keep
        self._mountpoint = os.fspath(fs.settings.mountpoint)
        self._wanted: deque[Ino] = deque()
        self._note = -1
        self._begin_at = math.inf
        """Monotonic time, seconds: when the first process is to be there although nobody writes."""
        self._stopping = False
        self._is_short = False
        """Whether the machine had no process left when one was to be started last."""
        self._fails = False
        """Whether the last look did."""
        self._processes: list[HoldProcess | None] = [None, None]
        """The one that takes locks, and, once there was something to hold, another that is ready
        to, if the first is killed.
        """
        for number, fds in enumerate(kept[:2]):
            self._processes[number] = HoldProcess.kept(fds)
        self._thread: Running | None = None

    # -- Holder

    def take(self, ino: Ino) -> None:
        """See `Holder`."""
        self._wanted.append(ino)
        self.look_soon()

    def look_soon(self) -> None:
        """See `Holder`."""
        if self._note >= 0:
            os.eventfd_write(self._note, 1)

    # -- life

    def start(self) -> None:
        """Begin to look; needs passthrough, and the mount.

        Before requests are served: who is to be held is known when his call comes.
        """
        self._note = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with self._fs.lock:
            self._fs.offer_holder(self, net())
            self._fs.tick()
        self._begin_at = time.monotonic() + BEGIN_S
        self._thread = THREADS.start("fuse-hold", self._run)

    def stop(self) -> None:
        """The session has ended."""
        with self._fs.lock:
            self._fs.offer_holder(None)
        self._stopping = True
        self.look_soon()
        if self._thread is not None:
            self._thread.end(END_WAIT_S)

    def is_ours(self, pid: int) -> bool:
        """Whether a thread belongs to a process that takes locks."""
        return pid != 0 and any(
            one is not None and os.path.exists(f"/proc/{one.pid}/task/{pid}")
            for one in self._processes
        )

    # -- the thread

    def _run(self) -> None:
        wait_s: float = math.inf
        while not self._stopping:
            self._wait(min(wait_s, max(0.0, self._begin_at - time.monotonic())))
            wait_s = self._look_again()
        for number in range(len(self._processes)):
            self._lose(number)
        note = self._note
        self._note = -1
        os.close(note)

    def _wait(self, wait_s: float) -> None:
        """Until it is time, somebody left a note, or a process has ended."""
        waiting = select.poll()
        for fd in (self._note, *(one.pidfd for one in self._processes if one is not None)):
            waiting.register(fd, select.POLLIN)
        waiting.poll(None if math.isinf(wait_s) else math.ceil(wait_s * 1000))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._note)

    def _look_again(self) -> float:
        """`_look`; where that fails, writers are held by nobody until it does not."""
        try:
            wait_s = self._look()
        except Exception:
            if not self._fails:
                log.exception("looking after passthrough writers failed; is tried again")
            self._fails = True
            with contextlib.suppress(OSError), self._fs.lock:
                self._fs.holder_lost()
            return BEGIN_AGAIN_S
        self._fails = False
        return wait_s

    def _look(self) -> float:
        with self._fs.lock:
            wait_s = self._fs.tick()
            watched = frozenset(self._fs.watched_writers()[:WATCHED_MAX])
            ended = [
                number
                for number, process in enumerate(self._processes)
                if process is not None and process.has_ended()
            ]
            if ended:
                self._fs.holder_lost()
                self._wanted.extend(self._fs.held_files())
        for number in ended:
            log.warning("a process that takes inode locks has ended; another one takes its place")
            self._lose(number)
        if self._processes[0] is None and self._processes[1] is not None:
            self._become_first()
        is_due = time.monotonic() >= self._begin_at
        if is_due:
            self._begin_at = math.inf  # tried once; what ends later is needed with a writer
        # Before the first writer: it takes 50 ms, in which one fills 300 MiB, and more on a crowded
        # machine.
        if self._processes[0] is None and (watched or is_due) and not self._begin(0):
            again_s = BEGIN_AGAIN_S if watched else BEGIN_S
            self._begin_at = time.monotonic() + again_s
            wait_s = min(wait_s, again_s)
            with self._fs.lock:
                self._fs.holder_lost()
        within_s = None if math.isinf(wait_s) else wait_s + GRACE_S
        for number, process in enumerate(self._processes):
            if process is not None and not self._tell_watched(
                process, watched, within_s if number == 0 else None
            ):
                wait_s = min(wait_s, TELL_AGAIN_S)
        if self._wanted and not self._tell_wanted(watched):
            wait_s = min(wait_s, TELL_AGAIN_S)
        return wait_s

    def _tell_wanted(self, watched: frozenset[Ino]) -> bool:
        """Whether it had room for all of them.

        One that is not told stays wanted: its writer would fill what is left of RAM.
        """
        while self._wanted and (process := self._processes[0]) is not None:
            # It cannot take what it has not been told to watch.
            if process.watched != watched or not process.tell({"take": self._wanted[0]}):
                return False
            self._wanted.popleft()
        if self._processes[0] is not None and self._processes[1] is None:
            self._begin(1)  # afterwards: it takes a while
        return not self._wanted

    def _tell_watched(
        self, process: HoldProcess, watched: frozenset[Ino], within_s: float | None
    ) -> bool:
        """Whether it had room for the message.

        One that is never told that nothing is left to watch would keep its copy of the mount, and
        with that the session, beyond the unmounting.
        """
        message: dict[str, Any] = {"within_s": within_s}
        if process.watched == watched:
            return process.tell(message)
        message["watch"] = sorted(watched)
        trees = []
        if watched and not process.watched:
            with contextlib.suppress(
                OSError
            ):  # the mount was taken away: the process says what that means
                trees = [clone(self._mountpoint)]
        try:
            if not process.tell(message, trees):
                return False
            process.watched = watched
            return True
        finally:
            for tree in trees:
                os.close(tree)

    def _begin(self, number: int) -> bool:
        """Start a process; False: the machine has none left, and it is tried again."""
        try:
            process = HoldProcess.start()
        except (OSError, MemoryError, subprocess.SubprocessError) as error:
            if not self._is_short:
                log.warning(
                    "no process can be started to take inode locks; will be tried again",
                    error=str(error),
                )
            self._is_short = True
            return False
        self._is_short = False
        self._processes[number] = process
        self._keep(number, process.fds())
        return True

    def _become_first(self) -> None:
        """The other one is gone."""
        process = self._processes[1]
        assert process is not None
        self._processes[:] = [process, None]
        self._keep(0, process.fds())
        self._keep(1, [])

    def _lose(self, number: int) -> None:
        process = self._processes[number]
        self._processes[number] = None
        if process is not None:
            self._keep(number, [])
            process.end()
