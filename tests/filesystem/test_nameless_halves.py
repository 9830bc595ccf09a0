"""A file that outgrew RAM, has its place in the order, and will never be whole: once it has no
name, nobody waits for it.

Its writer was killed, or what it holds cannot be told. As long as it has a name, a person may
decide about it. Without one nobody can: neither `retry` nor `discard` finds it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.closing import Closing
from acpfs.filesystem.content.outgrown import TornError
from acpfs.filesystem.names import RENAME_EXCHANGE
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import Lane
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.ops import OpKind
from tests.filesystem.test_hold import BUDGET, Kernel, run
from tests.filesystem.test_outgrown import MIB, patterned
from tests.filesystem.test_slow_backing import until
from tests.filesystem.test_waiting_for_the_drain import KILLED, killed, outgrown, save
from tests.filesystem.world import CALLER, World, violations, world

pytestmark = pytest.mark.clause("S435")

OLD = b"what was there before"
NEW = patterned(MIB)


def closing(pid: int) -> Closing:
    return Closing.KILL if pid == KILLED else Closing.CALL


async def nothing_left(w: World) -> None:
    """All is persisted, and neither RAM nor the staging directory has anything of the half."""
    await w.drained()
    with w.fs.lock:
        assert violations(w) == []
        assert not w.log.parked_count
    await until(lambda: not w.lower.list_staging())


def before(base: Path, *, existed: bool) -> None:
    """Whether the storage has an older version of the file."""
    (base / "backing").mkdir()
    if existed:
        (base / "backing" / "big").write_bytes(OLD)


async def half(w: World, kernel: Kernel) -> Ino:
    """Fsynced, and its writer killed afterwards; known to the mount before, where it existed."""
    w.engine.hold(False)
    if (w.backing / "big").exists():
        ino = (await w.do(w.fs.lookup(ROOT, b"big"))).ino
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
        await w.do(w.fs.flush(opened.handle))
        await w.do(w.fs.release(opened.handle))
    ino, _data = await killed(w, kernel, synced=True)
    return ino


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("how", ["replaced", "removed", "moved and removed", "exchanged"])
def test_what_has_no_name_any_more_stops_nobody(tmp_path: Path, how: str, *, existed: bool) -> None:
    before(tmp_path, existed=existed)

    async def scenario(w: World, kernel: Kernel) -> None:
        await half(w, kernel)
        await save(w, b"between", NEW)
        if how == "replaced":
            await save(w, b"big.new", NEW)
            await w.do(w.fs.rename(ROOT, b"big.new", ROOT, b"big", 0))
        elif how == "exchanged":
            await w.do(w.fs.rename(ROOT, b"between", ROOT, b"big", RENAME_EXCHANGE))
            await w.do(w.fs.unlink(ROOT, b"between"))
        else:
            name = b"big"
            if how == "moved and removed":
                name = b"moved"
                await w.do(w.fs.rename(ROOT, b"big", ROOT, name, 0))
            await w.do(w.fs.unlink(ROOT, name))
        await save(w, b"behind", NEW)
        await nothing_left(w)
        expected = {"between": NEW, "behind": NEW}
        if how in ("replaced", "exchanged"):
            expected["big"] = NEW
        if how == "exchanged":
            del expected["between"]
        found = {path.name: path.read_bytes() for path in w.backing.iterdir() if path.is_file()}
        assert found == expected

    run(tmp_path, scenario, closing=closing)


def test_the_last_of_several_names_counts(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        ino, opened, data = await outgrown(w, kernel)
        await w.do(w.fs.link(ino, ROOT, b"second"))
        os.pwrite(opened.backing_fd, b"x", len(data))
        await w.close(opened, KILLED)
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        await w.do(w.fs.unlink(ROOT, b"big"))
        with w.fs.lock:
            assert [op.unsealed for op in w.log.pending_of(ino)] == [True, False, False]
        await w.do(w.fs.unlink(ROOT, b"second"))
        await save(w, b"behind", NEW)
        await nothing_left(w)
        assert (w.backing / "behind").exists()

    run(tmp_path, scenario, closing=closing)


def test_its_name_may_go_before_its_writer_is_killed(tmp_path: Path) -> None:
    before(tmp_path, existed=True)

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        ino = (await w.do(w.fs.lookup(ROOT, b"big"))).ino
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
        await w.close(opened)
        ino, opened, data = await outgrown(w, kernel)
        await w.do(w.fs.fsync(opened.handle, False))
        os.pwrite(opened.backing_fd, b"x", len(data))
        await w.do(w.fs.unlink(ROOT, b"big"))
        assert w.log.unsealed_of(ino)
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        await w.do(w.fs.flush(opened.handle, KILLED))
        await w.do(w.fs.release(opened.handle))
        await save(w, b"behind", NEW)
        await nothing_left(w)
        assert not (w.backing / "big").exists()

    run(tmp_path, scenario, closing=closing)


def test_who_reads_it_holds_up_nobody_and_reads_on(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        ino, expected = await killed(w, kernel, synced=True)
        reader = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
        await save(w, b"big.new", NEW)
        await w.do(w.fs.rename(ROOT, b"big.new", ROOT, b"big", 0))
        await w.drained()
        assert (w.backing / "big").read_bytes() == NEW
        found = await w.do(w.fs.read(reader.handle, 0, 128 * MIB))
        assert found == expected
        await w.close(reader)
        await nothing_left(w)

    run(tmp_path, scenario, closing=closing)


@pytest.mark.parametrize("is_open", [False, True])
def test_the_next_worker_does_not_wait_for_it_either(tmp_path: Path, *, is_open: bool) -> None:
    """Nor does it take for whole what was let go of. `is_open`: until the worker ended."""

    async def main() -> None:
        async with world(tmp_path, budget_bytes=BUDGET, unknown_bytes=0, closing=closing) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            kernel = Kernel(w)
            if is_open:
                _ino, opened, data = await outgrown(w, kernel)
                await w.do(w.fs.fsync(opened.handle, False))
                os.pwrite(opened.backing_fd, b"x", len(data))
                w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
            else:
                await killed(w, kernel, synced=True)
            await save(w, b"latest", b"names it")
            await save(w, b"big.new", NEW)
            await w.do(w.fs.rename(ROOT, b"big.new", ROOT, b"big", 0))
        async with world(tmp_path, budget_bytes=BUDGET) as w:
            with w.fs.lock:
                assert not any(op.unsealed for op in w.log)
                [inode] = {op.victim for op in w.log if op.victim}
                assert not any(op.ino == inode for op in w.log)
            await nothing_left(w)
            assert (w.backing / "big").read_bytes() == NEW

    trio.run(main)


@pytest.mark.clause("S61")
def test_what_cannot_be_told_stops_nobody_once_its_name_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(tmp_path, existed=True)

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        _ino, opened, _data = await outgrown(w, kernel)
        await w.do(w.fs.fsync(opened.handle, False))

        def torn(*_arguments: object) -> None:
            raise TornError(errno.EIO, "overwritten after it had left RAM")

        monkeypatch.setattr(w.inner.outgrown, "_complete", torn)
        await w.do(w.fs.flush(opened.handle))
        await w.do(w.fs.release(opened.handle))
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        with w.fs.lock:
            assert w.log.parked_count == 1
        await save(w, b"big.new", NEW)
        await w.do(w.fs.rename(ROOT, b"big.new", ROOT, b"big", 0))
        await nothing_left(w)
        assert (w.backing / "big").read_bytes() == NEW

    run(tmp_path, scenario, closing=closing)


@pytest.mark.clause("S61")
def test_retry_does_not_have_all_wait_for_what_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are nowhere: it stays refused, and what has nothing to do with it goes on."""

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        _ino, opened, _data = await outgrown(w, kernel)
        await w.do(w.fs.fsync(opened.handle, False))

        def torn(*_arguments: object) -> None:
            raise TornError(errno.EIO, "overwritten after it had left RAM")

        monkeypatch.setattr(w.inner.outgrown, "_complete", torn)
        await w.do(w.fs.flush(opened.handle))
        await w.do(w.fs.release(opened.handle))
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        w.engine.retry()
        await save(w, b"behind", NEW)
        await until((w.backing / "behind").exists)
        with w.fs.lock:
            parked = [op.seq for op in w.log.parked()]
        assert w.engine.discard(parked) == 1
        await nothing_left(w)

    run(tmp_path, scenario, closing=closing)


