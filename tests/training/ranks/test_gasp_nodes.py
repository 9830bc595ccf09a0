"""Several nodes: real torch ranks over two mounts of one directory; a rank, a coordinator, a whole
node dies.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from acpfs.training.messages import ExitStatus
from tests.cluster.stand import SOON_MISSING_S, Stand
from tests.rig.mounts import AcpfsMount
from tests.rig.processes import stop_processes
from tests.training.gasp_job import until
from tests.training.ranks.forked import Ranks
from tests.training.ranks.gasps import WORLD, Fault, assert_same_as_without, yardstick
from tests.training.ranks.nodes import coordinators, lose, node_of, ranks_on

pytestmark = pytest.mark.long
DEPENDENCIES_PYTHON = os.environ.get("ACPFS_TRAIN_COORDINATOR_PYTHON", sys.executable)


def stand_over(tmp_path: Path) -> Stand:
    (tmp_path / "shared").mkdir()
    return Stand(
        tmp_path,
        [tmp_path / "shared"] * 2,
        "native",
        node_timeout=SOON_MISSING_S,
        python=DEPENDENCIES_PYTHON,
    )


def ended(stand: Stand) -> None:
    """A standby ends ten seconds behind its last member; until then its log is open, and the mount
    in use.
    """
    until(lambda: not any(coordinators(node) for node in stand.nodes))


@pytest.mark.clause("T47", "T53")
@pytest.mark.parametrize(("kind", "dies"), [("ddp", 0), ("zero", 1), ("hsdp", 0), ("hsdp", 3)])
def test_a_rank_of_two_nodes_dies(tmp_path: Path, kind: str, dies: int) -> None:
    expected = yardstick(kind, tmp_path)
    fault = Fault(kind, {dies: "gated"})
    with stand_over(tmp_path) as stand:
        with ranks_on(stand, fault, tmp_path) as ranks:
            for rank in range(WORLD):
                assert ranks.status(rank) == (
                    -signal.SIGKILL if rank == dies else ExitStatus.SAVED
                ), ranks.said()
        until(lambda: (stand.backings[0] / "run" / "latest").exists())
        manifest = assert_same_as_without(fault, stand.backings[0] / "run", expected)
        assert manifest.nodes == tuple(
            sorted({f"acpfs:node{node_of(rank)}" for rank in manifest.cover.values()})
        )
        ended(stand)


@pytest.mark.clause("T19", "T53")
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_a_node_dies_with_its_ranks_its_coordinator_and_its_ram(tmp_path: Path, kind: str) -> None:
    """Half of the job is left: it has the claim, the whole state, and a storage that waits for
    nobody.
    """
    expected = yardstick(kind, tmp_path)
    fault = Fault(kind, {2: "gated", 3: "gated"})
    with stand_over(tmp_path) as stand:
        first = stand.nodes[0]
        with ranks_on(stand, fault, tmp_path) as ranks:
            dies_with(stand, ranks, 1)
            for rank in (0, 1):
                assert ranks.status(rank) == ExitStatus.SAVED, ranks.said()
        until(lambda: (stand.backings[0] / "run" / "latest").exists(), first.status)
        manifest = assert_same_as_without(fault, stand.backings[0] / "run", expected)
        assert (manifest.nodes, manifest.lost) == (("acpfs:node0",), (2, 3))
        ended(stand)
        first.abort()  # what the dead node had is missing: an unmount would wait for it


@pytest.mark.clause("T53", "T63")
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_the_node_with_the_active_coordinator_dies_and_the_other_half_saves(
    tmp_path: Path, kind: str
) -> None:
    """No majority: the claim in the storage below both mounts is what it goes on with."""
    expected = yardstick(kind, tmp_path)
    with stand_over(tmp_path) as stand:
        first, second = stand.nodes
        fault = Fault(kind, {0: "gated", 1: "gated"}, last=lambda: stop(first))
        with ranks_on(stand, fault, tmp_path) as ranks:
            dies_with(stand, ranks, 0)
            for rank in (2, 3):
                assert ranks.status(rank) == ExitStatus.SAVED, ranks.said()
        until(lambda: (stand.backings[0] / "run" / "latest").exists(), second.status)
        manifest = assert_same_as_without(fault, stand.backings[0] / "run", expected)
        assert (manifest.nodes, manifest.lost) == (("acpfs:node1",), (0, 1))
        ended(stand)
        second.abort()  # what the dead node had is missing: an unmount would wait for it


@pytest.mark.clause("T21", "T58")
def test_fewer_than_half_whose_coordinator_died_with_the_others_end(tmp_path: Path) -> None:
    """No majority, no half, no election: its own exception, after `command_s`, instead of waiting
    for ever; unless it had saved before.
    """
    fault = Fault("ddp", {0: "gated", 1: "gated", 2: "gated"})
    with stand_over(tmp_path) as stand:
        with ranks_on(stand, fault, tmp_path, command_s=2.0) as ranks:
            dies_with(stand, ranks, 0)
            assert ranks.status(3) in (70, ExitStatus.SAVED), ranks.said()
        ended(stand)
        stand.nodes[1].abort()


@pytest.mark.clause("T64")
def test_a_publisher_dies_behind_the_rename_and_the_next_one_is_on_another_node(
    tmp_path: Path,
) -> None:
    """The first node's ranks are gone, its mount is not: what was renamed there comes into the
    storage, and keeps the name.
    """
    expected = yardstick("hsdp", tmp_path)
    fault = Fault("hsdp", {1: "gated", 0: "published"})
    with stand_over(tmp_path) as stand:
        with ranks_on(stand, fault, tmp_path) as ranks:
            for rank in range(WORLD):
                assert ranks.status(rank) == (
                    -signal.SIGKILL if rank in fault.ranks else ExitStatus.SAVED
                ), ranks.said()
        run = stand.backings[0] / "run"
        until(lambda: (run / "latest").exists(), lambda: [node.status() for node in stand.nodes])
        ended(stand)
        manifest = assert_same_as_without(fault, run, expected)
        assert (manifest.generation, manifest.lost) == (1, (1,))
        for node in stand.nodes:
            node.wait_drained()
        assert sorted(path.name for path in run.iterdir() if not path.name.startswith(".")) == [
            "latest",
            f"step-{manifest.step}",
        ]


def stop(node: AcpfsMount) -> None:
    """Its coordinator sees nothing of what comes."""
    stop_processes(coordinators(node).values())


def dies_with(stand: Stand, ranks: Ranks, node: int) -> None:
    """A node dies when its ranks have."""
    until(lambda: len(coordinators(stand.nodes[0])) == len(coordinators(stand.nodes[1])) == 1)
    for rank in range(WORLD):
        if node_of(rank) == node:
            assert ranks.status(rank) == -signal.SIGKILL, ranks.said()
    lose(stand.nodes[node], ranks, node)
