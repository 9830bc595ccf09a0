"""The process that workers are forked from: everything imported, nothing opened, no thread.

Python and the imports take most of a second, a fork a few milliseconds: that is the difference in
what applications see of a worker's death. One per code version: `acpfs-ctl reload` starts another.
Tells the supervisor the process number of each worker and how it ended, and ends with the
supervisor; workers live on.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from acpfs.supervisor import channel

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A terminal's are the supervisor's business: the template ignores them, its workers do not."""

Work = Callable[[dict[str, Any], list[int]], int]


def main() -> None:
    """Argument: the descriptor of the supervisor's channel."""
    supervisor = socket.socket(fileno=int(sys.argv[1]))
    supervisor.set_inheritable(False)
    _take_all_descriptors()
    work = import_all()
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    channel.send(supervisor, {"loaded": os.getpid()})
    _serve(supervisor, work)


def _take_all_descriptors() -> None:
    """The soft limit may be that of a time in which its supervisor could have few.

    What is sent for a worker comes to this process, and beyond its limit it would be lost.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def import_all() -> Work:
    """What a worker needs; returns what it does.

    It lives for ever, and nobody looks for garbage in it: that took a tenth of the time.
    """
    gc.disable()
    from acpfs.checkpoints import Checkpoints

    # imported by the worker when it is chosen
    from acpfs.transport.native import serve as _serve_native  # noqa: F401
    from acpfs.worker import daemon

    Checkpoints()  # its regular expressions are compiled from here on: 20 ms of each worker's start
    # with the little garbage of the imports: to find it took an eighth of the template's time, and
    # gave no page back
    gc.freeze()
    gc.enable()
    return daemon.work


def _serve(supervisor: socket.socket, work: Work) -> None:
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = select.poll()
    waiting.register(supervisor, select.POLLIN)
    waiting.register(woken, select.POLLIN)
    while True:
        ready = dict(waiting.poll())
        if woken in ready:
            os.read(woken, 4096)
            _reap(supervisor)
        if supervisor.fileno() in ready:
            message, fds = channel.receive(supervisor)
            if message is None:
                return
            signal.pthread_sigmask(
                signal.SIG_BLOCK, _ENDING
            )  # what comes before the worker ceases to ignore it is not lost: it waits
            pid = _forked(supervisor)
            if pid == 0:
                signal.set_wakeup_fd(-1)
                supervisor.close()
                os.close(woken)
                os.close(wake)
                _be_worker(work, message, fds)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            for fd in fds:
                os.close(fd)
            if pid > 0:
                channel.send(supervisor, {"pid": pid})


def _forked(supervisor: socket.socket) -> int:
    """As fork; -1 where the machine has no process or memory left: the supervisor is told so, and
    gives the order again.
    """
    try:
        return os.fork()
    except OSError as error:
        channel.send(supervisor, {"not_forked": error.strerror})
        return -1


def _reap(supervisor: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        channel.send(supervisor, {"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _be_worker(work: Work, orders: dict[str, Any], fds: list[int]) -> None:
    for number in (*_ENDING, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    code = 70
    try:
        code = work(orders, fds)
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
