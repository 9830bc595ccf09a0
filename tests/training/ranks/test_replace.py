"""Ranks die and others take their places; at the end of the job everything is, bit for bit, as
without a fault.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acpfs.training.member import Member
from acpfs.training.messages import StoreAnswer, StoreVerb
from tests.rig.ports import free_port
from tests.training.gasp_job import asked
from tests.training.ranks.jobs import LAYOUTS, Job, assert_same
from tests.training.ranks.replaced import (
    RANDOM_LOST,
    STEPS,
    WORLD,
    Plan,
    Replaced,
    die,
    end_state,
    fail,
    lose_memory,
    poison,
    run_job,
    together,
)

pytestmark = pytest.mark.long
clause = pytest.mark.clause


@clause("T79")
@pytest.mark.parametrize("kind", ["ddp", "zero", "hsdp", "tensor", "expert groups"])
@pytest.mark.parametrize(
    "point", ["backward", "ready", "gated", "updating", "updated", "sent_round"]
)
def test_a_rank_is_replaced(tmp_path: Path, yardsticks: Path, kind: str, point: str) -> None:
    counts = run_job(Plan(kind, {(1, 0, point, 5): die}), tmp_path, yardsticks)
    assert stayed(counts, tmp_path) == {0: 1, 1: 2, 2: 1, 3: 1}


def stayed(counts: dict[int, int], directory: Path) -> dict[int, int]:
    """Processes of each rank, without those that followed one that was stuck in a collective
    (T24).
    """
    stuck = {
        rank: (directory / f"rank-{rank}.log").read_text().count("acpfs: the main thread is stuck")
        for rank in counts
    }
    return {rank: count - stuck[rank] for rank, count in counts.items()}


@clause("T80")
@pytest.mark.parametrize("kind", ["zero", "hsdp"])
def test_a_second_and_a_third_fault_while_it_is_rebuilt(
    tmp_path: Path, yardsticks: Path, kind: str
) -> None:
    """One process dies before it builds its model, the next one while it is given its state, and a
    survivor does then.
    """
    faults = {
        (1, 0, "gated", 5): die,
        (1, 1, "built", 0): die,
        (0, 0, "forward", 6): die,
        (1, 2, "restoring", 0): die,
    }
    counts = run_job(Plan(kind, faults), tmp_path, yardsticks)
    assert stayed(counts, tmp_path) == {0: 2, 1: 4, 2: 1, 3: 1}


@clause("T77")
def test_a_rank_dies_when_all_steps_are_done(tmp_path: Path, yardsticks: Path) -> None:
    """It has said that its loop has ended, and does not live to leave: the process in its place
    hears that all is done.
    """

    def enter(run: Any) -> None:
        if run.rank == 1 and os.environ["ACPFS_GENERATION"] == "0":
            setattr(Member, "end", die)  # noqa: B010  # to mypy a method is nothing that changes

    assert run_job(Plan("ddp", enter=enter), tmp_path, yardsticks) == {0: 1, 1: 2, 2: 1, 3: 1}


@clause("T81")
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
@pytest.mark.parametrize("point", ["backward", "updating"])
def test_a_rank_whose_memory_is_lost_stays_and_takes_its_state_from_a_copy(
    tmp_path: Path, yardsticks: Path, kind: str, point: str
) -> None:
    counts = run_job(Plan(kind, {(1, 0, point, 5): lose_memory}), tmp_path, yardsticks)
    assert stayed(counts, tmp_path) == {0: 1, 1: 1, 2: 1, 3: 1}


@clause("T81", "T82")
@pytest.mark.parametrize("second", [die, lose_memory])
def test_where_both_copies_are_lost_the_snapshot_is_what_is_left(
    tmp_path: Path, yardsticks: Path, second: Callable[[Job | None], object]
) -> None:
    faults = together(tmp_path, {1: die, 3: second}, "backward", 5)
    run_job(Plan("hsdp", faults, snapshot_at=2), tmp_path, yardsticks)
    assert (tmp_path / "run" / "latest").read_text().strip() == "step-2"
    assert {path.read_text() for path in tmp_path.glob("restored-0-*")} == {"0", "2"}


@pytest.mark.clause("T227")
def test_what_the_function_has_loaded_by_itself_is_what_is_left(
    tmp_path: Path, yardsticks: Path
) -> None:
    """And updates are counted on from there."""
    plan = Plan("fsdp", {(1, 0, "backward", 5): die}, own_at=3)
    run_job(plan, tmp_path, yardsticks)
    assert (tmp_path / "restored-0-1").read_text() == "3"


@clause("T79")
def test_random_numbers_that_are_lost_with_the_buddy_begin_anew_and_are_named(
    tmp_path: Path, yardsticks: Path
) -> None:
    """Behind the last step, so that it shows; with DDP no shard is lost."""
    last = STEPS
    faults = together(tmp_path, {1: die, 3: die}, "sent_round", last)
    run_job(Plan("ddp", faults), tmp_path, yardsticks)
    named = [RANDOM_LOST in (tmp_path / f"rank-{rank}.log").read_text() for rank in range(WORLD)]
    assert named == [False, True, False, True]


@clause("T126")
def test_a_process_whose_device_is_poisoned_is_replaced(tmp_path: Path, yardsticks: Path) -> None:
    """CUDA's text on a processor: a double of the device."""
    counts = run_job(
        Plan("hsdp", {(2, 0, "backward", 4): poison}, device="cuda"), tmp_path, yardsticks
    )
    assert stayed(counts, tmp_path) == {0: 1, 1: 1, 2: 2, 3: 1}


