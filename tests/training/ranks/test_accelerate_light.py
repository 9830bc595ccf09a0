"""What accelerate's schedulers do where a gasp is written; whole jobs with it are in
`tests/training/adapters`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.ranks.forked import Ranks, join_group

ACCUMULATED = 4


def _brings(rank: int, directory: Path) -> None:
    from accelerate import Accelerator

    from acpfs.training.frameworks.accelerate import protect_accelerator

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    join_group(rank, 1, directory / "store")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counted: list[Any] = []
    protection = protect_accelerator(
        accelerator, directory / "run", model=model, after_update=lambda: counted.append(1)
    )
    host = protection._rank._host

    def micro_batch() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            if accelerator.sync_gradients:
                host.take(1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    for _ in range(ACCUMULATED):
        micro_batch()
    expected = scheduler.scheduler.state_dict()
    assert expected["last_epoch"] == 1
    micro_batch()  # of the next update, in which a fault comes
    assert not accelerator.sync_gradients
    host.bring(1)
    found = scheduler.scheduler.state_dict()
    assert {name: found[name] for name in ("last_epoch", "_last_lr")} == {
        name: expected[name] for name in ("last_epoch", "_last_lr")
    }
    assert counted == [1]
    assert not accelerator.sync_gradients, "the loop's own may go on"


@pytest.mark.clause("T195")
def test_schedulers_step_also_in_the_middle_of_accumulated_gradients(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, lambda rank: _brings(rank, tmp_path)) as ranks:
        assert ranks.statuses() == [0], ranks.said()
