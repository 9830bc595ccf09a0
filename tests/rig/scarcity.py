"""A machine that has no thread left, as this process sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

STACK_BYTES = 1 << 46


@contextmanager
def no_thread_left() -> Iterator[None]:
    """No stack of a new thread finds room: the C library says EAGAIN, as in a full control group, and Python what it makes of that."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
