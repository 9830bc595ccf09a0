"""One shard's tensors: out of a rank that has them, over a process group, into a model that was
just built. Main thread only.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from acpfs.training.torch.hooks import local_optimizer

Contents = Mapping[str, Mapping[str, "Piece"]]
"""Parameter's name → the parameter itself under "", and its optimizer state."""


@dataclass(frozen=True)
class Piece:
    """A tensor as this rank has it, or anything else."""

    value: Any
    distributed: bool = False
    """Whether it is this rank's part of a DTensor."""
    of_device: bool = False
    """Whether it has come from a device's memory, and belongs into this rank's."""


@dataclass(frozen=True)
class Outline:
    """What is sent before a tensor's bytes."""

    shape: tuple[int, ...]
    dtype: Any
    distributed: bool
    of_device: bool = False
    """Whether it lies in a device's memory: then it comes to where its parameter is."""


Outlines = Mapping[str, Mapping[str, Outline | Piece]]


def pieces(values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Piece]]:
    """Of what `LocalState.shard` gives; nothing is copied."""
    return {
        name: {key: _piece(value) for key, value in one.items()} for name, one in values.items()
    }


def _piece(value: Any) -> Piece:
    if isinstance(value, DTensor):
        return Piece(value.to_local().detach(), distributed=True)
    return Piece(value.detach() if isinstance(value, torch.Tensor) else value)


def local(parameter: Any) -> Any:
    """The tensor that this rank has of a parameter."""
    found = parameter.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def fill(parameters: Mapping[str, Any], optimizers: Sequence[Any], contents: Contents) -> None:
    """Into a model and its optimizers: parameters are copied, optimizer state is taken as it is."""
    owner = {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    with torch.no_grad():
        for name, values in contents.items():
            parameter = parameters[name]
            local(parameter).copy_(values[""].value)
            state = {key: placed(parameter, piece) for key, piece in values.items() if key}
            if state:
                local_optimizer(owner[id(parameter)]).state[parameter] = state


def gradients(parameters: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, Piece]]:
    """Of those parameters that have one; nothing is copied."""
    return {
        name: {"": _piece(parameters[name].grad)}
        for name in names
        if parameters[name].grad is not None
    }


def fill_gradients(parameters: Mapping[str, Any], contents: Contents) -> None:
    """What `gradients` gave; those of all other parameters go."""
    for name, parameter in parameters.items():
        parameter.grad = placed(parameter, contents[name][""]) if name in contents else None


def placed(parameter: Any, piece: Piece) -> Any:
    """What belongs to a parameter, where that is."""
    if piece.of_device:
        piece = Piece(piece.value.to(local(parameter).device), piece.distributed)
    if not piece.distributed:
        return piece.value
    mesh = parameter.device_mesh
    placements = parameter.placements
    return DTensor.from_local(
        piece.value,
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def outline(contents: Contents) -> Outlines:
    """All of it but the tensors' bytes."""
    return {
        name: {
            key: Outline(
                tuple(piece.value.shape),
                piece.value.dtype,
                piece.distributed,
                piece.of_device or piece.value.device.type != "cpu",
            )
            if isinstance(piece.value, torch.Tensor)
            else piece
            for key, piece in values.items()
        }
        for name, values in contents.items()
    }


def filled(outlines: Outlines, read: Callable[[Any], object]) -> dict[str, dict[str, Piece]]:
    """Contents with this outline.

    `read`: fills a flat tensor of bytes; called for one after the other, in the order of `flat`.
    """
    found: dict[str, dict[str, Piece]] = {}
    for name, values in outlines.items():
        found[name] = {}
        for key, one in values.items():
            piece = (
                Piece(torch.empty(one.shape, dtype=one.dtype), one.distributed, one.of_device)
                if isinstance(one, Outline)
                else one
            )
            for room in _flat([piece.value]):
                read(room)
            found[name][key] = piece
    return found


def send(contents: Contents, to: int, group: Any = None) -> None:
    """To one rank, over a group of gloo's; None: the default group is."""
    send_bytes(pickle.dumps(outline(contents)), to, group)
    for one in flat(contents):
        dist.send(one.cpu(), to, group=group)


def receive(source: int, group: Any = None) -> dict[str, dict[str, Piece]]:
    """What `send` sent."""
    # over the job's own process groups
    outlines = pickle.loads(receive_bytes(source, group))  # noqa: S301
    return filled(outlines, lambda room: dist.recv(room, source, group=group))


def flat(contents: Contents) -> Iterable[Any]:
    """Bytes of the tensors in it; of a contiguous one, its own memory."""
    return _flat(piece.value for values in contents.values() for piece in values.values())


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel():
            yield value.contiguous().reshape(-1).view(torch.uint8)


def send_bytes(data: bytes, to: int, group: Any = None) -> None:
    dist.send(torch.tensor([len(data)], dtype=torch.int64), to, group=group)
    if data:
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, group=group)


def receive_bytes(source: int, group: Any = None) -> bytes:
    """What `send_bytes` sent."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source, group=group)
    data = torch.empty(int(length.item()), dtype=torch.uint8)
    if data.numel():
        dist.recv(data, source, group=group)
    return bytes(data.numpy().tobytes())
