"""transformers: `protect_trainer(trainer)` before `trainer.train()`.

A gasp is a `checkpoint-N`, written by the Trainer's own functions.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from acpfs.errors import ConfigError
from acpfs.training.frameworks import and_then
from acpfs.training.frameworks.accelerate import (
    alone,
    copied_for_all,
    instead,
    plain,
    refuse_scaler,
)
from acpfs.training.protection import Protection, protect


def protect_trainer(
    trainer: Trainer, directory: str | os.PathLike[str] | None = None, **options: Any
) -> TrainerProtection:
    """From here on `trainer.train()` is protected.

    Args:
        trainer: not in training yet.
        directory: where gasps go; by default the Trainer's own `output_dir`, so that
            `resume_from_checkpoint=True` finds them.
        options: of `protect`.

    Raises:
        ConfigError: something that cannot be protected.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ConfigError(
            "protect_trainer knows data parallel training with whole copies only, not FSDP or "
            "DeepSpeed below the Trainer"
        )
    if trainer.args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size begins the loop anew inside of train(): find the size first, "
            "and protect the job that has it"
        )
    Path(trainer.args.output_dir).mkdir(
        parents=True, exist_ok=True
    )  # in every rank: the first start looks there for a checkpoint, too
    protection = TrainerProtection(trainer, Path(directory or trainer.args.output_dir), options)
    trainer.add_callback(protection)
    return protection


# transformers is Any where types are checked
class TrainerProtection(TrainerCallback):  # type: ignore[misc]
    """Of one Trainer."""

    def __init__(self, trainer: Trainer, directory: Path, options: dict[str, Any]) -> None:
        """`options`: of `protect`."""
        self._trainer = trainer
        self._directory = directory
        self._options = {"name": "checkpoint-{step}", "tracker": "", **options}
        self._life = ExitStack()
        self._train = trainer.train
        self._evaluate = trainer.evaluate
        self.protection: Protection | None = None
        trainer.train = self._protected_train
        trainer.evaluate = self._long_evaluate

    def _protected_train(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as self._life:
            return self._train(*args, **kwargs)

    def _long_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if self.protection is None:
            return self._evaluate(*args, **kwargs)
        with self.protection.long_operation():
            return self._evaluate(*args, **kwargs)

    # -- what the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        refuse_scaler(trainer.accelerator)
        progress = _Progress(trainer, kwargs["train_dataloader"])
        saver = _Saver(trainer, dist.get_world_size() if dist.is_initialized() else 1)
        given = {
            "scheduler": trainer.lr_scheduler,
            "save": saver.save,
            **self._options,
        }
        given["after_update"] = and_then(progress.end_of_step, self._options.get("after_update"))
        given["state"] = {"trainer": progress, **(given.get("state") or {})}
        self.protection = protect(
            self._directory,
            model=trainer.model_wrapped,
            optimizer=plain(trainer.optimizer),
            step=state.global_step,
            **given,
        )
        self._life.enter_context(self.protection)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.protection = None
        self._life.close()


class _Progress:
    """The Trainer's count of steps, which is in its checkpoint.

    The log needs nothing: no line of it is newer than the gasp.
    """

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self._trainer = trainer
        self._accumulated = trainer.args.gradient_accumulation_steps
        self._batches = (
            len(loader) if has_length(loader) else trainer.args.max_steps * self._accumulated
        )
        self._updates = max(-(-self._batches // self._accumulated), 1)

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self._trainer.state.global_step, "epoch": self._trainer.state.epoch}

    def load_state_dict(self, value: dict[str, Any]) -> None:
        self._trainer.state.global_step = value["global_step"]
        self._trainer.state.epoch = value["epoch"]

    def end_of_step(self) -> None:
        """What the Trainer does from an update to the end of its step."""
        scheduler = self._trainer.lr_scheduler
        state = self._trainer.state
        if (
            not isinstance(scheduler, ReduceLROnPlateau) and type(scheduler).__name__ != "GreedyLR"
        ):  # these step where it evaluates
            scheduler.step()
        epochs, updates = divmod(state.global_step, self._updates)
        state.global_step += 1
        state.epoch = epochs + min((updates + 1) * self._accumulated, self._batches) / self._batches


class _Saver:
    """Writes a checkpoint as the Trainer does, in one process, whichever it is."""

    def __init__(self, trainer: Trainer, world: int) -> None:
        self._trainer = trainer
        self._world = world

    def save(self, step: int, directory: Path) -> None:
        trainer = self._trainer
        with (
            alone(),
            instead(trainer, _get_output_dir=lambda **_: str(directory)),
            instead(trainer.args, push_to_hub=False),
        ):
            # what the Trainer itself calls; there is no public one
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)  # noqa: SLF001
        (written,) = directory.glob("checkpoint-*")
        for path in written.iterdir():
            path.rename(directory / path.name)
        written.rmdir()
        if self._world > 1:
            copied_for_all(directory / "rng_state.pth", "rng_state_{}.pth", self._world)
            (directory / "rng_state.pth").unlink()
