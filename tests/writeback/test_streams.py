"""Streams: changes under way, holes, hung and slow backing directories; over real threads where
that matters.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import xxhash

from acpfs.backing.calls import CallPools
from acpfs.backing.directory import BackingDirectory
from acpfs.ram.tier import Tier
from acpfs.types import TierId
from acpfs.writeback.log.ops import Op, VersionState
from acpfs.writeback.streams import streams as streams_module
from acpfs.writeback.streams.stream_queue import StreamQueue
from tests.rig.runtime import REAL
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth, Inode, MemoryLower
from tests.writeback.world import World

MiB = 1 << 20


def copy_aside(world: World, op: Op) -> TierId:
    """As the file system does before it changes bytes of a version."""
    assert op.version is not None
    with world.lock:
        old = op.version.tier_id
        new = world.tier.create()
        world.tier.copy(old, new, op.version.size)
        op.version.tier_id = new
        world.log.save_version(op.version)
        world.state.commit()
    return old


def scribble(tier: Tier, tier_id: TierId, size: int) -> None:
    fd = tier.open(tier_id)
    os.pwrite(fd, b"\xee" * size, 0)
    os.close(fd)


@pytest.mark.parametrize("at_write", [1, 2, 3])
def test_a_file_rewritten_while_it_streams_never_commits_a_mixture(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch, at_write: int
) -> None:
    monkeypatch.setattr(streams_module, "SLICE_MAX_BYTES", MiB)
    world.engine.set_bandwidth(1 << 50)
    data = os.urandom(3 * MiB)
    op = world.store("f", data)
    writes = []

    def change(label: str, _path: tuple[bytes, ...]) -> None:
        if label == "write":
            writes.append(label)
            if len(writes) == at_write:
                scribble(world.tier, copy_aside(world, op), len(data))

    world.lower.fault = change
    run(world.drain)
    assert world.lower.visible() == {b"f": data}
    assert world.manifest.digest((b"f",)) == xxhash.xxh3_128_hexdigest(data)


def test_bytes_read_while_they_changed_are_read_again(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = world.store("f", b"old" * 1000)
    read = os.preadv

    def read_late(fd: int, buffers: list[memoryview], offset: int) -> int:
        monkeypatch.setattr(os, "preadv", read)
        scribble(world.tier, copy_aside(world, op), 3000)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read_late)
    run(world.drain)
    assert world.lower.visible() == {b"f": b"old" * 1000}
    assert world.engine.statistics().counters.restarted_streams == 1


@pytest.mark.clause("S8")
def test_a_lost_staging_file_is_no_alarm_where_the_file_was_written_to_meanwhile(
    world: World, run: Run
) -> None:
    """An application has written on in the kernel's lane while the copy was flushed: what RAM has
    then is something else than was copied, and it is right.
    """
    op = world.store("f", b"old" * 1000)
    version = op.version
    assert version is not None
    newer = b"\xee" * version.size
    labels = []

    def change(label: str, _path: tuple[bytes, ...]) -> None:
        labels.append(label)
        if label == "fsync" and labels.count("fsync") == 1:
            with world.lock:
                scribble(world.tier, version.tier_id, version.size)
                # as `KernelWrites.still_frozen` tells of it
                version.digest = ""
                version.renewals += 1
        if label == "rename" and labels.count("rename") == 1:
            world.lower.remove_staging(version.staging_name)

    world.lower.fault = change
    run(world.drain)
    assert labels.count("rename") == 2
    assert world.lower.visible() == {b"f": newer}
    assert world.engine.statistics().counters.restarted_streams == 0


class Dies(BaseException):
    """The worker does."""


def test_a_worker_that_dies_before_others_record_that_a_file_is_staged_stages_it_again(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams have no transactions of their own for that."""
    world.store("f", b"content")
    staged = world.engine._streamer._staged

    def dies(*arguments: Any) -> None:
        staged(*arguments)
        raise Dies

    with monkeypatch.context() as patch:
        patch.setattr(world.engine._streamer, "_staged", dies)
        with pytest.raises(BaseException) as ended:
            run(world.drain)
    assert "Dies()" in repr(ended.value)
    world.restart()
    (op,) = world.log
    assert op.version is not None
    assert op.version.state is VersionState.COMPLETE, "it was not recorded"
    run(world.drain)
    assert world.lower.visible() == {b"f": b"content"}
    assert not world.lower.list_staging()


def test_what_is_staged_behind_something_that_waits_is_recorded(world: World, run: Run) -> None:
    """Nobody commits it for a long time; the next worker need not stage it again."""
    world.mkdir("d")
    world.store("d/f", b"content")
    world.lower.fault = FailNth("mkdir", 1, errno.EIO)
    run(world.run_for, 0.001)
    world.restart()
    waiting = [op.version.state for op in world.log if op.version is not None]
    assert waiting == [VersionState.STAGED]
    run(world.drain)
    assert world.lower.visible() == world.application_view()


