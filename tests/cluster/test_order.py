"""Order between nodes, on real mounts over one shared directory: what pointers name is there before
them, whatever the other nodes do.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.member_records import NodeRecord, NodeRecords, NodeState
from tests.cluster.observer import Observer
from tests.cluster.stand import HEARTBEAT_S, SOON_MISSING_S, Stand
from tests.cluster.training import TRACKER, Job, looks_right
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount, CommandError
from tests.rig.runtime import REAL

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
SLOW = "150K"
"""Bytes per second of a node whose drain is behind."""
LOST_S = 1.5
"""Until so long after its last record a node may have closed files that are lost: long enough to
close a pointer in that time.
"""
TRIES_MAX = 20
BEYOND_S = 0.3
"""More than the clock bound."""
FILES = 30
CHANGES = frozenset({"create", "write", "mkdir", "unlink", "link", "symlink", "mknod"})


def drained(stand: Stand) -> None:
    """When the machine has stood still, each node counts the others as missing until it hears of
    them: no flush waits for that.
    """
    for node in stand.nodes:
        node.wait_status(lambda _status, node=node: not withheld(node))
        node.flush()


def slow_others(stand: Stand, bandwidth: str) -> None:
    for node in stand.nodes[1:]:
        node.ask("set", key="bandwidth", value=bandwidth)


def withheld(node: AcpfsMount) -> list[dict[str, Any]]:
    return [one for one in node.status()["cluster"]["waiting"] if one["withheld"]]


def write(node: AcpfsMount, name: str, content: str) -> None:
    (node.path / name).write_text(content, encoding="ascii")


def read(shared: Path, name: str) -> str | None:
    try:
        return (shared / name).read_text(encoding="ascii")
    except FileNotFoundError:
        return None


def until(condition: Callable[[], object], node: AcpfsMount) -> None:
    """Ask the node for its status until the condition holds."""
    node.wait_status(lambda _status: condition())


@clause("S160")
@pytest.mark.transports("native", "libfuse")
def test_no_pointer_is_seen_before_what_it_names(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    with Stand(tmp_path, [shared] * 3, transport, offsets_s=(0.0, 0.08, -0.08)) as stand:
        job = Job(stand.paths(), 1)
        with Observer(shared, tmp_path) as observer:
            slow_others(stand, "400K")
            for _ in range(3):
                job.save()
            until(lambda: read(shared, TRACKER) is not None, stand.nodes[0])
            slow_others(stand, "0")
            drained(stand)
        assert looks_right(shared, job.name) == ""
    assert (observer.violations, observer.looks > 0) == ([], True)


@clause("S160")
def test_what_a_pointer_names_is_not_removed_before_it(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    """Node 0, which writes and removes the pointers, is behind; the others, which remove their
    shards after it, are not.
    """
    with Stand(tmp_path, [shared] * 2, transport, no_keep_last_persisted=True) as stand:
        job = Job(stand.paths(), 1, keep=1)
        with Observer(shared, tmp_path) as observer:
            stand.nodes[0].ask("set", key="bandwidth", value=SLOW)
            for _ in range(4):
                job.save()
            until(lambda: read(shared, TRACKER) is not None, stand.nodes[0])
            stand.nodes[0].ask("set", key="bandwidth", value="0")
            drained(stand)
        assert sorted(path.name for path in shared.glob("iter_*/*.bin")) == [
            "shard0.bin",
            "shard1.bin",
        ]
    assert observer.violations == []


@clause("S160")
def test_a_removed_pointer_goes_before_what_it_names_whatever_the_clocks(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    """Node 0 removes `.metadata`, a moment later node 1 its shard; by their clocks, within the
    bound, it was the other way round.
    """
    with Stand(
        tmp_path, [shared] * 2, transport, offsets_s=(0.045, -0.045), no_keep_last_persisted=True
    ) as stand:
        job = Job(stand.paths(), 1, keep=2)
        with Observer(shared, tmp_path) as observer:
            for _ in range(6):
                job.save()
            drained(stand)
        assert (
            len(list(shared.glob("iter_*/.metadata")))
            == len(list(shared.glob("iter_*/shard1.bin")))
            == 2
        )
    assert observer.violations == []


@clause("S160", "S81")
def test_the_next_worker_waits_with_the_removals_of_the_last_one(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    with Stand(tmp_path, [shared] * 2, transport, no_keep_last_persisted=True) as stand:
        first, second = stand.nodes
        job = Job(stand.paths(), 1, keep=1)
        job.save()
        drained(stand)
        first.ask("set", key="bandwidth", value="1")
        # the tracker that names this one, and the removal of the last one's pointer, are behind
        job.save()
        for _ in range(2):
            second.kill_worker()
            until(lambda: True, second)
        write(second, "other", "what comes after the removal goes on")
        until(lambda: read(shared, "other"), second)
        assert looks_right(shared, "iter_0000001") == ""
        first.ask("set", key="bandwidth", value="0")
        drained(stand)
        assert looks_right(shared, job.name) == ""
        assert not list(shared.glob("iter_0000001/*"))


@clause("S140", "S160")
def test_no_node_s_guard_lets_go_what_another_ones_holds(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    """Node 0 still writes to the newer checkpoint, so that its guard keeps the old one's pointer;
    to node 1 the newer one looks whole.
    """
    with Stand(tmp_path, [shared] * 2, transport) as stand:
        first, second = stand.nodes
        job = Job(stand.paths(), 1, shard_bytes=(1 << 16, (1 << 16) + 1), keep=1)
        job.save()
        drained(stand)
        (first.path / "iter_0000002").mkdir()
        with open(first.path / "iter_0000002" / "notes", "w", encoding="ascii"):
            job.save()
            drained(stand)
            why = "other nodes have not removed their pointers to it yet"
            until(lambda: [one for one in second.status()["guarded"] if one["why"] == why], second)
            assert looks_right(shared, "iter_0000001") == ""
        until(lambda: not list(shared.glob("iter_0000001/*")), second)
        assert looks_right(shared, job.name) == ""


@clause("S160")
def test_without_the_order_the_observer_sees_violations(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    """The test of the test."""
    with Stand(tmp_path, [shared] * 2, transport, cluster_order="off") as stand:
        job = Job(stand.paths(), 1)
        with Observer(shared, tmp_path) as observer:
            slow_others(stand, "1")
            job.save()
            stand.nodes[0].flush()
            until(observer.complains, stand.nodes[0])
            slow_others(stand, "0")
            drained(stand)
    assert observer.count > 0


@clause("S160")
def test_with_all_every_operation_waits_for_the_other_nodes(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    with Stand(tmp_path, [shared] * 2, transport, cluster_order="all") as stand:
        first, second = stand.nodes
        second.ask("set", key="bandwidth", value="1")
        write(second, "shard", "x" * 100_000)
        write(first, "log", "no pointer by its name")
        until(lambda: first.status()["cluster"]["waiting"], first)
        assert sorted(os.listdir(shared)) == [".acpfs"]
        second.ask("set", key="bandwidth", value="0")
        for number in range(4):
            for node in stand.nodes:
                write(
                    node,
                    f"{node.options['node_id']}-{number}",
                    "both have something that waits for the other",
                )
        drained(stand)
        assert len(os.listdir(shared)) == 1 + 2 + 8


@clause("S161")
@pytest.mark.transports("native", "libfuse")
def test_a_missing_node_withholds_pointers_until_it_is_back(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    with Stand(tmp_path, [shared] * 2, transport, node_timeout=SOON_MISSING_S) as stand:
        first, second = stand.nodes
        job = Job(stand.paths(), 1)
        job.save()
        drained(stand)
        second.ask("set", key="bandwidth", value="1")
        job.save()
        second.kill()
        until(lambda: withheld(first), first)
        write(first, "other", "goes on")
        until(lambda: read(shared, "other"), first)
        assert read(shared, TRACKER) == "1", "the pointer is still the old one"
        status = first.status()
        assert (
            status["cluster"]["missing"],
            status["cluster"]["withheld"] > 0,
            status["parked"],
        ) == (["node1"], True, 0)
        assert "WITHHELD" in first.run("acpfs-ctl", str(first.path), "status").stdout
        assert (
            "pointer files are withheld"
            in first.run("acpfs-ctl", str(first.path), "flush", check=False).stderr
        )
        assert (
            "acpfs_withheld_pointers" in first.run("acpfs-ctl", str(first.path), "metrics").stdout
        )
        second.start()
        until(lambda: not withheld(first), first)
        drained(stand)
        assert (read(shared, TRACKER), looks_right(shared, job.name)) == ("2", "")


@clause("S161", "S162")
def test_an_operator_forgets_a_missing_node(transport: str, tmp_path: Path, shared: Path) -> None:
    with Stand(tmp_path, [shared] * 2, transport, node_timeout=SOON_MISSING_S) as stand:
        first, second = stand.nodes
        with pytest.raises(CommandError) as refused:
            first.run("acpfs-ctl", str(first.path), "nodes", "forget", "node1")
        assert refused.value.code == 5
        second.kill()
        write(first, "latest", "1")
        until(lambda: withheld(first), first)
        assert {row["node"]: row["state"] for row in first.ctl("nodes")} == {
            "node0": "this",
            "node1": "missing",
        }
        first.run("acpfs-ctl", str(first.path), "nodes", "forget", "node1")
        until(lambda: not withheld(first), first)
        first.flush()
        assert read(shared, "latest") == "1"
        second.start()
        write(first, "latest", "2")
        first.flush()
        assert "node1" in json.dumps(first.ctl("nodes")), "it counts again"


@clause("S163")
def test_who_leaves_in_order_never_blocks(transport: str, tmp_path: Path, shared: Path) -> None:
    with Stand(tmp_path, [shared] * 2, transport) as stand:
        first, second = stand.nodes
        write(second, "file", "x")
        second.umount()
        write(first, "latest", "1")
        first.flush()
        assert {row["node"]: row["state"] for row in first.ctl("nodes")} == {
            "node0": "this",
            "node1": "left",
        }


@clause("S163")
def test_a_node_alone_does_not_wait(transport: str, tmp_path: Path, shared: Path) -> None:
    with Stand(tmp_path, [shared], transport, heartbeat=60) as stand:
        for number in range(3):
            write(stand.nodes[0], "latest", str(number))
            stand.nodes[0].flush(timeout_s=30)  # half a heartbeat
        assert read(shared, "latest") == "2"


@clause("S160", "S81")
def test_the_gate_outlives_the_worker(transport: str, tmp_path: Path, shared: Path) -> None:
    with Stand(tmp_path, [shared] * 2, transport) as stand:
        first, second = stand.nodes
        job = Job(stand.paths(), 1)
        with Observer(shared, tmp_path) as observer:
            second.ask("set", key="bandwidth", value="1")
            job.save()
            for node in (first, second, first):
                node.kill_worker()
                until(lambda: True, node)
            assert read(shared, TRACKER) is None
            second.ask("set", key="bandwidth", value="0")
            drained(stand)
        assert (read(shared, TRACKER), observer.violations) == ("1", [])


@clause("S164")
def test_a_lost_ram_tier_withholds_what_may_name_it(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    """The node comes back under its name, and its RAM tier does not: what it had closed is lost,
    and the old pointer stays.
    """
    with Stand(tmp_path, [shared] * 2, transport) as stand:
        first, second = stand.nodes
        job = Job(stand.paths(), 1)
        job.save()
        drained(stand)
        second.ask("set", key="bandwidth", value="1")
        job.save()
        second.abort()
        second.start()
        until(lambda: withheld(first), first)
        assert set(withheld(first)[0]["waits_for"].values()) == {"lost"}
        assert read(shared, TRACKER) == "1"
        first_record, second_record = (
            shared / ".acpfs" / "nodes" / name for name in ("node0", "node1")
        )
        lost_until = json.loads(second_record.read_bytes())["lost"][1]
        # Closed within the clocks' bound of it, a pointer is of that time, too, and rightly
        # withheld.
        until(lambda: json.loads(first_record.read_bytes())["clock"] > lost_until + BEYOND_S, first)
        job.save()
        until(lambda: read(shared, TRACKER) == "3", first)
        assert looks_right(shared, job.name) == ""
        first.ask("discard", paths=["iter_0000002"])
        drained(stand)


@clause("S164")
def test_a_node_whose_machine_was_started_again_withholds_what_may_name_its_files(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    """What another mount on that machine says of it: gone.

    Pointers of that time wait, later ones do not, and nobody is missing.
    """
    with Stand(tmp_path, [shared], transport) as stand:
        (node,) = stand.nodes
        record = shared / ".acpfs" / "nodes" / "node0"
        directory = BackingDirectory(shared, "other", REAL)
        gone: list[str] = []
        while not withheld(node):
            # once more with another node, where the last one was known here already when the
            # pointer was closed, or its time was over by then: the machine stood still
            assert len(gone) < TRIES_MAX
            gone.append(f"old{len(gone)}")
            now = time.time()
            lost = (now - 60.0, now + LOST_S)
            NodeRecords(directory).publish(
                NodeRecord(gone[-1], "1", 1, NodeState.GONE, now, lost[0], lost=lost)
            )
            write(node, "latest", gone[-1])
            until(lambda: withheld(node) or read(shared, "latest") == gone[-1], node)
        directory.disconnect()
        assert withheld(node)[0]["waits_for"] == {gone[-1]: "lost"}
        assert {row["node"]: row["state"] for row in node.ctl("nodes")} == {
            "node0": "this",
            **dict.fromkeys(gone, "gone"),
        }
        assert node.status()["cluster"]["missing"] == []
        until(lambda: json.loads(record.read_bytes())["clock"] > lost[1] + BEYOND_S, node)
        write(node, "latest", "2")
        node.flush()
        assert read(shared, "latest") == "2"


@clause("S165")
def test_records_are_few_and_small(transport: str, tmp_path: Path, shared: Path) -> None:
    """Counted by the beats in the node's own record, against the time by its own clock."""
    with Stand(tmp_path, [shared] * 2, transport) as stand:
        job = Job(stand.paths(), 1)
        record = shared / ".acpfs" / "nodes" / "node0"
        before = json.loads(record.read_bytes())
        for _ in range(4):
            job.save()
            drained(stand)
        written = stand.nodes[0].status()["counters"]["node_records_written"]
        after = json.loads(record.read_bytes())
        heartbeats = (after["clock"] - before["clock"]) / HEARTBEAT_S
        assert 0 < after["beat"] - before["beat"] <= 2 * heartbeats + 2
        assert written >= after["beat"] - before["beat"]
        assert {path.name for path in record.parent.iterdir() if not path.name.startswith(".")} == {
            "node0",
            "node1",
        }
        assert record.stat().st_size <= 4096


