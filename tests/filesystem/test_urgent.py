"""The reserve: the last part of the budget, which only files below urgent paths get."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from acpfs.config import WhenFull
from acpfs.errors import RefusedError
from acpfs.filesystem import urgent as urgent_module
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.filesystem.urgent import URGENT_PATHS_MAX, URGENT_S_MAX
from acpfs.types import ROOT, Ino
from tests.filesystem.test_hold import Kernel, tick
from tests.filesystem.test_room import Call
from tests.filesystem.world import CALLER, World
from tests.filesystem.world import run as in_world
from tests.rig.runtime import REAL, clock_of

clause = pytest.mark.clause
MIB = 1 << 20
BUDGET = 8 * MIB
RESERVE = 2 * MIB


def run(base: Path, scenario: Callable[[World], Awaitable[None]], **changes: Any) -> None:
    in_world(base, scenario, **{"budget_bytes": BUDGET, "reserve": RESERVE, **changes})


async def directory(w: World, name: bytes, *, urgent: bool = False) -> Ino:
    made = await w.do(w.fs.mkdir(ROOT, name, 0o755, CALLER))
    if urgent:
        declare(w, name)
    return made.ino


def declare(w: World, path: bytes, seconds: float = URGENT_S_MAX) -> None:
    with w.fs.lock:
        w.inner.urgent.declare(path, seconds, 0)
        w.state.commit()


async def opened(w: World, parent: Ino, name: bytes) -> OpenFile:
    made, _attributes = await w.do(w.fs.create(parent, name, 0o644, os.O_WRONLY, CALLER))
    return made


def block(count: int = 1) -> bytes:
    return b"b" * count * MIB


async def fill(w: World) -> None:
    """All but the reserve is full of what the engine, which is held, does not drain."""
    await w.write(b"before", block(6))
    assert w.tier.free_bytes() == 0


def is_waiting(call: Call) -> bool:
    return call.result is None


@clause("S279")
def test_the_reserve_is_for_urgent_files_alone(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await fill(w)
        gasp = await directory(w, b"gasp", urgent=True)
        ordinary = Call(w, await opened(w, ROOT, b"ordinary"), block())
        urgent = await opened(w, gasp, b"urgent")
        calls = [Call(w, urgent, block(), offset=number * MIB) for number in range(2)]
        assert ([call.result for call in calls], is_waiting(ordinary)) == ([MIB, MIB], True)
        assert w.tier.free_bytes(urgent=True) == 0
        beyond = Call(w, urgent, block(), offset=2 * MIB)
        assert is_waiting(beyond)
        assert [one.path for one in w.fs.statistics().waiting] == [
            b"gasp/urgent",
            b"ordinary",
        ]  # the urgent one first
        await w.drained()
        assert [await ordinary.done(), await beyond.done()] == [MIB, MIB]

    run(tmp_path, scenario)


@clause("S279")
def test_two_urgent_directories_share_it_and_an_open_file_takes_part(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        first = await directory(w, b"first")
        second = await directory(w, b"second")
        files = [await opened(w, first, b"a"), await opened(w, second, b"b")]
        await fill(w)
        waits = Call(w, files[0], block())
        assert is_waiting(waits)
        for path in (b"first", b"second"):
            declare(w, path)
        assert await waits.done() == MIB  # it waited when its directory became urgent
        assert Call(w, files[1], block()).result == MIB
        assert is_waiting(last := Call(w, files[1], block(), offset=MIB))
        await w.drained()
        assert await last.done() == MIB

    run(tmp_path, scenario)


@clause("S279")
def test_what_is_clean_leaves_for_an_urgent_file_and_no_reader_takes_its_place(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        cold = await w.write(b"cold", block(2))
        await w.drained()
        with w.fs.lock:
            w.inner.eviction.evict(b"cold")
            w.state.commit()
        w.engine.hold(True)
        await fill(w)
        assert len(await w.read(cold, 2 * MIB)) == 2 * MIB
        assert w.tier.free_bytes(urgent=True) == RESERVE

    run(tmp_path, scenario, warm_reads="on")


@clause("S280")
def test_when_its_time_is_over_an_urgent_file_waits_like_others(tmp_path: Path) -> None:
    now = [100.0]
    given = replace(REAL, clock=clock_of(since_boot=lambda: now[0]))

    async def scenario(w: World) -> None:
        await fill(w)
        gasp = await directory(w, b"gasp")
        declare(w, b"gasp", 60)
        urgent = await opened(w, gasp, b"urgent")
        assert Call(w, urgent, block(2)).result == 2 * MIB
        waits = Call(w, urgent, block(), offset=2 * MIB)
        now[0] += 61
        with w.fs.lock:
            w.fs.look_after_waiting()
        assert w.inner.urgent.declared() == []
        with w.fs.lock:
            w.tier.change_budget(BUDGET + MIB)  # room for an urgent one
        assert is_waiting(waits)
        await w.drained()
        assert await waits.done() == MIB

    run(tmp_path, scenario, runtime=given)


@clause("S280")
def test_who_takes_it_back_while_somebody_waits_has_them_wait_on(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await fill(w)
        gasp = await directory(w, b"gasp", urgent=True)
        waits = Call(w, await opened(w, gasp, b"urgent"), block(3))
        with w.fs.lock:
            assert w.inner.urgent.withdraw(b"gasp")
            assert not w.inner.urgent.withdraw(b"gasp")
            w.tier.change_budget(BUDGET + MIB)
        assert is_waiting(waits)
        await w.drained()
        assert await waits.done() == 3 * MIB

    run(tmp_path, scenario)


@clause("S281")
def test_it_goes_by_where_a_file_lies_when_it_is_written(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await fill(w)
        gasp = await directory(w, b"gasp", urgent=True)
        inside = await opened(w, gasp, b"inside")
        outside = await opened(w, ROOT, b"outside")
        waits = Call(w, outside, block())
        await w.do(w.fs.rename(gasp, b"inside", ROOT, b"inside", 0))
        await w.do(w.fs.rename(ROOT, b"outside", gasp, b"outside", 0))
        left = Call(w, inside, block())
        assert is_waiting(left)
        with w.fs.lock:
            w.fs.look_after_waiting()  # every second
        assert (await waits.done(), is_waiting(left)) == (MIB, True)
        unnamed = await opened(w, gasp, b"unnamed")
        await w.do(w.fs.unlink(gasp, b"unnamed"))
        assert is_waiting(nowhere := Call(w, unnamed, block()))
        await w.drained()
        assert [await left.done(), await nowhere.done()] == [MIB, MIB]

    run(tmp_path, scenario)


@clause("S280")
def test_the_next_worker_knows_what_is_urgent_and_another_boot_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first(w: World) -> None:
        await fill(w)
        await directory(w, b"gasp", urgent=True)
        declare(w, b"gone", 30)

    async def second(w: World) -> None:
        assert [one.path for one, _left in w.inner.urgent.declared()] == [b"gasp", b"gone"]
        assert all(0 < left <= URGENT_S_MAX for _one, left in w.inner.urgent.declared())
        ordinary = Call(w, await opened(w, ROOT, b"ordinary"), block())
        gasp = await w.do(w.fs.lookup(ROOT, b"gasp"))
        assert Call(w, await opened(w, gasp.ino, b"urgent"), block(2)).result == 2 * MIB
        assert is_waiting(ordinary)
        await w.drained()
        await ordinary.done()

    async def third(w: World) -> None:
        assert w.inner.urgent.declared() == []

    run(tmp_path, first)
    run(tmp_path, second)
    monkeypatch.setattr(urgent_module, "boot_id", lambda: "another")
    run(tmp_path, third)


@clause("S280")
def test_declarations_are_bounded_in_time_and_number(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        for seconds in (URGENT_S_MAX + 1, -1.0):
            with pytest.raises(RefusedError, match="at most 3600 seconds"):
                declare(w, b"a", seconds)
        for number in range(URGENT_PATHS_MAX):
            declare(w, b"%d" % number, 10)
        declare(w, b"0", 60)  # a new end
        with pytest.raises(RefusedError, match="16 paths are urgent"):
            declare(w, b"one more")
        assert len(w.inner.urgent.declared()) == URGENT_PATHS_MAX
        assert max(left for _one, left in w.inner.urgent.declared()) > 30

    run(tmp_path, scenario)


@clause("S279")
@pytest.mark.parametrize(
    ("reserve", "bytes_"), [("25%", 2 * MIB), ("0", 0), ("75%", 6 * MIB), ("1G", 6 * MIB)]
)
def test_how_much_it_is(tmp_path: Path, reserve: str, bytes_: int) -> None:
    async def scenario(w: World) -> None:
        assert w.tier.urgent_bytes == bytes_
        with w.fs.lock:
            w.tier.change_budget(BUDGET // 2)
        assert w.tier.urgent_bytes == (
            MIB if reserve == "25%" else 0 if reserve == "0" else 3 * MIB
        )

    run(tmp_path, scenario, reserve=reserve)


@clause("S279")
def test_with_the_policy_error_urgent_files_get_the_reserve_and_no_more(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await fill(w)
        gasp = await directory(w, b"gasp", urgent=True)
        urgent = await opened(w, gasp, b"urgent")
        ordinary = await opened(w, ROOT, b"ordinary")
        assert Call(w, urgent, block(2)).result == 2 * MIB
        for call in (Call(w, urgent, block(), offset=2 * MIB), Call(w, ordinary, block())):
            assert isinstance(call.result, OSError)
            assert call.result.errno == errno.ENOSPC

    run(tmp_path, scenario, when_full=WhenFull.ERROR)


@clause("S279", "S60")
def test_a_held_writer_in_the_passthrough_lane_gets_the_last_of_the_reserve(tmp_path: Path) -> None:
    """The room that a held writer asks for is an eighth of the budget, which is more than this
    reserve.
    """

    async def scenario(w: World) -> None:
        kernel = Kernel(w)
        gasp = await directory(w, b"gasp")
        w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
        files = {}
        for parent, name in ((gasp, b"urgent"), (ROOT, b"ordinary")):
            made, attributes = await w.do(w.fs.create(parent, name, 0o644, os.O_WRONLY, CALLER))
            assert made.lane is Lane.PASSTHROUGH
            files[name] = (attributes.ino, made)
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        await w.write(b"before", block(60))
        tick(w)
        assert all(kernel.is_held(ino) for ino, _made in files.values())
        assert w.tier.waiting() == 2  # for 8 MiB each
        declare(w, b"gasp")
        tick(w)
        tick(w)
        assert {name: kernel.is_held(ino) for name, (ino, _made) in files.items()} == {
            b"urgent": False,
            b"ordinary": True,
        }
        assert w.tier.free_bytes(urgent=True) == 0
        os.pwrite(files[b"urgent"][1].backing_fd, block(4), 0)
        tick(w)
        assert (w.tier.free_bytes(urgent=True), w.tier.reserved_bytes) == (
            0,
            0,
        )  # the reserve's size, to the byte
        await w.close(files[b"urgent"][1])
        tick(w)
        assert kernel.is_held(files[b"ordinary"][0])
        await w.drained()
        tick(w)
        await w.close(files[b"ordinary"][1])
        await w.drained()

    run(tmp_path, scenario, budget_bytes=64 * MIB, reserve=4 * MIB, unknown_bytes=0)


@clause("S279")
def test_an_urgent_file_is_admitted_to_the_passthrough_lane_by_the_reserve(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        Kernel(w)
        await w.write(b"before", block(30))
        gasp = await directory(w, b"gasp", urgent=True)
        w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
        lanes = []
        for parent in (ROOT, gasp):
            made, _attributes = await w.do(w.fs.create(parent, b"new", 0o644, os.O_WRONLY, CALLER))
            lanes.append(made.lane)
            await w.close(made)
        assert lanes == [Lane.DIRECT, Lane.PASSTHROUGH]
        await w.drained()

    run(tmp_path, scenario, budget_bytes=64 * MIB, reserve=32 * MIB, unknown_bytes=0)
