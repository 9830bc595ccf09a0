"""A rank finds its coordinators without a process group: whoever starts them, and whoever comes
later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from acpfs.errors import ConfigError, RefusedError
from acpfs.training.boot import JOBS, Boot
from acpfs.training.messages import Gate, Header, Hello, Message, Refused, Sent, Welcome
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
def ended(directory: Path) -> Iterator[Callable[..., Boot]]:
    """`muster` for a process of a generation; what was connected and started is closed and
    ended.
    """
    links: list[SocketLink] = []

    def mustered(generation: int, rank: int = 0, refused: str = "") -> Boot:
        place = replace(place_from(FIRST), rank=rank, local_rank=rank, generation=generation)
        boot = muster(directory, place, Policy(tls=False), {}, frozenset({refused}))
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
        # a process that ends closes its connections and the socket at which it listens one after
        # the other
        wait_gone(pid)
        with pytest.raises(LinkClosedError):
            first.links[0].receive(60)
        assert sorted(mustered(1).links) == [1]


@clause("T166")
def test_where_no_coordinator_is_left_a_process_that_comes_later_ends_with_an_error(
    tmp_path: Path,
) -> None:
    """One has left its address behind, at which nobody listens."""
    place = replace(place_from(FIRST), generation=1, is_named=True)
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        (tmp_path / JOBS / place.job).mkdir(parents=True)
        address = f"127.0.0.1:{gone.getsockname()[1]}"
        (tmp_path / JOBS / place.job / "coordinator-0").write_text(json.dumps({"address": address}))
        with pytest.raises(RefusedError, match=r"no coordinator of .* answers"):
            muster(tmp_path, place, Policy(tls=False, protected_s=0.1), {})


def announced(directory: Path, boot: Boot) -> dict[str, Any]:
    """What the first coordinator of a job says of itself."""
    path = directory / JOBS / boot.job / "coordinator-0"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@clause("T176")
def test_two_jobs_of_one_name_have_coordinators_of_their_own(tmp_path: Path) -> None:
    with ended(tmp_path) as mustered:
        older = mustered(0)
        pid = announced(tmp_path, older)["pid"]
        newer = mustered(0)
        assert older.job != newer.job
        assert announced(tmp_path, older)["pid"] == pid
        assert announced(tmp_path, newer)["pid"] != pid
        assert mustered(1).job == newer.job


@clause("T176")
@pytest.mark.parametrize("is_dead", [True, False])
def test_who_meets_an_older_job_of_its_name_waits_for_its_own(
    tmp_path: Path, is_dead: bool
) -> None:
    """Its rank 0 has not drawn a name yet; the older job's coordinators are dead, or refuse it."""
    with ended(tmp_path) as mustered:
        older = mustered(0)
        found = list[str]()
        if is_dead:
            for file in (tmp_path / JOBS / older.job).glob("coordinator-*"):
                pid = json.loads(file.read_text())["pid"]
                os.kill(pid, signal.SIGKILL)
                wait_gone(pid)
        refused = "" if is_dead else older.job
        waiting = threading.Thread(
            target=lambda: found.append(mustered(0, 1, refused).job), daemon=True
        )
        waiting.start()
        newer = mustered(0)
        waiting.join()
        assert found == [newer.job]


@clause("T176")
def test_a_first_process_does_not_take_the_place_of_a_rank(tmp_path: Path) -> None:
    """One that says that it replaces somebody does, and so does the same one that comes again."""
    with ended(tmp_path) as mustered:
        boot = mustered(0)
        address = announced(tmp_path, boot)["address"]
        own = Hello(1, 4, "node", os.getpid(), 1, Gate.EXPLICIT, {}, first=True)

        def answer(hello: Hello) -> Message:
            link = boot.call(address)
            boot.links[10 + len(boot.links)] = link
            link.send(Sent(Header(boot.job, 0, 0, "rank 1"), hello))
            return link.receive(60).message

        assert isinstance(answer(own), Welcome)
        refused = answer(replace(own, started=2))
        assert isinstance(refused, Refused)
        assert refused.is_other_job
        assert isinstance(answer(own), Welcome)
        assert isinstance(answer(replace(own, started=2, first=False)), Welcome)
        for number in sorted(boot.links)[2:]:
            boot.links.pop(number).close()
