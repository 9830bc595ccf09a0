"""What each rank holds, as it was some steps ago, in its own host's memory and in another rank's:
its buddy's. For shards that nobody else holds.

A copy is taken by the main thread behind an update, and sent by threads over a group of its own
while training goes on. Each rank votes at the gate of each update whether the copy that is to come
to it is there; when all have it, all know, and the copy before that goes. So until then the former
one is whole everywhere, whoever dies. Which one counts after a fault all decide together
(`sources`).

`take`, `vote`, `voted`, `only` and `end` belong to the main thread; `_Exchange` to its threads.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from acpfs.logger import get_logger
from acpfs.training.messages import Shard
from acpfs.training.sources import Tag
from acpfs.training.torch.transfer import Contents, Piece, filled, flat, outline

log = get_logger(__name__)
Whose = tuple[int, Tag]
_TAG = 0
PIECE_BYTES = 64 << 20
PIECE_S = 300.0
"""Time-out of the group: who waits for a rank that died in the middle of a piece may not hear of
it, and keeps a copy's memory for so long.
"""
END_S = 5.0
"""An exchange that is under way when the job ends has so long; nobody needs it any more."""


@dataclass(frozen=True)
class Parcel:
    """All that a rank holds at the end of a step, in the host's memory. Nobody changes it."""

    shards: Mapping[Shard, Contents]
    host: bytes
    """Its host state, packed."""
    items: Mapping[str, Any] = field(default_factory=dict)
    """For whoever writes it in its place: where parts of DTensors belong, by their names in a
    checkpoint (torch's `WriteItem`).
    """


def copied(contents: Contents) -> dict[str, dict[str, Piece]]:
    """The same in memory of its own, of the host."""
    return {
        name: {key: _copied(piece) for key, piece in values.items()}
        for name, values in contents.items()
    }


def _copied(piece: Piece) -> Piece:
    value = piece.value
    if not isinstance(value, torch.Tensor):
        return piece
    is_of_device = piece.of_device or value.device.type != "cpu"
    return Piece(value.detach().to("cpu", copy=True), piece.distributed, is_of_device)


