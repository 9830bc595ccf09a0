"""Threads that nobody needs for a while: a call that the storage may hold up is made there, where
its caller is.

A write of 4 KiB to a staging file takes some microseconds. Handed to a thread of a pool, with its
answer to another one, it took 570 us of processor time: each of them has to be woken, and to wait
for the interpreter (four writers of 4 KiB: 5 instead of 24 MB/s).

Owns which thread is one, which only that thread asks. Does not know what is called, nor how many
may be held up at a time: whoever gives a thread away is asked before each call, and sees to it that
others are left. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Seat(Protocol):
    """A thread's place where it came from."""

    def hold(self) -> bool:
        """Whether the storage may hold it up now, perhaps for ever; from here on it counts as held
        up.
        """

    def go_on(self) -> None:
        """It is not, or no more."""


class _Here(threading.local):
    seat: Seat | None = None


class SpareThreads:
    """Knows of the calling thread whether it is one."""

    def __init__(self) -> None:
        self._here = _Here()

    def take(self, seat: Seat) -> None:
        """The calling thread is one, until `leave`."""
        self._here.seat = seat

    def leave(self) -> None:
        """It is needed again; also where `call` did not come to be."""
        seat = self._here.seat
        self._here.seat = None
        if seat is not None:
            seat.go_on()

    def hold(self) -> bool:
        """Whether the calling thread is one, and may be held up now: then by `call`, which is
        next.
        """
        seat = self._here.seat
        return seat is not None and seat.hold()

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Do what the storage may hold up, without any lock; after `hold`."""
        seat = self._here.seat
        assert seat is not None
        try:
            return function(*arguments)
        finally:
            seat.go_on()
