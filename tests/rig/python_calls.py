"""Counts calls of Python functions: what something costs, whatever the machine does beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from acpfs.training.interrupt import forget_asynchronous


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many Python functions were called in this thread: the only element of the list."""
    calls = [0]

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        calls[0] += event == "call"

    forget_asynchronous()  # another test may have had a thread interrupted that ended before
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
