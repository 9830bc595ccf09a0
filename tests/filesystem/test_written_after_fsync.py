"""A large file that the kernel goes on writing to after its fsync, while that version waits to be
streamed: exception X11.

The test is the kernel: it writes to the descriptor that an open in the passthrough lane hands out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem.content.contents import COPY_AT_FREEZE_BYTES_MAX
from acpfs.filesystem.expectations import Use
from acpfs.filesystem.records import Lane
from acpfs.types import ROOT
from acpfs.writeback.streams.streams import Stream
from tests.filesystem.held_call import HeldCall
from tests.filesystem.world import World, run, world

SMALL = COPY_AT_FREEZE_BYTES_MAX
LARGE = COPY_AT_FREEZE_BYTES_MAX + 1


@pytest.mark.parametrize(("size", "later"), [(SMALL, b""), (LARGE, b"later")])
@pytest.mark.clause("S180", "X11")
def test_a_version_has_what_was_synced_and_a_large_one_perhaps_later_writes(
    tmp_path: Path, size: int, later: bytes
) -> None:
    synced = b"s" * size

    async def main() -> None:
        async with world(
            tmp_path, unknown_bytes=1 << 20, budget_bytes=128 << 20, max_dirty_age_s=0
        ) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            opened, _ = await w.create(b"f")
            assert opened.lane is Lane.PASSTHROUGH
            os.pwrite(opened.backing_fd, synced, 0)
            await w.do(w.fs.fsync(opened.handle, False))
            os.pwrite(opened.backing_fd, b"later", 0)
            await w.drained()
            assert (w.backing / "f").read_bytes() == later + synced[len(later) :]
            await w.close(opened)
            await w.drained()
            assert (w.backing / "f").read_bytes() == b"later" + synced[5:]

    trio.run(main)


class Counted:
    """Stands in for a method: says when it was called so often."""

    def __init__(self, method: Callable[..., Any], enough: threading.Event, number: int) -> None:
        self._method = method
        self._enough = enough
        self._number = number
        self.calls = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls >= self._number:
            self._enough.set()
        return self._method(*arguments, **named)


@pytest.mark.clause("S517")
def test_a_version_is_not_copied_again_while_a_write_to_its_file_is_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = b"s" * LARGE

    async def scenario(w: World) -> None:
        opened, attributes = await w.create(b"f")
        assert opened.lane is Lane.PASSTHROUGH
        os.pwrite(opened.backing_fd, synced, 0)
        await w.do(w.fs.fsync(opened.handle, False))
        os.pwrite(opened.backing_fd, b"later", 0)
        held = HeldCall(int)  # who has the lock of the file's inode
        w.tier.calls.submit(w.inner.table[attributes.ino].body.tier, held)
        enough = threading.Event()
        copies = Counted(w.engine._streamer._copy_once, enough, 4)
        looks = Counted(w.inner.contents.kernel.is_changing, enough, 4)
        monkeypatch.setattr(w.engine._streamer, "_copy_once", copies)
        monkeypatch.setattr(w.inner.contents.kernel, "is_changing", looks)
        w.engine.hold(False)
        assert await trio.to_thread.run_sync(enough.wait, 60)
        assert copies.calls == 1
        held.go_on.set()
        await w.drained()
        assert copies.calls == 2
        assert (w.backing / "f").read_bytes() == b"later" + synced[5:]
        await w.close(opened)

    run(
        tmp_path,
        scenario,
        passthrough=True,
        unknown_bytes=1 << 20,
        budget_bytes=128 << 20,
        max_dirty_age_s=0,
    )


@pytest.mark.clause("S494")
def test_versions_whose_writes_are_held_up_take_no_place_of_others(tmp_path: Path) -> None:
    """As many as are streamed at a time, and the drain of all others stood still."""
    synced = b"s" * LARGE
    streams = 2

    async def scenario(w: World) -> None:
        held = []
        names = [b"held %d" % number for number in range(streams)]
        for name in names:
            opened, attributes = await w.create(name)
            assert opened.lane is Lane.PASSTHROUGH
            os.pwrite(opened.backing_fd, synced, 0)
            await w.do(w.fs.fsync(opened.handle, False))
            os.pwrite(opened.backing_fd, b"later", 0)
            call = HeldCall(int)  # who has the lock of the file's inode
            w.tier.calls.submit(w.inner.table[attributes.ino].body.tier, call)
            held.append((opened, call))
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        other = await w.write(b"other", synced)
        w.engine.hold(False)
        is_staged = False
        said: list[bool] = []
        with trio.fail_after(60):
            while not (is_staged and said == [True] * streams + [False]):
                await trio.sleep(0.01)
                is_staged = any(
                    op.ino == other and op.version is not None and op.version.is_staged
                    for op in w.log
                )
                queue = w.engine.statistics().queue
                said = ["a program holds up (process 1)" in one.why for one in queue]
        for _opened, call in held:
            call.go_on.set()
        await w.drained()
        for name in names:
            assert (w.backing / name.decode()).read_bytes() == b"later" + synced[5:]
        assert (w.backing / "other").read_bytes() == synced
        for opened, _call in held:
            await w.close(opened)

    run(
        tmp_path,
        scenario,
        passthrough=True,
        unknown_bytes=1 << 20,
        budget_bytes=128 << 20,
        max_dirty_age_s=0,
        streams=streams,
    )


def store_through_a_mapping(fd: int, data: bytes) -> None:
    """As on a tmpfs: the file's mtime stays as it is, and mmap has set the atime."""
    st = os.fstat(fd)
    os.pwrite(fd, data, 0)
    os.utime(fd, ns=(st.st_mtime_ns, st.st_mtime_ns))


