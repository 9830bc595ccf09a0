"""The last two steps are kept, and one of them is brought to its end, again and again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from acpfs.training.host_state import HostState, PythonRandom, Stateful


class Scheduler:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.clause("T46")
def test_a_step_is_brought_to_its_end() -> None:
    scheduler = Scheduler()
    host = HostState(
        {"random": PythonRandom(), "scheduler": Stateful(scheduler)},
        lambda: scheduler.steps.append(len(scheduler.steps)),
    )
    expected = {}
    for step in (1, 2, 3):
        drawn = random.random()
        host.take(step)
        expected[step] = (random.getstate(), drawn)
        scheduler.steps.append(len(scheduler.steps))
    assert host.steps == (2, 3)
    random.random()
    for step in (2, 3, 2, 2):
        host.bring(step)
        assert scheduler.steps == list(range(step))
        assert random.getstate() == expected[step][0]
        random.random()
    assert host.now()["scheduler"] == {"steps": [0, 1]}
    with pytest.raises(KeyError):
        host.bring(1)
