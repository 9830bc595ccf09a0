"""Which clean contents leave RAM, and in which order: retained checkpoints, pins, eviction by
hand.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from acpfs.config import WarmReads
from acpfs.errors import RefusedError
from acpfs.filesystem.content import retention
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="files get owners")
MIB = 1 << 20
FILE_BYTES = 4 * MIB


async def directory(w: World, path: bytes) -> Ino:
    ino = ROOT
    for name in path.split(b"/"):
        node = w.inner.table[ino].dir.children.get(name)
        ino = (
            node.ino
            if node is not None and node.ino
            else (await w.do(w.fs.mkdir(ino, name, 0o755, CALLER))).ino
        )
    return ino


async def save(w: World, path: bytes, size: int = FILE_BYTES) -> Ino:
    """Write a file, and have it persisted."""
    parent, _slash, name = path.rpartition(b"/")
    ino = await w.write(name, os.urandom(size), await directory(w, parent) if parent else ROOT)
    await w.drained()
    return ino


def in_ram(w: World) -> set[bytes]:
    with w.fs.lock:
        return {report.path for report in w.fs.files_report() if report.tier != "backing"}


def make_room(w: World, size: int) -> None:
    with w.fs.lock:
        w.tier.ladder.make_room(size)
        w.state.commit()


def run(scenario: Callable[..., Awaitable[None]], *arguments: object) -> None:
    trio.run(scenario, *arguments)


@pytest.mark.clause("S110")
def test_the_newest_checkpoints_stay_and_the_rest_goes_by_last_use(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            for step in (100, 200, 300):
                await save(w, b"run/checkpoint-%d/model.bin" % step)
            await save(w, b"run/log.txt")
            order = [
                b"run/checkpoint-100/model.bin",
                b"run/log.txt",
                b"run/checkpoint-200/model.bin",
                b"run/checkpoint-300/model.bin",
            ]
            for path in order:
                make_room(w, 1)
                assert in_ram(w) == set(order) - set(order[: order.index(path) + 1])

    run(scenario)


@pytest.mark.clause("S110")
def test_steps_count_and_not_when_a_checkpoint_was_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_checkpoints=1) as w:
            for step in (9, 10):
                await save(w, b"iter_%07d/a.pt" % step)
            await w.read(
                w.inner.table[ROOT].dir.children[b"iter_0000009"].ino
                and (await _child(w, b"iter_0000009", b"a.pt"))
            )
            make_room(w, 1)
            assert in_ram(w) == {b"iter_0000010/a.pt"}

    run(scenario)


async def _child(w: World, *names: bytes) -> Ino:
    ino = ROOT
    for name in names:
        ino = (await w.do(w.fs.lookup(ino, name))).ino
    return ino


@pytest.mark.clause("S110")
def test_each_save_dir_has_its_own_and_rank_directories_are_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_checkpoints=1) as w:
            for path in (
                b"a/step_1.pt",
                b"b/step_2.pt",
                b"c/rank_0/N-1_5.ckpt",
                b"c/rank_1/N-1_5.ckpt",
                b"loose",
            ):
                await save(w, path, MIB)
            make_room(w, 1)
            assert in_ram(w) == {
                b"a/step_1.pt",
                b"b/step_2.pt",
                b"c/rank_0/N-1_5.ckpt",
                b"c/rank_1/N-1_5.ckpt",
            }

    run(scenario)


@pytest.mark.clause("S110")
def test_a_checkpoint_that_is_being_written_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_checkpoints=1) as w:
            await save(w, b"checkpoint-1/a")
            await save(w, b"checkpoint-2/a")
            opened, _attributes = await w.create(b"b", await directory(w, b"checkpoint-2"))
            await w.do(w.fs.write(opened.handle, 0, b"x"))
            await save(w, b"other")
            make_room(w, 1)
            assert in_ram(w) == {b"checkpoint-1/a", b"checkpoint-2/a", b"checkpoint-2/b"}
            await w.close(opened)
            await w.drained()
            make_room(w, 1)
            assert in_ram(w) == {b"checkpoint-2/a", b"checkpoint-2/b"}

    run(scenario)


@pytest.mark.clause("S110")
def test_how_many_can_be_changed_at_any_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_checkpoints=0) as w:
            await save(w, b"checkpoint-1/a")
            await save(w, b"loose")
            with w.fs.lock:
                w.inner.eviction.keep(1)
            make_room(w, 1)
            assert in_ram(w) == {b"checkpoint-1/a"}
            assert w.fs.statistics().content.retained_bytes == FILE_BYTES

    run(scenario)


@pytest.mark.clause("S110")
def test_a_directory_that_becomes_a_checkpoint_by_rename_counts_as_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, keep_checkpoints=1) as w:
            await save(w, b"7.orbax-checkpoint-tmp-0/d")
            await save(w, b"loose")
            await w.do(w.fs.rename(ROOT, b"7.orbax-checkpoint-tmp-0", ROOT, b"7", 0))
            await w.drained()
            make_room(w, 1)
            assert in_ram(w) == {b"7/d"}

    run(scenario)


@pytest.mark.clause("S103")
@pytest.mark.parametrize("size", [512 << 10, 2 * MIB], ids=["small", "large"])
def test_a_retained_one_does_not_leave_for_a_cold_file(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)

    async def scenario() -> None:
        async with world(
            tmp_path, budget_bytes=8 * MIB, keep_checkpoints=1, warm_reads=WarmReads.ON
        ) as w:
            await save(w, b"run/checkpoint-1/model.bin", 8 * MIB - size // 2)
            (w.backing / "cold").write_bytes(data)
            assert await w.read((await w.do(w.fs.lookup(ROOT, b"cold"))).ino, size) == data
            assert in_ram(w) == {b"run/checkpoint-1/model.bin"}

    run(scenario)


@pytest.mark.clause("S110")
def test_retained_ones_leave_before_a_writer_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, budget_bytes=16 * MIB, keep_checkpoints=3) as w:
            for step in (1, 2, 3):
                await save(w, b"checkpoint-%d/a" % step)
            await save(w, b"checkpoint-4/a", 10 * MIB)
            assert in_ram(w) == {b"checkpoint-3/a", b"checkpoint-4/a"}
            assert w.fs.statistics().overflowed_files == 0

    run(scenario)


@pytest.mark.clause("S111")
def test_what_is_pinned_never_leaves_also_after_a_new_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await save(w, b"keep/a", MIB)
            with w.fs.lock:
                assert w.inner.eviction.pin(b"keep") == MIB
                w.state.commit()
            await save(w, b"keep/b", MIB)
            await save(w, b"loose", MIB)
        async with world(tmp_path) as w:
            make_room(w, 64 * MIB)
            assert in_ram(w) == {b"keep/a", b"keep/b"}
            with w.fs.lock:
                assert w.inner.eviction.pinned_bytes() == 2 * MIB
                assert w.inner.eviction.evict(b"").stayed[0].reason == "pinned"
                assert w.inner.eviction.unpin(b"keep") == 1
            make_room(w, 64 * MIB)
            assert in_ram(w) == set()

    run(scenario)


@pytest.mark.clause("S111")
def test_a_pin_that_would_fill_the_budget_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, budget_bytes=8 * MIB) as w:
            await save(w, b"a", 7 * MIB)
            with w.fs.lock, pytest.raises(RefusedError, match="75%"):
                w.inner.eviction.pin(b"a")
            make_room(w, MIB)
            assert in_ram(w) == set()

    run(scenario)


@pytest.mark.clause("S112")
def test_eviction_by_hand_takes_what_is_clean_and_says_why_the_rest_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await save(w, b"d/clean", MIB)
            read = await save(w, b"d/read", MIB)
            await save(w, b"elsewhere", MIB)
            await save(w, b"d/checkpoint-1/retained", MIB)
            w.engine.hold(True)
            await w.write(b"dirty", b"x", await directory(w, b"d"))
            writing, _attributes = await w.create(b"writing", await directory(w, b"d"))
            reader = await w.do(w.fs.open(read, os.O_RDONLY, CALLER))
            with w.fs.lock:
                done = w.inner.eviction.evict(b"d")
            assert (done.files, done.freed_bytes) == (2, 2 * MIB)
            reasons = {stayed.path: stayed.reason for stayed in done.stayed}
            assert reasons == {
                b"d/dirty": "not persisted yet",
                b"d/read": "open or mapped",
                b"d/writing": "being written",
            }
            assert in_ram(w) == {b"d/dirty", b"d/read", b"d/writing", b"elsewhere"}
            assert len(await w.do(w.fs.read(reader.handle, 0, MIB))) == MIB
            await w.close(reader)
            await w.close(writing)

    run(scenario)


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 16 MiB is a large one."""
    monkeypatch.setattr(retention, "CUT_FILE_BYTES_MIN", 8 * MIB)
    monkeypatch.setattr(retention, "CUT_BYTES_MIN", 2 * MIB)


