"""Random deaths in real processes: one or two members and perhaps the active coordinator, at any
moment of the dialogue.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import pytest

from acpfs.training.messages import ExitStatus
from tests.training.gasp_job import GaspJob, until

HOLDERS = {"a": (0, 1, 2), "b": (2, 3, 4), "c": (4, 5, 0)}
MARKS = {
    "0": (6, "computing"),
    "1": (5, "ready"),
    "2": (5, "updating"),
    "3": (5, "ready"),
    "4": (6, "computing"),
    "5": (5, "updating"),
}
ROUNDS = 12


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.clause("T12", "T17", "T20", "T21")
def test_random_deaths_leave_one_gasp_at_one_step(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    pause = threading.Event()
    for number in range(int(os.environ.get("ACPFS_GASP_ROUNDS", ROUNDS))):
        with GaspJob(tmp_path / str(number), 6, HOLDERS, marks=MARKS, coordinators=2) as job:
            job.wait("Protected", *range(6))
            until(lambda job=job: job.status(1)["connected"] == 6)  # type: ignore[misc]
            victims = chance.sample(range(6), chance.choice([1, 2]))
            dies = chance.random() < 0.5
            job.kill(victims[0])
            for victim in victims[1:]:
                pause.wait(chance.random() * 0.1)
                with contextlib.suppress(ProcessLookupError):
                    job.kill(victim, signal.SIGKILL)
            if dies:
                pause.wait(chance.random() * 0.1)
                job.coordinators[0].kill()
            survivors = [rank for rank in range(6) if rank not in victims]
            statuses = {job.left(rank)["status"] for rank in survivors}
            steps = {manifest["step"] for manifest in job.published()}
            print(number, victims, "coordinator" if dies else "", statuses, steps)
            assert statuses == {ExitStatus.SAVED}, "two of three holders at most are gone"
            assert len(steps) == 1
            assert steps <= {5, 6}
