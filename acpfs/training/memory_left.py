"""What a rank that has to end leaves to the process that takes its place: its memory, kept by a
child that it forks. No torch.

The child has the rank's memory without a copy of it, since it was forked, and touches nothing but
what it gives away. It listens at a name that only a process of the same user, network namespace,
job and rank asks for, and ends when it is told that all was taken, when the launcher has ended, or
after `KEPT_S`. Where memory is short it is the first that the kernel kills: what it has is lost
then, and no more.

`leave` may be called from any thread, and the process ends soon after it, whatever hangs meanwhile.
In the child no library of the rank's is called: another thread may have held its locks when it was
forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import hashlib
import os
import select
import signal
import socket
import struct
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from acpfs.errors import AcpfsError
from acpfs.logger import get_logger

log = get_logger(__name__)
KEPT_S = 900.0
"""As long as a job waits for a process in a dead one's place (`replace_s`)."""
END_S = 20.0
"""A rank that cannot leave anything in so long ends without."""
READY_S = 10.0
ANSWER_S = 60.0
LOOK_AGAIN_S = 0.05
_NUMBER = struct.Struct("<Q")
_TAKEN = 2**64 - 1
"""In place of a span's number: nothing more is wanted, ever."""
_PEER = struct.Struct("3i")
PR_SET_NAME = 15


class GoneError(AcpfsError):
    """Who kept a rank's memory has ended."""


@dataclass(frozen=True, slots=True)
class Span:
    """So many bytes of this process."""

    address: int
    size: int


def name_of(directory: Path, job: str, rank: int) -> str:
    """Where a rank's successor asks.

    The directory is no path here: a storage that hangs is not touched.
    """
    whose = f"{os.path.abspath(directory)}\0{job}\0{rank}"  # of its text alone
    return f"acpfs-left-{os.getuid()}-{hashlib.sha256(os.fsencode(whose)).hexdigest()}"


def end_soon() -> None:
    """From here on this process ends within `END_S`, also where something holds the interpreter."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback_later(END_S, exit=True, file=2)


def leave(name: str, head: bytes, spans: Sequence[Span]) -> int:
    """Fork who keeps these bytes; its pid. It can be asked when this returns.

    Raises:
        OSError: there is no memory for another process, or the name is taken and stays so.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        _take_name(listening, name)
        listening.listen(8)
        ready, says = os.pipe()
        launcher = os.pidfd_open(os.getppid())
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of forking with threads: this child makes system calls only
            pid = os.fork()
        if pid == 0:
            try:
                _keep(listening, launcher, says, head, spans)
            finally:
                os._exit(0)
        os.close(says)
        os.close(launcher)
        try:
            waiting = select.poll()
            waiting.register(ready, select.POLLIN)
            if not waiting.poll(READY_S * 1000) or not os.read(ready, 1):
                os.kill(
                    pid, signal.SIGKILL
                )  # else it has memory and name for a quarter of an hour beside the next process
                raise OSError("the process that was to keep this one's memory does not answer")
        finally:
            os.close(ready)
    return pid


def _take_name(listening: socket.socket, name: str) -> None:
    """Whoever keeps something there for an earlier process of this rank may end: this one has a
    state of its own.
    """
    deadline = time.monotonic() + READY_S
    while True:
        try:
            listening.bind("\0" + name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        else:
            return
        if (before := Left.ask(name, READY_S)) is not None:
            before.taken()
        time.sleep(LOOK_AGAIN_S)


def _keep(
    listening: socket.socket, launcher: int, says: int, head: bytes, spans: Sequence[Span]
) -> None:
    """In the child."""
    os.setsid()  # who cleans up behind the rank kills its process group
    signal.set_wakeup_fd(-1)
    for one in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGALRM,
        signal.SIGCHLD,
    ):
        signal.signal(one, signal.SIG_DFL)
    os.chdir("/")
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - {
        listening.fileno(),
        launcher,
        says,
    }:
        with contextlib.suppress(OSError):  # the listing's own
            os.close(number)
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"acpfs-left", 0, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as score:
        score.write(b"1000")
    os.write(says, b"+")
    os.close(says)
    Keeper(listening, launcher, head, spans).run(time.monotonic() + KEPT_S)
    # the kernel frees a process's memory before it closes its files: the name would be taken
    # meanwhile
    listening.close()


