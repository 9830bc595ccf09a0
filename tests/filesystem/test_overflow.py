"""Files that do not fit into the RAM tier complete all the same: in a staging file, at the backing
directory's speed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from acpfs.backing import filling
from acpfs.backing.lower import LowerPath
from acpfs.filesystem.content import overflow, whole_reads
from acpfs.filesystem.content.body import Body
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import AttributeChange, OpenFile
from acpfs.filesystem.steps import Call, settled, wait
from acpfs.ram.mounts import mount_tmpfs, unmount
from acpfs.types import ROOT, Ino
from tests.filesystem.held_call import HeldCall
from tests.filesystem.test_cold_reads import Hang
from tests.filesystem.test_slow_backing import until as until_so
from tests.filesystem.world import CALLER, World, run, violations, world

pytestmark = pytest.mark.clause("S53")

MIB = 1 << 20
BUDGET = 4 * MIB


def block(number: int) -> bytes:
    return bytes([number]) * MIB


async def write_blocks(w: World, name: bytes, count: int) -> Ino:
    opened, attributes = await w.create(name)
    for i in range(count):
        await w.do(w.fs.write(opened.handle, i * MIB, block(i)))
    await w.close(opened)
    return attributes.ino


def test_a_file_larger_than_the_budget(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await write_blocks(w, b"big", 10)
        assert w.tier.used_bytes <= BUDGET
        assert w.fs.statistics().overflowed_files == 1
        expected = b"".join(map(block, range(10)))
        assert await w.read(ino, 16 * MIB) == expected  # before it is persisted
        assert not (w.backing / "big").exists()
        await w.drained()
        assert (w.backing / "big").read_bytes() == expected
        assert await w.read(ino, 16 * MIB) == expected  # and after
        assert w.lower.list_staging() == []

    run(tmp_path, scenario, budget_bytes=BUDGET)


def test_several_writers_that_do_not_fit_together(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(write_blocks, w, b"shard%d" % number, 3)
        await w.drained()
        for number in range(4):
            assert (w.backing / f"shard{number}").read_bytes() == b"".join(map(block, range(3)))

    run(tmp_path, scenario, budget_bytes=BUDGET, hold=False)


def test_order_is_kept(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"first", b"1")  # held, so that waiting for room would be for ever
        await write_blocks(w, b"big", 6)
        await w.write(b"tracker", b"2")
        assert [op.name for op in w.log] == [b"first", b"big", b"tracker"]
        await w.drained()
        assert (w.backing / "tracker").exists()

    run(tmp_path, scenario, budget_bytes=BUDGET, when_full="native")


def test_rewriting_and_truncating_what_overflowed(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await write_blocks(w, b"big", 6)
        w.engine.hold(False)
        await w.do(
            w.fs.setattr(ino, AttributeChange(size=5 * MIB + 7), None, CALLER)
        )  # waits until the first version is persisted
        opened = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
        await w.do(w.fs.write(opened.handle, 3, b"xyz"))
        await w.close(opened)
        await w.drained()
        content = (w.backing / "big").read_bytes()
        assert content[:6] == b"\0\0\0xyz"
        assert len(content) == 5 * MIB + 7
        await w.write(b"big", b"small again")
        await w.drained()
        assert (w.backing / "big").read_bytes() == b"small again"
        assert w.lower.list_staging() == []

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S8")
@pytest.mark.parametrize("cuts", [False, True])
def test_that_a_staging_file_is_changed_is_recorded_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: bool
) -> None:
    """Else a kill behind the first byte would let the next mount show a half as complete."""
    seen: list[tuple[bool, bool]] = []

    async def scenario(w: World) -> None:
        ino = await write_blocks(w, b"big", 10)
        await w.drained()
        name = "_truncate_overflow" if cuts else "_write_overflow"
        change = getattr(Contents, name)

        async def looked(contents: Contents, node: Node, body: Body, *more: Any) -> Any:
            seen.append((body.modified, w.state.has_changes))
            return await change(contents, node, body, *more)

        monkeypatch.setattr(Contents, name, looked)
        opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        if cuts:
            await w.do(w.fs.setattr(ino, AttributeChange(size=5 * MIB), opened.handle, CALLER))
        else:
            await w.do(w.fs.write(opened.handle, 0, block(99)))
        await w.close(opened)
        monkeypatch.undo()
        await w.drained()
        first = block(0) if cuts else block(99)
        assert (w.backing / "big").read_bytes()[:MIB] == first
        assert (w.backing / "big").stat().st_size == (5 if cuts else 10) * MIB

    run(tmp_path, scenario, budget_bytes=BUDGET)
    assert seen == [(True, False)], "modified, and nothing is left to be recorded"


def test_deleting_what_overflowed_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await write_blocks(w, b"big", 6)
        await w.do(w.fs.unlink(ROOT, b"big"))
        w.fs.forget([(ino, 10)])
        await w.drained()
        w.calls.requests.submit("after the removal", lambda: None).result(60)
        w.calls.streams.submit("after the removal", lambda: None).result(60)
        assert w.fs.statistics().nodes == 1

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S39")
@pytest.mark.parametrize("ends", ["fsync", "close"])
@pytest.mark.parametrize("session", ["", "s"], ids=["", "by the next worker"])
def test_what_overflowed_and_was_deleted_is_there_for_who_has_it_open(
    tmp_path: Path, ends: str, session: str
) -> None:
    """Its place in the order is given up with its name; its only bytes are not."""

    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET, session=session) as w:
            w.engine.hold(True)
            opened, attributes = await w.create(b"big", flags=os.O_RDWR)
            for i in range(6):
                await w.do(w.fs.write(opened.handle, i * MIB, block(i)))
            if ends == "fsync":
                await w.do(w.fs.fsync(opened.handle, False))
            else:
                reader = await w.do(w.fs.open(attributes.ino, os.O_RDWR, CALLER))
                await w.close(opened)
                opened = reader
            await w.do(w.fs.unlink(ROOT, b"big"))
            w.engine.hold(False)
            await w.drained()
            if not session:
                await read_and_write_on(w, opened)
        if session:
            async with world(tmp_path, budget_bytes=BUDGET, session=session) as w:
                await read_and_write_on(w, opened)

    async def read_and_write_on(w: World, opened: OpenFile) -> None:
        w.calls.requests.submit("after removals", lambda: None).result(60)
        await w.do(w.fs.write(opened.handle, 6 * MIB, block(6)))
        expected = b"".join(map(block, range(7)))
        assert await w.do(w.fs.read(opened.handle, 0, 8 * MIB)) == expected
        await w.close(opened)
        await w.drained()
        await until_so(lambda: not w.lower.list_staging())  # threads remove them, several at a time

    trio.run(main)


def test_a_restart_finds_what_overflowed(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            await write_blocks(w, b"big", 6)
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            found = await w.do(w.fs.lookup(ROOT, b"big"))
            assert await w.read(found.ino, 8 * MIB) == b"".join(map(block, range(6)))
            await w.drained()
            assert (w.backing / "big").read_bytes() == b"".join(map(block, range(6)))

    trio.run(main)


def test_changing_a_large_file_of_the_backing_directory(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing/old").write_bytes(b"o" * (6 * MIB))

    async def scenario(w: World) -> None:
        found = await w.do(w.fs.lookup(ROOT, b"old"))
        opened = await w.do(w.fs.open(found.ino, os.O_WRONLY | os.O_APPEND, CALLER))
        await w.do(w.fs.write(opened.handle, 6 * MIB, b"end"))
        await w.close(opened)
        await w.drained()
        assert (w.backing / "old").read_bytes() == b"o" * (6 * MIB) + b"end"

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S14")
def test_a_copied_descriptor_that_is_closed_does_not_publish_half_of_what_overflowed(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        opened, _ = await w.create(b"big")
        for i in range(6):
            await w.do(w.fs.write(opened.handle, i * MIB, block(i)))
        await w.do(w.fs.flush(opened.handle))
        await w.do(w.fs.write(opened.handle, 6 * MIB, block(6)))
        await w.close(opened)
        await w.drained()
        assert (w.backing / "big").read_bytes() == b"".join(map(block, range(7)))
        assert w.lower.list_staging() == []

    run(tmp_path, scenario, budget_bytes=BUDGET, hold=False)


def test_two_that_open_a_file_for_which_there_is_no_room_have_one_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's copy from the backing directory arrives after the first one wrote."""
    first_wrote: Future[None] = Future()
    second_begun: Future[None] = Future()
    begun: list[Callable[[int], object]] = []

    async def scenario(w: World) -> None:
        (w.backing / "f").write_bytes(block(1) * 8)
        filled = w.inner.overflow.filled
        first_begun = trio.Event()

        async def late(*arguments: Any) -> Body:
            begun.append(arguments[0])
            first_begun.set()
            second = len(begun) == 2
            if second:
                second_begun.set_result(None)
            content = await filled(*arguments)
            await wait(first_wrote if second else second_begun)
            return content

        async def change(number: int, until: trio.Event, written: trio.Event) -> None:
            opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            await w.do(w.fs.write(opened.handle, number * MIB, block(2 + number)))
            written.set()
            if not first_wrote.done():
                first_wrote.set_result(None)
            await until.wait()
            await w.close(opened)

        monkeypatch.setattr(w.inner.overflow, "filled", late)
        ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
        written = [trio.Event(), trio.Event()]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change, 0, written[1], written[0])
            await first_begun.wait()
            nursery.start_soon(change, 1, written[0], written[1])
        await w.drained()
        assert len(begun) == 2
        assert (w.backing / "f").read_bytes() == block(2) + block(3) + block(1) * 6
        assert w.lower.list_staging() == []

    run(tmp_path, scenario, budget_bytes=BUDGET, hold=False)


