"""What else a job meets: a real mount, torchrun, SIGTERM, a stopped rank, a bug in one rank, a
script's own format, a dead coordinator.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acpfs.training import protect
from acpfs.training.manifest import verify
from acpfs.training.messages import ExitStatus
from tests.rig.mounts import AcpfsMount
from tests.training.gasp_job import asked, until
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.gasps import (
    DIES,
    STEPS,
    WORLD,
    Fault,
    assert_gasp,
    assert_same_as_without,
    protected,
    yardstick,
)
from tests.training.ranks.jobs import JOBS, assert_same

pytestmark = pytest.mark.long
REPOSITORY = Path(__file__).parents[3]
DEPENDENCIES_PYTHON = os.environ.get("ACPFS_TRAIN_COORDINATOR_PYTHON", sys.executable)


def newest(directory: Path) -> Path:
    return directory / (directory / "latest").read_text().strip()


def coordinators_of(directory: Path) -> list[str]:
    """Processes of a job that saves there."""
    found = []
    for entry in Path("/proc").glob("[1-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"acpfs.training.coordinator" in words and os.fsencode(directory) in words:
                found.append(entry.name)
    return found


@pytest.mark.clause("T47")
@pytest.mark.parametrize("kind", JOBS)
def test_through_a_mount(tmp_path: Path, kind: str) -> None:
    expected = yardstick(kind, tmp_path)
    fault = Fault(kind, {2: "gated"})
    backing = tmp_path / "backing"
    backing.mkdir()
    with AcpfsMount(backing, tmp_path / "mount", "native", python=DEPENDENCIES_PYTHON) as mount:
        with Ranks(
            WORLD,
            tmp_path,
            lambda rank: protected(rank, fault, mount.path / "run", tmp_path / "store"),
        ) as ranks:
            manifest = assert_gasp(fault, ranks, mount.path / "run", expected)
        mount.flush()
        assert verify(newest(backing / "run")) == manifest
        assert newest(backing / "run").name == f"step-{manifest.step}"
        until(lambda: not coordinators_of(mount.path / "run"))  # they have files open there


@pytest.mark.clause("T51")
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_under_torchrun(tmp_path: Path, kind: str) -> None:
    """It sends SIGTERM to the survivors when it sees the death, and SIGKILL 30 seconds later."""
    expected = yardstick(kind, tmp_path)
    fault = Fault(kind, {1: "backward"})
    directory = tmp_path / "run"
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={WORLD}",
    ]
    words += [
        str(REPOSITORY / "tests/training/ranks/torchrun_script.py"),
        str(directory),
        kind,
        "1",
        "backward",
    ]
    libraries = str(Path(pytest.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LIBRARIES": libraries}
    done = subprocess.run(
        words, env=environment, timeout=200, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert (directory / "latest").exists(), done.stderr
    assert assert_same_as_without(fault, directory, expected).step == DIES - 1


def _with(
    rank: int, directory: Path, store: Path, during: Callable[[int, int], None], **options: Any
) -> None:
    """`during(rank, number)` is called before each step."""
    join_group(rank, WORLD, store)
    job = JOBS["ddp"]()
    if "save" in options:
        options["save"] = lambda step, path: torch.save(
            {"step": step, "model": job.model.state_dict(), "rank": dist.get_rank()}, path / "w.pt"
        )
    with protect(
        directory, model=job.model, optimizer=job.optimizer, scheduler=job.scheduler, **options
    ):
        for number in range(1, STEPS + 1):
            during(rank, number)
            job.step(number)


def _bug(rank: int, number: int) -> None:
    if (rank, number) == (2, DIES):
        raise ValueError("a bug in one rank")


@pytest.mark.clause("T51")
def test_a_bug_in_one_rank_and_a_format_of_ones_own(tmp_path: Path) -> None:
    """Nobody dies: the rank with the bug has its state, and says why it came."""
    expected = yardstick("ddp", tmp_path)
    directory = tmp_path / "run"
    with Ranks(
        WORLD, tmp_path, lambda rank: _with(rank, directory, tmp_path / "store", _bug, save=True)
    ) as ranks:
        assert ranks.statuses() == [ExitStatus.SAVED] * WORLD
    assert "ValueError: a bug in one rank" in ranks.log(2).read_text()
    saved = torch.load(newest(directory) / "w.pt", weights_only=True)
    assert saved["step"] == DIES - 1
    assert saved["rank"] == 0
    found = {name.removeprefix("module."): value for name, value in saved["model"].items()}
    assert_same(found, torch.load(expected / f"ddp-{DIES - 1}.pt", weights_only=True)["model"])


def _preempted(rank: int, number: int) -> None:
    if number == DIES:
        os.kill(os.getpid(), signal.SIGTERM)
    while number > DIES:
        pass  # until STOP gets it out


@pytest.mark.clause("T51")
def test_sigterm_to_everybody(tmp_path: Path) -> None:
    expected = yardstick("ddp", tmp_path)
    directory = tmp_path / "run"
    with Ranks(
        WORLD, tmp_path, lambda rank: _with(rank, directory, tmp_path / "store", _preempted)
    ) as ranks:
        assert ranks.statuses() == [ExitStatus.SAVED] * WORLD
    assert assert_same_as_without(Fault("ddp", {}), directory, expected).lost == ()


def _stopped(rank: int, number: int) -> None:
    if (rank, number) == (2, DIES):
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.clause("T44")
def test_a_stopped_rank_is_lost_after_three_beats(tmp_path: Path) -> None:
    """The others wait for it in an all-reduce, and no connection ends by itself."""
    expected = yardstick("ddp", tmp_path)
    directory = tmp_path / "run"
    with Ranks(
        WORLD, tmp_path, lambda rank: _with(rank, directory, tmp_path / "store", _stopped)
    ) as ranks:
        assert [ranks.status(rank) for rank in (0, 1, 3)] == [ExitStatus.SAVED] * 3
        assert assert_same_as_without(Fault("ddp", {}), directory, expected).lost == (2,)
        ranks.kill(2, signal.SIGCONT)
        assert ranks.status(2) not in (0, ExitStatus.SAVED)


def _without_coordinator(directory: Path) -> Callable[[int, int], None]:
    def during(rank: int, number: int) -> None:
        if (rank, number) == (0, 2):
            (found,) = directory.glob(".acpfs-job/*/coordinator-0")
            os.kill(json.loads(found.read_text())["pid"], signal.SIGKILL)
        if (rank, number) == (1, DIES):
            raise ValueError("a bug in one rank")

    return during


@pytest.mark.clause("T49")
def test_no_coordinator_is_no_fault_and_no_protection(tmp_path: Path) -> None:
    """Training goes on without it; a fault is then what it was before: everybody's own
    exception.
    """
    directory = tmp_path / "run"
    during = _without_coordinator(directory)
    with Ranks(
        WORLD,
        tmp_path,
        lambda rank: _with(
            rank, directory, tmp_path / "store", during, command_s=0.5, coordinators=1
        ),
    ) as ranks:
        assert ranks.statuses() == [70] * WORLD
    assert "ValueError: a bug in one rank" in ranks.log(1).read_text()
    assert not (directory / "latest").exists()


def _with_a_standby(directory: Path) -> Callable[[int, int], None]:
    def during(rank: int, number: int) -> None:
        if (rank, number) == (0, 2):
            until(lambda: list(directory.glob(".acpfs-job/*/coordinator-1")))
            standby = json.loads(next(directory.glob(".acpfs-job/*/coordinator-1")).read_text())
            until(lambda: asked(standby["status"])["connected"] == WORLD)
            (active,) = directory.glob(".acpfs-job/*/coordinator-0")
            os.kill(json.loads(active.read_text())["pid"], signal.SIGKILL)
        if (rank, number) == (1, DIES):
            os.kill(os.getpid(), signal.SIGKILL)

    return during


@pytest.mark.clause("T153")
def test_on_one_node_the_coordinator_may_die_and_a_rank_after_it(tmp_path: Path) -> None:
    expected = yardstick("ddp", tmp_path)
    directory = tmp_path / "run"
    during = _with_a_standby(directory)
    with Ranks(
        WORLD, tmp_path, lambda rank: _with(rank, directory, tmp_path / "store", during)
    ) as ranks:
        assert [ranks.status(rank) for rank in (0, 2, 3)] == [ExitStatus.SAVED] * 3
    assert assert_same_as_without(Fault("ddp", {}), directory, expected).lost == (1,)


def _in_order(rank: int, directory: Path, store: Path) -> None:
    _with(rank, directory, store, lambda rank, number: None)
    dist.barrier()  # what comes after `with` is as it was before


@pytest.mark.clause("T51")
def test_the_end_of_a_loop_is_no_fault(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with Ranks(
        WORLD, tmp_path, lambda rank: _in_order(rank, directory, tmp_path / "store")
    ) as ranks:
        assert ranks.statuses() == [0] * WORLD
    assert [path.name for path in directory.iterdir()] == [".acpfs-job"]
    assert not list(directory.glob(".acpfs-job/*/faults.jsonl"))
