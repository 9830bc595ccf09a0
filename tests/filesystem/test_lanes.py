"""Which open gets which lane, and that what the kernel writes unseen is neither lost nor taken for
something else.

The test is the kernel: it writes to the descriptor that an open in the passthrough lane hands out.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import trio

from acpfs.filesystem import lanes
from acpfs.filesystem.records import AttributeChange, Lane, OpenFile
from acpfs.filesystem.steps import settled
from acpfs.ram.control_groups import LimitedGroup
from acpfs.types import ROOT, Ino
from tests.filesystem.world import BUDGET_BYTES, CALLER, World
from tests.filesystem.world import run as in_world
from tests.rig.storage.servers import until

MIB = 1 << 20


run = partial(in_world, passthrough=True)


async def opened(w: World, ino: Ino, flags: int) -> OpenFile:
    return await w.do(w.fs.open(ino, flags, CALLER))


async def lane_of_new(w: World, name: bytes) -> Lane:
    """The lane that the writer of a new file gets."""
    file, _attributes = await w.create(name)
    await w.close(file)
    return file.lane


def reasons(w: World) -> set[str]:
    return set(w.fs.statistics().lane_choices)


def persisted(w: World, name: str) -> bytes:
    return (w.backing / name).read_bytes()


# -- who is admitted


def test_the_first_file_of_a_kind_goes_through_the_daemon_and_teaches_its_size(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        assert await lane_of_new(w, b"iter_100.pt") is Lane.DIRECT
        assert "its size is not known from an earlier file" in reasons(w)
        await w.write(b"iter_200.pt", b"x" * 2 * MIB)
        assert await lane_of_new(w, b"iter_300.pt") is Lane.PASSTHROUGH
        assert await lane_of_new(w, b"another.pt") is Lane.DIRECT

    run(tmp_path, scenario)


@pytest.mark.clause("S335")
def test_an_open_for_reading_waits_with_passthrough_for_a_writer_that_has_just_been_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may come to the end of the second open first, and would then end the first one
    with EIO.
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"x" * 1000)
        writer = await opened(w, ino, os.O_WRONLY | os.O_SYNC)
        assert writer.lane is Lane.DIRECT
        early = await opened(w, ino, os.O_RDONLY)
        assert early.lane is Lane.DIRECT
        assert "somebody opens it in the daemon's lane at this moment" in reasons(w)
        await w.close(early)
        monkeypatch.setattr(lanes, "ARRIVAL_S", 0.0)
        late = await opened(w, ino, os.O_RDONLY)
        assert late.lane is Lane.PASSTHROUGH
        monkeypatch.undo()
        beside = await opened(
            w, ino, os.O_WRONLY | os.O_SYNC
        )  # it gets the file that the kernel has
        again = await opened(w, ino, os.O_RDONLY)
        assert (beside.lane, again.lane) == (Lane.DIRECT, Lane.PASSTHROUGH)
        for file in (writer, late, beside, again):
            await w.close(file)
        alone = await opened(w, ino, os.O_RDONLY)  # who has closed it has had it
        assert alone.lane is Lane.PASSTHROUGH
        await w.close(alone)

    run(tmp_path, scenario)


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    async def learn(w: World) -> None:
        await w.write(b"iter_1.pt", b"x" * 2 * MIB)

    async def use(w: World) -> None:
        assert await lane_of_new(w, b"iter_2.pt") is Lane.PASSTHROUGH

    run(tmp_path, learn)
    run(tmp_path, use)


def test_a_small_file_teaches_nothing(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"iter_1.json", b"{}")
        assert await lane_of_new(w, b"iter_2.json") is Lane.DIRECT

    run(tmp_path, scenario)


def test_where_ram_is_short_the_daemon_s_lane_is_taken(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"iter_1.pt", b"x" * 8 * MIB)  # held: stays dirty
        assert await lane_of_new(w, b"iter_2.pt") is Lane.DIRECT  # 8 × 1.25 + 16 MiB beside 8 of 32
        assert "RAM is short" in reasons(w)

    run(tmp_path, scenario, budget_bytes=32 * MIB)


def test_clean_files_make_room_for_an_admission(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"iter_1.pt", b"x" * 8 * MIB)
        await w.drained()
        assert await lane_of_new(w, b"iter_2.pt") is Lane.PASSTHROUGH
        assert w.fs.statistics().content.evicted_files == 1

    run(tmp_path, scenario, budget_bytes=32 * MIB)


@pytest.mark.parametrize("change", ["rename", "setxattr", "chmod"])
def test_a_file_whose_name_or_attributes_changed_is_not_evicted_before_that_is_persisted(
    tmp_path: Path, change: str
) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"iter_1.pt", b"x" * 8 * MIB)
        await w.drained()
        w.engine.hold(True)
        if change == "rename":
            await w.do(w.fs.rename(ROOT, b"iter_1.pt", ROOT, b"iter_0.pt", 0))
        elif change == "setxattr":
            await w.do(w.fs.setxattr(ino, b"user.a", b"1", 0))
        else:
            await w.do(w.fs.setattr(ino, AttributeChange(mode=0o600), None, CALLER))
        assert await lane_of_new(w, b"iter_2.pt") is Lane.DIRECT
        assert w.fs.statistics().content.evicted_files == 0
        await w.drained()
        assert await lane_of_new(w, b"iter_3.pt") is Lane.PASSTHROUGH

    run(tmp_path, scenario, budget_bytes=32 * MIB)


def test_what_is_promised_to_one_writer_is_not_promised_to_the_next(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"iter_1.pt", b"x" * 2 * MIB)
        await w.drained()
        first, _attributes = await w.create(b"iter_2.pt")
        second, _attributes = await w.create(b"iter_3.pt")
        assert (first.lane, second.lane) == (Lane.PASSTHROUGH, Lane.DIRECT)
        await w.close(first)
        assert await lane_of_new(w, b"iter_4.pt") is Lane.PASSTHROUGH
        await w.close(second)

    run(tmp_path, scenario, budget_bytes=32 * MIB)


def group(base: Path, limit: int) -> LimitedGroup:
    """A control group that uses nothing yet."""
    (base / "group").mkdir()
    (base / "group" / "memory.current").write_text("0\n")
    return LimitedGroup(base / "group", limit)


@pytest.mark.parametrize(
    ("room", "lane"),
    [(64 * MIB, Lane.PASSTHROUGH), (4 * MIB, Lane.DIRECT), (None, Lane.PASSTHROUGH)],
)
def test_the_writer_s_memory_control_group_must_have_room(
    tmp_path: Path, room: int | None, lane: Lane
) -> None:
    asked = []

    def limits(pid: int) -> list[LimitedGroup]:
        asked.append(pid)
        return [] if room is None else [group(tmp_path, room)]

    async def scenario(w: World) -> None:
        await w.write(b"iter_1.pt", b"x" * 2 * MIB)
        assert await lane_of_new(w, b"iter_2.pt") is lane
        assert asked == [CALLER.pid]

    run(tmp_path, scenario, limits=limits)


@pytest.mark.clause("S243")
def test_a_writer_of_whose_control_group_nothing_is_known_takes_the_daemon_s_lane(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"iter_1.pt", b"x" * 2 * MIB)
        assert await lane_of_new(w, b"iter_2.pt") is Lane.DIRECT
        assert "the writer's memory control group is not known" in reasons(w)

    run(tmp_path, scenario, limits=lambda _pid: None)


# -- what the kernel writes


async def admitted(w: World) -> tuple[Ino, OpenFile]:
    """A file of 2 MiB, persisted, and a writer of it in the passthrough lane."""
    ino = await w.write(b"iter_1.pt", b"a" * 2 * MIB)
    await w.drained()
    writer = await opened(w, ino, os.O_WRONLY)
    assert writer.lane is Lane.PASSTHROUGH
    return ino, writer


def test_what_the_kernel_wrote_is_a_version_at_close(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino, writer = await admitted(w)
        os.pwrite(writer.backing_fd, b"kernel", 3 * MIB)
        assert (await w.do(w.fs.getattr(ino))).size == 3 * MIB + 6
        await w.close(writer)
        await w.drained()
        assert persisted(w, "iter_1.pt")[3 * MIB :] == b"kernel"
        assert w.fs.statistics().open_lanes == {"passthrough": 0, "direct": 0}

    run(tmp_path, scenario)


@pytest.mark.parametrize("looked_by", ["chmod", "stat", "stat beside another handle"])
def test_what_the_kernel_wrote_is_not_forgotten_by_looking(tmp_path: Path, looked_by: str) -> None:
    async def scenario(w: World) -> None:
        ino, writer = await admitted(w)
        reader = await opened(w, ino, os.O_RDONLY)
        if looked_by != "stat beside another handle":
            await w.close(reader)
        os.pwrite(writer.backing_fd, b"kernel", 3 * MIB)
        if looked_by == "chmod":
            await w.do(w.fs.setattr(ino, AttributeChange(mode=0o600), None, CALLER))
        await w.do(w.fs.getattr(ino))
        await w.close(writer)
        await w.drained()
        assert persisted(w, "iter_1.pt")[3 * MIB :] == b"kernel"

    run(tmp_path, scenario)


def test_the_first_close_of_a_copied_descriptor_is_withdrawn_when_the_kernel_writes_on(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        ino, writer = await admitted(w)
        os.pwrite(writer.backing_fd, b"half", 3 * MIB)
        await w.do(w.fs.flush(writer.handle))
        os.pwrite(writer.backing_fd, b" and half", 3 * MIB + 4)
        await w.close(writer)
        stores = [op for op in w.log if op.version is not None and op.ino == ino]
        assert len(stores) == 1
        await w.drained()
        assert persisted(w, "iter_1.pt")[3 * MIB :] == b"half and half"

    run(tmp_path, scenario)


@pytest.mark.clause("S32")
def test_an_append_through_the_daemon_comes_behind_what_the_kernel_wrote(tmp_path: Path) -> None:
    """The kernel gives the place, which is the end as it knows it; the daemon has not seen those
    writes.
    """

    async def scenario(w: World) -> None:
        ino, writer = await admitted(w)
        appender = await opened(w, ino, os.O_RDWR | os.O_APPEND)
        assert appender.lane is Lane.DIRECT
        end = os.fstat(writer.backing_fd).st_size
        os.pwrite(writer.backing_fd, b"kernel", end)
        await w.do(w.fs.write(appender.handle, end + 6, b"daemon"))
        await w.close(appender)
        await w.close(writer)
        await w.drained()
        assert persisted(w, "iter_1.pt")[end:] == b"kerneldaemon"

    run(tmp_path, scenario)


@pytest.mark.clause("S421")
def test_a_close_during_a_write_has_all_that_was_written_before_it_is_answered(
    tmp_path: Path,
) -> None:
    """The file grows between the look that finds it written to, and the mark, which waits for the
    write."""

    async def scenario(w: World) -> None:
        ino, writer = await admitted(w)
        end = os.fstat(writer.backing_fd).st_size
        os.pwrite(writer.backing_fd, b"begun", end)
        held = Event()
        held_call = w.tier.calls.submit(w.inner.table[ino].body.tier, held.wait, 60)
        call = w.fs.flush(writer.handle)
        marked = w.fs.steps.step(call, None)
        os.pwrite(writer.backing_fd, b" and ended", end + 5)
        held.set()
        await settled(held_call)
        await settled(marked)
        with pytest.raises(StopIteration):
            w.fs.steps.step(call, marked)
        assert (await w.do(w.fs.getattr(ino))).size == end + 15
        await w.do(w.fs.release(writer.handle))
        await w.drained()
        assert persisted(w, "iter_1.pt")[end:] == b"begun and ended"

    run(tmp_path, scenario)


def write_in_one_tick(writer: OpenFile, data: bytes, tick_ns: int) -> None:
    """The kernel writes while its clock, which ticks every few milliseconds, still shows what it
    did at the write before.
    """
    os.pwrite(writer.backing_fd, data, 0)
    os.utime(writer.backing_fd, ns=(tick_ns, tick_ns))


@pytest.mark.clause("S8")
def test_two_writes_within_one_tick_of_the_clock_are_two(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        _ino, writer = await admitted(w)
        write_in_one_tick(writer, b"first", 10**18)
        await w.do(w.fs.flush(writer.handle))
        write_in_one_tick(writer, b"later", 10**18)
        await w.close(writer)
        await w.drained()
        assert persisted(w, "iter_1.pt")[:5] == b"later"

    run(tmp_path, scenario)


@pytest.mark.clause("S8")
def test_a_watched_version_is_read_again_after_a_write_within_one_tick(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"iter_1.pt", b"a" * 20 * MIB)
        await w.drained()
        writer = await opened(w, ino, os.O_WRONLY)
        assert writer.lane is Lane.PASSTHROUGH
        write_in_one_tick(writer, b"first", 10**18)
        await w.do(w.fs.fsync(writer.handle, False))
        version = w.log.front(9)[-1].version
        assert version is not None

        def still_frozen() -> bool:
            with w.fs.lock:
                return w.inner.changes.still_frozen(version)

        assert still_frozen()
        write_in_one_tick(writer, b"later", 10**18)
        assert not still_frozen()  # its bytes are of two moments
        # from a mark that is newer than this reading, made by another thread
        until(still_frozen, "a mark that is newer")
        await w.close(writer)
        await w.drained()
        assert persisted(w, "iter_1.pt")[:5] == b"later"

    run(tmp_path, scenario, budget_bytes=128 * MIB)


@pytest.mark.clause("S14")
def test_a_write_that_is_under_way_while_a_copy_of_its_descriptor_is_closed_is_not_lost(
    tmp_path: Path,
) -> None:
    """The first close meets a write that has set its mtime already and will not do so again;
    without the mark that failed each time..
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"iter_1.pt", b"a" * 15 * MIB)
        await w.drained()
        for turn in range(20):
            w.engine.hold(True)
            writer = await opened(w, ino, os.O_WRONLY)
            assert writer.lane is Lane.PASSTHROUGH
            data = bytes([turn]) * 15 * MIB
            (tmp_path / "source").write_bytes(data)
            with (
                (tmp_path / "source").open("rb") as file,
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as source,
            ):
                source.madvise(
                    mmap.MADV_RANDOM
                )  # a page fault for each page: the write is slower than the copy that overtakes it
                thread = threading.Thread(target=os.pwrite, args=(writer.backing_fd, source, 0))
                before = os.fstat(writer.backing_fd).st_mtime_ns
                thread.start()
                while os.fstat(writer.backing_fd).st_mtime_ns == before:
                    pass
                await w.do(w.fs.flush(writer.handle))
                await trio.to_thread.run_sync(thread.join)
            await w.close(writer)
            await w.drained()
            assert persisted(w, "iter_1.pt") == data, turn

    run(tmp_path, scenario, budget_bytes=256 * MIB)


