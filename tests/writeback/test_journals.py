"""A mirror's journal as it lies on a disk: what is read of it is what was written, up to where a
loss of power ended it, and nothing that was damaged is taken for less.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from acpfs.ram.spill_directory import SpillDirectory
from acpfs.ram.state import Statement
from acpfs.writeback.copies import journal_frames as frames
from acpfs.writeback.copies import on_disk
from acpfs.writeback.copies.on_disk import DiskPlace
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S152")
PUT = "INSERT OR REPLACE INTO item VALUES (?, ?)"
TAKE = "DELETE FROM item WHERE name = ?"
WRITTEN = (
    "ac504a0a290000001461746e6a916061487b22746f6b656e223a202274222c202273656564223a20"
    "2273222c2022666f726d6174223a20317dac504a0a8b0000003bad49ee92ae732054000000002900"
    "0000494e53455254204f52205245504c41434520494e544f206974656d2056414c55455320283f2c"
    "203f29ffffffff0200000062040000006e616d65690700000000000000010000001f00000044454c"
    "4554452046524f4d206974656d205748455245206e616d65203d203f020000000100000062010000"
    "006101000000620100000062ac504a0a32000000544a7a88a19075c15400000000ffffffff020000"
    "006201000000ff6e00000000ffffffff0200000073040000007465787472000000000000e03f"
)


@pytest.fixture
def place(tmp_path: Path) -> DiskPlace:
    directory = SpillDirectory(tmp_path / "spill", REAL.chance)
    directory.prepare()
    return DiskPlace(directory)


@pytest.fixture
def state() -> Iterator[sqlite3.Connection]:
    """What is journaled."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.execute("CREATE TABLE item (name BLOB PRIMARY KEY, value)")
        db.execute("PRAGMA user_version=3")
        db.execute(PUT, (b"at first", 1))
        yield db


def copy_of(state: sqlite3.Connection) -> sqlite3.Connection:
    copy = sqlite3.connect(":memory:")
    state.backup(copy)
    return copy


def rows(db: sqlite3.Connection) -> dict[bytes, Any]:
    return {bytes(name): value for name, value in db.execute("SELECT name, value FROM item")}


