"""The double of a device that runs behind its host: it does to a loop what a GPU does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training.ranks.asynchronous import AsynchronousAdam, AsynchronousGroup, Double, Stream


@pytest.fixture
def stream() -> Stream:
    return Stream()


def groups(stream: Stream, directory: Path, world: int, here: int) -> list[AsynchronousGroup]:
    """Those of the first ranks of a world; the others never come. On one stream each."""
    store = dist.HashStore()
    streams = [stream, *(Stream() for _ in range(here - 1))]
    return [AsynchronousGroup(store, rank, world, streams[rank], directory) for rank in range(here)]


def test_a_collective_is_queued_and_done_later(stream: Stream, tmp_path: Path) -> None:
    mine, other = groups(stream, tmp_path, 2, 2)
    let_go = threading.Event()
    stream.launch(let_go.wait)
    here = torch.ones(3)
    there = torch.full((3,), 2.0)
    assert mine.allreduce([here]).wait()
    event = stream.record()
    other.allreduce([there])
    assert not event.query()
    assert torch.equal(here, torch.ones(3))
    let_go.set()
    event.synchronize()
    assert torch.equal(here, torch.full((3,), 3.0))


def test_an_abort_lets_what_is_queued_run_with_garbage(stream: Stream, tmp_path: Path) -> None:
    (alone,) = groups(stream, tmp_path, 2, 1)
    gradient = torch.ones(1000)
    seen: list[Any] = []
    alone.allreduce([gradient])
    stream.launch(lambda: seen.append(gradient.clone()))
    event = stream.record()
    assert not event.query()
    alone.abort()
    event.synchronize()
    assert not torch.equal(seen[0], torch.ones(1000))


def test_a_reduction_of_shards_and_their_gathering(stream: Stream, tmp_path: Path) -> None:
    mine, other = groups(stream, tmp_path, 2, 2)
    whole = torch.arange(4.0)
    here = torch.zeros(2)
    there = torch.zeros(2)
    mine._reduce_scatter_base(here, whole)
    other._reduce_scatter_base(there, whole + 1)
    stream.synchronize()
    assert here.tolist() == [1, 3]
    gathered = torch.zeros(4)
    gathering = threading.Thread(
        target=other._allgather_base, args=(torch.zeros(4), torch.tensor([7.0, 8.0]))
    )
    gathering.start()
    mine._allgather_base(gathered, here)
    gathering.join()
    assert gathered.tolist() == [1, 3, 7, 8]


def test_an_update_is_that_of_the_real_optimizer(stream: Stream) -> None:
    """Though what a scheduler sets behind the launch is there before the update is done."""
    torch.manual_seed(1)
    real = [torch.nn.Parameter(torch.randn(5)) for _ in range(6)]
    own = [torch.nn.Parameter(value.detach().clone()) for value in real]
    one = torch.optim.Adam(real, lr=0.1)
    other = AsynchronousAdam(own, stream, lr=0.1)
    for step in range(3):
        for first, second in zip(real, own, strict=True):
            first.grad = torch.full((5,), float(step + 1))
            second.grad = torch.full((5,), float(step + 1))
        versions = [value._version for value in own]
        other.step()
        launched = [value._version for value in own]
        assert all(now > then for now, then in zip(launched, versions, strict=True))
        other.param_groups[0]["lr"] = one.param_groups[0]["lr"] / 2
        stream.synchronize()
        assert [value._version for value in own] == launched
        one.step()
        one.param_groups[0]["lr"] /= 2
        for first, second in zip(real, own, strict=True):
            assert torch.equal(first, second)
            assert torch.equal(one.state[first]["exp_avg_sq"], other.state[second]["exp_avg_sq"])


def test_an_error_that_sticks(stream: Stream) -> None:
    event = stream.record()
    event.synchronize()
    stream.is_broken = True
    for call in (event.query, stream.record, lambda: Double(stream).probe(torch.ones(1))):
        with pytest.raises(RuntimeError, match="uncorrectable ECC"):
            call()
