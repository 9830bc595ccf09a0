"""What an operator decides about RAM: pins, evictions, how many checkpoints are retained.

Over `retention`, which decides when nobody does. Reports why what was asked for was not done. Used
under the file system's lock; nothing here waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from acpfs.errors import RefusedError
from acpfs.filesystem.content.eviction_order import EvictionOrder
from acpfs.filesystem.content.retention import Retention
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.ram.tier import Tier
from acpfs.writeback.log.log import OperationLog

PINNED_SHARE_MAX = 0.75
"""A pin that would keep more of the budget than this for good is refused: the next save needs the
rest.
"""


@dataclass(frozen=True, slots=True)
class Stayed:
    """A file that `evict` left where it is."""

    path: bytes
    reason: str
    size_bytes: int
    """In RAM."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """What `evict` did below one path."""

    files: int
    freed_bytes: int
    stayed: tuple[Stayed, ...]


def below(path: bytes, prefix: bytes) -> bool:
    """Whether a path is a prefix or lies below it; the empty prefix is the top."""
    return not prefix or path == prefix or path.startswith(prefix + b"/")


class Eviction:
    """Pins and evicts."""

    def __init__(
        self, table: NodeTable, log: OperationLog, tier: Tier, retention: Retention
    ) -> None:
        self._table = table
        self._log = log
        self._tier = tier
        self._retention = retention

    @property
    def _order(self) -> EvictionOrder:
        return self._retention.order

    def keep(self, checkpoints: int) -> None:
        """Retain so many checkpoints of each save_dir from now on."""
        self._order.keep = checkpoints
        self._tier.room_changed()

    def pin(self, path: bytes) -> int:
        """Keep what lies at and below a path in RAM, now and later; returns the bytes that pins
        keep then.

        Raises:
            RefusedError: pins would keep more of the budget than is good for the next save.
        """
        pins = self._order.pins
        known = path in pins.paths
        pins.add(path)
        kept = self.pinned_bytes()
        if not known and kept > PINNED_SHARE_MAX * self._tier.budget_bytes:
            pins.remove(path)
            raise RefusedError(
                f"{os.fsdecode(path) or 'the mount'}: pins would keep {kept} bytes, more than "
                f"{PINNED_SHARE_MAX:.0%} of the budget of "
                f"{self._tier.budget_bytes}"
            )
        self._order.refile()
        return kept

    def unpin(self, path: bytes) -> int:
        """Take pins off at and below a path; returns how many there were."""
        pins = self._order.pins
        removed = sum(pins.remove(pin) for pin in pins.paths if below(pin, path))
        if removed:
            self._order.refile()
            self._tier.room_changed()
        return removed

    def pins(self) -> list[bytes]:
        return self._order.pins.paths

    def pinned_bytes(self) -> int:
        """Bytes in RAM of files at and below pinned paths, clean or not."""
        if not self._order.pins.paths:
            return 0
        return sum(
            taken
            for node, path, taken in self._in_ram(b"")
            if self._order.pins.covering(path) is not None
        )

    def is_pinned_full(self) -> bool:
        """Whether pins keep more of the budget than a pin may be made for: what lies below them has
        grown, or the budget shrunk.
        """
        return self.pinned_bytes() > PINNED_SHARE_MAX * self._tier.budget_bytes

    def evict(self, path: bytes) -> Evicted:
        """Let clean contents at and below a path go, those of retained checkpoints too; dirty, open
        and pinned ones stay.
        """
        files = 0
        freed = 0
        stayed = []
        for node, below_it, taken in list(self._in_ram(path)):
            reason = self._against(node, below_it)
            if reason:
                stayed.append(Stayed(below_it, reason, taken))
            else:
                files += 1
                freed += self._retention.evict(node)
        return Evicted(files, freed, tuple(sorted(stayed, key=lambda entry: entry.path)))

    def _in_ram(self, prefix: bytes) -> Iterator[tuple[Node, bytes, int]]:
        """(node, path, bytes) of each file that has a tier file, at and below a path."""
        for node in self._table.recorded():
            if node.body.has_local_bytes and node.names:
                path = self._table.path(node.ino)
                if below(path, prefix):
                    yield node, path, self._tier.allocated_bytes(node.body.tier)

    def _against(self, node: Node, path: bytes) -> str:
        """Why a content may not leave, "" for no reason."""
        if self._order.pins.covering(path) is not None:
            return "pinned"
        if node.body.interrupted:
            return "interrupted: its writer was lost"
        if node.body.modified:
            return "being written"
        if self._log.is_active(node.ino):
            return "not persisted yet"
        if node.handles:
            return "open or mapped"
        return "" if self._retention.may_leave(node) else "its bytes are nowhere else"
