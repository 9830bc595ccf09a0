"""Who holds what, and digests of copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training.marks import Marks
from acpfs.training.messages import Gate, Save
from acpfs.training.policy import Policy
from acpfs.training.torch.groups import Groups
from acpfs.training.torch.layout import everywhere, layout_of
from acpfs.training.torch.local_state import LocalState
from acpfs.training.torch.rank import LoopCalls, OnHost, TorchRank, Trained
from acpfs.training.torch.replicated_zero import ReplicatedZero
from acpfs.training.torch.run import Run
from acpfs.training.torch.writers import NotWrittenError, SingleWriter
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.jobs import JOBS, network

WORLD = 4
STEPS = 3
HOLDERS: dict[str, list[set[tuple[int, ...]]]] = {
    "ddp": [{(0, 1, 2, 3)}] * 4,
    "zero": [{(0, 2)}, {(1, 3)}] * 2,
    "hsdp": [{(0, 2)}, {(1, 3)}] * 2,
    "tensor": [{(0, 2), (0, 1, 2, 3)}, {(1, 3), (0, 1, 2, 3)}] * 2,
    "experts": [{(0, 2), (0, 1, 2, 3)}, {(1, 3), (0, 1, 2, 3)}] * 2,
    "experts on meshes": [{(0, 2)}, {(1, 3)}] * 2,
    "stages": [{(0, 2)}, {(1, 3)}] * 2,
}


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def _layout(rank: int, kind: str, directory: Path) -> None:
    join_group(rank, WORLD, directory / "store")
    job = JOBS[kind]()
    layout = layout_of(job.model, job.optimizers, job.copies)
    assert set(layout.holders.values()) == HOLDERS[kind][rank]
    assert layout.copies == (4 if kind == "ddp" else 2)
    assert layout.gate is (Gate.NONE if kind == "ddp" else Gate.EXPLICIT)
    for number in range(1, STEPS + 1):
        job.step(number)
    state = LocalState(job.model, job.optimizers, layout)
    before = {shard: state.digest(shard) for shard in layout.holders}
    for other in _gathered(before):
        assert all(before.get(shard, digest) == digest for shard, digest in other.items())
    with torch.no_grad():
        next(iter(state.shard(min(layout.holders)).values()))[""].mul_(1.0000001)
    assert state.digest(min(layout.holders)) != before[min(layout.holders)]


@pytest.mark.clause("T43")
@pytest.mark.parametrize("kind", JOBS)
def test_holders_of_a_shard_have_equal_copies(tmp_path: Path, kind: str) -> None:
    with Ranks(WORLD, tmp_path, lambda rank: _layout(rank, kind, tmp_path)) as ranks:
        assert ranks.statuses() == [0] * WORLD


def _closed(rank: int, directory: Path) -> None:
    join_group(rank, 2, directory / "store")
    with pytest.raises(ConfigError, match="plain tensor"):
        layout_of(network(), [])
    with pytest.raises(ConfigError, match="do not divide"):
        ReplicatedZero(network().parameters(), torch.optim.Adam, replicas=3)
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = ReplicatedZero(model.parameters(), torch.optim.Adam, replicas=1)
    layout = layout_of(model, [optimizer])
    assert layout.copies == 1
    with pytest.raises(ConfigError, match="none has the whole state"):
        SingleWriter(lambda step, path: None, layout)
    with pytest.raises(ConfigError, match="not one of the model"):
        LocalState(model, [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])], layout)


@pytest.mark.clause("T43")
def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, lambda rank: _closed(rank, tmp_path)) as ranks:
        assert ranks.statuses() == [0, 0]


def _alone(rank: int, directory: Path) -> None:
    join_group(rank, 2, directory / "store")
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = ReplicatedZero(model.parameters(), torch.optim.Adam, replicas=1)
    with pytest.raises(ConfigError, match="nobody else holds"):
        TorchRank(Trained(model, [optimizer]), OnHost(), LoopCalls(), Policy(), 0)


@pytest.mark.clause("T43")
def test_a_shard_that_nobody_else_holds_is_refused(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, lambda rank: _alone(rank, tmp_path)) as ranks:
        assert ranks.statuses() == [0, 0], ranks.said()


class Wrapped(torch.nn.Module):  # type: ignore[misc]  # torch is Any where types are checked
    """As what torch.compile makes of a module; making a real one takes six seconds."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._orig_mod = module


def _compiled(rank: int, directory: Path, *, compiled: Callable[[Any], Any]) -> None:
    join_group(rank, 2, directory / "store")
    model = compiled(torch.nn.parallel.DistributedDataParallel(network()))
    optimizer = torch.optim.SGD(model.parameters())
    layout = layout_of(model, [optimizer])
    assert set(layout.holders.values()) == {(0, 1)}
    (shard,) = layout.holders
    names = {name for name, _ in network().named_parameters()}
    assert LocalState(model, [optimizer], layout).shard(shard).keys() == names


