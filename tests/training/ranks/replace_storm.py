"""A storm of faults in jobs that go on: each round is one job, in which ranks, two at a time, and a coordinator die at random moments.

What a round must leave: the job has ended in order, and everything is, bit for bit, as without a fault. Where both copies of a shard died
together it went on from the snapshot, which changes nothing of that. Rounds are drawn from a seed; one that fails keeps its directory.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.training.ranks.replaced import WORLD, Plan, Replaced, run_job

KINDS = ("hsdp", "zero", "ddp", "tensor")
STEPS, SNAPSHOT_AT = 60, 5
ONE, TWO, COORDINATOR = "a rank", "two ranks", "the coordinator"
HOW_OFTEN = {ONE: 6, TWO: 3, COORDINATOR: 1}
PAUSE_S = 3.0
"""Between two faults, at most; the first comes when the snapshot is there."""
FAULTS_PER_JOB = 5


@dataclass
class ReplaceStorm:
    """Runs rounds."""

    directory: Path
    seed: int
    tell: Callable[[str], object] = print
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    jobs: int = 0

    def run(self, faults: int) -> None:
        """So many, or a few more."""
        chance = random.Random(self.seed)
        (self.directory / "yardsticks").mkdir()
        while self.faults.total() < faults:
            self._round(chance)

    def _round(self, chance: random.Random) -> None:
        kind, directory, began = chance.choice(KINDS), self.directory / f"round-{self.jobs}", time.monotonic()
        self.jobs += 1
        directory.mkdir()
        due, left, told = [0.0], [FAULTS_PER_JOB], list[str]()

        def turn(ranks: Replaced) -> None:
            if not left[0] or time.monotonic() < due[0] or not (directory / "run" / "latest").exists():
                return
            left[0], due[0] = left[0] - 1, time.monotonic() + chance.random() * PAUSE_S
            what = chance.choices(list(HOW_OFTEN), list(HOW_OFTEN.values()))[0]
            if what == COORDINATOR and COORDINATOR in told:  # nobody starts it again: one more would end the last
                what = ONE
            told.append(what)
            self.faults[what] += 1
            if what == COORDINATOR:
                found = json.loads((directory / "run" / ".acpfs-job" / "job" / "coordinator-0").read_text())
                os.kill(found["pid"], signal.SIGKILL)
            else:
                for rank in chance.sample(range(WORLD), 2 if what == TWO else 1):
                    ranks.kill(rank)

        try:
            counts = run_job(
                Plan(kind, snapshot_at=SNAPSHOT_AT, steps=STEPS), directory, self.directory / "yardsticks", turn, timeout_s=240
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the verdict
            self.failed.append(f"{kind} in {directory}, {told}: {type(error).__name__}: {str(error)[-3000:]}")
            self.tell(f"FAILED {self.failed[-1]}")
            return
        shutil.rmtree(directory)
        self.tell(f"{self.faults.total()} faults, {time.monotonic() - began:.1f} s, {kind}, {told}, processes {list(counts.values())}")

    def told(self) -> str:
        """The result, in words."""
        what = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return f"seed {self.seed}: {self.faults.total()} faults ({what}) in {self.jobs} jobs, {len(self.failed)} failed or ended wrong"
