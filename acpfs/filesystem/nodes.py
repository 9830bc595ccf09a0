"""Nodes and names: the upper tree, and its rows in the state database.

Knows no policy and asks nobody: what is not here is "not known". Used under the file system's lock.
Changed nodes and names are collected and written as rows at the end of the step (`_flush_nodes`,
`_flush_names`).

A file that was only looked at has no row: the next worker asks the backing directory for it again.
So the state grows with what is in RAM, open, or in the log, and not with what was listed. A row
comes in the step in which something begins to need the node.
"""

from __future__ import annotations

import itertools
import json
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from acpfs.backing.lower import LowerEntry, LowerStat
from acpfs.filesystem.content.body import COLD, COLUMNS, Body, from_row, to_row
from acpfs.filesystem.content.body import DDL as BODY_DDL
from acpfs.filesystem.kept_listings import KeptListings
from acpfs.filesystem.known_names import Directory, Inquiry, KnownName
from acpfs.ram.state import StateDatabase
from acpfs.runtime.clock import Clock
from acpfs.types import NO_INO, ROOT, Ino, TierId
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree

UPPER_INO_FIRST = 1 << 62
"""Nodes born in the mount get numbers from here on; nodes found on the backing directory keep
theirs where it is free.
"""

DDL = f"""
CREATE TABLE IF NOT EXISTS node (
  ino INTEGER PRIMARY KEY, mode INTEGER, uid INTEGER, gid INTEGER, rdev INTEGER, nlink INTEGER,
  size INTEGER, blocks INTEGER,
  atime_ns INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, lower_ino INTEGER, identity TEXT,
  unlogged INTEGER,
  target BLOB, xattrs TEXT, {BODY_DDL});
CREATE TABLE IF NOT EXISTS child (
  parent INTEGER, name BLOB, ino INTEGER, PRIMARY KEY (parent, name)) WITHOUT ROWID;
"""

ABSENT_NAMES_MAX = 4096
"""Names per directory that are known not to be there, the newest ones; any user can ask for any
number of them.
"""

COUNTED_LINKS_MIN = 2
"""Links of an empty directory, by its name and by its dot, where the storage counts them."""

NAMES_TAKEN_BACK_MAX = 8
"""The rows of a file with more names stay, once they are there: else each open and close of it
would write and remove all of them.
"""

TICK_NS = 10_000_000
"""The kernel's clock goes on by at most this."""

Identity = tuple[int, int, int, int]


