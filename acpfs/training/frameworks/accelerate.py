"""accelerate: `protect_accelerator` for a loop of one's own, whose gasp is what
`accelerator.save_state` writes.

A gasp of replicated state is written by one survivor, whichever it is; accelerate writes in process
0 only. So that process is number 0 of one while it writes. Random numbers of the others are not
here: each gets a copy of the writer's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from acpfs.errors import ConfigError
from acpfs.training.frameworks import and_then
from acpfs.training.protection import Protection, protect


@contextmanager
def alone() -> Iterator[None]:
    """This process is number 0 of one, for accelerate and what is built on it."""
    # nothing else says it
    states = [PartialState._shared_state, AcceleratorState._shared_state]  # noqa: SLF001
    states = [state for state in states if state]
    kept = [dict(state) for state in states]
    for state in states:
        state.update(process_index=0, local_process_index=0, num_processes=1)
    try:
        yield
    finally:
        for state, before in zip(states, kept, strict=True):
            state.clear()
            state.update(before)


@contextmanager
def instead(subject: Any, **values: Any) -> Iterator[None]:
    """Attributes of one object, for a while."""
    kept = {name: vars(subject)[name] for name in values if name in vars(subject)}
    vars(subject).update(values)
    try:
        yield
    finally:
        for name in values:
            if name in kept:
                vars(subject)[name] = kept[name]
            else:
                del vars(subject)[name]


def copied_for_all(written: Path, pattern: str, world: int) -> None:
    """A file that every process has one of: `pattern` with each number.

    `written` may be one of them.
    """
    for number in range(world):
        other = written.with_name(pattern.format(number))
        if other != written:
            shutil.copyfile(written, other)


def plain(wrapped: Any) -> Any:
    """torch's own optimizer or scheduler, behind accelerate's."""
    return (
        getattr(wrapped, "optimizer", wrapped) if hasattr(wrapped, "accelerator_state") else wrapped
    )


def refuse_scaler(accelerator: Any) -> None:
    """A step that a scaler skips is one for these frameworks, and none for the marks: numbers of
    checkpoints would differ.

    Raises:
        ConfigError: there is a scaler.
    """
    if getattr(accelerator, "scaler", None) is not None:
        raise ConfigError(
            "fp16 with a loss scaler is not protected here: it skips steps that the framework "
            "counts; bf16 needs none"
        )


def protect_accelerator(
    accelerator: Any, directory: str | os.PathLike[str], *, model: Any, **options: Any
) -> Protection:
    """Protection of what `accelerator.prepare` was given; a gasp loads with
    `accelerator.load_state`.

    Schedulers step as accelerate steps them, once per update of all processes; `after_update=` is
    what the loop does beside that.

    Args:
        accelerator: has the optimizers, the schedulers and what was registered for checkpointing.
        directory: where gasps go.
        model: what `prepare` gave back.
        options: of `protect`.

    Raises:
        ConfigError: something that cannot be protected.
    """
    refuse_scaler(accelerator)
    # as save_state does
    schedulers = list(accelerator._schedulers)  # noqa: SLF001
    world = dist.get_world_size()

    def save(_step: int, path: Path) -> None:
        with (
            alone(),
            instead(accelerator.project_configuration, automatic_checkpoint_naming=False),
        ):  # that writes elsewhere, and deletes
            accelerator.save_state(str(path))
        copied_for_all(path / "random_states_0.pkl", "random_states_{}.pkl", world)

    def end_of_step() -> None:
        # A rank may have to do this in the middle of gradients that are being accumulated, where
        # accelerate's schedulers count nothing.
        with instead(accelerator.gradient_state, **vars(accelerator.gradient_state)):
            # as `accumulate` does
            accelerator.gradient_state._set_sync_gradients(True)  # noqa: SLF001
            for scheduler in schedulers:
                scheduler.step()

    registered = {
        f"registered{number}": part
        for number, part in enumerate(accelerator._custom_objects)  # noqa: SLF001  # the same
    }
    given = {"save": save, "scheduler": schedulers, **options}
    given["after_update"] = and_then(end_of_step, options.get("after_update"))
    given["state"] = {**registered, **(given.get("state") or {})}
    # the same
    optimizers = [plain(optimizer) for optimizer in accelerator._optimizers]  # noqa: SLF001
    return protect(directory, model=model, optimizer=optimizers, **given)
