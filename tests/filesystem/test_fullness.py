"""Writers in the passthrough lane that the tmpfs itself may have refused: the test is the kernel,
and says when the tmpfs is full.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem.records import Lane, OpenFile
from acpfs.ram.mounts import mount_tmpfs
from acpfs.ram.tier import HUGE_PAGE_BYTES, Tier
from acpfs.types import Ino
from tests.filesystem.test_hold import Kernel
from tests.filesystem.world import CALLER, World, world

pytestmark = pytest.mark.clause("S228")

MIB = 1 << 20
OLD = b"o" * 8192
PART = b"n" * 4096
_COARSE = 5


class Tmpfs:
    """What it has left."""

    def __init__(self) -> None:
        self.left_bytes = 1 << 40

    def is_full(self) -> None:
        self.left_bytes = 0

    def has_room(self) -> None:
        self.left_bytes = 1 << 40


@pytest.fixture
def tmpfs(monkeypatch: pytest.MonkeyPatch) -> Tmpfs:
    made = Tmpfs()
    monkeypatch.setattr(Tier, "space_left_bytes", lambda _tier: made.left_bytes)
    return made


def run(base: Path, scenario: Callable[[World], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        async with world(base, unknown_bytes=1 << 20, **changes) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            Kernel(w)
            await scenario(w)

    trio.run(main)


async def writer(w: World, name: bytes = b"f") -> tuple[Ino, OpenFile]:
    """It has a complete version on the backing directory, and is being overwritten in the
    passthrough lane.
    """
    w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
    ino = await w.write(name, OLD)
    await w.drained()
    w.engine.hold(True)
    w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
    opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
    assert opened.lane is Lane.PASSTHROUGH
    os.pwrite(opened.backing_fd, PART, 0)
    await later(w, opened)
    return ino, opened


async def later(w: World, opened: OpenFile) -> None:
    """The clock that files get their times of has moved on, and acpfs has looked."""
    written_ns = os.fstat(opened.backing_fd).st_mtime_ns
    while time.clock_gettime_ns(_COARSE) <= written_ns:  # noqa: ASYNC110 - a clock is no event
        await trio.sleep(0.001)
    tick(w)


def tick(w: World) -> None:
    with w.fs.lock:
        w.fs.tick()


def refused_write(opened: OpenFile) -> None:
    """As the kernel leaves the file: `test_a_write_that_the_tmpfs_refuses_leaves_its_time`."""
    os.utime(opened.backing_fd)


async def is_told_and_kept(w: World, ino: Ino, opened: OpenFile) -> None:
    for ask in (w.fs.fsync(opened.handle, False), w.fs.flush(opened.handle)):
        with pytest.raises(OSError) as refused:
            await w.do(ask)
        assert refused.value.errno == errno.ENOSPC
    await w.do(w.fs.release(opened.handle))
    await w.drained()
    assert (w.backing / "f").read_bytes() == OLD
    assert w.fs.statistics().interrupted_files == 1
    assert await w.read(ino) == PART
    with w.fs.lock:
        assert w.inner.interrupted.store(b"f") == 1
    await w.drained()
    assert (w.backing / "f").read_bytes() == PART


async def is_published(w: World, opened: OpenFile) -> None:
    await w.do(w.fs.fsync(opened.handle, False))
    await w.close(opened)
    await w.drained()
    assert (w.backing / "f").read_bytes() == PART


@pytest.mark.parametrize("looked", [True, False])
def test_who_may_have_been_refused_fails_and_the_old_version_stays(
    tmp_path: Path, tmpfs: Tmpfs, looked: bool
) -> None:
    async def scenario(w: World) -> None:
        ino, opened = await writer(w)
        tmpfs.is_full()
        refused_write(opened)
        if looked:
            tick(w)
            tmpfs.has_room()
        await is_told_and_kept(w, ino, opened)

    run(tmp_path, scenario)


@pytest.mark.parametrize("frees", ["remove", "discard", "read_done"])
def test_whoever_frees_pages_has_looked_before(tmp_path: Path, tmpfs: Tmpfs, frees: str) -> None:
    async def scenario(w: World) -> None:
        ino, opened = await writer(w)
        with w.fs.lock:
            other = w.tier.create()
            fd = w.tier.read_long(other) if frees == "read_done" else -1
        tmpfs.is_full()
        refused_write(opened)
        with w.fs.lock:
            if frees == "read_done":
                w.tier.read_done(other, fd)
            else:
                getattr(w.tier, frees)(other)
            w.state.commit()
        tmpfs.has_room()
        await is_told_and_kept(w, ino, opened)

    run(tmp_path, scenario)


@pytest.mark.parametrize("ends", [True, False])
def test_who_wrote_nothing_meanwhile_is_as_good_as_before(
    tmp_path: Path, tmpfs: Tmpfs, ends: bool
) -> None:
    """It was held, or had nothing to write. Closing it in such a moment is no write either."""

    async def scenario(w: World) -> None:
        _ino, opened = await writer(w)
        tmpfs.is_full()
        for _ in range(3):
            tick(w)
        if ends:
            tmpfs.has_room()
        await is_published(w, opened)

    run(tmp_path, scenario)


def test_a_write_that_was_under_way_before_ends_short_and_is_no_failure(
    tmp_path: Path, tmpfs: Tmpfs
) -> None:
    async def scenario(w: World) -> None:
        _ino, opened = await writer(w)
        began = os.fstat(opened.backing_fd)
        tmpfs.is_full()
        os.pwrite(opened.backing_fd, PART, len(PART))
        os.utime(opened.backing_fd, ns=(began.st_atime_ns, began.st_mtime_ns))
        tick(w)
        tmpfs.has_room()
        tick(w)
        os.pwrite(opened.backing_fd, PART, 2 * len(PART))
        await w.close(opened)
        await w.drained()
        assert (w.backing / "f").read_bytes() == 3 * PART

    run(tmp_path, scenario)


def test_who_writes_when_there_is_room_again_is_no_longer_in_doubt(
    tmp_path: Path, tmpfs: Tmpfs
) -> None:
    async def scenario(w: World) -> None:
        _ino, opened = await writer(w)
        tmpfs.is_full()
        tick(w)
        tmpfs.has_room()
        tick(w)
        os.pwrite(opened.backing_fd, PART, 0)
        await is_published(w, opened)

    run(tmp_path, scenario)


def test_a_worker_that_finds_the_tmpfs_full_doubts_what_was_being_written(
    tmp_path: Path, tmpfs: Tmpfs
) -> None:
    """Nobody has looked when it was: the last worker is dead."""
    opens: list[tuple[Ino, OpenFile]] = []

    async def first(w: World) -> None:
        opens.append(await writer(w))
        tmpfs.is_full()

    async def then(w: World) -> None:
        await is_told_and_kept(w, *opens[0])

    run(tmp_path, first, session="s")
    run(tmp_path, then, session="s")


def test_a_worker_that_finds_the_tmpfs_full_doubts_nothing_else(
    tmp_path: Path, tmpfs: Tmpfs
) -> None:
    opens: list[OpenFile] = []

    async def first(w: World) -> None:
        _ino, opened = await writer(w)
        await w.do(w.fs.fsync(opened.handle, False))
        opens.append(opened)
        tmpfs.is_full()

    async def then(w: World) -> None:
        w.engine.hold(True)
        await is_published(w, opens[0])

    run(tmp_path, first, session="s")
    run(tmp_path, then, session="s")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs."""
    directory = tmp_path / "small"
    directory.mkdir()
    mount_tmpfs(directory, f"size={2 * HUGE_PAGE_BYTES}")
    yield directory
    subprocess.run(["umount", directory], check=True)


def count_written(fd: int) -> int:
    try:
        return os.write(fd, b"y" * MIB)
    except OSError:  # the tmpfs is full
        return 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_a_write_that_the_tmpfs_refuses_leaves_its_time(small: Path) -> None:
    """What all of this goes by."""
    fds = [os.open(small / name, os.O_CREAT | os.O_WRONLY) for name in ("ours", "others")]
    try:
        os.write(fds[0], b"x")
        os.utime(fds[0], ns=(0, 10**18))
        assert sum(iter(partial(count_written, fds[1]), 0)) > 0
        info = os.statvfs(small)
        assert info.f_bavail * info.f_frsize < HUGE_PAGE_BYTES
        assert os.fstat(fds[0]).st_mtime_ns == 10**18
        before_ns = time.clock_gettime_ns(_COARSE)
        with pytest.raises(OSError) as refused:
            os.pwrite(fds[0], b"z", MIB)
        assert refused.value.errno == errno.ENOSPC
        assert (os.fstat(fds[0]).st_size, os.fstat(fds[0]).st_mtime_ns >= before_ns) == (1, True)
    finally:
        for fd in fds:
            os.close(fd)
