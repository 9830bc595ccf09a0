"""Which losses the copies of a training state cover, what the copies cost, and whether a node's RAM
tier holds what a fault leaves.

Placement is Megatron's order (and torch's for a mesh of pipeline, data, tensor): tensor parallel
ranks lie side by side, then data parallel ones, then pipeline stages. Replica sets are parts of the
data parallel group: part r has ranks r·d/R to (r+1)·d/R − 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

KEPT_SAVES = 2
"""A RAM tier should hold two saves and a gasp: the newest one, the one that is being written, and
what survivors leave.
"""


class Sharding(Enum):
    """What each rank of a data parallel group holds."""

    DDP = "ddp"
    """Everything."""
    ZERO1 = "zero1"
    """All weights, a part of the optimizer's state: Megatron's distributed optimizer, torch's
    ZeroRedundancyOptimizer.
    """
    FSDP = "fsdp"
    """A part of both: FSDP2, HSDP, ZeRO-3."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A job's layout. Bytes are per parameter."""

    params: float
    data_parallel: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    """Copies of each shard in the data parallel group; with DDP every rank has one."""
    sharding: Sharding = Sharding.ZERO1
    ranks_per_node: int = 8
    model_bytes: float = 6
    """Weight and gradient: 2 and 4 with bfloat16 weights and gradients added up in float32."""
    weight_bytes: float = 2
    """What a checkpoint has of the weight."""
    optimizer_bytes: float = 12
    """Master weight and two moments in float32; a checkpoint has them all."""

    def __post_init__(self) -> None:
        for name in (
            "data_parallel",
            "tensor_parallel",
            "pipeline_parallel",
            "replicas",
            "ranks_per_node",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.params <= 0:
            raise ValueError("params must be more than 0")
        if self.data_parallel % self.copies:
            raise ValueError(
                f"{self.copies} replicas do not divide a data parallel size of {self.data_parallel}"
            )

    @property
    def copies(self) -> int:
        """Ranks that hold the same shard."""
        return self.data_parallel if self.sharding is Sharding.DDP else self.replicas

    @property
    def shards(self) -> int:
        """Parts of a data parallel group's state."""
        return self.data_parallel // self.copies

    @property
    def world(self) -> int:
        """Ranks."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def nodes(self) -> int:
        return -(-self.world // self.ranks_per_node)

    @property
    def rank_bytes(self) -> float:
        """What one rank holds of weights, gradients and the optimizer's state."""
        parameters = self.params / (self.tensor_parallel * self.pipeline_parallel)
        model = (
            self.model_bytes / self.shards if self.sharding is Sharding.FSDP else self.model_bytes
        )
        return parameters * (model + self.optimizer_bytes / self.shards)

    @property
    def added_bytes(self) -> float:
        """What the copies cost, all ranks together, beside the same layout with one."""
        if self.sharding is Sharding.DDP:
            return 0.0
        kinds = self.optimizer_bytes + (self.model_bytes if self.sharding is Sharding.FSDP else 0)
        return self.params * kinds * (self.copies - 1)

    @property
    def product_added_bytes(self) -> float:
        """The same by the product's formula: GB = parameters in billions × 12 × further copies, for
        ZeRO-1.
        """
        return self.params * 12 * (self.copies - 1)

    @property
    def checkpoint_bytes(self) -> float:
        """One checkpoint of the whole job, each shard once."""
        return self.params * (self.weight_bytes + self.optimizer_bytes)

    @property
    def buddy_bytes(self) -> float:
        """What a rank's host keeps with `buddy_every`: a copy of all that the rank updates, and one
        of another rank's. While the next two are made it keeps these as well.
        """
        mine = self.params / (self.tensor_parallel * self.pipeline_parallel) / self.shards
        return 2 * mine * (self.weight_bytes + self.optimizer_bytes)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def replica_sets(self) -> Iterator[tuple[int, ...]]:
        """For each shard the ranks that hold it."""
        for stage in range(self.pipeline_parallel):
            for tensor in range(self.tensor_parallel):
                for shard in range(self.shards):
                    yield tuple(
                        tensor
                        + self.tensor_parallel
                        * (copy * self.shards + shard + self.data_parallel * stage)
                        for copy in range(self.copies)
                    )


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which losses leave a copy of every shard."""

    any_rank: bool
    any_node: bool
    any_two_nodes: bool
    fatal_nodes: int
    """Nodes of which a shard has all its copies."""
    fatal_pairs: int
    """Pairs of nodes that together have all copies of a shard."""
    pairs: int


def coverage(plan: Plan) -> Coverage:
    """By looking at every replica set."""
    alone: set[int] = set()
    together: set[tuple[int, int]] = set()
    for ranks in plan.replica_sets():
        nodes = sorted({plan.node_of(rank) for rank in ranks})
        if len(nodes) == 1:
            alone.add(nodes[0])
        elif len(nodes) == 2:
            together.add((nodes[0], nodes[1]))
    count = plan.nodes
    pairs = count * (count - 1) // 2
    untouched = count - len(alone)
    fatal = (
        pairs
        - untouched * (untouched - 1) // 2
        + sum(1 for a, b in together if a not in alone and b not in alone)
    )
    return Coverage(plan.copies > 1, not alone, fatal == 0, len(alone), fatal, pairs)


def most_on_a_node(plan: Plan) -> float:
    """Bytes of a checkpoint on the node that writes most of it, when each shard is written by the
    holder whose node has least so far.
    """
    sets = list(plan.replica_sets())
    share = plan.checkpoint_bytes / len(sets)
    written: Counter[int] = Counter()
    for ranks in sets:
        written[min((plan.node_of(rank) for rank in ranks), key=lambda node: written[node])] += 1
    return share * max(written.values())


def ram_wanted_bytes(plan: Plan) -> float:
    """What a node's RAM tier must hold: `KEPT_SAVES` saves and a gasp."""
    return (KEPT_SAVES + 1) * most_on_a_node(plan)