class Keeper:
    """Gives bytes of its process away, to one process after the other, until one says that it has
    all that it wants.
    """

    def __init__(
        self, listening: socket.socket, launcher: int, head: bytes, spans: Sequence[Span]
    ) -> None:
        """`launcher`: a descriptor that is readable when nobody is left who starts a process for
        the rank.
        """
        self._listening = listening
        self._launcher = launcher
        self._head = head
        self._spans = spans

    def run(self, deadline: float) -> None:
        while self._readable(self._listening, deadline):
            with (
                contextlib.suppress(OSError),
                self._listening.accept()[0] as asking,
            ):  # whoever asked may have died: another one comes
                asking.settimeout(ANSWER_S)
                if peer_of(asking) == os.getuid() and self._serve(asking, deadline):
                    return

    def _readable(self, one: socket.socket, deadline: float) -> bool:
        """Waits for it; False: it is time to end."""
        waiting = select.poll()
        waiting.register(one, select.POLLIN)
        waiting.register(self._launcher, select.POLLIN)
        ready = {
            descriptor
            for descriptor, _ in waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)
        }
        return one.fileno() in ready and self._launcher not in ready

    def _serve(self, asking: socket.socket, deadline: float) -> bool:
        """Whether nothing more is wanted, ever."""
        asking.sendall(_NUMBER.pack(len(self._head)) + self._head)
        while self._readable(asking, deadline):
            wanted = asking.recv(_NUMBER.size, socket.MSG_WAITALL)
            if len(wanted) < _NUMBER.size:
                return False
            (number,) = _NUMBER.unpack(wanted)
            if number == _TAKEN:
                return True
            span = self._spans[number]
            asking.sendall((ctypes.c_char * span.size).from_address(span.address))
        return True


def peer_of(connected: socket.socket) -> int:
    """The user at the other end."""
    return int(
        _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
    )


class Left:
    """What the process before this one has left. One thread."""

    def __init__(self, asking: socket.socket, head: bytes) -> None:
        self._asking = asking
        self.head = head

    @classmethod
    def ask(cls, name: str, timeout_s: float = ANSWER_S) -> Left | None:
        """Whether there is anything."""
        asking = socket.socket(socket.AF_UNIX)
        try:
            asking.settimeout(timeout_s)
            asking.connect("\0" + name)
            if peer_of(asking) != os.getuid():
                raise PermissionError("another user's")
            head = bytearray(_NUMBER.unpack(_received(asking, bytearray(_NUMBER.size)))[0])
            return cls(asking, bytes(_received(asking, head)))
        except ConnectionRefusedError:
            asking.close()
            return None
        except OSError as error:
            log.warning("what the process before this one has left cannot be had", error=str(error))
            asking.close()
            return None
        except BaseException:  # `Interrupted`: it is asked again, and one is answered at a time
            asking.close()
            raise

    def read(self, number: int, into: memoryview) -> None:
        """A span's bytes.

        Raises:
            GoneError: nobody has them any more.
        """
        try:
            self._asking.sendall(_NUMBER.pack(number))
            _received(self._asking, into)
        except OSError as error:
            raise GoneError(
                f"what the process before this one has left is gone: {error}"
            ) from error

    def taken(self) -> None:
        """Nothing more is wanted: who keeps it may end."""
        with contextlib.suppress(OSError):
            self._asking.sendall(_NUMBER.pack(_TAKEN))
        self.close()

    def close(self) -> None:
        """It stays where it is, for the next process."""
        self._asking.close()


def _received(asking: socket.socket, into: bytearray | memoryview) -> bytearray | memoryview:
    view = memoryview(into)
    while view:
        count = asking.recv_into(view)
        if not count:
            raise ConnectionError("the process that keeps it has ended")
        view = view[count:]
    return into