@dataclass(slots=True, eq=False)
class Node:
    """One file, directory, symlink … with its attributes as the mount shows them.

    Sizes in bytes, times in ns.
    """

    ino: Ino
    mode: int
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    directory_links: int = 1
    """Of a directory: its link count as it is shown, a hint of the storage
    (`count_subdirectory`).
    """
    unseen_links: int = 0
    """Of anything else: how many names the backing directory has that nobody has looked up here."""
    size: int = 0
    blocks: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    lower_ino: int = 0
    """Inode number of its entry on the backing directory; 0: not there."""
    lower_device: int = 0
    """Of which file system that is; 0: not known. No row: the next worker learns it when it
    looks.
    """
    identity: Identity | None = None
    """What the backing directory's entry looked like when content and attributes here were equal to
    it.
    """
    checked_at: float = 0.0
    """Monotonic time, seconds, when identity was last compared."""
    checked: int = 0
    """Serial of that: who asked before knows less."""
    settled: int = 0
    """Serial of when an operation on it last left the log:

    what the lower layer was asked before says nothing.
    """
    sound: Identity | None = None
    """What its entry looked like when it was last read as a whole for its checksum."""
    unlogged: bool = False
    """Never logged: the first STORE is still to come."""
    target: bytes = b""
    xattrs: dict[bytes, bytes] | None = None
    """None: not known, ask the backing directory."""
    body: Body = COLD
    """Of a regular file: where its bytes are. Given by `Contents` only."""
    is_dir: bool = False
    """Set with `dir`, by the table."""
    dir: Directory = field(init=False, repr=False)
    """The names of a directory; nothing else has that attribute."""
    names: list[tuple[Ino, bytes]] = field(default_factory=list)
    lookups: int = 0
    handles: int = 0
    daemon_mappers: int = 0
    """Handles in the daemon's lane that may have mappings (any but O_WRONLY): the kernel takes no
    passthrough open beside these.
    """
    daemon_opened_at: float = 0.0
    """Monotonic time, seconds, when it was last opened in the daemon's lane while the kernel had no
    file for it.
    """
    kernel_handles: int = 0
    """Handles in the passthrough lane; all of them on the same file, `kernel_target`."""
    bound_handles: int = 0
    """Handles in the daemon's lane that were opened beside these: while one is left, the kernel
    maps `kernel_target` for all of them.
    """
    kernel_target: TierId | None = None
    """Tier file that the kernel reads and writes for them; 0: the backing directory's file."""
    open_writers: int = 0
    """Handles that may write, in whatever lane."""
    kernel_writers: int = 0
    """Handles that write in the passthrough lane: what they write is only seen by looking at the
    tier file.
    """
    kernel_rewriters: int = 0
    """Those among them who may change what is there: that do not append, or write through a
    mapping.
    """
    kernel_mappers: int = 0
    """Handles in the passthrough lane that can be mapped to write; not those beside them in the
    daemon's lane (`daemon_mappers`).
    """
    versions: int = 0
    """How often its content was fixed, without closes that turned out not to count; of this
    worker.
    """
    writer_pid: int = 0
    """Whose call wrote to it last, or opened it for writing; 0: not known.

    For fairness among writers, and for `status`.
    """
    keep_cache: bool = False
    """The kernel's cached pages of the file are still right."""
    row_rest: tuple[object, ...] | None = None
    """What its row has that seldom changes, as it was last written; None: not known.

    See `NodeTable._write_row`.
    """

    @property
    def is_removed(self) -> bool:
        """Whether it has no name (any more).

        A link count does not say so: that of a directory is what the storage makes of it.
        """
        return not self.names and self.ino != ROOT

    @property
    def shown_links(self) -> int:
        """What stat(2) tells of its links; nothing is decided by it (`tests/test_structure.py`).

        Never taken from a stat alone, which knows nothing of links and removals that are still in
        the log.
        """
        if self.is_dir:
            return 0 if self.is_removed else max(1, self.directory_links)
        return len(self.names) + self.unseen_links

    def count_subdirectory(self, change: Literal[1, -1]) -> None:
        """A directory in it has come or gone.

        A storage that counts none shows 1 (btrfs always, ext4 from 65,000 on): so do we.
        """
        if self.directory_links >= COUNTED_LINKS_MIN:
            self.directory_links = max(COUNTED_LINKS_MIN, self.directory_links + change)

    def has_come_into(self, parent: Node) -> None:
        """A new, empty directory: it counts what is in it as the one does in which it is made."""
        counts = parent.directory_links >= COUNTED_LINKS_MIN
        self.directory_links = COUNTED_LINKS_MIN if counts else 1

    @property
    def in_kernel(self) -> bool:
        """Whether the kernel has a file for the node: every further open gets that one, and
        mappings are of that one.
        """
        return self.kernel_handles > 0 or self.bound_handles > 0

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_written(self) -> bool:
        """Whether its content has changed, or may have: what the kernel writes is seen by looking,
        and must not lose its file before.
        """
        return self.body.modified or self.kernel_writers > 0

    def adopt(self, st: LowerStat) -> None:
        """Show the attributes of the backing directory's entry; the link count is another matter,
        but for a directory's.
        """
        self.mode = st.mode
        self.uid = st.uid
        self.gid = st.gid
        self.rdev = st.rdev
        self.directory_links = st.nlink
        self.size = st.size
        self.blocks = st.blocks
        self.atime_ns = st.atime_ns
        self.mtime_ns = st.mtime_ns
        self.ctime_ns = st.ctime_ns


