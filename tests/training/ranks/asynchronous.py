"""A device that runs behind its host, for processors: a stream (a thread, first in first out), its
events, and a process group whose collectives are queued on it.

As on a GPU: a work's `wait` does not stop the host; a collective whose peer is dead spins for ever;
an abort ends it and leaves anything in its buffers; and what is queued behind it *runs*. Between
ranks is one file in memory: a death breaks nothing, and no socket ends anything.

What a GPU would order on its stream, and the host does here, waits for the stream: a forward pass
reads what the update writes, and an all-gather's result is read at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import struct
import threading
import traceback
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim._functional import adam

from acpfs.training.torch import device as devices
from acpfs.training.torch.device import Processor

BACKEND = "asynchronous"
SLOT_BYTES = 1 << 20
"""Room of one rank for one tensor; pages that nobody touches take nothing."""
_NUMBERS_BYTES = 4096
_PAIRS = 1024
"""Where the numbers of what one rank sends to another begin; before it are those of collectives."""
SPINS_S = 200e-6
_ROOM_BYTES = 1 << 16
"""Of a rank, where parts of different sizes are exchanged."""
_LIBC = ctypes.CDLL(None)
_LOCK_BYTES = 64


class Waiting:
    """How who synchronizes waits in C: as CUDA does by default, or as with its blocking
    synchronization, where the processor is left to others.
    """

    spins = True

    @classmethod
    def kind(cls) -> str:
        """Of glibc's locks; any thread may unlock either."""
        return "spin" if cls.spins else "mutex"


