"""What a rank holds in one generation of a job whose ranks are replaced: a model with its
optimizers, seen as shards. Main thread only.

`TorchHolding` is plain torch; a framework that shards by itself brings its own
(`frameworks.megatron_replace`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training.host_state import HostState
from acpfs.training.messages import Shard
from acpfs.training.torch import snapshot
from acpfs.training.torch.end_mark import Live
from acpfs.training.torch.layout import Layout, layout_of, named_parameters
from acpfs.training.torch.local_state import LocalState
from acpfs.training.torch.transfer import Contents, fill, fill_gradients, gradients, local, pieces
from acpfs.training.torch.writers import DistributedWriter, Writer


class Holding(Protocol):
    """Of one rank, of one generation."""

    layout: Layout
    buffers: dict[str, Any]
    frozen: dict[str, Any]
    """Parameters that no optimizer updates."""
    optimizers: Sequence[Any]
    """Whose steps are an update."""
    begun: int | None
    """The step that the function has loaded by itself; None: what is in the mount is loaded
    here.
    """
    takes_copies: bool
    """Whether it goes on from what ranks keep in memory, some steps old."""

    def live(self) -> Live:
        """Trained parameters and the optimizer's state, as they are: compared with what they
        were.
        """

    def look(self) -> None:
        """Gradients of an update are complete.

        Raises:
            ConfigError: it updates something that this does not have.
        """

    def contents(self, shard: Shard) -> Contents:
        """Of a shard, as it is now; nothing is copied."""

    def fill(self, contents: Contents) -> None:
        """Take a shard of another holding, or of another rank."""

    def gradients(self) -> Contents | None:
        """Complete ones, of all shards; None: no other process could do the update with them.

        Nothing is copied.
        """

    def fill_gradients(self, contents: Contents) -> None:
        """Those of another holding."""

    def spread(self, givers: Mapping[Shard, int]) -> None:
        """Behind `fill`: parameters that this rank has, and another one updates. A collective.

        `givers`: who has which shard.
        """

    def load(self, path: Path, rank: int) -> Any:
        """A checkpoint; this rank's host state in it, or None. A collective."""

    def writer(self, host: HostState, rank: int) -> Writer:
        """Writes a snapshot.

        Raises:
            ConfigError: the framework's own has to be used.
        """


class TorchHolding:
    """A model and its optimizers."""

    begun: int | None = None
    takes_copies = True

    def __init__(self, model: Any, optimizers: Sequence[Any], control: Any = None) -> None:
        """Made by all ranks at the same place. `control`: a group of gloo's, of all ranks.

        Raises:
            ConfigError: something that cannot be told from them.
        """
        self.optimizers = optimizers
        self._control = control
        self.layout = layout_of(model, optimizers)
        self._state = LocalState(model, optimizers, self.layout)
        self.buffers = self._state.buffers
        self.frozen = self._state.frozen
        self._parameters = named_parameters(model)

    def live(self) -> Live:
        return self._state.live()

    def look(self) -> None:
        if self._state.has_strangers:
            raise ConfigError(
                "an optimizer was given a parameter behind restore, or trains one that was "
                "frozen then: "
                "another rank's process would not have it; call restore when all are there"
            )

    def contents(self, shard: Shard) -> Contents:
        return pieces(self._state.shard(shard))

    def fill(self, contents: Contents) -> None:
        fill(self._parameters, self.optimizers, contents)

    def gradients(self) -> Contents | None:
        return gradients(
            self._parameters, (name for names in self.layout.parameters.values() for name in names)
        )

    def fill_gradients(self, contents: Contents) -> None:
        fill_gradients(self._parameters, contents)

    def spread(self, givers: Mapping[Shard, int]) -> None:
        """Of ZeRO: the fault may have kept them from being sent round."""
        own = {name for names in self.layout.parameters.values() for name in names}
        wishes = self._gathered(tuple(sorted(self._parameters.keys() - own)))
        if not any(wishes):
            return
        mine = [shard for shard, rank in givers.items() if rank == dist.get_rank()]
        owners = self._gathered(
            {
                name: dist.get_rank()
                for shard in mine
                for name in self.layout.parameters.get(shard, ())
            }
        )
        owner = {name: rank for one in owners for name, rank in one.items()}
        for rank, names in enumerate(wishes):
            for name in names:
                whole = local(self._parameters[name])
                if owner[name] == dist.get_rank():
                    dist.send(whole.contiguous().cpu(), rank, group=self._control)
                elif rank == dist.get_rank():
                    room = torch.empty_like(whole, device="cpu")
                    dist.recv(room, owner[name], group=self._control)
                    whole.copy_(room)

    def _gathered(self, value: Any) -> list[Any]:
        """Everybody's, by rank; a collective."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self._control)
        return found

    def load(self, path: Path, rank: int) -> Any:
        owned = {name for names in self.layout.parameters.values() for name in names}
        return snapshot.load(
            *(path, rank, self._parameters, owned, self.optimizers, self.buffers),
            group=self._control,
        )

    def writer(self, host: HostState, rank: int) -> Writer:
        return DistributedWriter(self._state, host, rank, self._control)
