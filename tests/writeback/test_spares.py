"""Files that grow: each version is made of the one before the last, and is whole under its name at
every moment.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import xxhash
from trio.testing import MockClock

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.writeback.log.ops import Op, VersionState
from acpfs.writeback.sources import source
from acpfs.writeback.streams import spares
from tests.rig.runtime import REAL
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth, Inode, MemoryLower, error
from tests.writeback.test_random import (
    Application,
    KilledError,
    Mortal,
    assert_arrived,
    assert_prefixes,
)
from tests.writeback.world import World

SIZE = 1 << 20
PIECE = b"one line more\n"
CHEAP = 4 * len(PIECE)
Body = Callable[["Growing"], Awaitable[Any]]


class Growing:
    """A log that grows and is stored, over and over, in one run of the engine."""

    def __init__(self, world: World, path: str = "log") -> None:
        self.world = world
        self.path = path
        self.data = b""

    async def store(self, data: bytes, **meta: int) -> int:
        """Returns how many bytes went to the backing directory."""
        before = self.world.engine.statistics().counters.streamed_bytes
        self.data = data
        op = self.world.store(self.path, data, **meta)
        with trio.fail_after(3600):
            await self.world.until(lambda: self.world.log.get(op.seq) is None)
        assert self.world.lower.visible() == self.world.application_view()
        assert self.world.manifest.digest((self.path.encode(),)) == xxhash.xxh3_128_hexdigest(data)
        return self.world.engine.statistics().counters.streamed_bytes - before

    async def grow(self, times: int = 1) -> int:
        """What the last version cost."""
        cost = 0
        for _time in range(times):
            cost = await self.store(self.data + PIECE)
        return cost

    async def begin(self) -> None:
        """Until each version costs what it is longer."""
        await self.store(os.urandom(SIZE))
        assert await self.grow() > SIZE, "there is nothing beside yet"
        assert await self.grow() <= CHEAP
        assert await self.grow() <= CHEAP


def in_one_run(world: World, body: Body) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            await body(Growing(world))
            await world.until(world.engine.drained)
            assert world.lower.list_staging() == []
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.clause("S230", "S231")
def test_a_version_costs_what_was_appended_and_is_whole_at_every_moment(world: World) -> None:
    async def body(log: Growing) -> None:
        await log.begin()
        versions = {log.data[: len(log.data) - len(PIECE) * number] for number in range(8)}
        world.lower.visible_history.clear()
        await log.grow(4)
        versions |= {log.data[: len(log.data) - len(PIECE) * number] for number in range(8)}
        assert {state[b"log"] for state in world.lower.visible_history} <= versions
        assert len(world.lower.list_staging()) == 1

    in_one_run(world, body)


# -- what is no growth


async def overwrite(log: Growing) -> int:
    return await log.store(bytes([log.data[0] ^ 1]) + log.data[1:] + PIECE)


async def overwrite_the_end(log: Growing) -> int:
    return await log.store(log.data[: -3 * len(PIECE)] + b"?" * 5 * len(PIECE))


async def cut(log: Growing) -> int:
    await log.store(log.data[: SIZE // 2])
    return await log.store(log.data + os.urandom(SIZE))


async def replace(log: Growing) -> int:
    """By another file of the mount, renamed over it."""
    log.world.store("other", log.data[::-1])
    log.world.rename("other", log.path)
    log.data = log.data[::-1]
    return await log.grow()


async def remove(log: Growing) -> int:
    log.world.unlink(log.path)
    return await log.grow()


async def write_to_the_spare(log: Growing) -> int:
    """A program on the storage's side has had the file open since it lay under its name."""
    (name,) = log.world.lower.list_staging()
    inode = log.world.lower.inode(f".acpfs/staging/node/{name}")
    inode.content[:3] = b"!!!"
    inode.mtime_ns = inode.mtime_ns + 1
    return await log.grow()


async def link_the_spare(log: Growing) -> int:
    """As `cp -l` made it when it lay under its name."""
    (name,) = log.world.lower.list_staging()
    inode = log.world.lower.inode(f".acpfs/staging/node/{name}")
    inode.nlink += 1
    before = bytes(inode.content)
    cost = await log.grow()
    assert inode.content == before
    return cost