@pytest.mark.clause("S517")
def test_what_is_stored_through_a_mapping_is_no_damage_where_the_stream_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = b"s" * LARGE

    async def scenario(w: World) -> None:
        monkeypatch.setattr(w.tier, "tells_of_mappings", lambda: True)  # as a tmpfs does
        with w.fs.lock, w.state.step():
            w.inner.expectations.learn(b"f", LARGE)
            w.inner.expectations.learn_use(b"f", Use.ONLY_WRITTEN)
        opened, _attributes = await w.create(b"f", flags=os.O_RDWR)
        assert opened.lane is Lane.PASSTHROUGH
        os.pwrite(opened.backing_fd, synced, 0)
        await w.do(w.fs.fsync(opened.handle, False))
        staged = w.engine._streamer._staged
        lost: list[str] = []

        def loses_the_first(stream: Stream, name: str, *rest: Any) -> None:
            staged(stream, name, *rest)
            if not lost:
                lost.append(name)
                os.unlink(next(w.backing.rglob(os.path.basename(name))))
                store_through_a_mapping(opened.backing_fd, b"later")

        monkeypatch.setattr(w.engine._streamer, "_staged", loses_the_first)
        await w.drained()
        assert lost
        assert (w.backing / "f").read_bytes() == b"later" + synced[5:]
        await w.close(opened)

    run(
        tmp_path,
        scenario,
        passthrough=True,
        unknown_bytes=1 << 20,
        budget_bytes=128 << 20,
        max_dirty_age_s=0,
    )


@pytest.mark.clause("S506", "S517")
@pytest.mark.parametrize("between", [0, 1])
def test_what_a_dead_session_wrote_is_no_damage_where_the_stream_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: int
) -> None:
    """Its program writes on when all of acpfs was killed, and somebody tidies up the staging area:
    an alarm would have what comes behind it go first.

    `between`: mounts that end before they have streamed it.
    """
    synced = b"s" * LARGE

    async def main() -> None:
        token = trio.lowlevel.current_trio_token()
        is_lost = trio.Event()
        async with world(
            tmp_path, hold=False, unknown_bytes=1 << 20, budget_bytes=128 << 20, max_dirty_age_s=0
        ) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            opened, _attributes = await w.create(b"f")
            assert opened.lane is Lane.PASSTHROUGH
            theirs = os.open(f"/proc/self/fd/{opened.backing_fd}", os.O_WRONLY)
            os.pwrite(theirs, synced, 0)
            staged = w.engine._streamer._staged

            def loses_it(stream: Stream, name: str, *rest: Any) -> None:
                w.engine.hold(True)  # before it could be committed
                staged(stream, name, *rest)
                os.unlink(next(w.backing.rglob(os.path.basename(name))))
                trio.from_thread.run_sync(is_lost.set, trio_token=token)

            monkeypatch.setattr(w.engine._streamer, "_staged", loses_it)
            await w.do(w.fs.fsync(opened.handle, False))
            with trio.fail_after(60):
                await is_lost.wait()
        os.pwrite(theirs, b"later", 0)
        os.close(theirs)
        for _mount in range(between):
            async with world(tmp_path, budget_bytes=128 << 20):
                pass
        async with world(tmp_path, hold=False, budget_bytes=128 << 20) as w:
            with trio.fail_after(60):
                while not (w.backing / "f").exists():
                    assert not w.engine.statistics().parked
                    await trio.sleep(0.01)
            assert (w.backing / "f").read_bytes() == b"later" + synced[5:]

    trio.run(main)


