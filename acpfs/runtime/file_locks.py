"""A lock that dies with its process: who comes second waits for it, or hears that it is taken, and
by whom.

Between processes and between threads alike. Only for files on a local file system, which never
hang.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

AGAIN_S = 0.1
"""Between two tries, where there is a deadline: flock has none."""
_OWNER_BYTES = 200
_OWNER = re.compile(rb"process [0-9]+ on [A-Za-z0-9._-]+")


@contextlib.contextmanager
def locked(file: Path, *, may_wait: bool) -> Iterator[bool]:
    """Whether it is had; always, with `may_wait`. The file is made, and stays.

    Raises:
        OSError: the directory's.
    """
    with _opened(file) as fd:
        is_had = _taken(fd)
        if not is_had and may_wait:
            fcntl.flock(fd, fcntl.LOCK_EX)
            is_had = True
            _sign(fd)
        yield is_had


@contextlib.contextmanager
def locked_until(file: Path, deadline: float, tell_taken: Callable[[str], None]) -> Iterator[bool]:
    """Whether it is had before a moment of the monotonic clock; inf: whenever that is.

    `tell_taken`: called once, where somebody has it, with "process 7 on n1", or "" where that is
    not known: it had it a moment ago, or is about to say so.

    Raises:
        OSError: the directory's.
    """
    with _opened(file) as fd:
        is_had = _taken(fd)
        if not is_had:
            tell_taken(_owner(fd))
        while not is_had and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(AGAIN_S, left_s))
            is_had = _taken(fd)
        yield is_had


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    _sign(fd)
    return True


def _sign(fd: int) -> None:
    """For whoever comes second; a file system without room only costs that."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _owner(fd: int) -> str:
    found = _OWNER.match(os.pread(fd, _OWNER_BYTES, 0))
    return "" if found is None else found[0].decode()