def test_marks_do_not_show(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino, writer = await admitted(w)
        os.pwrite(writer.backing_fd, b"x", 0)
        written_ns = os.fstat(writer.backing_fd).st_mtime_ns
        await w.close(writer)
        await w.drained()
        assert (await w.do(w.fs.getattr(ino))).mtime_ns == written_ns
        assert (w.backing / "iter_1.pt").stat().st_mtime_ns == written_ns

    run(tmp_path, scenario)


@pytest.mark.clause("S39")
@pytest.mark.parametrize("gone_by", ["rename", "unlink"])
def test_a_name_that_is_gone_does_not_come_back_with_a_withdrawn_close(
    tmp_path: Path, gone_by: str
) -> None:
    """Found by random operations: the first close's STORE had made the name, and withdrawing it
    gave the name back to the deleted file.
    """

    async def scenario(w: World) -> None:
        old, _attributes = await w.create(b"b")
        await w.do(w.fs.write(old.handle, 0, b"old"))
        await w.do(w.fs.flush(old.handle))
        if gone_by == "rename":
            await w.write(b"a", b"new")
            await w.do(w.fs.rename(ROOT, b"a", ROOT, b"b", 0))
        await w.do(w.fs.unlink(ROOT, b"b"))
        await w.do(w.fs.write(old.handle, 0, b"still open"))
        assert await w.names() == []
        with pytest.raises(FileNotFoundError):
            await w.do(w.fs.lookup(ROOT, b"b"))
        await w.close(old)
        await w.drained()
        assert [p.name for p in w.backing.iterdir() if p.name != ".acpfs"] == []

    run(tmp_path, scenario)


def test_a_writer_that_wrote_nothing_logs_nothing(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        _ino, writer = await admitted(w)
        await w.close(writer)
        assert len(w.log) == 0

    run(tmp_path, scenario)


def test_a_persisted_version_is_not_touched_by_the_next_writer(tmp_path: Path) -> None:
    """The version of the first close is copied aside before the kernel gets the file."""

    async def scenario(w: World) -> None:
        ino = await w.write(b"iter_1.pt", b"a" * 2 * MIB)
        writer = await opened(w, ino, os.O_WRONLY)
        assert writer.lane is Lane.PASSTHROUGH
        os.pwrite(writer.backing_fd, b"b" * MIB, 0)
        versions = [op.version for op in w.log if op.version is not None]
        fd = w.tier.open(versions[0].tier_id)
        assert os.pread(fd, 2 * MIB, 0) == b"a" * 2 * MIB
        os.close(fd)
        await w.close(writer)
        await w.drained()
        assert persisted(w, "iter_1.pt") == b"b" * MIB + b"a" * MIB

    run(tmp_path, scenario)


def test_a_reader_in_the_daemon_s_lane_keeps_later_opens_out_of_passthrough(tmp_path: Path) -> None:
    """The kernel refuses passthrough (EIO) to a file that it has cached through the daemon: the
    lane must not be handed out at all.
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"iter_1.pt", b"a" * 2 * MIB)
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        early = await opened(w, ino, os.O_RDONLY)
        w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
        for flags in (os.O_RDONLY, os.O_WRONLY):
            late = await opened(w, ino, flags)
            assert late.lane is Lane.DIRECT
            await w.close(late)
        assert "open in the daemon's lane, perhaps mapped" in reasons(w)
        await w.close(early)
        late = await opened(w, ino, os.O_RDONLY)
        assert late.lane is Lane.PASSTHROUGH
        await w.close(late)

    run(tmp_path, scenario)


def test_a_mapping_beside_a_passthrough_reader_is_persisted(tmp_path: Path) -> None:
    """Mapped pages of such a file are the tier file's: what is written through them leaves no
    trace, not even a new mtime.
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"iter_1.pt", b"a" * 2 * MIB)
        await w.drained()
        reader = await opened(w, ino, os.O_RDONLY)
        assert reader.lane is Lane.PASSTHROUGH
        mapper = await opened(w, ino, os.O_RDWR)
        assert mapper.lane is Lane.DIRECT
        before = os.fstat(reader.backing_fd)
        os.pwrite(reader.backing_fd, b"mapped", 5)
        os.utime(reader.backing_fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        await w.close(mapper)
        await w.close(reader)
        await w.drained()
        assert persisted(w, "iter_1.pt")[:12] == b"aaaaamappeda"

    run(tmp_path, scenario)


@pytest.mark.clause("S41")
@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY])
def test_a_time_that_was_set_stays_where_somebody_could_write_and_did_not(
    tmp_path: Path, flags: int
) -> None:
    """What the kernel shows of a new file's tier file is when that was made: no sign of a write
    (found by the model, seed 3384658376).
    """

    async def scenario(w: World) -> None:
        await w.write(b"iter_1.pt", b"x" * 2 * MIB)
        reader, attributes = await w.create(b"iter_2.pt", flags=os.O_RDONLY)
        assert reader.lane is Lane.PASSTHROUGH
        await w.do(w.fs.setattr(attributes.ino, AttributeChange(mtime_ns=10**18), None, CALLER))
        writer = await opened(w, attributes.ino, flags)
        await w.close(writer)
        await w.close(reader)
        assert (await w.do(w.fs.getattr(attributes.ino))).mtime_ns == 10**18

    run(tmp_path, scenario)


