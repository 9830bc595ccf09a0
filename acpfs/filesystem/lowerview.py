"""What the backing directory has, as far as the file system needs to know it, and how old that knowledge is.

The only place of the file system that asks the lower layer about names and attributes. Knowledge is good for `attr_timeout_s`;
older knowledge is renewed, and used as it is when the backing directory does not answer within `patience_s` ("absent" and
"not known" are different answers: only ENOENT means absent). Answers that a commit may have overtaken are asked for again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol, TypeVar

from acpfs.backing.attributes import signed_ino
from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower, LowerEntry, LowerPath, LowerStat, SpaceInfo
from acpfs.config import Settings
from acpfs.filesystem.contents import Contents
from acpfs.filesystem.nodes import Child, Node, NodeTable
from acpfs.filesystem.steps import wait
from acpfs.ram.tier import Tier
from acpfs.types import NO_INO, ROOT, Ino, TierId
from acpfs.writeback.log import OperationLog
from acpfs.writeback.lower_tree import LowerTree

COPY_UP_CHUNK_BYTES = 8 << 20

MISSES_MAX = 16
"""After so many questions about new names of one directory within `attr_timeout_s`, its listing is asked for instead: an lstat in a
thread of the pool costs 150 us of the interpreter, as much as the rest of creating a small file."""
LISTING_ENTRIES_MAX = 10_000
LISTING_BYTES_MAX = 512 << 10
"""Larger directories (by st_size, where nobody has listed them yet) are not listed for that: 10,000 entries take 10 ms on a local disk."""

HIDDEN = b".acpfs"
"""The one name in the backing directory's top that is acpfs' own."""

T = TypeVar("T")


class ReadHandle(Protocol):
    """An open file as far as reading from the backing directory goes."""

    node: Node
    lower_fd: int
    """Descriptor on the backing directory; -1: not open yet."""


@dataclass(frozen=True, slots=True)
class LowerViewStatistics:
    """How often old knowledge had to do."""

    stale_answers: int
    overtaken_answers: int


class LowerView:
    """Lookups in the lower layer, turned into nodes."""

    def __init__(
        self,
        settings: Settings,
        lower: Lower,
        calls: CallPool,
        tree: LowerTree,
        log: OperationLog,
        table: NodeTable,
        contents: Contents,
        tier: Tier,
        lock: RLock,
    ) -> None:
        """`calls`: threads for requests' calls on the backing directory."""
        self._settings = settings
        self.lower = lower
        self._calls = calls
        self._tree = tree
        self._log = log
        self._table = table
        self._contents = contents
        self._tier = tier
        self._lock = lock
        self._foreseen: dict[Ino, Future[None]] = {}
        self._stale_answers = self._overtaken_answers = 0
        self.tell_changed: Callable[[Ino], None] = lambda _ino: None
        """Called, under the lock, when others changed a node that the kernel knows."""
        self.tell_lost: Callable[[Ino, bytes, Ino], None] = lambda _parent, _name, _ino: None
        """Called, under the lock, when others removed a name (parent, name, node) that the kernel knows."""

    # -- asking

    async def call(self, label: str, function: Callable[..., T], *arguments: Any) -> T:
        """A call without which the request cannot go on.

        Raises:
            OSError: what the backing directory answered; EIO when it did not within `backing_timeout_s`.
        """
        future = self._calls.submit(label, function, *arguments)
        try:
            return await wait(self._calls.patient(future, self._settings.backing_timeout_s))
        except TimeoutError:
            raise OSError(errno.EIO, f"{label}: no answer from the backing directory") from None

    async def _renew(self, label: str, function: Callable[..., T], *arguments: Any, known: bool) -> T | None:
        """A call that renews knowledge; None: go on with what is known."""
        if not known:
            return await self.call(label, function, *arguments)
        future = self._calls.submit(label, function, *arguments)
        try:
            return await wait(self._calls.patient(future, self._settings.patience_s, when_stuck=0.0))
        except OSError:
            self._stale_answers += 1
            return None

    def _fresh(self, checked_at: float) -> bool:
        return time.monotonic() - checked_at < self._settings.attr_timeout_s

    def on_backing(self, ino: Ino) -> bool:
        """Whether the node has a place on the backing directory."""
        return ino in self._tree

    def held(self, node: Node) -> bool:
        """Whether the mount's own idea of the node is the right one, because the backing directory has yet to hear of it."""
        return node.unlogged or node.modified or self._log.is_pending(node.ino) or (node.is_dir and self._log.pending_in(node.ino) > 0)

    # -- names

    async def child(self, parent: Node, name: bytes) -> Ino:
        """The node that a name leads to, 0 for none."""
        if not parent.is_dir:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if parent.ino == ROOT and name == HIDDEN:
            return NO_INO
        listed = False
        while True:
            child = parent.dir.children.get(name)
            if self._settled(parent, name, child):
                return child.ino if child else NO_INO
            if not listed and (child is None or not child.ino) and self._is_worth_listing(parent):
                listed, parent.dir.misses = True, 0
                await self._list(parent)
                continue
            epoch = self._tree.epoch
            path = self._tree.path_at(parent.ino, name)
            assert path is not None
            known = child is not None or parent.dir.listed_at >= 0
            answer = await self._renew("lookup", self._lstat, path, known=known)
            if answer is None:
                return self._stale(parent, name)
            if self._overtaken(epoch):
                continue
            child = parent.dir.children.get(name)
            if child is None or not child.pins:
                self.learn(parent, name, answer[0])

    def _is_worth_listing(self, parent: Node) -> bool:
        """Whether so many new names are looked up that one listing saves many questions."""
        directory, now, keeps_s = parent.dir, time.monotonic(), self._settings.attr_timeout_s
        if now - directory.misses_since > keeps_s:
            directory.misses_since, directory.misses = now, 0
        directory.misses += 1
        return (
            directory.misses > MISSES_MAX
            and directory.listing_s < keeps_s / 10
            and (len(directory.listing) < LISTING_ENTRIES_MAX if directory.listed_at >= 0 else parent.size < LISTING_BYTES_MAX)
        )

    def _settled(self, parent: Node, name: bytes, child: Child | None) -> bool:
        """Whether the answer is known without asking."""
        if (child is not None and child.pins) or parent.ino not in self._tree:
            return True
        listed = self._fresh(parent.dir.listed_at)
        if child is not None:
            return self._fresh(child.checked_at) or (listed and not child.ino and name not in parent.dir.listing)
        return listed and name not in parent.dir.listing

    def _stale(self, parent: Node, name: bytes) -> Ino:
        """The answer by older knowledge."""
        child = parent.dir.children.get(name)
        if child is not None:
            return child.ino
        entry = parent.dir.listing.get(name)
        if entry is not None:
            raise OSError(errno.EIO, "listed, but the backing directory does not answer")
        return NO_INO

    def _overtaken(self, epoch: int) -> bool:
        """Whether a commit moved things while the question was under way."""
        overtaken = epoch % 2 == 1 or self._tree.epoch != epoch
        self._overtaken_answers += overtaken
        return overtaken

    def _lstat(self, path: LowerPath) -> tuple[LowerStat | None]:
        """In a one-tuple, so that None keeps meaning "no answer"."""
        try:
            return (self.lower.lstat(path),)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return (None,)
            raise

    def learn(self, parent: Node, name: bytes, st: LowerStat | None) -> Node | None:
        """Take over what the backing directory says about an unpinned name."""
        old = parent.dir.children.get(name)
        node = self._table.get(old.ino) if old is not None and old.ino else None
        if st is None:
            self._lost(parent, name, node)
        else:
            node = self._recognise(node, st)
            self._tree.add(node.ino, parent.ino, name)
            self._table.set_child(parent.ino, name, node.ino)
            self.compare(node, st)
        child = parent.dir.children.get(name) or self._table.set_child(parent.ino, name, NO_INO)
        child.checked_at = time.monotonic()
        return node if st is not None else None

    def _is_needed(self, node: Node) -> bool:
        """Whether operations still rely on a node's place: it was removed from outside, and the drain will make it again."""
        if self.held(node):
            return True
        below = node.dir.children.values() if node.is_dir else ()
        return any(child.ino and self._is_needed(self._table[child.ino]) for child in below)

    def _lost(self, parent: Node, name: bytes, node: Node | None) -> None:
        if node is not None and self._is_needed(node):
            return
        self._tree.remove(parent.ino, name)
        self._table.set_child(parent.ino, name, NO_INO)
        if node is not None and node.lookups:
            self.tell_lost(parent.ino, name, node.ino)
        if node is not None and not self.held(node):
            node.nlink = max(0, node.nlink - 1) if not node.is_dir else 0
            if not node.names:
                self._table.unbind_lower(node)
            self.reap(node)

    def _recognise(self, node: Node | None, st: LowerStat) -> Node:
        """The node that an entry of the backing directory is: the one known under the name, under the inode number, or a new one."""
        same_kind = node is not None and stat.S_IFMT(node.mode) == stat.S_IFMT(st.mode)
        if node is not None and same_kind and (node.lower_ino in (0, st.ino) or node.is_dir):
            return node
        other = self._table.by_lower(st.ino)
        if other is not None and stat.S_IFMT(other.mode) == stat.S_IFMT(st.mode):
            return other
        return self._table.found(st)

    def compare(self, node: Node, st: LowerStat) -> None:
        """Take over attributes where the backing directory's entry is not what it was; outdated content leaves RAM."""
        node.checked_at = time.monotonic()
        if self.held(node) or node.identity == st.identity():
            return
        if node.is_file and node.content is not None:
            self._contents.drop(node)
        if node.identity is None or node.identity[:3] != st.identity()[:3]:
            node.keep_cache = False
        node.xattrs = None
        node.adopt(st)
        self._table.bind_lower(node, st)
        if node.lookups:
            self.tell_changed(node.ino)

    # -- attributes

    async def renew(self, node: Node) -> None:
        """Make sure that the node's attributes are not older than allowed.

        Raises:
            OSError: ENOENT when the node is gone from the backing directory.
        """
        while not (self.held(node) or self._fresh(node.checked_at)):
            epoch = self._tree.epoch
            path = self._tree.path(node.ino)
            if path is None:
                return  # deleted, but still open
            answer = await self._renew("getattr", self._lstat, path, known=True)
            if answer is None:
                return
            if self._overtaken(epoch):
                continue
            if answer[0] is None or stat.S_IFMT(answer[0].mode) != stat.S_IFMT(node.mode):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            if node.lower_ino not in (0, answer[0].ino) and not node.is_dir:
                parent, name = self._tree.places(node.ino)[0]
                self.learn(self._table[parent], name, answer[0])
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # replaced: the kernel looks the name up again
            self.compare(node, answer[0])

    async def load_xattrs(self, node: Node) -> dict[bytes, bytes]:
        """The node's extended attributes."""
        while node.xattrs is None:
            epoch = self._tree.epoch
            path = self._tree.path(node.ino)
            if path is None:
                node.xattrs = {}
                break
            xattrs = await self.call("xattrs", self.lower.xattrs, path)
            if not self._overtaken(epoch) and node.xattrs is None:
                node.xattrs = xattrs
        return node.xattrs

    async def peek_xattrs(self, node: Node) -> dict[bytes, bytes]:
        """The node's extended attributes, or none when they are not known and the backing directory does not answer soon."""
        future = self.foresee_xattrs(node)
        if future is not None:
            with contextlib.suppress(OSError):
                await wait(self._calls.patient(future, self._settings.patience_s, when_stuck=0.0))
        return node.xattrs or {}

    def foresee_xattrs(self, node: Node) -> Future[None] | None:
        """Begin to load a node's extended attributes, if they are not known; None: nothing to wait for."""
        if node.xattrs is not None:
            return None
        path = self._tree.path(node.ino)
        if path is None:
            return None
        future = self._foreseen.get(node.ino)
        if future is None:
            future = self._foreseen[node.ino] = self._calls.submit("xattrs", self._foresee_xattrs, node, path, self._tree.epoch)
        return future

    def _foresee_xattrs(self, node: Node, path: LowerPath, epoch: int) -> None:
        try:
            xattrs = self.lower.xattrs(path)
            with self._lock:
                if not self._overtaken(epoch) and node.xattrs is None:
                    node.xattrs = xattrs
        finally:
            with self._lock:
                del self._foreseen[node.ino]

    async def load_target(self, node: Node) -> bytes:
        """Where a symlink points."""
        if not node.target:
            path = self._tree.path(node.ino)
            if path is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            node.target = await self.call("readlink", self.lower.readlink, path)
        return node.target

    # -- bytes of files that are not in RAM

    def path(self, node: Node) -> LowerPath | None:
        """Where the node lies on the backing directory now."""
        return self._tree.path(node.ino)

    async def read(self, handle: ReadHandle, offset: int, size: int) -> bytes:
        """Read from the backing directory through the handle's own descriptor, opened at the first read."""
        if handle.lower_fd < 0:
            fd = await self.open_lower(handle.node)
            if handle.lower_fd < 0:
                handle.lower_fd = fd
            else:
                self.close_later(fd)  # two first reads met
        return await self.call("read", os.pread, handle.lower_fd, size, offset)

    async def open_lower(self, node: Node) -> int:
        """A descriptor of the node's file on the backing directory."""
        while True:
            epoch, path = self._tree.epoch, self._tree.path(node.ino)
            if path is None:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            fd = await self.call("open", self.lower.open_read, path)
            if not self._overtaken(epoch) and signed_ino(os.fstat(fd).st_ino) == node.lower_ino:
                return fd
            self.close_later(fd)
            if self._overtaken(epoch):
                continue
            if node.content is not None or self.held(node):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            node.checked_at = 0.0
            await self.renew(node)  # another file lies there by now: ESTALE, and the kernel looks the name up again

    def close_later(self, fd: int) -> None:
        """Close a descriptor of the backing directory; close may hang too."""
        self._calls.submit("close", os.close, fd)

    async def read_up(self, path: LowerPath, tier_id: TierId, size: int) -> LowerStat:
        """Copy the first `size` bytes of a file into a tier file; returns the entry as it was while it was read."""
        return await self.call("copy up", self._read_up, path, tier_id, size)

    def _read_up(self, path: LowerPath, tier_id: TierId, size: int) -> LowerStat:
        before = self.lower.lstat(path)
        source, target = self.lower.open_read(path), self._tier.open(tier_id)
        try:
            done = 0
            while done < size:
                data = os.pread(source, min(COPY_UP_CHUNK_BYTES, size - done), done)
                if not data:
                    break
                done += os.pwrite(target, data, done)
            os.utime(target, ns=(before.atime_ns, before.mtime_ns))
        finally:
            os.close(source)
            os.close(target)
        if done < size or self.lower.lstat(path).identity() != before.identity():
            raise OSError(errno.EIO, "the file changed on the backing directory while it was read")
        return before

    # -- directories

    async def names(self, parent: Node) -> dict[bytes, LowerEntry | Ino]:
        """All names in a directory: with the node's number where one is known, else with what the listing said."""
        directory = parent.dir
        while parent.ino in self._tree and not self._fresh(directory.listed_at):
            if not await self._list(parent):
                break
        names: dict[bytes, LowerEntry | Ino] = dict(directory.listing)
        for name, child in directory.children.items():
            if child.ino:
                names[name] = child.ino
            elif child.pins or child.checked_at >= directory.listed_at:
                names.pop(name, None)
        return names

    async def _list(self, parent: Node) -> bool:
        """Ask for a listing; False when there is no answer. One that was overtaken is not taken over."""
        directory = parent.dir
        epoch, notes, asked_at = self._tree.epoch, directory.notes, time.monotonic()
        path = self._tree.path(parent.ino)
        if path is None:
            return False
        entries = await self._renew("listdir", self.lower.listdir, path, known=directory.listed_at >= 0)
        directory.listing_s = time.monotonic() - asked_at
        if entries is None:
            return False
        if not self._overtaken(epoch) and directory.notes == notes:
            self._listed(parent, entries, asked_at)
        return True

    def _listed(self, parent: Node, entries: Sequence[LowerEntry], asked_at: float) -> None:
        directory = parent.dir
        directory.listing = {entry.name: entry for entry in entries}
        directory.listed_at = asked_at
        for name, child in list(directory.children.items()):
            if child.ino and not child.pins and name not in directory.listing and child.checked_at < asked_at:
                self.learn(parent, name, None)

    async def fill(self, parent: Node, names: Sequence[bytes]) -> None:
        """Turn listed names into nodes, with one call for all of them."""
        unknown = [n for n in names if (c := parent.dir.children.get(n)) is None or not (c.pins or c.ino)]
        while unknown and parent.ino in self._tree:
            epoch = self._tree.epoch
            paths = [self._tree.path_at(parent.ino, name) for name in unknown]
            answers = await self.call("lstat many", self._lstat_many, paths)
            if self._overtaken(epoch):
                continue
            for name, st in zip(unknown, answers, strict=True):
                child = parent.dir.children.get(name)
                if child is None or not child.pins:
                    self.learn(parent, name, st)
            return

    def _lstat_many(self, paths: Sequence[LowerPath]) -> list[LowerStat | None]:
        return [self._lstat(path)[0] for path in paths]

    # -- forgetting

    def reap(self, node: Node) -> None:
        """Drop a node that neither kernel nor RAM tier nor log needs."""
        if node.nlink == 0 and node.handles == 0 and node.content is not None:
            self._contents.drop(node)  # deleted and closed: its bytes need not wait for the kernel to forget it
        if node.ino == ROOT or node.lookups or node.handles or node.content is not None:
            return
        if self._log.is_pending(node.ino) or self._log.is_victim(node.ino) or (node.unlogged and node.names):
            return
        if node.is_dir and (self._log.pending_in(node.ino) or any(c.ino or c.pins for c in node.dir.children.values())):
            return
        parents = [parent for parent, _name in node.names]
        self._tree.forget(node.ino)
        self._table.drop(node)
        for parent in parents:
            above = self._table.get(parent)
            if above is not None:
                self.reap(above)

    def statistics(self) -> LowerViewStatistics:
        """What `status`, the metrics and the tests see."""
        return LowerViewStatistics(self._stale_answers, self._overtaken_answers)

    async def space(self) -> SpaceInfo:
        """statvfs of the backing file system."""
        return await self.call("statfs", self.lower.space)
