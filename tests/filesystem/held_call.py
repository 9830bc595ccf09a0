"""A call that stands still in the middle of others' business until the test lets it go on."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any


class HeldCall:
    """Stands in for a function: says that it was called, and calls that when it may."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.began = Event()
        self.go_on = Event()

    def __call__(self, *args: Any) -> Any:
        self.began.set()
        assert self.go_on.wait(60)
        return self._call(*args)
