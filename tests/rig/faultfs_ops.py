"""The faulty file system's calls: each counted, put through the faults, then carried out on the
source directory.

Owns the table of nodes (an O_PATH descriptor each, so renames and hard links need no paths) and the
open files. Runs in one trio task loop; the system calls on the source are made in it directly,
because the source is a local disk or tmpfs. Kernel caches are off: every call of an application
arrives here.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pyfuse3
import trio

from tests.rig.faults import Faults
from tests.rig.journal import Recorder

_LIBC = ctypes.CDLL(None, use_errno=True)
_DROPPED_FLAGS = os.O_APPEND | os.O_DIRECT | os.O_CREAT | os.O_EXCL | os.O_SYNC | os.O_DSYNC
_NAMED = frozenset("lookup mknod mkdir unlink rmdir symlink rename create".split())
_BY_HANDLE = frozenset("read write flush release fsync readdir fsyncdir".split())
NS = 10**9
ROOT = 1
_HIGH = 1 << 63


def shown_ino(ino: int) -> int:
    """The number of the source's inode here: it uses all 64 bits, as GlusterFS's do, and as those
    of no file system of a test machine.
    """
    return ino | _HIGH


@dataclass
class Node:
    """An inode that the kernel knows."""

    fd: int
    lookups: int = 0

    @property
    def path(self) -> str:
        """A path of the inode that only this process can use; follows no symlink but its own."""
        return f"/proc/self/fd/{self.fd}"


@dataclass
class OpenFile:
    """An open file or directory."""

    fd: int
    ino: int
    names: list[str] | None = None


def faulty(op: str) -> Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]:
    """Make a call of the file system out of a plain method: count it, let it meet the faults, turn
    OSError into a reply.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(function)
        async def call(self: FaultyOperations, *args: Any) -> Any:
            try:
                todo = await self.faults.meet(op, lambda: self.paths_of(op, args))
                if op in ("read", "write"):
                    await self.faults.spend(args[2] if op == "read" else len(args[2]))
                elif op in ("fsync", "fsyncdir") and self.faults.fsync_s:
                    await trio.sleep(self.faults.fsync_s)
                answer = (
                    function(self, *args, todo)
                    if op in ("read", "write")
                    else function(self, *args)
                )
            except OSError as error:
                raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
            if todo == "lose":
                raise pyfuse3.FUSEError(errno.EIO)
            return answer

        return call

    return decorate


