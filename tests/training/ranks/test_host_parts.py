"""What torch adds to the host state: random numbers, averages, hyperparameters, scheduler and scaler."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from acpfs.errors import ConfigError
from acpfs.training.torch.host_parts import host_state


def loop(step: int, model: Any, optimizer: Any, scheduler: Any, scaler: Any) -> None:
    batch = torch.randn(4, 3) + random.random() + np.random.random()
    optimizer.zero_grad()
    scaler.scale(model(batch).square().mean()).backward()
    scaler.step(optimizer)


@pytest.mark.clause("T46")
def test_the_end_of_a_step_comes_back() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    host = host_state([optimizer], dict(model.named_buffers()), 1 << 20, schedulers=[scheduler], scaler=scaler)
    steps = iter(range(1, 100))
    optimizer.register_step_pre_hook(lambda *_: host.take(next(steps)))
    ends: list[dict[str, Any]] = [{}]
    for step in range(1, 6):
        loop(step, model, optimizer, scheduler, scaler)
        scheduler.step()
        scaler.update()
        ends.append(host.now())
    model(torch.randn(4, 3))  # in the next forward pass
    random.random()
    np.random.random()
    for step in (5, 4, 4):
        host.bring(step)
        assert repr(host.now()) == repr(ends[step])


def test_more_buffers_than_are_kept_are_refused() -> None:
    with pytest.raises(ConfigError, match="buffers_bytes_max"):
        host_state([], {"large": torch.zeros(100)}, 399)


def test_two_states_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="scaler"):
        host_state([], {}, 0, scaler=torch.amp.GradScaler("cpu"), further={"scaler": torch.amp.GradScaler("cpu")})