def ring(nodes: Sequence[str], holders: Sequence[Mapping[Shard, tuple[int, ...]]]) -> int:
    """Each rank's buddy is so many ranks further on: on another node as far as there are several,
    and not one that holds the same, since a copy of that is there anyway.

    Of equal ones that which is nearest to half of all ranks.
    """
    world = len(nodes)

    def badness(offset: int) -> tuple[int, int, int]:
        same_node = 0
        same_shard = 0
        for rank in range(world):
            buddy = (rank + offset) % world
            same_node += nodes[rank] == nodes[buddy]
            same_shard += any(buddy in ranks for ranks in holders[rank].values())
        return same_node, same_shard, abs(offset - world // 2)

    return min(range(1, world), key=badness)


class _Exchange:
    """Of one copy: this rank's to its buddy, and that of another rank to here."""

    def __init__(self, group: Any, to: int, source: int, is_over: Callable[[], bool]) -> None:
        """`group`: gloo's, of all ranks in their order, and nothing else goes over it.

        `is_over`: whether its collectives are ended on purpose.
        """
        self._group = group
        self._to = to
        self.source = source
        self._is_over = is_over
        self.received: tuple[Tag, Parcel] | None = None
        """What has come, whole."""
        self._threads: list[threading.Thread] = []

    def start(self, tag: Tag, parcel: Parcel) -> None:
        for work in (partial(self._send, tag, parcel), self._receive):
            thread = threading.Thread(
                target=self._guarded, args=(work,), name="acpfs-buddy", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # whatever it is: the copy before counts
            if not self._is_over():
                log.warning("no further copies in the memory of other ranks", why=str(error))

    def _send(self, tag: Tag, parcel: Parcel) -> None:
        outlines = {shard: outline(contents) for shard, contents in parcel.shards.items()}
        head = pickle.dumps((tag, outlines, parcel.host, parcel.items))
        self._send_one(torch.tensor([len(head)], dtype=torch.int64))
        self._send_one(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for contents in parcel.shards.values():
            for one in flat(contents):
                self._send_one(one)

    def _receive(self) -> None:
        length = torch.zeros(1, dtype=torch.int64)
        self._receive_one(length)
        head = torch.empty(int(length.item()), dtype=torch.uint8)
        self._receive_one(head)
        # as all_gather_object does: it came over the job's own process groups
        tag, outlines, host, items = pickle.loads(head.numpy().tobytes())  # noqa: S301
        shards = {shard: filled(one, self._receive_one) for shard, one in outlines.items()}
        self.received = tag, Parcel(shards, host, items)

    # not by torch.distributed's functions: they ask for the group's name, and a script that has
    # ended has destroyed it

    def _send_one(self, value: Any) -> None:
        for piece in value.split(PIECE_BYTES):
            self._group.send([piece], self._to, _TAG).wait()

    def _receive_one(self, room: Any) -> None:
        for piece in room.split(PIECE_BYTES):
            self._group.recv([piece], self.source, _TAG).wait()

    def end(self, within_s: float) -> None:
        """Wait for its threads."""
        until = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


class BuddyCopies:
    """Of one process, across generations."""

    def __init__(self, rank: int, every: int, is_over: Callable[[], bool]) -> None:
        """`every`: so many updates from one copy to the next; 0: none are taken.

        `is_over`: whether collectives are ended on purpose; from any thread.
        """
        self._is_over = is_over
        self._rank = rank
        self._every = every
        self._parcels: dict[Whose, Parcel] = {}
        self._last: Tag | None = None
        """The copy that was begun last, in this generation."""
        self._exchange: _Exchange | None = None
        """What is under way; None: all have the last one."""
        self._group: Any = None
        self._offset = 0
        self._world = 1

    @property
    def having(self) -> dict[Tag, tuple[int, ...]]:
        """Which there are, and whose."""
        found: dict[Tag, tuple[int, ...]] = {}
        for whose, tag in sorted(self._parcels):
            found[tag] = (*found.get(tag, ()), whose)
        return found

    def parcel(self, whose: int, tag: Tag) -> Parcel:
        return self._parcels[whose, tag]

    def leave(self) -> None:
        """The generation is over; what has not come whole does not come any more."""
        self._take_in()
        self._exchange = None
        self._group = None

    def only(self, tag: Tag | None) -> None:
        """All ranks have agreed that this one is the newest that is whole: all others go."""
        for key in [key for key in self._parcels if key[1] != tag]:
            del self._parcels[key]

    def meet(self, group: Any, world: int, offset: int) -> None:
        """In a new generation. `offset`: the buddy is so many ranks further on."""
        self._group = group
        self._world = world
        self._offset = offset
        self._exchange = None
        self._last = None

    def is_due(self, step: int) -> bool:
        """Whether a copy of this step is to be begun; all ranks say the same."""
        if self._group is None or self._exchange is not None:
            return False
        return self._last is None or step - self._last[1] >= self._every

    def take(self, tag: Tag, make: Callable[[], Parcel]) -> None:
        """Take one, keep it, and have it sent. Without memory for it the one before stays the
        newest, in all ranks.
        """
        self._last = tag
        try:
            parcel = make()
        except (RuntimeError, MemoryError) as error:
            log.warning("no further copies in the memory of other ranks", why=str(error))
            self._exchange = _Exchange(self._group, self._rank, self._rank, self._is_over)
            return
        self._parcels[self._rank, tag] = parcel
        to = (self._rank + self._offset) % self._world
        source = (self._rank - self._offset) % self._world
        exchange = _Exchange(self._group, to, source, self._is_over)
        self._exchange = exchange
        exchange.start(tag, parcel)

    def vote(self) -> bool:
        """Whether what was to come has come."""
        return self._take_in()

    def _take_in(self) -> bool:
        exchange = self._exchange
        if exchange is None or exchange.received is None:
            return False
        tag, parcel = exchange.received
        self._parcels[exchange.source, tag] = parcel
        return True

    def voted(self, count: int) -> None:
        """So many have; the same in all ranks."""
        if self._exchange is not None and count == self._world:
            self._exchange = None
            self.only(self._last)

    def end(self) -> None:
        """The job has ended: nothing of it is left behind in C."""
        if self._exchange is not None:
            self._exchange.end(END_S)
