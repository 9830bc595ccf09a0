"""Files that are only on the backing directory: read, and on their way to RAM, while it fails or
somebody changes them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.backing import calls
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.health import STUCK_AFTER_S
from acpfs.backing.lower import LowerPath, Note
from acpfs.config import WarmReads
from acpfs.filesystem.content import whole_reads
from acpfs.filesystem.records import AttributeChange, Lane
from acpfs.types import ROOT, Ino
from tests.filesystem.held_call import HeldCall
from tests.filesystem.world import CALLER, World, run, world

MIB = 1 << 20
STOPPED_S = 2.5
"""Patience with what hangs, from then on: what does not hang has the time that it takes."""


async def cold(w: World, data: bytes) -> Ino:
    """A file that was there before the mount."""
    (w.backing / "cold").write_bytes(data)
    return (await w.do(w.fs.lookup(ROOT, b"cold"))).ino


@pytest.mark.clause("S101", "S102")
def test_a_piece_whose_read_failed_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(4 * MIB)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            ino = await cold(w, data)
            read = w.lower.read
            failed: list[int] = []

            def fails_once(fd: int, buffer: memoryview, offset: int) -> int:
                if offset <= 2 * MIB < offset + len(buffer) and not failed:
                    failed.append(offset)
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return read(fd, buffer, offset)

            monkeypatch.setattr(w.lower, "read", fails_once)
            opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            found = b"".join([await w.do(w.fs.read(opened.handle, n * MIB, MIB)) for n in range(4)])
            await w.close(opened)
            assert failed
            assert found == data
            assert await w.read(ino, 4 * MIB) == data

    trio.run(scenario)


@pytest.mark.clause("S29", "S49")
def test_who_read_the_file_before_it_was_replaced_reads_what_replaced_it(tmp_path: Path) -> None:
    before = os.urandom(2 * MIB)
    after = os.urandom(6 * MIB)

    async def scenario() -> None:
        async with world(tmp_path, budget_bytes=4 * MIB, warm_reads=WarmReads.OFF) as w:
            ino = await cold(w, before)
            reader = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            assert await w.do(w.fs.read(reader.handle, 0, MIB)) == before[:MIB]
            writer = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
            for n in range(6):
                # more than RAM has room for: its content is a staging file, and nowhere else when
                # that is in place
                await w.do(w.fs.write(writer.handle, n * MIB, after[n * MIB : (n + 1) * MIB]))
            await w.close(writer)
            assert await w.do(w.fs.read(reader.handle, 0, MIB)) == after[:MIB]
            await w.drained()
            assert await w.do(w.fs.read(reader.handle, 0, MIB)) == after[:MIB]
            await w.close(reader)

    trio.run(scenario)


@pytest.mark.clause("S101")
def test_an_open_that_nobody_waits_for_any_more_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with world(tmp_path, warm_reads=WarmReads.OFF) as w:
            ino = await cold(w, bytes(2 * MIB))
            open_read = w.lower.open_read
            close = os.close
            goes_on = threading.Event()
            closed = threading.Event()
            left: list[int] = []

            def hangs(path: LowerPath) -> int:
                goes_on.wait(60)
                left.append(open_read(path))
                return left[0]

            def noticed(fd: int) -> None:
                close(fd)
                if [fd] == left:
                    closed.set()

            monkeypatch.setattr(w.lower, "open_read", hangs)
            monkeypatch.setattr(os, "close", noticed)
            opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            w.fs.settings.backing_timeout_s = STOPPED_S
            with pytest.raises(OSError, match="no answer"):
                await w.do(w.fs.read(opened.handle, 0, MIB))
            await w.close(opened)
            goes_on.set()
            assert await trio.to_thread.run_sync(closed.wait, 120)

    trio.run(scenario)


@pytest.mark.clause("S3", "S4")
def test_nothing_is_asked_about_an_open_file_of_the_backing_directory_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fstat = os.fstat
    asked = []

    async def scenario() -> None:
        async with world(tmp_path, warm_reads=WarmReads.OFF) as w:
            ino = await cold(w, bytes(2 * MIB))

            def watched(fd: int) -> os.stat_result:
                if os.readlink(f"/proc/self/fd/{fd}").startswith(os.fspath(w.backing)):
                    # what threading.Condition asks too
                    asked.append(w.fs.lock._is_owned())  # type: ignore[attr-defined]
                return fstat(fd)

            monkeypatch.setattr(os, "fstat", watched)
            await w.read(ino, MIB)

    trio.run(scenario)
    assert asked
    assert not any(asked)


@pytest.mark.clause("S103")
def test_what_is_kept_does_not_leave_for_a_cold_file_whose_room_goes_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with world(tmp_path, budget_bytes=8 * MIB, hold=False) as w:
            ino = await cold(w, os.urandom(4 * MIB))
            folder = await w.do(w.fs.mkdir(ROOT, b"checkpoint-100", 0o755, CALLER))
            kept = await w.write(b"model.bin", os.urandom(3 * MIB), folder.ino)
            await w.drained()
            assert w.tier.free_bytes() == 5 * MIB
            open_read = w.lower.open_read

            def meanwhile(path: LowerPath) -> int:
                with w.fs.lock:
                    assert w.tier.reserve_nowait(2 * MIB)
                return open_read(path)

            monkeypatch.setattr(w.lower, "open_read", meanwhile)
            await w.read(ino, MIB)
            assert w.inner.table[kept].body.is_whole_in_ram

    trio.run(scenario)


@pytest.mark.clause("S105", "S29")
@pytest.mark.parametrize("below", [None, b"100"])
def test_the_latest_checkpoint_is_the_one_that_the_tracker_names_in_the_mount(
    tmp_path: Path, below: bytes | None
) -> None:
    tracker = b"latest_checkpointed_iteration.txt"

    async def scenario() -> None:
        async with world(tmp_path) as w:
            for step in (100, 200, 300):
                (w.backing / f"iter_{step:07}").mkdir()
                (w.backing / f"iter_{step:07}" / "model.pt").write_bytes(b"bytes")
            if below is not None:
                (w.backing / os.fsdecode(tracker)).write_bytes(below)
            await w.write(tracker, b"200")  # the engine is held: not persisted
            assert await w.do(w.inner.preloading.latest()) == [b"iter_0000200", tracker]

    trio.run(scenario)


@pytest.mark.clause("S101")
def test_a_fill_that_no_thread_takes_ends_at_once_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the backing directory hung for long, with more calls waiting than there may be."""
    data = os.urandom(4 * MIB)

    async def scenario() -> None:
        async with world(tmp_path, backing_timeout_s=60.0) as w:
            ino = await cold(w, data)
            opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            assert await w.do(w.fs.read(opened.handle, 0, 4096)) == data[:4096]
            with monkeypatch.context() as hangs:
                hangs.setattr(calls, "WAITING_CALLS_MAX", 0)
                with pytest.raises(OSError, match="no answer"):
                    await w.do(w.fs.read(opened.handle, 0, MIB))
            assert w.tier.reserved_bytes == 0
            assert await w.do(w.fs.read(opened.handle, 0, MIB)) == data[:MIB]
            await w.close(opened)

    trio.run(scenario)


