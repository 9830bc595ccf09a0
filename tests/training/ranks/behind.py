"""Jobs on a device that runs behind its host, or on the double of one, whose ranks are killed at
any moment; and the gates that are wrong.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import adam

from acpfs.training.manifest import verify
from acpfs.training.marks import Marks
from acpfs.training.messages import ExitStatus
from acpfs.training.torch.buddy import Buddy
from acpfs.training.torch.gate import ExplicitGate
from acpfs.training.torch.groups import NCCL_SETTINGS
from acpfs.training.torch.progress import Progress
from acpfs.training.torch.replicated_zero import ReplicatedZero
from tests.training.ranks.asynchronous import (
    BACKEND,
    AsynchronousAdam,
    DeviceMemory,
    Event,
    Stream,
    install,
    own,
)
from tests.training.ranks.expert_groups import is_expert, mixture, reduce
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.gasps import STEPS, WORLD, Fault, assert_is_its_step, state_of, train_job
from tests.training.ranks.jobs import BATCH, WIDTH, Job, decay, network, whole

LAG_S = 0.0005
MOMENT_S = 0.05
"""A rank is killed so long after a point at most; a step takes about a third of it."""
MANY = 10_000
SLOW_S = 1.0
AHEAD = 0.4
"""In so many of the faults some ranks have the gradients, and another one has not, when a third
dies.
"""
BUDDY_EVERY = 1
LAST = STEPS - 2
"""Nobody is killed in the last updates: ranks that have ended are in no gasp."""
POINTS = ("forward", "backward", "reduce", "ready", "gated", "updating", "updated", "sent_round")


class Place(Protocol):
    """Where a rank's tensors are."""

    name: str
    mesh: str
    """torch's kind of device."""
    backend: str
    is_steady: bool
    """Whether DDP has to keep its buckets from the first step on, or their sums change."""

    def enter(self, directory: Path) -> None:
        """In this process, before its first group."""

    def join(self, rank: int, directory: Path, world: int = WORLD) -> None:
        """Begin as a rank."""

    def put(self, value: Any) -> Any:
        """A module or a tensor, there."""

    def adam(self, parameters: Any, **settings: Any) -> Any: ...

    def do(self, work: Callable[[], object]) -> None:
        """On the stream, behind what was launched."""

    def write(self, value: Any, work: Callable[[Any], object]) -> None:
        """The same to a tensor, as a loop does it in place."""

    def write_data(self, value: Any, work: Callable[[Any], object]) -> None:
        """The same past torch's count of writes, by `value.data`."""

    def exchange(self, value: Any, made: Callable[[Any], Any]) -> None:
        """`value.data = made(value.data)`."""

    def order(self) -> None:
        """What comes next is behind what was launched."""

    def order_in(self, group: Any) -> None:
        """What a group reduces is behind what was launched, and before what comes next."""

    def record(self) -> Any:
        """An event."""

    def wait(self) -> None:
        """All that was launched is done."""


class OnDouble:
    """Of this process."""

    name = "the double"
    mesh = "cpu"
    backend = BACKEND
    is_steady = False  # it sums elements in the order of ranks
    stream: Stream

    def enter(self, directory: Path) -> None:
        self.stream = Stream(LAG_S)
        install(self.stream, directory)

    def join(self, rank: int, directory: Path, world: int = WORLD) -> None:
        self.enter(directory)
        store = dist.FileStore(str(directory / "store"), world)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)

    def put(self, value: Any) -> Any:
        return value

    def adam(self, parameters: Any, **settings: Any) -> Any:
        return AsynchronousAdam(parameters, self.stream, **{"lr": 0.01, **settings})

    def do(self, work: Callable[[], object]) -> None:
        self.stream.launch(work)

    def write(self, value: Any, work: Callable[[Any], object]) -> None:
        # torch counts writes when they are launched
        torch.autograd.graph.increment_version(own(value))
        self.write_data(value, work)

    def write_data(self, value: Any, work: Callable[[Any], object]) -> None:
        there = own(value).data
        self.do(lambda: work(there))

    def exchange(self, value: Any, made: Callable[[Any], Any]) -> None:
        there = own(value).data
        room = torch.empty_like(there)
        self.do(lambda: room.copy_(made(there)))
        own(value).data = room

    def order(self) -> None:
        """The host computes: it has to wait where a stream would have order."""
        self.stream.synchronize()

    def order_in(self, group: Any) -> None:
        group.is_read_at_once = True

    def record(self) -> Any:
        return self.stream.record()

    def wait(self) -> None:
        self.stream.synchronize()


