"""Double of `Lower` in memory: inodes, names, descriptors, faults on the N-th call of a kind, and a
record of what became visible when.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from acpfs.backing.lower import (
    LowerEntry,
    LowerPath,
    LowerStat,
    NewAttributes,
    Note,
    SpaceInfo,
    lstat_each,
)
from acpfs.backing.quirks import Features

OWN = b".acpfs"
STAGING: LowerPath = (OWN, b"staging", b"node")
KEPT: LowerPath = (OWN, b"kept", b"node")
Fault = Callable[[str, LowerPath], None]
"""Called before each call with its label and path (() for descriptors); raises, or blocks, or
returns.
"""


@dataclass(eq=False)
class Inode:
    ino: int
    mode: int
    content: bytearray = field(default_factory=bytearray)
    children: dict[bytes, Inode] = field(default_factory=dict)
    target: bytes = b""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    nlink: int = 1
    synced: bool = False


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class MemoryLower:
    """See above.

    One lock makes every call atomic; a fault runs outside of it, so that a call may hang without
    the others.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inos = itertools.count(100)
        self._clock = itertools.count(1)
        self.root = Inode(1, stat.S_IFDIR | 0o755)
        self.calls: Counter[str] = Counter()
        self.fault: Fault = lambda _label, _path: None
        self.features = Features()
        self.descriptors: dict[int, Inode] = {}
        self._fds = itertools.count(1000)
        self.visible_history: list[dict[bytes, bytes]] = []
        self.log: list[tuple[str, LowerPath]] = []
        for depth in range(1, 4):
            self._place(STAGING[:depth], self._inode(stat.S_IFDIR | 0o700))
        for depth in range(2, 4):
            self._place(KEPT[:depth], self._inode(stat.S_IFDIR | 0o700))
        for name in (b"journals", b"manifest", b"mirrors"):
            self._place((OWN, name), self._inode(stat.S_IFDIR | 0o700))

    # -- for tests

    def visible(self) -> dict[bytes, bytes]:
        """path → content of files and targets of symlinks; directories end with a slash."""
        found: dict[bytes, bytes] = {}
        with self._lock:
            self._collect(self.root, b"", found)
        return found

    def _collect(self, inode: Inode, path: bytes, found: dict[bytes, bytes]) -> None:
        for name, child in inode.children.items():
            if inode is self.root and name == OWN:
                continue
            if stat.S_ISDIR(child.mode):
                found[path + name + b"/"] = b""
                self._collect(child, path + name + b"/", found)
            else:
                found[path + name] = (
                    bytes(child.content) if stat.S_ISREG(child.mode) else child.target
                )

    def _is_visible(self, inode: Inode, below: Inode | None = None) -> bool:
        children = (below or self.root).children.items()
        return any(
            child is inode or self._is_visible(inode, child)
            for name, child in children
            if below or name != OWN
        )

    def inode(self, path: str) -> Inode:
        return self._find(tuple(path.encode().split(b"/")))

    def own_files(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        self._collect(self.root.children[OWN], b"", found)
        return found

    # -- tree

    def _call(self, label: str, path: LowerPath = ()) -> None:
        with self._lock:
            self.calls[label] += 1
            self.log.append((label, path))
        self.fault(label, path)

    def _changed(self) -> None:
        self.visible_history.append(self.visible())

    def _inode(self, mode: int) -> Inode:
        now = next(self._clock)
        return Inode(next(self._inos), mode, atime_ns=now, mtime_ns=now)

    def _find(self, path: LowerPath) -> Inode:
        inode = self.root
        for name in path:
            if not stat.S_ISDIR(inode.mode):
                raise error(errno.ENOTDIR)
            try:
                inode = inode.children[name]
            except KeyError:
                raise error(errno.ENOENT) from None
        return inode

    def _place(self, path: LowerPath, inode: Inode) -> None:
        parent = self._find(path[:-1])
        if path[-1] in parent.children:
            raise error(errno.EEXIST)
        parent.children[path[-1]] = inode
        parent.mtime_ns = next(self._clock)

    def _stat(self, inode: Inode) -> LowerStat:
        return LowerStat(
            inode.ino,
            inode.mode,
            inode.nlink if self.features.link_counts else 1,
            inode.uid,
            inode.gid,
            inode.rdev,
            len(inode.content),
            0,
            inode.atime_ns,
            inode.mtime_ns,
            0,
        )

    # -- looking

    def lstat(self, path: LowerPath) -> LowerStat:
        self._call("lstat", path)
        with self._lock:
            return self._stat(self._find(path))

    def lstat_many(self, directory: LowerPath, names: Sequence[bytes]) -> list[LowerStat | None]:
        return lstat_each(self.lstat, directory, names)

    def listdir(self, path: LowerPath) -> list[LowerEntry]:
        self._call("listdir", path)
        with self._lock:
            children = self._find(path).children.items()
            return [
                LowerEntry(n, c.ino, stat.S_IFMT(c.mode)) for n, c in children if path or n != OWN
            ]

    def open_read(self, path: LowerPath) -> int:
        self._call("open", path)
        with self._lock:
            return self._descriptor(self._find(path))

    def open_uncached(self, path: LowerPath) -> int:
        return self.open_read(path)

    def _descriptor(self, inode: Inode) -> int:
        fd = next(self._fds)
        self.descriptors[fd] = inode
        return fd

    def readlink(self, path: LowerPath) -> bytes:
        self._call("readlink", path)
        return self._find(path).target

    def xattrs(self, path: LowerPath) -> dict[bytes, bytes]:
        self._call("xattrs", path)
        return {
            n: v for n, v in self._find(path).xattrs.items() if not n.startswith(b"user.acpfs.")
        }

    def digest(self, path: LowerPath) -> str:
        self._call("xattrs", path)
        note = self._noted(path)
        return "" if note is None else note.digest

    def note(self, path: LowerPath) -> Note | None:
        self._call("xattrs", path)
        return self._noted(path)

    def _noted(self, path: LowerPath) -> Note | None:
        value = self._find(path).xattrs.get(b"user.acpfs.xxh3")
        return None if value is None else Note.decode(value)

    def space(self) -> SpaceInfo:
        return SpaceInfo(4096, 1000, 1000, 1000, 1000, 1000, 255)

    # -- changing

    def mkdir(self, path: LowerPath) -> None:
        self._call("mkdir", path)
        with self._lock:
            self._place(path, self._inode(stat.S_IFDIR | 0o700))
            self._changed()

    def keeping_directories(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def rmdir(self, path: LowerPath) -> None:
        self._call("rmdir", path)
        with self._lock:
            if self._find(path).children:
                raise error(errno.ENOTEMPTY)
            self._remove(path)

    def unlink(self, path: LowerPath) -> None:
        self._call("unlink", path)
        with self._lock:
            if stat.S_ISDIR(self._find(path).mode):
                raise error(errno.EISDIR)
            self._remove(path)

    def _remove(self, path: LowerPath) -> None:
        parent = self._find(path[:-1])
        parent.children.pop(path[-1]).nlink -= 1
        parent.mtime_ns = next(self._clock)
        self._changed()

    def rename(self, source: LowerPath, target: LowerPath) -> None:
        self._call("rename", target)
        with self._lock:
            inode = self._find(source)
            old = self._find(target[:-1]).children.get(target[-1])
            if old is inode:
                return
            if old is not None and stat.S_ISDIR(old.mode) != stat.S_ISDIR(inode.mode):
                raise error(errno.EISDIR if stat.S_ISDIR(old.mode) else errno.ENOTDIR)
            if old is not None and old.children:
                raise error(errno.ENOTEMPTY)
            if old is not None:
                old.nlink -= 1
            del self._find(source[:-1]).children[source[-1]]
            self._find(target[:-1]).children[target[-1]] = inode
            for parent in (source[:-1], target[:-1]):
                self._find(parent).mtime_ns = next(self._clock)
            self._changed()

    def exchange(self, a: LowerPath, b: LowerPath) -> None:
        self._call("exchange", a)
        with self._lock:
            inode_a = self._find(a)
            inode_b = self._find(b)
            self._find(a[:-1]).children[a[-1]] = inode_b
            self._find(b[:-1]).children[b[-1]] = inode_a
            self._changed()

    def exchange_aside(self, a: LowerPath, b: LowerPath) -> LowerPath:
        return self.staging_path("exchange")

    def link(self, source: LowerPath, target: LowerPath) -> None:
        self._call("link", target)
        with self._lock:
            inode = self._find(source)
            self._place(target, inode)
            inode.nlink += 1
            self._changed()

    def symlink(self, target: bytes, path: LowerPath) -> None:
        self._call("symlink", path)
        with self._lock:
            inode = self._inode(stat.S_IFLNK | 0o777)
            inode.target = target
            self._place(path, inode)
            self._changed()

    def mknod(self, path: LowerPath, mode: int, rdev: int) -> None:
        self._call("mknod", path)
        with self._lock:
            inode = self._inode(mode)
            inode.rdev = rdev
            self._place(path, inode)
            self._changed()

    def set_times(self, path: LowerPath, atime_ns: int, mtime_ns: int) -> None:
        self._call("utimens", path)
        inode = self._find(path)
        inode.atime_ns = atime_ns
        inode.mtime_ns = mtime_ns

    def apply(self, path: LowerPath, attributes: NewAttributes) -> None:
        self._call("setattr", path)
        self._apply(self._find(path), attributes)

    def apply_fd(self, fd: int, attributes: NewAttributes) -> None:
        self._call("setattr")
        self._apply(self.descriptors[fd], attributes)

    def _apply(self, inode: Inode, attributes: NewAttributes) -> None:
        with self._lock:
            if attributes.permissions is not None:
                inode.mode = stat.S_IFMT(inode.mode) | attributes.permissions
            for name in ("uid", "gid", "atime_ns", "mtime_ns"):
                if getattr(attributes, name) is not None:
                    setattr(inode, name, getattr(attributes, name))
            for xattr, value in attributes.xattrs.items():
                if value is None:
                    inode.xattrs.pop(xattr, None)
                else:
                    inode.xattrs[xattr] = value

    # -- stable storage

    def sync_directory(self, path: LowerPath) -> None:
        self._call("fsync directory", path)
        self._find(path)

    def sync_entry(self, path: LowerPath) -> None:
        self._call("fsync entry", path)
        self._find(path)

    def sync_file_systems(self, _paths: Iterable[LowerPath]) -> None:
        self._call("sync file systems", ())

    # -- staging

    def create_staging(self, name: str) -> int:
        self._call("create", self.staging_path(name))
        with self._lock:
            self._find(STAGING).children.pop(name.encode(), None)
            inode = self._inode(stat.S_IFREG | 0o600)
            self._place(self.staging_path(name), inode)
            return self._descriptor(inode)

    def open_staging(self, name: str) -> int:
        self._call("open", self.staging_path(name))
        with self._lock:
            return self._descriptor(self._find(self.staging_path(name)))

    def is_staging_area(self, path: LowerPath) -> bool:
        return False

    def stage_near(self, name: str, directory: LowerPath) -> str:
        return name

    def bring_near(self, name: str, target: LowerPath) -> str:
        raise error(errno.EXDEV)

    def staging_path(self, name: str) -> LowerPath:
        return (*STAGING, name.encode())

    def kept_path(self, path: LowerPath = ()) -> LowerPath:
        return KEPT

    def remove_staging(self, name: str) -> None:
        self._call("unlink", self.staging_path(name))
        removed = self._find(STAGING).children.pop(name.encode(), None)
        if removed is not None:
            removed.nlink -= 1

    def list_kept(self) -> list[LowerPath]:
        return sorted((*KEPT, name) for name in self._find(KEPT).children)

    def list_staging(self) -> list[str]:
        self._call("listdir", STAGING)
        return [name.decode() for name in self._find(STAGING).children]

    # -- descriptors

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._call("read")
        data = self.descriptors[fd].content[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._call("write")
        with self._lock:
            content = self.descriptors[fd].content
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(data)] = data
            self._written(self.descriptors[fd])
        return len(data)

    def _written(self, inode: Inode) -> None:
        inode.mtime_ns = next(self._clock)
        if self._is_visible(inode):
            self._changed()

    def make_room(self, fd: int, size: int) -> bool:
        del fd, size
        self._call("fallocate")
        return False

    def expect_bulk(self, fd: int) -> None:
        """Nothing to prepare."""

    def cached_bytes(self, fd: int) -> int | None:
        """No page cache to look into."""
        return None

    def noted(self, fd: int) -> Note | None:
        """Nothing reads files from here."""
        return None

    def begin_write_out(self, fd: int, offset: int, count: int) -> None:
        """Nothing is held back."""

    def truncate(self, fd: int, size: int) -> None:
        self._call("truncate")
        with self._lock:
            content = self.descriptors[fd].content
            del content[size:]
            content.extend(bytes(size - len(content)))
            self._written(self.descriptors[fd])

    def sync(self, fd: int) -> None:
        self._call("fsync")
        self.descriptors[fd].synced = True

    def forget_pages(self, fd: int) -> None:
        assert fd in self.descriptors

    def stat_fd(self, fd: int) -> LowerStat:
        self._call("fstat")
        return self._stat(self.descriptors[fd])

    def close(self, fd: int) -> None:
        del self.descriptors[fd]
        self._call("close")

    # -- own files

    def read_own(self, names: LowerPath) -> bytes:
        self._call("read own", names)
        return bytes(self._find((OWN, *names)).content)

    def write_own(self, names: LowerPath, content: bytes) -> None:
        self._call("write own", names)
        with self._lock:
            inode = self._inode(stat.S_IFREG | 0o644)
            inode.content[:] = content
            self._find((OWN, *names[:-1])).children[names[-1]] = inode

    def fence_own_files(self) -> None:
        self._call("fence own", ())

    def remove_own(self, names: LowerPath) -> None:
        self._call("unlink own", names)
        self._find((OWN, *names[:-1])).children.pop(names[-1], None)

    def list_own(self, names: LowerPath) -> list[bytes]:
        try:
            return sorted(self._find((OWN, *names)).children)
        except FileNotFoundError:
            return []

    def without(self, **features: bool) -> MemoryLower:
        """Lacks these features."""
        self.features = replace(self.features, **features)
        return self


class FailNth:
    """Fails the N-th call (from 1) with a label, `times` times in a row (0: for ever)."""

    def __init__(self, label: str, nth: int, number: int, times: int = 1) -> None:
        self._label = label
        self._nth = nth
        self._number = number
        self._times = times
        self._seen = 0
        self.failed = 0

    def __call__(self, label: str, _path: LowerPath) -> None:
        if label != self._label:
            return
        self._seen += 1
        if self._seen >= self._nth and (self._times == 0 or self.failed < self._times):
            self.failed += 1
            raise error(self._number)