async def lose_the_spare(log: Growing) -> int:
    (name,) = log.world.lower.list_staging()
    log.world.lower.remove_staging(name)
    return await log.grow()


async def misread_the_spare(log: Growing) -> int:
    log.world.lower.fault = FailNth("open", 1, errno.EIO)
    return await log.grow()


NO_GROWTH = [
    overwrite,
    overwrite_the_end,
    cut,
    replace,
    remove,
    write_to_the_spare,
    link_the_spare,
    lose_the_spare,
    misread_the_spare,
]


@pytest.mark.clause("S230", "S232")
@pytest.mark.parametrize("change", NO_GROWTH)
def test_what_is_no_growth_is_streamed_whole(world: World, change: Body) -> None:
    async def body(log: Growing) -> None:
        await log.begin()
        assert await change(log) >= SIZE
        await log.grow(2)
        assert await log.grow() <= CHEAP, "and then it grows again"

    in_one_run(world, body)


async def write_natively(log: Growing) -> None:
    inode = log.world.lower.inode(log.path)
    inode.content[:3] = b"!!!"
    inode.mtime_ns = inode.mtime_ns + 1


async def replace_natively(log: Growing) -> None:
    """Or by another member."""
    fd = log.world.lower.create_staging("other")
    log.world.lower.write(fd, memoryview(b"foreign"), 0)
    log.world.lower.close(fd)
    log.world.lower.rename(log.world.lower.staging_path("other"), (log.path.encode(),))


@pytest.mark.clause("S232")
@pytest.mark.parametrize("change", [write_natively, replace_natively])
def test_what_others_have_put_under_the_name_is_never_gone_on_from(
    world: World, change: Body
) -> None:
    async def body(log: Growing) -> None:
        await log.begin()
        await change(log)
        await log.grow(6)

    in_one_run(world, body)


# -- faults


@pytest.mark.clause("S231")
@pytest.mark.parametrize(
    "label", ["write", "fsync", "setattr", "close", "fstat", "link", "rename", "fsync directory"]
)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_in_the_middle_leaves_the_last_version_whole(
    world: World, label: str, number: int
) -> None:
    async def body(log: Growing) -> None:
        await log.begin()
        before = log.data
        world.lower.visible_history.clear()
        fault = FailNth(label, 1, number, times=2)
        world.lower.fault = fault
        await log.grow()
        assert fault.failed
        assert {state[b"log"] for state in world.lower.visible_history} <= {before, log.data}
        await log.grow(2)
        assert await log.grow() <= CHEAP

    in_one_run(world, body)


@pytest.mark.clause("S233")
def test_a_full_backing_directory_gets_the_room_of_spares_back(world: World) -> None:
    def is_full(label: str, _path: tuple[bytes, ...]) -> None:
        if label == "write" and any(
            name.startswith("spare-") for name in world.lower.list_staging()
        ):
            raise error(errno.ENOSPC)

    async def body(log: Growing) -> None:
        await log.begin()
        world.lower.fault = is_full
        await Growing(world, "other").store(os.urandom(SIZE))
        assert world.lower.list_staging() == []
        assert await log.grow() > SIZE

    in_one_run(world, body)


@pytest.mark.clause("S231")
def test_a_spare_is_written_to_only_when_a_crash_cannot_bring_it_back(world: World) -> None:
    """Until the rename that replaced it is flushed, the storage may come up again with it under its
    name.
    """

    def unflushed(label: str, path: tuple[bytes, ...]) -> None:
        if label == "fsync directory" and not path:
            raise error(errno.EIO)

    async def body(log: Growing) -> None:
        await log.begin()
        replaced = world.lower.inode("log")
        before = log.data
        world.lower.fault = unflushed
        for number in (1, 2, 3):
            world.store("log", before + PIECE * number)
            await trio.sleep(5)
            assert replaced.content == before
        assert world.lower.inode("log") is not replaced
        assert replaced.nlink == 1, "it is the spare"
        world.lower.fault = lambda _label, _path: None
        await log.store(before + PIECE * 4)
        assert await log.grow(3) <= CHEAP

    in_one_run(world, body)