def found(tmp_path: Path, token: str = "token") -> dict[bytes, Any]:
    """What the next mount reads."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        on_disk.read_into(tmp_path / "spill", token, db)
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
        return rows(db)


def carried_out(state: sqlite3.Connection, statements: list[Statement]) -> list[Statement]:
    for sql, values, is_many in statements:
        if is_many:
            state.executemany(sql, values)
        else:
            state.execute(sql, values)
    return statements


def value(chance: random.Random) -> Any:
    return chance.choice(
        (
            None,
            chance.randrange(-(1 << 63), 1 << 63),
            chance.random(),
            "text" * chance.randrange(5),
            chance.randbytes(chance.randrange(300)),
        )
    )


def transaction(chance: random.Random) -> list[Statement]:
    statements = list[Statement]()
    for _statement in range(chance.randrange(1, 5)):
        name = b"%d" % chance.randrange(20)
        if chance.random() < 0.3:
            statements.append((TAKE, (name,), False))
        elif chance.random() < 0.5:
            statements.append((PUT, (name, value(chance)), False))
        else:
            many = [(b"%d" % number, value(chance)) for number in range(chance.randrange(4))]
            statements.append((PUT, many, True))
    return statements


def test_a_journal_that_is_cut_anywhere_has_the_transactions_before(
    place: DiskPlace, state: sqlite3.Connection, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    journal = place.begin("token", copy_of(state))
    log = tmp_path / "spill" / on_disk.log_name("token")
    was = {log.stat().st_size: rows(state)}
    for _transaction in range(8):
        journal.append([carried_out(state, transaction(chance))])
        was[log.stat().st_size] = rows(state)
    journal.append([carried_out(state, transaction(chance)) for _transaction in range(3)])
    journal.close()
    assert found(tmp_path) == rows(state)
    whole = log.read_bytes()
    ends = [*was, *(chance.randrange(min(was), max(was)) for _cut in range(20))]
    for end in ends:
        # a loss of power may also leave room that was never written: zeros, as the bytes of a
        # transaction's end may be that were cut off
        zeros = len(whole) - end - len(whole[end:].lstrip(b"\0"))
        for left, reaches in ((whole[:end], end), (whole[:end] + bytes(5000), end + zeros)):
            log.write_bytes(left)
            assert found(tmp_path) == was[max(at for at in was if at <= reaches)]


@pytest.mark.parametrize("where", ["header", "middle", "seed"])
def test_a_journal_that_is_damaged_is_not_taken_for_a_shorter_one(
    place: DiskPlace, state: sqlite3.Connection, tmp_path: Path, where: str
) -> None:
    """It would carry out again what came after it."""
    journal = place.begin("token", copy_of(state))
    log = tmp_path / "spill" / on_disk.log_name("token")
    at = log.stat().st_size
    for number in range(3):
        journal.append([[(PUT, (b"%d" % number, number), False)]])
    journal.close()
    path = tmp_path / "spill" / on_disk.seed_name("token") if where == "seed" else log
    data = bytearray(path.read_bytes())
    position = {"header": 20, "middle": at + 20, "seed": len(data) // 2}[where]
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(frames.DamagedFrameError):
        found(tmp_path)


@pytest.mark.parametrize(
    "sql", ["DROP TABLE item", "PRAGMA user_version=9", "ATTACH '/etc/x' AS other", "COMMIT"]
)
def test_a_journal_changes_rows_and_does_nothing_else(
    place: DiskPlace, state: sqlite3.Connection, tmp_path: Path, sql: str
) -> None:
    journal = place.begin("token", copy_of(state))
    journal.append([[(sql, (), False)]])
    journal.close()
    with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
        found(tmp_path)


def test_numbers_beyond_what_sqlite_takes_are_the_same_in_both(
    place: DiskPlace, state: sqlite3.Connection, tmp_path: Path
) -> None:
    journal = place.begin("token", copy_of(state))
    journal.append([[(PUT, (b"large", 1 << 70), False), (PUT, [(b"many", -(1 << 65))], True)]])
    journal.close()
    assert found(tmp_path) == {
        b"at first": 1,
        b"large": b"%d" % (1 << 70),
        b"many": b"-%d" % (1 << 65),
    }


def test_what_the_state_does_not_have_cannot_be_journaled() -> None:
    with pytest.raises(TypeError, match="a list in the state"):
        frames.Encoder().transaction([(PUT, (b"name", []), False)])


def test_a_journal_of_today_is_read_by_later_versions() -> None:
    """These bytes do not change with the code."""
    written = bytes.fromhex(WRITTEN)
    words, transactions = frames.read(written)
    assert (words, list(transactions)) == (
        {"token": "t", "seed": "s", "format": 1},
        [
            [(PUT, [b"name", 7], False), (TAKE, [[b"a"], [b"b"]], True)],
            [(PUT, [b"\xff", None], False), (PUT, ["text", 0.5], False)],
        ],
    )
    encoder = frames.Encoder()
    again = frames.header({"token": "t", "seed": "s"})
    again += encoder.transaction([(PUT, (b"name", 7), False), (TAKE, [(b"a",), (b"b",)], True)])
    again += encoder.transaction([(PUT, (b"\xff", None), False), (PUT, ("text", 0.5), False)])
    assert again == written


@pytest.mark.clause("S526")
def test_a_newer_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(frames, "FORMAT", frames.FORMAT + 1)
        newer = frames.header({})
    with pytest.raises(frames.NewerJournalError, match="has version 2, this acpfs knows 1: mount"):
        frames.read(newer)


def test_all_files_of_a_token_go(
    place: DiskPlace, state: sqlite3.Connection, tmp_path: Path
) -> None:
    for token in ("one", "two"):
        place.begin(token, copy_of(state)).close()
    for name in ("mirror-old.sqlite", "mirror-old.sqlite-wal", "1-copy"):
        (tmp_path / "spill" / name).touch()
    assert place.tokens() == ["old", "one", "two"]
    for token in ("old", "one"):
        place.remove(token)
    assert sorted(path.name for path in (tmp_path / "spill").iterdir()) == [
        "1-copy",
        "mirror-two.log",
        "mirror-two.seed",
    ]


@pytest.mark.parametrize("gone", ["mirror-token.seed", "mirror-token.log", ""])
def test_what_is_missing_of_a_journal_is_named(
    place: DiskPlace, state: sqlite3.Connection, tmp_path: Path, gone: str
) -> None:
    place.begin("token", copy_of(state)).close()
    if gone:
        (tmp_path / "spill" / gone).unlink()
    missing = on_disk.missing(tmp_path / "spill", "token")
    assert missing == (tmp_path / "spill" / gone if gone else None)
    (tmp_path / "spill" / "mirror-token.sqlite").touch()
    assert on_disk.missing(tmp_path / "spill", "token") is None
