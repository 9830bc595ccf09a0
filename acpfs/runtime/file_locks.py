"""A lock that dies with its process: who comes second waits for it, or hears that it is taken.

Between processes and between threads alike. Only for files on a local file system, which never
hang.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(file: Path, *, may_wait: bool) -> Iterator[bool]:
    """Whether it is had; always, with `may_wait`. The file is made, and stays.

    Raises:
        OSError: the directory's.
    """
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        is_had = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if may_wait else fcntl.LOCK_NB))
        except BlockingIOError:
            is_had = False
        yield is_had
    finally:
        os.close(fd)
