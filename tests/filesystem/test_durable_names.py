"""Durable fsync of a directory: its names are on stable storage, and it never waits for a close
that may be the caller's own.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from acpfs.backing.attributes import FSYNC_XATTR
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.content import outgrown
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.filesystem.steps import settled
from acpfs.runtime.clock import Clock
from acpfs.types import ROOT, Ino
from tests.filesystem.held_call import HeldCall
from tests.filesystem.test_hold import Kernel, run
from tests.filesystem.test_outgrown import MIB, outgrow, patterned, until
from tests.filesystem.world import CALLER, World, world

pytestmark = pytest.mark.clause("S16", "S18")


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last close that does not come is not waited for long."""
    monkeypatch.setattr(outgrown, "RELEASE_WAIT_S", 0.05)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """A last close is waited for as long as a test may take; set when somebody does."""
    begun = trio.Event()

    at_most = Clock.at_most

    def begin(clock: Clock, released: Future[None], delay_s: float) -> Future[None]:
        begun.set()
        return at_most(clock, released, delay_s)

    monkeypatch.setattr(outgrown, "RELEASE_WAIT_S", 600.0)
    monkeypatch.setattr(Clock, "at_most", begin)
    return begun


async def make_durable(w: World, directory: Ino) -> None:
    await w.do(w.fs.setxattr(directory, FSYNC_XATTR, b"durable", 0, 0))


async def mkdir(w: World, name: bytes) -> Ino:
    return (await w.do(w.fs.mkdir(ROOT, name, 0o755, CALLER))).ino


async def sync(w: World, directory: Ino) -> None:
    handle = await w.do(w.fs.opendir(directory))
    try:
        await w.do(w.fs.fsyncdir(handle))
    finally:
        await w.do(w.fs.releasedir(handle))


async def synced_half(w: World, kernel: Kernel, parent: Ino) -> tuple[OpenFile, bytes]:
    """A file that outgrew RAM in passthrough, got its place in the order by an fsync that is not
    durable, and stays open.
    """
    opened, attributes = await w.create(b"big", parent)
    assert opened.lane is Lane.PASSTHROUGH
    data = patterned(100 * MIB)
    await outgrow(w, kernel, opened, attributes.ino, data)
    await w.do(w.fs.fsync(opened.handle, False))
    assert [op.unsealed for op in w.log.pending_of(attributes.ino)] == [True]
    return opened, data


@pytest.mark.usefixtures("_impatient")
def test_the_names_before_it_are_durable_and_the_open_file_is_not_waited_for(
    tmp_path: Path,
) -> None:
    """As on a local file system: it is about names; that of an open file comes with its close."""

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        directory = await mkdir(w, b"safe")
        await w.write(b"before", b"bytes", directory)
        opened, data = await synced_half(w, kernel, directory)
        await make_durable(w, ROOT)
        await sync(w, directory)
        assert [path.name for path in (w.backing / "safe").iterdir()] == ["before"]
        await w.close(opened)
        await sync(w, directory)
        assert (w.backing / "safe/big").read_bytes() == data

    run(tmp_path, scenario)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("of", ["directory", "file"])
@pytest.mark.parametrize("place", ["same", "other"])
def test_what_stands_behind_an_open_file_cannot_be_durable_and_says_so(
    tmp_path: Path, of: str, place: str
) -> None:
    """Of a file too, and wherever the one that is open lies: there is one order."""

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        directory = await mkdir(w, b"safe")
        opened, data = await synced_half(w, kernel, directory if place == "same" else ROOT)
        await make_durable(w, directory)
        other, _attributes = await w.create(b"behind", directory)
        await w.do(w.fs.write(other.handle, 0, b"bytes"))
        with pytest.raises(OSError, match="No space"):
            await (
                sync(w, directory) if of == "directory" else w.do(w.fs.fsync(other.handle, False))
            )
        await w.close(opened)
        await w.do(w.fs.fsync(other.handle, False))
        await sync(w, directory)
        assert (w.backing / "safe/behind").read_bytes() == b"bytes"
        assert (w.backing / ("safe/big" if place == "same" else "big")).read_bytes() == data
        await w.close(other)

    run(tmp_path, scenario)


def test_a_close_that_was_answered_counts_before_the_kernel_has_told_of_it(
    tmp_path: Path, waits: trio.Event
) -> None:
    """RELEASE comes a moment after close(2) has returned: nothing fails for that."""

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        opened, data = await synced_half(w, kernel, ROOT)
        await w.do(w.fs.flush(opened.handle))
        await make_durable(w, ROOT)
        done: list[Any] = []

        async def fsyncdir() -> None:
            await sync(w, ROOT)
            done.append((w.backing / "big").read_bytes() == data)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fsyncdir)
            with trio.fail_after(60):
                await waits.wait()
            assert not done
            await w.do(w.fs.release(opened.handle))
        assert done == [True]

    run(tmp_path, scenario)