class _Natural:
    """Where torch itself does what it is told."""

    def do(self, work: Callable[[], object]) -> None:
        work()

    def write(self, value: Any, work: Callable[[Any], object]) -> None:
        with torch.no_grad():
            work(own(value))

    def write_data(self, value: Any, work: Callable[[Any], object]) -> None:
        work(own(value).data)

    def exchange(self, value: Any, made: Callable[[Any], Any]) -> None:
        own(value).data = made(own(value).data)


class OnProcessors(_Natural):
    """Where nothing is behind the host, over gloo."""

    name = "processors"
    mesh = "cpu"
    backend = "gloo"
    is_steady = True

    def enter(self, directory: Path) -> None:
        """Nothing has to be there."""

    def join(self, rank: int, directory: Path, world: int = WORLD) -> None:
        join_group(rank, world, directory / "store")

    def put(self, value: Any) -> Any:
        return value

    def adam(self, parameters: Any, **settings: Any) -> Any:
        return torch.optim.Adam(parameters, **{"lr": 0.01, **settings})

    def order(self) -> None:
        """It has."""

    def order_in(self, group: Any) -> None:
        """It has."""

    def record(self) -> Any:
        """Nobody asks."""

    def wait(self) -> None:
        """It has ended."""


class OnOneGpu(_Natural):
    """All ranks share one: NCCL takes them for as many hosts, by `NCCL_HOSTID`.

    Not run yet.
    """

    name = "one GPU"
    mesh = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    is_steady = False

    def enter(self, directory: Path) -> None:
        torch.cuda.set_device(0)

    def join(self, rank: int, directory: Path, world: int = WORLD) -> None:
        os.environ.update(
            NCCL_SETTINGS,
            NCCL_HOSTID=f"rank-{rank}",
            NCCL_P2P_DISABLE="1",
            NCCL_SHM_DISABLE="1",
            NCCL_IB_DISABLE="1",
            NCCL_NET="Socket",
            NCCL_SOCKET_IFNAME="lo",
            ACPFS_TRAIN_UNTRIED_DEVICE="1",
        )
        self.enter(directory)
        store = dist.FileStore(str(directory / "store"), world)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=world)

    def put(self, value: Any) -> Any:
        return value.to("cuda")

    def adam(self, parameters: Any, **settings: Any) -> Any:
        return torch.optim.Adam(parameters, **{"lr": 0.01, **settings})

    def order(self) -> None:
        """The stream has it."""

    def order_in(self, group: Any) -> None:
        """The stream has it."""

    def record(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()


@dataclass
class Behind(Job):
    """A loop as on a device, but that it waits where a device's stream would have order."""

    place: Place = field(kw_only=True)
    memory: DeviceMemory | None = None
    """Where its parameters are, if that can be lost."""
    at_work: Callable[[str, int, Behind], None] = lambda point, number, job: None
    """Called at points by name: what its device does to it."""

    further: tuple[Any, ...] = ()
    """Optimizers beside the first one."""
    passes: int = 1
    """Backward passes of an update; gradients are reduced in the last one."""
    reduce: Callable[[], object] = int
    """Gradients that the loop reduces by itself."""
    clip: Callable[[], object] | None = None
    """What is done to gradients before the update."""
    scaler: Any = None
    overflows: frozenset[int] = frozenset()
    """Updates that are tried once before, with a loss that is infinite."""
    move: Callable[[], object] | None = None
    """What is done to parameters behind each update; `after_update=` says so."""
    is_evaluated: bool = False
    """Whether other parameters are swapped in behind each update, and all ranks meet then."""

    def __post_init__(self) -> None:
        if self.move is not None:
            self.after_update = self.follow

    @property
    def optimizers(self) -> list[Any]:
        return [self.optimizer, *self.further]

    is_rate_there: bool = False
    """Whether the learning rate is on the device as well."""

    def follow(self) -> None:
        """What follows an update, for who reads the parameters then."""
        assert self.move is not None
        self.move()
        self.scheduler.step()
        self.place.order()

    def step(self, number: int, at: Callable[[str], None] = lambda point: None) -> None:
        torch.manual_seed(1000 * number + dist.get_rank() // self.alike)
        at("forward")
        self.place.order()  # the forward pass is behind the update
        if number in self.overflows:
            self._overflow(at)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for left in reversed(range(self.passes)):
            batch = self.place.put(torch.randn(BATCH, WIDTH))
            with self.model.no_sync() if left else contextlib.nullcontext():
                loss = (self.model(batch) - batch).square().mean()
                if not left:
                    at("backward")
                    self.at_work("backward", number, self)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.reduce()
        self.at_work("reduce", number, self)
        at("reduce")
        if self.clip is not None:
            self.place.do(self.clip)
        self._update()
        at("sent_round")
        if self.move is not None:
            self.move()
            at("moved")
        if self.is_rate_there:
            self.place.order()  # a new one is behind the update
        self.scheduler.step()
        if self.is_evaluated:
            self._evaluate(at)

    def _evaluate(self, at: Callable[[str], None]) -> None:
        self.place.order()
        values = list(self.model.parameters())
        kept = [own(value).detach().clone() for value in values]
        with self.operation():
            for value in values:
                self.place.write_data(value, lambda there: there.fill_(77))
            at("evaluating")
            found = torch.ones(1)
            dist.all_reduce(found)
            self.place.order()
            while float(found) != dist.get_world_size():
                """It is what an abort has left: not out of here before somebody says so."""
            for value, one in zip(values, kept, strict=True):
                self.place.write_data(value, partial(_fill, one))

    def _update(self) -> None:
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
            return
        if not isinstance(self.scaler, QueuedScaler):
            self.place.order()  # it looks at gradients
        self.scaler.step(self.optimizer)
        self.place.order()  # its scale is that of the next loss
        self.scaler.update()

    def _overflow(self, at: Callable[[str], None]) -> None:
        """An update that changes nothing but the scale."""
        self.optimizer.zero_grad()
        loss = self.model(self.place.put(torch.randn(BATCH, WIDTH))).sum()
        at("overflow")
        self.scaler.scale(loss * float("inf")).backward()
        self._update()


def _fill(value: Any, there: Any) -> None:
    there.copy_(value)


class QueuedScaler(torch.amp.GradScaler):  # type: ignore[misc]  # torch is Any there
    """Of a fused optimizer on the double: whether gradients are finite is found out on the stream,
    and the optimizer is called before that is known.
    """

    def __init__(self, place: Place, **settings: Any) -> None:
        super().__init__("cpu", **settings)
        self.place = place

    def step(self, optimizer: Any, *_: Any, **__: Any) -> Any:
        found = torch.zeros(())

        def look() -> None:
            (one,) = self._check_inf_per_device(optimizer).values()
            found.copy_(one)

        self.place.do(look)
        optimizer.grad_scale = self._get_scale_async()
        optimizer.found_inf = found
        result = optimizer.step()
        del optimizer.grad_scale
        del optimizer.found_inf
        return result


def ddp(place: Place) -> Behind:
    # without views the reducer of the double copies on the host, before anything is reduced
    model = DistributedDataParallel(
        place.put(network()),
        gradient_as_bucket_view=True,
        bucket_cap_mb=0.001,
        find_unused_parameters=place.is_steady,
    )
    optimizer = place.adam(model.parameters())
    return Behind(model, optimizer, decay(optimizer), place=place)


def hsdp(place: Place) -> Behind:
    mesh = init_device_mesh(place.mesh, (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    model = place.put(network())
    fully_shard(model, mesh=mesh)
    optimizer = place.adam(model.parameters())
    return Behind(model, optimizer, decay(optimizer), place=place)


def tensor_parallel(place: Place) -> Behind:
    """Two copies of a model that two ranks have together."""
    mesh = init_device_mesh(place.mesh, (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    place.order_in(mesh["tensor"].get_group())
    model = place.put(network())
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = place.adam(model.parameters())
    return Behind(model, optimizer, decay(optimizer), alike=2, place=place)


def zero(place: Place) -> Behind:
    """Its parts send parameters round behind the update."""
    job = ddp(place)
    adam: Any = place.adam  # whatever makes one
    optimizer = ReplicatedZero(job.model.parameters(), adam, replicas=2, lr=0.01)
    return replace(job, optimizer=optimizer, scheduler=decay(optimizer))


def experts(place: Place) -> Behind:
    """Two groups of them, with an optimizer of their own."""
    mesh = init_device_mesh(place.mesh, (2, 2), mesh_dim_names=("replicate", "expert"))
    place.order_in(mesh["expert"].get_group())
    model = place.put(mixture(mesh))
    mine = [value for value in model.parameters() if is_expert(value)]
    dense = place.adam([value for value in model.parameters() if not is_expert(value)])
    return Behind(
        *(model, dense, decay(dense)),
        place=place,
        further=(place.adam(mine, lr=0.003),),
        reduce=partial(reduce, model),
    )


def fsdp(place: Place) -> Behind:
    """Nobody has what another rank has."""
    model = place.put(network())
    fully_shard(model, mesh=init_device_mesh(place.mesh, (WORLD,)))
    optimizer = place.adam(model.parameters())
    return Behind(model, optimizer, decay(optimizer), place=place)


def foreach(place: Place) -> Behind:
    job = ddp(place)
    job.optimizer = place.adam(job.model.parameters(), foreach=True)
    return replace(job, scheduler=decay(job.optimizer))


def fused(place: Place) -> Behind:
    job = ddp(place)
    job.optimizer = place.adam(job.model.parameters(), fused=True)
    return replace(job, scheduler=decay(job.optimizer))


def capturable(place: Place) -> Behind:
    """Rate and counts of steps are on the device, and the host reads none of them.

    torch refuses that for processors by a list of kinds of devices: here theirs is in it.
    """
    adam._get_capturable_supported_devices = lambda *_, **__: [place.mesh]
    job = ddp(place)
    rate = place.put(torch.tensor(0.01))
    job.optimizer = place.adam(job.model.parameters(), lr=rate, capturable=True, foreach=True)
    return replace(job, scheduler=decay(job.optimizer), is_rate_there=True)


def clipped(place: Place) -> Behind:
    """By their norm, always."""
    job = ddp(place)
    job.clip = partial(torch.nn.utils.clip_grad_norm_, list(job.model.parameters()), 0.01)
    return job


def clipped_shards(place: Place) -> Behind:
    """Each element of this rank's part."""
    job = hsdp(place)

    def clip() -> None:
        for parameter in job.model.parameters():
            parameter.grad.to_local().clamp_(-0.001, 0.001)

    job.clip = clip
    return job


def accumulated(place: Place) -> Behind:
    return replace(ddp(place), passes=3)


def scaled(place: Place) -> Behind:
    """Whose scale grows at each second update."""
    scaler = torch.amp.GradScaler(place.mesh, init_scale=8.0, growth_interval=2)
    return replace(ddp(place), scaler=scaler)


def scaled_fused(place: Place) -> Behind:
    return replace(fused(place), scaler=scaled(place).scaler)


def overflowing(place: Place) -> Behind:
    """Whose optimizer sees the overflow itself."""
    settings: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}
    scaler = (
        QueuedScaler(place, **settings)
        if isinstance(place, OnDouble)
        else torch.amp.GradScaler(place.mesh, **settings)
    )
    return replace(fused(place), scaler=scaler, overflows=frozenset({3, 5}))


def derived(place: Place) -> Behind:
    """An optimizer that changes something behind its base class's step, beside one of that class:
    torch has wrapped both steps.
    """
    job = ddp(place)
    base: Any = type(job.optimizer)

    class Derived(base):  # type: ignore[misc]  # whatever is there
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for group in self.param_groups:
                for value in group["params"]:
                    place.write(value, lambda there: there.mul_(0.99))
            return result

    given = (place.stream,) if isinstance(place, OnDouble) else ()
    optimizer = Derived(job.model.parameters(), *given, lr=0.01)
    return replace(job, optimizer=optimizer, scheduler=decay(optimizer))


def followed(place: Place) -> Behind:
    """Its parameters are made smaller behind each update."""
    job = hsdp(place)

    def move() -> None:
        for value in job.model.parameters():
            place.write(value, lambda there: there.mul_(0.9))

    return replace(job, move=move)


def evaluated(place: Place) -> Behind:
    return replace(hsdp(place), is_evaluated=True)


class Momentum(torch.nn.Module):  # type: ignore[misc]
    """Keys follow queries in the forward pass, as in MoCo."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.queries = network()
        self.keys = network()
        self.keys.requires_grad_(False)
        self.place = place

    def forward(self, batch: Any) -> Any:
        for query, key in zip(self.queries.parameters(), self.keys.parameters(), strict=True):
            moved = partial(_towards, own(query).data)
            self.place.write(key, moved)
        self.place.order()
        return self.queries(batch) + self.keys(batch)


def _towards(query: Any, key: Any) -> None:
    key.mul_(0.9).add_(query, alpha=0.1)


def momentum(place: Place) -> Behind:
    """Its optimizer has the keys as well, and passes over them."""
    model = DistributedDataParallel(
        place.put(Momentum(place)),
        gradient_as_bucket_view=True,
        find_unused_parameters=place.is_steady,
    )
    optimizer = place.adam(model.parameters())
    return Behind(model, optimizer, decay(optimizer), place=place)


def several(place: Place) -> Behind:
    """Matrices and vectors have optimizers of their own."""
    job = ddp(place)
    matrices = place.adam([one for one in job.model.parameters() if one.dim() > 1])
    vectors = place.adam([one for one in job.model.parameters() if one.dim() == 1], lr=0.003)
    return replace(job, optimizer=matrices, further=(vectors,), scheduler=decay(matrices))


def compiled(place: Place) -> Behind:
    """In DistributedDataParallel: dynamo takes no process group that is written in Python. What it
    makes of the model is carried out as it is.
    """
    inner = torch.compile(place.put(network()), backend="eager")
    model = DistributedDataParallel(
        inner, gradient_as_bucket_view=True, find_unused_parameters=place.is_steady
    )
    optimizer = place.adam(model.parameters())
    return Behind(model, optimizer, decay(optimizer), place=place)


LAYOUTS: dict[str, Callable[[Place], Behind]] = {
    "ddp": ddp,
    "hsdp": hsdp,
    "fsdp": fsdp,
    "tensor parallel": tensor_parallel,
    "zero": zero,
    "experts": experts,
    "foreach": foreach,
    "fused": fused,
    "capturable": capturable,
    "clipped": clipped,
    "clipped shards": clipped_shards,
    "accumulated": accumulated,
    "scaled": scaled,
    "scaled, fused": scaled_fused,
    "overflowing": overflowing,
    "derived": derived,
    "followed": followed,
    "evaluated": evaluated,
    "momentum": momentum,
    "several optimizers": several,
    "compiled": compiled,
}

WHERE = ("ddp", "hsdp", "fsdp", "tensor parallel", "zero", "experts")
"""Who has what."""
CHANGED = (
    ("overflowing", "overflow"),
    ("followed", "sent_round"),
    ("followed", "moved"),
    ("evaluated", "evaluating"),
)
"""Where a loop does something to parameters, or nothing: the points."""
WAYS = sorted(LAYOUTS.keys() - set(WHERE))
"""To do an update."""


# -- gates that are wrong: each is put into a rank in place of the right one


def _none(progress: Progress, step: int) -> None:
    """The update is queued behind the reduction, as loops do."""


def _flag_not_looked_at(progress: Progress, step: int) -> None:
    """Whatever brought the event."""
    event: Any = progress.device.record()
    event.synchronize()


EARLY: list[Event] = []
"""Recorded before a backward pass."""


def _event_too_early(progress: Progress, step: int) -> None:
    """It was recorded before the backward pass."""
    EARLY[-1].synchronize()


FLAG = "flag not looked at"
WRONG: dict[str, Callable[[Progress, int], None]] = {
    "none": _none,
    FLAG: _flag_not_looked_at,
    "event too early": _event_too_early,
}


def put_wrong(gate: str) -> None:
    """For this process."""
    setattr(Progress, "gradients", WRONG[gate])  # noqa: B010  # to mypy it never changes
    if gate == FLAG:  # `Marks.begin` looks once more, and with a gate of its own so do others
        setattr(Marks, "hold", lambda marks: None)  # noqa: B010  # as above
        setattr(ExplicitGate, "wait", _deaf(ExplicitGate.wait))  # noqa: B010  # as above
        setattr(Buddy, "exchange", _deaf(Buddy.exchange))  # noqa: B010  # as above


def _deaf(waits: Callable[..., None]) -> Callable[..., None]:
    """Goes on, whatever brought the answer."""

    def waited(*given: Any) -> None:
        with contextlib.suppress(RuntimeError):
            waits(*given)

    return waited


@dataclass(frozen=True)
class Moment(Fault):
    """The rank is killed some time after a point of an update, wherever it is then."""

    number: int = 0
    delay_s: float = 0.0
    gate: str = ""
    """Which one is wrong; empty: none."""
    slow: frozenset[int] = frozenset()
    """Ranks whose collectives take longer in that update: others are ahead when they are
    aborted.
    """

    def at_work(self, rank: int, point: str, number: int, job: Behind) -> None:
        """A rank is at a point, and its device does something to it."""
        if rank in self.slow and isinstance(job.place, OnDouble) and number >= self.number:
            job.place.stream.slow_s = SLOW_S

    def comes_at(self, rank: int, point: str, number: int) -> bool:
        return self.ranks.get(rank) == point and number == self.number

    def reached(self, rank: int, point: str, number: int) -> None:
        if self.comes_at(rank, point, number):
            kill = (os.getpid(), signal.SIGKILL)
            threading.Timer(self.delay_s, os.kill, kill).start()


@dataclass(frozen=True)
class Fails(Moment):
    """Rank 2's device fails, in update 5."""

    never: bool = False
    """Whether it does not answer any more; else it says so, and no memory of it can be read."""

    def at_work(self, rank: int, point: str, number: int, job: Behind) -> None:
        if (rank, point, number) != (2, "reduce", self.number):
            return
        assert isinstance(job.place, OnDouble)
        if self.never:
            job.place.stream.launch(threading.Event().wait)
            return
        assert job.memory is not None
        job.place.stream.is_broken = True
        job.memory.lose()


@dataclass(frozen=True)
class Exits(Moment):
    """The loops of all others do, for what an aborted collective has left: a number says so."""

    def at_work(self, rank: int, point: str, number: int, job: Behind) -> None:
        if point == "reduce" and number == self.number and rank not in self.ranks:
            job.place.order()
            raise SystemExit


@dataclass(frozen=True)
class Signalled(Moment):
    """SIGINT comes in an update in all ranks, and its handler raises, as it does by default."""

    def reached(self, rank: int, point: str, number: int) -> None:
        if point == "forward":  # of a rank that was forked it is the system's
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if point == "updating" and number == self.number:
            signal.raise_signal(signal.SIGINT)


def drawn(kind: str, chance: random.Random, gate: str = "", first: int = 2) -> Moment:
    """`first`: the update from which on; one that dies before the first is done leaves nothing."""
    dies, slow = chance.sample(range(WORLD), 2)
    is_ahead = chance.random() < AHEAD
    return Moment(
        kind,
        {dies: "gated" if is_ahead else chance.choice(POINTS)},
        number=chance.randrange(first, LAST),
        delay_s=chance.random() * (0.0 if is_ahead else MOMENT_S),
        gate=gate,
        slow=frozenset({slow} if is_ahead else ()),
    )


def protected(rank: int, fault: Moment, directory: Path, place: Place, **settings: Any) -> None:
    """A rank that was forked. `settings`: of `protect`."""
    place.join(rank, directory)
    job = LAYOUTS[fault.kind](place)
    job.at_work = partial(fault.at_work, rank)
    if isinstance(fault, Fails):
        job.memory = DeviceMemory(job.model)
    if fault.gate:
        put_wrong(fault.gate)
        job.model.register_forward_hook(lambda *_: EARLY.append(place.record()))
        # on a machine that is busy the exception would come before the wrong gate is passed
        settings["interrupt_after_s"] = 2.0
        settings["steps"] = MANY  # garbage ends no loop
    if job.scaler is not None:
        settings["scaler"] = job.scaler
    if fault.kind == "fsdp":
        settings["buddy_every"] = BUDDY_EVERY
    train_job(rank, job, fault, directory / "run", **settings)
    place.wait()


# -- the yardstick


def without_fault(rank: int, kind: str, directory: Path, place: Place) -> None:
    """State at the end of each step, put together over gloo."""
    place.join(rank, directory)
    group = dist.new_group(backend="gloo")
    job = LAYOUTS[kind](place)
    for number in range(1, STEPS + 1):
        job.step(number)
        place.wait()
        torch.save(state_of(job), directory / f"{kind}-{number}-{rank}.pt")
        if hasattr(job.optimizer, "consolidate_state_dict"):
            found = whole(job)
            if rank == 0:
                torch.save(found, directory / f"{kind}-{number}.pt")
            continue
        model, optim = get_state_dict(job.model, job.optimizers)
        checkpoint.save(
            {"model": model, "optim": optim},
            checkpoint_id=directory / f"{kind}-{number}",
            process_group=group,
        )
        if rank == 0:
            dcp_to_torch_save(directory / f"{kind}-{number}", directory / f"{kind}-{number}.pt")


def yardstick(kind: str, directory: Path, place: Place) -> Path:
    """Where it is; made once."""
    # yardsticks of other tests lie there as well
    found = directory / f"{place.name.replace(' ', '-')}-{kind}"
    if not (found / f"{kind}-{STEPS}.pt").exists():
        found.mkdir()
        with Ranks(WORLD, found, lambda rank: without_fault(rank, kind, found, place)) as ranks:
            assert ranks.statuses(600) == [0] * WORLD, ranks.said()
    return found


def verdict(
    fault: Moment, directory: Path, yardsticks: Path, place: Place | None = None, **settings: Any
) -> str:
    """What a job with this fault leaves: "right", "corrupted", "too late", or that nothing was
    left. `settings`: of `protect`.
    """
    place = place or OnDouble()
    expected = yardstick(fault.kind, yardsticks, place)
    with Ranks(
        WORLD, directory, lambda rank: protected(rank, fault, directory, place, **settings)
    ) as ranks:
        statuses = ranks.statuses()
        said = ranks.said()
    latest = directory / "run" / "latest"
    if not latest.exists():
        # a rank whose loop has ended leaves in order, and takes its shard along
        return "too late" if 0 in statuses else f"nothing was left: {statuses}\n{said}"
    manifest = verify(directory / "run" / latest.read_text().strip())
    if manifest.step > STEPS:  # nobody could go on without the dead
        return f"corrupted at step {manifest.step}, {fault}"
    try:
        for rank, status in enumerate(statuses):
            lost = isinstance(fault, Fails) and rank == 2
            assert status in (
                ({-signal.SIGKILL, ExitStatus.SAVED} if rank in fault.ranks else set())
                | {ExitStatus.TAKEN_FOR_LOST if lost else ExitStatus.SAVED}
                # of a rank that had left before the others stopped; what they leave has to be right
                | {0}
            ), said
        assert_is_its_step(fault.kind, directory / "run", expected)
    except AssertionError as error:
        return f"corrupted at step {manifest.step}, {fault}, {statuses}: {str(error)[:2000]}"
    # at most the update of the fault is lost, or what was launched while the timer ran
    return "right"
