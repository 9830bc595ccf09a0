"""A step is whole or not at all, also where it ends by a bug: what a next worker finds is what
there was before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.config import WarmReads
from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT
from tests.filesystem.world import CALLER, World, world
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S412")


class BugError(Exception):
    """What no call is told on purpose."""


def bug(*_: object, **__: object) -> None:
    raise BugError


async def mkdir(w: World) -> None:
    await w.do(w.fs.mkdir(ROOT, b"new", 0o755, CALLER))


async def rename(w: World) -> None:
    await w.do(w.fs.rename(ROOT, b"f", ROOT, b"new", 0))


async def close(w: World) -> None:
    opened, _attributes = await w.create(b"new")
    await w.do(w.fs.write(opened.handle, 0, b"bytes"))
    await w.close(opened)


async def forget(w: World) -> None:
    """Under the lock, by no coroutine."""
    ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
    await w.do(w.fs.unlink(ROOT, b"f"))
    w.fs.forget([(ino, 2)])


def late(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The call has done its work when the bug comes."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(owner, name)

        def wrong(*arguments: Any, **named: Any) -> None:
            right(*arguments, **named)
            raise BugError

        monkeypatch.setattr(owner, name, wrong)

    return patch


@pytest.mark.parametrize("session", ["", "s"], ids=["a new mount", "a takeover"])
@pytest.mark.parametrize(
    ("call", "where"),
    [
        (mkdir, lambda w: late(w.log, "append")),
        (mkdir, lambda w: late(w.inner.names, "_touch")),
        (rename, lambda w: late(w.log, "append")),
        (close, lambda w: late(w.inner.changes, "freeze")),
        (forget, lambda w: late(w.inner.lower_view, "reap")),
    ],
    ids=["mkdir logged", "mkdir done", "rename", "close", "forget"],
)
def test_what_a_call_did_before_a_bug_is_not_found_by_the_next_worker(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[World], Any],
    where: Callable[[World], Callable[[pytest.MonkeyPatch], None]],
    session: str,
) -> None:
    async def main() -> None:
        async with world(tmp_path, session=session) as w:
            await w.write(b"f", b"bytes")
            with w.fs.lock:
                before = rows(w.state)
            with monkeypatch.context() as patch:
                where(w)(patch)
                with pytest.raises(BugError):
                    await call(w)
            assert w.state.is_abandoned
            with w.fs.lock:
                found = w.state._db.execute("SELECT count(*) FROM op").fetchone()[0]
                assert call in (close, forget) or found == before["op"]
                assert not w.state.commit(), "nor does anything that is done later"
        async with world(tmp_path, session=session, hold=False) as w:
            names = await w.names()
            assert b"f" in names or call is forget
            if call is not close:
                assert b"new" not in names
            await w.drained()

    trio.run(main)


def rows(state: StateDatabase) -> dict[str, int]:
    """How many each table has."""
    tables = [name for (name,) in state.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: state.rows(f"SELECT count(*) FROM {name}")[0][0] for name in tables}


def test_a_bug_that_changed_nothing_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may find one; that ends no worker."""

    async def main() -> None:
        async with world(tmp_path) as w:
            ino = await w.write(b"f", b"bytes")
            with monkeypatch.context() as patch:
                patch.setattr(w.inner.attributes, "of", bug)
                with pytest.raises(BugError):
                    await w.do(w.fs.getattr(ino))
            assert not w.state.is_abandoned
            assert (await w.do(w.fs.getattr(ino))).size == 5

    trio.run(main)


def test_whoever_owns_the_process_is_told_at_once(tmp_path: Path) -> None:
    told: list[BaseException] = []
    state = StateDatabase(tmp_path / "state", REAL, abandoned=told.append)
    state.create("CREATE TABLE t (a INTEGER)")

    def half() -> None:
        with state.step():
            state.change("INSERT INTO t VALUES (1)")
            state.after_commit(lambda: told.append(KeyError()))
            bug()

    with pytest.raises(BugError):
        half()
    assert [type(error) for error in told] == [BugError]
    state.change("INSERT INTO t VALUES (2)")
    state.close()
    assert StateDatabase(tmp_path / "state", REAL).rows("SELECT a FROM t") == []