@pytest.mark.clause("S28", "S29")
def test_a_file_that_others_change_while_it_is_opened_is_changed_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        (w.backing / "f").write_bytes(block(1) * 6)
        ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
        create_staging = w.lower.create_staging

        def late(name: str) -> int:
            monkeypatch.setattr(w.lower, "create_staging", create_staging)
            (w.backing / "f").write_bytes(block(2) * 8)
            return create_staging(name)

        monkeypatch.setattr(w.lower, "create_staging", late)
        opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(opened.handle, 0, block(3)))
        await w.close(opened)
        await w.drained()
        assert (w.backing / "f").read_bytes() == block(3) + block(2) * 7
        assert w.lower.list_staging() == []

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S101")
def test_an_open_whose_copy_does_not_come_on_gets_an_error_and_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_reads, "CHUNK_BYTES", MIB)

    async def scenario(w: World) -> None:
        (w.backing / "f").write_bytes(block(1) * 6)
        ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
        hang = Hang(w, monkeypatch, 3 * MIB)
        remove = w.lower.remove_staging
        removed = threading.Event()

        def noticed(name: str) -> None:
            remove(name)
            removed.set()

        monkeypatch.setattr(w.lower, "remove_staging", noticed)
        with pytest.raises(OSError, match="no answer") as refused:
            await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        assert refused.value.errno == errno.EIO
        hang.goes_on.set()
        assert await trio.to_thread.run_sync(removed.wait, 120)
        assert w.lower.list_staging() == []

    run(tmp_path, scenario, budget_bytes=BUDGET, backing_timeout_s=3.0)


