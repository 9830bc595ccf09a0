"""What backing file systems cannot do, and what they answer wrongly: the home of storage quirks.

A file system that *cannot*: one field of `Features`, with how it is found out at mount and what
users lose. The field is asked where it matters, shown by `status`, and known to the next worker.
One that *answers wrongly*: a set of errnos or a judgement, below. Knows no layer above, makes no
call but on what it is given, and holds nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from acpfs.backing import filling
from acpfs.backing.posix_acl import ACCESS, GROUP_OBJ, MASK, OTHER, USER_OBJ, Entry, encode
from acpfs.backing.syscalls import rename_exchange

CANNOT = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""Answers that mean that a file system cannot do something at all: small FUSE servers say ENOSYS,
FAT says EPERM to links.
"""
NO_DIRECTORY_SYNC = CANNOT | {errno.EINVAL, errno.EBADF, errno.EACCES}
NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
NO_ATTRIBUTE = frozenset(
    {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EOVERFLOW}
)
NO_XATTR = NO_ATTRIBUTE | {
    errno.ERANGE,
    errno.E2BIG,
    errno.ENOSPC,
    errno.ENODATA,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
}
"""ENOSPC: ext4 without large xattrs says so for values of 4 KiB.

A file system that is full will say so to a write as well.
"""
NAME_BYTES_MAX = 255
_NO_ANSWER = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS})
"""Of a full or dead file system: they say nothing of what it can do."""
_STAMP_NS = 1_000_000_000_123_456_789
_SECOND_NS = 1_000_000_000
_NOBODY = 65534


# -- what it cannot do


@dataclass(frozen=True, slots=True)
class Trial:
    """A staging file to try things on, by its descriptor, and by its name in its directory; `other`
    is a name that is free there.
    """

    top_fd: int
    dir_fd: int
    file_fd: int
    name: bytes
    other: bytes


def _can(attempt: Callable[[Trial], object], lacking: str) -> Any:
    """A field that says whether an attempt succeeds; `lacking`: what users lose."""

    def works(trial: Trial) -> bool:
        try:
            attempt(trial)
        except OSError as error:
            if error.errno in _NO_ANSWER:
                raise
            return False
        return True

    return _is(works, True, lambda good: "" if good else lacking)


def _is(
    find: Callable[[Trial], object], good: object, lacking: Callable[[Any], str] = lambda _found: ""
) -> Any:
    """A field with what a good file system has for its default."""
    return field(default=good, metadata={"find": find, "lacking": lacking})


def _acls(trial: Trial) -> bool:
    """Whether an ACL can be set, and means something: a FUSE server may keep it as bytes like any
    other attribute.
    """
    entries = (Entry(USER_OBJ, 6), Entry(GROUP_OBJ, 0), Entry(MASK, 4), Entry(OTHER, 0))
    try:
        os.setxattr(trial.file_fd, ACCESS, encode(entries))
    except OSError as error:
        if error.errno in _NO_ANSWER:
            raise
        return False
    return stat.S_IMODE(os.fstat(trial.file_fd).st_mode) == 0o640


def _hard_link(trial: Trial) -> None:
    os.link(
        trial.name,
        trial.other,
        src_dir_fd=trial.dir_fd,
        dst_dir_fd=trial.dir_fd,
        follow_symlinks=False,
    )
    os.unlink(trial.other, dir_fd=trial.dir_fd)


def _counts_links(trial: Trial) -> bool:
    """Where it cannot make links, nothing has to be counted."""
    try:
        os.link(
            trial.name,
            trial.other,
            src_dir_fd=trial.dir_fd,
            dst_dir_fd=trial.dir_fd,
            follow_symlinks=False,
        )
    except OSError as error:
        if error.errno in _NO_ANSWER:
            raise
        return True
    # By its new name: what is known of the file itself may be from before, on a client that caches
    # attributes.
    found = os.stat(trial.other, dir_fd=trial.dir_fd, follow_symlinks=False)
    os.unlink(trial.other, dir_fd=trial.dir_fd)
    return found.st_nlink == 2


def _symlink(trial: Trial) -> None:
    os.symlink(b"target", trial.other, dir_fd=trial.dir_fd)
    os.unlink(trial.other, dir_fd=trial.dir_fd)


