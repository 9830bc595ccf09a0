"""What a node writes of itself below `.acpfs`, when somebody has claimed its log."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.leftovers import WITHDRAWN
from acpfs.backing.lower import Lower, LowerPath
from acpfs.backing.syscalls import Opener
from acpfs.backing.terms import NodeTerms, SupersededError
from acpfs.writeback.copies.journal_marks import put, withdraw
from tests.rig.processes import Child
from tests.rig.runtime import REAL

clause = pytest.mark.clause
MARK = (b"mirrors", b"n1")
HELD = b'{"token": "a", "holder": "n7", "session": "a", "fenced": "1"}'


def claimed(backing: Path) -> None:
    """By another member, which has fenced all before."""
    NodeTerms(Opener(os.open(backing, os.O_RDONLY | os.O_DIRECTORY)), "n1", REAL, "n7").take()


@clause("S610")
def test_nothing_is_written_after_a_claim(tmp_path: Path) -> None:
    directory = BackingDirectory(tmp_path, "n1", REAL)
    directory.fence_own_files()
    directory.write_own(MARK, b"first")
    assert directory.taken_over_by == ""
    claimed(tmp_path)
    for _again in range(2):
        with pytest.raises(SupersededError) as caught:
            directory.write_own(MARK, b"second")
        assert caught.value.errno == errno.ESTALE
    assert directory.read_own(MARK) == b"first"
    assert directory.taken_over_by == "n7"
    assert sorted(tmp_path.glob(".acpfs/mirrors/.*")) == []  # and nothing lies around of it


@clause("S610")
def test_what_comes_between_two_of_its_calls_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim comes when all is written, and only the last call is left."""
    directory = BackingDirectory(tmp_path, "n1", REAL)
    directory.fence_own_files()
    directory.write_own(MARK, b"first")
    real = os.rename
    renames = []

    def rename(source: bytes, target: bytes, **places: int) -> None:
        renames.append(target)
        if target == b"n1" and len(renames) == 2:
            claimed(tmp_path)
        real(source, target, **places)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(SupersededError):
        directory.write_own(MARK, b"second")
    assert directory.read_own(MARK) == b"first"
    assert directory.taken_over_by == "n7"


def write_and_die(backing: Path) -> None:
    """By SIGKILL, between the two renames of one write."""
    real = os.rename
    renames = []

    def rename(source: bytes, target: bytes, **places: int) -> None:
        renames.append(target)
        if len(renames) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, target, **places)

    def run() -> None:
        directory = BackingDirectory(backing, "n1", REAL)
        directory.fence_own_files()
        os.rename = rename  # type: ignore[assignment]
        directory.write_own(MARK, b"second")

    child = Child(run)
    with pytest.raises(RuntimeError, match="died"):
        child.result()


@clause("S610")
@pytest.mark.parametrize("by", ["n1", "n7"])
def test_a_death_between_two_of_its_calls_leaves_the_old_text_and_nothing_else(
    tmp_path: Path, by: str
) -> None:
    """What was written lies in the staging directory then: the next mount of the node clears it
    away, or that of whoever has claimed its log, to which it is moved.
    """
    first = BackingDirectory(tmp_path, "n1", REAL)
    first.write_own(MARK, b"first")
    first.disconnect()
    write_and_die(tmp_path)
    assert len(list(tmp_path.glob(".acpfs/staging/n1/.n1.*"))) == 1
    directory = BackingDirectory(tmp_path, "n1", REAL, by=by)
    if by != "n1":
        directory.take_over()
    assert directory.read_own(MARK) == b"first"
    for name in directory.list_staging():
        directory.remove_staging(name)  # as the engine does, which knows no such version
    directory.fence_own_files()
    directory.write_own(MARK, b"third")
    assert directory.read_own(MARK) == b"third"
    assert directory.list_staging() == []
    assert sorted(tmp_path.glob(".acpfs/staging/*/.*")) == []
    assert sorted(tmp_path.glob(".acpfs/mirrors/.*")) == []


@clause("S610")
def test_the_next_term_of_ones_own_loses_nothing(tmp_path: Path) -> None:
    """Somebody has removed the staging directory, and the node is alone."""
    directory = BackingDirectory(tmp_path, "n1", REAL)
    directory.fence_own_files()
    directory.write_own(MARK, b"first")
    (tmp_path / ".acpfs/staging/n1").rmdir()
    directory.write_own(MARK, b"second")
    assert directory.read_own(MARK) == b"second"
    assert directory.taken_over_by == ""


@clause("S610")
def test_what_is_written_over_in_place_looks_for_claims_first(tmp_path: Path) -> None:
    """As a record where the storage is full: no call of that names the staging directory."""
    directory = BackingDirectory(tmp_path, "n1", REAL)
    directory.fence_own_files()
    directory.write_own(MARK, b"first\n")
    assert directory.overwrite_own(MARK, b"over")
    claimed(tmp_path)
    with pytest.raises(SupersededError):
        directory.overwrite_own(MARK, b"late")
    assert directory.read_own(MARK) == b"over \n"


@clause("S610")
@pytest.mark.parametrize("change", [withdraw, partial(put, content=b'{"token": "b"}')])
def test_a_mount_without_copies_takes_no_mark_away_from_a_holder_that_has_claimed(
    tmp_path: Path, change: Callable[[Lower, LowerPath], None]
) -> None:
    """It is mounted again with `copies = 0`, or with a spill directory, and stands still before its
    first commit.
    """
    directory = BackingDirectory(tmp_path, "n1", REAL)
    directory.write_own(MARK, HELD)
    claimed(tmp_path)
    with pytest.raises(SupersededError):
        change(directory, MARK)
    assert directory.read_own(MARK) == HELD


@clause("S610")
@pytest.mark.parametrize("change", [withdraw, partial(put, content=b'{"token": "b"}')])
def test_the_mark_of_a_disk_is_changed_as_ever(
    tmp_path: Path, change: Callable[[Lower, LowerPath], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = BackingDirectory(tmp_path, "n1", REAL)
    directory.write_own(MARK, b'{"token": "a", "spill": "/disk"}')
    monkeypatch.setattr(directory, "fence_own_files", lambda: pytest.fail("nobody adopts that"))
    change(directory, MARK)
    assert directory.read_own(MARK) in (WITHDRAWN, b'{"token": "b"}')
