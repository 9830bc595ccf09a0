"""The checkpoint that is left when no copy is: written by all ranks as a gasp is, and read by ranks that have nothing. Main thread only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from acpfs.control import registry
from acpfs.errors import AcpfsError
from acpfs.logger import get_logger
from acpfs.training.decision import Layout as Held
from acpfs.training.decision import NoCover, cover
from acpfs.training.host_state import HostState
from acpfs.training.manifest import GaspError, read_manifest
from acpfs.training.messages import Gate, Manifest, Publish, Save, SavedFile, checkpoint_name
from acpfs.training.policy import Policy
from acpfs.training.publish import publish
from acpfs.training.torch.layout import Layout
from acpfs.training.torch.local_state import LocalState
from acpfs.training.torch.transfer import Piece, fill
from acpfs.training.torch.writers import HOST_STATE, DistributedWriter

log = get_logger(__name__)


def places(directory: Path) -> list[Path]:
    """Where a checkpoint may be read: the mount, which has it in RAM, and the storage below it."""
    found = [directory]
    try:
        record, below = registry.locate(os.fspath(directory))
        found.append(Path(record.backing) / below.strip("/"))
    except (AcpfsError, OSError):
        pass  # no mount
    return found


def newest(directory: Path, tracker: str) -> tuple[int, Path] | None:
    """Step and path of the checkpoint that the tracker names, where one can be read."""
    for place in places(directory):
        try:
            path = place / (place / tracker).read_text(encoding="utf-8").strip()
            manifest = read_manifest(path)
        except (OSError, GaspError) as error:
            log.info("no checkpoint", place=str(place), error=str(error))
            continue
        if manifest is not None:
            return manifest.step, path
    return None


def save(
    directory: Path,
    job: str,
    rank: int,
    generation: int,
    step: int,
    layout: Layout,
    state: LocalState,
    host: HostState,
    policy: Policy,
    gathered: Callable[[Any], list[Any]],
) -> Path:
    """Write and name it; a collective of all ranks."""
    shares = gathered(layout.holders)
    holders = {shard: ranks for share in shares for shard, ranks in share.items()}
    chosen = cover(Held(len(shares), Gate.EXPLICIT, policy.name, 0, holders, dict.fromkeys(range(len(shares)), "")), range(len(shares)))
    assert not isinstance(chosen, NoCover), "all ranks are there"
    name = checkpoint_name(policy.name, step)
    written = f"{name}.snapshot-{generation}.tmp"
    own = tuple(shard for shard, writer in chosen.items() if writer == rank)
    order = Save(step, chosen, tuple(range(len(shares))), written, name)
    found: tuple[SavedFile, ...] = DistributedWriter(state, host, rank).write(directory / written, order, own)
    files = tuple(sorted((file for files in gathered(found) for file in files), key=lambda file: file.path))
    if rank == 0:
        publish(
            directory, Publish(Manifest(job, generation, step, (), chosen, files, {}, ()), written, name), policy.tracker, policy.files_s
        )
    gathered(None)
    return directory / name


def load(
    path: Path, rank: int, parameters: Mapping[str, Any], owned: set[str], optimizers: Sequence[Any], buffers: Mapping[str, Any]
) -> Any:
    """Into model and optimizers; this rank's host state, or None where it has none there. A collective of all ranks.

    `owned`: parameters whose optimizer state this rank holds.
    """
    stored = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {f"model.{name}": value.detach() for name, value in parameters.items()}
    wanted |= {f"model.{name}": value for name, value in buffers.items() if f"model.{name}" in stored}
    states: dict[str, dict[str, Any]] = {}
    for name in sorted(owned):
        prefix = f"optim.state.{name}."
        for key, kept in stored.items():
            if key.startswith(prefix) and isinstance(kept, TensorStorageMetadata):
                states.setdefault(name, {})[key.removeprefix(prefix)] = wanted[key] = _room(kept, parameters[name])
    checkpoint.load(wanted, checkpoint_id=path)
    contents = {
        name: {"": Piece(_here(parameters[name])), **{key: Piece(value) for key, value in state.items()}} for name, state in states.items()
    }
    fill(parameters, optimizers, contents)
    for place in (path / HOST_STATE / f"rank-{rank}.pt",):
        if place.exists():
            return torch.load(place, weights_only=True)
    return None


def _here(parameter: Any) -> Any:
    found = parameter.detach()
    return found.to_local() if hasattr(found, "to_local") else found


def _room(kept: TensorStorageMetadata, parameter: Any) -> Any:
    if tuple(kept.size) == tuple(parameter.shape) and len(kept.size):
        return torch.zeros_like(parameter.detach(), dtype=kept.properties.dtype)
    return torch.zeros(kept.size, dtype=kept.properties.dtype)