def test_a_file_that_was_closed_is_stored_in_its_place_though_its_name_is_gone(
    tmp_path: Path,
) -> None:
    """Somebody may name it by what stands between: only what nobody will make whole is let go
    of.
    """
    before(tmp_path, existed=True)
    stored: list[bytes] = []

    async def scenario(w: World, kernel: Kernel) -> None:
        _ino, opened, _data = await outgrown(w, kernel)
        await w.do(w.fs.fsync(opened.handle, False))
        await w.do(w.fs.unlink(ROOT, b"big"))
        seal = w.inner.outgrown._seal

        def sealed(node: Node, ops: list[object]) -> None:
            stored.extend(op.name for op in w.log.unsealed_of(node.ino))
            seal(node, ops)  # type: ignore[arg-type]

        w.inner.outgrown._seal = sealed  # type: ignore[assignment, method-assign]
        w.engine.hold(False)
        await w.close(opened)
        await nothing_left(w)

    run(tmp_path, scenario, closing=closing)
    assert stored == [b"big"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_next_worker_stores_it_in_its_place_where_it_was_just_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    """The worker dies while it brings the rest of it to the staging file. `is_killed`: so was its
    writer, and then it is a half, that nobody waits for.
    """
    is_refused: list[bool] = []

    def refused(*_arguments: object) -> None:
        is_refused.append(True)
        raise OSError(errno.EIO, "not yet")

    async def main() -> None:
        async with (
            world(
                tmp_path, budget_bytes=BUDGET, unknown_bytes=0, closing=closing, session="s"
            ) as w,
            trio.open_nursery() as nursery,
        ):
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            _ino, opened, data = await outgrown(w, Kernel(w))
            await w.do(w.fs.fsync(opened.handle, False))
            await save(w, b"between", NEW)
            await w.do(w.fs.unlink(ROOT, b"big"))
            if is_killed:
                os.pwrite(opened.backing_fd, b"x", len(data))
            with monkeypatch.context() as patched:
                patched.setattr(w.inner.outgrown, "_complete", refused)
                w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
                nursery.start_soon(w.close, opened, KILLED if is_killed else 1)
                await until(lambda: is_killed or bool(is_refused))
                nursery.cancel_scope.cancel()
        async with world(tmp_path, budget_bytes=BUDGET, session="s") as w:
            await until(lambda: not any(op.unsealed for op in w.log))
            with w.fs.lock:
                stored = [op.name for op in w.log if op.kind is OpKind.STORE]
            assert stored == ([b"between"] if is_killed else [b"big", b"between"])
            await nothing_left(w)
            assert not (w.backing / "big").exists()
            assert (w.backing / "between").read_bytes() == NEW

    trio.run(main)
