"""What torch adds to the host state: random numbers, averages, hyperparameters, scheduler and scaler."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from acpfs.errors import ConfigError
from acpfs.training.host_state import HostState
from acpfs.training.torch.host_parts import host_state
from acpfs.training.torch.writers import write_host_state
from tests.training.ranks.forked import Ranks


def loop(step: int, model: Any, optimizer: Any, scheduler: Any, scaler: Any) -> None:
    batch = torch.randn(4, 3) + random.random() + np.random.random()
    optimizer.zero_grad()
    scaler.scale(model(batch).square().mean()).backward()
    scaler.step(optimizer)


@pytest.mark.clause("T46")
def test_the_end_of_a_step_comes_back() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    host = host_state(
        [optimizer], dict(model.named_buffers()), 1 << 20, schedulers=[scheduler], scaler=scaler
    )
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
        host_state(
            [],
            {},
            0,
            scaler=torch.amp.GradScaler("cpu"),
            further={"scaler": torch.amp.GradScaler("cpu")},
        )


def _reads_late(directory: Path) -> None:
    """The file is opened by a reader of this process, which needs the interpreter for that."""
    (directory / "host_state").mkdir()
    os.mkfifo(directory / "host_state" / "rank-0.pt")
    reading = threading.Thread(target=(directory / "host_state" / "rank-0.pt").read_bytes)
    parts = HostState({}, lambda: None)
    threading.Timer(0.2, reading.start).start()
    write_host_state(directory, 1, parts, 0)


@pytest.mark.clause("T48")
def test_a_file_that_cannot_be_opened_yet_stops_no_other_thread(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, lambda rank: _reads_late(tmp_path)) as ranks:
        assert ranks.statuses(60) == [0], ranks.said()
