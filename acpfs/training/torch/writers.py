"""Who writes a gasp, and how: torch distributed checkpoint by the cover, or the script's own
`save=` by one rank. Main thread only.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from acpfs.errors import AcpfsError, ConfigError
from acpfs.training.host_state import HostState
from acpfs.training.manifest import files_in, saved_file
from acpfs.training.messages import Save, SavedFile, Shard
from acpfs.training.park import OthersFailedError
from acpfs.training.torch.buddy_copies import Parcel
from acpfs.training.torch.layout import Layout
from acpfs.training.torch.local_state import LocalState, stored_name

HOST_STATE = "host_state"
"""Directory with one file per saver."""


class NotWrittenError(AcpfsError):
    """This rank could not write its part; the message says why."""


@contextmanager
def own_failures(member: int) -> Iterator[None]:
    """Whose failure it is. torch raises one error in all savers, and that is no `Exception`.

    `member`: this one's number among them.

    Raises:
        NotWrittenError: this one's.
        OthersFailedError: another one's.
    """
    try:
        yield
    except CheckpointException as error:
        told = "; ".join(
            f"{type(why).__name__}: {why} (saver {who})" for who, (why, _) in error.failures.items()
        )
        raise (NotWrittenError if member in error.failures else OthersFailedError)(told) from error


class Writer(Protocol):
    """Called by every saver, in the group of savers."""

    def prepare(self, step: int) -> None:
        """The job's groups are left next, if they were not before; nobody can be spoken to in them,
        but they still say who is who.
        """

    def write(
        self, directory: Path, order: Save, shards: tuple[Shard, ...]
    ) -> tuple[SavedFile, ...]:
        """Write what this rank stands for; what it wrote, closed."""


class DistributedWriter:
    """`torch.distributed.checkpoint`: loads with `dcp.load` into what `get_state_dict(model,
    optimizer)` makes.
    """

    def __init__(self, state: LocalState, host: HostState, rank: int, group: Any = None) -> None:
        """`rank`: this rank's number in the job. `group`: gloo's, of all who write; None: the
        default group is.
        """
        self._group = group
        self._state = state
        self._host = host
        self._rank = rank

    def prepare(self, step: int) -> None:
        """Nothing depends on them."""

    def write(
        self, directory: Path, order: Save, shards: tuple[Shard, ...]
    ) -> tuple[SavedFile, ...]:
        return self.write_with(directory, order, shards, {})

    def write_with(
        self,
        directory: Path,
        order: Save,
        shards: tuple[Shard, ...],
        copies: Mapping[Shard, Parcel],
    ) -> tuple[SavedFile, ...]:
        """The same, and shards of ranks that are lost. `copies`: what was taken of these."""
        directory.mkdir(parents=True, exist_ok=True)
        state = self._state.checkpoint(shards)
        parts: list[tuple[Any, Any]] = []
        for shard, parcel in copies.items():
            parts += _put(state, shard, parcel)
        state["optim"]["param_groups"] = _groups_of_all(state["optim"]["param_groups"], self._group)
        checkpoint.save(
            state,
            checkpoint_id=directory,
            planner=_WithParts(parts) if parts else None,
            process_group=self._group,
        )
        own = write_host_state(directory, order.step, self._host, self._rank)
        member = dist.get_rank()
        written = sorted(directory.glob(f"__{member}_*")) + (
            [directory / ".metadata"] if member == 0 else []
        )
        return tuple(saved_file(directory, path) for path in (*written, own))


def _put(state: dict[str, Any], shard: Shard, parcel: Parcel) -> list[tuple[Any, Any]]:
    """Whole tensors of a copy, into a state that is to be written; parts of DTensors, with where
    they belong.
    """
    parts = []
    for name, values in parcel.shards[shard].items():
        for key, piece in values.items():
            item = parcel.items.get(stored_name(name, key))
            if item is not None:
                parts.append((item, piece.value))
            elif key:
                state["optim"]["state"].setdefault(name, {}).setdefault(key, piece.value)
            else:
                state["model"].setdefault(name, piece.value)
    return parts


class _WithParts(checkpoint.DefaultSavePlanner):  # type: ignore[misc]  # torch is not there
    """torch's own, and parts of DTensors that another rank had."""

    def __init__(self, parts: list[tuple[Any, Any]]) -> None:
        """`parts`: torch's `WriteItem`, and the tensor."""
        super().__init__()
        self._items = [item for item, _ in parts]
        self._values = {item.index: value for item, value in parts}

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[*plan.items, *self._items])
        return self.plan

    def resolve_data(self, write_item: Any) -> Any:
        value = self._values.get(write_item.index)
        return super().resolve_data(write_item) if value is None else value


def _groups_of_all(own: list[dict[str, Any]], group: Any) -> list[dict[str, Any]]:
    """Hyperparameters, with the names of all savers' parameters: stages and experts are called
    differently in each; a collective.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [one["params"] for one in own], group=group)
    if any(len(names) != len(own) for names in found):
        return own  # their loader knows what to make of ranks with other optimizers
    return [
        {**one, "params": list(dict.fromkeys(name for names in found for name in names[number]))}
        for number, one in enumerate(own)
    ]


def write_host_state(directory: Path, step: int, host: HostState, rank: int) -> Path:
    """This rank's file of it."""
    path = directory / HOST_STATE / f"rank-{rank}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = io.BytesIO()
    torch.save({"step": step, **loadable(host.now())}, written)
    # torch holds the interpreter while it opens a file: a mount that waits would silence the member
    path.write_bytes(written.getbuffer())
    return path


def loadable(value: Any) -> Any:
    """Such that `torch.load(weights_only=True)` takes it: numpy's state has an array."""
    if isinstance(value, Mapping):
        return {key: loadable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return (
            type(value)(loadable(item) for item in value)
            if type(value) in (tuple, list)
            else [loadable(item) for item in value]
        )
    return value.tolist() if type(value).__module__ == "numpy" else value


class SingleWriter:
    """The script's own format: one rank that has everything, alone in a group, so that `if rank ==
    0` in it holds.
    """

    def __init__(self, save: Callable[[int, Path], None], layout: Layout) -> None:
        """`save(step, directory)`: writes the live objects, which are at the end of that step.

        Raises:
            ConfigError: no rank has everything.
        """
        if any(len(ranks) < dist.get_world_size() for ranks in layout.holders.values()):
            raise ConfigError(
                "save= is called in one rank, and here none has the whole state: leave it out, "
                "and get a distributed checkpoint"
            )
        self._save = save

    def prepare(self, step: int) -> None:
        """Nothing depends on them."""

    def write(
        self, directory: Path, order: Save, shards: tuple[Shard, ...]
    ) -> tuple[SavedFile, ...]:
        if not shards:
            return ()
        directory.mkdir(parents=True, exist_ok=True)
        self._save(order.step, directory)
        written = sorted(files_in(directory))
        if not any(os.path.getsize(directory / name) for name in written):
            raise NotWrittenError(
                f"save= has written nothing into {directory}, the directory that it was called with"
            )
        return tuple(saved_file(directory, directory / name) for name in written)