# -- what a killed worker's call still did


def staging_file(w: World) -> Path:
    [name] = w.lower.list_staging()
    return w.backing / ".acpfs/staging/test" / name


def lengthen(path: Path, data: bytes) -> None:
    """As a write does whose caller was never answered."""
    with path.open("ab") as file:
        file.write(data)


@pytest.mark.clause("S195")
def test_bytes_behind_the_logged_end_are_neither_stored_nor_in_the_way(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await write_blocks(w, b"big", 6)
        await w.write(b"next", b"1")
        lengthen(staging_file(w), b"late" * 1000)
        assert await w.read(ino, 8 * MIB) == b"".join(map(block, range(6)))
        await w.drained()
        assert (w.backing / "big").read_bytes() == b"".join(map(block, range(6)))
        assert (w.backing / "next").exists()

    run(tmp_path, scenario, budget_bytes=BUDGET, when_full="native")


@pytest.mark.clause("S195")
def test_bytes_that_are_missing_park_the_file_and_retry_stores_what_is_left(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await write_blocks(w, b"big", 6)
        following = await w.write(b"next", b"1")
        os.truncate(staging_file(w), 5 * MIB)
        await w.drained()
        assert [op.name for op in w.log.parked()] == [b"big"]
        with trio.fail_after(60):
            await settled(w.engine.persisted(w.log.last_seq, following))
        assert (w.backing / "next").exists()
        assert not (w.backing / "big").exists()
        assert w.engine.retry() == 1
        await w.drained()
        assert (w.backing / "big").read_bytes() == b"".join(map(block, range(5))) + bytes(MIB)

    run(tmp_path, scenario, budget_bytes=BUDGET, when_full="native")


@pytest.mark.clause("S195")
def test_the_log_of_an_earlier_acpfs_knows_less_than_the_staging_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overflow, "OVERFLOW_PREFIX", "overflow-")

    async def scenario(w: World) -> None:
        await write_blocks(w, b"big", 6)
        lengthen(staging_file(w), b"more")
        await w.drained()
        assert (w.backing / "big").read_bytes() == b"".join(map(block, range(6))) + b"more"

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S195", "S22")
def test_the_next_worker_knows_how_long_a_file_is_that_overflowed_and_is_open(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            opened, _ = await w.create(b"big")
            for i in range(8):
                await w.do(w.fs.write(opened.handle, i * MIB, block(i)))
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            ino = (await w.do(w.fs.lookup(ROOT, b"big"))).ino
            assert (await w.do(w.fs.getattr(ino))).size == 8 * MIB
            opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            await w.do(w.fs.write(opened.handle, 0, b"x"))
            await w.close(opened)
            await w.drained()
            assert (w.backing / "big").read_bytes() == b"x" + block(0)[1:] + b"".join(
                map(block, range(1, 8))
            )

    trio.run(main)


@pytest.mark.clause("S195")
def test_a_change_waits_for_a_killed_workers_write_and_does_not_keep_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET, when_full="native") as w:
            opened, _ = await w.create(b"big")
            for i in range(6):
                await w.do(w.fs.write(opened.handle, i * MIB, block(i)))
        async with world(tmp_path, budget_bytes=BUDGET, when_full="native") as w:
            ended: Future[None] = Future()
            w.inner.earlier_calls.begin_after(ended)
            ino = (await w.do(w.fs.lookup(ROOT, b"big"))).ino
            opened = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
            written: list[int] = []

            async def write(offset: int, data: bytes) -> None:
                await w.do(w.fs.write(opened.handle, offset, data))
                written.append(offset)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write, 0, b"new")
                nursery.start_soon(write, 7 * MIB, b"end")
                await trio.testing.wait_all_tasks_blocked(0.05)
                with staging_file(w).open("r+b") as late:
                    late.write(b"old")
                lengthen(staging_file(w), b"late" * 1000)
                assert written == []
                assert (
                    len(await w.do(w.fs.read(opened.handle, 0, 8 * MIB))) == 6 * MIB
                )  # who only reads does not wait
                ended.set_result(None)
            await w.close(opened)
            await w.drained()
            first = b"new" + block(0)[3:]
            assert (w.backing / "big").read_bytes() == first + b"".join(
                map(block, range(1, 6))
            ) + bytes(MIB) + b"end"

    trio.run(main)