async def save_known(w: World, path: bytes, size: int) -> tuple[Ino, bytes]:
    content = os.urandom(size)
    ino = await w.write(path, content)
    await w.drained()
    return ino, content


def tier_files(w: World) -> int:
    """Bytes that the tmpfs has really given away."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(w.tier.directory / "data"))


@pytest.mark.clause("S116")
def test_of_a_large_file_only_as_much_leaves_as_is_wanted(tmp_path: Path, small_cuts: None) -> None:
    async def scenario() -> None:
        async with world(tmp_path, warm_reads="off", budget_bytes=32 * MIB) as w:
            ino, content = await save_known(w, b"large", 16 * MIB)
            make_room(w, 3 * MIB)
            assert w.tier.used_bytes == tier_files(w) == 12 * MIB
            assert [file.ram_bytes for file in w.inner.known_files.below(b"large")] == [12 * MIB]
            assert [(row.path, row.size, row.state, row.tier) for row in w.fs.files_report()] == [
                (b"large", 16 * MIB, "clean", "ram+backing")
            ]
            assert await w.read(ino, 16 * MIB) == content
            opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            for offset, size in (
                (0, 100),
                (12 * MIB - 50, 100),
                (12 * MIB, 100),
                (16 * MIB - 10, 100),
                (16 * MIB, 10),
                (0, 20 * MIB),
            ):
                assert (
                    await w.do(w.fs.read(opened.handle, offset, size))
                    == content[offset : offset + size]
                )
            with w.fs.lock:
                assert w.inner.eviction.evict(b"").stayed[0].reason == "open or mapped"
            await w.close(opened)
            make_room(w, MIB)
            assert w.tier.used_bytes == tier_files(w) == 10 * MIB
            make_room(w, 9 * MIB)
            assert w.tier.used_bytes == tier_files(w) == 0
            assert await w.read(ino, 16 * MIB) == content

    run(scenario)


@pytest.mark.clause("S116")
@pytest.mark.parametrize("takeover", [False, True], ids=["one worker", "the next worker"])
def test_reading_what_is_left_of_it_brings_nothing_back_and_reading_on_does(
    tmp_path: Path, small_cuts: None, takeover: bool
) -> None:
    def begun(w: World) -> int:
        warm = w.fs.statistics().warm
        return warm.warming + warm.warmed_files + warm.warming_given_up

    async def read(w: World, content: bytes) -> None:
        opened = await w.do(w.fs.open(await _child(w, b"large"), os.O_RDONLY, CALLER))
        for offset, size in ((0, 4 * MIB), (4 * MIB, 8 * MIB), (12 * MIB - 1, 1)):
            assert (
                await w.do(w.fs.read(opened.handle, offset, size))
                == content[offset : offset + size]
            )
        assert (begun(w), w.tier.used_bytes) == (0, 12 * MIB)
        assert await w.do(w.fs.read(opened.handle, 8 * MIB, 8 * MIB)) == content[8 * MIB :]
        assert begun(w) == 1
        await w.close(opened)

    async def scenario() -> None:
        async with world(tmp_path, budget_bytes=64 * MIB) as w:
            _ino, content = await save_known(w, b"large", 16 * MIB)
            with w.fs.lock:
                w.inner.contents.retention.let_leave(
                    3 * MIB, also_retained=True
                )  # what wanted the room is gone again
                w.state.commit()
            assert w.tier.used_bytes == 12 * MIB
            if not takeover:
                await read(w, content)
        if takeover:
            async with world(tmp_path, budget_bytes=64 * MIB) as w:
                await read(w, content)

    run(scenario)


@pytest.mark.clause("S116")
def test_what_is_left_of_it_outlives_the_worker_and_a_change(
    tmp_path: Path, small_cuts: None
) -> None:
    async def scenario() -> None:
        async with world(tmp_path, warm_reads="off", budget_bytes=40 * MIB) as w:
            _ino, content = await save_known(w, b"large", 16 * MIB)
            make_room(w, 3 * MIB)
        async with world(tmp_path, warm_reads="off", budget_bytes=40 * MIB) as w:
            assert w.tier.used_bytes == 12 * MIB
            ino = await _child(w, b"large")
            assert await w.read(ino, 16 * MIB) == content
            opened = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
            await w.do(w.fs.write(opened.handle, 5 * MIB, b"new"))
            await w.close(opened)
            await w.drained()
            changed = content[: 5 * MIB] + b"new" + content[5 * MIB + 3 :]
            assert (w.backing / "large").read_bytes() == changed
            assert w.tier.used_bytes == tier_files(w) == 16 * MIB
            make_room(w, 3 * MIB)
            await w.do(w.fs.unlink(ROOT, b"large"))
            w.fs.forget([(ino, 1 << 30)])
            assert w.tier.used_bytes == 0

    run(scenario)


@pytest.mark.clause("S116")
@pytest.mark.parametrize("when", ["before the open", "after the open"])
def test_a_part_in_ram_is_never_mixed_with_another_file(
    tmp_path: Path, small_cuts: None, when: str
) -> None:
    async def scenario() -> None:
        async with world(
            tmp_path, warm_reads="off", attr_timeout_s=0.002 if when == "before the open" else 60.0
        ) as w:
            ino, _content = await save_known(w, b"large", 16 * MIB)
            make_room(w, 3 * MIB)
            opened = (
                await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
                if when == "after the open"
                else None
            )
            (w.backing / "large").write_bytes(b"\1" * (16 * MIB))
            if opened is None:
                opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            assert await w.do(w.fs.read(opened.handle, 11 * MIB, 2 * MIB)) == b"\1" * (2 * MIB)
            assert await w.do(w.fs.read(opened.handle, 0, 10)) == b"\1" * 10
            await w.close(opened)
            assert w.tier.used_bytes == 0

    run(scenario)


@pytest.mark.clause("S116")
def test_a_worker_killed_between_row_and_cut_leaves_more_and_never_less(
    tmp_path: Path, small_cuts: None
) -> None:
    async def scenario() -> None:
        async with world(tmp_path, warm_reads="off") as w:
            _ino, content = await save_known(w, b"large", 16 * MIB)
            w.tier._when_safe = lambda _action: None  # killed after the commit
            make_room(w, 3 * MIB)
            assert tier_files(w) == 16 * MIB
        async with world(tmp_path, warm_reads="off") as w:
            assert w.tier.used_bytes == 16 * MIB
            assert await w.read(await _child(w, b"large"), 16 * MIB) == content
            w.tier._when_safe = lambda _action: None
            with w.fs.lock:
                w.tier.ladder.make_room(15 * MIB)  # killed before the commit: never written
                w.state._writers.clear()
                w.state._db.rollback()
                w.state._open = False
        async with world(tmp_path, warm_reads="off") as w:
            assert await w.read(await _child(w, b"large"), 16 * MIB) == content

    run(scenario)