class ChangeClock:
    """The time that a change gets which the daemon makes.

    The kernel's own clock for files is up to 10 ms behind the one that programs read. With libfuse
    it sets the times of touch(1) by that one itself, and nobody says that it did. So there changes
    get the same clock: a file that is touched after it was written is not older than that.
    Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_ns = clock.wall_ns
        self._heard_ns = 0

    def follow_kernel(self) -> None:
        """The kernel sets times too."""
        self._now_ns = self._clock.kernel_ns

    def hear(self, set_ns: int) -> None:
        """A time was set: if it is one of just now the kernel may have set it, which may be ahead
        of its clock as programs read it.
        """
        if self._heard_ns < set_ns <= self._clock.wall_ns():
            self._heard_ns = set_ns

    def now_ns(self, not_before_ns: int = 0) -> int:
        """Nanoseconds since the epoch; not before what was heard, or given, if that is ahead by
        less than a tick.
        """
        now = self._now_ns()
        latest = now
        for ns in (self._heard_ns, not_before_ns):  # asked at each write: no generator
            if latest < ns < now + TICK_NS:
                latest = ns
        return latest


class NodeTable:
    """All nodes by number, and the names that lead to them."""

    def __init__(
        self, state: StateDatabase, log: OperationLog, tree: LowerTree, clock: Clock
    ) -> None:
        """Load what the last worker left.

        `log`: says which nodes it needs; `tree`: keeps the places of those that have rows.
        """
        self._clock = clock
        self.change_clock = ChangeClock(clock)
        """Times of files are given by it."""
        self._state = state
        self._log = log
        self._tree = tree
        self._nodes: dict[Ino, Node] = {}
        self.get: Callable[[Ino], Node | None] = self._nodes.get
        """The node of a number; None: it is not known."""
        self._by_lower: dict[int, tuple[Ino, ...]] = {}
        self._changed: dict[Ino, None] = {}
        self._changed_names: dict[tuple[Ino, bytes], bool] = {}
        """Names, and whether they have a row that must go if none is to be written."""
        self._recorded: set[Ino] = set()
        """Nodes that have a row."""
        self._told: set[Ino] | None = None
        self.open_files_are_known = False
        """Whether this worker has taken over the files that the one before it had open. Until then
        each file looks closed, also one that somebody writes in the kernel: nothing leaves RAM, and
        nothing shares its bytes.
        """
        self._last_upper = UPPER_INO_FIRST
        self._listings = KeptListings(state)
        state.create(DDL)
        self._load()
        state.before_commit(self._changed_names, self._need_pinned)
        state.before_commit(self._changed, self._flush_nodes)
        state.before_commit(self._changed_names, self._flush_names)

    def took_over_open_files(self) -> None:
        """All that the worker before had open is open here."""
        self.open_files_are_known = True

    # -- nodes

    def __contains__(self, ino: Ino) -> bool:
        return ino in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def __len__(self) -> int:
        return len(self._nodes)

    def recorded(self) -> Iterator[Node]:
        """Nodes that have a row: between steps all that are in RAM, open or in the log.

        Few, where many were only looked at.
        """
        return iter([self._nodes[ino] for ino in self._recorded if ino in self._nodes])

    def __getitem__(self, ino: Ino) -> Node:
        return self._nodes[ino]

    def left_as(self, ino: Ino) -> Identity | None:
        """How the node's entry on the backing directory was when it was last looked at; None: not
        known.
        """
        node = self._nodes.get(ino)
        return None if node is None else node.identity

    def by_lower(self, lower_ino: int) -> list[Node]:
        """The nodes whose entries had that inode number when they were last looked at: numbers are
        used again.
        """
        return [self._nodes[ino] for ino in self._by_lower.get(lower_ino, ())]

    def _note_lower(self, node: Node) -> None:
        self._by_lower[node.lower_ino] = (*self._by_lower.get(node.lower_ino, ()), node.ino)

    def _forget_lower(self, node: Node) -> None:
        inos = self._by_lower.get(node.lower_ino, ())
        if node.ino in inos:
            left = tuple(ino for ino in inos if ino != node.ino)
            if left:
                self._by_lower[node.lower_ino] = left
            else:
                del self._by_lower[node.lower_ino]

    def touch(self, node: Node, *, mtime: bool = True) -> None:
        """Something about it changed now."""
        node.ctime_ns = self.change_clock.now_ns(
            max(node.ctime_ns, node.mtime_ns) if mtime else node.ctime_ns
        )
        if mtime:
            node.mtime_ns = node.ctime_ns

    def new(self, mode: int, uid: int, gid: int) -> Node:
        """A node born in the mount, now."""
        self._last_upper += 1
        now = self.change_clock.now_ns()
        node = Node(
            Ino(self._last_upper),
            mode,
            uid,
            gid,
            atime_ns=now,
            mtime_ns=now,
            ctime_ns=now,
            unlogged=True,
            xattrs={},
        )
        self._insert(node)
        self.changed(node)
        return node

    def found(self, st: LowerStat) -> Node:
        """A node discovered on the backing directory."""
        wanted = Ino(st.ino)
        if not self.is_free(st.ino):
            self._last_upper += 1
            wanted = Ino(self._last_upper)
        node = Node(wanted, st.mode)
        node.adopt(st)
        node.unseen_links = st.nlink
        self._insert(node)
        if not node.is_dir:
            self._tree.leave_out(node.ino)
        self.bind_lower(node, st)
        return node

    def is_free(self, lower_ino: int) -> bool:
        """Whether a node that is found on the backing directory can have its number there."""
        return ROOT < lower_ino < UPPER_INO_FIRST and lower_ino not in self._nodes

    def found_file(self, parent: Node, name: bytes, st: LowerStat, now: float) -> Node:
        """`found` and `set_child` for something that is no directory, whose number is free, under
        its only name, which is not known.

        Needs no row. The caller sees to its place on the backing directory.
        """
        node = Node(Ino(st.ino), st.mode)
        node.adopt(st)
        node.lower_ino = st.ino
        node.lower_device = st.device
        node.identity = (st.ino, st.size, st.mtime_ns, st.ctime_ns)
        node.checked_at = now
        node.checked = self._clock.serial()
        node.names.append((parent.ino, name))
        self._nodes[node.ino] = node
        self._note_lower(node)
        parent.dir.children[name] = KnownName(node.ino, 0, now, node.checked)
        if not self._listings.agrees(parent.ino, name):
            self._changed_names.setdefault((parent.ino, name), False)
        return node

    def found_root(self, st: LowerStat) -> Node:
        """The node of the backing directory itself."""
        node = Node(ROOT, st.mode)
        node.adopt(st)
        self._insert(node)
        self.bind_lower(node, st)
        return node

    def bind_lower(self, node: Node, st: LowerStat) -> None:
        """The node's entry on the backing directory is this one now; the attributes shown stay."""
        if node.lower_ino:
            self.unbind_lower(node)
        node.lower_ino = st.ino
        node.identity = st.identity()
        node.lower_device = st.device
        self._note_lower(node)
        self.changed(node)

    def unbind_lower(self, node: Node) -> None:
        """The node has no entry on the backing directory (any more)."""
        self._forget_lower(node)
        node.lower_ino = 0
        node.identity = None
        self.changed(node)

    def changed(self, node: Node) -> None:
        """Its row is to be written at the end of the step, if it is to have one."""
        self._changed[node.ino] = None
        if self._told is not None:
            self._told.add(node.ino)

    def tells_to(self, changed: set[Ino] | None) -> None:
        """Where else to note what changed; None: nowhere."""
        self._told = changed

    def tell(self, node: Node) -> None:
        """Something about it changed, which need not be in its row."""
        if self._told is not None:
            self._told.add(node.ino)

    def needed(self, node: Node) -> None:
        """Something that outlives this worker begins to speak of it: an open file, or the log."""
        if node.ino not in self._recorded:
            self._changed[node.ino] = None

    def needed_no_more(self, node: Node) -> None:
        """Something of that kind has ended."""
        if node.ino in self._recorded and not self._outlives(node):
            self._changed[node.ino] = None

    def _outlives(self, node: Node) -> bool:
        """Whether a next worker needs it, and cannot simply find it again.

        Directories always: processes stand in them, and paths lead through them. And what has
        another number than on the backing directory: it would come back with that one.
        """
        return bool(
            node.is_dir
            or node.ino != node.lower_ino
            or node.unlogged
            or not node.body.is_only_backing
            or node.handles
            or self._log.is_pending(node.ino)
            or self._log.is_victim(node.ino)
            or (node.ino in self._recorded and len(node.names) > NAMES_TAKEN_BACK_MAX)
            or self._has_pinned_name(node)
        )

    def _has_pinned_name(self, node: Node) -> bool:
        for parent, name in node.names:
            child = self._known(parent, name)
            if child is not None and child.pins > 0:
                return True
        return False

    def drop(self, node: Node) -> None:
        """Forget a node that nothing needs: its names become unknown."""
        if not node.names:  # deleted: what was said of it is not of the next file with its number
            self._log.needs.tell(node.ino, None)
        for parent, name in list(node.names):
            self.unname(parent, name)
        del self._nodes[node.ino]
        self._listings.drop(node.ino)
        self._forget_lower(node)
        self._changed[node.ino] = None
        self.tell(node)

    # -- names

    def ask_anew(self, node: Node) -> None:
        """What is known of it is not so: it is asked for anew, also where its names are known well
        enough to be answered from.
        """
        node.checked_at = 0.0
        node.checked = 0
        for parent, name in node.names:
            child = self.child(parent, name)
            if child is not None:
                child.checked_at = 0.0
                child.checked = 0

    def child(self, parent: Ino, name: bytes) -> KnownName | None:
        """What is known about a name."""
        return self._nodes[parent].dir.children.get(name)

    def set_child(self, parent: Ino, name: bytes, ino: Ino) -> KnownName:
        """The name leads to that node now (0: to nothing); the pins stay."""
        directory = self._nodes[parent].dir
        child = directory.children.get(name)
        if child is None:
            child = KnownName(NO_INO)
            directory.children[name] = child
        if child.ino != ino:
            if child.ino:
                self._unlink_name(child.ino, parent, name)
            child.ino = ino
            if ino:
                self._nodes[ino].names.append((parent, name))
                self.changed(self._nodes[ino])
        self._changed_names.setdefault((parent, name), child.recorded)
        return child

    def known_absent(self, parent: Ino, name: bytes) -> None:
        """The name leads to nothing, and no operation speaks of it: that is kept for the newest
        such names of a directory.
        """
        absent = self._nodes[parent].dir.absent
        absent.pop(name, None)
        absent[name] = None
        if len(absent) <= ABSENT_NAMES_MAX:
            return
        # Half of them at once: each time a listing that is under way is overtaken, and must be
        # asked for again.
        for old in list(itertools.islice(absent, ABSENT_NAMES_MAX // 2)):
            del absent[old]
            child = self._known(parent, old)
            if child is not None and not (child.ino or child.pins):
                self.unname(parent, old)

    def name_changed(self, parent: Ino, name: bytes) -> None:
        """Its row is to be written, or to go, at the end of the step."""
        child = self._known(parent, name)
        self._changed_names.setdefault((parent, name), child is not None and child.recorded)

    def unname(self, parent: Ino, name: bytes) -> None:
        """Nothing is known about the name any more."""
        node = self._nodes.get(parent)
        if node is None:
            return
        child = node.dir.children.pop(name, None)
        if child is not None:
            found = self._nodes.get(child.ino)
            node.dir.note(
                name,
                None
                if found is None
                else LowerEntry(name, found.lower_ino, stat.S_IFMT(found.mode)),
            )
            self._unlink_name(child.ino, parent, name)
            self._changed_names.setdefault((parent, name), child.recorded)

    def _unlink_name(self, ino: Ino, parent: Ino, name: bytes) -> None:
        node = self._nodes.get(ino)
        if node is not None and (parent, name) in node.names:
            node.names.remove((parent, name))
            self.changed(node)

    def path(self, ino: Ino) -> bytes:
        """Path below the mount point by the node's first name, for people; deleted nodes: `?`."""
        names: list[bytes] = []
        while ino != ROOT:
            node = self._nodes.get(ino)
            if node is None or not node.names:
                names.append(b"?")
                break
            ino, name = node.names[0]
            names.append(name)
        return b"/".join(reversed(names))

    def tree(self, node: Node) -> Iterator[Node]:
        """The node and all that is known below it, without recursion: a tree may be deeper than the
        interpreter's stack.
        """
        todo = [node]
        while todo:
            found = todo.pop()
            yield found
            if found.is_dir:
                todo += [
                    self._nodes[child.ino] for child in found.dir.children.values() if child.ino
                ]

    # -- listings

    def listed(
        self,
        parent: Node,
        listing: dict[bytes, LowerEntry],
        asked: Inquiry,
        *,
        ahead: bool = False,
    ) -> None:
        """Names on the backing directory as of then; a next worker has them, too."""
        directory = parent.dir
        directory.listing = listing
        directory.listed_ahead = ahead
        directory.listed_at, directory.listed = asked
        self._listings.keep(
            parent.ino, listing.keys() | directory.children.keys(), partial(self._entry, parent)
        )

    def _entry(self, parent: Node, name: bytes) -> LowerEntry | None:
        """What is to be kept of a name: what is known of it without rows of its own."""
        child = parent.dir.children.get(name)
        if child is not None and child.ino:
            node = self._nodes[child.ino]
            return LowerEntry(name, node.lower_ino, stat.S_IFMT(node.mode))
        if child is not None and (child.pins or child.checked >= parent.dir.listed):
            return None
        return parent.dir.listing.get(name)

    # -- rows

    # What changed in this step. In this order: a name that is pinned needs its node's row, and that
    # comes with the rows of its names.

    def _need_pinned(self) -> None:
        for parent, name in self._changed_names:
            child = self._known(parent, name)
            if child is not None and child.pins and child.ino:
                self.needed(self._nodes[child.ino])

    def _flush_nodes(self) -> None:
        for ino in self._changed:
            node = self._nodes.get(ino)
            if node is not None and self._outlives(node):
                known = ino in self._recorded
                self._write_row(node, known=known)
                if not known:
                    self._recorded.add(ino)
                    self._tree.record(ino)
                    self._names_changed(node)
            elif ino in self._recorded:
                self._recorded.discard(ino)
                self._state.change("DELETE FROM node WHERE ino = ?", (ino,))
                if node is not None:
                    self._tree.leave_out(ino)
                    self._names_changed(node)
        self._changed.clear()

    def _flush_names(self) -> None:
        for (parent, name), has_row in self._changed_names.items():
            directory = self._nodes.get(parent)
            child = directory.dir.children.get(name) if directory is not None else None
            if child is not None and (child.pins or child.ino in self._recorded):
                self._state.change(
                    "INSERT OR REPLACE INTO child VALUES (?, ?, ?)", (parent, name, child.ino)
                )
                child.recorded = True
            elif has_row or (child is not None and child.recorded):
                self._state.change(
                    "DELETE FROM child WHERE parent = ? AND name = ?", (parent, name)
                )
                if child is not None:
                    child.recorded = False
            if directory is not None:
                self._listings.name(parent, name, self._entry(directory, name))
        self._changed_names.clear()

    def _write_row(self, node: Node, *, known: bool) -> None:
        """`known`: it has one.

        Mostly only what changes with each use of it is new, and takes half of what a whole row
        does.
        """
        rest, often = _row_values(node)
        if known and node.row_rest == rest:
            self._state.change(_UPDATE_NODE, (*often, node.ino))
        else:
            node.row_rest = rest
            self._state.change(_INSERT_NODE, (node.ino, *_as_written(rest), *often))

    def _names_changed(self, node: Node) -> None:
        for parent, name in node.names:
            self.name_changed(parent, name)

    def _known(self, parent: Ino, name: bytes) -> KnownName | None:
        directory = self._nodes.get(parent)
        return directory.dir.children.get(name) if directory is not None else None

    def _insert(self, node: Node) -> None:
        if stat.S_ISDIR(node.mode):
            node.is_dir = True
            node.dir = Directory()
        self._nodes[node.ino] = node
        self._last_upper = max(self._last_upper, node.ino)

    def _load(self) -> None:
        links = {}
        now = self._clock.now()
        # constants
        for row in self._state.rows(f"SELECT {', '.join(_COLUMNS)} FROM node"):  # noqa: S608
            node = _node_from_row(row, now)
            links[row[0]] = row[_COLUMNS.index("nlink")]
            self._insert(node)
            self._recorded.add(node.ino)
            if node.lower_ino:
                self._note_lower(node)
        for parent, name, ino in self._state.rows("SELECT parent, name, ino FROM child"):
            directory = self._nodes.get(Ino(parent))
            if directory is not None and directory.is_dir and (ino == NO_INO or ino in self._nodes):
                directory.dir.children[name] = KnownName(Ino(ino), recorded=True)
                if ino:
                    self._nodes[Ino(ino)].names.append((Ino(parent), name))
        for ino, listing in self._listings.load().items():
            found = self._nodes.get(ino)
            if found is None or not found.is_dir:
                self._listings.drop(ino)
            else:
                found.dir.was_listed(listing)
        for node in self._nodes.values():
            node.unseen_links = 0 if node.is_dir else max(0, links[node.ino] - len(node.names))


_SELDOM = ("mode", "uid", "gid", "rdev", "lower_ino", "identity", "target", "xattrs")
_OFTEN = ("nlink", "size", "blocks", "atime_ns", "mtime_ns", "ctime_ns", "unlogged", *COLUMNS)
_COLUMNS = ("ino", *_SELDOM, *_OFTEN)
_IDENTITY = _SELDOM.index("identity")
_NO_XATTRS = "{}"
"""As their column has it."""
_INSERT_NODE = (
    f"INSERT OR REPLACE INTO node ({', '.join(_COLUMNS)}) "  # noqa: S608 - constants
    f"VALUES ({', '.join('?' * len(_COLUMNS))})"
)
# constants
_UPDATE_NODE = f"UPDATE node SET {', '.join(f'{name} = ?' for name in _OFTEN)} WHERE ino = ?"  # noqa: S608


def _row_values(node: Node) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Of the columns that seldom change, before `_as_written`, and of those that often do."""
    xattrs = (
        None
        if node.xattrs is None
        else json.dumps({k.hex(): v.hex() for k, v in node.xattrs.items()})
        if node.xattrs
        else _NO_XATTRS
    )
    rest = (
        node.mode,
        node.uid,
        node.gid,
        node.rdev,
        node.lower_ino,
        node.identity,
        node.target,
        xattrs,
    )  # the columns `_SELDOM`
    times = (node.atime_ns, node.mtime_ns, node.ctime_ns)
    return rest, (
        node.shown_links,
        node.size,
        node.blocks,
        *times,
        node.unlogged,
        *to_row(node.body),
    )


def _as_written(rest: tuple[object, ...]) -> tuple[object, ...]:
    """The identity as text: memory has it once, as the node does."""
    identity = rest[_IDENTITY]
    if not isinstance(identity, tuple):
        return rest
    return (*rest[:_IDENTITY], str(list(identity)), *rest[_IDENTITY + 1 :])


def _node_from_row(row: tuple[Any, ...], now: float) -> Node:
    (
        ino,
        mode,
        uid,
        gid,
        rdev,
        lower_ino,
        identity,
        target,
        xattrs,
        nlink,
        size,
        blocks,
        atime,
        mtime,
        ctime,
        unlogged,
        *bytes_at,
    ) = row
    node = Node(
        ino, mode, uid, gid, rdev, size=size, blocks=blocks, target=target, unlogged=bool(unlogged)
    )
    node.atime_ns = int(atime)
    node.mtime_ns = int(mtime)
    node.ctime_ns = int(ctime)
    node.directory_links = int(nlink)
    node.lower_ino = int(lower_ino)
    if identity:
        # JSON, read in a fifth of the time: a takeover waits for all rows
        found_ino, found_size, mtime_ns, ctime_ns = identity[1:-1].split(",")
        node.identity = (int(found_ino), int(found_size), int(mtime_ns), int(ctime_ns))
    if xattrs == _NO_XATTRS:
        node.xattrs = {}
    elif xattrs is not None:
        node.xattrs = {
            bytes.fromhex(k): bytes.fromhex(v) for k, v in json.loads(str(xattrs)).items()
        }
    node.body = from_row(tuple(bytes_at), now)
    return node
