"""Calls that make, remove and move names: lookup, mkdir, mknod, symlink, link, unlink, rmdir,
rename, readlink.

Each asks first (waiting where it must) and then changes tables and log in one step without waiting
in between. Permission checks are the kernel's (`default_permissions`); ownership is given here.
"""

from __future__ import annotations

import errno
import os
import stat

from acpfs.filesystem.acls import HandedOn
from acpfs.filesystem.awaited_names import AwaitedNames
from acpfs.filesystem.changes import Changes
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.doubtful_closes import DoubtfulCloses
from acpfs.filesystem.earlier_saves import EarlierSaves
from acpfs.filesystem.lowerview import HIDDEN, LowerView
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.pointer_content import PointerContent
from acpfs.filesystem.records import Caller
from acpfs.types import NO_INO, ROOT, Ino
from acpfs.writeback.log.ops import OpKind

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
NAME_BYTES_MAX = 255


def fail(number: int) -> OSError:
    """An OSError with its text, to raise."""
    return OSError(number, os.strerror(number))


class Names:
    """Name calls over the two trees."""

    def __init__(
        self,
        table: NodeTable,
        view: LowerView,
        changes: Changes,
        contents: Contents,
        awaited: AwaitedNames,
        earlier: EarlierSaves,
        closes: DoubtfulCloses,
        pointers: PointerContent,
    ) -> None:
        self._table = table
        self._earlier = earlier
        self._closes = closes
        self._pointers = pointers
        self._view = view
        self._awaited = awaited
        self._changes = changes
        self._contents = contents

    def node(self, ino: Ino) -> Node:
        """The node of a number that the kernel named.

        Raises:
            OSError: ESTALE when it is not known.
        """
        node = self._table.get(ino)
        if node is None:
            raise fail(errno.ESTALE)
        return node

    async def existing(self, parent: Node, name: bytes, *, waits: bool = False) -> Node:
        """The node that a name leads to, or ENOENT; `waits`: first for other members that are about
        to persist it.
        """
        if len(name) > NAME_BYTES_MAX:
            raise fail(errno.ENAMETOOLONG)
        ino = await self._view.child(parent, name)
        if not ino and waits:
            ino = await self._awaited.child(parent, name)
        if not ino:
            raise fail(errno.ENOENT)
        return self._table[ino]

    async def lookup(self, parent_ino: Ino, name: bytes, *, waits: bool) -> Node:
        """The node, with a reference for the kernel taken; `waits`: as for `existing`."""
        parent = self.node(parent_ino)
        node = (
            parent
            if name == b"."
            else await self._parent_of(parent)
            if name == b".."
            else await self.existing(parent, name, waits=waits)
        )
        node.lookups += 1
        return node

    async def _parent_of(self, node: Node) -> Node:
        return self._table[node.names[0][0]] if node.names else self._table[ROOT]

    # -- making

    async def vacant(self, parent_ino: Ino, name: bytes) -> Node:
        """The directory, when `name` may be made in it.

        Raises:
            OSError: EEXIST, ENAMETOOLONG, EPERM for `.acpfs`, ENOENT when the directory is deleted.
        """
        parent = self.node(parent_ino)
        self.check_vacant(parent, name, NO_INO)
        await self.check_own(parent, name)
        if await self.taken_by(parent, name):
            raise fail(errno.EEXIST)
        self.check_present(parent)  # others may have removed it meanwhile
        return parent

    async def taken_by(self, parent: Node, name: bytes) -> Ino:
        """What has a name that only one may make, 0 for nothing.

        Where other members live, one of them may have made it since it was last looked for: the
        backing directory is asked anew. Where it hangs, what is known has to do.
        """
        return await self._view.child(parent, name, anew=self._awaited.peers.others)

    async def check_own(self, parent: Node, name: bytes) -> None:
        """That the name is none of acpfs' own below the top.

        Asks only for one that hardly anybody wants.

        Raises:
            OSError: EPERM: the `.acpfs` of a staging area, or of another backing directory.
        """
        path = self._view.path(parent) if name == HIDDEN else None
        if not path:
            return
        if await self._view.questions.call("staging area?", self._view.lower.is_staging_area, path):
            raise fail(errno.EPERM)

    def _check_reach(self, directory: Node, new_directory: Node) -> None:
        """A move from one file system to another, as far as is known: who would make it natively
        has to copy, too.
        """
        if directory is not new_directory:
            devices = {self._device(directory), self._device(new_directory)}
            if len(devices) > 1 and 0 not in devices:
                raise fail(errno.EXDEV)

    def _device(self, directory: Node) -> int:
        """What is not on the backing directory yet will be on the file system of what it lies
        in.
        """
        while not directory.lower_device and directory.names:
            directory = self._table[directory.names[0][0]]
        return directory.lower_device

    @staticmethod
    def check_vacant(parent: Node, name: bytes, ino: Ino) -> None:
        """That a name that leads to `ino` may be made in a directory; raises as `vacant`."""
        if parent.ino == ROOT and name == HIDDEN:
            raise fail(errno.EPERM)
        if len(name) > NAME_BYTES_MAX:
            raise fail(errno.ENAMETOOLONG)
        Names.check_present(parent)
        if ino:
            raise fail(errno.EEXIST)

    @staticmethod
    def check_present(directory: Node) -> None:
        """That names may still be made in a directory: what is logged in a removed one finds no
        place, and is tried again for ever.

        Raises:
            OSError: ENOENT when it is deleted.
        """
        if directory.is_removed:
            raise fail(errno.ENOENT)

    def new_node(self, parent: Node, mode: int, caller: Caller, hands_on: HandedOn) -> Node:
        """A node that belongs to the caller, and to the directory's group where that is set-gid.

        `hands_on`: the directory's default ACL.
        """
        gid = caller.gid
        if parent.mode & stat.S_ISGID:
            gid = parent.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        rights = hands_on.to_new(mode, caller.umask)
        node = self._table.new(rights.mode, caller.uid, gid)
        assert node.xattrs is not None
        node.xattrs.update(rights.acls)
        return node

    async def mkdir(self, parent_ino: Ino, name: bytes, mode: int, caller: Caller) -> Node:
        hands_on = await self._view.handed_on(self.node(parent_ino))
        parent = await self.vacant(parent_ino, name)
        node = self.new_node(parent, stat.S_IFDIR | stat.S_IMODE(mode), caller, hands_on)
        node.has_come_into(parent)
        parent.count_subdirectory(1)
        self._earlier.made(parent, name)
        return self._make(OpKind.MKDIR, parent, name, node)

    async def mknod(
        self, parent_ino: Ino, name: bytes, mode: int, rdev: int, caller: Caller
    ) -> Node:
        """Make a fifo, socket, device, or an empty regular file (complete at once)."""
        hands_on = await self._view.handed_on(self.node(parent_ino))
        parent = await self.vacant(parent_ino, name)
        node = self.new_node(parent, mode, caller, hands_on)
        node.rdev = rdev
        if not stat.S_ISREG(mode):
            return self._make(OpKind.MKNOD, parent, name, node)
        self.give_birth(parent, name, node)
        self._changes.freeze(node, quiet=True)
        node.lookups += 1
        return node

    async def symlink(self, parent_ino: Ino, name: bytes, target: bytes, caller: Caller) -> Node:
        parent = await self.vacant(parent_ino, name)
        node = self.new_node(parent, stat.S_IFLNK | 0o777, caller, HandedOn())
        node.target = target
        node.size = len(target)
        return self._make(OpKind.SYMLINK, parent, name, node, payload=target)

    def _make(
        self, kind: OpKind, parent: Node, name: bytes, node: Node, payload: bytes = b""
    ) -> Node:
        self._table.set_child(parent.ino, name, node.ino)
        meta = self._changes.metadata(node, everything=True)
        if kind is OpKind.MKNOD:
            meta.file_type = stat.S_IFMT(node.mode)
        self._changes.record(kind, node, parent.ino, name, meta=meta, payload=payload)
        self._touch(parent)
        node.lookups += 1
        return node

    def give_birth(self, parent: Node, name: bytes, node: Node) -> None:
        """A new regular file under a vacant name, empty and modified."""
        self._contents.create(node)
        self._changes.born(node, parent.ino, name)
        self._touch(parent)

    def _publish(self, node: Node, pid: int) -> None:
        """Fix the content of a file that gets another name, unless a process that is not the
        thread's own is in the middle of it.

        Who writes a file, and names it, says that it is good. Where somebody else names it, its
        older version takes part in that, as that of a half does.
        """
        if node.kernel_writers:
            self._contents.kernel.look(node)
        self._closes.fix_unless_another_writes(node, pid)

    async def link(self, ino: Ino, parent_ino: Ino, name: bytes, pid: int = 0) -> Node:
        """Give a node another name; `pid`: the thread that does; 0: it cannot be told."""
        node = self.node(ino)
        await self._view.renew(node)
        parent = await self.vacant(parent_ino, name)
        if node.is_dir:
            raise fail(errno.EPERM)
        await self._closes.before_names_change(node, pid)
        if not self._view.lower.features.hard_links:
            raise fail(errno.EPERM)
        if node.names:
            self._check_reach(self._table[node.names[0][0]], parent)
        if not node.names:
            if not node.unlogged:
                raise fail(errno.ENOENT)
            self._changes.born(node, parent.ino, name)  # O_TMPFILE gets its first name
            self._publish(node, pid)
        else:
            self._publish(node, pid)
            if node.unlogged:
                self._changes.born(node, parent.ino, name)  # a half: its names are logged with it
            else:
                self._pointers.bring(node, *node.names[0], name)
                self._table.set_child(parent.ino, name, node.ino)
                self._changes.record(OpKind.LINK, node, parent.ino, name)
        self._table.touch(node, mtime=False)
        self._table.changed(node)
        self._touch(parent)
        node.lookups += 1
        return node

    def _touch(self, directory: Node) -> None:
        self._table.touch(directory)
        self._view.ahead.made_a_name_in(directory)
        self._table.changed(directory)

    # -- removing

    async def unlink(self, parent_ino: Ino, name: bytes) -> None:
        """Remove a name of anything but a directory."""
        parent = self.node(parent_ino)
        node = None
        while node is None or not self._leads_to(parent, name, node):
            node = await self.existing(parent, name)
            if node.is_dir:
                raise fail(errno.EISDIR)
            await self._view.nameless.before_removal(node)
            await self._closes.before_names_change(node)
        if node.unlogged:
            self._changes.forget_birth(parent.ino, name)
        else:
            self._table.set_child(parent.ino, name, NO_INO)
            self._changes.record(OpKind.UNLINK, node, parent.ino, name)
        self._touch(parent)
        self._lost_name(node)

    def _leads_to(self, parent: Node, name: bytes, node: Node | None) -> bool:
        """Whether a name still leads to what was found there before a wait; None: to nothing.

        The kernel lets nobody here change it meanwhile, but what another member has put there may
        have been found since.
        """
        child = parent.dir.children.get(name)
        found = child.ino if child is not None else NO_INO
        return found == (NO_INO if node is None else node.ino)

    def _lost_name(self, node: Node) -> None:
        self._table.touch(node, mtime=False)
        self._table.changed(node)
        self._changes.let_go_of_half(node)
        self._view.reap(node)

    async def rmdir(self, parent_ino: Ino, name: bytes) -> None:
        parent = self.node(parent_ino)
        node = None
        while node is None or not self._leads_to(parent, name, node):
            node = await self.existing(parent, name)
            await self._check_empty(node)
        self._table.set_child(parent.ino, name, NO_INO)
        self._changes.record(OpKind.RMDIR, node, parent.ino, name)
        parent.count_subdirectory(-1)
        self._touch(parent)
        self._table.changed(node)

    async def _check_empty(self, node: Node) -> None:
        if not node.is_dir:
            raise fail(errno.ENOTDIR)
        if await self._view.names(node):
            raise fail(errno.ENOTEMPTY)

    # -- moving

    async def rename(
        self,
        parent_ino: Ino,
        name: bytes,
        new_parent_ino: Ino,
        new_name: bytes,
        flags: int,
        pid: int = 0,
    ) -> None:
        """Move a name, with RENAME_NOREPLACE and RENAME_EXCHANGE; `pid`: as `link` has it."""
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE):
            raise fail(errno.EINVAL)
        parent = self.node(parent_ino)
        new_parent = self.node(new_parent_ino)
        if new_parent.ino == ROOT and new_name == HIDDEN:
            raise fail(errno.EPERM)
        if len(new_name) > NAME_BYTES_MAX:
            raise fail(errno.ENAMETOOLONG)
        self._check_reach(parent, new_parent)
        await self.check_own(new_parent, new_name)
        look = self.taken_by if flags & RENAME_NOREPLACE else self._view.child
        node = None
        target = None
        while node is None or not (
            self._leads_to(parent, name, node) and self._leads_to(new_parent, new_name, target)
        ):
            node = await self.existing(parent, name)
            target_ino = await look(new_parent, new_name)
            target = self._table[target_ino] if target_ino else None
            if target is not node:
                await self._before_move(node, target, flags, pid)
        self.check_present(new_parent)  # the kernel knows only what was removed through this mount
        if flags & RENAME_EXCHANGE:
            if target is not None and target is not node:
                self._publish(node, pid)
                self._publish(target, pid)
                self._pointers.bring(node, parent.ino, name, new_name)
                self._pointers.bring(target, new_parent.ino, new_name, name)
            self._exchange(parent, name, node, new_parent, new_name, target)
        elif target is node:
            return  # two links of one file: POSIX says that nothing happens
        else:
            self._publish(node, pid)  # what is still being written carries its data along
            self._pointers.bring(node, parent.ino, name, new_name)
            self._move(parent, name, node, new_parent, new_name, target)

    async def _before_move(self, node: Node, target: Node | None, flags: int, pid: int) -> None:
        exchanges = bool(flags & RENAME_EXCHANGE)
        if not exchanges:
            await self._check_replaceable(node, target, flags)
        elif target is None:
            return
        await self._closes.before_names_change(node, pid)
        if target is not None:
            await self._closes.before_names_change(target, pid if exchanges else 0)

    async def _check_replaceable(self, node: Node, target: Node | None, flags: int) -> None:
        if target is None:
            return
        if flags & RENAME_NOREPLACE:
            raise fail(errno.EEXIST)
        if node.is_dir:
            await self._check_empty(target)
        elif target.is_dir:
            raise fail(errno.EISDIR)
        else:
            await self._view.nameless.before_removal(target)

    def _move(
        self,
        parent: Node,
        name: bytes,
        node: Node,
        new_parent: Node,
        new_name: bytes,
        target: Node | None,
    ) -> None:
        if target is not None and target.unlogged:
            self._changes.replaced_birth(new_parent.ino, new_name)
        if node.unlogged:
            self._changes.move_birth(node, parent.ino, name, new_parent.ino, new_name, target)
        else:
            self._log_move(
                node,
                parent,
                name,
                new_parent,
                new_name,
                self._changes.replaces(new_parent.ino, new_name, target),
            )
        self._moved_directory(node, parent, new_parent)
        if target is not None:
            if target.is_dir:
                new_parent.count_subdirectory(-1)
            self._lost_name(target)
        self._finish_move(node, parent, new_parent)

    def _log_move(
        self, node: Node, parent: Node, name: bytes, new_parent: Node, new_name: bytes, victim: Ino
    ) -> None:
        self._table.set_child(parent.ino, name, NO_INO)
        self._table.set_child(new_parent.ino, new_name, node.ino)
        self._changes.record(
            OpKind.RENAME,
            node,
            parent.ino,
            name,
            new_parent=new_parent.ino,
            new_name=new_name,
            victim=victim,
        )

    def _exchange(
        self,
        parent: Node,
        name: bytes,
        node: Node,
        new_parent: Node,
        new_name: bytes,
        target: Node | None,
    ) -> None:
        if target is None:
            raise fail(errno.ENOENT)
        if target is node:
            return
        if node.unlogged or target.unlogged:
            self._exchange_halves(parent, name, node, new_parent, new_name, target)
        else:
            self._table.set_child(parent.ino, name, target.ino)
            self._table.set_child(new_parent.ino, new_name, node.ino)
            self._changes.record(
                OpKind.EXCHANGE,
                node,
                parent.ino,
                name,
                new_parent=new_parent.ino,
                new_name=new_name,
                victim=target.ino,
            )
        self._moved_directory(node, parent, new_parent)
        self._moved_directory(target, new_parent, parent)
        self._finish_move(target, parent, new_parent)
        self._finish_move(node, parent, new_parent)

    def _exchange_halves(
        self, parent: Node, name: bytes, node: Node, new_parent: Node, new_name: bytes, target: Node
    ) -> None:
        """One of them, or both, is a half that the backing directory has not heard of: there the
        other one just moves.
        """
        if not node.unlogged:
            node, parent, name, target, new_parent, new_name = (
                target,
                new_parent,
                new_name,
                node,
                parent,
                name,
            )
        self._changes.replaced_birth(parent.ino, name)
        if target.unlogged:
            self._changes.replaced_birth(new_parent.ino, new_name)
            self._changes.born(target, parent.ino, name)
        else:
            self._log_move(
                target,
                new_parent,
                new_name,
                parent,
                name,
                self._changes.replaces(parent.ino, name, node),
            )
        self._changes.born(node, new_parent.ino, new_name)

    @staticmethod
    def _moved_directory(node: Node, parent: Node, new_parent: Node) -> None:
        if node.is_dir and parent is not new_parent:
            parent.count_subdirectory(-1)
            new_parent.count_subdirectory(1)

    def _finish_move(self, node: Node, parent: Node, new_parent: Node) -> None:
        self._table.touch(node, mtime=False)
        self._table.changed(node)
        self._touch(parent)
        if new_parent is not parent:
            self._touch(new_parent)
