"""In which order clean contents leave the RAM tier.

Files that belong to no retained checkpoint come first, least recently used first; then the files of
retained checkpoints, oldest checkpoint of its save_dir first and the newest last; pinned files
never. Retained are the newest K settled checkpoints of each save_dir, and every one that is still
being written. Knows names and numbers of files; does not know bytes, nor how a content leaves. Used
under the file system's lock.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum

from acpfs.checkpoints import Checkpoint
from acpfs.filesystem.catalogue import Catalogue
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.pins import Pins
from acpfs.types import Ino

Shelf = OrderedDict[Ino, int]
"""Files → when they were last used, in that order."""


class Claim(Enum):
    """Why a clean content is still in RAM."""

    NONE = "clean"
    RETAINED = "retained"
    PINNED = "pinned"


class EvictionOrder:
    """All files whose content may leave."""

    def __init__(self, table: NodeTable, catalogue: Catalogue, pins: Pins, keep: int) -> None:
        """`catalogue`: says which checkpoint a file belongs to, and whether that is persisted."""
        self._table = table
        self._catalogue = catalogue
        self.pins = pins
        self.keep = keep
        """How many checkpoints of each save_dir are retained; changeable at any time."""
        self._loose: Shelf = OrderedDict()
        self._pinned: Shelf = OrderedDict()
        self._checkpoints: dict[Checkpoint, Shelf] = {}
        self._shelf_of: dict[Ino, Checkpoint | bytes | None] = {}
        self._clock = itertools.count()
        self._is_stale = False

    def __len__(self) -> int:
        return len(self._shelf_of)

    def __contains__(self, ino: Ino) -> bool:
        return ino in self._shelf_of

    def add(self, node: Node) -> None:
        """The node's content may leave; it was used just now."""
        self.discard(node.ino)
        self._place(node, next(self._clock))

    def discard(self, ino: Ino) -> None:
        """It must not leave, or is gone."""
        if ino not in self._shelf_of:
            return
        place = self._shelf_of.pop(ino)
        self._shelf(place).pop(ino)
        if isinstance(place, Checkpoint) and not self._checkpoints[place]:
            del self._checkpoints[place]

    def _place(self, node: Node, used: int) -> None:
        path = self._table.path(node.ino)
        pin = self.pins.covering(path)
        place = self._catalogue.recognise(path) if pin is None else pin
        self._shelf(place)[node.ino] = used
        self._shelf_of[node.ino] = place

    def _shelf(self, place: Checkpoint | bytes | None) -> Shelf:
        if isinstance(place, bytes):
            return self._pinned
        return self._loose if place is None else self._checkpoints.setdefault(place, OrderedDict())

    def refile(self) -> None:
        """Directories were moved, or pins changed: files may belong elsewhere."""
        self._is_stale = True

    def _settle(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        used = sorted(
            (stamp, ino)
            for shelf in (self._loose, self._pinned, *self._checkpoints.values())
            for ino, stamp in shelf.items()
        )
        self._loose = OrderedDict()
        self._pinned = OrderedDict()
        self._checkpoints = {}
        self._shelf_of = {}
        for stamp, ino in used:
            self._place(self._table[ino], stamp)

    # -- the order

    def candidates(self, *, also_retained: bool = True) -> Iterator[Node]:
        """Who leaves next, as long as anybody may.

        Whoever takes a node discards it, or is given it again.
        """
        self._settle()
        retained = self.retained()
        free = [
            self._loose,
            *(
                shelf
                for checkpoint, shelf in self._checkpoints.items()
                if checkpoint not in retained
            ),
        ]
        while free := [shelf for shelf in free if shelf]:
            shelf = min(free, key=lambda shelf: next(iter(shelf.values())))
            yield self._table[next(iter(shelf))]
        for checkpoint in retained if also_retained else ():
            kept = self._checkpoints.get(checkpoint)
            while kept:
                yield self._table[next(iter(kept))]

    def retained(self) -> list[Checkpoint]:
        """Checkpoints that stay as long as there is room without them; those that leave first,
        first.
        """
        self._settle()
        by_save_dir: dict[bytes, list[Checkpoint]] = {}
        for checkpoint in self._checkpoints:
            by_save_dir.setdefault(checkpoint.save_dir, []).append(checkpoint)
        ranked: list[tuple[int, int, Checkpoint]] = []
        for checkpoints in by_save_dir.values():
            rank = 0
            for checkpoint in sorted(
                checkpoints, key=lambda c: (c.order, self._catalogue.closed_at(c)), reverse=True
            ):
                if rank >= self.keep:
                    break  # `status` asks, and there may be thousands
                ranked.append(
                    (-rank, next(reversed(self._checkpoints[checkpoint].values())), checkpoint)
                )
                rank += self._catalogue.is_settled(checkpoint)
        return [
            checkpoint for _rank, _used, checkpoint in sorted(ranked, key=lambda entry: entry[:2])
        ]

    def claims(self) -> dict[Ino, Claim]:
        """Why each content is still there."""
        self._settle()
        claims = dict.fromkeys(self._shelf_of, Claim.NONE)
        claims.update(dict.fromkeys(self._pinned, Claim.PINNED))
        for checkpoint in self.retained():
            claims.update(dict.fromkeys(self._checkpoints[checkpoint], Claim.RETAINED))
        return claims