@pytest.mark.clause("S8")
def test_a_version_waits_for_a_write_that_waits_for_an_earlier_workers_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is hashed and put in place, and then written to."""

    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET, when_full="native", session="s") as w:
            opened, _ = await w.create(b"big")
            for i in range(6):
                await w.do(w.fs.write(opened.handle, i * MIB, block(i)))
        async with world(
            tmp_path, budget_bytes=BUDGET, when_full="native", session="s", hold=False
        ) as w:
            held = HeldCall(w.inner.overflow._cut)
            monkeypatch.setattr(w.inner.overflow, "_cut", held)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.do, w.fs.write(opened.handle, 0, b"new"))
                assert await trio.to_thread.run_sync(held.began.wait, 60)
                await w.do(w.fs.fsync(opened.handle, datasync=False))
                await trio.sleep(0.3)
                assert not (w.backing / "big").exists()
                held.go_on.set()
            await w.close(opened)
            await w.drained()
            assert (w.backing / "big").read_bytes() == b"new" + block(0)[3:] + b"".join(
                map(block, range(1, 6))
            )

    trio.run(main)


def descriptors(w: World) -> int:
    """Of this process, on files of the backing directory."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            where = os.readlink(f"/proc/self/fd/{fd}")
            found += where.startswith(f"{w.backing}/") and stat.S_ISREG(os.fstat(int(fd)).st_mode)
    return found


