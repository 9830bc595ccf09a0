"""A storage that refuses what a survivor writes, or that stands still meanwhile.

Who was refused is asked again, then another holder, and who was not is not to blame. Who waits for
a storage is waited for.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from acpfs.training import protect
from tests.rig.faultfs import FaultFs
from tests.training.gasp_job import until
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.gasps import DIES, STEPS, WORLD, Fault, assert_gasp, protected, yardstick
from tests.training.ranks.jobs import JOBS

DEAD = 1
REFUSED = 0
INNOCENT = 3
OTHER = 2
"""`INNOCENT` alone has what the dead one had; `OTHER` has what the refused one has."""
LARGEST_BYTES = 1024
"""Of a file: the kernel refuses what is beyond it (EFBIG), as a full storage does.

Logs are longer, so a rank says nothing meanwhile.
"""
HANGS_S = 75.0
"""More than any time-out of a minute."""
DEPENDENCIES_PYTHON = os.environ.get("ACPFS_TRAIN_COORDINATOR_PYTHON", sys.executable)


def trains(
    rank: int, directory: Path, store: Path, kind: str, refuses: Callable[[int], bool]
) -> None:
    """`refuses(n)`: whether the kernel refuses what `REFUSED` writes in its n-th try."""
    fault = Fault(kind, {DEAD: "backward"})
    tries = 0
    join_group(rank, WORLD, store)
    job = JOBS[kind]()
    protection = protect(
        directory, model=job.model, optimizer=job.optimizers, scheduler=job.scheduler
    )

    def at(point: str) -> None:
        nonlocal tries
        if rank == REFUSED and point == "saving":
            tries += 1
            most = LARGEST_BYTES if refuses(tries) else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        fault.reached(rank, point, number)

    number = 0
    with protection:
        protection.at(at)
        for number in range(1, STEPS + 1):  # `at` looks at it
            job.step(number, at)


def troubles(directory: Path) -> list[int]:
    """Ranks that could not save, as the coordinator was told."""
    logs = directory.glob(".acpfs-job/*/logs/coordinator-0.log")
    lines = [json.loads(line) for path in logs for line in path.read_text().splitlines()]
    return [
        line["rank"]
        for line in lines
        if line["event"] == "a rank is in trouble" and line["kind"] == "save"
    ]


@pytest.mark.clause("T163")
@pytest.mark.parametrize(
    ("tries", "writes"),
    [(1, REFUSED), pytest.param(99, OTHER, marks=pytest.mark.long)],
    ids=["refused once", "refused for good"],
)
def test_who_was_refused_is_asked_again_and_then_another_holder(
    tmp_path: Path, yardsticks: Path, tries: int, writes: int
) -> None:
    expected = yardstick("zero", yardsticks)
    directory = tmp_path / "run"
    with Ranks(
        WORLD,
        tmp_path,
        lambda rank: trains(
            rank, directory, tmp_path / "store", "zero", lambda number: number <= tries
        ),
    ) as ranks:
        manifest = assert_gasp(Fault("zero", {DEAD: "backward"}), ranks, directory, expected)
    assert manifest.step == DIES - 1
    assert set(manifest.cover.values()) == {writes, INNOCENT}
    until(lambda: troubles(directory) == [REFUSED] * min(tries, 2))  # it is written behind
    assert not list(directory.glob("*.tmp"))


@pytest.mark.long
@pytest.mark.clause("T164")
def test_a_storage_that_stands_still_for_one_saver_holds_the_others_up_and_no_more(
    tmp_path: Path, yardsticks: Path
) -> None:
    """The other one has written its part, and waits for it in the group of savers."""
    expected = yardstick("zero", yardsticks)
    fault = Fault("zero", {DEAD: "backward"})
    with FaultFs(tmp_path / "source", tmp_path / "storage", python=DEPENDENCIES_PYTHON) as storage:
        storage.freeze(["write"], glob="__1_*")
        directory = storage.path / "run"
        with Ranks(
            WORLD, tmp_path, lambda rank: protected(rank, fault, directory, tmp_path / "store")
        ) as ranks:
            storage.wait_frozen()
            threading.Event().wait(HANGS_S)
            storage.thaw()
            assert_gasp(fault, ranks, directory, expected)
        # not the generation: under load a broken collective may be heard of before the exit that
        # broke it, and there are two STOPs
        logs = [path.read_text() for path in directory.glob(".acpfs-job/*/logs/coordinator-*.log")]
        assert sum(text.count('"now": "saving"') for text in logs) == 1, logs
        assert troubles(directory) == []