def _chown(trial: Trial) -> None:
    owner = os.fstat(trial.file_fd)
    os.chown(trial.file_fd, _NOBODY, _NOBODY)
    os.chown(trial.file_fd, owner.st_uid, owner.st_gid)


def _exchange(trial: Trial) -> None:
    os.close(
        os.open(
            trial.other,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
            0o600,
            dir_fd=trial.dir_fd,
        )
    )
    rename_exchange(trial.dir_fd, trial.name, trial.dir_fd, trial.other)


def _direct_io(trial: Trial) -> None:
    os.close(os.open(trial.name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC, dir_fd=trial.dir_fd))


def _page_cache(trial: Trial) -> bool:
    """Where the kernel does not tell, what was read is cached."""
    os.pread(trial.file_fd, 1, 0)
    return filling.cached_bytes(trial.file_fd) != 0


def _time_granularity_ns(trial: Trial) -> int:
    """By what is left of a time stamp with nine digits after the second."""
    try:
        os.utime(trial.file_fd, ns=(_STAMP_NS, _STAMP_NS))
    except OSError:
        return _SECOND_NS
    found = os.fstat(trial.file_fd).st_mtime_ns
    for granularity_ns in (1, 10, 100, 1_000, 1_000_000, _SECOND_NS):
        if found == _STAMP_NS - _STAMP_NS % granularity_ns:
            return granularity_ns
    return 2 * _SECOND_NS


def _name_bytes_max(trial: Trial) -> int:
    try:
        return os.statvfs(trial.top_fd).f_namemax or NAME_BYTES_MAX
    except OSError as error:
        if error.errno not in CANNOT:
            raise
        return NAME_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Features:
    """What the backing file system can do, probed at mount in the order of the fields."""

    xattrs: bool = _can(
        lambda trial: os.setxattr(trial.file_fd, b"user.acpfs.probe", b"1"),
        "no extended attributes: checksums only in the manifest, users' attributes only in RAM",
    )
    acls: bool = _is(
        _acls,
        True,
        lambda good: "" if good else "no POSIX ACLs: setfacl is refused, and no file inherits one",
    )
    hard_links: bool = _can(_hard_link, "no hard links: additional names are stored as copies")
    link_counts: bool = _is(
        _counts_links,
        True,
        lambda good: "" if good else "links are not counted: a file with several names shows one",
    )
    """How many names a file has can be seen (not over SFTP, nor of some SMB servers)."""
    symlinks: bool = _can(_symlink, "no symbolic links: they cannot be stored")
    chown: bool = _can(
        _chown,
        "owners cannot be set (not privileged, or root is squashed): files there belong to acpfs",
    )
    fsync_directory: bool = _can(
        lambda trial: os.fsync(trial.dir_fd),
        "directories cannot be flushed: renames are as durable as the file system makes them",
    )
    rename_exchange: bool = _can(_exchange, "no atomic exchange of names: done in three renames")
    direct_io: bool = _can(_direct_io, "no direct I/O")
    direct_writes: bool = _is(lambda trial: filling.wants_direct(trial.top_fd), False)
    """Large files are best written past the page cache."""
    page_cache: bool = _is(_page_cache, True)
    """What one process reads stays in the kernel's page cache for the next."""
    time_granularity_ns: int = _is(
        _time_granularity_ns,
        1,
        lambda ns: f"times only to {ns // _SECOND_NS} s" if ns >= _SECOND_NS else "",
    )
    name_bytes_max: int = _is(
        _name_bytes_max,
        NAME_BYTES_MAX,
        lambda size: f"names only to {size} bytes" if size < NAME_BYTES_MAX else "",
    )


def found_features(trial: Trial) -> Features:
    """Try everything.

    Raises:
        OSError: the file system is full or dead.
    """
    return Features(**{one.name: one.metadata["find"](trial) for one in fields(Features)})


def what_is_lacking(features: Features) -> list[str]:
    """One sentence for each thing that users lose."""
    said = (one.metadata["lacking"](getattr(features, one.name)) for one in fields(Features))
    return [sentence for sentence in said if sentence]


# -- what it answers wrongly


@contextlib.contextmanager
def top_exists() -> Iterator[None]:
    """A top that is said to be missing is trouble (ESTALE), no answer: an evicted client of CephFS
    says so of what it has open.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error
