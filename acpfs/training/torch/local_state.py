"""This rank's part of the training state, by shard: what a gasp writes, and digests to compare
copies by.

References to parameters are taken when protection begins: in the middle of a forward pass FSDP has
other tensors in the module's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from acpfs.errors import ConfigError
from acpfs.training.guard import theirs
from acpfs.training.messages import Shard
from acpfs.training.torch.buddy_copies import Parcel, copied
from acpfs.training.torch.digest import digest_of
from acpfs.training.torch.end_mark import local
from acpfs.training.torch.hooks import local_optimizer
from acpfs.training.torch.layout import (
    Copies,
    Layout,
    holders_of,
    named_parameters,
    plain_module,
    plain_name,
    uncompiled,
)
from acpfs.training.torch.transfer import Contents, fill, pieces


def stored_name(name: str, key: str) -> str:
    """Of a parameter, or of a part of its optimizer state, in a checkpoint."""
    return f"optim.state.{name}.{key}" if key else f"model.{name}"


class OwnState:
    """State of a loop that acpfs knows nothing of: every rank has all of it."""

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """`state()`: what has to be equal in all ranks at the end of a step, by name."""
        self._state = state
        self.buffers: dict[str, Any] = {}
        first = _places(theirs(state))
        second = _places(theirs(state))
        self.is_live = bool(first) and None not in first.values() and first == second
        """Whether what is given are the tensors themselves, so that they can be brought back."""

    def digest(self, shard: Shard) -> str:
        """xxh3-128 over all of it."""
        return digest_of(theirs(self._state))

    def live(self, shard: Shard) -> dict[Shard, dict[str, dict[str, Any]]]:
        """As `LocalState.live`."""
        return {shard: {name: {"": value} for name, value in theirs(self._state).items()}}


def _places(state: Mapping[str, Any]) -> dict[str, int | None]:
    """Where its tensors lie; None of what is no tensor."""
    return {
        name: local(value).data_ptr() if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }


class LocalState:
    """Parameters, persistent buffers and optimizer state of one rank."""

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        layout: Layout,
        copies: Copies | None = None,
    ) -> None:
        """`copies`: as `layout_of` was given it."""
        self._model = uncompiled(model)
        self._copies = copies
        self._parameters = named_parameters(model)
        self.frozen: dict[str, Any] = {
            plain_name(name): value
            for name, value in plain_module(model).named_parameters()
            if plain_name(name) not in self._parameters
        }
        kept = plain_module(model).state_dict(keep_vars=True).keys()
        self.buffers = {
            plain_name(name): value
            for name, value in plain_module(model).named_buffers()
            if name in kept
        }
        # An optimizer may well have frozen parameters: it was given `model.parameters()`, and
        # passes over them.
        names = {
            id(parameter): name for name, parameter in (self._parameters | self.frozen).items()
        }
        self._optimizers = optimizers
        self._names = names
        self._layout = layout
        self._trained = {id(parameter): parameter for parameter in self._parameters.values()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if any(id(parameter) not in names for parameter in group["params"]):
                    raise ConfigError("an optimizer has a parameter that is not one of the model's")

    def shard(self, shard: Shard) -> dict[str, dict[str, Any]]:
        """Parameter's name → the parameter itself under "", and its optimizer state."""
        return {
            name: {"": self._parameters[name].detach(), **self._moments(name)}
            for name in self._layout.parameters[shard]
        }

    def fill(self, contents: Contents) -> None:
        """Take back what a shard was."""
        fill(self._parameters, self._optimizers, contents)

    def parcel(self, host: bytes) -> Parcel:
        """A copy of all shards. `host`: the host state that belongs to it, packed."""
        shards = {shard: self.shard(shard) for shard in self._layout.holders}
        items = {
            item.index.fqn: item
            for values in shards.values()
            for name, one in values.items()
            for key, value in one.items()
            if isinstance(value, DTensor)
            # as torch's own planner does
            for item in value.__create_write_items__(stored_name(name, key), value)
        }
        return Parcel(
            {shard: copied(pieces(values)) for shard, values in shards.items()}, host, items
        )

    def live(self) -> dict[Shard, dict[str, dict[str, Any]]]:
        """Shard → what `shard` gives, but parameters as they are."""
        return {
            shard: {name: {"": self._parameters[name], **self._moments(name)} for name in names}
            for shard, names in self._layout.parameters.items()
        }

    @property
    def has_strangers(self) -> bool:
        """Whether an optimizer trains what was not trained, or not there, when this was made."""
        return any(
            self._trained.get(id(parameter)) is not parameter and parameter.requires_grad
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def follow(self) -> None:
        """What was frozen, and is trained from now on, becomes a part of its shard.

        Before an update in which it is.

        Raises:
            ConfigError: a parameter that none of this rank's shards can have; nothing of it would
                be in a checkpoint.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if self._trained.get(id(parameter)) is not parameter and (
                        parameter.requires_grad
                    ):
                        self._adopt(parameter, optimizer)

    def _adopt(self, parameter: Any, optimizer: Any) -> None:
        name = next((name for name, value in self.frozen.items() if value is parameter), None)
        if name is None or local_optimizer(optimizer) is not optimizer:
            raise ConfigError(
                f"an optimizer was given {name or 'a parameter that is not one of the model'} "
                "behind protect: "
                "no checkpoint would have it; call protect when all optimizers have all their "
                "parameters"
            )
        ranks = holders_of(name, parameter, self._model, self._copies or {})
        shard = next((one for one, held in self._layout.holders.items() if held == ranks), None)
        if shard is None:
            raise ConfigError(
                f"{name} is trained from now on, and ranks {ranks} hold nothing else together: "
                "call protect anew"
            )
        names = (*self._layout.parameters[shard], name)
        self._layout = replace(self._layout, parameters={**self._layout.parameters, shard: names})
        self._parameters[name] = parameter
        self._trained[id(parameter)] = parameter
        self._names[id(parameter)] = name
        del self.frozen[name]

    def _moments(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for optimizer in self._optimizers:
            found |= local_optimizer(optimizer).state.get(self._parameters[name], {})
        return found

    def digest(self, shard: Shard) -> str:
        """xxh3-128 over all numbers of a shard in the order of their names: equal copies have equal
        digests.
        """
        return digest_of(
            {
                f"{name}\0{key}": value
                for name, values in self.shard(shard).items()
                for key, value in values.items()
            }
        )

    def checkpoint(self, shards: Iterable[Shard]) -> dict[str, Any]:
        """What `torch.distributed.checkpoint.state_dict` makes of model and optimizer, as far as
        these shards have it.
        """
        model: dict[str, Any] = dict(self.frozen) | self.buffers
        state: dict[str, Any] = {}
        for shard in shards:
            for name, values in self.shard(shard).items():
                model[name] = values.pop("")
                state[name] = values
        return {"model": model, "optim": {"state": state, "param_groups": self._groups()}}

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {**group, "params": [self._names[id(parameter)] for parameter in group["params"]]}
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]