@pytest.mark.clause("S104", "S101")
@pytest.mark.parametrize(
    "budget_bytes", [64 * MIB, MIB], ids=["on its way to RAM", "where it lies"]
)
def test_an_open_that_waits_for_the_comparison_gets_an_error_when_nothing_comes_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_bytes: int
) -> None:
    async def scenario() -> None:
        async with world(tmp_path, budget_bytes=budget_bytes, verify_reads=True) as w:
            ino = await cold(w, os.urandom(4 * MIB))
            data = (w.backing / "cold").read_bytes()
            noted = w.lower.noted
            goes_on = threading.Event()

            def hangs(fd: int) -> Note | None:
                goes_on.wait(60)
                return noted(fd)

            monkeypatch.setattr(w.lower, "noted", hangs)
            usual_s = w.fs.settings.backing_timeout_s
            w.fs.settings.backing_timeout_s = STOPPED_S
            for _ in range(2):
                with pytest.raises(OSError, match="no answer") as refused:
                    await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
                assert refused.value.errno == errno.EIO
            w.fs.settings.backing_timeout_s = usual_s
            goes_on.set()
            assert await w.read(ino, 4 * MIB) == data

    trio.run(scenario)


@pytest.mark.clause("S101", "S28")
@pytest.mark.parametrize(
    ("flags", "budget_bytes"),
    [(os.O_RDONLY, MIB), (os.O_WRONLY, 64 * MIB)],
    ids=["compared", "copied up"],
)
def test_a_long_read_that_goes_on_does_not_count_as_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, budget_bytes: int
) -> None:
    """Or names would not be asked for meanwhile."""
    now = [0.0]
    stuck = list[bool]()
    monkeypatch.setattr(whole_reads, "CHUNK_BYTES", MIB)

    async def scenario() -> None:
        async with world(tmp_path, budget_bytes=budget_bytes, verify_reads=True) as w:
            ino = await cold(w, os.urandom(16 * MIB))

            def noted(read: Callable[..., Any], fd: int, *arguments: Any) -> Any:
                if os.readlink(f"/proc/self/fd/{fd}").startswith(os.fspath(w.backing)):
                    stuck.append(w.calls.health.is_stuck())
                    now[0] += 0.6 * STUCK_AFTER_S
                return read(fd, *arguments)

            monkeypatch.setattr(w.calls.health, "_clock", lambda: now[0])
            monkeypatch.setattr(os, "pread", partial(noted, os.pread))
            await w.close(await w.do(w.fs.open(ino, flags, CALLER)))

    trio.run(scenario)
    assert len(stuck) >= 4
    assert not any(stuck)


