"""The checkpoint that is left when no copy is: written by all ranks as a gasp is, and read by ranks
that have nothing. Main thread only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from acpfs.errors import RefusedError
from acpfs.logger import get_logger
from acpfs.training.decision import Cover, NoCover, cover
from acpfs.training.decision import Layout as Held
from acpfs.training.manifest import GaspError, NewerGaspError, read_manifest
from acpfs.training.messages import Gate, Manifest, Publish, Save, SavedFile, Shard, checkpoint_name
from acpfs.training.mounted import PREFIX, node_name, places, readable
from acpfs.training.naming import read_tracker, remove_begun
from acpfs.training.policy import Policy
from acpfs.training.publish import publish
from acpfs.training.torch.layout import Layout
from acpfs.training.torch.transfer import Piece, fill
from acpfs.training.torch.writers import HOST_STATE, Writer, own_failures

log = get_logger(__name__)
Found = TypeVar("Found")
LOOK_AGAIN_S = 0.5


def newest(directory: Path, tracker: str, patience_s: float) -> int | None:
    """Step of the checkpoint that the tracker names; None: there is none.

    `patience_s`: for the mount, before the storage is asked, too.
    """

    def named(place: Path) -> int | None:
        manifest = read_manifest(read_tracker(place / tracker))
        return None if manifest is None else manifest.step

    return _first(directory, named, patience_s)


def of_step(directory: Path, step: int, name: str, patience_s: float) -> Path:
    """Where this step's checkpoint can be read.

    A rank may see a newer one that others do not see yet.

    Raises:
        RefusedError: nowhere.
    """

    def there(place: Path) -> Path | None:
        manifest = read_manifest(path := place / checkpoint_name(name, step))
        return path if manifest is not None and manifest.step == step else None

    path = _first(directory, there, patience_s)
    if path is None:
        raise RefusedError(
            f"this rank cannot read {checkpoint_name(name, step)} in {directory}, at which all "
            "were to begin"
        )
    return path


def _first(
    directory: Path, look: Callable[[Path], Found | None], patience_s: float
) -> Found | None:
    """What is found in the mount; where that does not answer, or is dead, in the storage below it.

    What a living mount has not is not looked for below it: a process with a thread in a storage
    that hangs cannot end, and nobody could take its place. Where nothing answers it is waited for:
    that is no sign that there is nothing, and it may be all that is left of the job. The
    coordinator knows how long a generation may take.
    """
    looks: dict[Path, _Look[Found]] = {}
    while True:
        for place in places(directory):
            if place not in looks:
                looks[place] = _Look(look, place)
                looks[place].start()
            one = looks[place]
            has_ended = not looks[place].is_alive()
            if one.answers(patience_s) and one.newer:
                raise RefusedError(one.newer)
            if one.answers(patience_s) and (one.found is not None or readable(directory) == place):
                return one.found
            if has_ended:
                del looks[place]
            log.warning("no checkpoint can be read", place=str(place), seconds=patience_s)
        time.sleep(LOOK_AGAIN_S)


class _Look(threading.Thread, Generic[Found]):
    """At one place, which may never answer."""

    def __init__(self, look: Callable[[Path], Found | None], place: Path) -> None:
        super().__init__(name="acpfs-look", daemon=True)
        self._look = look
        self._place = place
        self._answered = False
        self.found: Found | None = None
        self.newer = ""
        """Why what is there cannot be read by this acpfs; to begin without it would lose it."""

    def run(self) -> None:
        try:
            self.found = self._look(self._place)
        except NewerGaspError as error:
            self.newer = str(error)
        except (FileNotFoundError, NotADirectoryError, GaspError) as error:
            log.info("no checkpoint", place=str(self._place), error=str(error))
        except OSError as error:
            log.warning("a place does not answer", place=str(self._place), error=str(error))
            return
        self._answered = True

    def answers(self, patience_s: float) -> bool:
        """Whether it has, by then. In short turns: an `Interrupted` comes between two."""
        deadline = time.monotonic() + patience_s
        while self.is_alive() and (left := deadline - time.monotonic()) > 0:
            self.join(min(left, LOOK_AGAIN_S))
        return self._answered


def save(
    directory: Path,
    job: str,
    rank: int,
    generation: int,
    step: int,
    layout: Layout,
    writer: Writer,
    policy: Policy,
    gathered: Callable[[Any], list[Any]],
) -> Path:
    """Write and name it, unless this generation has done so; a collective of all ranks.

    What is left of broken-off ones goes.

    Raises:
        NotWrittenError: this rank could not write its part.
        OthersFailedError: another one could not.
    """
    name = checkpoint_name(policy.name, step)
    named = _named(directory / name, job, generation, step) if rank == 0 else None
    shares = gathered((layout.holders, node_name(directory), named is not None))
    nodes = [node for _, node, _ in shares]
    # here is where rank 0 is, who gives the name
    begun_here = f".snapshot-{job}@{nodes[0].removeprefix(PREFIX)}"
    written = f"{name}{begun_here}-{generation}.tmp"
    if rank == 0:
        # all ranks of the job are in this call, each by the one process that is the rank; nor has
        # one of them a name that is not seen here yet: that was to be given in this very mount
        remove_begun(directory, begun_here, generation, written)
    files: tuple[SavedFile, ...] = ()
    chosen = _chosen([held for held, _, _ in shares], policy.name)
    if not any(is_named for _, _, is_named in shares):
        own = tuple(shard for shard, writer in chosen.items() if writer == rank)
        with own_failures(rank):
            found = writer.write(
                directory / written,
                Save(step, chosen, tuple(range(len(shares))), written, name),
                own,
            )
        files = tuple(
            sorted(
                (file for files in gathered(found) for file in files), key=lambda file: file.path
            )
        )
    if rank == 0:  # what others wrote is awaited, and the tracker waits for them
        manifest = named or Manifest(
            job, generation, step, (), chosen, files, {}, tuple(sorted(set(nodes)))
        )
        publish(directory, Publish(manifest, written, name), policy.tracker, policy.files_s)
    gathered(None)
    return directory / name


def _chosen(shares: Sequence[Mapping[Shard, tuple[int, ...]]], name: str) -> Cover:
    """Who writes what."""
    holders = {shard: ranks for share in shares for shard, ranks in share.items()}
    chosen = cover(
        Held(len(shares), Gate.EXPLICIT, name, 0, holders, dict.fromkeys(range(len(shares)), "")),
        range(len(shares)),
    )
    assert not isinstance(chosen, NoCover), "all ranks are there"
    return chosen


def _named(final: Path, job: str, generation: int, step: int) -> Manifest | None:
    """This very snapshot, if it was taken before: nothing but its tracker can be missing."""
    try:
        found = read_manifest(final)
    except (GaspError, OSError):
        return None
    return (
        found
        if found is not None
        and (found.job, found.generation, found.step) == (job, generation, step)
        else None
    )


def load(
    path: Path,
    rank: int,
    parameters: Mapping[str, Any],
    owned: set[str],
    optimizers: Sequence[Any],
    buffers: Mapping[str, Any],
    *,
    group: Any = None,
) -> Any:
    """Into model and optimizers; this rank's host state, or None where it has none there.

    A collective of all ranks.

    `owned`: parameters whose optimizer state this rank holds. `group`: of gloo's; None: the default
    group is.
    """
    stored = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {f"model.{name}": value.detach() for name, value in parameters.items()}
    wanted |= {
        f"model.{name}": value for name, value in buffers.items() if f"model.{name}" in stored
    }
    states: dict[str, dict[str, Any]] = {}
    for name in sorted(owned):
        prefix = f"optim.state.{name}."
        for key, kept in stored.items():
            if key.startswith(prefix) and isinstance(kept, TensorStorageMetadata):
                wanted[key] = _room(kept, parameters[name])
                states.setdefault(name, {})[key.removeprefix(prefix)] = wanted[key]
    checkpoint.load(wanted, checkpoint_id=path, process_group=group)
    contents = {
        name: {
            "": Piece(_here(parameters[name])),
            **{key: Piece(value) for key, value in state.items()},
        }
        for name, state in states.items()
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
