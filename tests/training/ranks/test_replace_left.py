"""A rank that nothing brings out of C has to end, and has the only copy of its shard: the process
in its place has it, too.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from acpfs.training.memory_left import Left, name_of
from tests.training.ranks.jobs import Job, assert_same
from tests.training.ranks.replaced import STEPS, WORLD, Plan, die, end_state, run_job
from tests.training.ranks.test_stand_in import NUMBERS, stopped

pytestmark = [pytest.mark.long, pytest.mark.clause("T79", "T159")]
STUCK = 1
DEAD = 3
"""They hold the same."""
LEFT = r"acpfs: the main thread is stuck \(it finds [1-9]\d* bytes of what this one holds\)"
OTHERS = (0, 2)
AT = 5


def sends_to_the_dead(rank: int, after: tuple[Path, ...], _: Job | None) -> None:
    """Rank `DEAD` dies when a send to it is half-way, and behind `after`: who waits for that send
    waits for ever.
    """
    numbers = torch.ones(NUMBERS)
    if rank == DEAD:
        receiving = dist.irecv(numbers, STUCK)
        dist.send(torch.tensor([os.getpid()]), STUCK)
        os.kill(os.getpid(), signal.SIGSTOP)
        receiving.wait()
        return
    pid = torch.zeros(1, dtype=torch.int64)
    dist.recv(pid, DEAD)
    while not stopped(int(pid)) or not all(path.exists() for path in after):
        select.select([], [], [], 0.01)
    sending = dist.isend(numbers, DEAD)
    os.kill(int(pid), signal.SIGKILL)
    sending.wait()


def nothing(_: Job | None) -> None:
    """That it came there is in a file."""


def stuck_with_the_only_copy(
    directory: Path, point: str
) -> dict[tuple[int, int, str, int], Callable[[Job | None], object]]:
    """What happens in update `AT`. At `gated` the others have done it before."""
    after = (
        tuple(directory / f"done-{rank}-0-updated" for rank in OTHERS) if point == "gated" else ()
    )
    return {
        **{(rank, 0, point, AT): partial(sends_to_the_dead, rank, after) for rank in (STUCK, DEAD)},
        **{(rank, 0, "updated", AT): nothing for rank in OTHERS},
    }


@pytest.mark.parametrize("kind", ["hsdp", "zero", "tensor"])
@pytest.mark.parametrize("point", ["forward", "gated"])
@pytest.mark.parametrize("dies_again", [False, True])
def test_the_only_copy_outlives_its_process(
    tmp_path: Path, yardsticks: Path, kind: str, point: str, dies_again: bool
) -> None:
    """Before the update; and ready for it where others have done it, so that it has to be done in
    the next process.

    `dies_again`: so does that one, before it has taken what was left.
    """
    faults = stuck_with_the_only_copy(tmp_path, point)
    if dies_again:
        faults |= {(STUCK, 1, "restoring", 0): die}
    counts = run_job(Plan(kind, faults), tmp_path, yardsticks)
    assert {path.read_text() for path in tmp_path.glob("restored-0-*")} == {
        "0",
        str(AT if point == "gated" else AT - 1),
    }
    assert re.search(LEFT, (tmp_path / f"rank-{STUCK}.log").read_text())
    assert counts[STUCK] >= 2 + dies_again
    assert all(Left.ask(name_of(tmp_path / "run", "job", rank)) is None for rank in range(WORLD))


def test_under_acpfs_run(tmp_path: Path, yardsticks: Path) -> None:
    """Its launcher kills what a rank leaves in its session, is the parent of whoever keeps its
    memory, and reaps it.
    """
    expected = end_state("hsdp", yardsticks)
    launcher = [
        os.environ["ACPFS_TRAIN_COORDINATOR_PYTHON"],
        "-c",
        "from acpfs.cli.run import main; main()",
    ]
    launcher += ["--nproc-per-node", str(WORLD), "--on-fault", "replace"]
    program = [
        "--no-python",
        sys.executable,
        str(Path(__file__).with_name("left_script.py")),
        sys.path[-1],
        str(tmp_path),
    ]
    done = subprocess.run(
        [*launcher, *program],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert re.search(LEFT, done.stderr)
    assert {path.read_text() for path in tmp_path.glob("restored-0-*")} == {"0", str(AT - 1)}
    assert_same(
        torch.load(tmp_path / "found.pt", weights_only=True),
        torch.load(expected / f"whole-hsdp-{STEPS}.pt", weights_only=True),
    )
