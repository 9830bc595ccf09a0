"""Opens for which there is no page left to record the kernel's backing file: the tmpfs of the RAM
tier is full.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import Attributes, Caller, OpenFile
from acpfs.transport.native.device import Device
from acpfs.transport.native.kernel_lanes import KernelLanes
from acpfs.transport.native.negotiate import WANTED, Negotiated
from acpfs.transport.native.protocol import OpenFlag
from acpfs.types import ROOT, Ino
from tests.transport.doubles import file_system

clause = pytest.mark.clause
CALLER = Caller(uid=0, gid=0, pid=os.getpid())


class KernelDouble(Device):
    """Which file each backing id is."""

    def __init__(self) -> None:
        super().__init__([-1])
        self.files: dict[int, int] = {}
        self._last = 0

    def backing_open(self, fd: int) -> int:
        self._last += 1
        self.files[self._last] = os.fstat(fd).st_ino
        return self._last

    def backing_close(self, backing_id: int) -> None:
        del self.files[backing_id]


class Session:
    """A file system, and what its replies tell the kernel."""

    def __init__(self, base: Path) -> None:
        for name in ("backing", "tier"):
            (base / name).mkdir()
        self.parts = file_system(base / "backing", base / "tier", base / "mnt")
        self.fs = FileSystem(self.parts)
        self.kernel = KernelDouble()
        self.lanes = KernelLanes(
            self.fs, self.parts.kept, self.kernel, Negotiated(45, int(WANTED), int(WANTED), 1 << 16)
        )
        self._add = self.parts.kept.backings.add

    def fill(self) -> None:
        def add(*_values: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.parts.kept.backings.add = add  # type: ignore[method-assign]

    def make_room(self) -> None:
        self.parts.kept.backings.add = self._add  # type: ignore[method-assign]

    def create(self) -> tuple[OpenFile, Attributes]:
        return self.fs.steps.run(self.fs.create(ROOT, b"model", 0o644, os.O_WRONLY, CALLER))

    def open(self, ino: Ino, flags: int) -> OpenFile:
        return self.fs.steps.run(self.fs.open(ino, flags, CALLER))

    def reply(self, ino: Ino, opened: OpenFile) -> tuple[bool, int]:
        """Whether the kernel moves the bytes itself, and to and from which file."""
        flags, number = self.lanes.open_reply(ino, os.O_WRONLY, opened)
        return bool(flags & OpenFlag.PASSTHROUGH and not flags & OpenFlag.DIRECT_IO), number

    def close(self, opened: OpenFile) -> None:
        self.lanes.released(opened.handle)
        self.fs.steps.run(self.fs.flush(opened.handle))
        self.fs.steps.run(self.fs.release(opened.handle))

    def tier_inode(self, ino: Ino) -> int:
        return os.fstat(self.parts.contents.opened(self.parts.table[ino].body)).st_ino


@clause("S13")
def test_a_file_for_whose_record_there_was_no_page_is_never_written_to_an_earlier_tier_file(
    tmp_path: Path,
) -> None:
    session = Session(tmp_path)
    session.fill()
    opened, attributes = session.create()
    assert session.reply(attributes.ino, opened) == (False, 0)
    session.close(opened)
    assert not session.kernel.files
    session.make_room()
    again = session.open(attributes.ino, os.O_WRONLY | os.O_TRUNC)
    by_kernel, number = session.reply(attributes.ino, again)
    assert by_kernel
    assert session.kernel.files == {number: session.tier_inode(attributes.ino)}
    session.close(again)
    assert not session.kernel.files


@clause("S335")
def test_an_open_beside_one_that_the_kernel_serves_gets_its_file_also_without_a_record(
    tmp_path: Path,
) -> None:
    session = Session(tmp_path)
    opened, attributes = session.create()
    by_kernel, number = session.reply(attributes.ino, opened)
    assert by_kernel
    session.fill()
    reader = session.open(attributes.ino, os.O_RDONLY)
    assert session.reply(attributes.ino, reader)[1] == number
    session.close(opened)
    assert list(session.kernel.files) == [number]
    session.close(reader)
    assert not session.kernel.files