@pytest.mark.clause("S506", "X11")
def test_what_the_next_mount_shows_of_a_staged_version_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of a dead session wrote on after its version was staged."""
    synced = b"s" * LARGE
    shown = b"later" + synced[5:]
    settings: dict[str, Any] = {"budget_bytes": 128 << 20, "max_dirty_age_s": 0}

    async def main() -> None:
        token = trio.lowlevel.current_trio_token()
        is_staged = trio.Event()
        async with world(tmp_path, hold=False, unknown_bytes=1 << 20, **settings) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            opened, _attributes = await w.create(b"f")
            assert opened.lane is Lane.PASSTHROUGH
            theirs = os.open(f"/proc/self/fd/{opened.backing_fd}", os.O_WRONLY)
            os.pwrite(theirs, synced, 0)
            staged = w.engine._streamer._staged

            def holds(stream: Stream, name: str, *rest: Any) -> None:
                w.engine.hold(True)  # before it could be committed
                staged(stream, name, *rest)
                trio.from_thread.run_sync(is_staged.set, trio_token=token)

            monkeypatch.setattr(w.engine._streamer, "_staged", holds)
            await w.do(w.fs.fsync(opened.handle, False))
            with trio.fail_after(60):
                await is_staged.wait()
        os.pwrite(theirs, b"later", 0)
        os.close(theirs)
        async with world(tmp_path, **settings) as w:
            with w.fs.lock:
                assert w.inner.interrupted.discard(b"f") == (1, [])
            ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
            assert await w.read(ino, 2 * LARGE) == shown
            await w.drained()
            assert (w.backing / "f").read_bytes() == shown

    trio.run(main)


@pytest.mark.clause("X11")
def test_what_an_earlier_version_got_of_a_half_goes_with_it(tmp_path: Path) -> None:
    """Two were synced, the first one was read again since: it has what was written behind both."""
    settings: dict[str, Any] = {"budget_bytes": 128 << 20, "max_dirty_age_s": 0}

    async def main() -> None:
        async with world(tmp_path, unknown_bytes=1 << 20, **settings) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            opened, _attributes = await w.create(b"f")
            assert opened.lane is Lane.PASSTHROUGH
            for byte in (b"1", b"2"):
                os.pwrite(opened.backing_fd, byte * LARGE, 0)
                await w.do(w.fs.fsync(opened.handle, False))
            first, second = (op.version for op in w.log if op.version is not None)
            os.pwrite(opened.backing_fd, b"half", LARGE)
            with w.fs.lock, w.state.step():
                assert not w.inner.changes.still_frozen(first)
            assert (first.size, second.size) == (LARGE + 4, LARGE)
        async with world(tmp_path, **settings) as w:
            with w.fs.lock, w.state.step():
                assert w.inner.interrupted.discard(b"f") == (1, [])
            ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
            assert await w.read(ino, 2 * LARGE) == b"2" * LARGE
            sizes = {op.version.size for op in w.log if op.version is not None}
            assert sizes == {LARGE}
            await w.drained()
            assert (w.backing / "f").read_bytes() == b"2" * LARGE

    trio.run(main)
