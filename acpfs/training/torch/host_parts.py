"""The parts of the host state that are torch's: random numbers, buffers, hyperparameters; and what
follows an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from acpfs.errors import ConfigError
from acpfs.logger import get_logger
from acpfs.training.host_state import HostState, NumpyRandom, Part, PythonRandom, Stateful
from acpfs.training.torch.digest import digest_of
from acpfs.training.torch.end_mark import LOOKED_AT, SHOWN_MAX, ChangedError, local, trace

log = get_logger(__name__)


class TorchRandom:
    """Of the host, and of this rank's device where it is in use."""

    def take(self) -> Any:
        # of the others nothing: a rank has one, and each would be asked at each step
        devices = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        return {"cpu": torch.get_rng_state(), "cuda": devices}

    def give(self, value: Any) -> None:
        torch.set_rng_state(value["cpu"])
        if len(value["cuda"]) > 1:  # an older acpfs took those of all devices
            torch.cuda.set_rng_state_all(value["cuda"])
        elif value["cuda"]:
            torch.cuda.set_rng_state(value["cuda"][0])


class Buffers:
    """Persistent buffers: a forward pass moves averages."""

    def __init__(self, buffers: Mapping[str, Any], bytes_max: int) -> None:
        size = sum(value.numel() * value.element_size() for value in buffers.values())
        if size > bytes_max:
            raise ConfigError(
                f"the model has {size} bytes of persistent buffers, and {bytes_max} are kept: "
                "raise buffers_bytes_max"
            )
        self._buffers = buffers

    def take(self) -> Any:
        return {name: value.detach().clone() for name, value in self._buffers.items()}

    def give(self, value: Any) -> None:
        with torch.no_grad():
            for name, kept in value.items():
                self._buffers[name].copy_(kept)


class Frozen:
    """Parameters that no optimizer updates, and that a loop may move all the same: targets, keys of
    a momentum encoder.

    One that has moved is kept from then on, as buffers are. The others are what they were when this
    began, by their digests.
    """

    def __init__(self, parameters: Mapping[str, Any], bytes_max: int) -> None:
        """`parameters`: looked at each time; what is trained later leaves it."""
        self._parameters = parameters
        self._bytes_max = bytes_max
        self._traces = {name: trace(value) for name, value in parameters.items()}
        self._digests = {name: _digest(value) for name, value in parameters.items()}
        self._moving: set[str] = set()
        self._looks = 0
        self._is_told = False

    def take(self) -> Any:
        self._look()
        return {
            name: local(value).clone()
            for name, value in self._parameters.items()
            if name in self._moving
        }

    def give(self, value: Any) -> None:
        """Raises ChangedError where one has moved since, for the first time."""
        self._moving |= value.keys()
        with torch.no_grad():
            for name, kept in value.items():
                if name in self._parameters:
                    local(self._parameters[name]).copy_(kept)
        moved = [
            name
            for name, one in self._parameters.items()
            if name not in value and _digest(one) != self._digests[name]
        ]
        if moved:
            raise ChangedError(
                f"{', '.join(sorted(moved)[:SHOWN_MAX])}: no optimizer updates it, and it has "
                "moved "
                "since the end of this step, for the first time: nobody knows how it was"
            )

    def _look(self) -> None:
        """Digests the first times, so that what moves in each step is seen however that is done."""
        self._looks += 1
        moved = {
            name
            for name, value in self._parameters.items()
            if name not in self._moving and self._has_moved(name, value)
        }
        if not moved:
            return
        self._moving |= moved
        size = sum(
            value.numel() * value.element_size()
            for name, value in self._parameters.items()
            if name in self._moving
        )
        if size > self._bytes_max:
            self._moving -= moved
            self._refuse(
                f"parameters that no optimizer updates move ({min(moved)}), {size} bytes, and "
                f"{self._bytes_max} are kept: raise buffers_bytes_max"
            )

    def _refuse(self, why: str) -> None:
        """As at the beginning; training that has gone on for long is not ended for it, but `give`
        will fail.
        """
        if self._looks <= LOOKED_AT:
            raise ConfigError(why)
        if not self._is_told:
            self._is_told = True
            log.error("no checkpoint of this rank will be whole", why=why)

    def _has_moved(self, name: str, value: Any) -> bool:
        now = trace(value)
        if self._looks > LOOKED_AT and now == self._traces[name]:
            return False
        self._traces[name] = now
        return _digest(value) != self._digests[name]


def _digest(value: Any) -> str:
    return digest_of({"": local(value)})


class Hyperparameters:
    """What a scheduler changes in an optimizer's groups."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def take(self) -> Any:
        return [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in self._groups()
        ]

    def give(self, value: Any) -> None:
        if len(self._optimizers) == 1:  # groups that were added since were not there
            del self._optimizers[0].param_groups[len(value) :]
        for group, kept in zip(self._groups(), value, strict=True):
            group.update({name: _copied(item) for name, item in kept.items()})


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class GoodStep:
    """What `scaler.update()` does after a step that was not skipped; the scaler itself has
    forgotten the step by then.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def __call__(self) -> None:
        state = self._scaler.state_dict()
        if not state:  # switched off
            return
        good = state["_growth_tracker"] + 1
        grown = good >= state["growth_interval"]
        scale = state["scale"] * (state["growth_factor"] if grown else 1.0)
        self._scaler.load_state_dict(
            {**state, "scale": scale, "_growth_tracker": 0 if grown else good}
        )


def host_state(
    optimizers: Sequence[Any],
    buffers: Mapping[str, Any],
    buffers_bytes_max: int,
    *,
    frozen: Mapping[str, Any] | None = None,
    schedulers: Sequence[Any] = (),
    scaler: Any = None,
    further: Mapping[str, Any] | None = None,
    after_update: Callable[[], None] | None = None,
) -> HostState:
    """Everything that a rank has beside the state of its shards.

    Raises:
        ConfigError: more buffers than are kept.
    """
    parts: dict[str, Part] = {
        "python": PythonRandom(),
        "numpy": NumpyRandom(),
        "torch": TorchRandom(),
    }
    parts["buffers"] = Buffers(buffers, buffers_bytes_max)
    parts["frozen"] = Frozen(frozen or {}, buffers_bytes_max)
    parts["hyperparameters"] = Hyperparameters(optimizers)
    following: list[Callable[[], None]] = []
    for number, scheduler in enumerate(schedulers):
        parts[f"scheduler{number or ''}"] = Stateful(scheduler)
        following.append(scheduler.step)
    if scaler is not None:
        parts["scaler"] = Stateful(scaler)
        following.append(GoodStep(scaler))
    for name, subject in (further or {}).items():
        if name in parts:
            raise ConfigError(f"state={{{name!r}: …}}: acpfs uses this name itself")
        parts[name] = Stateful(subject)

    def follow() -> None:
        for step in following:
            step()

    return HostState(parts, after_update or follow)
