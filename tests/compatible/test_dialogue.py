"""A rank dies in a job whose script is written for the product: what its handlers are told, in
which order, and what is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from acpfs.compatible.places import SITE
from acpfs.training.messages import ExitStatus
from tests.rig.ports import free_port

clause = pytest.mark.clause
RANK = Path(__file__).with_name("product_rank.py")
END_S = 240
HANDLED = 31
"""How the exit handler ends a process."""
Job = Callable[..., tuple[list[int], list[list[Any]]]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Runs a job to its end; exit statuses, and what each rank's handlers were told."""
    running: list[subprocess.Popen[bytes]] = []

    def run(
        world: int,
        framework: str = "MindSpeed",
        tls: bool = False,
        exit_handler: bool = True,
        **happens: object,
    ) -> Any:
        port = free_port()
        environment = {
            **os.environ,
            "PYTHONPATH": str(SITE),
            "TTP_LOG_PATH": str(tmp_path / "logs"),
        }
        environment |= {"ACPFS_MINDIO_DIRECTORY": str(tmp_path)} if tls else {}
        config = {
            "world": world,
            "port": port,
            "directory": str(tmp_path),
            "framework": framework,
            "tls": tls,
            "copies": world,
        }
        for rank in range(world):
            told = json.dumps({**config, "rank": rank, "exit_handler": exit_handler, **happens})
            running.append(
                subprocess.Popen([sys.executable, str(RANK), told], env=environment, cwd=tmp_path)
            )
        statuses = [process.wait(END_S) for process in running]
        logs = [tmp_path / f"told-{rank}" for rank in range(world)]
        return statuses, [
            [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            for log in logs
        ]

    yield run
    for process in running:
        process.kill()
        process.wait()


def first_words(told: list[Any]) -> list[str]:
    return [what for what, *_ in told]


ALL = [{"type": 0, "ranks": [0]}]
ARGUMENTS = ["training"]


@clause("T102", "T103", "T104")
def test_a_rank_dies_in_its_update(job: Job, tmp_path: Path) -> None:
    statuses, told = job(3, tls=True, die=[2, "updating-3"])
    assert statuses == [HANDLED, HANDLED, -signal.SIGKILL]
    assert told[0] == [
        ["stop", ARGUMENTS, "c3"],
        ["clean", False, ARGUMENTS, "c4"],
        ["save_ckpt", 3, ALL, ARGUMENTS, "c1"],
        ["rename", 3, ARGUMENTS],
        ["exit", "c5", "dump"],
    ]
    assert told[1] == [told[0][0], told[0][1], told[0][4]]
    assert [path.name for path in (tmp_path / "step_3").iterdir()] == ["rank-0"]
    assert "FORCE STOP" in (tmp_path / "logs" / "ttp_log.log").read_text()


@clause("T102", "T103")
def test_an_exception_ends_in_a_checkpoint_of_the_last_step(job: Job, tmp_path: Path) -> None:
    """Without a framework that wants to be stopped first, as MindSpore: nothing is stopped or
    cleaned.
    """
    statuses, told = job(2, framework="", fail=[1, "gradients-3"])
    assert statuses == [HANDLED, HANDLED]
    step = told[0][0][1]
    assert step in (2, 3), "rank 0 may have done its update alone: the gate is the framework's"
    assert told[0] == [
        ["save_ckpt", step, ALL, ARGUMENTS, "c1"],
        ["rename", step, ARGUMENTS],
        ["exit", "c5", "dump"],
    ]
    assert first_words(told[1]) == ["exit"]
    assert (tmp_path / f"step_{step}" / "rank-0").exists()


@clause("T102")
def test_a_job_that_ends_leaves_nothing(job: Job, tmp_path: Path) -> None:
    statuses, told = job(2)
    assert (statuses, told) == ([0, 0], [[["result", "training is done"]]] * 2)
    assert not list(tmp_path.glob("step_*"))


@clause("T103")
@pytest.mark.long
@pytest.mark.parametrize(
    ("happens", "saver", "step"),
    [
        ({"memory": [0, "updated-3"]}, 1, 3),
        ({"cannot_save": 0, "die": [2, "updated-3"]}, 1, 3),
        ({"clean": {"0": 1}, "die": [2, "updated-3"]}, 1, 3),
        ({"clean": {"0": 2}, "die": [2, "updated-3"]}, 0, 3),
    ],
)
def test_a_rank_that_cannot_save_is_in_no_cover(
    job: Job, tmp_path: Path, happens: dict[str, Any], saver: int, step: int
) -> None:
    _statuses, told = job(3, **happens)
    assert "rename" in first_words(told[saver])
    assert [
        path.name for path in (tmp_path / f"step_{step}").iterdir() if path.name == f"rank-{saver}"
    ]


@clause("T104")
@pytest.mark.long
def test_without_an_exit_handler_the_process_ends_by_itself(job: Job, tmp_path: Path) -> None:
    statuses, told = job(2, exit_handler=False, die=[1, "updated-2"])
    assert statuses == [ExitStatus.SAVED, -signal.SIGKILL]
    assert first_words(told[0]) == ["stop", "clean", "save_ckpt", "rename"]


@clause("T103")
@pytest.mark.long
def test_no_cover_no_checkpoint(job: Job, tmp_path: Path) -> None:
    statuses, told = job(2, exit_handler=False, copies=1, die=[1, "updated-2"])
    assert statuses == [ExitStatus.NOT_SAVED, -signal.SIGKILL]
    assert first_words(told[0]) == ["stop", "clean"]
    assert not list(tmp_path.glob("step_*"))