def test_an_answer_ends_a_step_as_a_whole(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state", REAL)
    state.create("CREATE TABLE t (a INTEGER)")

    def answered() -> None:
        with state.step():
            state.change("INSERT INTO t VALUES (1)")
            raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        answered()
    state.close()
    assert StateDatabase(tmp_path / "state", REAL).rows("SELECT a FROM t") == [(1,)]


def test_what_joins_the_next_step_is_none_of_its_changes(tmp_path: Path) -> None:
    """A call that changes nothing, and ends by a bug, is an answer still."""
    state = StateDatabase(tmp_path / "state", REAL)
    state.create("CREATE TABLE t (a INTEGER)")
    with state.joining_step():
        state.change("INSERT INTO t VALUES (1)")
    seen = [(state.has_changes, state.is_changed_by_step)]
    state.change("INSERT INTO t VALUES (2)")
    seen.append((state.has_changes, state.is_changed_by_step))
    state.commit()
    seen.append((state.has_changes, state.is_changed_by_step))
    assert seen == [(True, False), (True, True), (False, False)]

    def half() -> None:
        with state.joining_step():
            state.change("INSERT INTO t VALUES (3)")
            bug()

    with pytest.raises(BugError):
        half()
    assert state.is_abandoned
    state.close()
    assert StateDatabase(tmp_path / "state", REAL).rows("SELECT a FROM t") == [(1,), (2,)]


def test_whoever_must_have_it_recorded_has_what_joined_recorded_too(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state", REAL)
    state.create("CREATE TABLE t (a INTEGER)")
    with state.joining_step():
        state.change("INSERT INTO t VALUES (1)")
    state.must_commit()
    recorded = StateDatabase(tmp_path / "state", REAL)
    assert recorded.rows("SELECT a FROM t") == [(1,)]
    assert not state.unrecorded
    state.close()


def test_who_follows_learns_of_what_joined_with_the_next_step(tmp_path: Path) -> None:
    """Until then it is not recorded, for whoever tells people what is copied."""
    state = StateDatabase(tmp_path / "state", REAL)
    state.create("CREATE TABLE t (a INTEGER)")
    told: list[int] = []
    state.follow(lambda statements: told.append(len(statements))).close()
    with state.step():
        state.change("INSERT INTO t VALUES (1)")
    with state.joining_step():
        state.change("INSERT INTO t VALUES (2)")
    assert (told, state.changes, state.recorded_changes) == ([1], 2, 1)
    with state.step():
        state.change("INSERT INTO t VALUES (3)")
    assert (told, state.changes, state.recorded_changes) == ([1, 2], 3, 3)
    state.close()


def test_rows_that_cannot_be_written_are_a_bug(tmp_path: Path) -> None:
    """What brings them at the end of a step is part of it."""
    state = StateDatabase(tmp_path / "state", REAL)
    changed = [1]
    state.create("CREATE TABLE t (a INTEGER)")
    state.before_commit(changed, bug)
    with pytest.raises(BugError), state.step():
        state.change("INSERT INTO t VALUES (1)")
    assert state.is_abandoned
    state.close()
    assert StateDatabase(tmp_path / "state", REAL).rows("SELECT a FROM t") == []


def _behind(file: Path, within: Path) -> Path:
    """A new directory whose inode number is higher; a file system may give lower ones anew."""
    for number in range(1000):
        directory = within / f"d{number}"
        directory.mkdir()
        if directory.stat().st_ino > file.stat().st_ino:
            return directory
    raise AssertionError("no higher number in 1000 directories")


def test_a_start_drops_directories_that_were_kept_for_a_file(tmp_path: Path) -> None:
    """The file was open in an earlier mount; its directory is looked at behind it, and has gone
    with it by then.
    """
    (tmp_path / "backing").mkdir()
    file = tmp_path / "f"
    file.write_bytes(b"bytes")
    directory = _behind(file, tmp_path)
    file.rename(directory / "f")
    directory.rename(tmp_path / "backing/d")

    async def main() -> None:
        async with world(tmp_path, warm_reads=WarmReads.OFF) as w:
            directory = (await w.do(w.fs.lookup(ROOT, b"d"))).ino
            ino = (await w.do(w.fs.lookup(directory, b"f"))).ino
            assert ino < directory, "it is looked at first"
            await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
        async with world(tmp_path, warm_reads=WarmReads.OFF) as w:
            assert not [node for node in w.inner.table if node.ino != ROOT]
            assert await w.names() == [b"d"]

    trio.run(main)
