"""Owner, mode, xattrs and times of entries of the backing directory.

What a file system cannot hold (owners under root squash, xattrs on NFSv3, capabilities without
privilege) is left out and counted: data must not stay in RAM for the lack of an attribute.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from acpfs.backing import posix_acl
from acpfs.backing.lower import LowerStat, NewAttributes
from acpfs.backing.quirks import NO_ATTRIBUTE, NO_XATTR

OWN_XATTR_PREFIX = b"user.acpfs."
DIGEST_XATTR = b"user.acpfs.xxh3"
FSYNC_XATTR = b"user.acpfs.fsync"
NEEDS_XATTR = b"user.acpfs.needs"
"""For the mount alone: never on the backing directory."""
"""On a directory: `ordered` or `durable`, for all files below that are opened from then on.

Users set it, and it is kept like theirs.
"""


def signed_ino(ino: int) -> int:
    """An inode number as SQLite can hold it: GlusterFS and others use all 64 bits, SQLite's
    integers have a sign.
    """
    return ino - (1 << 64) if ino >= 1 << 63 else ino


def lower_stat(st: os.stat_result) -> LowerStat:
    """As the layers above know it."""
    return LowerStat(
        signed_ino(st.st_ino),
        st.st_mode,
        st.st_nlink,
        st.st_uid,
        st.st_gid,
        st.st_rdev,
        st.st_size,
        st.st_blocks,
        st.st_atime_ns,
        st.st_mtime_ns,
        st.st_ctime_ns,
        st.st_dev,
    )


class AttributeSetter:
    """Gives attributes to entries and counts what was refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter(dict.fromkeys(("owner", "mode", "times", "xattr"), 0))
        self.xattrs_work = True
        self.acls_work = True

    def refused(self) -> dict[str, int]:
        """How often the backing file system refused each kind of attribute."""
        with self._lock:
            return dict(self._refused)

    def _try(self, kind: str, tolerated: frozenset[int], action: Callable[[], None]) -> bool:
        """Whether it was done."""
        try:
            action()
        except OSError as error:
            if error.errno not in tolerated:
                raise
            with self._lock:
                self._refused[kind] += 1
            return False
        return True

    def set_times(self, utime: Callable[[], None]) -> None:
        """Only an entry's owner may choose its times; a directory that others own may be written to
        all the same.
        """
        self._try("times", NO_ATTRIBUTE, utime)

    def apply_fd(self, fd: int, attributes: NewAttributes) -> None:
        """To an open regular file. chown before chmod, for it clears set-id bits; times last, for
        the rest may change them.
        """
        st = os.fstat(fd)
        owner_was_set = self._own(st, attributes, lambda uid, gid: os.chown(fd, uid, gid))
        refused_acl = self._xattrs(fd, attributes.xattrs)
        if owner_was_set or any(not name.startswith(b"user.") for name in attributes.xattrs):
            st = os.fstat(fd)  # either may change the mode
        mode = _permissions(attributes, st, refused_acl)
        if mode is not None and mode != stat.S_IMODE(st.st_mode):
            self._try("mode", NO_ATTRIBUTE, lambda: os.chmod(fd, mode))
        times = _times(st, attributes)
        if times is not None:
            self.set_times(lambda: os.utime(fd, ns=times))

    def apply_at(self, dir_fd: int, name: bytes, attributes: NewAttributes) -> None:
        """To an entry of a directory, of whatever type, never following a symlink."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            st = os.fstat(fd)
            # leads to the very inode that is open, whatever its name is by now
            magic = f"/proc/self/fd/{fd}"
            self._own(st, attributes, lambda uid, gid: os.chown(magic, uid, gid))
            if not stat.S_ISLNK(st.st_mode):
                refused_acl = self._xattrs(magic, attributes.xattrs)
                mode = _permissions(attributes, os.fstat(fd), refused_acl)
                if mode is not None and mode != stat.S_IMODE(os.fstat(fd).st_mode):
                    self._try("mode", NO_ATTRIBUTE, lambda: os.chmod(magic, mode))
            times = _times(st, attributes)
            if times is not None:
                self.set_times(lambda: os.utime(magic, ns=times))
        finally:
            os.close(fd)

    def _own(
        self, st: os.stat_result, attributes: NewAttributes, chown: Callable[[int, int], None]
    ) -> bool:
        """Returns whether it was to be changed."""
        uid = -1 if attributes.uid in (None, st.st_uid) else attributes.uid
        gid = -1 if attributes.gid in (None, st.st_gid) else attributes.gid
        if uid == gid == -1:
            return False
        assert uid is not None
        assert gid is not None
        self._try("owner", NO_ATTRIBUTE, lambda: chown(uid, gid))
        return True

    def _xattrs(self, target: int | str, xattrs: Mapping[bytes, bytes | None]) -> bytes | None:
        """Returns the ACL that the file was to have, and has not."""
        refused = None
        for name, value in xattrs.items():
            if not self._set_xattr(target, name, value) and name == posix_acl.ACCESS:
                refused = value
        return refused

    def _set_xattr(self, target: int | str, name: bytes, value: bytes | None) -> bool:
        works = self.acls_work if name in posix_acl.NAMES else self.xattrs_work
        if not works:
            with self._lock:
                self._refused["xattr"] += not name.startswith(OWN_XATTR_PREFIX)
            return False
        if value is None:
            return self._try("xattr", NO_XATTR, lambda: os.removexattr(target, name))
        return self._try("xattr", NO_XATTR, lambda: os.setxattr(target, name, value))


def _permissions(
    attributes: NewAttributes, st: os.stat_result, refused: bytes | None
) -> int | None:
    """Those to give.

    Where an ACL was refused, they give nobody more than the ACL would: its group bits are no
    group's rights.
    """
    if refused is None:
        return attributes.permissions
    given = attributes.permissions
    return posix_acl.narrow(refused, stat.S_IMODE(st.st_mode) if given is None else given)


def _times(st: os.stat_result, attributes: NewAttributes) -> tuple[int, int] | None:
    if attributes.atime_ns is None and attributes.mtime_ns is None:
        return None
    atime_ns = st.st_atime_ns if attributes.atime_ns is None else attributes.atime_ns
    mtime_ns = st.st_mtime_ns if attributes.mtime_ns is None else attributes.mtime_ns
    return atime_ns, mtime_ns
