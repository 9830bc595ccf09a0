"""The state database fails: calls wait, nothing is half done, the worker lives, and all goes on
when it can be written again.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.records import Attributes
from acpfs.filesystem.steps import Call, settled, wait
from acpfs.ram.state import LateError, Recording, StateDatabase
from acpfs.types import ROOT
from tests.filesystem.world import CALLER, World, run
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S202")
PLENTY_PAGES = 1 << 30
NAME = b"f" * 200


def fill(state: StateDatabase) -> None:
    """As a tmpfs that is full: SQLite's own limit gives the same error."""
    ((pages,),) = state.rows("PRAGMA page_count")
    state.rows(f"PRAGMA max_page_count={pages}")


def empty(state: StateDatabase) -> None:
    state._db.execute(f"PRAGMA max_page_count={PLENTY_PAGES}")


async def until_done_or_late(w: World, call: Call[Attributes]) -> None:
    """What is not done when the state is late waits for it, and nobody waits for that."""
    done = trio.Event()

    async def make() -> None:
        await w.fs.steps.drive(call)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make)
        with trio.fail_after(120):
            while not done.is_set() and w.state.recording is not Recording.LATE:
                with trio.move_on_after(0.01):
                    await done.wait()
        nursery.cancel_scope.cancel()


async def use_up(w: World, count: int = 400) -> None:
    """Make names until one is late."""
    for i in range(count):
        await until_done_or_late(w, w.fs.mkdir(ROOT, b"%s%d" % (NAME, i), 0o755, CALLER))
        if w.state.recording is Recording.LATE:
            return
    raise AssertionError("the state never became full")


