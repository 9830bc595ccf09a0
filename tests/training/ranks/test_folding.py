"""Parameters of which each rank has updated its own part, made whole in one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

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


class Away(torch.Tensor):  # type: ignore[misc]  # torch is not there where types are checked
    """Of a device's memory, which gloo knows nothing of."""

    @property
    def device(self) -> Any:
        return torch.device("cuda", 0)

    def cpu(self) -> Any:
        return self.as_subclass(torch.Tensor).clone()


@pytest.mark.clause("T60", "T206")
def test_parts_of_a_device_go_through_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in a device's memory is never given to gloo."""
    sent = []

    def send(tensor: Any, _: int) -> None:
        assert type(tensor) is torch.Tensor
        sent.append(tensor.clone())

    def receive(tensor: Any, _: int) -> None:
        assert type(tensor) is torch.Tensor
        tensor.copy_(sent.pop())

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(dist, "recv", receive)
    given, room = (torch.tensor(one).as_subclass(Away) for one in ([7.0, 8.0], [0.0, 0.0]))
    for rank, part in ((1, given), (0, room)):
        monkeypatch.setattr(dist, "get_rank", partial(int, rank))
        assert fold(rank, {0: 0, 1: 1}, partial(_only, part)) == 0
    assert room.tolist() == [7.0, 8.0]


def _only(part: Any, _: int) -> list[Any]:
    return [part]