@pytest.mark.clause("S181")
@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("decision", ["retry", "discard"])
def test_nor_can_what_stands_behind_a_half_about_which_nobody_has_decided(
    tmp_path: Path, decision: str
) -> None:
    """Its writer was killed after an fsync had given it its place: no close comes that would end a
    wait.
    """
    closing = Closing.CALL

    async def scenario(w: World, kernel: Kernel) -> None:
        nonlocal closing
        w.engine.hold(False)
        big, _data = await synced_half(w, kernel, ROOT)
        os.pwrite(big.backing_fd, b"more", 100 * MIB)
        closing = Closing.KILL
        await w.close(big)
        closing = Closing.CALL
        assert w.fs.statistics().interrupted_files == 1
        directory = await mkdir(w, b"safe")
        await make_durable(w, directory)
        other, _attributes = await w.create(b"behind", directory)
        await w.do(w.fs.write(other.handle, 0, b"bytes"))
        with pytest.raises(OSError, match="No space"):
            await w.do(w.fs.fsync(other.handle, False))
        with w.fs.lock:
            decided = (
                w.inner.interrupted.store(b"")
                if decision == "retry"
                else w.inner.interrupted.discard(b"")[0]
            )
            given_up = [op.seq for op in w.log.parked()]
        assert (decided, w.engine.discard(given_up)) == (1, int(decision == "discard"))
        await w.do(w.fs.fsync(other.handle, False))
        assert (w.backing / "safe/behind").read_bytes() == b"bytes"
        assert (w.backing / "big").exists() == (decision == "retry")
        await w.close(other)

    run(tmp_path, scenario, closing=lambda _pid: closing)


async def replaced(w: World, directory: Ino) -> None:
    """A file there is stored anew, and its first store, for which nothing was done yet, is left
    out.
    """
    (first,) = [op for op in w.log if op.name == b"f"]
    await w.write(b"f", b"second", directory)
    w.engine.hold(False)
    await until(w, lambda: w.log.get(first.seq) is None)


def test_a_name_that_is_stored_anew_while_a_close_is_waited_for_is_durable_too(
    tmp_path: Path, waits: trio.Event
) -> None:
    """The store that it had at the call was left out; the one that stands for it is behind all that
    was there at the call.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        directory = await mkdir(w, b"safe")
        big, _data = await synced_half(w, kernel, ROOT)
        await make_durable(w, directory)
        await w.write(b"f", b"first", directory)
        (unsealed,) = [op for op in w.log if op.name == b"big"]
        done: list[bytes] = []

        async def fsyncdir() -> None:
            await sync(w, directory)
            done.append((w.backing / "safe/f").read_bytes())

        held = HeldCall(w.lower.create_staging)
        w.lower.create_staging = held  # type: ignore[assignment, method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fsyncdir)
            with trio.fail_after(60):
                await waits.wait()
            await replaced(w, directory)
            await w.close(big)
            await until(w, lambda: w.log.get(unsealed.seq) is None)
            await trio.testing.wait_all_tasks_blocked()
            assert not done
            held.go_on.set()
        assert done == [b"second"]

    run(tmp_path, scenario)


@pytest.mark.usefixtures("_impatient")
def test_a_name_that_was_behind_an_open_file_is_so_when_it_is_stored_anew(tmp_path: Path) -> None:
    async def scenario(w: World, kernel: Kernel) -> None:
        directory = await mkdir(w, b"safe")
        big, _data = await synced_half(w, kernel, ROOT)
        await make_durable(w, directory)
        await w.write(b"f", b"first", directory)
        handle = await w.do(w.fs.opendir(directory))
        call = w.fs.fsyncdir(handle)
        waiting = w.fs.steps.step(call, None)
        await replaced(w, directory)
        await settled(waiting)
        with pytest.raises(OSError, match="No space"):
            w.fs.steps.step(call, waiting)
        await w.do(w.fs.releasedir(handle))
        await w.close(big)
        await sync(w, directory)
        assert (w.backing / "safe/f").read_bytes() == b"second"

    run(tmp_path, scenario)


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("call", ["fsync", "open"])
def test_however_many_wait_for_a_close_it_is_answered(tmp_path: Path, call: str) -> None:
    """A close asks the backing directory: those who wait for it must not have all threads for
    that.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        directory = await mkdir(w, b"safe")
        big, data = await synced_half(w, kernel, ROOT)
        await make_durable(w, directory)

        async def wait_for_it(number: int) -> None:
            if call == "open":
                found = await w.do(w.fs.lookup(ROOT, b"big"))
                await w.close(await w.do(w.fs.open(found.ino, os.O_RDONLY, CALLER)))
                return
            opened, _attributes = await w.create(b"%d" % number, directory)
            await w.do(w.fs.write(opened.handle, 0, b"bytes"))
            await w.do(w.fs.fsync(opened.handle, False))
            assert (w.backing / f"safe/{number}").read_bytes() == b"bytes"
            await w.close(opened)

        async with trio.open_nursery() as nursery:
            for number in range(w.calls.requests.threads_max + 8):
                nursery.start_soon(wait_for_it, number)
            await trio.testing.wait_all_tasks_blocked()
            await w.close(big)
        await w.drained()
        assert (w.backing / "big").read_bytes() == data

    run(tmp_path, scenario)


