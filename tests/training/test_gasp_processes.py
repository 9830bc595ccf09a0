"""Real coordinators and members without torch: SIGKILL and SIGSTOP of either, in each phase of the
dialogue.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import ssl
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner

from acpfs.cli.train import command
from acpfs.control.registry import MountRecord
from acpfs.training.coordinator.__main__ import witness_for
from acpfs.training.coordinator.witness import Claimant, claim
from acpfs.training.credentials import make_credentials
from acpfs.training.messages import ExitStatus
from tests.rig.faultfs import FaultFs
from tests.rig.processes import stop_processes
from tests.training.gasp_job import GaspJob, until

clause = pytest.mark.clause
PAIRS = {"opt0": (0, 1), "opt1": (2, 3)}
MARKS = {"0": (5, "ready"), "1": (5, "updating"), "2": (6, "computing"), "3": (5, "ready")}


@clause("T16", "T18")
def test_a_killed_member_leaves_a_published_gasp(tmp_path: Path) -> None:
    with GaspJob(tmp_path, 4, PAIRS, marks=MARKS) as job:
        job.wait("Protected", 0, 1, 2, 3)
        assert job.status()["state"] == "running"
        shown = CliRunner().invoke(command, ["status", str(tmp_path)])
        assert shown.exit_code == 0, shown.output
        assert "running, 4 of 4 ranks connected" in shown.output
        assert (
            json.loads(
                CliRunner()
                .invoke(command, ["status", str(tmp_path), "--job", "job", "--json"])
                .output
            )[0]["shards"]
            == 2
        )
        job.kill(1)
        assert [job.left(rank)["status"] for rank in (0, 2, 3)] == [ExitStatus.SAVED] * 3
        assert job.coordinators[0].wait(60) == 0
        assert job.words(0) == ["Protected", "Stop", "Settle", "Save", "Publish", "Leave", "Left"]
        assert job.words(2) == ["Protected", "Stop", "Settle", "Save", "Leave", "Left"]
        (manifest,) = job.published()
        assert (manifest["step"], manifest["lost"], manifest["cover"]) == (
            6,
            [1],
            {"opt0": 0, "opt1": 2},
        )
        (fault,) = job.faults()
        assert (fault["status"], fault["step"], fault["gasp"]) == ("SAVED", 6, "step-6")
        assert fault["lost"]["1"].startswith(
            ("its process is exiting", "its connection ended")
        )  # there may be an error behind it


@clause("T20", "T21")
@pytest.mark.parametrize(
    "order",
    [
        pytest.param("Stop", marks=pytest.mark.long),
        "Settle",
        pytest.param("Save", marks=pytest.mark.long),
        "Publish",
    ],
)
def test_the_active_coordinator_is_killed_in_each_phase_and_a_standby_goes_on(
    tmp_path: Path, order: str
) -> None:
    with GaspJob(tmp_path, 4, PAIRS, marks=MARKS, coordinators=2, hold=order) as job:
        job.wait("Protected", 0, 1, 2, 3)
        until(lambda: job.status(1)["connected"] == 4)
        job.kill(3)
        job.wait(order, *((0,) if order == "Publish" else (0, 1, 2)))
        job.coordinators[0].kill()
        (job.log / "release").touch()
        assert {job.left(rank)["status"] for rank in (0, 1, 2)} == {ExitStatus.SAVED}
        (manifest,) = job.published()
        assert (manifest["step"], manifest["lost"]) == (6, [3])
        assert {told["term"] for told in job.told(0) if told["what"] == "Leave"} != {1}
        assert job.coordinators[1].wait(60) == 0


@clause("T21")
def test_an_active_coordinator_that_dies_alone_is_no_fault(tmp_path: Path) -> None:
    with GaspJob(tmp_path, 2, {"all": (0, 1)}, coordinators=2) as job:
        job.wait("Protected", 0, 1)
        until(lambda: job.status(1)["connected"] == 2)
        job.coordinators[0].kill()
        until(lambda: job.status(1)["active"] and job.status(1)["state"] == "running")
        assert "Stop" not in job.words(0)
        job.kill(0)
        assert job.left(1)["status"] == ExitStatus.SAVED


NODE_OF = (0, 1, 2, 3, 3)
"""Coordinators are on the first three."""


@clause("T20", "T21", "T153")
def test_the_nodes_of_two_coordinators_are_lost_and_the_third_one_commands(tmp_path: Path) -> None:
    """Two standbys on two further nodes: that of the first coordinator dies, and that of the next
    one in the middle of the gasp.
    """
    world = len(NODE_OF)
    with GaspJob(
        tmp_path, world, {"all": tuple(range(world))}, coordinators=3, node_of=NODE_OF, hold="Save"
    ) as job:
        job.wait("Protected", *range(world))
        until(lambda: [job.status(number)["connected"] for number in (1, 2)] == [world] * 2)
        lose_node(job, 0)
        job.wait("Save", *range(1, world))
        (commands,) = {
            told["number"] for told in job.told(4) if told["what"] == "Save"
        }  # the first in the queue, if it is not slow
        other = {1: 2, 2: 1}[commands]
        lose_node(job, commands)
        (job.log / "release").touch()
        assert [job.left(rank)["status"] for rank in (other, 3, 4)] == [ExitStatus.SAVED] * 3
        (manifest,) = job.published()
        assert (manifest["step"], manifest["lost"]) == (5, [0, commands])
        assert {told["number"] for told in job.told(4) if told["what"] == "Leave"} == {other}
        assert job.coordinators[other].wait(120) == 0


def lose_node(job: GaspJob, number: int) -> None:
    """With its coordinator and its rank; neither is known to be lost before it is so."""
    job.coordinators[number].kill()
    job.kill(number)


@clause("T121")
def test_a_coordinator_that_is_told_to_end_commands_until_the_last_rank_has_left(
    tmp_path: Path,
) -> None:
    """As a scheduler does, which tells all processes of a job."""
    with GaspJob(tmp_path, 2, {"all": (0, 1)}) as job:
        job.wait("Protected", 0, 1)
        job.coordinators[0].terminate()
        job.kill(1)
        assert job.left(0)["status"] == ExitStatus.SAVED
        assert job.coordinators[0].wait(60) == 0


@clause("T120")
def test_a_coordinator_that_died_gets_a_successor_that_commands_when_the_next_one_dies(
    tmp_path: Path,
) -> None:
    with GaspJob(tmp_path, 2, {"all": (0, 1)}, coordinators=2) as job:
        job.wait("Protected", 0, 1)
        until(lambda: job.status(1)["connected"] == 2)
        died = job.announced[0]["pid"]
        job.coordinators[0].kill()
        until(lambda: job.look_again(0)["pid"] != died and job.status(0)["connected"] == 2)
        assert job.status(1)["active"]
        job.coordinators[1].kill()
        until(lambda: job.status(0)["active"])
        assert (job.status(0)["state"], "Stop" in job.words(0)) == ("running", False)
        job.kill(0)
        assert job.left(1)["status"] == ExitStatus.SAVED


@clause("T153")
def test_the_coordinator_of_one_node_starts_a_standby_that_commands_when_it_dies(
    tmp_path: Path,
) -> None:
    with GaspJob(tmp_path, 2, {"all": (0, 1)}, words=["--coordinators", "2"]) as job:
        job.wait("Protected", 0, 1)
        until(lambda: (job.job_directory / "coordinator-1").exists())
        job.announced.append({})
        assert job.look_again(1)["pid"] != job.announced[0]["pid"]
        until(lambda: job.status(1)["connected"] == 2)
        job.coordinators[0].kill()
        until(lambda: job.status(1)["active"])
        job.kill(0)
        assert job.left(1)["status"] == ExitStatus.SAVED


@clause("T153")
def test_a_standby_that_comes_when_the_job_has_ended_ends_too(tmp_path: Path) -> None:
    """Its log is open in the mount."""
    with GaspJob(tmp_path, 2, {"all": (0, 1)}, words=["--coordinators", "2"]) as job:
        job.wait("Protected", 0, 1)
        until(lambda: child_of(job.coordinators[0].pid))
        standby = os.pidfd_open(child_of(job.coordinators[0].pid))
        job.kill(0)  # it is being started
        assert job.left(1)["status"] == ExitStatus.SAVED
        assert job.coordinators[0].wait(60) == 0
        waiting = select.poll()
        waiting.register(standby, select.POLLIN)
        assert waiting.poll(60_000)
        os.close(standby)


def child_of(pid: int) -> int:
    """The first one; 0: there is none."""
    return int(
        (Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split() or ["0"])[0]
    )


@pytest.mark.long
@clause("T18", "T21")
def test_a_stopped_active_coordinator_is_replaced_and_stands_back_when_it_goes_on(
    tmp_path: Path,
) -> None:
    with GaspJob(tmp_path, 4, PAIRS, marks=MARKS, coordinators=2) as job:
        job.wait("Protected", 0, 1, 2, 3)
        until(lambda: job.status(1)["connected"] == 4)
        stop_processes([job.coordinators[0].pid])
        until(lambda: job.status(1)["active"])
        job.coordinators[0].send_signal(signal.SIGCONT)
        until(lambda: not job.status(0)["active"])
        assert job.status(0)["state"] == "standby"
        job.kill(0)
        assert [job.left(rank)["status"] for rank in (1, 2, 3)] == [ExitStatus.SAVED] * 3
        assert job.published()[0]["lost"] == [0]


@pytest.mark.slow
@clause("T152")
@pytest.mark.parametrize("order", ["Protected", "Save"])
def test_a_rank_that_says_nothing_and_works_is_not_lost(tmp_path: Path, order: str) -> None:
    """Its interpreter is held by a thread that writes, or computes in C: while the job runs, or in
    the middle of the gasp.
    """
    with GaspJob(tmp_path, 4, PAIRS, marks=MARKS, busy=[2, order]) as job:
        job.wait("Protected", 0, 1, 2, 3)
        if order == "Save":
            job.kill(3)
        until(
            lambda: job.status()["counts"].get("silent_and_at_work", 0) >= 6
        )  # a look per second, from the second beat on that is missing
        assert {one["rank"] for one in job.status()["ranks"] if one["lost"]} == (
            {3} if order == "Save" else set()
        )
        (job.log / "release").touch()
        if order == "Protected":
            job.kill(3)
        assert [job.left(rank)["status"] for rank in (0, 1, 2)] == [ExitStatus.SAVED] * 3
        assert job.published()[0]["lost"] == [3]


@pytest.mark.mount
@pytest.mark.long
@clause("T156")
def test_a_saver_that_hangs_in_a_storage_is_not_waited_for_where_another_has_what_it_has(
    tmp_path: Path,
) -> None:
    """A real file system that never answers, outside of the mount.

    Its node sees it wait for a storage, and vouches for it.
    """
    (tmp_path / "source").mkdir()
    with FaultFs(tmp_path / "source", tmp_path / "hung") as storage:
        storage.freeze(["create", "open", "lookup"], glob="*other*")
        words = {"busy": [0, "Save"], "hangs_in": str(tmp_path / "hung" / "other")}
        with GaspJob(tmp_path / "job", 3, {"all": (0, 1, 2)}, **words) as job:
            job.wait("Protected", 0, 1, 2)
            job.kill(2)
            storage.wait_frozen()
            until(lambda: job.status()["counts"].get("silent_and_at_work", 0))
            assert job.left(1)["status"] == ExitStatus.SAVED
            assert job.published()[0]["lost"] == [0, 2]
            assert "others have what it has" in job.faults()[0]["lost"]["0"]
            storage.thaw()


@pytest.mark.long
@clause("T18")
def test_a_stopped_member_is_lost_and_told_so_when_it_goes_on(tmp_path: Path) -> None:
    with GaspJob(tmp_path, 4, PAIRS, hold="Settle") as job:
        job.wait("Protected", 0, 1, 2, 3)
        stop_processes([job.pids[3]])
        job.wait("Settle", 0, 1, 2)
        job.kill(3, signal.SIGCONT)
        assert job.left(3)["status"] == ExitStatus.TAKEN_FOR_LOST
        (job.log / "release").touch()
        assert [job.left(rank)["status"] for rank in (0, 1, 2)] == [ExitStatus.SAVED] * 3


@pytest.mark.long
def test_a_standby_ends_behind_the_last_member(tmp_path: Path) -> None:
    with GaspJob(tmp_path, 2, {"all": (0, 1)}, coordinators=2) as job:
        job.wait("Protected", 0, 1)
        job.kill(1)
        assert job.left(0)["status"] == ExitStatus.SAVED
        for process in job.coordinators:
            assert process.wait(60) == 0


@clause("T19")
def test_half_of_a_job_saves_with_a_claim(tmp_path: Path) -> None:
    with GaspJob(tmp_path, 4, {"all": (0, 1, 2, 3)}, ranks_per_node=2) as job:
        job.wait("Protected", 0, 1, 2, 3)
        job.kill(2)
        job.kill(3)
        assert [job.left(rank)["status"] for rank in (0, 1)] == [ExitStatus.SAVED] * 2
        (owner,) = (job.job_directory / "claim-0").iterdir()
        assert owner.name.startswith(
            "coordinator-0.term-1"
        )  # a majority, if the second death was seen after the save began


def halves(tmp_path: Path) -> GaspJob:
    """Ranks 0 and 1 beside coordinator 0 on one node, 2 and 3 beside coordinator 1 on the other;
    each node holds everything.
    """
    job = GaspJob(
        tmp_path, 4, {"opt0": (0, 2), "opt1": (1, 3)}, marks=MARKS, coordinators=2, ranks_per_node=2
    )
    job.wait("Protected", 0, 1, 2, 3)
    until(lambda: job.status(1)["connected"] == 4)
    return job


def the_first_half(job: GaspJob, number: int) -> None:
    """A signal to node 0; the coordinator is stopped first, so that it sees nothing of it."""
    stop_processes([job.coordinators[0].pid])
    for rank in (0, 1):
        job.kill(rank, number)
    job.coordinators[0].send_signal(number)


@clause("T19", "T63")
def test_half_of_a_job_whose_coordinator_died_with_the_other_half_saves_with_the_claim(
    tmp_path: Path,
) -> None:
    with halves(tmp_path) as job:
        the_first_half(job, signal.SIGKILL)
        assert [job.left(rank)["status"] for rank in (2, 3)] == [ExitStatus.SAVED] * 2
        (manifest,) = job.published()
        assert (manifest["step"], manifest["lost"]) == (6, [0, 1])
        (owner,) = (job.job_directory / "claim-0").iterdir()
        assert owner.name.startswith("coordinator-1.")
        assert job.coordinators[1].wait(60) == 0


@clause("T63")
def test_half_of_a_job_leaves_where_the_other_half_has_the_claim(tmp_path: Path) -> None:
    with halves(tmp_path) as job:
        assert claim(
            job.job_directory, 0, Claimant(0, 1, majority=False)
        )  # as the other half had done before the network was cut
        the_first_half(job, signal.SIGKILL)
        assert [job.left(rank)["status"] for rank in (2, 3)] == [ExitStatus.OTHER_SIDE] * 2
        assert job.published() == []


@pytest.mark.long
@clause("T63")
def test_a_half_that_was_cut_off_comes_back_when_the_other_has_saved(tmp_path: Path) -> None:
    """A network that is cut in the middle, seen from the half that has the claim; then from the
    other.
    """
    with halves(tmp_path) as job:
        the_first_half(job, signal.SIGSTOP)
        assert [job.left(rank)["status"] for rank in (2, 3)] == [ExitStatus.SAVED] * 2
        the_first_half(job, signal.SIGCONT)
        assert {job.left(rank)["status"] for rank in (0, 1)} == {ExitStatus.OTHER_SIDE}
        assert len(job.published()) == 1
        assert [process.wait(60) for process in job.coordinators] == [0, 0]


def test_claims_are_made_in_the_storage_below_the_mount(tmp_path: Path) -> None:
    mount = MountRecord(str(tmp_path / "mnt"), "/storage", "node", 1, 1, "", "", "")
    directory = tmp_path / "mnt" / "run1" / ".acpfs-job" / "job"
    assert witness_for(directory, "job", [mount]) == Path("/storage/.acpfs-job-claims/job")
    assert witness_for(tmp_path, "job", [mount]) == tmp_path


@pytest.mark.long
@clause("T23")
def test_a_rank_that_hangs_is_named_shows_its_stacks_and_is_lost_where_that_is_wanted(
    tmp_path: Path,
) -> None:
    words = ["--on-stall", "fault", "--stall-after", "3"]
    with GaspJob(tmp_path, 4, PAIRS, hang=[1], words=words) as job:
        assert [job.left(rank)["status"] for rank in (0, 2, 3)] == [ExitStatus.SAVED] * 3
        assert job.left(1)["status"] == ExitStatus.TAKEN_FOR_LOST
        (manifest,) = job.published()
        assert (manifest["step"], manifest["lost"]) == (6, [1])
        log = (job.job_directory / "logs" / "coordinator-0.log").read_text(encoding="utf-8")
        assert '"event": "stacks", "rank": 1, "text": "rank 1"' in log


@clause("T22")
def test_strangers_and_nonsense_are_refused_and_counted_and_the_job_goes_on(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    with GaspJob(tmp_path, 2, {"all": (0, 1)}) as job:
        job.wait("Protected", 0, 1)
        host, _, port = job.announced[0]["address"].rpartition(":")
        for _ in range(5):  # without TLS
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), 120) as plain,
            ):
                plain.sendall(chance.randbytes(100))
                plain.shutdown(socket.SHUT_WR)
        other = make_credentials(tmp_path / "other").context(server=False)
        other.check_hostname = False
        other.verify_mode = ssl.CERT_NONE
        good = make_credentials(job.job_directory).context(server=False)
        for number, data in enumerate(nonsense(chance)):
            whose = other if number < 3 else good
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), 120) as plain,
                whose.wrap_socket(plain) as secured,
            ):
                secured.sendall(data)
                while secured.recv(4096):  # until it is cut off
                    pass
        least = {"refused_tls": 8, "refused_malformed": 2, "refused_job": 1}
        until(
            lambda: all(
                job.status()["counts"].get(name, 0) >= count for name, count in least.items()
            ),
            lambda: job.status()["counts"],
        )
        assert job.status()["counts"]["refused_job"] == 1
        assert job.status()["state"] == "running"


def nonsense(chance: random.Random) -> list[bytes]:
    """What no member would send."""

    def framed(text: bytes) -> bytes:
        return struct.pack(">I", len(text)) + text

    hello = {
        "rank": 0,
        "world": 2,
        "node": "n",
        "pid": 1,
        "started": 1,
        "gate": "none",
        "holders": {"all": [0, 1]},
    }
    header = {"job": "another", "generation": 0, "term": 0, "sender": "rank 0"}
    return [
        b"never arrives",
        b"never arrives",
        b"never arrives",
        struct.pack(">I", 1 << 31),
        framed(b"{}"),
        framed(chance.randbytes(40)),
        framed(json.dumps({"kind": "HELLO", **header, "body": hello}).encode()),
        framed(json.dumps({"kind": "STOP", **header, "job": "job", "body": {"lost": []}}).encode()),
    ]