def test_a_version_given_up_while_it_streams_leaves_nothing(world: World, run: Run) -> None:
    world.store("f", b"1" * 100)

    def delete(label: str, _path: tuple[bytes, ...]) -> None:
        if label == "write" and "f" in world.inos:
            world.unlink("f")
            world.engine._elide(world.log.front(1)[0])

    world.lower.fault = delete
    run(world.drain)
    assert not world.lower.visible()
    assert not world.lower.list_staging()
    assert not world.tier.ids()


@pytest.mark.parametrize("there", [100, MiB])
def test_missing_bytes_are_an_alarm_and_never_a_hole(world: World, run: Run, there: int) -> None:
    """Behind the end of a larger file the kernel says hole."""
    op = world.store("f", b"1" * there)
    assert op.version is not None
    op.version.size = 3 * there
    run(world.run_for, 10.0)
    assert not world.lower.visible()
    assert world.engine.statistics().queue[0].last_error == "EIO"


@pytest.mark.clause("S8")
def test_a_file_cut_while_its_stream_begins_is_no_alarm(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is of the file that was opened, whoever has moved the version elsewhere and cut the
    file meanwhile.
    """
    op = world.store("f", b"1" * 100)
    fstat = os.fstat
    read_long = world.tier.read_long
    opened: list[int] = []

    def read_noted(tier_id: TierId) -> int:
        opened.append(read_long(tier_id))
        return opened[-1]

    def late(fd: int) -> os.stat_result:
        """Another thread gets in before the size is asked for, if the lock lets it."""
        if opened == [fd]:
            opened.append(-1)
            if not world.lock._is_owned():  # type: ignore[attr-defined]
                copy_aside(world, op)
                os.truncate(f"/proc/self/fd/{fd}", 10)
        return fstat(fd)

    monkeypatch.setattr(world.tier, "read_long", read_noted)
    monkeypatch.setattr(os, "fstat", late)
    run(world.drain)
    assert opened
    assert world.lower.visible() == {b"f": b"1" * 100}
    assert world.engine.statistics().counters.retries == 0


@pytest.mark.clause("S23")
def test_what_was_copied_in_vain_for_want_of_room_takes_none(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing it does not give its room back at once everywhere: on MooseFS tries would fill what
    others free.
    """
    made: list[Inode] = []
    create = world.lower.create_staging

    def create_noted(name: str) -> int:
        fd: int = create(name)
        made.append(world.lower.descriptors[fd])
        return fd

    monkeypatch.setattr(world.lower, "create_staging", create_noted)
    world.lower.fault = FailNth("fsync", 1, errno.ENOSPC, times=3)
    world.store("f", b"x" * MiB)
    run(world.drain)
    assert world.lower.visible() == {b"f": b"x" * MiB}
    assert [len(inode.content) for inode in made] == [0, 0, 0, MiB]


@pytest.mark.parametrize("layout", ["data hole data", "hole data", "data hole", "hole"])
def test_holes_stay_holes(tmp_path: Path, run: Run, layout: str) -> None:
    (tmp_path / "backing").mkdir()
    directory = BackingDirectory(tmp_path / "backing", "node", REAL)
    world = World(tmp_path, directory)
    op = world.store("f", b"")
    assert op.version is not None
    expected = b""
    piece = 4 * MiB
    fd = world.tier.open(op.version.tier_id)
    for part in layout.split():
        if part == "data":
            os.pwrite(fd, b"x" * piece, len(expected))
        expected += (b"x" if part == "data" else b"\0") * piece
    os.ftruncate(fd, len(expected))
    os.close(fd)
    op.version.size = len(expected)
    run(world.drain)
    file = tmp_path / "backing" / "f"
    assert file.read_bytes() == expected
    assert file.stat().st_blocks * 512 <= layout.split().count("data") * piece + MiB
    assert world.manifest.digest((b"f",)) == xxhash.xxh3_128_hexdigest(expected)
    directory.disconnect()


def test_short_writes_are_continued(tmp_path: Path, run: Run) -> None:
    class Short(MemoryLower):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            return super().write(fd, data[:7], offset)

    world = World(tmp_path, Short())
    world.store("f", b"0123456789" * 100)
    run(world.drain)
    assert world.lower.visible() == {b"f": b"0123456789" * 100}


def test_no_write_at_all_is_an_error(tmp_path: Path, run: Run) -> None:
    class Full(MemoryLower):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            return 0

    world = World(tmp_path, Full())
    world.store("f", b"1")
    run(world.run_for, 5.0)
    assert world.engine.statistics().queue[0].last_error == "EIO"


def test_closed_files_stream_before_open_ones(tmp_path: Path, run: Run) -> None:
    world = World(tmp_path, streams=1)
    opened = world.store("open", b"1" * 2 * MiB)
    world.store("closed", b"2" * 2 * MiB)
    assert opened.version is not None
    world.listener.open_versions.add(opened.version.vid)
    order = []

    def note(label: str, _path: tuple[bytes, ...]) -> None:
        if label == "fsync":
            (inode,) = world.lower.descriptors.values()
            order.append(bytes(inode.content[:1]))

    world.lower.fault = note
    run(world.drain)
    assert order == [b"2", b"1"]


def test_a_durable_waiter_is_not_starved_by_rewrites(world: World, run: Run) -> None:
    first = world.store("f", b"0")
    waiting = world.engine.persisted(first.seq)
    rewrites: list[Op] = []

    def rewrite(label: str, _path: tuple[bytes, ...]) -> None:
        if label == "fsync" and len(rewrites) < 20:
            rewrites.append(world.store("f", b"%d" % len(rewrites)))

    world.lower.fault = rewrite
    run(world.drain)
    assert waiting.result(0) is None
    assert world.lower.visible() == {b"f": b"19"}
    assert {b"f": b"0"} in world.lower.visible_history


class TestHung:
    def test_one_hung_file_does_not_stop_the_others_being_staged_and_all_goes_on_afterwards(
        self, tmp_path: Path
    ) -> None:
        hung = threading.Event()
        release = threading.Event()

        def hang(label: str, path: tuple[bytes, ...]) -> None:
            if label == "create" and not hung.is_set():
                hung.set()
                release.wait(120)

        calls = CallPools.make(REAL)
        world = World(tmp_path, MemoryLower(), calls)
        world.lower.fault = hang
        for i in range(20):
            world.store(f"f{i}", b"1")

        def copied() -> int:
            statistics = world.engine.statistics()
            return statistics.staged_bytes + statistics.counters.persisted_bytes

        async def live() -> None:
            with trio.fail_after(120):
                async with trio.open_nursery() as nursery:
                    await nursery.start(world.engine.run)
                    await world.until(lambda: copied() >= 19)
                    await world.until(
                        lambda: calls.statistics()[1].in_flight == 1
                    )  # a version is staged before its thread is free
                    assert copied() == 19
                    release.set()
                    await world.until(world.engine.drained)
                    nursery.cancel_scope.cancel()

        trio.run(live)
        calls.close()
        assert world.lower.visible() == world.application_view()

    def test_the_engine_can_be_cancelled_while_everything_hangs(self, tmp_path: Path) -> None:
        release = threading.Event()
        calls = CallPools.make(REAL)
        world = World(tmp_path, MemoryLower(), calls)
        world.lower.fault = lambda _label, _path: (release.wait(120), None)[1]
        for i in range(100):
            world.store(f"f{i}", b"1")

        async def live() -> None:
            with trio.fail_after(60):
                await world.run_for(0.2)

        trio.run(live)
        assert sum(pool.threads for pool in calls.statistics()) < 70
        release.set()
        calls.close()


def test_bandwidth_can_be_lifted_while_streams_wait(tmp_path: Path) -> None:
    calls = CallPools.make(REAL)
    world = World(tmp_path, MemoryLower(), calls, bandwidth=1000)
    world.store("f", b"1" * MiB)

    async def live() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                await nursery.start(world.engine.run)
                quiet = 0
                while quiet < 10:  # waiting for the limit is not waiting for the backing directory
                    await trio.sleep(0.01)
                    quiet = (
                        quiet + 1
                        if calls.streams.statistics().calls
                        and calls.health.statistics().oldest_s == 0
                        else 0
                    )
                assert not world.engine.drained()
                world.engine.set_bandwidth(0)
                await world.until(world.engine.drained)
                nursery.cancel_scope.cancel()

    trio.run(live)
    calls.close()
    assert world.lower.visible() == {b"f": b"1" * MiB}


def test_failed_removals_of_staging_files_are_repeated(world: World, run: Run) -> None:
    write = FailNth("write", 1, errno.EIO)
    unlink = FailNth("unlink", 1, errno.EIO)

    def both(label: str, path: tuple[bytes, ...]) -> None:
        write(label, path)
        unlink(label, path)

    world.lower.fault = both
    world.store("f", b"1")
    run(world.run_for, 0.9)
    assert len(world.lower.list_staging()) == 1
    run(world.drain)
    assert not world.lower.list_staging()
    assert world.lower.visible() == {b"f": b"1"}


def test_a_staging_file_that_cannot_be_removed_does_not_keep_the_drain_from_ending(
    world: World, run: Run
) -> None:
    write = FailNth("write", 1, errno.EIO)
    unlink = FailNth("unlink", 1, errno.EIO, times=0)

    def both(label: str, path: tuple[bytes, ...]) -> None:
        write(label, path)
        unlink(label, path)

    world.lower.fault = both
    world.store("f", b"1")
    run(world.drain)
    assert len(world.lower.list_staging()) == 1
    assert world.lower.visible() == {b"f": b"1"}


def test_a_file_that_shrinks_while_it_streams_gives_its_place_back(world: World) -> None:
    """As a version does that the kernel wrote to: it becomes what its file is now."""
    queue = StreamQueue(world.log, {}, lambda _version: False, 1, REAL.clock)
    for small, name in ((10, "a"), (2 * MiB, "b")):
        op = world.store(name, bytes(2 * MiB))
        queue.add(op)
        assert queue.next(0.0) is op, name
        stream = queue.start(op)
        stream.version.size = small
        queue.end(stream)
