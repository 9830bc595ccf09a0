"""A node id that another machine uses is refused, before anything of that mount's is touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.identity import claim
from acpfs.backing.leftovers import MachineId
from acpfs.backing.member_records import NodeRecord, NodeRecords, NodeState
from acpfs.backing.rivals import WATCH_HEARTBEATS, Rival
from acpfs.errors import RefusedError
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S196")

HERE = MachineId("host1", "4c4c4544-0035", "boot-2")
THERE = NodeRecord(
    "n1",
    incarnation="1",
    beat=7,
    heartbeat_s=2.0,
    host="host2",
    hardware="other",
    boot_id="boot-9",
    mountpoint="/mnt/a",
)


@pytest.fixture
def records(tmp_path: Path) -> Iterator[NodeRecords]:
    directory = BackingDirectory(tmp_path, "n1", REAL)
    yield NodeRecords(directory)
    directory.disconnect()


def found(records: NodeRecords, record: NodeRecord, lock: str = "1:2") -> Rival | None:
    records.publish(record)
    return Rival.found(records, "n1", HERE, lock)


def test_one_that_writes_its_record_is_refused_and_named(records: NodeRecords) -> None:
    rival = found(records, THERE)
    assert rival is not None
    waited_s = 0.0
    for pause_s in rival.pauses():
        waited_s += pause_s
        if waited_s > 1.5 * THERE.heartbeat_s:
            break
        rival.look()
    records.publish(replace(THERE, beat=8))
    with pytest.raises(RefusedError, match=r"node id n1 is in use: host2 serves /mnt/a"):
        rival.look()
    assert waited_s <= 2 * THERE.heartbeat_s


@pytest.mark.parametrize(
    "then",
    [None, THERE, replace(THERE, state=NodeState.LEFT)],
    ids=["removed", "silent", "the same beat"],
)
def test_one_that_is_silent_is_succeeded_after_some_heartbeats(
    records: NodeRecords, then: NodeRecord | None
) -> None:
    rival = found(records, THERE)
    assert rival is not None
    if then is None:
        records.remove("n1")
    else:
        records.publish(then)
    waited_s = 0.0
    for pause_s in rival.pauses():
        waited_s += pause_s
        rival.look()
    assert waited_s == WATCH_HEARTBEATS * THERE.heartbeat_s


@pytest.mark.parametrize(
    "record",
    [
        replace(THERE, state=NodeState.LEFT),
        replace(THERE, state=NodeState.AWAY),
        replace(THERE, host="host1", hardware=HERE.hardware, boot_id="boot-1"),
        replace(THERE, host="host1", hardware=HERE.hardware, boot_id="boot-2", lock="1:2"),
    ],
    ids=["left", "away", "earlier boot of this machine", "had the lock that we have"],
)
def test_one_that_has_ended_for_certain_is_not_waited_for(
    records: NodeRecords, record: NodeRecord
) -> None:
    assert found(records, record) is None


@pytest.mark.parametrize(
    "record",
    [
        replace(THERE, host="host1", hardware=HERE.hardware, boot_id="boot-2"),
        replace(THERE, host="host1", hardware=HERE.hardware, boot_id="boot-2", lock="1:3"),
        replace(THERE, host="host1", hardware="", boot_id="boot-1"),
        replace(THERE, boot_id="boot-9", lock="1:2"),
    ],
    ids=[
        "unknown lock",
        "another runtime directory",
        "no number of the hardware",
        "a lock of another machine",
    ],
)
def test_one_that_may_live_is_watched(records: NodeRecords, record: NodeRecord) -> None:
    assert found(records, record) is not None


def test_a_damaged_record_is_nobodys(tmp_path: Path, records: NodeRecords) -> None:
    (tmp_path / ".acpfs/nodes/n1").write_bytes(b"{torn")
    assert Rival.found(records, "n1", HERE, "1:2") is None


def test_two_runtime_directories_have_different_locks(tmp_path: Path) -> None:
    directory = BackingDirectory(tmp_path, "n1", REAL)
    here = claim(directory, tmp_path / "run1")
    there = claim(directory, tmp_path / "run2")
    assert here.lock != there.lock
    assert NodeRecord.from_bytes(NodeRecord("n1", lock=here.lock).to_bytes()).lock == here.lock
    for one in (here, there):
        one.release()
    directory.disconnect()
