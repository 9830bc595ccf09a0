"""Parameters of which each rank has updated its own part, made whole in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from acpfs.training.torch.folding import fold
from tests.training.ranks.forked import Ranks, join_group

SIZE = 3


def _folds(rank: int, directory: Path) -> None:
    """Ranks 0 and 2 share one model, 1 another; the parts of the first two are the other way
    round.
    """
    join_group(rank, 3, directory / "store")
    buffers = [torch.zeros(2 * SIZE, dtype=kind) for kind in (torch.bfloat16, torch.float32)]
    holders, own = ({1: 0, 0: 2}, 1 if rank == 0 else 0) if rank != 1 else ({0: 1}, 0)

    def parts(part: int) -> list[torch.Tensor]:
        return [buffer[part * SIZE : (part + 1) * SIZE] for buffer in buffers]

    for tensor in parts(own):
        tensor.fill_(rank + 1)
    assert fold(own, holders, parts) == (1 if rank == 1 else 0)
    expected = {0: [3] * SIZE + [1] * SIZE, 1: [2] * SIZE + [0] * SIZE, 2: [3] * SIZE + [0] * SIZE}[
        rank
    ]
    assert all(buffer.tolist() == expected for buffer in buffers)


@pytest.mark.clause("T60")
def test_the_writer_has_all_parts(tmp_path: Path) -> None:
    with Ranks(3, tmp_path, lambda rank: _folds(rank, tmp_path)) as ranks:
        assert ranks.statuses() == [0, 0, 0], ranks.said()
