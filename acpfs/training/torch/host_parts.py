"""The parts of the host state that are torch's: random numbers, buffers, hyperparameters; and what follows an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from acpfs.errors import ConfigError
from acpfs.training.host_state import HostState, NumpyRandom, Part, PythonRandom, Stateful


class TorchRandom:
    """Of the host, and of devices in use."""

    def take(self) -> Any:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return {"cpu": torch.get_rng_state(), "cuda": devices}

    def give(self, value: Any) -> None:
        torch.set_rng_state(value["cpu"])
        if value["cuda"]:
            torch.cuda.set_rng_state_all(value["cuda"])


class Buffers:
    """Persistent buffers: a forward pass moves averages."""

    def __init__(self, buffers: Mapping[str, Any], bytes_max: int) -> None:
        size = sum(value.numel() * value.element_size() for value in buffers.values())
        if size > bytes_max:
            raise ConfigError(
                f"the model has {size} bytes of persistent buffers, and {bytes_max} are kept: raise buffers_bytes_max"
            )
        self._buffers = buffers

    def take(self) -> Any:
        return {name: value.detach().clone() for name, value in self._buffers.items()}

    def give(self, value: Any) -> None:
        with torch.no_grad():
            for name, kept in value.items():
                self._buffers[name].copy_(kept)


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
        for group, kept in zip(self._groups(), value, strict=True):
            group.update({name: _copied(item) for name, item in kept.items()})


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class GoodStep:
    """What `scaler.update()` does after a step that was not skipped; the scaler itself has forgotten the step by then."""

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