def test_a_file_that_only_the_backing_directory_has_is_read_by_the_kernel_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing/old").write_bytes(b"cold")

    async def scenario(w: World) -> None:
        ino = (await w.do(w.fs.lookup(ROOT, b"old"))).ino
        reader = await opened(w, ino, os.O_RDONLY)
        assert reader.lane is Lane.PASSTHROUGH
        assert os.pread(reader.backing_fd, 9, 0) == b"cold"
        assert w.tier.used_bytes == 0
        await w.close(reader)

    run(tmp_path, scenario, warm_reads="off")


def test_open_writers_are_counted_and_the_count_returns_to_zero(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        changes = w.inner.changes
        await w.write(b"iter_1.pt", b"x" * 2 * MIB)
        assert not changes.is_writing()
        kernel, _attributes = await w.create(b"iter_2.pt")
        daemon, attributes = await w.create(b"other")
        assert (kernel.lane, daemon.lane) == (Lane.PASSTHROUGH, Lane.DIRECT)
        await w.close(kernel)
        assert changes.is_writing()
        reader = await opened(w, attributes.ino, os.O_RDONLY)
        await w.close(daemon)
        assert not changes.is_writing(), "a reader is no writer"
        await w.close(reader)
        assert not changes.is_writing()

    run(tmp_path, scenario)


@pytest.mark.clause("S60")
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDONLY])
@pytest.mark.parametrize("cold", [False, True])
def test_an_open_that_finds_no_descriptor_leaves_nothing_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, cold: bool
) -> None:
    """Or the node would count as open in the kernel for ever."""

    async def scenario(w: World) -> None:
        await w.write(b"iter_1.pt", b"x" * 2 * MIB)
        await w.drained()
        if cold:
            with w.fs.lock:
                w.inner.eviction.evict(b"")
        ino = (await w.do(w.fs.lookup(ROOT, b"iter_1.pt"))).ino
        node = w.inner.table[ino]

        def none_left(*_arguments: Any) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patch:
            patch.setattr(w.inner.contents, "opened", none_left)
            patch.setattr(w.inner.warming, "watch", none_left)
            with pytest.raises(OSError, match="Too many open files"):
                await opened(w, ino, flags)
        counts = (
            node.handles,
            node.kernel_handles,
            node.kernel_writers,
            node.bound_handles,
            node.daemon_mappers,
        )
        assert counts == (0, 0, 0, 0, 0)
        file = await opened(w, ino, flags)
        assert file.lane is Lane.PASSTHROUGH
        await w.close(file)

    run(tmp_path, scenario)