@clause("T79", "T82")
def test_a_rank_dies_before_its_first_update(tmp_path: Path, yardsticks: Path) -> None:
    """There is no other state than what the function has built."""
    counts = run_job(Plan("hsdp", {(1, 0, "forward", 1): die}), tmp_path, yardsticks)
    assert stayed(counts, tmp_path) == {0: 1, 1: 2, 2: 1, 3: 1}


@clause("T82")
def test_all_ranks_die_at_once(tmp_path: Path, yardsticks: Path) -> None:
    faults = together(tmp_path, dict.fromkeys(range(WORLD), die), "backward", 5)
    counts = run_job(Plan("zero", faults, snapshot_at=2), tmp_path, yardsticks)
    assert all(count > 1 for count in counts.values())
    assert {path.read_text() for path in tmp_path.glob("restored-0-*")} == {"0", "2"}


@clause("T80")
def test_an_exception_in_one_rank_costs_the_step_under_way(
    tmp_path: Path, yardsticks: Path
) -> None:
    counts = run_job(Plan("zero", {(2, 0, "reduce", 4): fail}), tmp_path, yardsticks)
    assert stayed(counts, tmp_path) == dict.fromkeys(range(4), 1)


@clause("T78", "T80")
def test_the_coordinator_dies_and_a_rank_with_it(tmp_path: Path, yardsticks: Path) -> None:
    killed: list[int] = []

    def turn(_: Replaced) -> None:
        if not killed and (tmp_path / "done-0-0-backward").exists():
            killed.append(
                json.loads((tmp_path / "run" / ".acpfs-job" / "job" / "coordinator-0").read_text())[
                    "pid"
                ]
            )
            os.kill(killed[0], signal.SIGKILL)

    counts = run_job(Plan("hsdp", {(0, 0, "backward", 5): die}), tmp_path, yardsticks, turn)
    assert killed
    assert stayed(counts, tmp_path)[0] == 2


@clause("T155")
def test_coordinators_die_while_a_group_is_built_and_that_is_no_failure_of_the_program(
    tmp_path: Path, yardsticks: Path
) -> None:
    """Three times, which ends a job whose program fails: rank 1 is held before its group, the
    others wait in theirs for its address.
    """
    times = range(3)
    held = 1
    others = [rank for rank in range(WORLD) if rank != held]

    def hold(generation: int) -> None:
        (tmp_path / f"held-{generation}").touch()
        while not (tmp_path / f"killed-{generation}").exists():
            select.select([], [], [], 0.02)

    def enter(run: Any) -> None:
        ask = run.store._ask

        def noted(verb: StoreVerb, *words: Any) -> StoreAnswer:
            if verb in (StoreVerb.GET, StoreVerb.WAIT):
                (tmp_path / f"asks-{run.rank}-{run.generation}").touch()
            answer: StoreAnswer = ask(verb, *words)
            return answer

        run.store._ask = noted

    def turn(_: Replaced) -> None:
        generation = len(list(tmp_path.glob("killed-*")))
        waits = [tmp_path / f"asks-{rank}-{generation}" for rank in others]
        if generation not in times or not all(
            path.exists() for path in (tmp_path / f"held-{generation}", *waits)
        ):
            return
        told = [
            json.loads(path.read_text())
            for path in (tmp_path / "run" / ".acpfs-job" / "job").glob("coordinator-?")
        ]
        states = {one["pid"]: state for one in told if (state := answer_of(one["status"]))}
        active = [pid for pid, state in states.items() if state["active"]]
        if (
            len(states) == 2
            and len(active) == 1
            and all(state["connected"] == WORLD for state in states.values())
        ):
            os.kill(active[0], signal.SIGKILL)
            (tmp_path / f"killed-{generation}").touch()

    plan = Plan(
        "hsdp",
        {(held, 0, f"entering {one}", 0): partial(lambda one, _: hold(one), one) for one in times},
        enter=enter,
    )
    counts = run_job(plan, tmp_path, yardsticks, turn)
    assert len(list(tmp_path.glob("killed-*"))) == len(times)
    assert stayed(counts, tmp_path) == dict.fromkeys(range(WORLD), 1)