@asynccontextmanager
async def under_way(w: World, name: bytes) -> AsyncIterator[list[int]]:
    """A file is made and written by somebody else; the list is filled when that is done."""
    made: list[int] = []
    before = w.state.changes

    async def write() -> None:
        made.append(await w.write(name, b"content"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        with trio.fail_after(60):
            while w.state.changes == before or w.state.recording is not Recording.LATE:  # noqa: ASYNC110
                # seen by looking only
                await trio.sleep(0.01)
        yield made
        nursery.cancel_scope.cancel()


def test_a_call_waits_until_its_change_is_recorded(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        before = await w.write(b"before", b"x" * 1000)
        with w.fs.lock:
            fill(w.state)
        await use_up(w)
        assert w.state.warnings()
        async with under_way(w, b"file") as made:
            assert made == []
            assert await w.read(before) == b"x" * 1000, "what changes nothing is answered"
            assert await w.names()
            with w.fs.lock:
                empty(w.state)
            with trio.fail_after(60):
                while not made:
                    with w.fs.lock:
                        w.fs.look_after_waiting()  # as every second
                    await trio.sleep(0.01)
        assert w.state.warnings() == []

    async def after_a_kill(w: World) -> None:
        assert {b"before", b"file"} <= set(await w.names())
        found = await w.do(w.fs.lookup(ROOT, b"file"))
        assert await w.read(found.ino) == b"content"
        await w.drained()
        assert (w.backing / "file").read_bytes() == b"content"

    run(tmp_path, scenario)
    run(tmp_path, after_a_kill)


def test_a_worker_that_dies_meanwhile_leaves_an_earlier_moment_as_a_whole(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"before", b"x")
        with w.fs.lock:
            fill(w.state)
        await use_up(w)
        async with under_way(w, b"file") as made:
            assert made == []

    async def after_a_kill(w: World) -> None:
        assert b"file" not in await w.names()
        assert b"before" in await w.names()
        await w.write(b"file", b"anew")
        await w.drained()
        assert (w.backing / "file").read_bytes() == b"anew"
        assert sorted(map(os.fsencode, os.listdir(w.backing))) == sorted(
            [*await w.names(), b".acpfs"]
        )

    run(tmp_path, scenario)
    run(tmp_path, after_a_kill)


def test_nothing_is_carried_out_that_a_next_worker_would_not_know_of(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"before", b"x")
        await w.drained()
        w.engine.hold(True)
        await w.write(b"second", b"y")
        with w.fs.lock:
            fill(w.state)
        await use_up(w)
        w.engine.hold(False)
        with trio.fail_after(60):
            while not any(entry.tries for entry in w.engine.statistics().queue):  # noqa: ASYNC110
                # seen by looking only
                await trio.sleep(0.01)
        assert not (w.backing / "second").exists()
        with w.fs.lock:
            empty(w.state)
        await w.drained()
        assert (w.backing / "second").read_bytes() == b"y"

    run(tmp_path, scenario)


def test_who_waits_for_it_can_be_killed(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        with w.fs.lock:
            fill(w.state)
        await use_up(w)
        call = w.fs.mkdir(ROOT, b"killed", 0o755, CALLER)
        future = w.fs.steps.step(call, None)
        while call not in w.fs.steps._withheld:
            await settled(future)
            future = w.fs.steps.step(call, future)
        assert future.cancel()
        with pytest.raises(StopIteration):
            w.fs.steps.step(call, future)
        with w.fs.lock:
            empty(w.state)

    run(tmp_path, scenario)


def test_who_would_go_on_to_wait_for_something_else_can_be_killed(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        never: Future[None] = Future()
        never.set_running_or_notify_cancel()
        told: list[str] = []

        async def call() -> None:
            w.state.change("INSERT OR REPLACE INTO counter VALUES (?, 1)", ("a test",))
            try:
                await wait(never)
            except InterruptedError:
                told.append("broken off")

        with w.fs.lock:
            fill(w.state)
        await use_up(w)
        running = call()
        future = w.fs.steps.step(running, None)
        assert future is not never
        assert future.cancel()
        with pytest.raises(StopIteration):
            w.fs.steps.step(running, future)
        assert told == ["broken off"]
        with w.fs.lock:
            empty(w.state)

    run(tmp_path, scenario)


def test_a_transaction_is_made_again_as_a_whole_and_in_order(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state", REAL)
    state.create("CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY, v BLOB);")
    state.change("INSERT INTO t VALUES (1, 'a')")
    assert state.commit()
    ended: list[str] = []
    fill(state)
    state.change("INSERT OR REPLACE INTO t VALUES (1, 'b')")
    state.change("INSERT INTO t VALUES (2, ?)", (b"x" * 100_000,))
    state.after_commit(lambda: ended.append("after"))
    assert not state.commit()
    with pytest.raises(LateError):
        state.must_commit()
    with pytest.raises(LateError):
        state.rows("SELECT * FROM t")
    state.change("UPDATE t SET v = 'c' WHERE k = 1")
    seen = sqlite3.connect(f"file:{tmp_path}/state?mode=ro&vfs=unix-none", uri=True)
    seen.execute("PRAGMA locking_mode=EXCLUSIVE")
    assert seen.execute("SELECT * FROM t").fetchall() == [(1, "a")], "an earlier moment, as a whole"
    seen.close()
    waiting = state.when_recorded()
    assert (ended, waiting.done()) == ([], False)
    empty(state)
    assert state.rows("SELECT k, length(v) FROM t") == [(1, 1), (2, 100_000)], (
        "a query sees what is late, and commits nothing"
    )
    assert (ended, waiting.done()) == ([], False)
    assert state.commit()
    assert (ended, waiting.done(), state.rows("SELECT v FROM t WHERE k = 1")) == (
        ["after"],
        True,
        [("c",)],
    )
    state.close()


def test_a_wrong_statement_is_a_bug_and_not_a_full_disk(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state", REAL)
    state.create("CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY);")
    state.change("INSERT INTO t VALUES (1)")
    with pytest.raises(sqlite3.IntegrityError):
        state.change("INSERT INTO t VALUES (1)")
    assert state.commit()
    state.close()


def test_a_worker_comes_to_serve_where_nothing_can_be_written(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state", REAL)
    ddl = "CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY, v BLOB);"
    state.create(ddl)
    state.commit()
    state.close()
    again = StateDatabase(tmp_path / "state", REAL)
    fill(again)
    again.change(
        "INSERT INTO t VALUES (1, ?)", (b"x" * 100_000,)
    )  # as a layer does that reads its rows
    again.create(ddl)
    assert not again.commit()
    empty(again)
    assert again.rows("SELECT k FROM t") == [(1,)]
    again.close()
