"""A spill directory that outlives the lives of the daemon: a real one, whose calls have turns."""

from __future__ import annotations

import errno
import json
import os
import random
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock

from acpfs.backing.leftovers import WITHDRAWN
from acpfs.backing.lower import Lower
from acpfs.config import SpillMode
from acpfs.filesystem.salvage import Salvaged, salvage
from acpfs.filesystem.upper import UpperLayer
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.ram.state import StateDatabase, Statement
from acpfs.runtime.chance import Chance
from acpfs.runtime.given import Runtime
from acpfs.writeback.copies import on_disk
from acpfs.writeback.copies.on_disk import DiskJournal, DiskPlace
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Version, VersionState
from acpfs.writeback.sources.mirror import Mirror
from acpfs.writeback.sources.spill import Spill, SpillPools, SpillRules
from tests.sim.scheduler import Timers, TurnPool, Turns
from tests.sim.storage import NODE
from tests.sim.virtual import MACHINE

THREADS = 2
HANGS_S = (0.5, 5.0, 30.0)
"""The last one is longer than the mirror's patience."""


class TurnSpillDirectory(SpillDirectory):
    """Others have their turns before and after each call."""

    def __init__(self, path: Path, runtime: Runtime, turns: Turns) -> None:
        super().__init__(path, runtime.chance)
        self._turns = turns

    def create(self, name: str) -> int:
        self._turns.point()
        fd = super().create(name)
        self._turns.point()
        return fd

    def open(self, name: str) -> int:
        self._turns.point()
        return super().open(name)

    def remove(self, name: str) -> None:
        self._turns.point()
        super().remove(name)

    def sync_names(self) -> None:
        self._turns.point()
        super().sync_names()

    def names(self) -> list[str]:
        return sorted(super().names())


class TornJournal(DiskJournal):
    """Whose end a kill may tear; its disk fails now and then, or hangs."""

    def __init__(self, made: DiskJournal, disk: JournalDisk) -> None:
        super().__init__(made._fd, made._seed_bytes, made._length)
        self._disk = disk

    def append(self, batch: Sequence[Sequence[Statement]]) -> None:
        data = b"".join(self._encoder.transaction(statements) for statements in batch)
        turns = self._disk.turns
        turns.point()
        torn = self._disk.chance.randrange(len(data) + 1)
        os.write(self._fd, data[:torn])
        turns.point()
        self._disk.answer()
        os.write(self._fd, data[torn:])
        turns.point()
        self._length += len(data)


class JournalDisk(DiskPlace):
    """A place for journals whose calls have turns."""

    def __init__(
        self, directory: SpillDirectory, turns: Turns, timers: Timers, disk: DiskFaults
    ) -> None:
        super().__init__(directory)
        self.turns = turns
        self._timers = timers
        self._faults = disk
        self.chance = disk.chance

    def begin(self, token: str, snapshot: sqlite3.Connection) -> TornJournal:
        self.turns.point()
        self.answer()
        made = super().begin(token, snapshot)
        self.turns.point()
        return TornJournal(made, self)

    def answer(self) -> None:
        """Or fail, or do so late."""
        drawn = self.chance.random()
        if drawn < self._faults.hang_rate:
            until_s = MACHINE.moment_s + (delay_s := self.chance.choice(HANGS_S))
            self._timers.at(delay_s)
            self.turns.wait(lambda: MACHINE.moment_s >= until_s)
        elif drawn < self._faults.hang_rate + self._faults.error_rate:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@dataclass(frozen=True, slots=True)
class DiskFaults:
    """Of the disk of a mirror's journal."""

    chance: random.Random
    error_rate: float
    hang_rate: float


@dataclass(frozen=True, slots=True)
class SpillWorld:
    """What a spill directory is made with."""

    place: Path
    runtime: Runtime
    turns: Turns
    timers: Timers
    faults: DiskFaults | None
    """None: what is there survives no loss of RAM; else of the journal that makes it survive."""

    def directory(self) -> TurnSpillDirectory:
        """Which is there from now on."""
        self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = TurnSpillDirectory(self.place / "acpfs-sim", self.runtime, self.turns)
        directory.prepare()
        return directory

    def mirror(
        self, directory: SpillDirectory, state: StateDatabase, log: OperationLog, lower: Lower
    ) -> Mirror | None:
        """Not begun."""
        if self.faults is None:
            return None
        disk = JournalDisk(directory, self.turns, self.timers, self.faults)
        return Mirror(disk, state, log, lower, NODE, self.runtime)


class CountedSpill(Spill):
    """Says how often the kernel wrote on since a copy was made."""

    outdated = 0
    outdated_before = 0
    """Of these such as an earlier life has left."""

    def outdate(self, version: Version) -> None:
        """See `Spill`."""
        self.outdated += version.vid in self.copies
        super().outdate(version)

    def _find_outdated(self, found: Collection[str]) -> None:
        known = len(self._outdated)
        super()._find_outdated(found)
        self.outdated_before += len(self._outdated) - known


@dataclass(slots=True)
class SalvagedCopies:
    """What a journal says of the bytes of versions."""

    outdated: int = 0
    """They have nothing but a copy since which the kernel wrote on."""
    staged_since: int = 0
    """They have one, and a staging file with what was written since."""

    def look(self, db: sqlite3.Connection, names: Collection[str]) -> None:
        """Before anything is made of it."""
        rows = db.execute(
            "SELECT before.name, version.state, version.digest, before.digest"
            " FROM spilled_before AS before JOIN version USING (vid)"
            " WHERE vid NOT IN (SELECT vid FROM spilled)"
        )
        for name, state, digest, copied in rows.fetchall():
            if name in names:
                is_staged = state == VersionState.STAGED.value and digest not in ("", copied)
                self.staged_since += is_staged
                self.outdated += not is_staged


def spill_of(
    world: SpillWorld,
    budget: int,
    upper: UpperLayer,
    lower: Lower,
    lock: RLock,
) -> CountedSpill:
    """Of a life whose parts are being made. `budget`: bytes."""
    directory = world.directory()
    mirror = world.mirror(directory, upper.state, upper.log, lower)
    copies = TurnPool("spill", THREADS, world.runtime)
    reads = TurnPool("spill reads", THREADS, world.runtime, copies.health)
    pools = SpillPools(copies, reads)
    mode = SpillMode.MOVE if mirror is None else SpillMode.MIRROR
    rules = SpillRules(mode, budget)
    return CountedSpill(
        on_disk.DiskCopies(directory), upper.state, upper.tier, lock, rules, pools, mirror=mirror
    )


def salvaged(
    place: Path, mark: bytes | None, state: Path, chance: Chance, copies: SalvagedCopies
) -> Salvaged | None:
    """RAM was lost: what the journal that the mark names has becomes the state; None: nothing was
    mirrored. `copies`: told what the journal knows of them.
    """
    if mark is None or mark == WITHDRAWN:
        return None
    directory = SpillDirectory(place / "acpfs-sim", chance)
    read_into = partial(on_disk.read_into, directory.path, json.loads(mark)["token"])
    look = partial(copies.look, names=directory.names())
    return salvage(read_into, directory.path, state, directory.size, look)
