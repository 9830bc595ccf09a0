"""A fixed set of histories of jobs: none breaks a rule, and each is the same in another process."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.rig.mounts import REPOSITORY

FIRST = 20
SEEDS = 24
DEATHS_FIRST = 52
DEATHS = 16
CREW_FIRST = 5
CREWS = 16
"""Histories that come to all places below."""


def told(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.training", *words],
        cwd=REPOSITORY,
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.clause("T50", "T176")
def test_no_history_breaks_a_rule() -> None:
    counts = told("--from", str(FIRST), "--seeds", str(SEEDS))
    print(counts)
    for reached in ("checkpoints", "other jobs refused", "second faults", "take-overs"):
        assert re.search(rf"[1-9]\d*  {reached}", counts), f"none has {reached}"


@pytest.mark.clause("T47", "T50")
def test_what_deaths_alone_leave_is_a_checkpoint_or_the_end_of_training() -> None:
    """Deaths, second deaths in the dialogue, of coordinators too, and main threads that come out of
    nothing: no survivor is lost.
    """
    counts = told("--profile", "deaths", "--from", str(DEATHS_FIRST), "--seeds", str(DEATHS))
    print(counts)
    for reached in ("checkpoints", "second faults", "take-overs", "stand-ins"):
        assert re.search(rf"[1-9]\d*  {reached}", counts), f"none has {reached}"


@pytest.mark.clause("T75", "T76", "T77", "T80")
def test_every_job_whose_ranks_are_replaced_trains_on_to_its_end() -> None:
    """Processes, coordinators and connections go and come again, and each rank's newest process is
    the only one that runs.
    """
    counts = told("--profile", "crew", "--from", str(CREW_FIRST), "--seeds", str(CREWS))
    print(counts)
    assert re.search(rf"^ *{CREWS}  jobs that trained on to the end", counts, re.MULTILINE)
    for reached in ("processes started again", "coordinators met later", "take-overs"):
        assert re.search(rf"[1-9]\d*  {reached}", counts), f"none has {reached}"


def test_a_seed_is_a_history() -> None:
    digests = {re.findall(r"digest (\w+)", told("--seed", "7"))[0] for _ in range(2)}
    assert len(digests) == 1


@pytest.mark.parametrize("seed", [1169])
def test_a_seed_that_once_broke_a_rule_does_not_any_more(seed: int) -> None:
    """1169: a rank heard its coordinator over a connection that was gone, and waited for it for
    ever.
    """
    told("--seed", str(seed))
