"""A simulated member: what a rank says to coordinators, without torch and without training.

For tests and a benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from acpfs.training.messages import (
    Beat,
    FromCoordinator,
    FromMember,
    Gate,
    GateResult,
    Hello,
    Leave,
    Phase,
    Protected,
    Publish,
    Published,
    Save,
    Saved,
    SavedFile,
    Settle,
    Settled,
    ShowStacks,
    Stacks,
    Stop,
    Stopped,
)


@dataclass
class SimulatedMember:
    """One rank. `obey` is what its member would do at once; everything it is told is kept."""

    rank: int
    world: int
    holders: Mapping[str, tuple[int, ...]]
    node: str = "node0"
    gate: Gate = Gate.EXPLICIT
    done: int = 5
    phase: Phase = Phase.COMPUTING
    pid: int = 1
    started: int = 1
    generation: int = 0
    protected: bool = False
    parked: bool = False
    moved: int = 0
    told: list[FromCoordinator] = field(default_factory=list)
    left: Leave | None = None
    published: dict[str, Publish] = field(default_factory=dict)
    """What this rank has renamed: name → what it was told."""
    disk: dict[str, Publish] = field(default_factory=dict)
    """The save directory; given to all members of a job."""

    def hello(self) -> Hello:
        held = {shard: ranks for shard, ranks in self.holders.items() if self.rank in ranks}
        return Hello(self.rank, self.world, self.node, self.pid, self.started, self.gate, held)

    @property
    def ready(self) -> int:
        return self.done + (self.phase is not Phase.COMPUTING)

    def beat(self) -> Beat:
        return Beat(self.done, self.ready, self.phase, moved=self.moved)

    def obey(self, message: FromCoordinator, generation: int) -> list[FromMember]:
        """Carry a command out; answers, in order."""
        self.told.append(message)
        self.generation = max(self.generation, generation)
        if isinstance(message, Stop):
            if self.phase is Phase.UPDATING:
                self._update()
            self.parked = True
            published = next((told.manifest.step for told in self.published.values()), None)
            return [
                Stopped(
                    self.done, self.ready, self.phase, (), GateResult(self.done, (1.0,)), published
                )
            ]
        if isinstance(message, Settle):
            if self.done == message.step - 1:
                self._update()
            return [
                Settled(
                    self.done, {shard: f"{shard}@{self.done}" for shard in self.hello().holders}
                )
            ]
        if isinstance(message, Save):
            return [self._save(message)] if self.rank in message.savers else []
        if isinstance(message, Publish):
            self.disk.setdefault(message.name, message)
            self.published[message.name] = message
            return [Published(message.name)]
        if isinstance(message, ShowStacks):
            return [Stacks(f"rank {self.rank}")]
        self.protected = self.protected or isinstance(message, Protected)
        self.left = message if isinstance(message, Leave) else self.left
        return []

    def _update(self) -> None:
        self.done = self.done + 1
        self.phase = Phase.COMPUTING

    def _save(self, message: Save) -> Saved:
        assert self.done == message.step, "asked to save another step than this rank is at"
        mine = [shard for shard, rank in message.cover.items() if rank == self.rank]
        return Saved(
            tuple(
                SavedFile(f"{message.directory}/{shard.replace('/', '_')}", 1, "00")
                for shard in mine
            )
        )

    def at(self, done: int, phase: Phase) -> SimulatedMember:
        """The same rank elsewhere."""
        return replace(self, done=done, phase=phase, told=[], published={})


PAIRS = {"a": (0, 1), "b": (2, 3), "all": (0, 1, 2, 3)}


def job(
    world: int = 4,
    holders: Mapping[str, tuple[int, ...]] | None = None,
    gate: Gate = Gate.EXPLICIT,
    ranks_per_node: int = 8,
) -> list[SimulatedMember]:
    """The members of a job: pairs of ranks hold the same shard, unless said otherwise."""
    holders = holders or {f"opt{n}": (2 * n, 2 * n + 1) for n in range(world // 2)}
    disk: dict[str, Publish] = {}
    return [
        SimulatedMember(rank, world, holders, f"node{rank // ranks_per_node}", gate, disk=disk)
        for rank in range(world)
    ]
