"""Ranks are replaced over real mounts: the snapshot in RAM, then in the storage; two nodes, one of
which dies; a network that is cut.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.training.manifest import verify
from tests.cluster.stand import Stand
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount
from tests.training.gasp_job import until
from tests.training.ranks.jobs import Job
from tests.training.ranks.networks import Networks
from tests.training.ranks.nodes import PER_NODE, coordinators, on_nodes
from tests.training.ranks.replaced import WORLD, Plan, Replaced, die, run_job, together
from tests.training.ranks.test_replace import stayed

pytestmark = pytest.mark.long
clause = pytest.mark.clause
JOB_S = 600.0
DEPENDENCIES_PYTHON = os.environ.get("ACPFS_TRAIN_COORDINATOR_PYTHON", sys.executable)


@contextlib.contextmanager
def mounted(backing: Path, path: Path) -> Iterator[AcpfsMount]:
    """Taken away by force at the end where the test has killed it."""
    backing.mkdir(exist_ok=True)
    with AcpfsMount(backing, path, "native", python=DEPENDENCIES_PYTHON) as mount:
        yield mount
        if mount.living():
            until(lambda: not coordinators(mount))


def kill_daemon(mount: AcpfsMount) -> None:
    """And not the coordinators, which live beside it."""
    pids = set(mount.living()) - set(coordinators(mount).values())
    for pid in sorted(pids, key=lambda pid: pid != mount.supervisor):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@clause("T79", "T140")
@pytest.mark.parametrize("kind", ["zero", "hsdp"])
def test_a_rank_is_replaced_and_the_snapshot_reaches_the_storage(
    tmp_path: Path, yardsticks: Path, kind: str
) -> None:
    with mounted(tmp_path / "backing", tmp_path / "mount") as mount:
        counts = run_job(
            Plan(kind, {(1, 0, "gated", 5): die}, snapshot_at=2),
            tmp_path,
            yardsticks,
            timeout_s=JOB_S,
            site=on_nodes([mount], "run"),
        )
        assert stayed(counts, tmp_path) == {0: 1, 1: 2, 2: 1, 3: 1}
        mount.flush()
        stored = tmp_path / "backing" / "run"
        assert verify(stored / (stored / "latest").read_text().strip()).step == 2


@clause("T82", "T140")
def test_where_both_copies_are_lost_while_the_storage_stands_still_the_snapshot_comes_from_ram(
    tmp_path: Path, yardsticks: Path
) -> None:
    faults = together(tmp_path, {1: die, 3: die}, "backward", 5)
    plan = Plan("hsdp", faults, snapshot_at=2)
    storage = FaultFs(tmp_path / "source", tmp_path / "storage", python=DEPENDENCIES_PYTHON)
    with storage, mounted(storage.path, tmp_path / "mount") as mount:
        storage.freeze()
        run_job(plan, tmp_path, yardsticks, timeout_s=JOB_S, site=on_nodes([mount], "run"))
        assert {path.read_text() for path in tmp_path.glob("restored-0-*")} == {"0", "2"}
        assert not (tmp_path / "source" / "run" / "latest").exists()
        storage.thaw()
        mount.flush()
        assert (tmp_path / "source" / "run" / "latest").read_text().strip() == "step-2"


@clause("T82", "T140")
def test_where_the_mount_is_dead_as_well_the_snapshot_comes_from_the_storage(
    tmp_path: Path, yardsticks: Path
) -> None:
    """All of the daemon's processes are killed: the processes that take the dead ones' places find
    coordinators and state below it.
    """
    dead = tmp_path / "dead"
    plan = Plan("hsdp", {(1, 0, "backward", 5): lambda _: until(dead.exists)}, snapshot_at=2)
    with mounted(tmp_path / "backing", tmp_path / "mount") as mount:

        def turn(ranks: Replaced) -> None:
            if not dead.exists() and (tmp_path / "done-1-0-backward").exists():
                mount.flush()
                kill_daemon(mount)
                for rank in (1, 3):  # both copies
                    ranks.kill(rank)
                dead.touch()

        run_job(plan, tmp_path, yardsticks, turn, JOB_S, on_nodes([mount], "run"))
        assert {path.read_text() for path in tmp_path.glob("restored-0-*")} == {"0", "2"}
        mount.abort()


def stand_over(tmp_path: Path) -> Stand:
    (tmp_path / "shared").mkdir()
    return Stand(tmp_path, [tmp_path / "shared"] * 2, "native", python=DEPENDENCIES_PYTHON)


def ended(stand: Stand) -> None:
    until(lambda: not any(coordinators(node) for node in stand.nodes))


@clause("T79", "T141")
@pytest.mark.parametrize("kind", ["zero", "hsdp"])
def test_a_rank_of_each_of_two_nodes_dies(tmp_path: Path, yardsticks: Path, kind: str) -> None:
    plan = Plan(kind, {(0, 0, "gated", 4): die, (3, 0, "updated", 6): die}, snapshot_at=2)
    with stand_over(tmp_path) as stand:
        counts = run_job(
            plan, tmp_path, yardsticks, timeout_s=JOB_S, site=on_nodes(stand.nodes, "run")
        )
        assert stayed(counts, tmp_path) == {0: 2, 1: 1, 2: 1, 3: 2}
        ended(stand)


@clause("T141")
def test_a_node_dies_with_ranks_coordinator_and_ram_and_another_takes_its_place(
    tmp_path: Path, yardsticks: Path
) -> None:
    lost = tmp_path / "lost"
    with stand_over(tmp_path) as stand:
        node = stand.nodes[1]

        def turn(ranks: Replaced) -> None:
            if not lost.exists() and (tmp_path / "done-2-0-backward").exists():
                for one in stand.nodes:
                    # else its part of the snapshot is lost with its RAM, and the pointer rightly
                    # withheld
                    one.wait_drained()
                lost.touch()
                for pid in coordinators(node).values():
                    os.kill(pid, signal.SIGKILL)
                for rank in range(PER_NODE, WORLD):
                    ranks.kill(rank)
                node.abort()
                node.start()

        def wait(_: Job | None) -> None:
            until(lost.exists)

        counts = run_job(
            Plan("hsdp", {(2, 0, "backward", 5): wait}, snapshot_at=2),
            tmp_path,
            yardsticks,
            turn,
            JOB_S,
            on_nodes(stand.nodes, "run"),
        )
        assert stayed(counts, tmp_path) == {0: 1, 1: 1, 2: 2, 3: 2}
        ended(stand)


@clause("T141")
@pytest.mark.skipif(bool(Networks.missing()), reason=Networks.missing())
@pytest.mark.parametrize("seconds", [2.0, 15.0])
def test_the_network_between_two_nodes_is_cut_for_a_while(
    tmp_path: Path, yardsticks: Path, seconds: float
) -> None:
    """Shorter than a member may be silent: nothing happens.

    Longer: the half without the coordinator is replaced when it is back.
    """
    times = list[float]()
    cut = tmp_path / "cut"
    with Networks(2) as cables, stand_over(tmp_path) as stand:

        def turn(_: Replaced) -> None:
            if not times and (tmp_path / "done-0-0-backward").exists():
                cables.cut(1)
                times.append(time.monotonic())
                cut.touch()
            if len(times) == 1 and time.monotonic() > times[0] + seconds:
                cables.join(1)
                times.append(time.monotonic())

        def act(_: Job | None) -> None:
            until(cut.exists)  # or all steps are made before anybody looks

        run_job(
            Plan("hsdp", {(0, 0, "backward", 5): act}, steps=60),
            tmp_path,
            yardsticks,
            turn,
            JOB_S,
            on_nodes(stand.nodes, "run", cables),
        )
        assert len(times) == 2
        ended(stand)
