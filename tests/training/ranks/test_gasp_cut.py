"""The network between two nodes is cut: real torch ranks and coordinators in two network
namespaces, a mount in each node.

Nobody dies: both halves live, hear nothing of each other, and have the whole state. One of them may
save, and no more than one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.training import protect
from acpfs.training.messages import ExitStatus
from tests.cluster.stand import Stand
from tests.training.gasp_job import until
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.gasps import DIES, STEPS, WORLD, Fault, assert_same_as_without, yardstick
from tests.training.ranks.jobs import JOBS
from tests.training.ranks.test_gasp_nodes import ended, stand_over

pytestmark = pytest.mark.long
CLONE_NEWNET = 0x40000000
ENDS_S = 120.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Wire:
    """Two network namespaces and what joins them."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.names = names

    def cut(self) -> None:
        """From now on nothing arrives, and nobody is told."""
        ip("-n", self.names[0], "link", "set", "gasp0", "down")

    def enter(self, node: int) -> None:
        """This process, and all that it starts."""
        with open(f"/run/netns/{self.names[node]}", "rb") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) == 0, (
                os.strerror(ctypes.get_errno())
            )
        os.environ.update(GLOO_SOCKET_IFNAME=f"gasp{node}", MASTER_ADDR="10.93.0.1")


@contextlib.contextmanager
def two_namespaces() -> Iterator[Wire]:
    wire = Wire((f"acpfs-gasp-{os.getpid()}-0", f"acpfs-gasp-{os.getpid()}-1"))
    first, second = wire.names
    try:
        for name in wire.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            "gasp0",
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            "gasp1",
            "netns",
            second,
        )
        for number, name in enumerate(wire.names):
            ip("-n", name, "address", "add", f"10.93.0.{number + 1}/24", "dev", f"gasp{number}")
            ip("-n", name, "link", "set", f"gasp{number}", "up")
        yield wire
    finally:
        for name in wire.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def trains(rank: int, node: int, kind: str, stand: Stand, wire: Wire, directory: Path) -> None:
    """A rank; between two updates all wait until the network is cut."""
    wire.enter(node)
    os.environ[ENVIRONMENT_VARIABLE] = str(stand.nodes[node].runtime_dir)
    join_group(rank, WORLD, directory / "store")
    job = JOBS[kind]()
    run = stand.nodes[node].path / "run"
    with protect(
        run,
        model=job.model,
        optimizer=job.optimizers,
        scheduler=job.scheduler,
        copies=job.copies,
        command_s=15.0,
    ):
        for number in range(1, STEPS + 1):
            if number == DIES:
                (directory / f"there-{rank}").touch()
                until((directory / "cut").exists, lambda: "the network is not cut")
            job.step(number)


def cut_in_two(tmp_path: Path, kind: str, nodes: tuple[int, ...]) -> list[int]:
    """Exit statuses; `nodes`: of each rank."""
    expected = yardstick(kind, tmp_path)
    with stand_over(tmp_path) as stand, two_namespaces() as wire:
        with Ranks(
            WORLD, tmp_path, lambda rank: trains(rank, nodes[rank], kind, stand, wire, tmp_path)
        ) as ranks:
            until(
                lambda: all((tmp_path / f"there-{rank}").exists() for rank in range(WORLD)),
                ranks.said,
            )
            wire.cut()
            (tmp_path / "cut").touch()
            found = ranks.statuses(ENDS_S)
            told = ranks.said()
        until(lambda: (stand.backings[0] / "run" / "latest").exists(), lambda: told)
        manifest = assert_same_as_without(Fault(kind, {}), stand.backings[0] / "run", expected)
        saved = {rank for rank in range(WORLD) if found[rank] == ExitStatus.SAVED}
        assert manifest.step == DIES - 1
        assert set(manifest.lost) == set(range(WORLD)) - saved, told
        ended(stand)
    return found


@pytest.mark.clause("T19", "T63", "T114")
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_of_two_equal_halves_one_saves(tmp_path: Path, kind: str) -> None:
    found = cut_in_two(tmp_path, kind, (0, 0, 1, 1))
    halves = found[:2], found[2:]
    assert [ExitStatus.SAVED] * 2 in halves
    assert all(
        status not in (0, ExitStatus.SAVED)
        for half in halves
        if half != [ExitStatus.SAVED] * 2
        for status in half
    )


@pytest.mark.clause("T19", "T114")
@pytest.mark.parametrize("nodes", [(0, 0, 0, 1), (0, 1, 1, 1)])
def test_the_majority_saves_with_the_first_coordinator_and_without_it(
    tmp_path: Path, nodes: tuple[int, ...]
) -> None:
    found = cut_in_two(tmp_path, "zero", nodes)
    most = max((0, 1), key=nodes.count)
    assert [status == ExitStatus.SAVED for status in found] == [node == most for node in nodes]
