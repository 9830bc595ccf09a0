"""What torch adds to the host state: random numbers, averages, hyperparameters, scheduler and
scaler.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from acpfs.errors import ConfigError
from acpfs.training.host_state import HostState
from acpfs.training.torch.end_mark import LOOKED_AT, ChangedError
from acpfs.training.torch.host_parts import Frozen, host_state
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


def moved(value: Any) -> None:
    with torch.no_grad():
        value.add_(1)


def moved_by_data(value: Any) -> None:
    value.data[1].add_(1)  # no count of writes, and not at an end


@pytest.mark.clause("T174")
@pytest.mark.parametrize("move", [moved, moved_by_data])
def test_a_parameter_that_no_optimizer_updates_and_that_moves_is_kept(
    move: Callable[[Any], None],
) -> None:
    still = torch.zeros(9, 9)
    target = torch.zeros(9, 9)
    part = Frozen({"still": still, "target": target}, 1 << 20)
    move(target)
    first = part.take()
    assert first.keys() == {"target"}
    move(target)
    part.give(first)
    assert torch.equal(target, first["target"])
    move(target)
    second = part.take()
    assert not torch.equal(second["target"], first["target"])
    move(target)
    part.give(second)
    part.give(second)
    assert torch.equal(target, second["target"])


@pytest.mark.clause("T174")
def test_a_parameter_that_moves_for_the_first_time_is_not_taken_for_what_it_was() -> None:
    target = torch.zeros(9, 9)
    part = Frozen({"target": target}, 1 << 20)
    before = [part.take() for _ in range(LOOKED_AT + 1)][-1]
    assert before == {}
    part.give(before)
    moved_by_data(target)
    with pytest.raises(ChangedError, match="target"):
        part.give(before)
    moved(target)
    assert part.take().keys() == {"target"}


@pytest.mark.clause("T174")
def test_more_than_is_kept_of_what_moves_is_refused_at_the_beginning() -> None:
    target = torch.zeros(9, 9)
    part = Frozen({"target": target}, 100)
    moved(target)
    with pytest.raises(ConfigError, match="buffers_bytes_max"):
        part.take()
    late = Frozen({"target": target}, 100)
    for _ in range(LOOKED_AT):
        late.take()
    for _ in range(2):
        moved(target)
        assert late.take() == {}, "training goes on"
    with pytest.raises(ChangedError):
        late.give({})


@pytest.mark.clause("T175")
def test_a_parameter_group_that_was_added_since_is_not_in_what_comes_back() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    late = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    host = host_state([optimizer], {}, 1 << 20)
    host.begin(1)
    optimizer.add_param_group({"params": [late], "lr": 0.1})
    host.begin(2)
    host.bring(2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    host.bring(1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]
