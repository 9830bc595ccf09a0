"""The checkpoints that were written through this mount: when each began, was closed, and was
persisted.

Follows the changes that `Changes` logs; which files a checkpoint has, and where they are, is not
kept here but looked up where it is asked for. Times are in the state database and so outlive
workers and mounts, not nodes; of a checkpoint that was renamed into place after a takeover the
beginning is not known. Times are for people; what is decided goes by `Moments`. Used under the file
system's lock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from acpfs.checkpoints import Checkpoint, Checkpoints
from acpfs.filesystem.damaged_files import DamagedFiles
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.ram.state import StateDatabase
from acpfs.runtime.clock import Clock
from acpfs.types import Ino
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.log.stages import Aside

DDL = """
CREATE TABLE IF NOT EXISTS checkpoint (
  save_dir BLOB, name BLOB, step INTEGER, epoch INTEGER,
  began_at REAL, closed_at REAL, persisted_at REAL, verified_at REAL,
  PRIMARY KEY (save_dir, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checkpoint_moments (
  save_dir BLOB, name BLOB, closed REAL NOT NULL, persisted REAL NOT NULL,
  PRIMARY KEY (save_dir, name)) WITHOUT ROWID;
"""
BIRTHS_MAX = 4096
"""Files and directories made under other names whose time of birth is remembered, in case they
become checkpoints by rename.
"""
RECORDS_MAX = 4096
NEW_SAVE_S = 30.0
"""A checkpoint that was persisted whole and left alone for so long is saved anew when it is written
to again.
"""


@dataclass(slots=True)
class CheckpointTimes:
    """Wall clock, seconds; 0: not yet."""

    began_at: float
    """First create; 0: not known."""
    closed_at: float = 0.0
    """Last close, or rename into place."""
    persisted_at: float = 0.0
    """Last time that one of its files was persisted."""
    verified_at: float = 0.0
    """Last time that all of its files were read back and found equal; negative: one that was
    persisted was not.
    """


@dataclass(slots=True)
class Moments:
    """The last close and the last file persisted; 0: not yet, or before this boot.

    By `Clock.now`, which no step of the wall clock touches and which is the same in all processes
    of a boot.
    """

    closed: float = 0.0
    persisted: float = 0.0

    def of_this_boot(self, now: float) -> Moments:
        """What an earlier boot stamped may lie ahead; it was before anything that happens now."""
        return Moments(
            self.closed if self.closed <= now else 0.0,
            self.persisted if self.persisted <= now else 0.0,
        )


class Catalogue:
    """Times of checkpoints, and which have files that are not persisted."""

    def __init__(
        self,
        state: StateDatabase,
        table: NodeTable,
        log: OperationLog,
        checkpoints: Checkpoints,
        clock: Clock,
        *,
        verifies: bool,
    ) -> None:
        """Load what the last worker left; after the log and the nodes.

        `verifies`: what is streamed from RAM is read back.
        """
        self._verifies = verifies
        self._now = clock.now
        self._wall = clock.wall
        self.damaged = DamagedFiles(state, clock)
        self._state = state
        self._table = table
        self._log = log
        self.recognise = checkpoints.of
        self._times: OrderedDict[Checkpoint, CheckpointTimes] = OrderedDict()
        self._moments: dict[Checkpoint, Moments] = {}
        self._changed: dict[Checkpoint, None] = {}
        self._unsettled: dict[Ino, Checkpoint] = {}
        self._unsettled_files: Counter[Checkpoint] = Counter()
        self._births: OrderedDict[Ino, float] = OrderedDict()
        self.settlements = 0
        """How often some checkpoint came to be persisted."""
        self._newly_settled: dict[Checkpoint, int] = {}
        state.create(DDL)
        for save_dir, name, step, epoch, *times in state.rows(
            "SELECT * FROM checkpoint ORDER BY began_at"
        ):
            self._times[Checkpoint(bytes(save_dir), bytes(name), step, epoch)] = CheckpointTimes(
                *times
            )
        stamped = {
            (bytes(row[0]), bytes(row[1])): Moments(*row[2:])
            for row in state.rows("SELECT * FROM checkpoint_moments")
        }
        self._moments = {
            c: stamped.get((c.save_dir, c.name), Moments()).of_this_boot(self._now())
            for c in self._times
        }
        for node in table:
            self._look_at(node)
        self._newly_settled = {
            c: 0 for c, times in self._times.items() if times.persisted_at and self.is_settled(c)
        }
        state.before_commit(self._changed, self._flush_rows)

    def of(self, node: Node) -> Checkpoint | None:
        """The checkpoint that a node belongs to by its (first) name."""
        return (
            self.recognise(self._table.path(node.ino), directory=node.is_dir)
            if node.names
            else None
        )

    def times(self, checkpoint: Checkpoint) -> CheckpointTimes | None:
        """None: it was not written through this mount."""
        return self._times.get(checkpoint)

    def closed_at(self, checkpoint: Checkpoint) -> float:
        """When its last file was closed; 0.0: not known."""
        times = self._times.get(checkpoint)
        return 0.0 if times is None else times.closed_at

    def moments(self, checkpoint: Checkpoint) -> Moments:
        """As `times`, for deciding."""
        return self._moments.get(checkpoint, Moments())

    def is_settled(self, checkpoint: Checkpoint) -> bool:
        """Whether nothing of it is being written or waits to be persisted."""
        return not self._unsettled_files[checkpoint]

    def newly_settled(self) -> dict[Checkpoint, int]:
        """Those that came to be persisted and were not `told`, and which time; at first also what
        earlier workers may not have told.
        """
        return dict(self._newly_settled)

    def told(self, settled: dict[Checkpoint, int]) -> None:
        """Somebody has taken note of these; what has settled once more since stays."""
        for checkpoint, number in settled.items():
            if self._newly_settled.get(checkpoint) == number:
                del self._newly_settled[checkpoint]

    # -- what happens

    def born(self, node: Node) -> None:
        """A file was created, or a directory made."""
        now = self._wall()
        checkpoint = self.of(node)
        if checkpoint is None:
            self._births[node.ino] = now
            if len(self._births) > BIRTHS_MAX:
                self._births.popitem(last=False)
        else:
            self._begin(checkpoint, now)
            self._unsettle(node, checkpoint)

    def logged(self, op: Op, node: Node) -> None:
        """An operation on a node (an exchange is one on both) was logged; the upper tree has been
        changed already.
        """
        if op.kind is OpKind.MKDIR:
            self.born(node)
        elif op.kind in (OpKind.RENAME, OpKind.EXCHANGE):
            self._moved(node)
            other = self._table.get(op.victim) if op.kind is OpKind.EXCHANGE else None
            if other is not None:
                self._look_below(other)
                self._settle(other.ino)
                self._look_at(other)
        elif op.kind in (OpKind.STORE, OpKind.LINK):
            self._closed(node)

    def _closed(self, node: Node) -> None:
        checkpoint = self.of(node)
        if checkpoint is not None:
            now = self._wall()
            self._begin(checkpoint, self._births.pop(node.ino, now)).closed_at = now
            self._moments[checkpoint].closed = self._now()
            self._unsettle(node, checkpoint)

    def _moved(self, node: Node) -> None:
        self._look_below(node)
        self._settle(node.ino)
        self._closed(node)

    def _look_below(self, node: Node) -> None:
        """It was moved: what lies below may belong to another checkpoint than before.

        Nothing else does, of which much may be known.
        """
        directories = [node] if node.is_dir else []
        while directories:
            for child in directories.pop().dir.children.values():
                below = self._table.get(child.ino)
                if below is None:
                    continue
                if below.is_dir:
                    directories.append(below)
                self._settle(below.ino)
                self._look_at(below)

    def _look_at(self, node: Node) -> None:
        if node.names and not node.is_dir and (node.body.modified or self._log.is_active(node.ino)):
            checkpoint = self.of(node)
            if checkpoint is not None:
                self._unsettle(node, checkpoint)

    def done(self, op: Op, *, persisted: bool) -> None:
        """An operation left the log, or is a deletion that is held back."""
        self._done(op, op.ino, persisted)
        if op.kind is OpKind.EXCHANGE:
            self._done(op, op.victim, persisted)

    def _done(self, op: Op, ino: Ino, persisted: bool) -> None:
        node = self._table.get(ino)
        if node is None or not node.names:
            self._settle(ino)
            return
        if node.body.modified or self._log.is_active(ino):
            return
        checkpoint = self.of(node)
        self._settle(ino)
        is_stored = persisted and op.kind in (
            OpKind.STORE,
            OpKind.RENAME,
            OpKind.EXCHANGE,
            OpKind.LINK,
        )
        is_stored = is_stored or op.aside is Aside.GUARDED  # it had waited for the other name's
        if is_stored:
            self.damaged.replaced(self._table.path(ino))
        if checkpoint is not None and is_stored:
            now = self._wall()
            times = self._known(checkpoint)
            times.persisted_at = now
            self._moments[checkpoint].persisted = self._now()
            if op.version is not None:
                times.verified_at = (
                    now
                    if self._verifies and op.version.tier_id and times.verified_at >= 0
                    else -1.0
                )
            if self.is_settled(checkpoint):
                self.settlements += 1
                self._newly_settled[checkpoint] = self.settlements

    def forgotten(self, node: Node) -> None:
        """A file lost its name before it was ever logged."""
        self._settle(node.ino)

    def verified(self, checkpoint: Checkpoint, since: float) -> None:
        """All its files were read back from `since` (wall clock) on, and are as they were
        written.
        """
        times = self._times.get(checkpoint)
        if times is not None:
            times.verified_at = since
            self._changed[checkpoint] = None

    def forget(self, checkpoint: Checkpoint) -> None:
        """Nothing is left of it."""
        if checkpoint in self._times:
            self._drop(checkpoint)

    def _drop(self, checkpoint: Checkpoint) -> None:
        del self._times[checkpoint], self._moments[checkpoint]
        self._changed[checkpoint] = None

    def _begin(self, checkpoint: Checkpoint, at: float) -> CheckpointTimes:
        """An application writes to it."""
        is_new = checkpoint not in self._times
        times = self._known(checkpoint)
        is_saved_anew = (
            self.is_settled(checkpoint)
            and times.closed_at > 0
            and self._moments[checkpoint].closed < self._now() - NEW_SAVE_S
        )
        if is_new or is_saved_anew:
            times.began_at = at
            times.closed_at = 0.0
            times.persisted_at = 0.0
            times.verified_at = 0.0
        return times

    def _known(self, checkpoint: Checkpoint) -> CheckpointTimes:
        """Its times, which will be recorded anew.

        The drain asks by this and begins no save: one that took longer than `NEW_SAVE_S` to drain
        would count as begun when it was persisted.
        """
        times = self._times.get(checkpoint)
        if times is None:
            times = CheckpointTimes(0.0)
            self._times[checkpoint] = times
            self._moments[checkpoint] = Moments()
            if len(self._times) > RECORDS_MAX:
                self._drop(next(iter(self._times)))
        self._changed[checkpoint] = None
        return times

    def _unsettle(self, node: Node, checkpoint: Checkpoint) -> None:
        self._settle(node.ino)
        self._unsettled[node.ino] = checkpoint
        self._unsettled_files[checkpoint] += 1

    def _settle(self, ino: Ino) -> None:
        checkpoint = self._unsettled.pop(ino, None)
        if checkpoint is not None:
            self._unsettled_files[checkpoint] -= 1
            if not self._unsettled_files[checkpoint]:
                del self._unsettled_files[checkpoint]

    def _flush_rows(self) -> None:
        for checkpoint in self._changed:
            times = self._times.get(checkpoint)
            key = (checkpoint.save_dir, checkpoint.name)
            if times is None:
                self._state.change("DELETE FROM checkpoint WHERE save_dir = ? AND name = ?", key)
                self._state.change(
                    "DELETE FROM checkpoint_moments WHERE save_dir = ? AND name = ?", key
                )
            else:
                row = (
                    *key,
                    checkpoint.step,
                    checkpoint.epoch,
                    times.began_at,
                    times.closed_at,
                    times.persisted_at,
                    times.verified_at,
                )
                self._state.change(
                    "INSERT OR REPLACE INTO checkpoint VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row
                )
                moments = self._moments[checkpoint]
                self._state.change(
                    "INSERT OR REPLACE INTO checkpoint_moments VALUES (?, ?, ?, ?)",
                    (*key, moments.closed, moments.persisted),
                )
        self._changed.clear()
