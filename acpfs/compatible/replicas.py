"""Who holds the same optimizer state, from what `tft_set_optimizer_replica` is told. Pure.

A group of d ranks with R copies is divided into R parts of d / R ranks; ranks at the same place of
each part hold the same. MindSpore gives the holders of one rank's state, with as many copies as
ranks: parts of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from acpfs.compatible.refusal import UnsupportedError
from acpfs.errors import ConfigError
from acpfs.training.messages import Shard

PREFIX = "opt"


def holders_of(
    rank: int, replica_info: Sequence[Mapping[str, Any]]
) -> dict[Shard, tuple[int, ...]]:
    """Shard → all ranks that hold it, for each of the rank's optimizers (attention, experts).

    Raises:
        ConfigError: it makes no sense.
        UnsupportedError: a shift is given.
    """
    found: dict[Shard, tuple[int, ...]] = {}
    for place, replica in enumerate(replica_info):
        ranks, copies, shift = (
            replica.get(key) for key in ("rank_list", "replica_cnt", "replica_shift")
        )
        if not (
            isinstance(ranks, list)
            and all(isinstance(one, int) for one in ranks)
            and isinstance(copies, int)
            and isinstance(shift, int)
        ):
            raise ConfigError(f"set_optimizer_replica failed, rank:{rank}, replica_info is invalid")
        if shift != 0:
            raise UnsupportedError(
                f"replica_shift = {shift}: copies are at the same place of each part of the "
                "group, so it has to be 0"
            )
        if rank not in ranks or len(set(ranks)) != len(ranks):
            raise ConfigError(f"rank {rank} is not once in its own list of replicas: {ranks}")
        if copies < 1 or len(ranks) % copies:
            raise ConfigError(
                f"{copies} copies in a group of {len(ranks)} ranks: it cannot be divided"
            )
        part = len(ranks) // copies
        holding = tuple(sorted(ranks[ranks.index(rank) % part :: part]))
        found[f"{PREFIX}{place}/rank{holding[0]}"] = holding
    if not found:
        raise ConfigError(f"set_optimizer_replica failed, rank:{rank}, replica_info is empty")
    return found


def save_info(cover: Mapping[Shard, int]) -> list[dict[str, Any]]:
    """What a save handler is told: for each optimizer the ranks that save."""
    by_type: dict[int, set[int]] = {}
    for shard, rank in cover.items():
        by_type.setdefault(int(shard.split("/")[0].removeprefix(PREFIX)), set()).add(rank)
    return [{"type": place, "ranks": sorted(ranks)} for place, ranks in sorted(by_type.items())]