@pytest.mark.clause("T192")
@pytest.mark.parametrize(
    "compiled",
    [Wrapped, pytest.param(partial(torch.compile, backend="eager"), marks=pytest.mark.long)],
    ids=["as torch.compile", "torch.compile"],
)
def test_a_model_that_was_compiled_around_ddp_is_that_ddp(
    tmp_path: Path, compiled: Callable[[Any], Any]
) -> None:
    with Ranks(2, tmp_path, lambda rank: _compiled(rank, tmp_path, compiled=compiled)) as ranks:
        assert ranks.statuses() == [0, 0], ranks.said()


def _frozen(rank: int, directory: Path) -> None:
    join_group(rank, 1, directory / "store")
    model = network()
    frozen, *_others = model.parameters()
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout = layout_of(model, [optimizer])
    written = LocalState(model, [optimizer], layout).checkpoint(layout.holders)
    names = [name for name, _ in model.named_parameters()]
    assert [group["params"] for group in written["optim"]["param_groups"]] == [names]
    assert names[0] not in written["optim"]["state"]
    assert set(names) <= written["model"].keys()


@pytest.mark.clause("T193")
def test_an_optimizer_may_have_frozen_parameters_of_the_model(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, lambda rank: _frozen(rank, tmp_path)) as ranks:
        assert ranks.statuses() == [0], ranks.said()


def _without_a_backend(rank: int, directory: Path) -> None:
    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group(store=store, rank=rank, world_size=1)
    Groups()
    dist.destroy_process_group()
    dist.init_process_group("cpu:fake", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="backend cpu:fake"):
        Groups()
    run = Run(directory, "job", 0, 1, Marks(), Policy(), lambda: None)
    with pytest.raises(ConfigError, match="backend cpu:fake"):
        run.restore(model=network(), optimizer=None)


@pytest.mark.clause("T177", "T194")
def test_a_backend_that_nobody_named_is_what_torch_takes(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, lambda rank: _without_a_backend(rank, tmp_path)) as ranks:
        assert ranks.statuses() == [0], ranks.said()


def _saved_elsewhere(rank: int, directory: Path) -> None:
    join_group(rank, 1, directory / "store")
    order = Save(1, {"all": 0}, (0,), "written", "step-1")

    def void(_: object) -> None:
        """What a script's own function gives."""

    def with_what(write: Callable[[Path], object]) -> tuple[str, ...]:
        writer = SingleWriter(lambda _, path: void(write(path)), everywhere())
        return tuple(file.path for file in writer.write(directory / "written", order, ("all",)))

    for write in (lambda path: (directory / "own").write_bytes(b"x"), lambda path: path / "x"):
        with pytest.raises(NotWrittenError, match="nothing into"):
            with_what(write)
    with pytest.raises(NotWrittenError, match="nothing into"):
        with_what(lambda path: (path / "empty").touch())
    assert with_what(lambda path: (path / "whole").write_bytes(b"x")) == ("empty", "whole")


@pytest.mark.clause("T171")
def test_a_save_that_writes_elsewhere_has_saved_nothing(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, lambda rank: _saved_elsewhere(rank, tmp_path)) as ranks:
        assert ranks.statuses() == [0], ranks.said()


def _alike(rank: int, directory: Path, *, is_named: bool) -> None:
    """Two stages that begin with the same numbers."""
    join_group(rank, WORLD, directory / "store")
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    name = f"stage-{rank % 2}" if is_named else "stage"
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.ModuleDict({name: network()}), process_group=groups[rank % 2]
    )
    if is_named:
        assert layout_of(model, []).copies == 2
    else:
        with pytest.raises(ConfigError, match="another parameter in other ranks"):
            layout_of(model, [])


@pytest.mark.clause("T111")
@pytest.mark.parametrize("is_named", [True, False])
def test_two_parameters_of_one_name_are_refused(tmp_path: Path, is_named: bool) -> None:
    with Ranks(WORLD, tmp_path, lambda rank: _alike(rank, tmp_path, is_named=is_named)) as ranks:
        assert ranks.statuses() == [0] * WORLD, ranks.said()


def _undeclared(rank: int, directory: Path) -> None:
    join_group(rank, WORLD, directory / "store")
    job = JOBS["experts"]()
    with pytest.raises(ConfigError, match="copies= says it"):
        layout_of(job.model, job.optimizers)


@pytest.mark.clause("T111")
def test_what_ddp_ignores_has_to_be_declared(tmp_path: Path) -> None:
    with Ranks(WORLD, tmp_path, lambda rank: _undeclared(rank, tmp_path)) as ranks:
        assert ranks.statuses() == [0] * WORLD, ranks.said()
