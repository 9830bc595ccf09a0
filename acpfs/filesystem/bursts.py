"""Many questions about the names of one directory, one after the other: then one call asks about
many names.

A question is an lstat in a thread of the pool, which costs 200 us of the interpreter and more where
the drain wants it, too: most of that goes for waking threads. Where names are new, a listing
answers for all that are not there. Where they are known, and what is known of them is too old, the
next ones are asked about with the first, as a kernel reads ahead: a program that looks at each
file, or removes each, goes by name (what a listing shows) or by number (what `rm -r` and `fts` make
of it). Used under the file system's lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from acpfs.filesystem.nodes import Node
from acpfs.runtime.clock import Clock
from acpfs.types import Ino

MISSES_MAX = 16
"""After so many questions about names of one directory within `attr_timeout_s` one call is to ask
for more.
"""
LISTING_ENTRIES_MAX = 10_000
LISTING_BYTES_MAX = 512 << 10
"""Larger directories (by st_size, where nobody has listed them yet) are not listed for that: 10,000
entries take 10 ms on a local disk.
"""
AHEAD_MIN = 16
AHEAD_MAX = 256
"""How many names one call asks about: more each time, as long as it is the next ones that are
wanted.
"""
AHEAD_S = 0.05
"""A call that took longer was about too many."""
SKIPPED_MAX = 16
"""Who leaves out so many names still goes by that order."""
RUNS_MAX = 4


@dataclass(slots=True)
class _Order:
    """Names of a directory in some order, with what they are sorted by."""

    keys: Sequence[Any]
    names: list[bytes]
    expected: int = -1
    """Where the next question is, if it goes on like that."""

    def place(self, key: Any) -> int:
        """Of a name; -1: it came later."""
        at = bisect_left(self.keys, key)
        return at if at < len(self.keys) and self.keys[at] == key else -1


@dataclass(slots=True)
class _Run:
    """What is asked about a directory."""

    orders: list[_Order]
    made_at: float
    """Monotonic, seconds; so is the next."""
    used_at: float
    ahead: int = AHEAD_MIN


class Bursts:
    """Counts questions, and says when to ask for more than is wanted."""

    def __init__(self, keeps_s: float, clock: Clock) -> None:
        """`keeps_s`: for how long an answer is good."""
        self._now = clock.now
        self._keeps_s = keeps_s
        self._runs: OrderedDict[Ino, _Run] = OrderedDict()

    def _has_many(self, parent: Node, now: float) -> bool:
        directory = parent.dir
        if now - directory.misses_since > self._keeps_s:
            directory.misses_since = now
            directory.misses = 0
        directory.misses += 1
        return directory.misses > MISSES_MAX

    def is_worth_listing(self, parent: Node) -> bool:
        """Whether so many new names are looked up that one listing saves many questions."""
        directory = parent.dir
        return (
            self._has_many(parent, self._now())
            and directory.listing_s < self._keeps_s / 10
            and (
                len(directory.listing) < LISTING_ENTRIES_MAX
                if directory.listed_at >= 0
                else parent.size < LISTING_BYTES_MAX
            )
        )

    def following(self, parent: Node, name: bytes) -> list[bytes]:
        """A known name whose time is up, and others that are likely to be asked about next and
        whose time is up, too; []: just that one.
        """
        now = self._now()
        run = self._runs.get(parent.ino)
        if run is None or now - run.used_at > 2 * self._keeps_s:
            self._runs.pop(parent.ino, None)
            if not self._has_many(parent, now):
                return []
            run = self._begin(parent, now)
        run.used_at = now
        keys: tuple[Any, ...] = (name, parent.dir.children[name].ino)
        places = [order.place(key) for order, key in zip(run.orders, keys, strict=True)]
        if max(places) < 0 and now - run.made_at > self._keeps_s:
            del self._runs[parent.ino]  # it has other names by now
            return []
        found: list[bytes] = []
        for order, at in zip(run.orders, places, strict=True):
            goes_on = 0 <= order.expected <= at <= order.expected + SKIPPED_MAX
            order.expected = at + 1 if at >= 0 else -1
            if goes_on and not found:
                end = min(at + 2 * run.ahead, len(order.names))
                while (
                    end > at + 1
                    and len(found := self._outdated(parent, order.names[at:end], now)) > run.ahead
                ):
                    end -= len(found) - run.ahead
                order.expected = end
        if not found:
            run.ahead = AHEAD_MIN
        return found

    def took(self, parent: Node, seconds: float) -> None:
        """How long the last call about many of them took."""
        run = self._runs.get(parent.ino)
        if run is not None and seconds < AHEAD_S / 2:
            run.ahead = min(AHEAD_MAX, 2 * run.ahead)
        elif run is not None and seconds > AHEAD_S:
            run.ahead = max(2, run.ahead // 2)

    def _begin(self, parent: Node, now: float) -> _Run:
        known = [(child.ino, name) for name, child in parent.dir.children.items() if child.ino]
        by_name = sorted(name for _ino, name in known)
        known.sort()
        orders = [
            _Order(by_name, by_name),
            _Order([ino for ino, _name in known], [name for _ino, name in known]),
        ]
        run = _Run(orders, now, now)
        self._runs[parent.ino] = run
        if len(self._runs) > RUNS_MAX:
            self._runs.popitem(last=False)
        return run

    def _outdated(self, parent: Node, names: list[bytes], now: float) -> list[bytes]:
        """Of these, those whose time is up, or soon will be."""
        children = parent.dir.children
        until = now - self._keeps_s / 2
        return [
            n
            for n in names
            if (c := children.get(n)) is not None and c.ino and not c.pins and c.checked_at < until
        ]
