"""The state database: its transactions, and that damage is found before it is used."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from acpfs.errors import RefusedError
from acpfs.ram.state import StateDatabase, lost
from tests.rig.runtime import REAL


@pytest.mark.clause("S81")
def test_a_layer_that_changes_rows_as_it_reads_them_may_come_before_another_creates_its_tables(
    tmp_path: Path,
) -> None:
    """Found by the drill with the guard: the mount after a kill failed with "no transaction is
    active", and so did every later one.
    """
    state = StateDatabase(tmp_path / "state", REAL)
    state.create("CREATE TABLE IF NOT EXISTS first (value INTEGER);")
    state.change("INSERT INTO first VALUES (1)")
    state.create("CREATE TABLE IF NOT EXISTS second (value INTEGER);")
    state.commit()
    state.change("INSERT INTO second VALUES (2)")
    state.commit()
    state.close()
    again = StateDatabase(tmp_path / "state", REAL)
    assert (again.rows("SELECT value FROM first"), again.rows("SELECT value FROM second")) == (
        [(1,)],
        [(2,)],
    )
    again.close()


@pytest.mark.clause("S412")
@pytest.mark.parametrize("is_closed", [False, True])
def test_the_step_of_a_thread_that_comes_after_the_end_is_no_bug(
    tmp_path: Path, *, is_closed: bool
) -> None:
    """It ended a worker that could not begin to serve, with another reason than that."""
    bugs: list[BaseException] = []
    state = StateDatabase(tmp_path / "state", REAL, abandoned=bugs.append)
    state.create("CREATE TABLE IF NOT EXISTS first (value INTEGER);")
    if is_closed:
        state.close()

    def change() -> None:
        if not is_closed:
            raise sqlite3.ProgrammingError
        state.change("INSERT INTO first VALUES (1)")

    with pytest.raises(sqlite3.ProgrammingError), state.step():
        change()
    assert bool(bugs) is not is_closed
    if not is_closed:
        state.close()


def test_a_copy_that_cannot_be_made_is_an_error_and_not_a_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who changes the state without the lock could open a transaction between the commit and the
    copy; SQLite waits for its end.
    """
    state = StateDatabase(tmp_path / "state", REAL)
    state.create("CREATE TABLE IF NOT EXISTS first (value INTEGER);")
    state.change("INSERT INTO first VALUES (1)")
    with monkeypatch.context() as patched:
        patched.setattr(state, "commit", lambda: None)
        with pytest.raises(sqlite3.OperationalError, match="without the lock"):
            state.follow(lambda _statements: None)
    with closing(state.follow(lambda _statements: None)) as copy:
        assert copy.execute("SELECT value FROM first").fetchall() == [(1,)]
    state.close()


@pytest.mark.clause("S200")
def test_numbers_beyond_64_bits_come_back_as_they_were(tmp_path: Path) -> None:
    numbers = [(1 << 64) - 1, 10_413_792_000_123_456_789, -(1 << 63), 1 << 63, 5]
    state = StateDatabase(tmp_path / "state", REAL)
    state.create("CREATE TABLE IF NOT EXISTS some (at INTEGER PRIMARY KEY, value INTEGER);")
    state.change_many(
        "INSERT INTO some VALUES (?, ?)", [(n, value) for n, value in enumerate(numbers)]
    )
    for n, value in enumerate(numbers):
        state.change("INSERT INTO some VALUES (?, ?)", (100 + n, value))
    state.close()
    again = StateDatabase(tmp_path / "state", REAL)
    assert [
        int(value) for (value,) in again.rows("SELECT value FROM some ORDER BY at")
    ] == 2 * numbers
    again.close()


# -- what is left by a worker that was killed, and damaged then

COMMITS = 20
FRAME_BYTES = 24 + 1024


def killed(tmp_path: Path, commits: int = COMMITS) -> Path:
    """The files of a database that is in use, as they are at that moment."""
    (tmp_path / "in-use").mkdir()
    state = StateDatabase(tmp_path / "in-use/state.sqlite", REAL)
    state.create("CREATE TABLE t (number INTEGER PRIMARY KEY, text TEXT);")
    for number in range(commits):
        state.change("INSERT INTO t VALUES (?, ?)", (number, "x" * 900))
        state.commit()
    shutil.copytree(tmp_path / "in-use", tmp_path / "left")
    state.close()
    return tmp_path / "left/state.sqlite"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))


