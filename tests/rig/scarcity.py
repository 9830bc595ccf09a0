"""A machine that has no thread left, as this process sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_thread_left() -> Iterator[Callable[[], None]]:
    """Until the function that this gives is called, at the latest.

    Python says of each new thread what it says where the C library answers EAGAIN.
    A double: up to 3.12 Python keeps the state of a thread that the C library refused, with the
    number of the thread that was to start it, and an exception for that one goes there. Other tests
    of this process would never get theirs. Processes of their own meet the real thing in a full
    control group (`tests/supervisor/test_scarcity.py`).
    """

    def refuse(*_arguments: Any, **_more: Any) -> None:
        raise RuntimeError("can't start new thread")

    names = [
        name for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name)
    ]
    before = {name: getattr(threading, name) for name in names}
    for name in names:
        setattr(threading, name, refuse)

    def there_are_some() -> None:
        for name, start in before.items():
            setattr(threading, name, start)

    try:
        yield there_are_some
    finally:
        there_are_some()
