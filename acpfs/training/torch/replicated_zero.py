"""`ZeroRedundancyOptimizer` with copies: the state is sharded inside each of R parts of the data
parallel group.

Gradients are reduced over the whole group as before (DDP does that), so the parts compute the same
updates from the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from acpfs.errors import ConfigError


# torch is Any where types are checked
class ReplicatedZero(ZeroRedundancyOptimizer):  # type: ignore[misc]
    """Made by all ranks of the default group at the same place, like any group."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Any],
        *,
        replicas: int = 2,
        **defaults: Any,
    ) -> None:
        """`replicas`: copies of each shard; they have to divide the number of ranks.

        Raises:
            ConfigError: they do not.
        """
        world = dist.get_world_size()
        if replicas < 1 or world % replicas:
            raise ConfigError(f"{replicas} replicas do not divide {world} ranks")
        size = world // replicas
        self.parts = [tuple(range(begin, begin + size)) for begin in range(0, world, size)]
        groups = [dist.new_group(list(part)) for part in self.parts]
        super().__init__(
            params, optimizer_class, process_group=groups[dist.get_rank() // size], **defaults
        )
