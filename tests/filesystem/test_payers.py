"""Whose memory control group pays for what is written past the daemon, and that it gets its pages
back; groups are made up.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from acpfs.filesystem.records import Lane
from acpfs.ram.control_groups import LimitedGroup, limit_of
from acpfs.types import ROOT
from tests.filesystem.world import CALLER, World
from tests.filesystem.world import run as in_world

MIB = 1 << 20
LIMIT = 128 * MIB
FILE = 8 * MIB
WANTED = 26 * MIB
"""What a file of that size is promised: a quarter more, and 16 MiB."""
SHORT = "the writer's memory control group has no room for it"


class Group:
    """A made-up control group, of which tests say what it uses."""

    def __init__(self, base: Path, limit: int = LIMIT) -> None:
        self.directory = base / "group"
        self.directory.mkdir()
        (self.directory / "memory.max").write_text(f"{limit}\n")
        self.use(0)

    def use(self, size: int) -> None:
        (self.directory / "memory.current").write_text(f"{size}\n")

    def of_all(self, _pid: int) -> list[LimitedGroup]:
        limit = limit_of(self.directory)
        return [] if limit is None else [limit]


def run(base: Path, group: Group, *scenarios: Callable[[World], Awaitable[None]]) -> None:
    """Each scenario with a daemon of its own, one after the other."""
    in_world(base, *scenarios, passthrough=True, limits=group.of_all)


def in_ram(w: World, name: bytes) -> bool:
    return [report.tier.startswith("ram") for report in w.fs.files_report(name)] == [True]


async def save(w: World, name: bytes) -> Lane:
    """A file that is persisted afterwards; the lane that it took."""
    file, _attributes = await w.create(name)
    if file.lane is Lane.PASSTHROUGH:
        os.pwrite(file.backing_fd, bytes(FILE), 0)
    else:
        await w.do(w.fs.write(file.handle, 0, bytes(FILE)))
    await w.close(file)
    await w.drained()
    return file.lane


def look(w: World) -> None:
    with w.fs.lock:
        w.fs.look_after_waiting()


@pytest.mark.clause("S243")
@pytest.mark.parametrize(
    ("used", "lane"),
    [(LIMIT // 2 - WANTED, Lane.PASSTHROUGH), (LIMIT // 2 - WANTED + 1, Lane.DIRECT)],
    ids=["half is left", "less is left"],
)
def test_a_limited_group_pays_only_where_half_of_it_is_left(
    tmp_path: Path, used: int, lane: Lane
) -> None:
    group = Group(tmp_path)

    async def scenario(w: World) -> None:
        await save(w, b"iter_1.pt")
        group.use(used)
        assert await save(w, b"iter_2.pt") is lane
        assert (SHORT in w.fs.statistics().lane_choices) is (lane is Lane.DIRECT)

    run(tmp_path, group, scenario)


@pytest.mark.clause("S243")
def test_what_one_writer_is_still_to_write_is_no_room_for_the_next(tmp_path: Path) -> None:
    group = Group(tmp_path)

    async def scenario(w: World) -> None:
        await save(w, b"iter_1.pt")
        files = [(await w.create(b"iter_%d.pt" % number))[0] for number in range(2, 5)]
        assert [file.lane for file in files] == [Lane.PASSTHROUGH, Lane.PASSTHROUGH, Lane.DIRECT]
        for file in files:
            await w.close(file)
        assert await save(w, b"iter_9.pt") is Lane.PASSTHROUGH

    run(tmp_path, group, scenario)


@pytest.mark.clause("S243")
@pytest.mark.parametrize("restarts", [False, True], ids=["one daemon", "the next daemon"])
def test_a_group_that_is_short_of_room_gets_its_clean_pages_back_and_no_others(
    tmp_path: Path, restarts: bool
) -> None:
    group = Group(tmp_path)

    async def write(w: World) -> None:
        assert await save(w, b"iter_1.pt") is Lane.DIRECT  # that the daemon paid for
        assert await save(w, b"iter_2.pt") is Lane.PASSTHROUGH
        assert await save(w, b"iter_3.pt") is Lane.PASSTHROUGH

    async def press(w: World) -> None:
        group.use(LIMIT - LIMIT // 4)
        look(w)
        assert [in_ram(w, b"iter_%d.pt" % number) for number in (1, 2, 3)] == [True, True, True]
        group.use(LIMIT - LIMIT // 4 + 1)
        look(w)
        assert [in_ram(w, b"iter_%d.pt" % number) for number in (1, 2, 3)] == [True, False, True]
        group.use(LIMIT)
        look(w)
        assert [in_ram(w, b"iter_%d.pt" % number) for number in (1, 2, 3)] == [True, False, False]

    async def both(w: World) -> None:
        await write(w)
        await press(w)

    run(tmp_path, group, *([write, press] if restarts else [both]))


@pytest.mark.clause("S243")
@pytest.mark.parametrize("why", ["dirty", "open"])
def test_what_must_stay_stays(tmp_path: Path, why: str) -> None:
    group = Group(tmp_path)

    async def scenario(w: World) -> None:
        await save(w, b"iter_1.pt")
        assert await save(w, b"iter_2.pt") is Lane.PASSTHROUGH
        ino = (await w.do(w.fs.lookup(ROOT, b"iter_2.pt"))).ino
        group.use(LIMIT)
        if why == "open":
            await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
        else:
            w.engine.hold(True)
            file = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
            assert file.lane is Lane.DIRECT
            await w.do(w.fs.write(file.handle, 0, bytes(FILE)))
            await w.close(file)
        look(w)
        assert in_ram(w, b"iter_2.pt")

    run(tmp_path, group, scenario)


def test_a_group_that_has_lost_its_limit_or_is_gone_asks_for_nothing(tmp_path: Path) -> None:
    group = Group(tmp_path)

    async def scenario(w: World) -> None:
        await save(w, b"iter_1.pt")
        assert await save(w, b"iter_2.pt") is Lane.PASSTHROUGH
        group.use(LIMIT)
        for name in ("memory.max", "memory.current"):
            (group.directory / name).unlink()
        look(w)
        group.directory.rmdir()
        look(w)
        assert in_ram(w, b"iter_2.pt")

    run(tmp_path, group, scenario)
