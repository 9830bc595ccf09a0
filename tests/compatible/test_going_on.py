"""A rank dies, or loses its memory, in a job whose script is written for the product, and the job
goes on (`enable_arf`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from acpfs.compatible.going_on import Transfer, repair_info, transfers_of
from acpfs.compatible.places import SITE
from acpfs.compatible.product_values import RepairType
from acpfs.training.messages import ExitStatus
from acpfs.training.sources import Origin, Sources
from tests.rig.ports import free_port

clause = pytest.mark.clause
RANK = Path(__file__).with_name("product_rank_going_on.py")
END_S = 480.0
WORLD = 3
STEPS = 6


class Job:
    """Ranks, each replaced when it dies as a launcher would."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.processes = dict.fromkeys(range(WORLD), 0)
        self.port = free_port()

    def begin(self, rank: int, happens: dict[str, Any]) -> None:
        told = {
            "rank": rank,
            "world": WORLD,
            "port": self.port,
            "directory": str(self.directory),
            **happens,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": str(SITE),
            "TTP_LOG_PATH": str(self.directory / "logs"),
        }
        environment["ACPFS_GENERATION"] = str(self.processes[rank])
        with (self.directory / f"out-{rank}").open("ab") as out:
            words = [sys.executable, str(RANK), json.dumps(told)]
            self.running[rank] = subprocess.Popen(
                words, env=environment, cwd=self.directory, stdout=out, stderr=out
            )

    def run(self, **happens: Any) -> None:
        for rank in range(WORLD):
            self.begin(rank, happens)
        deadline = time.monotonic() + END_S
        ended = set[int]()
        while len(ended) < WORLD:
            assert time.monotonic() < deadline, self.said()
            for rank in set(self.running) - ended:
                try:
                    status = self.running[rank].wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
                if status == 0:
                    ended.add(rank)
                else:
                    assert status in (-signal.SIGKILL, ExitStatus.TAKEN_FOR_LOST), self.said()
                    self.processes[rank] += 1
                    self.begin(rank, happens)

    def said(self) -> str:
        return "\n".join(
            (self.directory / f"out-{rank}").read_text()[-3000:] for rank in range(WORLD)
        )

    def told(self, rank: int) -> list[list[Any]]:
        path = self.directory / f"told-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.end()


def as_without_a_fault() -> dict[str, float]:
    weight = 1.0
    moment = 0.0
    for step in range(1, STEPS + 1):
        moment = 0.9 * moment + step * weight
        weight -= 0.01 * moment
    return {"step": STEPS, "weight": weight, "moment": moment}


def assert_ends_the_same(job: Job, ranks: Iterable[int] = range(WORLD)) -> None:
    for rank in ranks:
        assert json.loads((job.directory / f"end-{rank}").read_text()) == as_without_a_fault()


@clause("T146")
@pytest.mark.parametrize(
    ("rank", "point"), [(2, "updating-3"), pytest.param(0, "updated-3", marks=pytest.mark.long)]
)
def test_a_rank_that_dies_is_replaced_and_the_train_function_goes_on(
    job: Job, rank: int, point: str
) -> None:
    job.run(die=[rank, point])
    assert_ends_the_same(job)
    assert job.processes == {other: int(other == rank) for other in range(WORLD)}
    for other in set(range(WORLD)) - {rank}:
        words = [word for _, word, *_ in job.told(other)]
        assert words[:3] == ["stop", "clean", "rebuild_group"]
        assert words[-1] == "rollback"
        assert job.told(other)[0] == [0, "stop", "recover"]
    assert [word for process, word, *_ in job.told(rank) if process == 1] == [
        "rebuild_group",
        "repair",
        "rollback",
    ]
    ((_, _, step, need_rebuild, error_ranks, info),) = [
        line for line in job.told(rank) if line[1] == "repair"
    ]
    assert (need_rebuild, error_ranks, info["repair_type"]) == (
        False,
        [rank],
        RepairType.RT_RECV_REPAIR.value,
    )
    assert (info["type"], info["dst"], info["rank_list"]) == ([0], [rank], list(range(WORLD)))
    assert step in (2, 3)


@clause("T146")
def test_who_comes_for_a_rank_that_died_when_all_was_done_ends_in_order(job: Job) -> None:
    job.run(die=[2, "leaving"])
    assert job.processes == {0: 0, 1: 0, 2: 1}
    assert_ends_the_same(job, (0, 1))
    assert json.loads((job.directory / "end-2").read_text())["step"] == 0, (
        "its train function did nothing"
    )


@clause("T146")
@pytest.mark.long
@pytest.mark.parametrize(
    ("clean", "kind"), [(0, RepairType.RT_UCE_HIGHLEVEL), (2, RepairType.RT_UCE_LOWLEVEL)]
)
@pytest.mark.parametrize("point", ["gradients-3", "updating-3"])
def test_a_rank_whose_memory_is_lost_is_repaired_and_stays(
    job: Job, clean: int, kind: RepairType, point: str
) -> None:
    job.run(memory=[1, point], clean=clean)
    assert_ends_the_same(job)
    assert set(job.processes.values()) == {0}
    told = job.told(1)
    assert [0, "clean", True] in told
    assert "rebuild_group" not in [word for _, word, *_ in told]
    ((_, _, _, need_rebuild, error_ranks, info),) = [line for line in told if line[1] == "repair"]
    assert (need_rebuild, info["repair_type"]) == (kind is RepairType.RT_UCE_HIGHLEVEL, kind.value)
    assert 1 in error_ranks
    assert job.told(0)[0] == [0, "stop", "retry"]


def test_what_handlers_are_told() -> None:
    found = Sources(
        Origin.MEMORY,
        7,
        givers={"opt0/rank0": 0, "opt1/rank1": 3},
        wanting={"opt0/rank0": (1, 2), "opt1/rank1": (1,)},
    )
    transfers = transfers_of(found, {"opt0/rank0": (0, 1, 2), "opt1/rank1": (1, 3)})
    assert transfers == [
        Transfer(0, 0, 1, (0, 1, 2)),
        Transfer(0, 0, 2, (0, 1, 2)),
        Transfer(1, 3, 1, (1, 3)),
    ]
    info = repair_info(RepairType.RT_RECV_REPAIR, [one for one in transfers if one.target == 1])
    assert info == {
        "type": [0, 1],
        "repair_type": 3,
        "src": [0, 3],
        "dst": [1, 1],
        "rank_list": [0, 1, 2, 3],
    }
