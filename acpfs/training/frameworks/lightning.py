"""Lightning: `Trainer(callbacks=[Protect("/mnt/acp/run1")])`.

A gasp is a directory with a `.ckpt` of Lightning's own, for `ckpt_path=`.

Lightning's checkpoints have no random numbers; the callback adds them, to those of
`ModelCheckpoint` too, and gives them back.
"""

from __future__ import annotations

import copy
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from acpfs.errors import ConfigError
from acpfs.training.frameworks import and_then
from acpfs.training.guard import Guard
from acpfs.training.host_state import NumpyRandom, Part, PythonRandom
from acpfs.training.protection import Protection, protect
from acpfs.training.torch.host_parts import TorchRandom
from acpfs.training.torch.writers import loadable

FILE = "gasp.ckpt"


def newest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest `.ckpt` below a directory, a gasp or Lightning's own, for `fit(…,
    ckpt_path=newest(…))`; None where there is none.
    """
    found = [
        path
        for path in Path(directory).rglob("*.ckpt")
        if not any(part.endswith(".tmp") for part in path.parts)
    ]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


class Protect(Callback):  # type: ignore[misc]  # lightning is Any where types are checked
    """From `on_train_start` to `on_train_end` a rank that dies leaves a checkpoint of the last
    step.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        """`directory`: where gasps go. `options`: of `protect`."""
        self._directory = Path(directory)
        self._options = options
        self._long = ExitStack()
        self._random: dict[str, Part] = {
            "python": PythonRandom(),
            "numpy": NumpyRandom(),
            "torch": TorchRandom(),
        }
        self._loaded: dict[str, Any] | None = None
        self.protection: Protection | None = None
        self._guard = Guard()
        """The rank's own from the beginning of protection on."""

    # -- life

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ConfigError(
                "manual optimization: call protect in the module; the callback cannot know what "
                "belongs to one update"
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ConfigError(
                "16-mixed with a loss scaler is not protected here: bf16-mixed needs none"
            )
        progress = _Progress(trainer)
        given = {"save": progress.save, **self._options}
        given["after_update"] = and_then(progress.end_of_step, self._options.get("after_update"))
        given["scheduler"] = [config.scheduler for config in trainer.lr_scheduler_configs]
        given["state"] = {"lightning": progress, **(given.get("state") or {})}
        protection = protect(
            self._directory,
            model=trainer.strategy.model,
            optimizer=trainer.optimizers,
            step=trainer.global_step,
            **given,
        )
        self._guard = protection.guard
        self.protection = protection.__enter__()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._end(exception)

    def _end(self, error: BaseException | None) -> None:
        protection = self.protection
        self.protection = None
        if protection is not None:
            protection.__exit__(
                type(error) if error is not None else None,
                error,
                error.__traceback__ if error is not None else None,
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.protection is not None:
            self._guard.ours(self._long.enter_context, self.protection.long_operation())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._guard.last(self._long.close)

    # -- random numbers

    def state_dict(self) -> dict[str, Any]:
        return self._guard.ours(self._taken) or {}

    def _taken(self) -> dict[str, Any]:
        return {name: loadable(part.take()) for name, part in self._random.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._guard.ours(self._give_back)

    def _give_back(self) -> None:
        loaded = self._loaded
        self._loaded = None
        for name, value in (loaded or {}).items():
            self._random[name].give(value)


class _Progress:
    """Lightning's counters, which are a part of its checkpoint."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loader: Any = None
        """Where the data loader was at the last state that was given back: it cannot go back
        itself.
        """

    def state_dict(self) -> dict[str, Any]:
        return dict(self._trainer.fit_loop.state_dict())

    def load_state_dict(self, value: dict[str, Any]) -> None:
        self._loader = copy.deepcopy(value["state_dict"])
        self._trainer.fit_loop.load_state_dict(value)

    def end_of_step(self) -> None:
        """What Lightning does from an update to `on_train_batch_end`, where its own checkpoints are
        written.
        """
        loop = self._trainer.fit_loop.epoch_loop
        loop.automatic_optimization.optim_progress.optimizer.step.increment_completed()
        loop.batch_progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():  # noqa: SLF001  # as the loop itself asks
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def save(self, step: int, directory: Path) -> None:
        trainer = self._trainer
        # save_checkpoint writes in rank 0 only
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)  # noqa: SLF001
        checkpoint["loops"]["fit_loop"]["state_dict"] = self._loader
        trainer.strategy.checkpoint_io.save_checkpoint(checkpoint, directory / FILE)
