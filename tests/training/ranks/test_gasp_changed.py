"""What a loop does to parameters beside its updates: a gasp has them as they were at the end of its
step, in all ranks alike.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from acpfs.training import protect
from acpfs.training.manifest import verify
from acpfs.training.messages import ExitStatus
from tests.training.ranks.behind import OnDouble, OnProcessors, Place
from tests.training.ranks.forked import Ranks
from tests.training.ranks.jobs import WIDTH, assert_same, network

pytestmark = [
    pytest.mark.long,
    pytest.mark.parametrize("place", [OnProcessors(), OnDouble()], ids=["gloo", "double"]),
]
DIES = 5
HANGS_S = 30


def step(place: Place, model: Any, optimizer: Any, number: int) -> None:
    torch.manual_seed(1000 * number + dist.get_rank())
    place.order()  # the forward pass is behind the update
    batch = torch.randn(4, WIDTH)
    optimizer.zero_grad()
    (model(batch) - batch).square().mean().backward()
    optimizer.step()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def met(place: Place, rank: int) -> None:
    """Rank 1 knows that rank 0 has done the update before."""
    if rank == 0:
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        dist.recv(torch.empty(1), 0)
        place.order()


def distributed(model: Any, **settings: Any) -> Any:
    # without views the reducer of the double copies on the host, before anything is reduced
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **settings)


def left(directory: Path, scratch: Path) -> dict[str, Any]:
    """The model in the gasp, and that its copies were equal."""
    gasp = directory / (directory / "latest").read_text().strip()
    manifest = verify(gasp)
    assert manifest.step == DIES - 1
    assert not manifest.differing
    dcp_to_torch_save(gasp, scratch)
    found: dict[str, Any] = torch.load(scratch, weights_only=True)["model"]
    return found


def gasp_of(
    place: Place,
    tmp_path: Path,
    world: int,
    lost: int,
    train: Callable[[int, Path | None], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is left when rank `lost` dies, and what there is at the end of that step without."""

    def main(rank: int, directory: Path | None) -> None:
        meet = tmp_path / f"meet-{directory is None}"
        meet.mkdir(exist_ok=True)
        place.join(rank, meet, world)
        train(rank, directory)

    with Ranks(world, tmp_path, lambda rank: main(rank, None)) as ranks:
        assert ranks.statuses() == [0] * world, ranks.said()
    with Ranks(world, tmp_path, lambda rank: main(rank, tmp_path / "run")) as ranks:
        for rank in range(world):
            expected = -signal.SIGKILL if rank == lost else ExitStatus.SAVED
            assert ranks.status(rank) == expected, ranks.said()
    return left(tmp_path / "run", tmp_path / "left.pt"), torch.load(
        tmp_path / "expected.pt", weights_only=True
    )


Move = Callable[[Place, Any, Any], None]


class Momentum(torch.nn.Module):  # type: ignore[misc]  # torch is not there where types are checked
    """Keys follow queries in the forward pass, as in MoCo; or the loop moves them behind its
    update, as in BYOL.
    """

    def __init__(self, place: Place, move: Move | None) -> None:
        super().__init__()
        self.place = place
        self.queries = network()
        self.keys = network()
        self.keys.requires_grad_(False)
        self.move = move

    def follow(self, move: Move) -> None:
        for query, key in zip(self.queries.parameters(), self.keys.parameters(), strict=True):
            move(self.place, query, key)

    def forward(self, batch: Any) -> Any:
        if self.move is not None:
            self.follow(self.move)
            self.place.order()
        return self.queries(batch) + self.keys(batch)


def in_place(place: Place, query: Any, key: Any) -> None:
    there = query.data
    place.write(key, lambda value: value.mul_(0.9).add_(there, alpha=0.1))


def by_data(place: Place, query: Any, key: Any) -> None:
    there = query.data
    place.exchange(key, lambda value: value * 0.9 + there * 0.1)


@pytest.mark.clause("T174")
@pytest.mark.parametrize("move", [in_place, by_data])
@pytest.mark.parametrize("where", ["forward", "behind"])
def test_parameters_that_no_optimizer_updates_and_that_the_loop_moves(
    tmp_path: Path, place: Place, move: Move, where: str
) -> None:
    def train(rank: int, directory: Path | None) -> None:
        module = Momentum(place, move if where == "forward" else None)
        model = distributed(module)
        optimizer = place.adam(module.queries.parameters(), lr=0.05)

        def behind() -> None:
            if where == "behind":
                module.follow(move)

        def follow() -> None:
            behind()
            place.order()  # who reads it is on the stream as well

        protection: Any = (
            protect(directory, model=model, optimizer=optimizer, after_update=follow)
            if directory
            else nullcontext()
        )
        with protection:
            for number in range(1, 99 if directory else DIES):
                if number == DIES:
                    met(place, rank)
                    if rank == 1:
                        module.register_forward_hook(lambda *_: die())
                step(place, model, optimizer, number)
                behind()
        place.wait()
        if rank == 0:
            torch.save(module.state_dict(), tmp_path / "expected.pt")

    found, expected = gasp_of(place, tmp_path, 2, 1, train)
    assert_same(found, expected)