class Event:
    """A mark on a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._is_done = False
        self._lock = ctypes.create_string_buffer(_LOCK_BYTES)
        self._kind = Waiting.kind()
        getattr(_LIBC, f"pthread_{self._kind}_init")(self._lock, 0)
        self._do("lock")

    def _do(self, what: str) -> None:
        getattr(_LIBC, f"pthread_{self._kind}_{what}")(self._lock)

    def reach(self) -> None:
        """On the stream."""
        self._is_done = True
        self._do("unlock")

    def query(self) -> bool:
        self._stream.look_whether_broken()
        return self._is_done

    def synchronize(self) -> None:
        """No exception of another thread gets through to who is in here."""
        self._do("lock")
        self._do("unlock")
        self._stream.look_whether_broken()


class Stream:
    """The only one of a device."""

    def __init__(self, lag_s: float = 0.0) -> None:
        """`lag_s`: so long each piece of work takes more."""
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lag_s = lag_s
        self.slow_s = 0.0
        """A collective takes so long from what this rank sends to what it gets."""
        self.is_broken = False
        """An error that sticks: every call fails from then on, in this process."""
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether it is the stream that asks."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        with torch.no_grad():
            while True:
                work = self._queue.get()
                if self._lag_s:
                    threading.Event().wait(self._lag_s)
                if self.is_broken:
                    continue
                try:
                    work()
                except Exception:  # noqa: BLE001  # whatever it is: else all would wait for ever
                    traceback.print_exc()
                    self.is_broken = True

    def look_whether_broken(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    def launch(self, work: Callable[[], object]) -> None:
        """The host goes on."""
        self.look_whether_broken()
        self._queue.put(work)

    def record(self) -> Event:
        event = Event(self)
        self.launch(event.reach)
        return event

    def synchronize(self) -> None:
        self.record().synchronize()


class Double(Processor):
    """What acpfs knows of the device."""

    is_behind = True

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def record(self) -> Event:
        return self._stream.record()

    def end_collectives(self, group: Any) -> None:
        group.abort()

    def probe(self, value: Any) -> None:
        self._stream.synchronize()
        value.detach().reshape(-1)[:8].clone()
        self._stream.look_whether_broken()


class AbortedError(RuntimeError):
    """Of a collective that spins."""


class _Work(dist._Work):  # type: ignore[misc]  # torch is not there where types are checked
    """The host does not wait for it."""

    def __init__(self, found: Any, event: Event) -> None:
        super().__init__()
        self._event = event
        self._future = Future()
        self._future.set_result(found)  # who uses it is on the stream as well

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def get_future(self) -> Any:
        return self._future


class AsynchronousGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Of one rank."""

    is_read_at_once = False
    """What it gives is in a forward pass, where a stream would have order."""

    def __init__(self, store: Any, rank: int, world: int, stream: Stream, directory: Path) -> None:
        super().__init__(rank, world)
        self._rank = rank
        self._world = world
        self._stream = stream
        self._begun = 0
        self._aborted = threading.Event()
        if rank == 0:
            store.set("memory", str(directory / f"memory-{uuid.uuid4().hex}"))
        path = store.get("memory").decode()
        self._between: dict[tuple[int, int], int] = {}
        """(sender, receiver) → how many have begun."""
        assert _PAIRS + 16 * world * world <= _NUMBERS_BYTES
        size = _NUMBERS_BYTES + 2 * world * (1 + world) * SLOT_BYTES  # most of it is a hole
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        os.close(descriptor)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        """As torch has it; what is written in C++ does not know that of a group in Python."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def abort(self) -> None:
        """What spins ends, with anything in its buffers; what is queued behind it runs."""
        self._aborted.set()

    # -- on the stream

    def _exchanged(self, number: int, data: bytes, room: int = 0) -> list[bytes]:
        """Everybody's; spins until all are there. `room`: so much of it is read; 0: as much as this
        rank has.

        Two halves in turns: who is two collectives ahead knows that all have read this one.
        """
        assert len(data) <= (room or SLOT_BYTES) <= SLOT_BYTES
        half = _NUMBERS_BYTES + (number % 2) * self._world * SLOT_BYTES
        own = half + self._rank * SLOT_BYTES
        self._memory[own : own + len(data)] = data
        struct.pack_into("<Q", self._memory, 8 * self._rank, number)
        if self._aborted.wait(self._stream.slow_s):  # also one that begins behind an abort
            raise AbortedError
        for rank in range(self._world):
            while struct.unpack_from("<Q", self._memory, 8 * rank)[0] < number:
                if self._aborted.wait(SPINS_S):
                    raise AbortedError
        places = [half + rank * SLOT_BYTES for rank in range(self._world)]
        return [self._memory[place : place + (room or len(data))] for place in places]

    def _pair(self, sender: int, receiver: int) -> tuple[int, int]:
        """(where the numbers of what was sent and was received are, its first slot)."""
        pair = sender * self._world + receiver
        return _PAIRS + 16 * pair, _NUMBERS_BYTES + 2 * (self._world + pair) * SLOT_BYTES

    def _spin(self, place: int, number: int) -> None:
        """Until it is `number` there."""
        while struct.unpack_from("<Q", self._memory, place)[0] < number:
            if self._aborted.wait(SPINS_S):
                raise AbortedError

    def _go(
        self,
        sent: Sequence[Any],
        take: Callable[[int, list[Any]], object],
        written: Sequence[Any] | None = None,
        *,
        is_read_at_once: bool = False,
        is_only_read: bool = False,
    ) -> _Work:
        """`take(number, everybody's)`: what becomes of the tensor with that number.

        `written`: what it writes into; None: what is sent. `is_read_at_once`: by the host.
        `is_only_read`: an abort leaves what is sent alone.
        """
        self._begun += len(sent)
        first = self._begun - len(sent) + 1

        def work() -> None:
            for number, one in enumerate(sent):
                flat = one.detach().contiguous().reshape(-1).view(torch.uint8)
                try:
                    found = self._exchanged(first + number, flat.numpy().tobytes())
                    take(
                        number,
                        [_as_tensor(data, one) for data in found],
                    )
                except AbortedError:
                    if is_only_read:
                        continue
                    for left in sent if written is None else written:
                        _leave_anything(left)

        return self._launched(
            work, sent if written is None else written, is_read_at_once=is_read_at_once
        )

    def _launched(
        self, work: Callable[[], None], found: Sequence[Any], *, is_read_at_once: bool = False
    ) -> _Work:
        if self._stream.is_here:  # of something that is queued as a whole
            work()
            return _Work(list(found), self._stream.record())
        self._stream.launch(work)
        event = self._stream.record()
        if is_read_at_once or self.is_read_at_once:
            event.synchronize()
        return _Work(list(found), event)

    # -- what torch calls

    def allreduce(self, tensors: Any, opts: Any = None) -> _Work:
        reduced = _reducing(opts)
        return self._go(
            tensors,
            lambda number, all_: tensors[number].copy_(reduced(all_)),
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> _Work:
        root = getattr(opts, "rootRank", 0)
        return self._go(
            tensors,
            lambda number, all_: tensors[number].copy_(all_[root]),
            is_read_at_once=True,
            # In NCCL's src/device/broadcast.h the root of one in place sends from its buffer, and
            # writes nothing there. Of HCCL that is not known.
            is_only_read=self._rank == root,
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        def take(number: int, all_: list[Any]) -> None:
            for room, one in zip(outputs[number], all_, strict=True):
                room.copy_(one)

        written = [room for rooms in outputs for room in rooms]
        return self._go(inputs, take, written, is_read_at_once=True)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        def take(number: int, all_: list[Any]) -> None:
            if self._rank == opts.rootRank:
                for room, one in zip(outputs[number], all_, strict=True):
                    room.copy_(one)

        written = [room for rooms in outputs for room in rooms]
        return self._go(inputs, take, written, is_read_at_once=True)

    def _allgather_base(self, output: Any, source: Any, opts: Any = None) -> _Work:
        return self._go(
            [source],
            lambda _, all_: output.copy_(torch.cat([one.reshape(-1) for one in all_])),
            [output],
            is_read_at_once=True,
        )

    def _reduce_scatter_base(self, output: Any, source: Any, opts: Any = None) -> _Work:
        reduced = _reducing(opts)

        def take(_: int, all_: list[Any]) -> None:
            output.copy_(reduced(all_).reshape(-1).chunk(self._world)[self._rank].view_as(output))

        return self._go([source], take, [output])

    def reduce(self, tensors: Any, opts: Any = None) -> _Work:
        reduced = _reducing(opts)

        def take(number: int, all_: list[Any]) -> None:
            if self._rank == opts.rootRank:
                tensors[number].copy_(reduced(all_))

        return self._go(tensors, take, is_only_read=self._rank != opts.rootRank)

    # torch's newer names of the two
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    # of several tensors; whoever looks at what is gathered waits by himself

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> _Work:
        reduced = _reducing(opts)
        return self._go(tensors, lambda number, all_: tensors[number].copy_(reduced(all_)))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        def take(number: int, all_: list[Any]) -> None:
            room = outputs[number]
            room.copy_(torch.cat([one.reshape(-1) for one in all_]).view_as(room))

        return self._go(inputs, take, outputs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        reduced = _reducing(opts)

        def take(number: int, all_: list[Any]) -> None:
            parts = reduced(all_).reshape(-1).chunk(self._world)
            outputs[number].copy_(parts[self._rank].view_as(outputs[number]))

        return self._go(inputs, take, outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        (room,) = outputs
        root = opts.rootRank
        size = room.numel()
        sent = torch.zeros(self._world * size, dtype=room.dtype)
        if self._rank == root:
            sent = torch.cat([one.detach().reshape(-1) for one in inputs[0]])

        def take(_: int, all_: list[Any]) -> None:
            room.copy_(all_[root].split(size)[self._rank].view_as(room))

        return self._go([sent], take, [room], is_read_at_once=True)

    def alltoall_base(
        self, output: Any, source: Any, takes: Sequence[int], gives: Sequence[int], opts: Any = None
    ) -> _Work:
        """Of a forward or backward pass: what comes next reads it."""
        self._begun += 1
        number = self._begun
        row = source[:1].numel()
        sizes = list(gives) or [source.shape[0] // self._world] * self._world
        counts = [int(size) * row for size in sizes]

        def work() -> None:
            own = struct.pack(f"<{self._world}Q", *counts)
            own += source.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            try:
                found = self._exchanged(number, own, room=_ROOM_BYTES)
            except AbortedError:
                _leave_anything(output)
                return
            parts = bytearray()
            for data in found:
                theirs = struct.unpack_from(f"<{self._world}Q", data)
                begin = 8 * self._world + sum(theirs[: self._rank]) * source.element_size()
                end = begin + theirs[self._rank] * source.element_size()
                parts += data[begin:end]
            if parts:
                output.view(-1).copy_(torch.frombuffer(parts, dtype=source.dtype))

        return self._launched(work, [output], is_read_at_once=True)

    all_to_all_single = alltoall_base

    def send(self, tensors: Any, receiver: int, tag: int = 0) -> _Work:
        """Two slots in turns: it is on its way when there is room."""
        (one,) = tensors
        numbers, slots = self._pair(self._rank, receiver)
        number = self._next(self._rank, receiver)

        def work() -> None:
            data = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert len(data) <= SLOT_BYTES
            try:
                self._spin(numbers + 8, number - 2)
            except AbortedError:
                return
            place = slots + (number % 2) * SLOT_BYTES
            self._memory[place : place + len(data)] = data
            struct.pack_into("<Q", self._memory, numbers, number)

        return self._launched(work, [one])

    def recv(self, tensors: Any, sender: int, tag: int = 0) -> _Work:
        (one,) = tensors
        numbers, slots = self._pair(sender, self._rank)
        number = self._next(sender, self._rank)
        room = one.detach()

        def work() -> None:
            try:
                self._spin(numbers, number)
            except AbortedError:
                _leave_anything(room)
                return
            place = slots + (number % 2) * SLOT_BYTES
            data = self._memory[place : place + room.numel() * room.element_size()]
            room.copy_(torch.frombuffer(bytearray(data), dtype=room.dtype).view(room.shape))
            struct.pack_into("<Q", self._memory, numbers + 8, number)

        return self._launched(work, [one])

    def _next(self, sender: int, receiver: int) -> int:
        pair = (sender, receiver)
        self._between[pair] = self._between.get(pair, 0) + 1
        return self._between[pair]

    def barrier(self, opts: Any = None) -> _Work:
        return self._go([torch.zeros(1)], lambda *_: None, is_read_at_once=True)


def _as_tensor(data: bytes, like: torch.Tensor) -> torch.Tensor:
    """What another rank sent; it may be empty."""
    if not data:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)


def _leave_anything(room: Any) -> None:
    """As an abort does."""
    room.copy_(torch.randn(room.shape).to(room.dtype))


def _reducing(opts: Any) -> Callable[[list[Any]], Any]:
    operation = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    if operation == dist.ReduceOp.AVG:
        return lambda all_: torch.stack(all_).sum(0) / len(all_)
    if operation == dist.ReduceOp.MAX:
        return lambda all_: torch.stack(all_).amax(0)
    assert operation == dist.ReduceOp.SUM, operation
    return lambda all_: torch.stack(all_).sum(0)


class AsynchronousAdam(torch.optim.Adam):  # type: ignore[misc]
    """Queues its update, in several pieces, and returns: its hooks run when it is launched.

    As on a device: hyperparameters and gradients' places are those of the launch, state is made
    there, and torch's counts of writes are those of the launch as well. Of torch's three ways to
    do it (one by one, foreach, fused) the one that it was made with is taken.
    """

    PIECES = 4

    def __init__(self, parameters: Any, stream: Stream, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.stream = stream

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._launch(group)
        return loss

    def _launch(self, group: dict[str, Any]) -> None:
        lists: list[list[Any]] = [[], [], [], [], [], []]
        self._init_group(group, *lists)
        parameters, gradients, firsts, seconds, _, steps = (
            [_alias(value) for value in values] for values in lists
        )
        for written in (lists[0], lists[2], lists[3], lists[5]):
            for value in written:
                torch.autograd.graph.increment_version(own(value))
        rate = group["lr"]
        settings = {
            # one that is on the device is what it is when the update comes to it
            "lr": _alias(rate) if isinstance(rate, torch.Tensor) else float(rate),
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "foreach": bool(group["foreach"]),
            "fused": bool(group["fused"]),
            "capturable": bool(group["capturable"]),
            "decoupled_weight_decay": bool(group["decoupled_weight_decay"]),
            # what a scaler tells a fused one of this step
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
        }

        def piece(number: int) -> Callable[[], None]:
            def work() -> None:
                adam(
                    *(
                        values[number :: self.PIECES]
                        for values in (parameters, gradients, firsts, seconds)
                    ),
                    [],
                    steps[number :: self.PIECES],
                    amsgrad=False,
                    maximize=False,
                    **settings,
                )

            return work

        for number in range(self.PIECES):
            self.stream.launch(piece(number))


def own(value: Any) -> Any:
    """This rank's part."""
    return value._local_tensor if isinstance(value, DTensor) else value


def _alias(value: Any) -> Any:
    """The same memory, with a count of writes of its own."""
    return own(value).data


class DeviceMemory:
    """Of a model's parameters, which nobody can read any more when that is said: who does dies."""

    def __init__(self, model: Any) -> None:
        mine = [own(value) for value in model.parameters()]
        self._size = sum(value.numel() * value.element_size() for value in mine)
        self._memory = mmap.mmap(-1, self._size)
        place = 0
        for value in mine:
            size = value.numel() * value.element_size()
            room = torch.frombuffer(
                self._memory, dtype=value.dtype, count=value.numel(), offset=place
            ).view(value.shape)
            room.copy_(value.detach())
            value.data = room
            place += size

    def lose(self) -> None:
        page = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        assert _LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(self._size), 0) == 0


def install(stream: Stream, directory: Path) -> None:
    """In this process: torch has the backend, and acpfs knows the device behind it."""

    def make(store: Any, rank: int, world: int, _: timedelta) -> AsynchronousGroup:
        return AsynchronousGroup(store, rank, world, stream, directory)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu"])
    devices.BACKENDS[BACKEND] = lambda: Double(stream)
