"""Parameters of a model whose optimizer is sharded, made whole again in one rank: each saver has
updated its own part of them only.

Without a fault ranks gather them from each other behind every update. Here a rank may have died
between the two, so those who save give their parts to the one who writes, in the group of savers.
That is gloo's, which reads and writes the host's memory only. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist


def fold(own: int, holders: Mapping[int, int], parts: Callable[[int], Sequence[Any]]) -> int:
    """Give this rank's part, or take those of the others; the rank in the group that has all of
    them now.

    Args:
        own: which part this rank has.
        holders: part → rank in the default group, of those who share a model.
        parts: the flat tensors of a part, where it belongs; the same sizes in all ranks.
    """
    writer = min(holders.values())
    me = dist.get_rank()
    for part, rank in sorted(holders.items()):
        if rank == writer or me not in (rank, writer):
            continue
        for tensor in parts(part):
            if me == writer:
                is_there = tensor.device.type == "cpu"
                room = tensor if is_there else torch.empty(tensor.shape, dtype=tensor.dtype)
                dist.recv(_bytes(room), rank)
                if not is_there:
                    tensor.detach().copy_(room)
            else:
                assert part == own
                dist.send(_bytes(tensor.cpu()), writer)
    return writer


def _bytes(tensor: Any) -> Any:
    """The same memory, in a type that every backend sends."""
    return tensor.detach().view(torch.uint8)