class Hang:
    """The backing directory gives so many bytes, then nothing until it is let go; `ended`: the
    thread has closed what it had open.
    """

    def __init__(self, w: World, monkeypatch: pytest.MonkeyPatch, good_bytes: int) -> None:
        self._below = os.fspath(w.backing)
        self._left = good_bytes
        self._read = {name: getattr(os, name) for name in ("pread", "preadv")}
        self._close = os.close
        self._threads: set[int] = set()
        self.goes_on = threading.Event()
        self.hangs = threading.Event()
        self.ended = threading.Event()
        for name in self._read:
            monkeypatch.setattr(os, name, partial(self._reading, name))
        monkeypatch.setattr(os, "close", self._closing)

    def _reading(self, name: str, fd: int, *arguments: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(self._below):
            if self._left <= 0:
                self._threads.add(threading.get_ident())
                self.hangs.set()
                self.goes_on.wait(60)
            self._left -= MIB
        return self._read[name](fd, *arguments)

    def _closing(self, fd: int) -> None:
        is_target = threading.get_ident() in self._threads and "/tier/data/" in os.readlink(
            f"/proc/self/fd/{fd}"
        )
        self._close(fd)
        if is_target:
            self.ended.set()


def tier_bytes(w: World) -> int:
    """What tier files take on their file system, removed ones that somebody has open among them."""
    files = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(
                os.fspath(w.tier.directory / "data") + "/"
            ):
                st = os.fstat(int(fd))
                files[st.st_ino] = st.st_blocks * 512
    files |= {
        st.st_ino: st.st_blocks * 512
        for st in (entry.stat() for entry in os.scandir(w.tier.directory / "data"))
    }
    return sum(files.values())


@pytest.mark.clause("S192", "S104")
def test_damage_is_found_in_a_file_whose_times_were_set_after_it_was_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, hold=False, verify_reads=True) as w:
            ino = await w.write(b"f", b"good" * 1000)
            await w.drained()
            await w.do(
                w.fs.setattr(ino, AttributeChange(mtime_ns=1_700_000_000_000_000_000), None, CALLER)
            )
            await w.drained()
        st = (tmp_path / "backing/f").stat()
        (tmp_path / "backing/f").write_bytes(b"rots" * 1000)
        os.utime(tmp_path / "backing/f", ns=(st.st_atime_ns, st.st_mtime_ns))
        shutil.rmtree(tmp_path / "tier")
        async with world(tmp_path, verify_reads=True) as w:
            found = await w.do(w.fs.lookup(ROOT, b"f"))
            with pytest.raises(OSError, match="not what was stored") as refused:
                await w.read(found.ino)
            assert refused.value.errno == errno.EIO

    trio.run(scenario)