@clause("S165")
def test_what_acpfs_itself_writes_is_counted_below(transport: str, tmp_path: Path) -> None:
    """Every call that arrives at the backing directory, while two nodes save: beside files and
    manifest there are the records alone.
    """
    with (
        FaultFs(tmp_path / "disk", tmp_path / "shared") as below,
        Stand(tmp_path, [below.path] * 2, transport) as stand,
    ):
        began = time.monotonic()
        below.set(trace=True)
        for number in range(FILES):
            for node in stand.nodes:
                write(node, f"{node.options['node_id']}-{number}", "x")
        write(stand.nodes[0], "latest", "1")
        drained(stand)
        calls = [call.split(" ") for call in below.state()["calls"]]
        heartbeats = (
            time.monotonic() - began
        ) / HEARTBEAT_S  # of both: by the clock in one's record, the other may have gone on
    written = Counter(
        path.split("/")[1] for op, path, *_ in calls if op == "write" and path.startswith(".acpfs/")
    )
    created = Counter(
        path.split("/")[1]
        for op, path, *_ in calls
        if op == "create" and path.startswith(".acpfs/")
    )
    assert not any(op in CHANGES and not path.startswith(".acpfs/") for op, path, *_ in calls), (
        "files come by a rename"
    )
    files = 2 * FILES + 1
    assert set(written) | set(created) <= {"nodes", "staging", "manifest"}
    assert (created["staging"], written["staging"]) == (files, files)
    assert created["manifest"] < files / 4
    assert 0 < written["nodes"] <= 2 * (2 * heartbeats + 2)
    assert abs(created["nodes"] - written["nodes"]) <= 2, (
        "each of the two may be between these at the first look, and at the last"
    )


@clause("S227")
@pytest.mark.long
@pytest.mark.parametrize("offset_s", [-7200.0, 7200.0])
def test_a_clock_that_is_hours_away_holds_no_pointer_up_for_hours(
    transport: str, tmp_path: Path, shared: Path, offset_s: float
) -> None:
    """The other one is slow: what it closed before is there first.

    Its wall clock is set meanwhile, or was wrong when it was mounted.
    """
    with Stand(
        tmp_path, [shared] * 2, transport, node_timeout=30, offsets_s=(0.0, min(offset_s, 0.0))
    ) as stand:
        stand.set_clock(1, offset_s)
        slow_others(stand, SLOW)
        (stand.nodes[1].path / "shard").write_bytes(b"s" * (20 * 150_000))
        write(stand.nodes[0], "latest", "1")
        stand.nodes[0].wait_status(
            lambda status: "wall clocks" in (status["cluster"]["clock_problem"] or "")
        )
        shard_is_there = False

        def pointer_is_there(_status: object) -> str | None:
            nonlocal shard_is_there
            shard_is_there = (shared / "shard").exists()
            return read(shared, "latest")

        stand.nodes[0].wait_status(pointer_is_there, timeout_s=250)
        assert shard_is_there