def log_of(path: Path) -> Path:
    return path.with_name("state.sqlite-wal")


@pytest.mark.clause("S197")
def test_what_a_killed_worker_left_is_whole(tmp_path: Path) -> None:
    path = killed(tmp_path)
    assert lost(path, has_bytes=True) == ""
    again = StateDatabase(path, REAL, check=True)
    assert again.rows("SELECT count(*) FROM t") == [(COMMITS,)]
    again.close()
    assert lost(path, has_bytes=True) == ""
    assert not log_of(path).exists()


@pytest.mark.clause("S197")
def test_a_worker_that_was_killed_before_its_first_change_left_nothing_damaged(
    tmp_path: Path,
) -> None:
    """What it opened had been closed in order, or was made from a mirror: there is no write-ahead
    log yet.
    """
    path = killed(tmp_path)
    StateDatabase(path, REAL).close()
    with closing(StateDatabase(path, REAL)):
        shutil.copytree(path.parent, tmp_path / "again")
    left = tmp_path / "again/state.sqlite"
    assert lost(left, has_bytes=True) == ""
    log_of(left).unlink()
    assert "is gone" in lost(left, has_bytes=True)


@pytest.mark.clause("S197")
@pytest.mark.parametrize("gone", ["state.sqlite", "state.sqlite-wal"])
def test_a_file_of_the_state_that_is_gone_is_noticed(tmp_path: Path, gone: str) -> None:
    path = killed(tmp_path)
    path.with_name(gone).unlink()
    assert "is gone" in lost(path, has_bytes=False)
    path.with_name(gone).touch()
    assert "is gone" in lost(path, has_bytes=False)


@pytest.mark.clause("S197")
def test_tier_files_without_any_state_are_noticed(tmp_path: Path) -> None:
    assert lost(tmp_path / "state.sqlite", has_bytes=True) == "its database is gone"
    assert lost(tmp_path / "state.sqlite", has_bytes=False) == ""


@pytest.mark.clause("S197")
@pytest.mark.parametrize(
    "at",
    [
        3,
        17,
        32 + 24 + 100,
        32 + 10 * FRAME_BYTES + 200,
        32 + 10 * FRAME_BYTES + 20,
        32 + 10 * FRAME_BYTES + 9,
    ],
)
def test_a_bit_that_flipped_in_the_write_ahead_log_is_noticed(tmp_path: Path, at: int) -> None:
    path = killed(tmp_path)
    flip(log_of(path), at)
    assert "is damaged" in lost(path, has_bytes=True)


@pytest.mark.clause("S197")
def test_a_write_ahead_log_of_garbage_is_noticed(tmp_path: Path) -> None:
    path = killed(tmp_path)
    log_of(path).write_bytes(os.urandom(5000))
    assert "is damaged" in lost(path, has_bytes=True)


@pytest.mark.clause("S197")
@pytest.mark.parametrize("cut", [0, 1, 500, FRAME_BYTES, FRAME_BYTES + 7])
def test_a_torn_end_is_no_damage(tmp_path: Path, cut: int) -> None:
    """As a kill leaves it: in the middle of a frame."""
    path = killed(tmp_path)
    log = log_of(path)
    os.truncate(log, log.stat().st_size - cut)
    assert lost(path, has_bytes=True) == ""


@pytest.mark.clause("S197")
@pytest.mark.parametrize("at", [40, 24 + 100])
def test_frames_of_a_transaction_that_was_cut_off_are_no_damage(tmp_path: Path, at: int) -> None:
    """The next worker goes on over them: what is left of them fits to nothing.

    A torn last one has a commit mark.
    """
    path = killed(tmp_path)
    frames = (log_of(path).stat().st_size - 32) // FRAME_BYTES
    flip(log_of(path), 32 + (frames - 1) * FRAME_BYTES + at)
    flip(log_of(path), 32 + (frames - 2) * FRAME_BYTES + 24 + 7)
    assert lost(path, has_bytes=True) == ""


@pytest.mark.clause("S197")
@pytest.mark.parametrize("at", [0, 2000])
def test_a_damaged_database_is_refused_in_words(tmp_path: Path, at: int) -> None:
    path = killed(tmp_path)
    StateDatabase(path, REAL).close()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 600)
    with pytest.raises(RefusedError, match="is damaged"):
        StateDatabase(path, REAL, check=True)
