"""A disk that takes no more of the mirror's journal from some batch on, while nobody notices; for
tests that lose RAM then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from acpfs.ram.state import Statement
from acpfs.writeback.copies.journal_place import Journal
from acpfs.writeback.sources.mirror import Mirror
from tests.filesystem.test_spilling import spilling
from tests.filesystem.world import World

Batch = list[list[Statement]]


class StuckJournal:
    """What the tests know of it."""

    def __init__(self, sticks: Callable[[Batch], bool]) -> None:
        """`sticks`: whether the disk takes nothing from this batch on; asked after `begin`."""
        self.is_stuck = threading.Event()
        self._begun = threading.Event()
        self._over = threading.Event()
        self._sticks = sticks
        self._awaited: Callable[[], bool] | None = None

    def begin(self, made: World) -> None:
        """From now on it may stick.

        A commit thread that goes on after its process has died would spoil what the next one does.
        """
        mirror = spilling(made).spill.mirror
        assert mirror is not None
        mirror._outage.wait_s = 600.0
        self._begun.set()

    def is_waited_for(self) -> bool:
        """Whether the drain waits for what the disk does not take: whoever waits for less goes on
        by and by.
        """
        awaited = self._awaited
        return self.is_stuck.is_set() and awaited is not None and not awaited()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For the worlds that are made inside; their threads stay until `end`."""
        apply = Mirror._apply
        wait = Mirror._wait

        def stick(journal: Journal, batch: Batch) -> None:
            if self._begun.is_set() and (self.is_stuck.is_set() or self._sticks(batch)):
                self.is_stuck.set()
                self._over.wait(60)
                raise OSError(5, "it is over")
            apply(journal, batch)

        def noted(mirror: Mirror, token: str, condition: Callable[[], bool]) -> bool:
            self._awaited = condition
            try:
                return wait(mirror, token, condition)
            finally:
                self._awaited = None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mirror, "_apply", staticmethod(stick))
            patch.setattr(Mirror, "_wait", noted)
            patch.setattr(Mirror, "close", lambda _self, *, nothing_left: None)
            yield

    def end(self) -> None:
        """The threads of the worlds may go."""
        self._over.set()
