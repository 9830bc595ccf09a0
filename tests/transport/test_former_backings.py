"""Tier files that a worker of an older acpfs registered in the kernel to be written to: because of
that nobody has them mapped.

The kernel's part is a double, which keeps open what it was given, as the kernel does.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from acpfs.filesystem.records import Caller, OpenFile
from acpfs.ram.mapped_records import Slots
from acpfs.transport.native.device import Device
from acpfs.transport.native.kernel_lanes import Backing, KernelLanes
from acpfs.transport.native.negotiate import WANTED, Negotiated
from acpfs.types import ROOT, Ino
from tests.filesystem.world import World, run

pytestmark = pytest.mark.clause("S502")
SIZE = mmap.PAGESIZE
REQUESTS = itertools.count(1)


def caller() -> Caller:
    """By a request of its own: none comes again to the next worker."""
    return Caller(uid=0, gid=0, pid=1, unique=next(REQUESTS))


class KernelDouble(Device):
    """Keeps what it was given, by number."""

    def __init__(self) -> None:
        super().__init__([-1])
        self.files: dict[int, int] = {}
        self._last = 0

    def backing_open(self, fd: int) -> int:
        self._last += 1
        self.files[self._last] = os.dup(fd)
        return self._last

    def backing_close(self, backing_id: int) -> None:
        if backing_id not in self.files:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        os.close(self.files.pop(backing_id))

    def can_write(self) -> list[bool]:
        """Of each, whether it is open to be written to."""
        access = [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE for fd in self.files.values()]
        return [one != os.O_RDONLY for one in access]


class Older(KernelLanes):
    """As it was: the kernel gets the very descriptor of the file system."""

    def _new_to_read(self, fd: int) -> Backing:
        return Backing(self._device.backing_open(fd))


class Job:
    """A program that maps a file and closes it, while workers come and go."""

    def __init__(self) -> None:
        self.kernel = KernelDouble()
        self.ino = Ino(0)
        self.mapper: OpenFile | None = None
        self.mapped: mmap.mmap | None = None

    def lanes(self, w: World, kind: type[KernelLanes] = KernelLanes) -> KernelLanes:
        negotiated = Negotiated(45, int(WANTED), int(WANTED), 1 << 16)
        return kind(w.fs, w.inner.kept, self.kernel, negotiated)

    async def begin(self, w: World) -> None:
        """With a worker of an older acpfs: one who writes in passthrough, and beside him one who
        maps the file.
        """
        lanes = self.lanes(w, Older)
        writer, attributes = await w.do(
            w.fs.create(ROOT, b"model.pt", 0o644, os.O_WRONLY, caller())
        )
        self.ino = attributes.ino
        lanes.open_reply(self.ino, os.O_WRONLY, writer)
        os.pwrite(writer.backing_fd, b"w" * SIZE, 0)
        self.mapper = await self.opened(w, lanes)
        for_kernel = os.open(f"/proc/self/fd/{writer.backing_fd}", os.O_RDWR)
        self.mapped = mmap.mmap(for_kernel, SIZE)
        os.close(for_kernel)
        lanes.released(writer.handle)
        await w.close(writer)
        assert self.kernel.can_write() == [True]

    async def opened(self, w: World, lanes: KernelLanes) -> OpenFile:
        opened = await w.do(w.fs.open(self.ino, os.O_RDWR, caller()))
        _flags, number = lanes.open_reply(self.ino, os.O_RDWR, opened)
        assert number in self.kernel.files
        return opened

    async def release(self, w: World) -> None:
        """As the transport does; the mapping goes on."""
        assert self.mapper is not None
        await w.do(w.fs.flush(self.mapper.handle, 0))
        assert await w.do(w.fs.goes_on_mapped(self.mapper.handle))

    async def end(self, w: World) -> None:
        """The mapping ends: the file is complete, and the kernel has nothing of it."""
        assert self.mapper is not None
        assert self.mapped is not None
        await w.do(w.fs.settle_mappings())
        assert w.fs.is_open(self.mapper.handle)
        self.mapped[:] = b"m" * SIZE
        self.mapped.close()
        await w.do(w.fs.settle_mappings())
        assert not w.fs.is_open(self.mapper.handle), "nobody has it mapped"
        assert not self.kernel.files
        await w.drained()
        assert (w.backing / "model.pt").read_bytes() == b"m" * SIZE


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, before: str) -> Iterator[None]:
    """The worker dies before it closes what it has replaced, or before it forgets that."""
    with monkeypatch.context() as patched:
        if before == "closed":
            patched.setattr(KernelDouble, "backing_close", lambda _double, _number: None)
        if before:
            patched.setattr(Slots, "free", lambda _slots, _slot: None)
        yield


@pytest.mark.parametrize("dies_before", ["", "forgotten", "closed"])
def test_what_an_older_acpfs_registered_does_not_count_as_a_mapping_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_before: str
) -> None:
    job = Job()

    async def this(w: World) -> None:
        job.lanes(w)
        await job.release(w)
        with dying(monkeypatch, dies_before):
            await w.do(w.fs.settle_mappings())
        assert job.kernel.can_write() == ([True, False] if dies_before == "closed" else [False])

    async def next_one(w: World) -> None:
        lanes = job.lanes(w)
        assert len(job.kernel.files) == 1
        again = await job.opened(w, lanes)
        lanes.released(again.handle)
        await w.close(again)
        await job.end(w)

    run(tmp_path, job.begin, this, next_one, session="s", passthrough=True, unknown_bytes=SIZE)


def test_nor_where_somebody_has_the_file_open_meanwhile(tmp_path: Path) -> None:
    """The kernel insists on the same one for all who have it open."""
    job = Job()

    async def this(w: World) -> None:
        lanes = job.lanes(w)
        other = await job.opened(w, lanes)
        await job.release(w)
        await w.do(w.fs.settle_mappings())
        assert job.kernel.can_write() == [True]
        lanes.released(other.handle)
        await w.close(other)
        await w.do(w.fs.settle_mappings())
        assert job.kernel.can_write() == [False]
        await job.end(w)

    run(tmp_path, job.begin, this, session="s", passthrough=True, unknown_bytes=SIZE)


def test_it_is_tried_again_where_the_machine_has_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()

    def refuse(_slots: Slots, *_values: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def this(w: World) -> None:
        job.lanes(w)
        await job.release(w)
        with monkeypatch.context() as patched:
            patched.setattr(Slots, "add", refuse)
            await w.do(w.fs.settle_mappings())
        assert job.kernel.can_write() == [True]
        await job.end(w)

    run(tmp_path, job.begin, this, session="s", passthrough=True, unknown_bytes=SIZE)