class FaultyOperations(pyfuse3.Operations):
    """A passthrough file system with faults."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(
        self,
        source: str,
        faults: Faults,
        recorder: Recorder | None,
        *,
        page_cache: bool,
        sync: bool,
    ) -> None:
        super().__init__()
        self.source = os.path.realpath(source)
        self.faults = faults
        self._recorder = recorder
        self._page_cache = page_cache
        self._sync = sync
        self._nodes = {ROOT: Node(os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), 1)}
        self._root_ino = os.stat(source).st_ino
        self._files: dict[int, OpenFile] = {}

    # -- paths, for rules and the journal

    def paths_of(self, op: str, args: tuple[Any, ...]) -> tuple[str, ...]:
        """What a call is about, as paths below the source; a rename has two."""
        if op in _BY_HANDLE:
            return (self._path(self._nodes[self._files[args[0]].ino]),)
        if op == "link":
            return (self._join(args[1], args[2]),)
        if op == "rename":
            return (self._join(args[0], args[1]), self._join(args[2], args[3]))
        if op in _NAMED:
            return (self._join(args[0], args[1]),)
        return (self._path(self._nodes[args[0]]),) if op != "statfs" else ("",)

    def _path(self, node: Node) -> str:
        full = os.readlink(node.path)
        return "" if full == self.source else full[len(self.source) + 1 :]

    def _join(self, parent: int, name: bytes) -> str:
        above = self._path(self._nodes[parent])
        return f"{above}/{os.fsdecode(name)}" if above else os.fsdecode(name)

    # -- nodes

    def _number(self, st: os.stat_result) -> int:
        return ROOT if st.st_ino == self._root_ino else shown_ino(st.st_ino)

    def _entry(self, st: os.stat_result) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = self._number(st)
        for name in (
            "st_mode",
            "st_nlink",
            "st_uid",
            "st_gid",
            "st_rdev",
            "st_size",
            "st_blksize",
            "st_blocks",
        ):
            setattr(entry, name, getattr(st, name))
        if not self.faults.features.link_counts:
            entry.st_nlink = 1
        grain = 1 if self.faults.features.fine_times else NS
        for name in ("st_atime_ns", "st_mtime_ns", "st_ctime_ns"):
            setattr(entry, name, getattr(st, name) // grain * grain)
        entry.generation = 0
        entry.entry_timeout = 0
        entry.attr_timeout = 0
        return entry

    def _find(self, parent: int, name: bytes) -> pyfuse3.EntryAttributes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._nodes[parent].fd)
        st = os.fstat(fd)
        number = self._number(st)
        node = self._nodes.get(number)
        if node is None:
            node = Node(fd)
            self._nodes[number] = node
        else:
            os.close(fd)
        node.lookups += 1
        return self._entry(st)

    @faulty("lookup")
    def lookup(self, parent: int, name: bytes, _ctx: Any) -> pyfuse3.EntryAttributes:  # type: ignore[override]
        return self._find(parent, name)

    async def forget(self, inode_list: Any) -> None:
        for number, count in inode_list:
            self._drop(number, count)

    def _drop(self, number: int, count: int) -> None:
        node = self._nodes.get(number)
        if node is None or number == ROOT:
            return
        node.lookups -= count
        if node.lookups <= 0:
            os.close(node.fd)
            del self._nodes[number]

    @faulty("getattr")
    def getattr(self, inode: int, _ctx: Any) -> pyfuse3.EntryAttributes:  # type: ignore[override]
        return self._entry(os.fstat(self._nodes[inode].fd))

    @faulty("setattr")
    def setattr(  # type: ignore[override]
        self, inode: int, attr: Any, fields: Any, fh: int | None, _ctx: Any
    ) -> pyfuse3.EntryAttributes:
        self._writable()
        node = self._nodes[inode]
        if fields.update_size:
            self._resize(node, inode, attr.st_size, fh)
        if fields.update_mode:
            os.chmod(node.path, stat.S_IMODE(attr.st_mode))
        if fields.update_uid or fields.update_gid:
            self._chown(
                node,
                attr.st_uid if fields.update_uid else -1,
                attr.st_gid if fields.update_gid else -1,
            )
        if fields.update_atime or fields.update_mtime:
            self._set_times(node, attr, fields)
        st = os.fstat(node.fd)
        if self._recorder is not None:
            self._recorder.attributes(self._path(node), st)
        return self._entry(st)

    def _resize(self, node: Node, inode: int, size: int, fh: int | None) -> None:
        before = os.fstat(node.fd).st_size
        self.faults.take_space(size - before if size < before else 0)
        if fh is not None:
            os.ftruncate(self._files[fh].fd, size)
        else:
            os.truncate(node.path, size)
        self._content_changed(inode)

    def _chown(self, node: Node, uid: int, gid: int) -> None:
        if not self.faults.features.chown:
            raise PermissionError(errno.EPERM, "no owners here")
        if stat.S_ISLNK(os.fstat(node.fd).st_mode):
            os.chown(os.readlink(node.path), uid, gid, follow_symlinks=False)
        else:
            os.chown(node.path, uid, gid)

    def _set_times(self, node: Node, attr: Any, fields: Any) -> None:
        st = os.fstat(node.fd)
        grain = 1 if self.faults.features.fine_times else NS
        atime_ns = attr.st_atime_ns if fields.update_atime else st.st_atime_ns
        mtime_ns = attr.st_mtime_ns if fields.update_mtime else st.st_mtime_ns
        times = (atime_ns // grain * grain, mtime_ns // grain * grain)
        if stat.S_ISLNK(st.st_mode):
            os.utime(os.readlink(node.path), ns=times, follow_symlinks=False)
        else:
            os.utime(node.path, ns=times)

    # -- names

    def _writable(self) -> None:
        if self.faults.features.read_only:
            raise OSError(errno.EROFS, "read-only")

    def _give(self, parent: int, name: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        """A new entry belongs to the caller; set-gid directories hand on their group."""
        parent_fd = self._nodes[parent].fd
        gid = -1 if os.fstat(parent_fd).st_mode & stat.S_ISGID else ctx.gid
        if ctx.uid or ctx.gid:
            os.chown(name, ctx.uid, gid, dir_fd=parent_fd, follow_symlinks=False)
        if self._recorder is not None:
            self._recorder.appear(self._join(parent, name))
        return self._find(parent, name)

    @faulty("mknod")
    def mknod(  # type: ignore[override]
        self, parent: int, name: bytes, mode: int, rdev: int, ctx: Any
    ) -> pyfuse3.EntryAttributes:
        self._writable()
        os.mknod(name, mode, rdev, dir_fd=self._nodes[parent].fd)
        return self._give(parent, name, ctx)

    @faulty("mkdir")
    def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> pyfuse3.EntryAttributes:  # type: ignore[override]
        self._writable()
        os.mkdir(name, mode, dir_fd=self._nodes[parent].fd)
        return self._give(parent, name, ctx)

    @faulty("symlink")
    def symlink(self, parent: int, name: bytes, target: bytes, ctx: Any) -> pyfuse3.EntryAttributes:  # type: ignore[override]
        self._writable()
        if not self.faults.features.symlinks:
            raise OSError(errno.EPERM, "no symlinks here")
        os.symlink(target, name, dir_fd=self._nodes[parent].fd)
        return self._give(parent, name, ctx)

    @faulty("link")
    def link(self, inode: int, parent: int, name: bytes, _ctx: Any) -> pyfuse3.EntryAttributes:  # type: ignore[override]
        self._writable()
        if not self.faults.features.hard_links:
            raise OSError(errno.EPERM, "no hard links here")
        os.link(
            self._nodes[inode].path, name, dst_dir_fd=self._nodes[parent].fd, follow_symlinks=True
        )
        if self._recorder is not None:
            self._recorder.appear(self._join(parent, name))
        return self._find(parent, name)

    @faulty("unlink")
    def unlink(self, parent: int, name: bytes, _ctx: Any) -> None:  # type: ignore[override]
        self._writable()
        parent_fd = self._nodes[parent].fd
        st = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        os.unlink(name, dir_fd=parent_fd)
        if st.st_nlink == 1 and stat.S_ISREG(st.st_mode):
            self.faults.take_space(-st.st_size)
        if self._recorder is not None:
            self._recorder.vanish(self._join(parent, name))

    @faulty("rmdir")
    def rmdir(self, parent: int, name: bytes, _ctx: Any) -> None:  # type: ignore[override]
        self._writable()
        os.rmdir(name, dir_fd=self._nodes[parent].fd)
        if self._recorder is not None:
            self._recorder.vanish(self._join(parent, name))

    @faulty("rename")
    def rename(  # type: ignore[override]
        self,
        parent_old: int,
        name_old: bytes,
        parent_new: int,
        name_new: bytes,
        flags: int,
        _ctx: Any,
    ) -> None:
        self._writable()
        if flags and not self.faults.features.rename_flags:
            raise OSError(errno.EINVAL, "no rename flags here")
        old_fd = self._nodes[parent_old].fd
        new_fd = self._nodes[parent_new].fd
        moved = _stat_at(old_fd, name_old)
        replaced = _stat_at(new_fd, name_new)
        if _LIBC.renameat2(old_fd, name_old, new_fd, name_new, flags) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if moved is not None and replaced is not None and moved.st_ino == replaced.st_ino:
            return  # two names of one file: POSIX leaves both
        if (
            replaced is not None
            and not flags
            and replaced.st_nlink == 1
            and stat.S_ISREG(replaced.st_mode)
        ):
            self.faults.take_space(-replaced.st_size)
        if self._recorder is not None:
            exchange = bool(flags & pyfuse3.RENAME_EXCHANGE)
            self._recorder.renamed(
                self._join(parent_old, name_old), self._join(parent_new, name_new), exchange
            )

    @faulty("readlink")
    def readlink(self, inode: int, _ctx: Any) -> bytes:  # type: ignore[override]
        return os.fsencode(os.readlink("", dir_fd=self._nodes[inode].fd))

    # -- files

    def _opened(self, fd: int, ino: int) -> pyfuse3.FileInfo:
        self._files[fd] = OpenFile(fd, ino)
        return pyfuse3.FileInfo(
            fh=pyfuse3.FileHandleT(fd), direct_io=not self._page_cache, keep_cache=False
        )

    @faulty("open")
    def open(self, inode: int, flags: int, _ctx: Any) -> pyfuse3.FileInfo:  # type: ignore[override]
        node = self._nodes[inode]
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            self._writable()
        if flags & os.O_TRUNC:
            self.faults.take_space(-os.fstat(node.fd).st_size)
        fd = os.open(node.path, flags & ~_DROPPED_FLAGS & ~os.O_NOFOLLOW)
        info = self._opened(fd, inode)
        if flags & os.O_TRUNC:
            self._content_changed(inode)
        return info

    @faulty("create")
    def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:  # type: ignore[override]
        self._writable()
        flags = (flags & ~_DROPPED_FLAGS) | os.O_CREAT | os.O_NOFOLLOW | (flags & os.O_EXCL)
        fd = os.open(name, flags, mode, dir_fd=self._nodes[parent].fd)
        entry = self._give(parent, name, ctx)
        return self._opened(fd, entry.st_ino), entry

    @faulty("read")
    def read(self, fh: int, off: int, size: int, todo: str = "") -> bytes:  # type: ignore[override]
        data = os.pread(self._files[fh].fd, size, off)
        self.faults.counters["read_bytes"] += len(data)
        return _flipped(data) if todo == "flip" else data

    @faulty("write")
    def write(self, fh: int, off: int, buf: bytes, todo: str = "") -> int:  # type: ignore[override]
        self._writable()
        file = self._files[fh]
        if self.faults.space_left is not None:
            self.faults.take_space(max(0, off + len(buf) - os.fstat(file.fd).st_size))
        if todo in ("tear", "short"):
            buf = buf[: max(1, len(buf) // 2)]
        elif todo == "flip":
            buf = _flipped(buf)
        count = os.pwrite(file.fd, buf, off)
        self._content_changed(file.ino)
        if todo == "tear":
            raise OSError(errno.EIO, "torn")
        return count

    def _content_changed(self, ino: int) -> None:
        if self._recorder is None:
            return
        node = self._nodes[ino]
        st = os.fstat(node.fd)
        if st.st_nlink:
            self._recorder.content(self._path(node), st.st_ino, node.path)

    @faulty("flush")
    def flush(self, fh: int) -> None:  # type: ignore[override]
        return

    @faulty("release")
    def release(self, fh: int) -> None:  # type: ignore[override]
        os.close(self._files.pop(fh).fd)

    @faulty("fsync")
    def fsync(self, fh: int, _datasync: bool) -> None:  # type: ignore[override]
        if self._sync:
            os.fsync(self._files[fh].fd)

    # -- directories

    @faulty("opendir")
    def opendir(self, inode: int, _ctx: Any) -> int:  # type: ignore[override]
        fd = os.open(self._nodes[inode].path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._files[fd] = OpenFile(fd, inode)
        return fd

    @faulty("readdir")
    def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:  # type: ignore[override]
        file = self._files[fh]
        if start_id == 0 or file.names is None:
            file.names = os.listdir(file.fd)
        for position in range(start_id, len(file.names)):
            name = os.fsencode(file.names[position])
            try:
                entry = self._find(file.ino, name)
            except FileNotFoundError:
                continue
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), entry, position + 1):
                self._drop(entry.st_ino, 1)
                break

    async def releasedir(self, fh: int) -> None:
        os.close(self._files.pop(fh).fd)

    @faulty("fsyncdir")
    def fsyncdir(self, fh: int, _datasync: bool) -> None:  # type: ignore[override]
        if not self.faults.features.fsync_directory:
            raise OSError(errno.EINVAL, "directories cannot be flushed here")
        if self._sync:
            os.fsync(self._files[fh].fd)

    # -- the rest

    @faulty("statfs")
    def statfs(self, _ctx: Any) -> pyfuse3.StatvfsData:  # type: ignore[override]
        real = os.statvfs(self._nodes[ROOT].path)
        answer = pyfuse3.StatvfsData()
        for name in "bsize frsize blocks bfree bavail files ffree favail namemax".split():
            setattr(answer, "f_" + name, getattr(real, "f_" + name))
        if self.faults.space_left is not None:
            answer.f_bfree = max(self.faults.space_left, 0) // real.f_frsize
            answer.f_bavail = answer.f_bfree
        return answer

    def _xattr_node(self, inode: int) -> str:
        if not self.faults.features.xattrs:
            raise OSError(errno.ENOTSUP, "no xattrs here")
        return self._nodes[inode].path

    @faulty("setxattr")
    def setxattr(self, inode: int, name: bytes, value: bytes, _ctx: Any) -> None:  # type: ignore[override]
        self._writable()
        os.setxattr(self._xattr_node(inode), name, value)

    @faulty("getxattr")
    def getxattr(self, inode: int, name: bytes, _ctx: Any) -> bytes:  # type: ignore[override]
        return os.getxattr(self._xattr_node(inode), name)

    @faulty("listxattr")
    def listxattr(self, inode: int, _ctx: Any) -> list[bytes]:  # type: ignore[override]
        return [os.fsencode(name) for name in os.listxattr(self._xattr_node(inode))]

    @faulty("removexattr")
    def removexattr(self, inode: int, name: bytes, _ctx: Any) -> None:  # type: ignore[override]
        self._writable()
        os.removexattr(self._xattr_node(inode), name)


def _stat_at(dir_fd: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _flipped(data: bytes) -> bytes:
    """One bit is wrong."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :] if data else data