@pytest.mark.clause("S444")
@pytest.mark.parametrize("verify_reads", [False, True], ids=["while read", "before"])
@pytest.mark.parametrize("blocks", [1, 4 * 1024], ids=["small", "large"])
def test_what_comes_wrong_once_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, verify_reads: bool
) -> None:
    """A path to the storage that gives one wrong byte once.

    The file is good, and was refused for as long as the mount lasted.
    """
    data = os.urandom(1024) * blocks

    async def scenario() -> None:
        async with world(tmp_path, hold=False) as w:
            await w.write(b"f", data)
            await w.drained()
        shutil.rmtree(tmp_path / "tier")
        wrong = WrongOnce(monkeypatch)
        async with world(tmp_path, verify_reads=verify_reads) as w:
            ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
            opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            pieces = range(0, len(data), MIB)
            await w.do(w.fs.read(opened.handle, 0, MIB))
            coming = w.inner.table[ino].body.filling
            for at in pieces:
                await w.do(w.fs.read(opened.handle, at, MIB))
            if coming is not None:
                await trio.to_thread.run_sync(coming.settled.result, 60)
            assert wrong.times == 1
            found = [await w.do(w.fs.read(opened.handle, at, MIB)) for at in pieces]
            assert b"".join(found) == data
            await w.close(opened)
            assert w.fs.statistics().lower_view.checksum_mismatches == 0

    trio.run(scenario)


class WrongOnce:
    """The first bytes that are read of a file on the backing directory, whoever reads them, are
    wrong.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self._lock = threading.Lock()
        self._pread = os.pread
        self._read = BackingDirectory.read
        monkeypatch.setattr(os, "pread", self._wrong_pread)
        monkeypatch.setattr(BackingDirectory, "read", lambda *words: self._wrong_read(*words))

    def _is_first(self, fd: int) -> bool:
        with self._lock:
            if "/backing/" not in os.readlink(f"/proc/self/fd/{fd}") or self.times:
                return False
            self.times += 1
            return True

    def _wrong_pread(self, fd: int, size: int, offset: int) -> bytes:
        data = self._pread(fd, size, offset)
        return bytes([data[0] ^ 1]) + data[1:] if data and self._is_first(fd) else data

    def _wrong_read(
        self, directory: BackingDirectory, fd: int, target: memoryview, offset: int
    ) -> int:
        got = self._read(directory, fd, target, offset)
        if got and self._is_first(fd):
            target[0] ^= 1
        return got


@pytest.mark.clause("S131", "S101")
@pytest.mark.parametrize(("size", "flags"), [(4 * MIB, os.O_WRONLY), (4096, os.O_RDONLY)])
def test_what_arrives_after_patience_has_ended_is_not_kept_uncounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, flags: int
) -> None:
    monkeypatch.setattr(whole_reads, "CHUNK_BYTES", MIB)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            ino = await cold(w, os.urandom(size))
            w.fs.settings.backing_timeout_s = STOPPED_S
            hang = Hang(w, monkeypatch, size - MIB)
            written = list[int]()
            pwrite = os.pwrite
            with contextlib.suppress(OSError):
                await w.close(await w.do(w.fs.open(ino, flags, CALLER)))
            assert hang.hangs.is_set()
            assert (tier_bytes(w), w.tier.used_bytes, w.tier.reserved_bytes) == (0, 0, 0)

            def noticed(fd: int, data: bytes | memoryview, offset: int) -> int:
                written.append(offset)
                return pwrite(fd, data, offset)

            monkeypatch.setattr(os, "pwrite", noticed)
            hang.goes_on.set()
            assert await trio.to_thread.run_sync(hang.ended.wait, 120)
            assert written == []

    trio.run(scenario)


@pytest.mark.clause("S131", "S103")
def test_what_was_on_its_way_is_gone_at_once_although_its_reader_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(16 * MIB)

    async def scenario() -> None:
        async with world(tmp_path, backing_timeout_s=120.0) as w:
            ino = await cold(w, data)
            hang = Hang(w, monkeypatch, 3 * MIB)
            opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            assert await w.do(w.fs.read(opened.handle, 0, MIB)) == data[:MIB]
            coming = w.inner.table[ino].body.filling
            assert coming is not None
            coming.fill.lead()
            assert await trio.to_thread.run_sync(hang.hangs.wait, 120)
            assert tier_bytes(w) > 0
            with w.fs.lock:
                w.inner.fills.give_way(1)
                w.state.commit()
            assert coming.fill.has(0, MIB)
            assert coming.fill.read(0, MIB) is None, "nobody may take a hole for what the file has"
            assert (tier_bytes(w), w.tier.used_bytes, w.tier.reserved_bytes) == (0, 0, 0)
            hang.goes_on.set()
            assert await w.do(w.fs.read(opened.handle, 0, MIB)) == data[:MIB]
            await w.close(opened)

    trio.run(scenario)


@pytest.mark.clause("S102", "S104")
@pytest.mark.parametrize("how", ["damaged", "changed"])
def test_who_closes_a_file_that_has_just_come_does_not_forestall_the_look_at_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its last piece is there, and the thread that brought it waits for the lock that the close
    has.
    """

    async def scenario() -> None:
        async with world(tmp_path, hold=False) as w:
            await w.write(b"f", b"good" * MIB)
            await w.drained()
        st = (tmp_path / "backing/f").stat()
        if how == "damaged":
            (tmp_path / "backing/f").write_bytes(b"rots" * MIB)
            os.utime(tmp_path / "backing/f", ns=(st.st_atime_ns, st.st_mtime_ns))
        shutil.rmtree(tmp_path / "tier")
        async with world(tmp_path) as w:
            ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
            noted = w.lower.noted
            goes_on = threading.Event()

            def late(fd: int) -> Note | None:
                assert goes_on.wait(60)
                if how == "changed":  # in the middle, after its beginning was read
                    (tmp_path / "backing/f").write_bytes(b"newd" * MIB)
                return noted(fd)

            monkeypatch.setattr(w.lower, "noted", late)
            opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            for n in range(4):
                await w.do(w.fs.read(opened.handle, n * MIB, MIB))
            coming = w.inner.table[ino].body.filling
            assert coming is not None
            with w.fs.lock:
                goes_on.set()
                coming.fill.done.exception(60)
                await w.close(opened)
            outcome = await trio.to_thread.run_sync(coming.settled.result, 60)
            assert outcome == {"damaged": "mismatch", "changed": "changed"}[how]
            assert w.inner.table[ino].body.is_cold

    trio.run(scenario)


