"""How many references to each node the kernel holds, kept for the next worker.

The kernel counts every entry that it was given and gives the counts back with FORGET; a worker that
does not know them would either drop nodes that the kernel still uses (ESTALE) or keep all for ever.
Counted here, where replies are encoded, because an entry that is not answered is not counted: its
request comes again. Dying between count and reply leaves a count too high, which costs a node's
memory until the mount ends, and nothing else. Any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

from acpfs.ram.kept import Kept

_COUNT = 1


class References:
    """Counts by node."""

    def __init__(self, kept: Kept) -> None:
        """Take over the last worker's counts."""
        self._slots = kept.references
        self._lock = threading.Lock()
        self._by_node = kept.reference_slots

    def __len__(self) -> int:
        return len(self._by_node)

    def given(self, inos: Iterable[int]) -> None:
        """An entry for each of the nodes goes to the kernel."""
        slots = self._slots
        by_node = self._by_node
        with self._lock:
            for ino in inos:
                slot = by_node.get(ino)
                if slot is None:
                    self._first(ino)
                else:
                    slots.record(slot)[_COUNT] += 1

    def _first(self, ino: int) -> None:
        with contextlib.suppress(
            OSError
        ):  # no page is left: the next worker looks the name up again when it is asked
            self._by_node[ino] = self._slots.add(ino, 1)

    def taken_back(self, counts: Iterable[tuple[int, int]]) -> None:
        """The kernel has given references back: (node, how many)."""
        with self._lock:
            for ino, count in counts:
                slot = self._by_node.get(ino)
                if slot is None:
                    continue
                record = self._slots.record(slot)
                left = record[_COUNT] - count
                if left > 0:
                    record[_COUNT] = left
                else:
                    del self._by_node[ino]
                    self._slots.free(slot)
