"""After a reboot: from the mirror's journal to the state of a mount that has all it names.

The journal knows more than there are bytes for, so the log is cut at the first version that has
neither a copy in the spill directory nor a staging file; what follows it is lost, but for changes
of attributes of what is there, and what precedes it is a moment of the applications' own history.
The upper tree is then made anew from the committed tree and the operations that are left, since the
journal's is of a later moment. Works on rows, before any layer has read them; knows the tables of
nodes, log and committed tree. Nothing here asks the backing directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acpfs.ram.migration import migrate
from acpfs.ram.state import HELD_VERSION, STATE_VERSION
from acpfs.types import ROOT
from acpfs.writeback.log.ops import Metadata, OpKind, VersionState

NAMES_MAX = 20
_STAGED = (VersionState.STAGED.value, VersionState.COMMITTED.value)
_CHANGING = (OpKind.SETATTR.value, OpKind.SETXATTR.value)
_MAKING = (OpKind.STORE.value, OpKind.MKDIR.value, OpKind.SYMLINK.value, OpKind.MKNOD.value)


@dataclass(slots=True)
class Salvaged:
    """What came of it."""

    operations: int = 0
    bytes: int = 0
    lost: int = 0
    """Operations that came after the last one that could be kept."""
    lost_names: list[str] = field(default_factory=list)
    """Of files among them, the first ones."""
    lost_since: float | None = None
    """When the first of them was logged, or what one of them stands for, wall clock; None: nothing
    is lost.
    """
    known_until: float = 0.0
    """What was logged before then is in the journal, by the clock that it was logged with."""


def salvage(
    read_into: Callable[[sqlite3.Connection], None],
    journal: Path,
    target: Path,
    size_of: Callable[[str], int],
    look: Callable[[sqlite3.Connection], None] = lambda _db: None,
) -> Salvaged:
    """Make the state database `target` from a journal.

    `read_into`: makes an empty database the state that the journal has. `journal`: where that is,
    for people.

    `size_of`: bytes of a copy in the spill directory, -1 when it is not there. `look`: at the state
    before anything is changed; what it raises comes through.

    Raises:
        RefusedError: a newer acpfs wrote the journal.
        OSError, sqlite3.Error: the disk's. `target` is not there after any of them, nor after what
            `read_into` raises.
    """
    unfinished = target.with_suffix(".salvage")
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.closing(sqlite3.connect(unfinished, isolation_level=None)) as db:
        read_into(db)
        db.execute("PRAGMA journal_mode=DELETE")
        db.execute("BEGIN")
        migrate(db, HELD_VERSION, journal)
        look(db)
        found = _Salvage(db, size_of).run()
        db.execute(f"PRAGMA user_version={STATE_VERSION}")
        db.execute("COMMIT")
    unfinished.rename(target)
    return found


class _Salvage:
    def __init__(self, db: sqlite3.Connection, size_of: Callable[[str], int]) -> None:
        db.row_factory = sqlite3.Row
        self._db = db
        db.execute("CREATE TABLE IF NOT EXISTS spilled_before (vid, name, size, digest)")
        self._size_of = size_of
        self._children: dict[tuple[int, bytes], int] = {}
        self._found = Salvaged()

    def _rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return self._db.execute(sql, values).fetchall()

    def run(self) -> Salvaged:
        self._keep_counters()
        self._look_how_far()
        ops = self._cut()
        needed = self._needed(ops)
        self._drop_others(needed)
        self._name(ops, needed)
        for ino in needed:
            self._mend_node(ino)
        self._db.execute("DELETE FROM mark")
        self._db.execute("DROP TABLE IF EXISTS mirror_seed")  # of version 0.1.0
        self._db.execute("DROP TABLE IF EXISTS spill_place")  # they are where this was found
        self._db.execute(
            "DROP TABLE IF EXISTS incarnation"
        )  # to other members this is a loss: what was not mirrored is gone
        return self._found

    def _keep_counters(self) -> None:
        """No number is used twice, not even one that is lost."""
        for name, sql in (
            ("seq", "SELECT max(seq) FROM op"),
            ("vid", "SELECT max(vid) FROM version"),
        ):
            known = self._rows("SELECT value FROM counter WHERE name = ?", name)
            largest = max(self._rows(sql)[0][0] or 0, known[0][0] if known else 0)
            self._db.execute("INSERT OR REPLACE INTO counter VALUES (?, ?)", (name, largest))

    def _look_how_far(self) -> None:
        """A step is in the journal with all that was logged before it: whatever time it names."""
        for sql in ("SELECT max(last) FROM node_clock", "SELECT max(logged_at) FROM op"):
            with contextlib.suppress(sqlite3.OperationalError):  # an older acpfs had no such table
                found = self._rows(sql)[0][0]
                self._found.known_until = max(self._found.known_until, found or 0.0)

    # -- the log

    def _cut(self) -> list[sqlite3.Row]:
        """Operations up to the first one whose bytes are nowhere, and changes of attributes behind
        it; the others go.
        """
        kept = []
        ops = self._rows("SELECT * FROM op ORDER BY seq")
        for op in ops:
            if op["vid"] is not None and not self._has_bytes(op["vid"]):
                break
            kept.append(op)
        later = ops[len(kept) :]
        changes = self._changes_of_attributes(kept, later)
        stores = [op for op in later if op["kind"] == OpKind.STORE.value]
        gone = [op["seq"] for op in later if op["seq"] not in changes]
        self._found.operations = len(kept)
        self._found.lost_since = self._lost_since(later) if later else None
        self._found.lost = len({*gone, *(op["seq"] for op in stores)})
        self._found.lost_names = [os.fsdecode(op["name"]) for op in stores[:NAMES_MAX]]
        self._db.executemany("DELETE FROM op WHERE seq = ?", [(seq,) for seq in gone])
        self._db.execute(
            "DELETE FROM version WHERE vid NOT IN (SELECT vid FROM op WHERE vid IS NOT NULL)"
        )
        self._db.execute("DELETE FROM spilled WHERE vid NOT IN (SELECT vid FROM version)")
        self._db.execute("DROP TABLE spilled_before")  # the others lie where this was not found
        return self._rows("SELECT * FROM op ORDER BY seq")

    def _lost_since(self, later: list[sqlite3.Row]) -> float:
        """When the first of them was logged, or what one of them replaced in the log."""
        seqs = {op["seq"] for op in later}
        # an older version's journal has no such table
        has_table = self._rows("SELECT 1 FROM sqlite_master WHERE name = 'replaces'")
        rows = self._rows("SELECT * FROM replaces") if has_table else []
        replaced = [row["since"] for row in rows if row["seq"] in seqs]
        return float(min([later[0]["logged_at"], *replaced]))

    def _changes_of_attributes(self, kept: list[sqlite3.Row], later: list[sqlite3.Row]) -> set[int]:
        """Numbers of those that came later, and are kept all the same, without times.

        Attributes have no order with contents, and a node's row has them: the mount would show what
        never comes to the backing directory. Times are those of the content (`_mend_node`). But
        they belong to a content: what came with one that is lost, or after it, was never said of
        the one that is there (a file of 0600, written anew, then made public).
        """
        known = {row["ino"] for row in self._rows("SELECT ino FROM place")}
        known |= {int(ROOT), *(op["ino"] for op in kept if op["kind"] in _MAKING)}
        changes = set[int]()
        lost = dict[int, list[sqlite3.Row]]()
        for op in later:
            if op["ino"] not in known:
                continue
            if op["kind"] == OpKind.STORE.value:
                lost.setdefault(op["ino"], []).append(op)
            elif op["kind"] in _CHANGING and op["ino"] in lost:
                lost[op["ino"]].append(op)
            elif op["kind"] in _CHANGING:
                meta = Metadata.from_json(op["meta"])
                meta.atime_ns = None
                meta.mtime_ns = None
                if meta != Metadata(rdev=meta.rdev):
                    self._give(op["seq"], meta)
                    changes.add(op["seq"])
        left = [*kept, *(op for op in later if op["seq"] in changes)]
        for ino, ops in lost.items():
            if any(ino in (op["ino"], op["victim"]) for op in left):  # else its row goes, too
                self._take_back_attributes(ino, ops, left)
        return changes

    def _give(self, seq: int, meta: Metadata) -> None:
        self._db.execute("UPDATE op SET meta = ? WHERE seq = ?", (meta.to_json(), seq))

    def _take_back_attributes(
        self, ino: int, lost: list[sqlite3.Row], left: list[sqlite3.Row]
    ) -> None:
        """Give a node the attributes of the content that is kept: its row has later ones.

        `lost`: the first STORE whose bytes are nowhere, and what came after it; `left`: all that is
        kept. That STORE says mode and owner as they were, since no later change of them is folded
        into it (`OperationLog.fold`).
        """
        before = Metadata.from_json(lost[0]["meta"])
        known = dict[bytes, bytes | None]()
        is_new = False
        for op in left:
            if op["ino"] == ino:
                known.update(Metadata.from_json(op["meta"]).xattrs)
                is_new |= bool(op["creates"])
        touched = {name for op in lost for name in Metadata.from_json(op["meta"]).xattrs}
        rows = self._rows("SELECT mode, uid, gid, xattrs FROM node WHERE ino = ?", ino)
        if not rows:
            return
        row = rows[0]
        xattrs = row["xattrs"]
        if xattrs is not None and touched:
            values = json.loads(xattrs)
            for name in touched:
                values.pop(name.hex(), None)
                value = known.get(name)
                if value is not None:
                    values[name.hex()] = value.hex()
            # What no operation says of a file that has been stored, the backing directory is asked.
            is_known = is_new or known
            xattrs = json.dumps(values) if is_known else None
        mode = row["mode"]
        if before.permissions is not None:
            mode = stat.S_IFMT(mode) | before.permissions
        uid = row["uid"] if before.uid is None else before.uid
        gid = row["gid"] if before.gid is None else before.gid
        self._db.execute(
            "UPDATE node SET mode = ?, uid = ?, gid = ?, xattrs = ? WHERE ino = ?",
            (mode, uid, gid, xattrs, ino),
        )

    def _has_bytes(self, vid: int) -> bool:
        """Settle where a version's bytes are now."""
        (version,) = self._rows("SELECT * FROM version WHERE vid = ?", vid)
        # each place has names of its own: of several copies one lies here
        copies = self._rows(
            "SELECT * FROM spilled WHERE vid = ? UNION ALL "
            "SELECT * FROM spilled_before WHERE vid = ?",
            vid,
            vid,
        )
        here = (one for one in copies if self._size_of(one["name"]) == one["size"])
        copy = next(here, None)
        if copy is not None:
            self._db.execute("INSERT OR REPLACE INTO spilled VALUES (?, ?, ?, ?)", tuple(copy))
        is_staged = version["state"] in _STAGED and version["staging_name"]
        # the kernel wrote on since it was made (`Spill.outdate`)
        is_outdated = copy is not None and version["digest"] not in ("", copy["digest"])
        if is_staged and (copy is None or is_outdated or copy["size"] != version["size"]):
            self._db.execute("DELETE FROM spilled WHERE vid = ?", (vid,))
            self._db.execute("UPDATE version SET tier_id = 0, spilled = 0 WHERE vid = ?", (vid,))
        elif copy is not None:
            self._db.execute(
                "UPDATE version SET tier_id = 0, spilled = 1, size = ?, digest = ? WHERE vid = ?",
                (copy["size"], "" if is_outdated else version["digest"], vid),
            )
        else:
            return False
        self._found.bytes += version["size"]
        return True

    # -- nodes and names

    def _needed(self, ops: list[sqlite3.Row]) -> set[int]:
        """Nodes that operations mention, and all directories above them; the others are found on
        the backing directory again.
        """
        needed = {int(ROOT)}
        wanted = {
            op[column]
            for op in ops
            for column in ("ino", "parent", "new_parent", "victim")
            if op[column]
        }
        while wanted:
            needed |= wanted
            above = {
                row["parent"]
                for ino in wanted
                for row in self._rows("SELECT parent FROM place WHERE ino = ?", ino)
            }
            wanted = above - needed
        return needed

    def _drop_others(self, needed: set[int]) -> None:
        self._db.execute("CREATE TEMP TABLE needed (ino INTEGER PRIMARY KEY)")
        self._db.executemany("INSERT INTO needed VALUES (?)", [(ino,) for ino in needed])
        self._db.execute("DELETE FROM node WHERE ino NOT IN (SELECT ino FROM needed)")
        self._db.execute(
            "DELETE FROM place WHERE ino NOT IN (SELECT ino FROM needed) OR parent NOT IN "
            "(SELECT ino FROM needed)"
        )

    def _name(self, ops: list[sqlite3.Row], needed: set[int]) -> None:
        """The upper tree: where nodes lie on the backing directory, and what the operations change
        of that.
        """
        children = self._children
        for row in self._rows("SELECT parent, name, ino FROM place"):
            children[(row["parent"], bytes(row["name"]))] = row["ino"]
        for op in ops:
            here = (op["parent"], bytes(op["name"]))
            there = (op["new_parent"], bytes(op["new_name"]))
            kind = OpKind(op["kind"])
            if kind is OpKind.LINK or (op["kind"] in _MAKING and op["creates"]):
                children[here] = op["ino"]
            elif kind in (OpKind.UNLINK, OpKind.RMDIR):
                children[here] = 0
            elif kind is OpKind.RENAME:
                children[here] = 0
                children[there] = op["ino"]
            elif kind is OpKind.EXCHANGE:
                children[here] = op["victim"]
                children[there] = op["ino"]
        self._db.execute("DELETE FROM child")
        rows = [(parent, name, ino) for (parent, name), ino in children.items() if parent in needed]
        self._db.executemany("INSERT INTO child VALUES (?, ?, ?)", rows)

    def _mend_node(self, ino: int) -> None:
        """The node as it was when the last operation was logged that is left: content, size, mtime,
        number of names.
        """
        rows = self._rows("SELECT * FROM node WHERE ino = ?", ino)
        if not rows:
            return
        node = rows[0]
        links = Counter(self._children.values())[ino]
        is_dir = node["mode"] & 0o170000 == 0o040000
        nlink = node["nlink"] if ino == ROOT or (is_dir and links) else links
        staging = ""
        spilled = 0
        size = node["size"]
        mtime_ns = node["mtime_ns"]
        stored = self._rows(
            "SELECT version.*, op.meta, op.seq FROM op JOIN version USING (vid) WHERE op.ino = ? "
            "ORDER BY seq DESC LIMIT 1",
            ino,
        )
        if stored:
            version = stored[0]
            size = version["size"]
            mtime_ns = _mtime_ns(version["meta"], mtime_ns)
            if links:
                staging, spilled = (
                    ("", version["vid"]) if version["spilled"] else (version["staging_name"], 0)
                )
        elif node["identity"] and not is_dir:
            _lower_ino, size, mtime_ns, _ctime_ns = json.loads(node["identity"])
        # What utime set behind the last close is not on the backing directory yet, either.
        since = stored[0]["seq"] if stored else 0
        for op in self._rows(
            "SELECT meta FROM op WHERE ino = ? AND kind IN (?, ?) AND seq > ? ORDER BY seq",
            ino,
            *_CHANGING,  # of both kinds: times are folded into a change of xattrs, too
            since,
        ):
            mtime_ns = _mtime_ns(op["meta"], mtime_ns)
        self._db.execute(
            """UPDATE node SET tier_id = 0, head = 0, staging = ?, gone = '', spilled = ?,
              unlogged = 0,
              modified = 0, interrupted = 0, failed = 0, failed_at = 0,
              writing = 'appending', last_writing = 'appending',
              nlink = ?, size = ?, mtime_ns = ? WHERE ino = ?""",
            (staging, spilled, nlink, size, mtime_ns, ino),
        )


def _mtime_ns(meta: str, otherwise: int) -> int:
    """That an operation gives a node."""
    found = json.loads(meta)[4]
    return otherwise if found is None else int(found)
