"""Copies that nobody needs any more, in whatever thread that is found out: they go together, in one
thread, as a call costs more than a name.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from acpfs.backing.calls import CallPool
from acpfs.writeback.copies.copy_place import CopyPlace


class Removals:
    """At one place."""

    def __init__(self, place: CopyPlace, calls: CallPool) -> None:
        self._place = place
        self._calls = calls
        self._lock = threading.Lock()  # held for a list's append, never over a call
        self._names: list[str] = []
        self._is_removing = False

    def add(self, name: str) -> None:
        """It goes soon; what a place fails to remove goes when it is looked at next."""
        with self._lock:
            self._names.append(name)
            if self._is_removing:
                return
            self._is_removing = True
        self._calls.submit("remove", self._remove).add_done_callback(self._ended)

    def _remove(self) -> None:
        self._place.gather()
        while names := self._taken():
            self._place.remove(names)

    def _taken(self) -> list[str]:
        """All so far; after the last ones whoever comes next begins anew."""
        with self._lock:
            names = self._names
            self._names = []
            self._is_removing = bool(names)
            return names

    def _ended(self, done: Future[None]) -> None:
        if done.exception() is not None:  # refused, too: the names go with the next one
            with self._lock:
                self._is_removing = False
