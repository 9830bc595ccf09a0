"""Which process is which rank, and what each does.

Pure; who decides what follows from it is `crew`.
"""

from __future__ import annotations

from collections.abc import Iterable

from acpfs.training.coordinator.states import Berth
from acpfs.training.messages import Hello


class Roster:
    """Of one job. Ranks that were told of once are known for ever; their processes come and go."""

    def __init__(self) -> None:
        self.world = 0
        """0 before anybody has come."""
        self.hellos: dict[int, Hello] = {}
        """The process that is each rank, or was the last to be."""
        self.lost: dict[int, str] = {}
        """Rank without a process → why."""
        self._berths: dict[int, Berth] = {}

    def __getitem__(self, rank: int) -> Berth:
        return self._berths.get(rank, Berth.EMPTY)

    def join(self, hello: Hello) -> None:
        """A process is this rank from here on; it waits."""
        self.world = hello.world
        self.hellos[hello.rank] = hello
        self.lost.pop(hello.rank, None)
        self._berths[hello.rank] = Berth.PARKED

    def leave(self, rank: int, why: str | None) -> None:
        """Its process is gone; `why` where it was not in order."""
        self._berths[rank] = Berth.EMPTY
        if why is not None:
            self.lost[rank] = why

    def put(self, ranks: Iterable[int], berth: Berth) -> None:
        for rank in ranks:
            assert self[rank] is not Berth.EMPTY, f"rank {rank} has no process"
            self._berths[rank] = berth

    def of(self, *berths: Berth) -> list[int]:
        """Ranks in one of these."""
        return sorted(rank for rank, berth in self._berths.items() if berth in berths)

    @property
    def aboard(self) -> list[int]:
        """Ranks with a process."""
        return sorted(rank for rank, berth in self._berths.items() if berth is not Berth.EMPTY)

    def all(self, *berths: Berth) -> bool:
        """Whether each rank of the job has a process, in one of these."""
        return 0 < self.world == len(self.of(*berths))