@pytest.mark.clause("S230")
def test_a_version_given_up_before_its_commit_is_no_loss(world: World) -> None:
    """A log that is synced all the time: the newer version replaces the one that is staged, or
    being streamed.
    """

    async def body(log: Growing) -> None:
        await log.begin()
        before = world.engine.statistics().counters.streamed_bytes
        for label in ("write", "fsync", "close"):
            again: list[str] = []

            def newer(
                at: str, _path: tuple[bytes, ...], label: str = label, again: list[str] = again
            ) -> None:
                if at == label and not again:
                    again.append(at)
                    log.data += 2 * PIECE
                    world.store("log", log.data)
                    with world.engine.section():
                        world.engine._elide(world.log.front(1)[0])

            world.lower.fault = newer
            world.store("log", log.data + PIECE)
            await world.until(lambda: not len(world.log))
            assert again
            assert world.lower.visible() == {b"log": log.data}
            world.lower.fault = lambda _label, _path: None
        assert world.engine.statistics().counters.elided_ops == 3
        assert world.engine.statistics().counters.streamed_bytes - before < SIZE

    in_one_run(world, body)


@pytest.mark.clause("S233")
def test_a_version_given_up_leaves_nothing_if_it_had_not_grown(world: World) -> None:
    """A checkpoint that is written over again and again is no log, and no room is spent on what it
    might have been.
    """

    def held(label: str, path: tuple[bytes, ...]) -> None:
        if label == "mkdir" and path == (b"before",):
            raise error(errno.EIO)

    async def body(file: Growing) -> None:
        await file.store(os.urandom(SIZE))
        world.lower.fault = held
        world.mkdir("before")
        given_up = world.store("log", os.urandom(SIZE))
        await world.until(
            lambda: given_up.version is not None and given_up.version.state is VersionState.STAGED
        )
        assert world.engine.discard([given_up.seq]) == 1
        await world.until(lambda: world.lower.list_staging() == [])
        world.lower.fault = lambda _label, _path: None
        await world.until(lambda: not len(world.log))

    in_one_run(world, body)


@pytest.mark.clause("S232")
def test_the_next_worker_removes_spares_and_streams(world: World, run: Run) -> None:
    async def body(log: Growing) -> None:
        await log.begin()
        world.store("log", log.data + PIECE)
        world.lower.fault = killed
        await world.until(lambda: False)

    def killed(label: str, _path: tuple[bytes, ...]) -> None:
        if label == "fsync":
            raise KilledError

    with pytest.raises(BaseException) as ended:
        in_one_run(world, body)
    assert "KilledError" in repr(ended.value)
    world.lower.fault = lambda _label, _path: None
    world.lower.descriptors.clear()
    world.restart()
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert world.lower.list_staging() == []


async def let_it_be(_log: Growing) -> None:
    """Nothing."""


async def write_to_it(log: Growing) -> None:
    inode = log.world.lower.inode(log.path)
    inode.content[:3] = b"!!!"
    inode.mtime_ns = inode.mtime_ns + 1


@pytest.mark.clause("S411")
def test_nothing_is_written_over_where_links_are_not_counted(world: World) -> None:
    """What was replaced may have another name, which nobody can see."""
    world.lower.features = dataclasses.replace(world.lower.features, link_counts=False)

    async def body(log: Growing) -> None:
        await log.store(os.urandom(SIZE))
        kept: list[tuple[Inode, bytes]] = []
        for _time in range(4):
            assert await log.grow() > SIZE
            inode = world.lower.inode("log")
            inode.nlink += 1  # as `cp -l` makes it
            kept.append((inode, log.data))
            assert all(inode.content == data for inode, data in kept)

    in_one_run(world, body)


@pytest.mark.clause("S411")
def test_two_names_of_one_file_are_no_rename_that_failed(world: World) -> None:
    """The staging file has its place already, under both names: the one of the staging area goes,
    and the order goes on.
    """
    world.lower.features = dataclasses.replace(world.lower.features, link_counts=False)

    def linked(label: str, path: LowerPath) -> None:
        (staging,) = world.lower.list_staging() if label == "rename" else ("",)
        if staging:
            world.lower.link(world.lower.staging_path(staging), path)

    async def body(log: Growing) -> None:
        world.lower.fault = linked
        await log.store(b"bytes")

    in_one_run(world, body)


async def write_to_it_at_the_same_time(log: Growing) -> None:
    """What it looks like is as it was; the note is about other bytes."""
    log.world.lower.inode(log.path).xattrs[b"user.acpfs.xxh3"] = (
        b"0" * 32 + b" %d" % log.world.lower.inode(log.path).mtime_ns
    )


