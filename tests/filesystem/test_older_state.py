"""A state database that an older acpfs left: what its rows say of files, and when it is changed."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from acpfs.filesystem.content.body import OUTGROWN_PIECE_BYTES as PIECE
from acpfs.filesystem.content.body import SpillCopy, Staging, Writing
from acpfs.filesystem.content.runs import Runs
from acpfs.filesystem.missing import Missing
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.salvage import salvage
from acpfs.mounting import tier_salvage
from acpfs.ram.state import STATE_VERSION, StateDatabase
from acpfs.ram.tier import Tier
from acpfs.types import NO_TIER, ROOT, VersionId
from acpfs.writeback.copies.on_disk import old_name, read_into
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from tests.rig.runtime import REAL

OLDER = {
    number: Path(__file__).with_name(f"state_v{number}.sql") for number in range(1, STATE_VERSION)
}
"""Each written by the code of that version, one file for each place where bytes can be; `op` and
`version` beside them.

That of version 2 is the other one, brought up by the code before `listing` was one value, which
then kept a listing of the root.
"""
TIER_FILES = 5


@pytest.fixture(params=OLDER, ids=lambda number: f"version {number}")
def version(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def tier_directory(tmp_path: Path, version: int) -> Path:
    with contextlib.closing(sqlite3.connect(tmp_path / "state.sqlite")) as db:
        db.executescript(OLDER[version].read_text())
    (tmp_path / "data").mkdir()
    for number in range(1, TIER_FILES + 1):
        (tmp_path / "data" / str(number)).write_bytes(b"bytes")
    return tmp_path


def layers(state: StateDatabase, directory: Path) -> tuple[NodeTable, OperationLog]:
    log = OperationLog(state, REAL.clock)
    tier = Tier(directory, 1 << 30, REAL)
    table = NodeTable(state, log, LowerTree(state), REAL.clock)
    Missing(table, log, tier)
    tier.close()
    return table, log


def check(table: NodeTable, log: OperationLog) -> None:
    """What was written into each of `OLDER`."""
    nodes: dict[bytes, Node] = {
        name: table[child.ino] for name, child in table[ROOT].dir.children.items()
    }
    bodies = {name: node.body for name, node in nodes.items()}
    in_ram, spilled, outgrown, overflowed = (
        bodies[name] for name in (b"in-ram", b"spilled", b"outgrown", b"overflowed")
    )
    assert (in_ram.tier, in_ram.rest, in_ram.modified) == (1, None, True)
    assert (in_ram.writing, in_ram.last_writing) == (Writing.WHOLE, Writing.WHOLE)
    assert (spilled.tier, spilled.rest, spilled.modified) == (
        NO_TIER,
        SpillCopy(VersionId(1)),
        False,
    )
    assert (outgrown.tier, outgrown.rest, outgrown.is_outgrown) == (
        2,
        Staging("overflowed-0123456789abcdef"),
        True,
    )
    assert outgrown.here.gaps() == Runs(((2 * PIECE, 5 * PIECE), (9 * PIECE, 10 * PIECE)))
    assert (outgrown.modified, outgrown.failed, outgrown.failed_at) == (True, 5, 3 << 40)
    assert (overflowed.tier, overflowed.rest) == (NO_TIER, Staging("overflowed-fedcba9876543210"))
    assert (bodies[b"interrupted"].modified, bodies[b"interrupted"].interrupted) == (True, True)
    assert (bodies[b"clean"].tier, bodies[b"clean"].rest, bodies[b"clean"].modified) == (
        5,
        None,
        False,
    )
    left = bodies[b"head-left"]
    assert (left.tier, left.here, left.is_cold) == (4, Runs.first(56 << 20), True)
    assert [name for name, body in bodies.items() if body.wrong()] == []
    versions = {op.name: op.version for op in log if op.version is not None}
    places = {
        name: (version.tier_id, version.spilled, version.staging_name)
        for name, version in versions.items()
    }
    expected = {
        b"spilled": (NO_TIER, True, ""),
        b"overflowed": (NO_TIER, False, overflowed.staging),
        b"clean": (5, False, ""),
    }
    assert places == expected


def version_of(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_the_state_of_an_older_version_says_what_it_said(tier_directory: Path) -> None:
    path = tier_directory / "state.sqlite"
    for _ in range(2):  # first as it was left, then as it was brought up
        state = StateDatabase(path, REAL, check=True)
        check(*layers(state, tier_directory))
        state.accept()
        state.close()
        assert version_of(path) == STATE_VERSION


def test_a_worker_that_does_not_come_to_serve_leaves_the_state_to_the_older_code(
    tier_directory: Path, version: int
) -> None:
    path = tier_directory / "state.sqlite"
    state = StateDatabase(path, REAL)
    with contextlib.closing(sqlite3.connect(":memory:")) as before:
        before.executescript(OLDER[version].read_text())
        tables = [
            str(name)
            for (name,) in before.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        table, log = layers(state, tier_directory)
        done: list[None] = []
        state.after_commit(lambda: done.append(None))
        table.changed(table[ROOT])
        assert state.commit()
        assert not done, "a tier file would go that the older code still needs"
        state._db.close()  # killed: what is not committed is not there
        del log
        with contextlib.closing(sqlite3.connect(path)) as after:
            assert after.execute("PRAGMA user_version").fetchone() == (version,)
            for name in tables:
                assert (
                    after.execute(f"SELECT * FROM {name}").fetchall()
                    == before.execute(f"SELECT * FROM {name}").fetchall()
                )
    state = StateDatabase(path, REAL)  # and so may the newer one, a second time
    check(*layers(state, tier_directory))
    state.accept()
    state.close()


def test_salvage_reads_a_tier_of_an_older_version(
    tier_directory: Path, version: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    saved = tier_salvage.salvage(tier_directory, tmp_path_factory.mktemp("target"))
    targets = {one.number: one.target for one in saved}
    assert targets == {
        1: "files/in-ram.being-written",
        2: "files/outgrown.being-written",
        3: "files/interrupted.being-written",
        5: "files/clean",
    }
    assert version_of(tier_directory / "state.sqlite") == version


def test_a_journal_of_an_older_version_becomes_a_state(
    tier_directory: Path, tmp_path: Path
) -> None:
    """The mirror's journal is the state once more; one that a reboot ended is of the code of
    then.
    """
    journal = tmp_path / old_name("older")
    target = tmp_path / "after" / "state.sqlite"
    target.parent.mkdir()
    shutil.copy(tier_directory / "state.sqlite", journal)
    with contextlib.closing(sqlite3.connect(journal)) as db:
        for ddl in (
            "mark (ino INTEGER)",
            "mirror_seed (token TEXT)",
            "place (ino INTEGER, parent INTEGER, name BLOB)",
        ):
            db.execute(f"CREATE TABLE IF NOT EXISTS {ddl}")
        db.execute(
            "CREATE TABLE spilled (vid INTEGER PRIMARY KEY, name TEXT NOT NULL, size INTEGER NOT "
            "NULL, digest TEXT NOT NULL)"
        )
        db.execute("INSERT INTO spilled VALUES (1, 'copy', 3145728, '')")
        db.commit()
    found = salvage(partial(read_into, tmp_path, "older"), journal, target, lambda _name: 3 << 20)
    assert (found.operations, found.lost) == (1, 2)
    assert version_of(target) == STATE_VERSION
    state = StateDatabase(target, REAL)
    (row,) = state.rows("SELECT spilled, tier_id, staging FROM node WHERE spilled > 0")
    assert row == (1, NO_TIER, "")
    state.close()