@pytest.mark.clause("T173")
@pytest.mark.parametrize("is_told", [True, False])
def test_parameters_that_the_loop_changes_behind_its_update(
    tmp_path: Path, place: Place, is_told: bool
) -> None:
    """One holder of each shard had done so when the fault came, or one of each had not."""

    def train(rank: int, directory: Path | None) -> None:
        model = network()
        fully_shard(model, mesh=init_device_mesh(place.mesh, (2, 2), mesh_dim_names=("r", "s")))
        optimizer = place.adam(model.parameters(), lr=0.1)

        def project() -> None:
            for parameter in model.parameters():
                place.write(parameter, lambda there: there.mul_(0.5))

        def follow() -> None:
            project()
            place.order()  # who reads it is on the stream as well

        told = follow if is_told else None
        protection: Any = (
            protect(directory, model=model, optimizer=optimizer, after_update=told)
            if directory
            else nullcontext()
        )
        with protection:
            for number in range(1, 99 if directory else DIES):
                step(place, model, optimizer, number)
                if directory and number == DIES - 1 and rank in (0, 3):
                    if rank == 3:
                        dist.recv(torch.empty(1), 1)
                        place.order()
                        die()
                    threading.Event().wait()
                if is_told or directory or number < DIES - 1:
                    project()
                if directory and number == DIES - 1 and rank == 1:
                    dist.send(torch.ones(1), 3)
        place.wait()
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        place.wait()  # it is gathered
        if rank == 0:
            torch.save(whole, tmp_path / "expected.pt")

    found, expected = gasp_of(place, tmp_path, 4, 3, train)
    assert_same(found, expected)


def _filled(value: Any, there: Any) -> None:
    there.copy_(value)


@pytest.mark.clause("T173")
def test_averaged_weights_of_an_evaluation_that_hangs(tmp_path: Path, place: Place) -> None:
    """Another thread saves for the main one, which has not swapped them back."""

    @contextmanager
    def averaged(model: Any) -> Iterator[None]:
        place.order()
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            place.write_data(parameter, lambda there: there.fill_(77))
        yield
        for parameter, value in zip(model.parameters(), kept, strict=True):
            place.write_data(parameter, partial(_filled, value))

    def train(rank: int, directory: Path | None) -> None:
        model = distributed(network())
        optimizer = place.adam(model.parameters(), lr=0.1)
        if directory is None:
            for number in range(1, DIES):
                step(place, model, optimizer, number)
            place.wait()
            if rank == 0:
                torch.save(model.module.state_dict(), tmp_path / "expected.pt")
            return
        with protect(directory, model=model, optimizer=optimizer) as protection:
            for number in range(1, DIES):
                step(place, model, optimizer, number)
            with protection.long_operation(), averaged(model):
                met(place, rank)
                if rank == 1:
                    die()
                ctypes.CDLL(None).sleep(HANGS_S)  # as for a slow storage

    found, expected = gasp_of(place, tmp_path, 2, 1, train)
    assert_same(found, expected)


@pytest.mark.clause("T175")
@pytest.mark.parametrize("dies_in", [DIES, DIES + 1])
def test_a_parameter_that_is_trained_from_some_update_on(
    tmp_path: Path, place: Place, dies_in: int
) -> None:
    """Not yet in the gasp's step, or just in it."""

    def train(rank: int, directory: Path | None) -> None:
        net = network()
        late = net[0].weight
        place.order_in(dist.group.WORLD)  # it reduces what was used, and reads that at once
        model = distributed(net, find_unused_parameters=True)  # it reduces all of them
        late.requires_grad_(False)
        optimizer = place.adam([one for one in net.parameters() if one.requires_grad], lr=0.05)
        protection: Any = (
            protect(directory, model=model, optimizer=optimizer) if directory else nullcontext()
        )
        with protection:
            for number in range(1, 99 if directory else DIES):
                if number + dies_in == 2 * DIES:
                    late.requires_grad_(True)
                    optimizer.add_param_group({"params": [late]})
                if number == DIES:
                    met(place, rank)
                    if rank == 1:
                        model.register_forward_hook(lambda *_: die())
                step(place, model, optimizer, number)
        place.wait()
        if rank == 0:
            torch.save(net.state_dict(), tmp_path / "expected.pt")

    found, expected = gasp_of(place, tmp_path, 2, 1, train)
    assert_same(found, expected)