@pytest.mark.clause("S31")
def test_an_empty_file_that_is_open_for_reading_can_be_opened_for_more(tmp_path: Path) -> None:
    """It has nothing to bring to RAM, and so little for the kernel to read from the backing
    directory: exception X7 is not for it.
    """

    async def scenario(w: World) -> None:
        (w.backing / "empty").touch()
        ino = (await w.do(w.fs.lookup(ROOT, b"empty"))).ino
        reader = await opened(w, ino, os.O_RDONLY)
        writer = await opened(w, ino, os.O_RDWR)
        await w.do(w.fs.write(writer.handle, 0, b"bytes"))
        assert await w.do(w.fs.read(reader.handle, 0, 9)) == b"bytes"
        await w.close(writer)
        await w.close(reader)

    run(tmp_path, scenario)


def test_a_file_that_does_not_fit_into_ram_is_not_mapped_over_the_one_that_others_read(
    tmp_path: Path,
) -> None:
    """X7 also when its new content is in a staging file: the kernel has the backing directory's
    file still.
    """

    async def scenario(w: World) -> None:
        (w.backing / "f").write_bytes(bytes(2 * MIB))
        ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
        reader = await opened(w, ino, os.O_RDONLY)
        assert reader.lane is Lane.PASSTHROUGH
        writer = await opened(w, ino, os.O_WRONLY | os.O_TRUNC)
        await w.do(w.fs.write(writer.handle, 0, bytes(BUDGET_BYTES + MIB)))
        assert w.fs.statistics().overflowed_files == 1
        with pytest.raises(OSError, match="busy"):
            await opened(w, ino, os.O_RDWR)
        for file in (writer, reader):
            await w.close(file)

    run(tmp_path, scenario, when_full="native", warm_reads="off")