async def lose_the_note(log: Growing) -> None:
    log.world.lower.inode(log.path).xattrs.pop(b"user.acpfs.xxh3")


async def link_it(log: Growing) -> None:
    log.world.lower.inode(log.path).nlink += 1


async def misread_the_note(log: Growing) -> None:
    log.world.lower.fault = FailNth("xattrs", 1, errno.EIO)


@pytest.mark.clause("S254", "S232")
@pytest.mark.parametrize(
    ("change", "cheap_from"),
    [
        (let_it_be, 1),
        (write_to_it, 2),
        (write_to_it_at_the_same_time, 2),
        (lose_the_note, 2),
        (link_it, 2),
        (misread_the_note, 2),
    ],
)
def test_the_next_worker_goes_on_from_what_lies_there_if_it_is_as_it_was_noted(
    world: World, run: Run, change: Body, cheap_from: int
) -> None:
    data = os.urandom(SIZE)
    world.store("log", data, mtime_ns=10**18)
    run(world.drain)
    world.lower.descriptors.clear()
    world.restart()

    async def body(log: Growing) -> None:
        log.data = data
        await change(log)
        costs = [await log.grow() for _time in range(5)]
        assert [cost <= CHEAP for cost in costs] == [number >= cheap_from for number in range(5)]

    in_one_run(world, body)


# -- attributes, and storage that cannot


@pytest.mark.clause("S230")
def test_attributes_of_an_older_version_do_not_come_back(tmp_path: Path) -> None:
    """The file that the version is made of has those of the version before the last."""
    (tmp_path / "backing").mkdir()
    directory = BackingDirectory(tmp_path / "backing", "node", REAL)
    world = World(tmp_path, directory)
    file = tmp_path / "backing" / "log"
    seen = []

    def gone(op: Op) -> bool:
        return world.log.get(op.seq) is None

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            data = os.urandom(SIZE)
            for number in range(6):
                data += PIECE
                before = world.engine.statistics().counters.streamed_bytes
                op = world.store(
                    "log",
                    data,
                    mode=0o600 if number % 2 else 0o644,
                    xattrs={b"user.v": b"%d" % number} if number < 3 else {},
                )
                await world.until(partial(gone, op))
                if number == 3:
                    os.removexattr(file, b"user.v")
                seen.append(
                    (
                        world.engine.statistics().counters.streamed_bytes - before,
                        file.stat().st_mode & 0o777,
                        os.listxattr(file),
                    )
                )
                assert file.read_bytes() == data
                note = directory.note((b"log",))
                assert note is not None
                assert note.digest == xxhash.xxh3_128_hexdigest(data)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert [cost <= CHEAP for cost, _mode, _xattrs in seen] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]
    assert [mode for _cost, mode, _xattrs in seen] == [0o644, 0o600] * 3
    assert [b"user.v" in map(os.fsencode, xattrs) for _cost, _mode, xattrs in seen] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    directory.disconnect()


