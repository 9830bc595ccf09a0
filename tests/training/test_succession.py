"""The coordinator of a job whose ranks are replaced is killed: what its successor knows.

Real coordinators, and ranks without torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.gasp_job import ROOT, asked, until

clause = pytest.mark.clause
END_S = 240.0


class Job:
    """Two coordinators, and ranks when they are begun. A context manager's work is the
    fixture's.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[str]] = []
        self.announced: list[dict[str, str]] = []
        self.coordinators = [
            self.coordinator("--number=0", "--first"),
            self.coordinator("--number=1", "--peer=0="),
        ]

    def coordinator(self, *words: str) -> subprocess.Popen[str]:
        known = [
            word + self.announced[0]["address"] if word.endswith("=") else word for word in words
        ]
        options = ["--job", "job", "--replace", "--tls", "off", "--witness", "off", *known]
        begun = self._begin("acpfs.training.coordinator", str(self.directory), *options)
        self.announced.append(json.loads(self.line(begun)))
        return begun

    def _begin(self, module: str, *words: str, **environment: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        found = {**os.environ, **environment}
        command = [sys.executable, "-m", module, *words]
        self.processes.append(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=found)
        )
        return self.processes[-1]

    def line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def rank(
        self, rank: int, world: int, *coordinators: int, **environment: str
    ) -> subprocess.Popen[str]:
        addresses = [f"{number}={self.announced[number]['address']}" for number in coordinators]
        return self._begin(
            "tests.training.crew_member", str(rank), str(world), *addresses, **environment
        )

    def leaves(self, rank: subprocess.Popen[str]) -> None:
        assert rank.stdin is not None
        rank.stdin.close()
        assert rank.wait(END_S) == 0

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        assert process.wait(END_S) == -signal.SIGKILL

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(END_S)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.end()


@clause("T166")
def test_who_comes_for_a_rank_that_was_killed_at_the_end_hears_from_the_standby_that_all_is_done(
    job: Job,
) -> None:
    """One rank of three elects nobody, and those who could have left."""
    ranks = [job.rank(rank, 3, 0, 1) for rank in range(3)]
    assert [job.line(rank) for rank in ranks] == ["all is done"] * 3
    job.kill(ranks[1])
    for rank in (0, 2):
        job.leaves(ranks[rank])
    job.kill(job.coordinators[0])
    again = job.rank(1, 3, 1)
    assert job.line(again) == "all is done"
    job.leaves(again)


@clause("T166")
def test_where_only_a_coordinator_is_left_that_does_not_know_it_who_comes_ends_with_an_error(
    job: Job,
) -> None:
    """One that was started when those who know had left: it is told of one rank of three, and
    nobody elects it.
    """
    ranks = [job.rank(rank, 3, 0, 1) for rank in range(3)]
    assert [job.line(rank) for rank in ranks] == ["all is done"] * 3
    job.kill(ranks[1])
    job.kill(job.coordinators[1])
    for rank in (0, 2):
        job.leaves(ranks[rank])
    job.coordinator("--number=2", "--peer=0=")
    job.kill(job.coordinators[0])
    again = job.rank(1, 3, 2, ACPFS_TRAIN_PROTECTED_S="1")
    assert job.line(again) == "no protection: not all ranks came in 1 s"
    assert again.wait(END_S) == 1


@clause("T155")
def test_a_process_that_comes_before_the_successor_commands_takes_its_place(job: Job) -> None:
    first = job.rank(0, 1, 0, 1)
    assert job.line(first) == "all is done"  # so both coordinators know the job
    job.kill(first)
    until(lambda: asked(job.announced[1]["status"])["ranks"][0]["lost"])
    job.kill(job.coordinators[0])
    again = job.rank(0, 1, 1)
    assert job.line(again) == "all is done"
    job.leaves(again)
