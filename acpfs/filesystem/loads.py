"""Loads of checkpoints: which files were read, from where, and for how long.

For `history`, and the histogram of loads.

A load is all reading of one checkpoint that nothing interrupts for `QUIET_S`: ranks and shards open
at different times. In memory only, and bounded: what a worker that dies has not handed on is
missing in the history. Only the kernel sees what is read in passthrough, so what counts is the
open, and where the bytes were then. Used under the file system's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from acpfs.checkpoints import Checkpoint
from acpfs.filesystem.durations import Distribution
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.runtime.clock import Clock
from acpfs.types import Ino

FILE_BYTES_MIN = 1 << 20
"""Smaller files say nothing of a load, and are many: what they cost stays what it is."""
LOADS_MAX = 256
QUIET_S = 10.0
RAM = "ram"
SPILL = "spill"
BACKING = "backing"
MIXED = "mixed"


@dataclass(slots=True)
class Load:
    """Of one checkpoint. Times are monotonic, seconds."""

    began: float
    ended: float
    files: dict[Ino, int] = field(default_factory=dict)
    """Bytes of each."""
    places: set[str] = field(default_factory=set)

    @property
    def place(self) -> str:
        """Where it came from: ram, spill, backing or mixed."""
        return MIXED if len(self.places) > 1 else next(iter(self.places))


class Loads:
    """See above."""

    def __init__(
        self,
        table: NodeTable,
        recognise: Callable[[bytes], Checkpoint | None],
        durations: Distribution,
        clock: Clock,
    ) -> None:
        """`recognise`: the checkpoint that a path belongs to."""
        self._now = clock.now
        self._table = table
        self._recognise = recognise
        self._durations = durations
        self._loads: OrderedDict[Checkpoint, Load] = OrderedDict()

    @staticmethod
    def place(node: Node) -> str:
        """Where the bytes of a file are read from that is opened now."""
        body = node.body
        if body.is_spilled:
            return SPILL
        return RAM if body.is_whole_in_ram else BACKING

    def closed(self, node: Node, began: float, place: str) -> None:
        """A file that was opened for reading at a monotonic time, with its bytes at that place, was
        closed.
        """
        now = self._now()
        self._durations.observe(now - began)
        if node.size < FILE_BYTES_MIN or not node.names:
            return
        checkpoint = self._recognise(self._table.path(node.ino))
        if checkpoint is None:
            return
        load = self._loads.get(checkpoint)
        if load is None:
            load = Load(began, now)
            self._loads[checkpoint] = load
            if len(self._loads) > LOADS_MAX:
                self._loads.popitem(last=False)
        load.began = min(load.began, began)
        load.ended = now
        load.files[node.ino] = node.size
        load.places.add(place)

    def take(self) -> list[tuple[Checkpoint, Load]]:
        """Loads that have ended, each once."""
        until = self._now() - QUIET_S
        ended = [
            (checkpoint, load) for checkpoint, load in self._loads.items() if load.ended <= until
        ]
        for checkpoint, _load in ended:
            del self._loads[checkpoint]
        return ended
