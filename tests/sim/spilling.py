"""A spill directory that outlives the lives of the daemon: a real one, whose calls have turns."""

from __future__ import annotations

from pathlib import Path
from threading import RLock

from acpfs.config import SpillMode
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.runtime.given import Runtime
from acpfs.writeback.sources.spill import Spill, SpillPools, SpillRules
from tests.sim.scheduler import TurnPool, Turns

THREADS = 2


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


def spill_of(
    place: Path, budget: int, state: StateDatabase, tier: Tier, lock: RLock, runtime: Runtime
) -> Spill:
    """Of a life whose parts are being made. `budget`: bytes."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = TurnSpillDirectory(place / "acpfs-sim", runtime, Turns.current)
    directory.prepare()
    copies = TurnPool("spill", THREADS, runtime)
    reads = TurnPool("spill reads", THREADS, runtime, copies.health)
    pools = SpillPools(copies, reads)
    return Spill(directory, state, tier, lock, SpillRules(SpillMode.MOVE, budget), pools)
