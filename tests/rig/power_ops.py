"""The faulty file system's calls, with a log of all that a power loss could take away.

Each call is logged right after it was carried out and before any other can be: nothing here waits
in between.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyfuse3

from tests.rig.faultfs_ops import ROOT, FaultyOperations, shown_ino
from tests.rig.power import PowerLog


class LoggedOperations(FaultyOperations):
    """See above."""

    def __init__(self, *arguments: Any, log: PowerLog, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self._log = log
        log.top(ROOT)
        log.found(Path(self.source), ROOT, shown_ino)

    def _of(self, fh: int) -> int:
        return self._log.number(self._files[fh].ino)

    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        info, entry = await super().create(parent, name, mode, flags, ctx)
        self._log.created(entry.st_ino, parent, name, "file")
        return info, entry

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, ctx: Any) -> Any:
        entry = await super().mknod(parent, name, mode, rdev, ctx)
        self._log.created(entry.st_ino, parent, name, "file")
        return entry

    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> Any:
        entry = await super().mkdir(parent, name, mode, ctx)
        self._log.created(entry.st_ino, parent, name, "dir")
        return entry

    async def symlink(self, parent: int, name: bytes, target: bytes, ctx: Any) -> Any:
        entry = await super().symlink(parent, name, target, ctx)
        self._log.created(entry.st_ino, parent, name, "symlink", os.fsdecode(target))
        return entry

    async def link(self, inode: int, parent: int, name: bytes, ctx: Any) -> Any:
        entry = await super().link(inode, parent, name, ctx)
        self._log.write("link", self._log.number(inode), self._log.number(parent), name)
        return entry

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        await super().unlink(parent, name, ctx)
        self._log.write("unlink", self._log.number(parent), name)

    async def rmdir(self, parent: int, name: bytes, ctx: Any) -> None:
        await super().rmdir(parent, name, ctx)
        self._log.write("unlink", self._log.number(parent), name)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, ctx: Any
    ) -> None:
        await super().rename(parent, name, new_parent, new_name, flags, ctx)
        exchange = bool(flags & pyfuse3.RENAME_EXCHANGE)
        self._log.write(
            "rename",
            self._log.number(parent),
            name,
            self._log.number(new_parent),
            new_name,
            exchange,
        )

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: int | None, ctx: Any) -> Any:
        entry = await super().setattr(inode, attr, fields, fh, ctx)
        if fields.update_size:
            self._log.write("truncate", self._log.number(inode), attr.st_size)
        return entry

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        info = await super().open(inode, flags, ctx)
        if flags & os.O_TRUNC:
            self._log.write("truncate", self._log.number(inode), 0)
        return info

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        count: int = await super().write(fh, off, buf)
        self._log.write("write", self._of(fh), off, buf[:count])
        return count

    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: Any) -> None:
        await super().setxattr(inode, name, value, ctx)
        self._log.write("xattr", self._log.number(inode), os.fsdecode(name), value)

    async def fsync(self, fh: int, datasync: bool) -> None:
        await super().fsync(fh, datasync)
        self._log.write("fsync", self._of(fh))

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await super().fsyncdir(fh, datasync)
        self._log.write("fsyncdir", self._of(fh))
