"""What the layers above need from the lower layer, and its plain records.

A path is a tuple of names below the backing directory; `()` is the backing directory itself. Every
method may block for as long as the backing file system likes and raises `OSError` with the backing
file system's errno; callers run them on a `CallPool`, never on a thread that must go on.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from acpfs.backing.quirks import Features

LowerPath = tuple[bytes, ...]
_DIGEST = re.compile(r"[0-9a-f]{32}")
"""xxh3-128, as it is noted."""
UNREACHABLE = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP})
"""Errors that say only that a path leads nowhere now.

EROFS would say more: a file system that has lost something becomes read-only.
"""
ASIDE_PREFIX = "exchange-"
"""Staging names of what a half-done exchange in three renames has put aside, the only copy: the
operation itself takes it up again.
"""
OVERFLOW_PREFIX = "overflowed-"
"""Staging names of files that did not fit into RAM. Their length is in the state database.

Names that begin with "overflow-" are of an earlier acpfs, whose workers did not keep it: there the
staging file knows better.
"""


class LowerStat(NamedTuple):
    """What the backing directory says about one of its entries; sizes in bytes, times in
    nanoseconds.

    A tuple, as entries of listings are, because one is made for each name that is looked at: a
    frozen dataclass takes five times as long.
    """

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    device: int = 0
    """Of which file system it is; 0: not known."""

    def identity(self) -> tuple[int, int, int, int]:
        """(inode, size, mtime, ctime): equal means that content read earlier is still current."""
        return (self.ino, self.size, self.mtime_ns, self.ctime_ns)


@dataclass(frozen=True, slots=True)
class Note:
    """What acpfs noted at a file when it stored it: xxh3-128, and the mtime that the file was given
    (ns); -1: not noted.
    """

    digest: str
    mtime_ns: int = -1

    def encode(self) -> bytes:
        """Value of the xattr."""
        return (
            self.digest.encode()
            if self.mtime_ns == -1
            else f"{self.digest} {self.mtime_ns}".encode()
        )

    @classmethod
    def decode(cls, value: bytes) -> Note | None:
        """Inverse of `encode`; None: another form, which says nothing of the file's bytes.

        What it has elsewhere than in the time would be taken for a digest that the file has not.
        """
        digest, _space, mtime = value.decode("ascii", "replace").partition(" ")
        if not _DIGEST.fullmatch(digest):
            return None
        return cls(digest, int(mtime) if mtime.lstrip("-").isdigit() else -1)

    def is_about(self, st: LowerStat, granularity_ns: int) -> bool:
        """Whether the file has not been written to since, as its mtime tells: then other bytes are
        damage, not somebody's change.
        """
        return (
            self.mtime_ns != -1 and self.mtime_ns // granularity_ns == st.mtime_ns // granularity_ns
        )


class LowerEntry(NamedTuple):
    """One entry of a directory listing. `mode` holds only the file type bits (0 when unknown)."""

    name: bytes
    ino: int
    mode: int


class NewAttributes(Protocol):
    """What can be given to an entry; None: leave as it is. `writeback.log.ops.Metadata` is one."""

    @property
    def permissions(self) -> int | None:
        """Permission bits of a mode, without the type."""
        ...

    @property
    def uid(self) -> int | None: ...
    @property
    def gid(self) -> int | None: ...
    @property
    def atime_ns(self) -> int | None: ...
    @property
    def mtime_ns(self) -> int | None: ...
    @property
    def xattrs(self) -> Mapping[bytes, bytes | None]:
        """To set; value None: remove."""
        ...


@dataclass(frozen=True, slots=True)
class SpaceInfo:
    """statvfs of the backing file system."""

    block_bytes: int
    blocks: int
    blocks_free: int
    blocks_available: int
    files: int
    files_free: int
    name_bytes_max: int


def lstat_each(
    lstat: Callable[[LowerPath], LowerStat], directory: LowerPath, names: Sequence[bytes]
) -> list[LowerStat | None]:
    """What `Lower.lstat_many` says, asked name by name."""
    found: list[LowerStat | None] = []
    for name in names:
        try:
            found.append(lstat((*directory, name)))
        except (FileNotFoundError, NotADirectoryError):
            found.append(None)
    return found


class LowerToRead(Protocol):
    """The half of `Lower` that changes nothing; descriptors are those of `open_read`."""

    @property
    def features(self) -> Features: ...

    def lstat(self, path: LowerPath) -> LowerStat: ...
    def lstat_many(self, directory: LowerPath, names: Sequence[bytes]) -> list[LowerStat | None]:
        """`lstat` of names of one directory, which is looked up once for all; None: there is no
        such name, or no such directory.
        """
        ...

    def listdir(self, path: LowerPath) -> list[LowerEntry]:
        """All entries but `.`, `..` and, at the top, `.acpfs`."""
        ...

    def open_read(self, path: LowerPath) -> int:
        """A read-only descriptor of a regular file (never follows a symlink)."""
        ...

    def open_uncached(self, path: LowerPath) -> int:
        """`open_read`, and reads come from the backing file system rather than from the page cache,
        as far as that can be had.

        Buffers and offsets are best multiples of a page.
        """
        ...

    def readlink(self, path: LowerPath) -> bytes: ...
    def xattrs(self, path: LowerPath) -> dict[bytes, bytes]:
        """All readable xattrs; {} where the backing file system has none.

        `user.acpfs.*` are left out, but for `.fsync`.
        """
        ...

    def space(self) -> SpaceInfo: ...
    def digest(self, path: LowerPath) -> str:
        """xxh3-128 that acpfs noted at the file itself when it stored it (xattr `user.acpfs.xxh3`);
        "" for none.
        """
        ...

    def note(self, path: LowerPath) -> Note | None:
        """`digest` of a file, and what the file looked like then."""
        ...

    def noted(self, fd: int) -> Note | None:
        """`note` of an open file."""
        ...

    def read(self, fd: int, buffer: memoryview, offset: int) -> int: ...
    def expect_bulk(self, fd: int) -> None:
        """A large file is about to be written or read, in order, from page-aligned memory.

        Advice: never fails.
        """
        ...

    def cached_bytes(self, fd: int) -> int | None:
        """How much of the file the kernel's page cache has, None for unknown. Never waits."""
        ...

    def stat_fd(self, fd: int) -> LowerStat: ...
    def close(self, fd: int) -> None:
        """The descriptor is gone in any case; some file systems report a failed write only here."""
        ...