@pytest.mark.clause("S229", "S230")
def test_nor_does_its_checksum_where_the_version_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody believes the note as long as the times differ; but a program may set them to what they
    were.
    """
    monkeypatch.setattr(source, "HOLES_HASHED_BYTES_MAX", SIZE)
    (tmp_path / "backing").mkdir()
    directory = BackingDirectory(tmp_path / "backing", "node", REAL)
    world = World(tmp_path, directory)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            data = os.urandom(SIZE)
            for _number in range(3):
                data += PIECE
                op = world.store("log", data)
                await world.until(partial(lambda seq: world.log.get(seq) is None, op.seq))
            assert directory.digest((b"log",)) == xxhash.xxh3_128_hexdigest(data)
            before = world.engine.statistics().counters.streamed_bytes
            op = world.store("log", data)
            assert op.version is not None
            fd = world.tier.open(op.version.tier_id)
            os.ftruncate(fd, 4 * SIZE)
            os.close(fd)
            op.version.size = 4 * SIZE
            await world.until(lambda: world.log.get(op.seq) is None)
            assert world.engine.statistics().counters.streamed_bytes - before < SIZE, (
                "it was made of a spare"
            )
            assert (tmp_path / "backing" / "log").stat().st_size == 4 * SIZE
            assert "user.acpfs.xxh3" not in os.listxattr(tmp_path / "backing" / "log")
            nursery.cancel_scope.cancel()

    trio.run(main)
    directory.disconnect()


@pytest.mark.clause("S232")
def test_without_hard_links_each_version_is_streamed(tmp_path: Path) -> None:
    world = World(tmp_path, MemoryLower().without(hard_links=False))

    async def body(log: Growing) -> None:
        await log.store(os.urandom(SIZE))
        assert await log.grow(3) > SIZE
        assert world.lower.calls["link"] == 0

    in_one_run(world, body)


@pytest.mark.clause("S233")
def test_a_spare_goes_when_its_file_was_closed_long_ago(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(world.engine._spares, "_clock", lambda: now[0])

    async def body(log: Growing) -> None:
        await log.begin()
        for opened, moved_s, left in (
            (False, spares.REST_S / 2, 1),
            (True, spares.REST_S, 1),
            (False, 0.0, 0),
        ):
            monkeypatch.setattr(
                world.listener, "version_of_open_file", lambda _version, opened=opened: opened
            )
            monkeypatch.setattr(
                world.engine._spares, "_is_open", world.listener.version_of_open_file
            )
            now[0] += moved_s
            await trio.sleep(2 * spares.SWEEP_EVERY_S)
            assert len(world.lower.list_staging()) == left

    in_one_run(world, body)


# -- at random


def faulty(rng: random.Random, rate: float) -> MemoryLower:
    lower = MemoryLower()

    def fault(label: str, _path: tuple[bytes, ...]) -> None:
        if rng.random() < rate and label not in ("lstat", "readlink"):
            raise error(rng.choice((errno.EIO, errno.ENOSPC, errno.ESTALE)))

    lower.fault = fault
    return lower


class Loggers(Application):
    """Mostly logs that grow, while all else goes on."""

    def act(self) -> None:
        if self.world.state.is_abandoned:
            return  # its call waits for the next worker
        logs = [
            path
            for path in self._files()
            if path.startswith("log") and path not in self.world.symlinks
        ]
        if len(logs) < 2:
            self.world.store(f"log{self.rng.randrange(1 << 40)}", self.rng.randbytes(5000))
        elif self.rng.random() < 0.8:
            path = self.rng.choice(logs)
            self.world.store(
                path, self.world.contents[path] + self.rng.randbytes(self.rng.choice((1, 100)))
            )
        else:
            super().act()


async def live(world: World, application: Application, rng: random.Random, acts: int) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(world.engine.run)
        for _act in range(acts):
            application.act()
            await trio.sleep(rng.choice((0.0, 0.0, 0.001, 0.1, 5.0)))
        nursery.cancel_scope.cancel()


@pytest.mark.clause("S231")
@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 30))]
)
def test_at_random_with_kills_at_any_call(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "SPARE_BYTES_MIN", 1000)
    rng = random.Random(seed)
    lower = MemoryLower()
    mortal = Mortal(lower)
    world = World(tmp_path, mortal)
    application = Loggers(world, rng)
    for _round in range(8):
        mortal.calls_left = rng.randrange(1, 300)
        mortal.after = rng.random() < 0.5
        try:
            trio.run(live, world, application, rng, 40, clock=MockClock(autojump_threshold=0))
        except BaseException as killed:
            if "KilledError" not in repr(killed):
                raise
        lower.descriptors.clear()
        world.restart()
    mortal.calls_left = -1
    trio.run(world.drain, clock=MockClock(autojump_threshold=0))
    assert_prefixes(world, lower.visible_history)
    assert_arrived(world, lower)


@pytest.mark.clause("S231")
@pytest.mark.parametrize("seed", range(10))
def test_at_random_with_errors_everywhere(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "SPARE_BYTES_MIN", 1000)
    rng = random.Random(100 + seed)
    lower = faulty(rng, 0.03)
    world = World(tmp_path, lower)
    trio.run(live, world, Loggers(world, rng), rng, 200, clock=MockClock(autojump_threshold=0))
    lower.fault = lambda _label, _path: None
    world.engine.retry()
    trio.run(world.drain, clock=MockClock(autojump_threshold=0))
    assert_arrived(world, lower)