@pytest.mark.clause("S255")
def test_the_next_worker_reads_what_is_renamed_and_not_yet_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staging file has its place already, and the file is not known to lie there before its
    directory is flushed.
    """
    renamed, go_on, missed, expected = (
        *(threading.Event() for _ in range(3)),
        b"".join(map(block, range(6))),
    )

    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            await write_blocks(w, b"big", 6)
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            rename = w.lower.rename
            open_staging = w.lower.open_staging

            def rename_and_stop(source: LowerPath, target: LowerPath) -> None:
                rename(source, target)
                renamed.set()
                assert go_on.wait(60)

            def open_noted(name: str) -> int:
                try:
                    return open_staging(name)
                except FileNotFoundError:
                    missed.set()
                    raise

            monkeypatch.setattr(w.lower, "rename", rename_and_stop)
            ino = (await w.do(w.fs.lookup(ROOT, b"big"))).ino
            w.engine.hold(False)
            assert await trio.to_thread.run_sync(renamed.wait, 60)
            monkeypatch.setattr(w.lower, "open_staging", open_noted)
            found: list[bytes] = []

            async def read() -> None:
                found.append(await w.read(ino, 8 * MIB))

            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read)
                    assert await trio.to_thread.run_sync(missed.wait, 60)
                    go_on.set()
            finally:
                go_on.set()
            assert found == [expected]
            await w.drained()

    trio.run(main)


@pytest.mark.clause("S255")
def test_a_first_read_has_patience_with_a_storage_that_hangs_in_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has its place already, and its directory's flush does not return: other reads end
    with EIO then, and so does this one.
    """
    hangs = threading.Event()
    go_on = threading.Event()

    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            await write_blocks(w, b"big", 6)
        async with world(tmp_path, budget_bytes=BUDGET, backing_timeout_s=3.0) as w:
            flush = w.lower.sync_directory

            def hang(directory: LowerPath) -> None:
                hangs.set()
                assert go_on.wait(60)
                flush(directory)

            monkeypatch.setattr(w.lower, "sync_directory", hang)
            ino = (await w.do(w.fs.lookup(ROOT, b"big"))).ino
            w.engine.hold(False)
            try:
                assert await trio.to_thread.run_sync(hangs.wait, 60)
                with pytest.raises(OSError) as caught:
                    await w.read(ino, 8 * MIB)
                assert caught.value.errno == errno.EIO
            finally:
                go_on.set()
            await w.drained()
            assert await w.read(ino, 8 * MIB) == b"".join(map(block, range(6)))

    trio.run(main)


