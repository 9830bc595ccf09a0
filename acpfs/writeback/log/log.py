"""The operation log: the ordered list of changes that the backing directory has not seen yet.

Appended to by the file system, taken from by the engine, both under the file system's lock; every
change is part of the step's transaction in the state database. See
docs/internals/order-and-commits.md.
"""

from __future__ import annotations

import bisect
import errno
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from operator import attrgetter

from acpfs.ram.node_clock import NodeClock
from acpfs.ram.state import StateDatabase
from acpfs.runtime.clock import Clock
from acpfs.types import Ino, Seq, TierId, VersionId
from acpfs.writeback.log.needs import Needs
from acpfs.writeback.log.op_rows import (
    COMMITTED,
    LOAD_VERSIONS,
    SAVE_OP,
    SAVE_VERSION,
    aside_when_parked,
    op_from_row,
    op_row,
    version_from_row,
    version_row,
)
from acpfs.writeback.log.ops import (
    ATTRIBUTES,
    WITH_CONTENT,
    Metadata,
    Op,
    OpKind,
    Version,
    VersionState,
)
from acpfs.writeback.log.sizes import VersionSizes
from acpfs.writeback.log.stages import Aside, Stage, Step
from acpfs.writeback.log.waiters import Waiter, Waiters

WINDOW_OPS_MAX = 4096
"""How far ahead a window that nets out to nothing is looked for; bounds the time under the lock to
a few milliseconds.
"""

IN_LINE = frozenset({Aside.NONE, Aside.HELD})
CREATING = frozenset({OpKind.STORE, OpKind.MKDIR, OpKind.SYMLINK, OpKind.MKNOD})
REMOVING = frozenset({OpKind.UNLINK, OpKind.RMDIR})

