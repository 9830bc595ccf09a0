"""torchtitan's own trainer on the double of a device that runs behind its host: reductions,
clipping and updates are queued, and the host waits for none of these.

What a stream would order and the host does here waits for the stream: a step behind the update
before it, a number that was reduced and is read, and a checkpoint.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.training.ranks.asynchronous import BACKEND, AsynchronousAdam
from tests.training.ranks.behind import EARLY, OnDouble, put_wrong
from tests.training.trainers.titan_on_processors import CheckpointManager, Trainer, distributed


def put(directory: Path, gate: str = "") -> OnDouble:
    """Of this process, before its trainer. `gate`: which one is wrong; empty: none."""
    place = OnDouble()
    place.enter(directory)
    dist.Backend.default_device_backend_map["cpu"] = BACKEND  # torchtitan asks for it
    _queue(place)
    if gate:
        put_wrong(gate)
        torch.nn.modules.module.register_module_forward_hook(
            lambda *_: EARLY.append(place.record())
        )
    return place


def _queue(place: OnDouble) -> None:
    clip = distributed.clip_grad_norm_
    reduce = distributed.funcol.all_reduce
    should_save = CheckpointManager._should_save
    step = Trainer.train_step

    class AdamW(AsynchronousAdam):
        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(params, place.stream, decoupled_weight_decay=True, **settings)

    def all_reduce(*given: Any, **named: Any) -> Any:
        found = reduce(*given, **named)
        place.order()  # the host reads it
        return found

    def clipped(parameters: Any, *given: Any, **named: Any) -> Any:
        norm = torch.zeros(())
        place.do(lambda: norm.copy_(clip(parameters, *given, **named)))
        return norm

    @functools.wraps(should_save)
    def saves(*given: Any, **named: Any) -> bool:
        found = bool(should_save(*given, **named))
        if found:
            place.order()
        return found

    @functools.wraps(step)
    def stepped(*given: Any, **named: Any) -> Any:
        place.order()
        return step(*given, **named)

    torch.optim.AdamW = AdamW
    distributed.funcol = SimpleNamespace(all_reduce=all_reduce)
    distributed.clip_grad_norm_ = clipped
    CheckpointManager._should_save = saves
    Trainer.train_step = stepped