@pytest.mark.clause("S255")
def test_first_readers_of_what_an_earlier_worker_made_have_one_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three come at the same time, and one of them is killed while the staging file is being
    opened.
    """
    go_on = threading.Event()

    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            await write_blocks(w, b"big", 6)
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            open_staging = w.lower.open_staging
            before = descriptors(w)

            def open_slowly(name: str) -> int:
                assert go_on.wait(60)
                return open_staging(name)

            monkeypatch.setattr(w.lower, "open_staging", open_slowly)
            ino = (await w.do(w.fs.lookup(ROOT, b"big"))).ino
            opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            found: list[bytes] = []

            async def read(killed: trio.CancelScope) -> None:
                with killed:
                    found.append(await w.do(w.fs.read(opened.handle, 0, MIB)))

            scopes = [trio.CancelScope() for _ in range(3)]
            try:
                async with trio.open_nursery() as nursery:
                    for scope in scopes:
                        nursery.start_soon(read, scope)
                    await trio.testing.wait_all_tasks_blocked()
                    scopes[0].cancel()
                    await trio.testing.wait_all_tasks_blocked()
                    go_on.set()
            finally:
                go_on.set()
            assert found == [block(0)] * 2
            await w.close(opened)
            await w.drained()
            with trio.fail_after(60):
                while descriptors(w) > before:  # noqa: ASYNC110 - threads set no event
                    await trio.sleep(0.005)

    trio.run(main)


@pytest.mark.clause("S182")
def test_discarding_a_half_over_what_overflowed_shows_what_overflowed(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await write_blocks(w, b"big", 6)
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
        await w.do(w.fs.write(opened.handle, 0, b"half"))
        with w.fs.lock:
            w.inner.contents.interrupt(w.inner.table[ino])
        await w.close(opened)
        with w.fs.lock:
            assert w.inner.interrupted.discard(b"big") == (1, [])
        assert violations(w) == []
        expected = b"".join(map(block, range(6)))
        assert await w.read(ino, 16 * MIB) == expected
        await w.drained()
        assert (w.backing / "big").read_bytes() == expected
        assert await w.read(ino, 16 * MIB) == expected
        assert w.lower.list_staging() == []

    run(tmp_path, scenario, budget_bytes=BUDGET)


class SeatDouble:
    """Of a thread that may be held up, or not."""

    def __init__(self, *, may_be: bool) -> None:
        self.may_be = may_be
        self.asked = 0
        self.gone_on = 0

    def hold(self) -> bool:
        self.asked += 1
        return self.may_be

    def go_on(self) -> None:
        self.gone_on += 1


@pytest.mark.clause("S496")
@pytest.mark.parametrize("may_be", [True, False])
def test_small_writes_are_made_where_they_come_if_that_thread_may_wait(
    tmp_path: Path, may_be: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        opened, _attributes = await w.create(b"big")
        for i in range(6):
            await w.do(w.fs.write(opened.handle, i * MIB, block(i)))
        threads: list[int] = []

        def seen(fd: int, data: bytes | memoryview, offset: int) -> int:
            threads.append(threading.get_ident())
            return filling.write_all(fd, data, offset)

        monkeypatch.setattr(overflow, "write_all", seen)
        seat = SeatDouble(may_be=may_be)
        spare = w.fs.steps.spare
        assert w.fs.writes_to_storage(opened.handle)

        def write() -> int:
            spare.take(seat)
            w.fs.steps.run(w.fs.write(opened.handle, MIB - 2, b"piece"))
            spare.leave()
            return threading.get_ident()

        here = await trio.to_thread.run_sync(write)
        assert (threads == [here]) is may_be
        assert seat.asked == 1
        assert seat.gone_on >= 1
        await w.do(w.fs.write(opened.handle, 5, b"x"))  # from a thread that others need
        assert threads[1:]
        assert here not in threads[1:]
        await w.close(opened)
        await w.drained()
        expected = bytearray(b"".join(map(block, range(6))))
        expected[MIB - 2 : MIB + 3] = b"piece"
        expected[5:6] = b"x"
        assert (w.backing / "big").read_bytes() == expected

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a tmpfs")
@pytest.mark.parametrize("what", ["begun anew", "changed", "changed again"])
def test_what_finds_no_page_goes_past_ram_though_the_budget_has_room(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have filled the shared memory that the RAM tier lies in."""
    ram = tmp_path / "tier" / "data"
    ram.mkdir(parents=True)
    free_meanwhile: list[int] = []

    async def scenario(w: World) -> None:
        if what == "changed again":  # what is to be stored needs its bytes
            w.engine.hold(True)
            await w.write(b"g", b"old")
        filled = overflow.Overflow.filled

        def noting(self: overflow.Overflow, *given: Any) -> Any:
            free_meanwhile.append(w.tier.free_bytes(urgent=False))
            return filled(self, *given)

        monkeypatch.setattr(overflow.Overflow, "filled", noting)
        free = w.tier.free_bytes(urgent=False)
        with tempfile.TemporaryFile(dir=ram) as others:  # has no name there
            with contextlib.suppress(OSError):  # ENOSPC
                while os.write(others.fileno(), bytes(4096)):
                    pass
            if what == "changed":
                ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
                opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            elif what == "changed again":
                ino = (await w.do(w.fs.lookup(ROOT, b"g"))).ino
                opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            else:
                opened, _attributes = await w.create(b"g")
            await w.do(w.fs.write(opened.handle, 0, b"new"))
            await w.close(opened)
            await w.drained()
        if what == "changed":  # a storage that hangs now keeps no room from others
            assert free_meanwhile == [free]
        name = "f" if what == "changed" else "g"
        rest = bytes(100_000)[3:] if what == "changed" else b""
        assert (w.backing / name).read_bytes() == b"new" + rest

    (tmp_path / "backing").mkdir()
    (tmp_path / "backing" / "f").write_bytes(bytes(100_000))
    mount_tmpfs(ram, "size=2M")
    try:
        run(tmp_path, scenario)
    finally:
        unmount(ram, detach=True)


