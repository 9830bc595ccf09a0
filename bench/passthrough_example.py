"""The yardstick: a pass-through file system with the same costs as the example that pyfuse3's
documentation comes with.

The example is not part of pyfuse3's wheel, so this is an equivalent of its own: one inode-to-path
table, no attribute or name caching in the kernel (timeouts of 0), the kernel's write-back cache on,
one lstat per answered name, lseek before each read and write, everything in trio's main task. Only
what the benchmarks call is there. It must stay as simple as that: no cleverness here may make acpfs
look worse, and no clumsiness better.

Usage: python -m bench.passthrough_example SOURCE MOUNTPOINT
"""

from __future__ import annotations

import errno
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import pyfuse3
import trio
from pyfuse3 import FileHandleT, FileNameT, FlagT, InodeT, ModeT, RequestContext

_COPIED = (
    "st_mode",
    "st_nlink",
    "st_uid",
    "st_gid",
    "st_rdev",
    "st_size",
    "st_atime_ns",
    "st_mtime_ns",
    "st_ctime_ns",
    "st_ino",
)


def attributes(st: os.stat_result) -> pyfuse3.EntryAttributes:
    """A reply that the kernel may not keep."""
    entry = pyfuse3.EntryAttributes()
    for name in _COPIED:
        setattr(entry, name, getattr(st, name))
    entry.generation = 0
    entry.entry_timeout = 0
    entry.attr_timeout = 0
    entry.st_blksize = 512
    entry.st_blocks = (entry.st_size + 511) // 512
    return entry


def refused(error: OSError) -> pyfuse3.FUSEError:
    return pyfuse3.FUSEError(error.errno or errno.EIO)


class Passthrough(pyfuse3.Operations):
    """Mirrors a directory tree."""

    enable_writeback_cache = True

    def __init__(self, source: str) -> None:
        super().__init__()
        self._paths = {int(pyfuse3.ROOT_INODE): source}
        self._lookups: Counter[int] = Counter()
        self._descriptors: dict[int, int] = {}
        self._opened: dict[int, list[int]] = {}

    def _known(self, path: str, st: os.stat_result) -> pyfuse3.EntryAttributes:
        self._lookups[st.st_ino] += 1
        self._paths.setdefault(st.st_ino, path)
        return attributes(st)

    def _path(self, inode: int) -> str:
        try:
            return self._paths[inode]
        except KeyError:
            raise pyfuse3.FUSEError(
                errno.ENOENT
            ) from None  # unlinked, and the kernel still has times to write

    def _below(self, parent: int, name: bytes) -> str:
        return os.path.join(self._path(parent), os.fsdecode(name))

    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        try:
            fd = self._descriptors.get(inode)
            return attributes(os.lstat(self._path(inode)) if fd is None else os.fstat(fd))
        except OSError as error:
            raise refused(error) from None

    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, _ctx: RequestContext
    ) -> pyfuse3.EntryAttributes:
        path = self._below(parent_inode, name)
        try:
            return self._known(path, os.lstat(path))
        except OSError as error:
            raise refused(error) from None

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        for inode, count in inode_list:
            self._lookups[inode] -= count
            if self._lookups[inode] <= 0:
                del self._lookups[inode]
                self._paths.pop(inode, None)

    async def getattr(self, inode: InodeT, _ctx: RequestContext) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    async def setattr(
        self,
        inode: InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        _ctx: RequestContext,
    ) -> pyfuse3.EntryAttributes:
        try:
            target = self._path(inode) if fh is None else fh
            if fields.update_size:
                os.truncate(target, attr.st_size)
            if fields.update_mode:
                os.chmod(target, attr.st_mode & 0o7777)
            if fields.update_atime or fields.update_mtime:
                st = os.stat(target)
                atime_ns = attr.st_atime_ns if fields.update_atime else st.st_atime_ns
                os.utime(
                    target,
                    ns=(atime_ns, attr.st_mtime_ns if fields.update_mtime else st.st_mtime_ns),
                )
        except OSError as error:
            raise refused(error) from None
        return self._attributes(inode)

    async def create(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        _mode: ModeT,
        flags: FlagT,
        _ctx: RequestContext,
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        path = self._below(parent_inode, name)
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_TRUNC)
        except OSError as error:
            raise refused(error) from None
        st = os.fstat(fd)
        self._descriptors[st.st_ino] = fd
        self._opened[fd] = [st.st_ino, 1]
        return pyfuse3.FileInfo(fh=fd), self._known(path, st)

    async def open(self, inode: InodeT, flags: FlagT, _ctx: RequestContext) -> pyfuse3.FileInfo:
        fd = self._descriptors.get(inode)
        if fd is not None:
            self._opened[fd][1] += 1
            return pyfuse3.FileInfo(fh=fd)
        try:
            fd = os.open(self._path(inode), flags)
        except OSError as error:
            raise refused(error) from None
        self._descriptors[inode] = fd
        self._opened[fd] = [inode, 1]
        return pyfuse3.FileInfo(fh=fd)

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        os.lseek(fh, off, os.SEEK_SET)
        return os.read(fh, size)

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        os.lseek(fh, off, os.SEEK_SET)
        return os.write(fh, buf)

    async def release(self, fh: FileHandleT) -> None:
        opened = self._opened[fh]
        opened[1] -= 1
        if opened[1] == 0:
            del self._opened[fh], self._descriptors[opened[0]]
            os.close(fh)

    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> pyfuse3.EntryAttributes:
        path = self._below(parent_inode, name)
        try:
            os.mkdir(path, mode & ~ctx.umask)
            os.chown(path, ctx.uid, ctx.gid)
            return self._known(path, os.lstat(path))
        except OSError as error:
            raise refused(error) from None

    async def unlink(self, parent_inode: InodeT, name: FileNameT, _ctx: RequestContext) -> None:
        self._remove(os.unlink, self._below(parent_inode, name))

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, _ctx: RequestContext) -> None:
        self._remove(os.rmdir, self._below(parent_inode, name))

    def _remove(self, call: Callable[[str], None], path: str) -> None:
        try:
            inode = os.lstat(path).st_ino
            call(path)
        except OSError as error:
            raise refused(error) from None
        if inode in self._lookups:
            self._paths.pop(inode, None)

    async def opendir(self, inode: InodeT, _ctx: RequestContext) -> FileHandleT:
        return FileHandleT(inode)

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        path = self._path(fh)
        found = sorted(
            (os.lstat(os.path.join(path, name)).st_ino, name) for name in os.listdir(path)
        )
        for inode, name in found:
            if inode <= start_id:
                continue
            full = os.path.join(path, name)
            entry = attributes(os.lstat(full))
            if not pyfuse3.readdir_reply(token, os.fsencode(name), entry, inode):
                break
            self._lookups[inode] += 1
            self._paths.setdefault(inode, full)

    async def statfs(self, _ctx: RequestContext) -> pyfuse3.StatvfsData:
        space = os.statvfs(self._paths[int(pyfuse3.ROOT_INODE)])
        answer = pyfuse3.StatvfsData()
        for name in (
            "f_bsize",
            "f_frsize",
            "f_blocks",
            "f_bfree",
            "f_bavail",
            "f_files",
            "f_ffree",
            "f_favail",
            "f_namemax",
        ):
            setattr(answer, name, getattr(space, name))
        return answer


def main(source: str, mountpoint: str) -> None:
    """Serve until unmounted."""
    pyfuse3.init(
        Passthrough(source), mountpoint, {*pyfuse3.default_options, "fsname=passthrough-example"}
    )
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