def answer_of(name: str) -> dict[str, Any]:
    """What a coordinator says of itself; empty where it has died."""
    try:
        return asked(name)
    except (OSError, ValueError):
        return {}


@clause("T34", "T79")
def test_the_example_of_the_documents_runs_as_it_stands(tmp_path: Path) -> None:
    """With its directory, and what it takes for granted."""
    page = (Path(__file__).parents[3] / "docs" / "TRAINING.md").read_text(encoding="utf-8")
    (block,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "@resilient" in block
    )
    steps: list[int] = []

    def build() -> tuple[Any, Any, Any]:
        job = LAYOUTS["hsdp"]()
        return job.model, job.optimizer, job.scheduler

    def step_of(number: int, model: Any, optimizer: Any, scheduler: Any) -> None:
        steps.append(number)
        Job(model, optimizer, scheduler).step(number)
        if (number, dist.get_rank()) == (3, 2) and os.environ["ACPFS_GENERATION"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    def main(rank: int, process: int) -> None:
        names = {"dist": dist, "build": build, "step_of": step_of, "STEPS": 5}
        exec(block.replace("/mnt/acp/run1", str(tmp_path / "run")), names)  # the example itself
        assert steps[-1] == 5
        assert process == 0 or steps[0] in (3, 4), steps

    with Replaced(WORLD, tmp_path, main) as ranks:
        assert isinstance(ranks, Replaced)
        assert stayed(ranks.tend(), tmp_path)[2] == 2


@clause("T123", "T124", "T125")
def test_node_0_is_lost_with_all_that_it_has_and_another_takes_its_place(
    tmp_path: Path, yardsticks: Path
) -> None:
    """Two nodes, so rank 0, the active coordinator, the meeting of launchers, and half of the
    ranks.
    """
    expected = end_state("hsdp", yardsticks)
    port = free_port()
    launcher = [
        os.environ["ACPFS_TRAIN_COORDINATOR_PYTHON"],
        "-c",
        "from acpfs.cli.run import main; main()",
        "--nnodes",
        "2",
    ]
    launcher += [
        "--nproc-per-node",
        str(WORLD // 2),
        "--on-fault",
        "replace",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
    ]
    launcher += ["--save-dir", str(tmp_path / "run")]
    script = str(Path(__file__).with_name("node_script.py"))

    def begin(node: int) -> subprocess.Popen[bytes]:
        words = [
            *launcher,
            "--node-rank",
            str(node),
            "--no-python",
            sys.executable,
            script,
            sys.path[-1],
            str(tmp_path),
        ]
        with open(tmp_path / f"said-{node}", "ab") as said:
            return subprocess.Popen(words, stdout=said, stderr=said, cwd=Path(__file__).parents[3])

    nodes = [begin(0), begin(1)]
    try:
        assert nodes[0].wait(300) == -signal.SIGKILL
        nodes.append(begin(0))
        ends = [node.wait(300) for node in nodes[1:]]
        assert ends == [0, 0], "\n".join(
            path.read_text()[-6000:] for path in tmp_path.glob("said-*")
        )
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert_same(
        torch.load(tmp_path / "found.pt", weights_only=True),
        torch.load(expected / f"whole-hsdp-{STEPS}.pt", weights_only=True),
    )


def under_acpfs_run(script: str, directory: Path) -> None:
    """A job on one node, to its end in order."""
    python = os.environ["ACPFS_TRAIN_COORDINATOR_PYTHON"]
    launcher = [
        python,
        "-c",
        "from acpfs.cli.run import main; main()",
        "--nproc-per-node",
        str(WORLD),
        "--on-fault",
        "replace",
    ]
    program = [
        "--no-python",
        sys.executable,
        str(Path(__file__).with_name(script)),
        sys.path[-1],
        str(directory),
    ]
    done = subprocess.run(
        [*launcher, *program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


@clause("T69", "T77")
def test_a_rank_dies_under_acpfs_run_when_all_others_have_ended(
    tmp_path: Path, yardsticks: Path
) -> None:
    expected = end_state("ddp", yardsticks)
    under_acpfs_run("end_script.py", tmp_path)
    assert {path.name for path in tmp_path.glob("ended-*")} == {
        "ended-0-0",
        "ended-1-1",
        "ended-2-0",
        "ended-3-0",
    }
    assert_same(
        torch.load(tmp_path / "found.pt", weights_only=True),
        torch.load(expected / f"whole-ddp-{STEPS}.pt", weights_only=True),
    )


@clause("T79")
def test_under_acpfs_run(tmp_path: Path, yardsticks: Path) -> None:
    expected = end_state("hsdp", yardsticks)
    under_acpfs_run("replace_script.py", tmp_path)
    assert (tmp_path / "done-1-0-gated").exists()
    assert_same(
        torch.load(tmp_path / "found.pt", weights_only=True),
        torch.load(expected / f"whole-hsdp-{STEPS}.pt", weights_only=True),
    )