def test_a_new_directory_is_there_when_its_fsync_returns(tmp_path: Path) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        await make_durable(w, ROOT)
        w.engine.hold(False)
        await sync(w, await mkdir(w, b"new"))
        assert (w.backing / "new").is_dir()

    run(tmp_path, scenario)


class Refusing(BackingDirectory):
    """Has no right to one name."""

    def rename(self, source: LowerPath, target: LowerPath) -> None:
        if target[-1] == b"refused":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        super().rename(source, target)


def test_a_name_that_is_refused_is_an_error_of_its_directory_and_of_no_other(
    tmp_path: Path,
) -> None:
    async def scenario(w: World, _kernel: Kernel) -> None:
        await make_durable(w, ROOT)
        w.engine.hold(False)
        directory = await mkdir(w, b"safe")
        other = await mkdir(w, b"other")
        await w.write(b"refused", b"bytes", directory)
        await w.write(b"f", b"bytes", other)
        with pytest.raises(PermissionError):
            await sync(w, directory)
        await sync(w, other)
        assert (w.backing / "other/f").exists()
        assert w.engine.discard([op.seq for op in w.log.parked()]) == 1
        await sync(w, directory)

    run(tmp_path, scenario, make_lower=Refusing)


def test_the_next_worker_knows_the_mode_that_a_directory_has_on_the_backing_directory(
    tmp_path: Path,
) -> None:
    """Its first writer is served by the daemon, without a question; even where this worker got no
    further than to learn it.
    """
    (tmp_path / "backing/safe").mkdir(parents=True)
    (tmp_path / "backing/safe/f").write_bytes(b"bytes")
    os.setxattr(tmp_path / "backing/safe", FSYNC_XATTR, b"durable")

    async def lane() -> Lane:
        async with world(tmp_path, unknown_bytes=0) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            directory = (await w.do(w.fs.lookup(ROOT, b"safe"))).ino
            ino = (await w.do(w.fs.lookup(directory, b"f"))).ino
            opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_APPEND, CALLER))
            await w.do(w.fs.fsync(opened.handle, False))
            return opened.lane

    assert [trio.run(lane), trio.run(lane)] == [Lane.PASSTHROUGH, Lane.DIRECT]


@pytest.mark.clause("S593")
@pytest.mark.parametrize("value", [b"of-a-newer-acpfs", b"\xff\xfe", b"", b"Durable"])
@pytest.mark.parametrize("above", [b"durable", None])
def test_a_mode_that_nobody_here_knows_is_none(
    tmp_path: Path, value: bytes, above: bytes | None
) -> None:
    """Whoever may write to the backing directory can set one there, and so can a newer acpfs."""
    (tmp_path / "backing/top/run").mkdir(parents=True)
    os.setxattr(tmp_path / "backing/top/run", FSYNC_XATTR, value)
    if above is not None:
        os.setxattr(tmp_path / "backing/top", FSYNC_XATTR, above)

    async def main() -> None:
        # what fsync need not wait for must not be there by chance
        async with world(tmp_path, hold=above is None) as w:
            await scenario(w)

    async def scenario(w: World) -> None:
        top = (await w.do(w.fs.lookup(ROOT, b"top"))).ino
        run_ = (await w.do(w.fs.lookup(top, b"run"))).ino
        opened, attributes = await w.do(w.fs.create(run_, b"f", 0o644, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(opened.handle, 0, b"bytes"))
        await w.do(w.fs.fsync(opened.handle, False))
        in_order = not (tmp_path / "backing/top/run/f").exists()
        assert in_order is (above is None)
        w.engine.hold(False)
        await sync(w, run_)
        await w.close(opened)
        again = await w.do(w.fs.open(attributes.ino, os.O_WRONLY | os.O_APPEND, CALLER))
        await w.close(again)
        await w.drained()
        assert os.getxattr(tmp_path / "backing/top/run", FSYNC_XATTR) == value

    trio.run(main)
