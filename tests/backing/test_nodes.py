"""Node records: whole or not at all, also where there is no room for another file."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.member_records import BLOCK_BYTES, NodeRecord, NodeRecords
from tests.rig.runtime import REAL

RECORD = NodeRecord("a", "1", 1, clock=1000.0, watermark=999.0, pending="x" * 100)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[BackingDirectory]:
    (tmp_path / "backing").mkdir()
    directory = BackingDirectory(tmp_path / "backing", "a", REAL)
    yield directory
    directory.disconnect()


@pytest.fixture
def full(directory: BackingDirectory, monkeypatch: pytest.MonkeyPatch) -> NodeRecords:
    """A node has published, and then there is no room any more."""
    records = NodeRecords(directory)
    records.publish(RECORD)

    def no_room(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory, "write_own", no_room)
    return records


def file_of(directory: BackingDirectory) -> Path:
    return directory.path / ".acpfs/nodes/a"


def test_a_record_reads_back(directory: BackingDirectory) -> None:
    records = NodeRecords(directory)
    records.publish(RECORD)
    assert records.read("a") == RECORD
    assert records.names() == ["a"]
    assert file_of(directory).stat().st_size == BLOCK_BYTES
    records.remove_temporary("a")
    records.remove("a")
    assert os.listdir(directory.path / ".acpfs/nodes") == []


@pytest.mark.clause("S438")
def test_what_has_not_changed_is_not_taken_apart_again(directory: BackingDirectory) -> None:
    records = NodeRecords(directory)
    records.publish(RECORD)
    first = records.read("a")
    assert records.read("a") is first == RECORD
    later = replace(RECORD, beat=2)
    NodeRecords(directory).publish(later)
    assert records.read("a") == later
    records.publish(RECORD)
    assert records.read("a") == RECORD
    records.remove("a")
    assert records.read("a") is None
    file_of(directory).write_bytes(later.to_bytes()[:100])
    with pytest.raises(ValueError, match="record"):
        records.read("a")


def test_what_a_killed_worker_left_goes_and_nothing_of_a_node_whose_name_begins_alike(
    directory: BackingDirectory,
) -> None:
    NodeRecords(directory).publish(replace(RECORD, node="a.b"))
    own = directory.path / ".acpfs/nodes"
    others = {*os.listdir(own), ".a.b.0123abcd", "..a.b.mark-a.0123abcd"}
    left = {".a.89abcdef", "..a.mark-b.89abcdef"}
    for name in {*others, *left} - set(os.listdir(own)):
        (own / name).write_bytes(b"half")
    NodeRecords(directory).remove_temporary("a")
    assert set(os.listdir(own)) == others


def test_a_record_of_an_earlier_acpfs_is_one(directory: BackingDirectory) -> None:
    directory.write_own((b"nodes", b"a"), json.dumps(asdict(RECORD)).encode())
    assert NodeRecords(directory).read("a") == RECORD


@pytest.mark.clause("S209")
def test_a_full_backing_directory_takes_heartbeats(
    full: NodeRecords, directory: BackingDirectory
) -> None:
    """Else all members look missing, and what they wait for each other with is what makes room."""
    inode = file_of(directory).stat().st_ino
    for beat in range(2, 6):
        before = os.listdir(directory.path / ".acpfs/nodes")
        later = replace(RECORD, beat=beat, watermark=999.0 + beat, pending="y" * 1000)
        full.publish(later)
        assert full.read("a") == later
        assert full.names() == ["a"]
        assert sorted(os.listdir(directory.path / ".acpfs/nodes")) != sorted(
            before
        )  # the client lists it anew
    assert file_of(directory).stat().st_ino == inode
    full.remove_temporary("a")  # the next worker begins
    NodeRecords(directory).publish(RECORD)
    assert full.read("a") == RECORD


def test_names_for_which_there_is_no_room_are_left_out(full: NodeRecords) -> None:
    full.publish(replace(RECORD, beat=2, pending="y" * BLOCK_BYTES))
    assert full.read("a") == replace(RECORD, beat=2, pending="")


def test_what_cannot_be_noticed_was_not_published(
    full: NodeRecords, directory: BackingDirectory
) -> None:
    for mark in (directory.path / ".acpfs/nodes").glob(".a.mark*"):
        mark.unlink()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        full.publish(RECORD)


@pytest.mark.parametrize("at", [20, 100, 400])
def test_one_that_is_read_half_written_is_none(directory: BackingDirectory, at: int) -> None:
    records = NodeRecords(directory)
    later = replace(RECORD, beat=2, watermark=1000.0)
    file_of(directory).write_bytes(later.to_bytes()[:at] + RECORD.to_bytes()[at:])
    with pytest.raises(ValueError, match="whole"):
        records.read("a")
