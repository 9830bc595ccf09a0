"""From changes of the upper tree to operations in the log, and back when they are persisted.

The one place that pins and unpins names. Used under the file system's lock; nothing here waits.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.filesystem.catalogue import Catalogue
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.durations import Durations
from acpfs.filesystem.known_names import Inquiry
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.op_paths import OperationPaths
from acpfs.filesystem.steps import Steps
from acpfs.filesystem.upper import UpperLayer
from acpfs.types import NO_INO, ROOT, Ino, Seq
from acpfs.writeback.log.lower_tree import Place
from acpfs.writeback.log.ops import Metadata, Op, OpKind, Version
from acpfs.writeback.log.stages import Step


class Changes:
    """Logs what the application did; implements `writeback.listener.Listener`."""

    def __init__(
        self,
        upper: UpperLayer,
        contents: Contents,
        view: LowerView,
        steps: Steps,
        catalogue: Catalogue,
        durations: Durations,
        paths: OperationPaths,
    ) -> None:
        """Pins what the log that the last worker left mentions."""
        self._now = upper.runtime.clock.now
        self._serial = upper.runtime.clock.serial
        table = upper.table
        self._table = table
        log = upper.log
        self._log = log
        self._contents = contents
        self._view = view
        self._steps = steps
        self._catalogue = catalogue
        self._durations = durations
        self._paths = paths
        self._in_doubt: list[tuple[set[Seq], Future[None]]] = []
        for op in log:
            self._pin(op)
            if op.kind is OpKind.MKNOD and not op.meta.file_type and op.ino in table:
                # an earlier acpfs lost it when the permissions were changed
                op.meta.file_type = stat.S_IFMT(table[op.ino].mode)
        for node in table:
            if node.unlogged:
                for parent, name in node.names:
                    table[parent].dir.children[name].pins += 1

    def _pin(self, op: Op) -> None:
        for parent, name in op.touches():
            directory = self._table.get(parent)
            if directory is not None:
                child = directory.dir.children.get(name) or self._table.set_child(
                    parent, name, NO_INO
                )
                child.pins += 1

    # -- logging

    def born(self, node: Node, parent: Ino, name: bytes) -> None:
        """A regular file was created: its name is pinned until its first STORE takes over."""
        self._table.set_child(parent, name, node.ino).pins += 1
        self._catalogue.born(node)

    def record(self, kind: OpKind, node: Node, parent: Ino, name: bytes, **fields: Any) -> Op:
        """Log an operation on a name; the upper tree has been changed already."""
        creates = node.unlogged
        moved = [node, self._table[fields["victim"]]] if kind is OpKind.EXCHANGE else [node]
        for one in moved:
            self.rely_on(one)
        op = self._log.append(
            kind,
            node.ino,
            creates=creates,
            parent=parent,
            name=name,
            logged_at=self._log.clock.now(),
            **fields,
        )
        self._pin(op)
        self._table.needed(node)
        victim = self._table.get(op.victim)
        if victim is not None:
            self._table.needed(victim)
        if creates:
            node.unlogged = False
            self._table.changed(node)
        for one in moved:
            self._catalogue.logged(op, one)
        if kind in (OpKind.RENAME, OpKind.EXCHANGE) and any(one.is_dir for one in moved):
            self._contents.retention.order.refile()
        return op

    def metadata(self, node: Node, *, everything: bool) -> Metadata:
        """The node's attributes as an operation carries them; `everything`: with its xattrs (for a
        new node).
        """
        return Metadata(
            permissions=stat.S_IMODE(node.mode),
            uid=node.uid,
            gid=node.gid,
            atime_ns=node.atime_ns,
            mtime_ns=node.mtime_ns,
            rdev=node.rdev,
            xattrs=dict(node.xattrs or {}) if everything else {},
        )

    def change_metadata(self, node: Node, meta: Metadata, former_mode: int | None = None) -> None:
        """Log a change of attributes, or fold it into what is logged already.

        `former_mode`: what the node had before, where its mode was changed.
        """
        self._table.changed(node)
        if node.unlogged or self._log.fold(node.ino, meta) or (node.is_removed and not node.is_dir):
            return
        kind = OpKind.SETXATTR if meta.xattrs else OpKind.SETATTR
        former = node.mode if former_mode is None else former_mode
        payload = b"%o" % stat.S_IMODE(former) if node.is_dir else b""
        self._log.append(
            kind, node.ino, meta=meta, payload=payload, logged_at=self._log.clock.now()
        )

    def freeze(self, node: Node, *, quiet: bool = False) -> Op | None:
        """Fix the file's content as it is now in the order of operations; None when there is
        nothing to fix.

        What the kernel has written until now is a part of it, whoever asked for it to be fixed.
        A half (`interrupted`, or with a write that failed) is not fixed by anything but a decision,
        whatever is done to its names. Where somebody may have the file open, and says that it is
        good, `DoubtfulCloses.fix` calls it: who wrote is at the file no more then. `quiet`: the
        kernel holds the inode's lock until the call is answered, so that nobody is writing in the
        passthrough lane.
        """
        if node.kernel_writers:
            self._contents.kernel.look(node)
        body = node.body
        if not body.modified or body.failed or body.interrupted or not node.names:
            return None
        for op in self._log.unsealed_of(
            node.ino
        ):  # its bytes are those that the staging file will have
            body.frozen()
            node.versions += 1
            self._log.fold(node.ino, self.metadata(node, everything=False))
            self._table.changed(node)
            return op
        parent, name = node.names[0]
        first = node.unlogged
        meta = self.metadata(node, everything=first)
        version = self._contents.freeze(node, quiet=quiet)
        node.versions += 1
        below = self._view.beneath.uncover((parent, name)) if first else None
        victim = below.ino if below is not None else NO_INO
        op = self.record(
            OpKind.STORE, node, parent, name, version=version, meta=meta, victim=victim
        )
        if body.is_outgrown:
            op.take(Step.OUTGROWN)
        if first:
            self._unpin_name(parent, name)
            for parent, name in node.names[1:]:  # that it was given as a half
                self._end_beneath(parent, name)
                self.record(OpKind.LINK, node, parent, name)
                self._unpin_name(parent, name)
        return op

    def confirm(self, op: Op) -> None:
        """The last close of the descriptor has come, or somebody relies on the first."""
        if op.tentative:
            op.take(Step.CONFIRMED)
            self._log.on_append(op)
            self._known(op)

    def rely_on(self, node: Node) -> None:
        """What was logged of the node last stays, whatever becomes of the descriptor that was
        closed.
        """
        last = self._log.last_but_attributes_of(node.ino)
        if last is not None:
            self.confirm(last)

    def withdraw(self, op: Op) -> None:
        """The descriptor that was closed is still open elsewhere and was written to: what was
        closed was not complete.

        Changes of attributes that were logged behind it go with it: the node has them, and the next
        STORE gives them to the file. No reader more gets the older content by that; who was to read
        it no more does not at once, since the next content may never come.
        """
        node = self._table.get(op.ino)
        if (
            not op.tentative
            or node is None
            or node.body.is_cold
            or op.version is None
            or self._log.last_but_attributes_of(op.ino) is not op
        ):
            self.confirm(op)
            return
        if (
            (op.parent, op.name) not in node.names
        ):  # deleted or replaced since: what did that needs the name to have been there
            self.confirm(op)
            return
        node.versions -= 1
        self._log.needs.give_back(op)
        behind = self._log.attributes_behind(op)
        created = self._log.withdraw(op)
        if created:
            for change in behind:
                self._log.withdraw(change)
        self._known(op)
        if created:
            node.unlogged = True
            if op.victim:
                self._view.beneath.cover((op.parent, op.name), self._table[op.victim])
            self._table.set_child(op.parent, op.name, node.ino).pins += 1
        self._unpin_name(op.parent, op.name)
        self._contents.withdrawn(node, op.version)
        self._table.changed(node)
        if not created:
            self._keep_for_older(node, op, behind)

    def _keep_for_older(self, node: Node, op: Op, behind: list[Op]) -> None:
        """What was set behind a close that is taken back, and holds for the older content, too.

        It keeps its place: what was logged since may have been made for fewer than could read the
        file before, and who waits for it is told when the storage has it.
        """
        xattrs = dict(op.meta.xattrs)
        had = op.meta  # as of the older content: see `OperationLog.fold`
        for change in behind:
            xattrs.update(change.meta.xattrs)
            narrowed = change.meta.narrowed_from(had)
            has_others = narrowed.gives_rights(had)
            if not has_others and not xattrs:
                self._log.withdraw(change)
                continue
            had = narrowed
            # the rest goes with the next STORE anyway
            change.meta = replace(narrowed if has_others else Metadata(), xattrs=xattrs)
            xattrs = {}
            self._log.save(change)
        if xattrs:  # they were folded into the close
            self.change_metadata(node, Metadata(xattrs=xattrs))
            self._log.inherit(op, self._log.last_of(node.ino))

    def let_go_of_half(self, node: Node) -> None:
        """A name of the node, or a descriptor, is gone: if it was the last one, nobody waits for
        what will never be whole.

        A file that outgrew RAM and was given its place while it was open has bytes for that place
        with its last close, or when a person decides. Whose writer was killed is closed by nobody,
        and what has no name is found by nobody. So its place goes with it: else all that is behind
        it would wait for ever. To be called before the node's bytes go: a next worker would take
        what is in its staging file for all.
        """
        if node.names or node.open_writers or not self._is_left_as_half(node):
            return
        for op in self._log.unsealed_of(node.ino):
            if not op.tentative:  # else its RELEASE is under way, and says what it is
                self._log.withdraw(op)
                self.dropped(op)

    @staticmethod
    def _is_left_as_half(node: Node) -> bool:
        """Whether nobody who writes to the file will close it; of one that was closed the rest
        follows by itself.
        """
        body = node.body
        return bool(body.interrupted or body.failed or (body.modified and not node.handles))

    def closes_known(self, ops: Iterable[Op]) -> Future[None]:
        """Done when each of the closes among `ops` turned out to be its descriptor's last one, or
        not.

        Who wants all that was closed must wait for it: the last close may find bytes that the first
        could not see (a shared mapping leaves no trace), and then takes the STORE back and logs
        another, behind the place in the log where it was. Wait for it in another thread: what goes
        on at once, in the step of the last close, is too early for the other STORE.
        """
        known: Future[None] = Future()
        doubtful = {op.seq for op in ops if op.tentative}
        if doubtful:
            self._in_doubt.append((doubtful, known))
        else:
            known.set_result(None)
        return known

    def awaited_closes(self) -> set[Seq]:
        """Closes that somebody waits to know."""
        return {seq for doubtful, _known in self._in_doubt for seq in doubtful}

    def _known(self, op: Op) -> None:
        if not self._in_doubt:  # nobody waits for any
            return
        for doubtful, known in self._in_doubt:
            doubtful.discard(op.seq)
            if not doubtful:
                known.set_result(None)
        self._in_doubt = [pair for pair in self._in_doubt if pair[0]]

    def forget_birth(self, parent: Ino, name: bytes) -> None:
        """A never logged file loses its name, and what that had replaced goes with it."""
        self._end_birth(parent, name)
        self._end_beneath(parent, name)

    def _end_birth(self, parent: Ino, name: bytes) -> None:
        node = self._table[self._table[parent].dir.children[name].ino]
        self._table.set_child(parent, name, NO_INO)
        self._unpin_name(parent, name)
        self._catalogue.forgotten(node)

    def _end_beneath(self, parent: Ino, name: bytes) -> None:
        below = self._view.beneath.uncover((parent, name))
        if below is not None:
            self.record(OpKind.UNLINK, below, parent, name)

    def move_birth(
        self,
        node: Node,
        parent: Ino,
        name: bytes,
        new_parent: Ino,
        new_name: bytes,
        target: Node | None,
    ) -> None:
        """A never logged file that cannot be fixed (a half) gets another name: nobody needs to
        know. What it replaces stays beneath it.
        """
        if target is not None and not target.unlogged:
            self._view.beneath.cover((new_parent, new_name), target)
        self.forget_birth(parent, name)
        self.born(node, new_parent, new_name)

    def replaced_birth(self, parent: Ino, name: bytes) -> None:
        """A never logged file was replaced by a rename: its own pin goes."""
        self._unpin_name(parent, name)

    def replaces(self, parent: Ino, name: bytes, target: Node | None) -> Ino:
        """Of a name that is about to lead to a file that was logged: what that replaces on the
        backing directory.
        """
        if target is not None and not target.unlogged:
            return target.ino
        below = self._view.beneath.uncover((parent, name))
        return NO_INO if below is None else below.ino

    def _unpin_name(self, parent: Ino, name: bytes) -> None:
        directory = self._table.get(parent)
        child = directory.dir.children.get(name) if directory is not None else None
        if child is not None:
            assert child.pins > 0, (parent, name)
            child.pins -= 1
            child.checked_at = self._now()
            child.checked = self._serial()
            child.settled = child.checked
            if not child.pins and not child.ino:
                self._table.name_changed(parent, name)
                self._table.known_absent(parent, name)

    def discard(self, node: Node) -> None:
        """Drop a content that is not to be stored: what it was before, if anything, is shown again.

        Raises:
            OSError: EBUSY: it is open.
        """
        if node.handles:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        for op in self._log.unsealed_of(
            node.ino
        ):  # its place in the order goes with the bytes: what is behind must not wait for them
            op.last_error = errno.EIO
            self._log.park(op)
        if self._back_to_last(node):
            return
        if node.unlogged:
            for parent, name in list(node.names):
                self._end_birth(parent, name)
                self._bring_up_beneath(parent, name)
        if node.identity is not None:
            # As it was seen there last: as long as the log has something of the node, nobody asks
            # what it is now.
            _number, node.size, node.mtime_ns, _ctime = node.identity
            self._date_back(node, Seq(0))
        node.identity = None
        self._table.ask_anew(node)
        self._view.reap(node)

    def _back_to_last(self, node: Node) -> bool:
        """Show what was complete last; whether that is on its way to the backing directory."""
        last = self._contents.go_back(node)
        if last is None:
            return False
        self._date_back(node, last.seq)
        self._table.touch(node, mtime=False)
        self._give_rights_to_last(node)
        if self._contents.differs_from_staged(last):
            self._contents.dirtied(node)
            self.freeze(node)
        return True

    def _give_rights_to_last(self, node: Node) -> None:
        """Those that were to come with the half, and are shown: see `withdraw`."""
        logged = Metadata()
        for op in self._log.pending_of(node.ino):
            logged.merge(op.meta)
        shown = Metadata(permissions=stat.S_IMODE(node.mode), uid=node.uid, gid=node.gid)
        if shown.gives_rights(logged):
            self.change_metadata(node, shown)

    def _date_back(self, node: Node, since: Seq) -> None:
        """Its time is what the operations from that one on say last."""
        for op in self._log.pending_of(node.ino):
            if op.seq >= since and not op.unsealed and op.meta.mtime_ns is not None:
                node.mtime_ns = op.meta.mtime_ns
                self._table.changed(node)

    def _bring_up_beneath(self, parent: Ino, name: bytes) -> None:
        below = self._view.beneath.uncover((parent, name))
        if below is not None:
            self._table.set_child(parent, name, below.ino)
            self._table.ask_anew(below)
            if below.body.is_cold:
                self._back_to_last(below)
            self._table.changed(below)

    # -- Listener

    def persisted(self, op: Op, stat: LowerStat | None) -> None:
        node = self._table.get(op.ino)
        if node is not None:
            if stat is not None:
                self._table.bind_lower(node, stat)
                node.checked_at = self._now()
                node.checked = self._serial()
            elif op.kind in (OpKind.UNLINK, OpKind.RMDIR) and not self._view.on_backing(op.ino):
                self._table.unbind_lower(node)
            if op.kind is OpKind.MKDIR:
                self._is_made(node)
        if op.kind is OpKind.STORE:
            self._durations.persist.observe(self._log.clock.now() - op.logged_at)
        self._done(op)
        if node is not None and op.kind is OpKind.STORE and op.ino in self._table:
            if stat is not None and node.body.is_only_backing and not self._log.pending_of(op.ino):
                node.size = stat.size  # an earlier acpfs may have known less than was written
            self._contents.stored(node)
        self._catalogue.done(op, persisted=True)

    def _is_made(self, directory: Node) -> None:
        """Nobody else has put anything into it, where nobody else lives.

        Else another member may have made it, too: what is known is no younger than the last answer.
        """
        if not self._view.peers.others:
            now = Inquiry(self._now(), self._serial())
            self._table.listed(directory, directory.dir.listing, now)
        elif directory.dir.listed_at < 0:
            self._table.listed(directory, {}, Inquiry(0.0, 0))

    def dropped(self, op: Op) -> None:
        self._forget_unmade(op)
        keeps = op.version is not None and self._contents.keeps_staging(op.version)
        self._done(op, keeps_bytes=keeps)
        self._catalogue.done(op, persisted=False)

    def superseded(self, op: Op, given_up: list[Op], former: Place | None) -> None:
        self._forget_name(op, may_lead_nowhere=True)
        node = self._table.get(op.ino)
        directory = self._table.get(former[0]) if former is not None else None
        if former is None or node is None or directory is None:
            return
        child = directory.dir.children.get(former[1])
        pins = sum(place == former for one in given_up for place in one.touches())
        if child is None or (not child.ino and child.pins <= pins):  # else it was made anew
            self._table.set_child(*former, NO_INO)
            self.record(OpKind.UNLINK, node, *former)

    def _forget_unmade(self, op: Op) -> None:
        """A link or special file that was given up before it was there is none that others make
        under its name.

        What it leads to, or is, was fixed when it was made, and is not read again, as a file's
        bytes and attributes are. So whatever is found under the name is something else: with no
        inode number yet, this one would be taken for it (`Recognition.node`).
        """
        node = self._table.get(op.ino)
        if node is None or node.lower_ino:
            return
        if not (stat.S_ISREG(node.mode) or node.is_dir):
            self._forget_name(op)

    def _forget_name(self, op: Op, *, may_lead_nowhere: bool = False) -> None:
        """Nothing that is known of it here is so any more: a link of another target, say, would be
        taken for this one.

        Its pin is the operation's own. Others are of operations that made the name before, as
        nothing later has it lead elsewhere: it leads nowhere until they are done.

        `may_lead_nowhere`: what came after it under the name was forgotten first.
        """
        parent, name = op.touches()[-1]
        directory = self._table.get(parent)
        child = directory.dir.children.get(name) if directory is not None else None
        if child is None or child.ino not in (op.ino, *[NO_INO] * may_lead_nowhere):
            return
        node = self._table.get(child.ino)
        if child.pins > 1:
            self._table.set_child(parent, name, NO_INO)
        else:
            self._table.unname(parent, name)
        if node is not None and node.lookups:
            self._view.notices.lost(parent, name, node.ino)

    def _done(self, op: Op, *, keeps_bytes: bool = False) -> None:
        for parent, name in op.touches():
            self._unpin_name(parent, name)
        if op.version is not None and keeps_bytes:
            self._contents.keep_overflowed(op.version)
        elif op.version is not None:
            self._contents.finished(op.version)
        for ino in (op.ino, op.victim, op.parent, op.new_parent):
            node = self._table.get(ino)
            if node is not None:
                node.settled = self._serial()
                if node.is_file:
                    self._contents.retention.settle(node)
                self._view.reap(node)
        if op.version is not None:
            self._contents.settled()

    def set_aside(self, op: Op) -> None:
        node = self._table.get(op.ino)
        if node is not None and node.is_file:
            self._contents.retention.settle(node)
        self._catalogue.done(op, persisted=True)

    def permissions_of(self, directory: Ino) -> int | None:
        node = self._table.get(directory)
        return None if node is None or not node.is_dir else stat.S_IMODE(node.mode)

    def directory_times(self, ino: Ino) -> tuple[int, int] | None:
        node = self._table.get(ino)
        return None if node is None else (node.atime_ns, node.mtime_ns)

    def directory_settled(self, ino: Ino, stat: LowerStat) -> None:
        node = self._table.get(ino)
        if node is not None and not self._log.pending_in(ino):
            self._table.bind_lower(node, stat)
            node.checked_at = self._now()
            node.checked = self._serial()
            node.settled = node.checked

    def display_path(self, op: Op) -> bytes:
        return self._paths.named(op)

    def still_frozen(self, version: Version) -> bool:
        return self._contents.still_frozen(version)

    def is_changing(self, version: Version) -> bool:
        return self._contents.kernel.is_changing(version)

    def when_still(self, version: Version) -> Future[Any] | None:
        return self._contents.kernel.when_still(version)

    def held_up_by(self, version: Version) -> int | None:
        if not self.is_changing(version):
            return None
        node = self._table.get(version.ino)
        return 0 if node is None else node.writer_pid

    def may_have_changed(self, version: Version) -> bool:
        return version.is_local and self._contents.kernel.may_have_changed(version)

    def restaged(self, version: Version, before: str) -> None:
        self._contents.restaged(version, before)

    def unstaged(self, version: Version) -> None:
        self._contents.unstaged(version)

    def left_as(self, ino: Ino) -> tuple[int, int, int, int] | None:
        return self._table.left_as(ino)

    def keeps_staging(self, version: Version) -> bool:
        return self._contents.keeps_staging(version)

    def staging_in_use(self) -> set[str]:
        return self._contents.staging_in_use()

    def idle_s(self) -> float:
        return self._now() - self._steps.last_at

    def is_writing(self) -> bool:
        return self._contents.writers > 0

    def only_appended(self, version: Version) -> bool:
        return self._contents.kernel.only_appended(version)

    def version_of_open_file(self, version: Version) -> bool:
        node = self._table.get(version.ino)
        return node is not None and node.handles > 0

    def is_interrupted(self, ino: Ino) -> bool:
        node = self._table.get(ino)
        return node is not None and node.body.interrupted

    def is_directory(self, ino: Ino) -> bool:
        node = self._table.get(ino)
        return node is not None and node.is_dir

    def directory_of(self, ino: Ino) -> Ino:
        node = self._table.get(ino) if ino != ROOT else None
        return node.names[0][0] if node is not None and node.names else NO_INO

    def path_of(self, ino: Ino) -> bytes:
        return self._table.path(ino)

    def is_settled(self, path: LowerPath) -> bool:
        node: Node | None = self._table[ROOT]
        for name in path:
            child = node.dir.children.get(name) if node is not None and node.is_dir else None
            node = self._table.get(child.ino) if child is not None else None
        return node is None or all(self._is_settled(one) for one in self._table.tree(node))

    def _is_settled(self, node: Node) -> bool:
        if (
            node.unlogged
            or node.body.modified
            or any(not self._log.is_aside(op) for op in self._log.pending_of(node.ino))
        ):
            return False
        if self._log.is_victim(node.ino):
            return False  # of an exchange: it is not under this name yet
        return node.is_dir or not (node.handles and self._contents.writers)
