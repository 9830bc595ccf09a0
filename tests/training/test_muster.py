"""A rank finds its coordinators without a process group: whoever starts them, and whoever comes later."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from acpfs.errors import ConfigError, RefusedError
from acpfs.training.boot import JOBS, Boot
from acpfs.training.muster import Place, muster, place_from
from acpfs.training.policy import Policy
from acpfs.training.wire import LinkClosedError, SocketLink
from tests.rig.mounts import wait_gone

clause = pytest.mark.clause
FIRST = {"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "run/7", "MASTER_PORT": "29500"}


def test_a_place_is_what_a_launcher_says() -> None:
    assert place_from(FIRST) == Place("run_7-29500-0", 0, 4, 0, 0, 1, 0)
    assert place_from({**FIRST, "ACPFS_JOB": "mine", "ACPFS_GENERATION": "2"}).job == "mine"
    with pytest.raises(ConfigError, match="RANK"):
        place_from({"RANK": "0"})


@clause("T83")
def test_the_first_ranks_of_the_first_nodes_start_coordinators_and_nobody_who_comes_later() -> None:
    node = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    started = [
        place_from({**node, "RANK": str(2 * group), "GROUP_RANK": str(group)}).starts
        for group in range(4)
    ]
    assert started == [(0,), (1,), (2,), ()]
    assert place_from({**node, "RANK": "1", "LOCAL_RANK": "1"}).starts == ()
    assert place_from(FIRST).starts == (0, 1)
    assert place_from({**FIRST, "ACPFS_GENERATION": "1"}).starts == ()


@contextlib.contextmanager
def ended(directory: Path) -> Iterator[Callable[[int], Boot]]:
    """`muster` for a process of a generation; what was connected and started is closed and ended."""
    links: list[SocketLink] = []

    def mustered(generation: int) -> Boot:
        boot = muster(
            directory, replace(place_from(FIRST), generation=generation), Policy(tls=False), {}
        )
        links.extend(boot.links.values())
        return boot

    try:
        yield mustered
    finally:
        for link in links:
            link.close()
        for file in (directory / ".acpfs-job").glob("*/coordinator-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)


@clause("T83")
def test_rank_0_starts_two_and_a_process_that_comes_later_takes_the_one_that_lives(
    tmp_path: Path,
) -> None:
    with ended(tmp_path) as mustered:
        first = mustered(0)
        assert sorted(first.links) == [0, 1]
        pid = json.loads((tmp_path / ".acpfs-job" / first.job / "coordinator-0").read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_gone(
            pid
        )  # a process that ends closes its connections and the socket at which it listens one after the other
        with pytest.raises(LinkClosedError):
            first.links[0].receive(60)
        assert sorted(mustered(1).links) == [1]


@clause("T166")
def test_where_no_coordinator_is_left_a_process_that_comes_later_ends_with_an_error(
    tmp_path: Path,
) -> None:
    """One has left its address behind, at which nobody listens."""
    place = replace(place_from(FIRST), generation=1)
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        (tmp_path / JOBS / place.job).mkdir(parents=True)
        address = f"127.0.0.1:{gone.getsockname()[1]}"
        (tmp_path / JOBS / place.job / "coordinator-0").write_text(json.dumps({"address": address}))
        with pytest.raises(RefusedError, match=r"no coordinator of .* answers"):
            muster(tmp_path, place, Policy(tls=False, protected_s=0.1), {})
