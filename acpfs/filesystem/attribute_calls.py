"""Attributes and extended attributes: getattr, setattr (but for the size), xattr calls, and what
fsync means for a directory.

Changes take effect here at once and are logged, or folded into what is logged already.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Mapping

from acpfs.backing import posix_acl
from acpfs.backing.attributes import FSYNC_XATTR, NEEDS_XATTR
from acpfs.config import FsyncMode, Settings
from acpfs.filesystem import acls
from acpfs.filesystem.changes import Changes
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.names import fail
from acpfs.filesystem.needed_nodes import XATTR_CREATE, XATTR_REPLACE, NeededNodes
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.records import AttributeChange, Attributes
from acpfs.writeback.log.ops import Metadata

OWN_PREFIX = b"user.acpfs."
_TRUSTED = b"trusted."
KEPT_PREFIXES = (b"user.", _TRUSTED, b"security.")
NEVER_KEPT = frozenset(
    {b"security.capability", b"security.ima", b"security.evm", b"security.selinux"}
)
"""The kernel asks for these at nearly every call; answering from here keeps that free of the
backing directory.
"""

XATTRS_BYTES_MAX = 128 << 10
"""Names and values of one node: twice the largest value that Linux takes.

All are written anew with each change of the node.
"""


class AttributeCalls:
    """Attribute calls over nodes."""

    def __init__(
        self,
        settings: Settings,
        table: NodeTable,
        view: LowerView,
        changes: Changes,
        contents: Contents,
        needs: NeededNodes,
    ) -> None:
        self._needs = needs
        self._settings = settings
        self._table = table
        self._view = view
        self._changes = changes
        self._contents = contents

    def of(self, node: Node) -> Attributes:
        """The node as stat(2) shows it."""
        if node.kernel_writers:
            self._contents.kernel.look(node)
        return Attributes(
            node.ino,
            node.mode,
            node.shown_links,
            node.uid,
            node.gid,
            node.rdev,
            node.size,
            node.blocks,
            node.atime_ns,
            node.mtime_ns,
            node.ctime_ns,
        )

    async def getattr(self, node: Node) -> Attributes:
        """Attributes, not older than allowed."""
        await self._view.renew(node)
        return self.of(node)

    async def setattr(self, node: Node, change: AttributeChange) -> None:
        await self._view.renew(node)
        if node.kernel_writers:
            self._contents.kernel.look(
                node
            )  # what the kernel wrote before is not to be taken for the change of times
        meta = Metadata(
            uid=change.uid, gid=change.gid, atime_ns=change.atime_ns, mtime_ns=change.mtime_ns
        )
        former_mode = node.mode
        if change.mode is not None:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(change.mode)
            meta.permissions = stat.S_IMODE(change.mode)
            access = (node.xattrs or {}).get(posix_acl.ACCESS)
            if access is not None and node.xattrs is not None:
                # with it: the backing directory is never given the wider one first, where both come
                # together
                access = acls.shown(node.mode, posix_acl.ACCESS, access)
                node.xattrs[posix_acl.ACCESS] = access
                meta.xattrs[posix_acl.ACCESS] = access
        node.uid = node.uid if change.uid is None else change.uid
        node.gid = node.gid if change.gid is None else change.gid
        node.atime_ns = node.atime_ns if change.atime_ns is None else change.atime_ns
        node.mtime_ns = node.mtime_ns if change.mtime_ns is None else change.mtime_ns
        node.ctime_ns = self._table.change_clock.now_ns(node.ctime_ns)
        self._contents.kernel.set_times(node)
        self._changes.change_metadata(node, meta, former_mode)

    # -- extended attributes

    def _check_name(self, name: bytes) -> None:
        if not name.startswith(KEPT_PREFIXES):
            raise fail(errno.EOPNOTSUPP)

    async def getxattr(self, node: Node, name: bytes) -> bytes:
        if name in NEVER_KEPT:
            raise fail(errno.EOPNOTSUPP)  # with ENODATA, ls asks again for each file
        if name in posix_acl.NAMES:
            return await self._acl(node, name)
        self._check_name(name)
        if name == NEEDS_XATTR:
            return self._needs.value(node)
        xattrs = await self._view.load_xattrs(node)
        if name not in xattrs:
            raise fail(errno.ENODATA)
        return xattrs[name]

    async def _acl(self, node: Node, name: bytes) -> bytes:
        """As the kernel asks for it before it lets anybody in but the owner.

        Raises:
            OSError: ENODATA: the mode says all; EIO: that of a new file cannot be known now.
        """
        if not self._view.lower.features.acls:
            raise fail(errno.EOPNOTSUPP)
        if node.xattrs is None and not await self._view.knows_acls(node):
            if name == posix_acl.ACCESS:
                return acls.unknown(node.mode)
            raise fail(errno.EIO)
        value = (node.xattrs or {}).get(name)
        if value is None:
            raise fail(errno.ENODATA)
        return acls.shown(node.mode, name, value)

    async def _set_acl(
        self, node: Node, name: bytes, value: bytes, *, kills_set_gid: bool | None
    ) -> None:
        if not self._view.lower.features.acls:
            raise fail(errno.EOPNOTSUPP)
        xattrs = await self._view.load_xattrs(node)
        self._check_room(xattrs, name, value)
        if name == posix_acl.DEFAULT:
            xattrs[name] = value
            self._changed(node, name, value)
            return
        kills = not node.is_dir if kills_set_gid is None else kills_set_gid
        former_mode = node.mode
        node.mode = acls.mode_after(node.mode, value, kills_set_gid=kills)
        if posix_acl.says_more(value):
            xattrs[name] = value
        else:
            xattrs.pop(name, None)
        node.ctime_ns = self._table.change_clock.now_ns(node.ctime_ns)
        self._changes.change_metadata(
            node,
            # the backing directory takes both in one step; one that says no more than the mode
            # takes the former one away
            Metadata(permissions=stat.S_IMODE(node.mode), xattrs={name: value}),
            former_mode,
        )

    async def listxattr(self, node: Node, uid: int = 0) -> list[bytes]:
        """Of the names in `trusted.` others than root hear nothing: the kernel lets them read none.

        It does not filter a list itself, as the file systems beneath it do. Root alone is taken to
        have CAP_SYS_ADMIN.
        """
        names = sorted(await self._view.load_xattrs(node))
        return names if uid == 0 else [name for name in names if not name.startswith(_TRUSTED)]

    async def setxattr(
        self,
        node: Node,
        name: bytes,
        value: bytes,
        flags: int,
        uid: int,
        *,
        kills_set_gid: bool | None = None,
    ) -> None:
        """Set an extended attribute.

        `kills_set_gid`: whether an ACL takes set-gid away, since the caller is not in the group;
        None: not known.

        Raises:
            OSError: EOPNOTSUPP where the backing file system could not keep it; EINVAL for a bad
                `user.acpfs.*`; ENOSPC for too many.
        """
        if name in posix_acl.NAMES:
            await self._set_acl(node, name, value, kills_set_gid=kills_set_gid)
            return
        self._check_name(name)
        if name == NEEDS_XATTR:
            self._needs.set(node, value, flags, uid)
            return
        self._check_own(node, name, value)
        if not self._view.lower.features.xattrs or name in NEVER_KEPT:
            raise fail(errno.EOPNOTSUPP)
        xattrs = await self._view.load_xattrs(node)
        if flags & XATTR_CREATE and name in xattrs:
            raise fail(errno.EEXIST)
        if flags & XATTR_REPLACE and name not in xattrs:
            raise fail(errno.ENODATA)
        self._check_room(xattrs, name, value)
        xattrs[name] = value
        self._changed(node, name, value)

    @staticmethod
    def _check_room(xattrs: dict[bytes, bytes], name: bytes, value: bytes) -> None:
        taken = sum(len(k) + len(v) for k, v in xattrs.items() if k != name)
        if taken + len(name) + len(value) > XATTRS_BYTES_MAX:
            raise fail(errno.ENOSPC)

    def _check_own(self, node: Node, name: bytes, value: bytes) -> None:
        if not name.startswith(OWN_PREFIX):
            return
        if name != FSYNC_XATTR or not node.is_dir:
            raise fail(errno.EPERM)
        if value not in {mode.value.encode() for mode in FsyncMode}:
            raise fail(errno.EINVAL)

    async def removexattr(self, node: Node, name: bytes, uid: int) -> None:
        if name not in posix_acl.NAMES:
            self._check_name(name)
        elif not self._view.lower.features.acls:
            raise fail(errno.EOPNOTSUPP)
        if name == NEEDS_XATTR:
            self._needs.remove(node, uid)
            return
        xattrs = await self._view.load_xattrs(node)
        if name not in xattrs:
            if name in posix_acl.NAMES:
                return  # as natively: the mode says all, before as after
            raise fail(errno.ENODATA)
        del xattrs[name]
        self._changed(node, name, None)

    def _changed(self, node: Node, name: bytes, value: bytes | None) -> None:
        node.ctime_ns = self._table.change_clock.now_ns(node.ctime_ns)
        self._changes.change_metadata(node, Metadata(xattrs={name: value}))

    def foresee_fsync(self, node: Node) -> None:
        """A file was opened for writing: have the answer to `fsync_mode` ready, without waiting."""
        while node.names:
            node = self._table[node.names[0][0]]
            self._view.foresee_xattrs(node)

    def is_durable(self, node: Node) -> bool:
        """Whether fsync is durable for a file, as far as that is known without asking the backing
        directory.
        """
        while node.names:
            node = self._table[node.names[0][0]]
            mode = _mode_in(node.xattrs or {})
            if mode is not None:
                return self._is_durable(mode)
        return self._is_durable(self._settings.fsync)

    def _is_durable(self, mode: FsyncMode) -> bool:
        """Where nobody holds copies, what is to be copied is to be persisted."""
        return mode is FsyncMode.DURABLE or (mode is FsyncMode.COPIED and not self._settings.copies)

    async def fsync_mode(self, node: Node) -> FsyncMode:
        """What fsync means for a file: the nearest directory above with a mode of its own decides,
        else the mount.
        """
        return (
            await self.fsync_mode_in(self._table[node.names[0][0]])
            if node.names
            else self._settings.fsync
        )

    async def fsync_mode_in(self, node: Node) -> FsyncMode:
        """What fsync means in a directory."""
        while True:
            mode = _mode_in(await self._view.peek_xattrs(node))
            if mode is not None:
                return mode
            if not node.names:
                return self._settings.fsync
            node = self._table[node.names[0][0]]


def _mode_in(xattrs: Mapping[bytes, bytes]) -> FsyncMode | None:
    """What a directory says; None: nothing, or what nobody here knows: it may have been set beside
    acpfs, or by a newer one.
    """
    value = xattrs.get(FSYNC_XATTR)
    return next((mode for mode in FsyncMode if mode.value.encode() == value), None)
