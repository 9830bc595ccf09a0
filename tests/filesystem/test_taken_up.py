"""A half that outgrew RAM is taken up by somebody who is killed himself: what the thread still does
takes nothing away.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem.closing import Closing
from acpfs.filesystem.records import AttributeChange, Lane
from acpfs.filesystem.steps import Call
from acpfs.types import ROOT
from tests.filesystem.held_call import HeldCall
from tests.filesystem.test_hold import BUDGET, Kernel, run
from tests.filesystem.test_outgrown import MIB
from tests.filesystem.test_slow_backing import until
from tests.filesystem.test_waiting_for_the_drain import KILLED, killed
from tests.filesystem.world import CALLER, World, is_idle, world

pytestmark = pytest.mark.clause("S181", "S479")


def closing(pid: int) -> Closing:
    return Closing.KILL if pid == KILLED else Closing.CALL


async def until_held(w: World, call: Call[Any], held: HeldCall) -> None:
    """Make a call, until a thread of it stands still."""
    done = None
    while not held.began.is_set():
        done = w.fs.steps.step(call, done)
        await until(partial(_goes_on, done, held))


def _goes_on(done: Future[Any], held: HeldCall) -> bool:
    return done.done() or held.began.is_set()


def break_off(w: World, call: Call[Any]) -> None:
    """As a transport does where a caller dies while a thread is at work for it."""
    told: Future[None] = Future()
    told.cancel()
    with pytest.raises(InterruptedError):
        w.fs.steps.step(call, told)


async def until_idle(w: World) -> None:
    """Threads announce nothing here."""
    await until(lambda: all(is_idle(pool) for pool in w.calls.all()))


@pytest.mark.parametrize(("size", "synced"), [(0, True), (10 * MIB, False), (10 * MIB, True)])
def test_what_a_killed_process_would_have_cut_off_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, size: int, synced: bool
) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        ino, expected = await killed(w, kernel, synced=synced)
        held = HeldCall(os.ftruncate)
        monkeypatch.setattr("acpfs.filesystem.content.outgrown.os.ftruncate", held)
        cutting = w.fs.setattr(ino, AttributeChange(size=size), None, CALLER)
        await until_held(w, cutting, held)
        break_off(w, cutting)
        assert w.inner.table[ino].body.busy is not None, "the thread is at work still"
        held.go_on.set()
        await until_idle(w)
        monkeypatch.undo()
        assert w.inner.table[ino].body.busy is None
        assert await w.read(ino, 128 * MIB) == expected
        with w.fs.lock:
            assert w.inner.interrupted.store(b"") == 1
        await w.drained()
        assert (w.backing / "big").read_bytes() == expected

    run(tmp_path, scenario, closing=closing)


def test_who_comes_next_waits_for_the_thread_of_who_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        ino, expected = await killed(w, kernel, synced=True)
        held = HeldCall(os.ftruncate)
        monkeypatch.setattr("acpfs.filesystem.content.outgrown.os.ftruncate", held)
        first = w.fs.setattr(ino, AttributeChange(size=10 * MIB), None, CALLER)
        await until_held(w, first, held)
        monkeypatch.undo()
        break_off(w, first)
        second = w.fs.setattr(ino, AttributeChange(size=50 * MIB), None, CALLER)
        waits_for = w.fs.steps.step(second, None)
        assert waits_for is w.inner.table[ino].body.busy
        second.close()
        held.go_on.set()
        await w.do(w.fs.setattr(ino, AttributeChange(size=50 * MIB), None, CALLER))
        await w.drained()
        assert (w.backing / "big").read_bytes() == expected[: 50 * MIB]

    run(tmp_path, scenario, closing=closing)


def test_what_is_decided_meanwhile_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`retry` stores it as it is, and the truncation, which goes on then, comes after that."""

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        ino, expected = await killed(w, kernel, synced=True)
        held = HeldCall(os.ftruncate)
        monkeypatch.setattr("acpfs.filesystem.content.outgrown.os.ftruncate", held)
        cutting = w.fs.setattr(ino, AttributeChange(size=10 * MIB), None, CALLER)
        await until_held(w, cutting, held)
        monkeypatch.undo()
        break_off(w, cutting)
        with w.fs.lock:
            assert w.inner.interrupted.store(b"") == 1
        held.go_on.set()
        await w.drained()
        assert (w.backing / "big").read_bytes() == expected

    run(tmp_path, scenario, closing=closing)


def test_what_is_cut_off_does_not_come_back_when_it_grows_again(tmp_path: Path) -> None:
    """Also not by the next worker: the staging file is cut before its first change."""

    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET, unknown_bytes=0, closing=closing) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            ino, expected = await killed(w, Kernel(w), synced=True)
            opened = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
            await w.do(w.fs.setattr(ino, AttributeChange(size=10 * MIB), opened.handle, CALLER))
            await w.do(w.fs.setattr(ino, AttributeChange(size=60 * MIB), opened.handle, CALLER))
            whole = expected[: 10 * MIB] + bytes(50 * MIB)
            assert await w.do(w.fs.read(opened.handle, 0, 128 * MIB)) == whole
            await w.close(opened)
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            found = await w.do(w.fs.lookup(ROOT, b"big"))
            assert await w.read(found.ino, 128 * MIB) == whole
            await w.drained()
            assert (w.backing / "big").read_bytes() == whole

    trio.run(main)


def test_a_worker_that_ends_before_it_is_recorded_has_cut_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET, unknown_bytes=0, closing=closing) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            ino, expected = await killed(w, Kernel(w), synced=False)
            held = HeldCall(lambda *_arguments: None)
            complete = w.inner.outgrown._complete
            monkeypatch.setattr(
                w.inner.outgrown, "_complete", lambda *arguments: (complete(*arguments), held())
            )
            cutting = w.fs.setattr(ino, AttributeChange(size=10 * MIB), None, CALLER)
            await until_held(w, cutting, held)
            break_off(w, cutting)
            held.go_on.set()
            await until_idle(w)
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            found = await w.do(w.fs.lookup(ROOT, b"big"))
            assert await w.read(found.ino, 128 * MIB) == expected

    trio.run(main)