DDL = """
CREATE TABLE IF NOT EXISTS op (
  seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, ino INTEGER NOT NULL, parent INTEGER NOT NULL,
  name BLOB NOT NULL,
  new_parent INTEGER NOT NULL, new_name BLOB NOT NULL, victim INTEGER NOT NULL,
  meta TEXT NOT NULL, payload BLOB NOT NULL,
  vid INTEGER, logged_at REAL NOT NULL, creates INTEGER NOT NULL, tries INTEGER NOT NULL,
  last_error INTEGER,
  next_attempt_at REAL NOT NULL, parked INTEGER NOT NULL, committed INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS version (
  vid INTEGER PRIMARY KEY, ino INTEGER NOT NULL, tier_id INTEGER NOT NULL, size INTEGER NOT NULL,
  state TEXT NOT NULL,
  staging_name TEXT NOT NULL, staging_ino INTEGER NOT NULL, digest TEXT NOT NULL,
  spilled INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS replaces (seq INTEGER PRIMARY KEY, since REAL NOT NULL);
CREATE TABLE IF NOT EXISTS counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""

CONTENTS = frozenset({OpKind.STORE, OpKind.SYMLINK})
"""What makes all that a file, or a link, is."""

_SEQ = attrgetter("seq")


class OperationLog:
    """Operations by sequence number, oldest first."""

    def __init__(self, state: StateDatabase, clock: Clock) -> None:
        """Load what the last worker left. Versions that were streaming are complete again."""
        self._state = state
        self._ops: OrderedDict[Seq, Op] = (
            OrderedDict()
        )  # a plain dict slows down when it is emptied from the front
        self._by_node: dict[Ino, list[Op]] = {}
        self._victims: Counter[Ino] = Counter()
        self._net_removals: Counter[Ino] = Counter()
        """Of each node: removals less links."""
        self._replacing: Counter[Ino] = Counter()
        """Operations of each node that replace another one."""
        self._handed_out: dict[Ino, dict[Seq, Op]] = {}
        """Of each node those that were begun, by this worker or an earlier one: a group at most,
        and what is in doubt.
        """
        self._by_directory: Counter[Ino] = Counter()
        self._creates: set[Seq] = set()
        self._last_seq = 0
        self._last_vid = 0
        self._parked: dict[Seq, Op] = {}
        self._line: OrderedDict[Seq, Op] | None = None
        """All but what is parked or put off; None: to be made anew.

        Where much is, it is not to be walked through for each group.
        """
        self.unparked = 0
        """How often one that was parked or put off has left."""
        self._aside: dict[Seq, Op] = {}
        self._aside_of: Counter[Ino] = Counter()
        """How many of these are of each node."""
        self._in_doubt: dict[Seq, Op] = {}
        self._waiters = Waiters()
        self._survivors: tuple[Op, Op] | None = None
        self._replaced: dict[Seq, float] = {}
        self.clock = NodeClock(state, clock)
        """Operations are stamped with it."""
        self._saved_counters = (0, 0)
        self._followers: list[tuple[Callable[[Op], None], Callable[[], None]]] = []
        self.sizes = VersionSizes()
        self._left_out = 0
        state.create(DDL)
        self.needs = Needs(state)
        self._load()

    # -- reading

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[Op]:
        """Oldest first; a snapshot, safe against changes."""
        return iter(list(self._ops.values()))

    def oldest_first(self) -> Iterator[Op]:
        """The same without a copy, for who looks at the first ones only; nothing may change
        meanwhile.
        """
        return iter(self._ops.values())

    def get(self, seq: Seq) -> Op | None:
        """The operation, or None when it is done."""
        return self._ops.get(seq)

    def front(self, count: int) -> list[Op]:
        """The oldest `count` operations."""
        return list(itertools.islice(self._ops.values(), count))

    def line(self, count: int) -> list[Op]:
        """The oldest `count` operations that are neither parked nor put off."""
        if self._line is None:
            self._line = OrderedDict(
                (seq, op) for seq, op in self._ops.items() if op.aside in IN_LINE
            )
        return list(itertools.islice(self._line.values(), count))

    def first(self) -> Op | None:
        return next(iter(self._ops.values()), None)

    def newest(self) -> Op | None:
        return next(reversed(self._ops.values()), None)

    def since(self, seq: int) -> list[Op]:
        """Operations with a larger number, oldest first."""
        newest_first = itertools.takewhile(lambda op: op.seq > seq, reversed(self._ops.values()))
        return list(newest_first)[::-1]

    @property
    def last_seq(self) -> Seq:
        """Of the newest operation ever logged."""
        return Seq(self._last_seq)

    def stands_since(self, op: Op) -> float:
        """When it was logged, or the first of those that it stands for."""
        return self._replaced.get(op.seq, op.logged_at)

    def replaced_since(self) -> Iterable[float]:
        """For each store that stands for others, which were left out: when the first of those was
        logged.
        """
        return self._replaced.values()

    def in_doubt(self) -> list[Op]:
        """Operations that the backing directory may have carried out, and that are not recorded;
        oldest first.
        """
        if not self._in_doubt:  # asked before nearly each call on the backing directory
            return []
        return [op for seq in sorted(self._in_doubt) if (op := self._in_doubt[seq]).begun]

    def unsealed_of(self, ino: Ino) -> list[Op]:
        """STOREs of a node whose staging files do not have all bytes yet."""
        return [op for op in self._by_node.get(ino, ()) if op.unsealed]

    def pending_of(self, ino: Ino) -> list[Op]:
        """Operations on a node, oldest first."""
        return list(self._by_node.get(ino, ()))

    def last_of(self, ino: Ino) -> Op | None:
        """Newest operation on a node."""
        return ops[-1] if (ops := self._by_node.get(ino)) else None

    def last_but_attributes_of(self, ino: Ino) -> Op | None:
        """Newest operation on a node that changes more than its attributes."""
        for op in reversed(self._by_node.get(ino, ())):
            if op.kind not in ATTRIBUTES:
                return op
        return None

    def attributes_behind(self, op: Op) -> list[Op]:
        """Changes of attributes of its node that were logged later, oldest first."""
        return [
            one
            for one in self._by_node.get(op.ino, ())
            if one.seq > op.seq and one.kind in ATTRIBUTES
        ]

    def is_pending(self, ino: Ino) -> bool:
        return ino in self._by_node

    def is_unmade(self, ino: Ino) -> bool:
        """Whether what creates the node is not persisted."""
        ops = self._by_node.get(ino)
        return ops is not None and ops[0].seq in self._creates

    def is_active(self, ino: Ino) -> bool:
        """Whether anything is to be done with the node, but for deletions of names of it that the
        guard holds back.
        """
        return len(self._by_node.get(ino, ())) > self._aside_of[ino]

    def last_active_of(self, ino: Ino) -> Op | None:
        """The newest operation on a node that is not held back."""
        ops = reversed(self._by_node.get(ino, ()))
        return next((op for op in ops if op.seq not in self._aside), None)

    def is_victim(self, ino: Ino) -> bool:
        """Whether an operation will replace the node."""
        return self._victims[ino] > 0

    def pending_in(self, directory: Ino) -> int:
        """How many names in a directory are mentioned by operations."""
        return self._by_directory[directory]

    def directories(self, count: int) -> list[Ino]:
        """At most so many directories with names that operations mention."""
        return list(itertools.islice(self._by_directory, count))

    def changed(self, op: Op) -> int:
        """Which change of the state was the last one that says what the operation is, or that one
        does not precede it any more.
        """
        return max(op.changed, op.version.changed if op.version is not None else 0, self._left_out)

    # -- following

    def follow(
        self, appended: Callable[[Op], None], awakened: Callable[[], None] = lambda: None
    ) -> None:
        """Have these called, under the lock, where `on_append` and `wake` are."""
        self._followers.append((appended, awakened))

    def on_append(self, op: Op) -> None:
        """It was appended, or was tentative and is final now: tell who follows."""
        for appended, _awakened in self._followers:
            appended(op)

    def wake(self) -> None:
        """Somebody begins to wait, or what stood in front of others was taken back: tell who
        follows.
        """
        for _appended, awakened in self._followers:
            awakened()

    # -- writing

    def append(self, kind: OpKind, ino: Ino, *, creates: bool = False, **fields: object) -> Op:
        """Log an operation; `creates`: the node has never been on the backing directory nor in the
        log before.
        """
        self._last_seq += 1
        op = Op(Seq(self._last_seq), kind, ino, **fields)  # type: ignore[arg-type]
        self._index(op, creates)
        self.on_append(op)  # first, as it says what the row has to say: whether it waits for others
        self._save(op)
        return op

    def new_version(self, ino: Ino, tier_id: TierId, size: int, staging_name: str = "") -> Version:
        """Freeze a content; the caller appends the STORE.

        With `staging_name` the bytes are in that staging file, and not in RAM.
        """
        self._last_vid += 1
        version = Version(VersionId(self._last_vid), ino, tier_id, size, staging_name=staging_name)
        self.save_version(version)
        return version

    def fold(self, ino: Ino, meta: Metadata) -> bool:
        """Fold a change of attributes into the newest operation on the node, if that carries
        attributes and has not been carried out.

        Rights keep their place, though: what was logged since may need the earlier ones (a file
        that is made in a directory before that becomes read-only), or may have been made so that
        nobody has the later ones (a directory that was shut off before). What overwrites a file
        keeps those that the file had: should its bytes be lost with RAM, what is left has them.
        """
        op = self.last_of(ino)
        if (
            op is None
            or op.started
            or op.kind in REMOVING
            or op.kind in (OpKind.RENAME, OpKind.EXCHANGE, OpKind.LINK)
        ):
            return False
        if op.version is not None and op.version.state in (
            VersionState.STAGED,
            VersionState.COMMITTED,
        ):
            return False  # its staging file has its attributes already
        if op.kind is OpKind.MKDIR and self._by_directory[ino]:
            return False  # times, too: what is made in the directory changes them
        is_overwriting = op.kind is OpKind.STORE and op.seq not in self._creates
        if (is_overwriting or op.seq != self._last_seq) and meta.gives_rights(op.meta):
            return False
        op.meta.merge(meta)
        self._save(op)
        return True

    def save(self, op: Op) -> None:
        self._save(op)

    def mark_committed(self, op: Op) -> None:
        """Persist that the operation is visible; one small statement, for it is made once per
        operation.
        """
        op.take(Step.CARRIED_OUT)
        self._hand_out(op)
        self._in_doubt.pop(op.seq, None)
        self._state.change("UPDATE op SET committed = ? WHERE seq = ?", (COMMITTED, op.seq))

    def mark_begun(self, op: Op) -> None:
        """Persist that the operation is handed to the backing directory: from now on only carrying
        it out makes its outcome certain.
        """
        if not op.committed:
            self._in_doubt[op.seq] = op
        if not op.begun:
            self._state.change("UPDATE op SET committed = 1 WHERE seq = ?", (op.seq,))
        op.take(Step.BEGUN)
        self._hand_out(op)

    def mark_begun_together(self, content: Op, move: Op) -> None:
        """Both are carried out by one call (`Pairs`). A next worker, and whoever adopts the log,
        sees that by the rename.
        """
        if not move.is_with_content:
            self._set_payload(move, WITH_CONTENT)
        self.mark_begun(content)
        self.mark_begun(move)

    def mark_apart(self, content: Op, move: Op) -> None:
        """Each is carried out by itself, whatever was tried before.

        The move's row says so of both: a copy of the log has to have it before the content is put
        under its own name, or an adopter would look for that under the other one.
        """
        if move.is_with_content:
            self._set_payload(move, b"")
            content.changed = move.changed

    def _set_payload(self, op: Op, payload: bytes) -> None:
        """One small statement: made once per file that is renamed."""
        op.payload = payload
        self._state.change("UPDATE op SET payload = ? WHERE seq = ?", (payload, op.seq))
        op.changed = self._state.changes

    def content_begun_with(self, move: Op) -> Op | None:
        """The content that a rename in doubt is carried out with; None: it is by itself."""
        return self.before_of(move) if move.is_with_content and not move.committed else None

    def _hand_out(self, op: Op) -> None:
        self._handed_out.setdefault(op.ino, {})[op.seq] = op

    def save_version(self, version: Version) -> None:
        if version.vid in self.sizes:
            self.sizes.count(version)
        self._state.change(SAVE_VERSION, version_row(version))
        version.changed = self._state.changes

    def remove(self, op: Op) -> None:
        """The operation is persisted, elided or discarded."""
        if op.seq in self._aside:
            self._leave_aside(op)
        else:
            del self._ops[op.seq]
        self._leave_line(op)
        self._creates.discard(op.seq)
        self.needs.done(op.seq)
        self._in_doubt.pop(op.seq, None)
        self._leave_victim(op)
        self._leave_node(op)
        self.unparked += op.aside is Aside.PUT_OFF or self._parked.pop(op.seq, None) is not None
        ops = self._by_node[op.ino]
        del ops[_place(ops, op)]
        if not ops:
            del self._by_node[op.ino]
        for directory, _name in op.touches():
            self._leave_directory(directory)
        self._save_counters()
        self._state.change("DELETE FROM op WHERE seq = ?", (op.seq,))
        if self._replaced.pop(op.seq, None) is not None:
            self._state.change("DELETE FROM replaces WHERE seq = ?", (op.seq,))
        if op.version is not None:
            self.sizes.count_out(op.version.vid)
            self._state.change("DELETE FROM version WHERE vid = ?", (op.version.vid,))
        if not op.committed:
            self._left_out = self._state.changes

    def _leave_node(self, op: Op) -> None:
        self._count_net(op, -1)
        if op.victim:
            _count(self._replacing, op.ino, -1)
        handed_out = self._handed_out.get(op.ino, {})
        handed_out.pop(op.seq, None)
        if not handed_out:
            self._handed_out.pop(op.ino, None)

    def _count_net(self, op: Op, change: int) -> None:
        if op.kind in REMOVING:
            _count(self._net_removals, op.ino, change)
        elif op.kind is OpKind.LINK:
            _count(self._net_removals, op.ino, -change)

    def _leave_victim(self, op: Op) -> None:
        self._victims[op.victim] -= 1
        if not self._victims[op.victim]:
            del self._victims[op.victim]

    def _leave_directory(self, directory: Ino) -> None:
        self._by_directory[directory] -= 1
        if not self._by_directory[directory]:
            del self._by_directory[directory]

    def withdraw(self, op: Op) -> bool:
        """Take back an operation that nothing was done for yet, and that no later one on its node
        needs; returns whether it created the node.
        """
        created = op.seq in self._creates
        self.remove(op)
        self.wake()  # those behind it may be next, and nothing else would say so
        return created

    def inherit(self, op: Op, heir: Op | None) -> None:
        """One that was withdrawn has another in its place: who waits for it waits for that one."""
        if heir is not None:
            self._waiters.inherit(op.seq, heir.seq)

    def leave_out(self, ops: list[Op]) -> None:
        """Remove a window that `window_to_elide` found.

        What its stores knew of their nodes goes to the stores that replace them. Who waits for a
        moment within the window is shown one before it, until what is left of it is carried out: so
        that is waited for, too.
        """
        self._waiters.inherit(ops[0].seq, ops[-1].seq)
        for op in ops:
            heir = self.replacement(op)
            if heir is not None:
                earlier = Metadata.from_json(op.meta.to_json())
                earlier.merge(heir.meta)
                heir.meta = earlier
                if op.seq in self._creates:
                    self._creates.add(heir.seq)
                self._save(heir)
                if op.victim:
                    self.set_victim(heir, op.victim)
                self._waiters.inherit(op.seq, heir.seq)
                self._stand_for(heir, op)
            self.remove(op)

    def _stand_for(self, heir: Op, op: Op) -> None:
        since = min(
            self._replaced.get(op.seq, op.logged_at), self._replaced.get(heir.seq, heir.logged_at)
        )
        self._replaced[heir.seq] = since
        self._state.change("INSERT OR REPLACE INTO replaces VALUES (?, ?)", (heir.seq, since))

    def next_of(self, op: Op) -> Op | None:
        """The operation on the same node that was logged next."""
        ops = self._by_node[op.ino]
        at = _place(ops, op) + 1
        return ops[at] if at < len(ops) else None

    def move_of(self, content: Op) -> Op | None:
        """The rename that comes next, and gives what was stored, or a link, another name; None:
        another operation does, or none.
        """
        move = self.next_of(content) if content.kind in CONTENTS else None
        is_its = (
            move is not None
            and move.kind is OpKind.RENAME
            and (move.parent, move.name) == (content.parent, content.name)
            and move.new_parent > 0  # where the guard keeps what is deleted is no directory
        )
        return move if is_its else None

    def before_of(self, op: Op) -> Op | None:
        """The operation on the same node that was logged last before it."""
        ops = self._by_node[op.ino]
        at = _place(ops, op)
        return ops[at - 1] if at else None

    def replacement(self, op: Op) -> Op | None:
        """The store that makes this store unnecessary."""
        if op.kind is not OpKind.STORE:
            return None
        after = self.next_of(op)
        return after if after is not None and after.kind is OpKind.STORE else None

    def replaced_by(self, op: Op) -> Op | None:
        """The store right before it, that this store makes unnecessary."""
        ops = self._by_node[op.ino]
        at = _place(ops, op) - 1
        return ops[at] if at >= 0 and op.kind is ops[at].kind is OpKind.STORE else None

    # -- parking

    def park(self, op: Op) -> None:
        """The backing directory refused it for good."""
        op.put(aside_when_parked(op.last_error))
        self._parked[op.seq] = op
        self._leave_line(op)
        self._save(op)

    def unpark(self, op: Op) -> None:
        op.put(Aside.NONE)
        self.unparked += self._parked.pop(op.seq, None) is not None
        self._line = None
        self._save(op)

    def parked(self) -> list[Op]:
        """What the backing directory refused for good, oldest first."""
        return [self._parked[seq] for seq in sorted(self._parked)]

    @property
    def parked_count(self) -> int:
        return len(self._parked)

    def parked_after(self, count: int) -> list[Op]:
        """Those that were parked after the first `count`, in the order in which they were."""
        return list(itertools.islice(self._parked.values(), count, None))

    def put_off(self, op: Op, wait: bool) -> None:
        """Whether it waits while all else goes on."""
        op.put(Aside.PUT_OFF if wait else Aside.NONE)
        if wait:
            self._leave_line(op)
        else:
            self.unparked += 1
            self._line = None

    def _leave_line(self, op: Op) -> None:
        if self._line is not None:
            self._line.pop(op.seq, None)

    # -- set aside: deletions that the guard holds back

    def set_aside(self, op: Op) -> None:
        """Out of the order: neither looked at, nor counted, nor waited for, until it is brought
        back. Its node and names stay pinned.
        """
        op.put(Aside.GUARDED)
        self._aside[op.seq] = self._ops.pop(op.seq)
        self._aside_of[op.ino] += 1
        self._leave_line(op)

    def bring_back(self, ops: Iterable[Op]) -> None:
        """Into the order again, at the place that they had."""
        back = {op.seq: self._leave_aside(op) for op in ops}
        for op in back.values():
            op.put(Aside.NONE)
        last = max(back, default=0)
        for seq in list(itertools.takewhile(lambda seq: seq < last, self._ops)):
            back[seq] = self._ops.pop(seq)
        for seq in sorted(back, reverse=True):
            self._ops[seq] = back[seq]
            self._ops.move_to_end(seq, last=False)
        self._survivors = None
        self._line = None

    def _leave_aside(self, op: Op) -> Op:
        self._aside_of[op.ino] -= 1
        if not self._aside_of[op.ino]:
            del self._aside_of[op.ino]
        return self._aside.pop(op.seq)

    def all_aside(self) -> list[Op]:
        """What is set aside, oldest first."""
        return [self._aside[seq] for seq in sorted(self._aside)]

    def is_aside(self, op: Op) -> bool:
        return op.seq in self._aside

    def let_go(self, op: Op) -> None:
        """Persist that the guard has nothing (more) against it."""
        op.let_go = True
        self._save(op)

    def set_victim(self, op: Op, victim: Ino) -> None:
        """The operation replaces that node, too."""
        self._leave_victim(op)
        self._victims[victim] += 1
        _count(self._replacing, op.ino, bool(victim) - bool(op.victim))
        op.victim = victim
        self._save(op)

    def turn_into_rename(self, op: Op, new_parent: Ino, new_name: bytes, moved_for: Ino) -> None:
        """Instead of removing what it names, move it; the payload tells what it was, and
        `Op.moved_for`.
        """
        self._count_net(op, -1)
        op.payload = b"%s %d" % (op.kind.value.encode(), moved_for)
        op.kind = OpKind.RENAME
        op.new_parent = new_parent
        op.new_name = new_name
        self._by_directory[new_parent] += 1
        self._save(op)

    # -- waiting

    def when_done(self, seq: Seq, node: Ino | None = None) -> Future[None]:
        """Done when every operation with a number up to `seq` is persisted; fails with the errno of
        one that is parked.

        With `node`: only parked operations on that node matter, and on names in it. What waits
        behind those of others is not waited for, and no removal that waits for other members and
        has nothing to do with the node.
        """
        answer = self._judge(waiter := Waiter(seq, node))
        if answer is None:
            self._waiters.add(waiter)
            self.wake()
        else:
            waiter.deliver(answer or None)
        return waiter.future

    def waited_for(self, op: Op) -> bool:
        """Whether anybody waits for the operation."""
        return self._waiters.covers(op.seq)

    def is_awaited(self) -> bool:
        """Whether anybody waits for operations to be persisted."""
        return len(self._waiters) > 0

    def answer_waiters(self) -> Callable[[], None]:
        """Collect, under the lock, whose wait is over; what is returned tells them, and is to be
        called without the lock.
        """
        if not self._waiters:
            return lambda: None
        answers = self._waiters.collect(self._judge)

        def deliver() -> None:
            for waiter, answer in answers:
                waiter.deliver(answer or None)

        return deliver

    def _judge(self, waiter: Waiter) -> int | None:
        first = next(iter(self._ops), None)
        if first is None or first > waiter.seq:
            return 0
        for op in self._parked.values():
            if op.seq <= waiter.seq and (waiter.node is None or _refuses(op, waiter.node)):
                return op.last_error or errno.EIO
        if waiter.node is None:
            return None
        for op in self._ops.values():
            if op.seq > waiter.seq:
                return 0
            if not _is_passed(op, waiter.node):
                return None
        return 0

    # -- elision

    def window_to_elide(self, start: Op) -> list[Op]:
        """Operations from `start` on that may be left out together, or [].

        A window is left out only where its net effect is nothing or one remaining operation: then
        going from the state before it to the state after it is one atomic step, and every visible
        state is one that the application had.
        """
        if self._is_out_of_question(start):
            return []
        seq = int(start.seq)
        end = int(start.seq)
        survivor: Op | None = None
        left_out: list[Op] = []
        while seq <= end:
            op = self._ops.get(Seq(seq))
            seq += 1
            if op is None:
                continue
            last = self._cancelled_until(op, start.seq)
            if last is not None:
                left_out.append(op)
                end = max(end, last)
            elif survivor is not None:
                self._survivors = (survivor, op)
                return []
            elif op.unsealed and self._waiters.covers(start.seq):
                return []  # a writer would wait for his own close: see `leave_out`
            else:
                survivor = op
            if end - start.seq > WINDOW_OPS_MAX:
                return []
        if (
            survivor is not None
            and survivor.victim
            and any(op.ino == survivor.victim for op in left_out)
        ):
            return []
        return left_out

    def _is_out_of_question(self, start: Op) -> bool:
        """Whether the window would hold the same two survivors as the last one that failed.

        Without this a drain looks at n²/2 operations where n files were rewritten before it began:
        4,000 files took 16 s.
        """
        last = self._cancelled_until(start, start.seq)
        if last is None:
            return True
        return self._survivors is not None and all(
            start.seq < op.seq <= last
            and self._ops.get(op.seq) is op
            and self._cancelled_until(op, start.seq) is None
            for op in self._survivors
        )

    def _cancelled_until(self, op: Op, window_start: Seq) -> Seq | None:
        """Sequence number by which `op` has no effect any more, or None when it has one."""
        if op.begun:
            return None
        ops = self._by_node[op.ino]
        first = ops[0]
        last = ops[-1]
        if (
            first.seq in self._creates
            and first.seq >= window_start
            and last.kind in REMOVING
            and self._never_was(op.ino)
        ):
            return last.seq
        heir = self.replacement(op)
        if heir is None or heir.stage is not Stage.LOGGED:
            # one that may yet be withdrawn, or fail, stands for nothing: what follows would come
            # without either
            return None
        return heir.seq

    def _never_was(self, ino: Ino) -> bool:
        """Whether the removal at the end removes the node's only name, and nothing else was touched
        on the way.

        By what is counted as operations come and go: this is asked for each operation of a window,
        and the node may have thousands.
        """
        begun = self._handed_out.get(ino, {}).values()
        is_touched = self._replacing[ino] or any(op.begun for op in begun)
        return self._net_removals[ino] == 1 and not is_touched

    # -- persistence

    def _index(self, op: Op, creates: bool) -> None:
        self._ops[op.seq] = op
        if self._line is not None:
            self._line[op.seq] = op
        self._by_node.setdefault(op.ino, []).append(op)
        self._victims[op.victim] += 1
        self._count_net(op, 1)
        if op.victim:
            _count(self._replacing, op.ino, 1)
        if op.begun:
            self._hand_out(op)
            if not op.committed:
                self._in_doubt[op.seq] = op
        if creates:
            self._creates.add(op.seq)
        if op.parked:
            self._parked[op.seq] = op
        if op.version is not None:
            self.sizes.count(op.version)
        for directory, _name in op.touches():
            self._by_directory[directory] += 1

    def _save(self, op: Op) -> None:
        self._state.change(SAVE_OP, op_row(op, op.seq in self._creates))
        op.changed = self._state.changes

    def _save_counters(self) -> None:
        """The largest numbers are in the rows themselves until those go."""
        if self._saved_counters != (self._last_seq, self._last_vid):
            self._saved_counters = (self._last_seq, self._last_vid)
            rows = [("seq", self._last_seq), ("vid", self._last_vid)]
            self._state.change_many("INSERT OR REPLACE INTO counter VALUES (?, ?)", rows)

    def _load(self) -> None:
        versions: dict[int, Version] = {
            row[0]: version_from_row(row) for row in self._state.rows(LOAD_VERSIONS)
        }
        for row in self._state.rows("SELECT * FROM op ORDER BY seq"):
            self._index(*op_from_row(row, versions))
            self.clock.not_before(next(reversed(self._ops.values())).logged_at)
        replaced = self._state.rows(
            "SELECT seq, since FROM replaces WHERE seq IN (SELECT seq FROM op)"
        )  # a salvaged log ends earlier
        self._replaced = {Seq(seq): since for seq, since in replaced}
        counters: dict[str, int] = dict(self._state.rows("SELECT name, value FROM counter"))
        self._saved_counters = (counters.get("seq", 0), counters.get("vid", 0))
        self._last_seq = max(self._saved_counters[0], 0, *self._ops)
        self._last_vid = max(self._saved_counters[1], 0, *versions)


def _count(counter: Counter[Ino], ino: Ino, change: int) -> None:
    """What is nothing is not kept."""
    counter[ino] += change
    if not counter[ino]:
        del counter[ino]


def _place(ops: list[Op], op: Op) -> int:
    """Among those of its node, which are in order; a file that is rewritten in a loop has
    thousands.
    """
    return bisect.bisect_left(ops, op.seq, key=_SEQ)


def _refuses(op: Op, node: Ino) -> bool:
    """Whether a node waits for a parked operation: a directory for those on its names, but for none
    that waits for other members.
    """
    return node in (op.ino, op.victim) or (not op.withheld and op.concerns(node))


def _is_passed(op: Op, node: Ino) -> bool:
    """Whether what a node waits for may be done before the operation is: it stands aside, or behind
    one that does, and is another's.
    """
    if op.aside is Aside.PUT_OFF:
        return node not in (op.ino, op.victim, op.parent, op.new_parent)
    return op.parked or (op.aside is Aside.HELD and not op.concerns(node))