@pytest.mark.clause("S195")
def test_what_overflowed_outlasts_a_worker_that_ends_while_it_is_read_for_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs that any more, but the file, which is nowhere else."""
    expected = b"".join(map(block, range(6)))

    async def closed(w: World) -> None:
        sync = HeldCall(w.lower.sync)
        monkeypatch.setattr(w.lower, "sync", sync)
        stop = w.engine._stop

        def stop_then_go_on() -> None:
            stop()
            sync.go_on.set()

        monkeypatch.setattr(w.engine, "_stop", stop_then_go_on)
        await write_blocks(w, b"big", 6)
        w.engine.hold(False)
        await until_so(sync.began.is_set)

    async def next_worker(w: World) -> None:
        w.engine.hold(False)
        await w.drained()
        assert (w.backing / "big").read_bytes() == expected

    run(tmp_path, closed, next_worker, budget_bytes=BUDGET)


async def open_overflowed(w: World) -> tuple[OpenFile, Ino]:
    opened, attributes = await w.create(b"big")
    for i in range(6):
        await w.do(w.fs.write(opened.handle, i * MIB, block(i)))
    assert w.inner.table[attributes.ino].body.is_overflowed
    return opened, attributes.ino


def staged(w: World, ino: Ino, offset: int, size: int) -> bytes:
    return os.pread(w.inner.table[ino].body.fd, size, offset)


async def until_written(w: World, ino: Ino, write: Call[int], offset: int) -> Future[Any]:
    """A write up to the step that is told that its bytes are there."""
    before = staged(w, ino, offset, 1)
    done: Future[Any] | None = None
    while staged(w, ino, offset, 1) == before:
        done = w.fs.steps.step(write, done)
        await settled(done)
    assert done is not None
    return done


@pytest.mark.clause("S195")
def test_a_write_that_is_told_late_of_its_end_makes_a_shorter_file_no_longer(
    tmp_path: Path,
) -> None:
    """Asynchronous direct writes come without the inode lock of the mount's file."""

    async def scenario(w: World) -> None:
        opened, ino = await open_overflowed(w)
        node = w.inner.table[ino]
        write = w.fs.write(opened.handle, 5 * MIB, block(7))
        written = await until_written(w, ino, write, 5 * MIB)
        shorter = w.fs.setattr(ino, AttributeChange(size=MIB), opened.handle, CALLER)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.do, shorter)
            await trio.testing.wait_all_tasks_blocked()
            changes = w.inner.contents._overflow._writing
            await until_so(lambda: changes[node.body.staging] == 2 or node.size == MIB)
            await w.fs.steps.drive(write, written)
        assert node.size == os.fstat(node.body.fd).st_size == MIB
        await w.close(opened)

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S195")
def test_a_write_that_is_told_late_of_its_end_makes_what_was_emptied_no_longer(
    tmp_path: Path,
) -> None:
    """OPEN with O_TRUNC comes without that lock, too."""

    async def scenario(w: World) -> None:
        opened, ino = await open_overflowed(w)
        write = w.fs.write(opened.handle, 5 * MIB, block(7))
        written = await until_written(w, ino, write, 5 * MIB)
        emptied = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
        await w.fs.steps.drive(write, written)
        assert w.inner.table[ino].size == 0
        await w.close(emptied)
        await w.close(opened)
        await w.drained()
        assert (w.backing / "big").read_bytes() == b""

    run(tmp_path, scenario, budget_bytes=BUDGET)