@pytest.mark.clause("S1")
@pytest.mark.parametrize("changes", [1, 2])
def test_a_writer_gets_a_cold_file_whose_attributes_are_drained_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """A mode or a name of this mount's own changes what is compared after the file was read; its
    bytes are the same.
    """
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing/f").write_bytes(b"content")

    async def scenario(w: World) -> None:
        noted = w.lower.noted
        left = list(range(changes))

        def change_meanwhile(fd: int) -> Note | None:
            if left:
                (w.backing / "f").chmod(0o600 + left.pop())
            return noted(fd)

        monkeypatch.setattr(w.lower, "noted", change_meanwhile)
        found = await w.do(w.fs.lookup(ROOT, b"f"))
        opened = await w.do(w.fs.open(found.ino, os.O_WRONLY | os.O_APPEND, CALLER))
        await w.do(w.fs.write(opened.handle, 7, b", more"))
        await w.close(opened)
        assert not left
        await w.drained()
        assert (w.backing / "f").read_bytes() == b"content, more"

    run(tmp_path, scenario)


@pytest.mark.clause("S516")
@pytest.mark.parametrize("call", ["read", "open"])
def test_who_looks_for_a_file_that_comes_to_ram_meanwhile_finds_it_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """On the backing directory another file lies in its place when the look ends."""
    data = os.urandom(2 * MIB)
    found: list[bytes] = []

    async def scenario(w: World) -> None:
        ino = await cold(w, bytes(2 * MIB))
        w.inner.lanes.offer(Lane.DIRECT, passthrough=call == "open")
        held = HeldCall(w.lower.open_read)

        async def read() -> None:
            opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
            found.append(await w.do(w.fs.read(opened.handle, 0, 2 * MIB)))
            await w.close(opened)

        monkeypatch.setattr(w.lower, "open_read", held)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            assert await trio.to_thread.run_sync(held.began.wait, 60)
            writer = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
            await w.do(w.fs.write(writer.handle, 0, data))
            (tmp_path / "another").write_bytes(bytes(2 * MIB))
            os.rename(tmp_path / "another", w.backing / "cold")
            held.go_on.set()
        await w.close(writer)

    run(tmp_path, scenario, warm_reads=WarmReads.OFF)
    assert found == [data]