class Lower(LowerToRead, Protocol):
    """The backing directory, as the write-back engine and the file system use it."""

    def mkdir(self, path: LowerPath) -> None:
        """Mode 0700; `set_metadata` gives it its own."""
        ...

    def keeping_directories(self) -> AbstractContextManager[None]:
        """Within, this thread's calls may open each directory once. Moves none.

        The end raises OSError (ESTALE) when one lies elsewhere by then: then it is not known where
        the calls have found it.
        """
        ...

    def rmdir(self, path: LowerPath) -> None: ...
    def unlink(self, path: LowerPath) -> None: ...
    def rename(self, source: LowerPath, target: LowerPath) -> None:
        """A file or symlink that goes to another file system is copied, renamed into place there,
        and then removed; EXDEV for all else.
        """
        ...

    def exchange(self, a: LowerPath, b: LowerPath) -> None:
        """Swap two entries; in three renames where the backing file system has no
        RENAME_EXCHANGE.
        """
        ...

    def exchange_aside(self, a: LowerPath, b: LowerPath) -> LowerPath:
        """Where `a` lies between the first of these renames and the last."""
        ...

    def link(self, source: LowerPath, target: LowerPath) -> None: ...
    def symlink(self, target: bytes, path: LowerPath) -> None: ...
    def mknod(self, path: LowerPath, mode: int, rdev: int) -> None: ...
    def set_times(self, path: LowerPath, atime_ns: int, mtime_ns: int) -> None:
        """Left out and counted where it is refused, like what `apply` gives."""
        ...

    def sync_directory(self, path: LowerPath) -> None:
        """fsync of a directory; nothing where the file system refuses that, `sync_file_systems`
        where its mode forbids to open it.
        """
        ...

    def sync_file_systems(self, paths: Iterable[LowerPath]) -> None:
        """What there is of a flush for entries that cannot be reached: syncfs of the file systems
        that they seem to be on, each once.

        That of the nearest directory above that can be opened: of a mount inside of what cannot be
        reached it knows nothing. A FUSE server hears nothing of it (but virtiofs); an NFS server
        has changes of directories before they return. What the kernel could not write back is told
        once, and before Linux 5.8 never.
        """
        ...

    def is_staging_area(self, path: LowerPath) -> bool:
        """Whether acpfs has a directory of its own in a directory below the top, which is not
        shown.
        """
        ...

    def stage_near(self, name: str, directory: LowerPath) -> str:
        """The staging name, made of `name`, under which a file can be renamed into a directory: it
        says in which staging directory it lies.

        A directory that is not there yet is taken to be on the file system of the nearest one above
        it.
        """
        ...

    def bring_near(self, name: str, target: LowerPath) -> str:
        """Copy a staging file that cannot be renamed to `target` to where it can; returns the
        copy's staging name.

        Raises:
            OSError: EXDEV where there is no such place.
        """
        ...

    def create_staging(self, name: str) -> int:
        """New, empty file in this node's staging directory, read-write descriptor, mode 0600; an
        old one of that name is removed first.
        """
        ...

    def open_staging(self, name: str) -> int:
        """Read-write descriptor of a staging file that exists."""
        ...

    def staging_path(self, name: str) -> LowerPath:
        """Where the staging file lies, to rename it into place."""
        ...

    def kept_path(self, path: LowerPath = ()) -> LowerPath:
        """Directory of this node for what the guard had to move out of a new one's way, where
        `path` can be moved to. Never waits.
        """
        ...

    def remove_staging(self, name: str) -> None:
        """Nothing when it is not there."""
        ...

    def list_kept(self) -> list[LowerPath]:
        """What lies in each `kept_path`. That at the top is made if it is not there."""
        ...

    def list_staging(self) -> list[str]: ...

    # attributes and content of entries

    def apply(self, path: LowerPath, attributes: NewAttributes) -> None:
        """Set owner, mode, xattrs, then times.

        What the backing file system cannot hold is left out and counted, not an error.
        """
        ...

    def apply_fd(self, fd: int, attributes: NewAttributes) -> None:
        """`apply` through an open descriptor."""
        ...

    def sync_entry(self, path: LowerPath) -> None:
        """fsync of a file's or directory's inode; nothing for what cannot be opened (symlinks,
        devices, sockets).
        """
        ...

    # descriptors from create_staging and open_read

    def write(self, fd: int, data: memoryview, offset: int) -> int: ...
    def make_room(self, fd: int, size: int) -> bool:
        """Have room set aside for the first bytes of a file, whose length stays; False: that cannot
        be had here.

        Raises:
            OSError: ENOSPC, EDQUOT: there is none.
        """
        ...

    def begin_write_out(self, fd: int, offset: int, count: int) -> None:
        """Have what was written there begin its way to stable storage, so that `sync` has less to
        wait for. Advice: never fails.
        """
        ...

    def truncate(self, fd: int, size: int) -> None: ...
    def sync(self, fd: int) -> None:
        """fsync."""
        ...

    def forget_pages(self, fd: int) -> None:
        """Ask the kernel to drop its cached copy, so that the next read comes from the backing file
        system. Advice: never fails.
        """
        ...

    # acpfs' own small files below `.acpfs`

    def read_own(self, names: LowerPath) -> bytes:
        """Content of `.acpfs/<names…>`.

        Raises:
            OSError: ENOENT when there is none.
        """
        ...

    def write_own(self, names: LowerPath, content: bytes) -> None:
        """Replace `.acpfs/<names…>` in one step: temporary name, fsync, rename."""
        ...

    def fence_own_files(self) -> None:
        """From now on what is written there is refused, however late it comes, when somebody has
        taken the log over.
        """
        ...

    def remove_own(self, names: LowerPath) -> None:
        """Nothing when it is not there."""
        ...

    def list_own(self, names: LowerPath) -> list[bytes]:
        """Names in the directory `.acpfs/<names…>`; [] when it is not there."""
        ...
