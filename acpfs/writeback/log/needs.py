"""Whom a pointer waits for, where its writer has said so: node ids, instead of all other members.

The words are given to a node (`user.acpfs.needs`) and taken by the next operation that makes it
visible as a pointer, for that one alone. Both are in the state database, so that they outlive
workers and mounts. Knows nothing of the nodes' records. Used under the lock.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from acpfs.ram.state import StateDatabase
from acpfs.types import NO_INO, Ino, Seq
from acpfs.writeback.log.ops import Op, OpKind

NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
UNUSED_MAX = 256
"""Of nodes whose words no operation has taken: with more, the oldest are forgotten, and that
pointer waits for all.
"""

DDL = """
CREATE TABLE IF NOT EXISTS needs (ino INTEGER PRIMARY KEY, nodes TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS op_needs (seq INTEGER PRIMARY KEY, nodes TEXT NOT NULL);
"""


def parse(value: bytes) -> tuple[str, ...]:
    """Node ids, divided by commas.

    Raises:
        ValueError: none, or not such ids.
    """
    found = tuple(dict.fromkeys(part.strip() for part in value.decode("ascii").split(",")))
    if not all(NODE_ID.fullmatch(node) for node in found):
        raise ValueError("node ids, divided by commas")
    return found


class Needs:
    """What nodes were told, and what operations have taken."""

    def __init__(self, state: StateDatabase) -> None:
        """Load what the last worker left; the log's tables are there."""
        self._state = state
        state.create(DDL)
        state.change("DELETE FROM op_needs WHERE seq NOT IN (SELECT seq FROM op)")
        self._told = {
            Ino(ino): tuple(nodes.split(","))
            for ino, nodes in state.rows("SELECT ino, nodes FROM needs")
        }
        self._taken = {
            Seq(seq): tuple(filter(None, nodes.split(",")))
            for seq, nodes in state.rows("SELECT seq, nodes FROM op_needs")
        }

    def told(self, ino: Ino) -> tuple[str, ...] | None:
        """What the next pointer of a node needs; None: nothing was said."""
        return self._told.get(ino)

    def tell(self, ino: Ino, nodes: tuple[str, ...] | None) -> None:
        """The next pointer of a node needs these; None: all."""
        self._told.pop(ino, None)
        self._state.change("DELETE FROM needs WHERE ino = ?", (ino,))
        if nodes is None:
            return
        self._told[ino] = nodes
        self._state.change("INSERT INTO needs VALUES (?, ?)", (ino, ",".join(nodes)))
        for oldest in list(self._told)[:-UNUSED_MAX]:
            self.tell(oldest, None)

    def __bool__(self) -> bool:
        """Whether anything waits to be taken."""
        return bool(self._told)

    def take(self, op: Op, directory_of: Callable[[Ino], Ino] = lambda _ino: NO_INO) -> None:
        """The operation makes pointers visible: it has what was said of these, and the next one of
        the same nodes has not.

        Where nothing was said of them it has what was said of the nearest directory above, which
        keeps it.
        """
        nodes = (op.ino, op.victim) if op.kind is OpKind.EXCHANGE else (op.ino,)
        said = [self._told[ino] for ino in nodes if ino in self._told] or self._told_above(
            op, directory_of
        )
        for ino in nodes:
            if ino in self._told:
                self.tell(ino, None)
        if said:
            self._save(op.seq, tuple(dict.fromkeys(node for one in said for node in one)))

    def _told_above(self, op: Op, directory_of: Callable[[Ino], Ino]) -> list[tuple[str, ...]]:
        directory = op.new_parent if op.new_parent > 0 else op.parent
        while directory > 0 and directory not in self._told:
            directory = directory_of(directory)
        return [self._told[directory]] if directory > 0 else []

    def give_back(self, op: Op) -> None:
        """The operation is taken back: the next one is to have what it had."""
        taken = self._taken.get(op.seq)
        if taken is not None:
            self.done(op.seq)
            if op.ino not in self._told:
                self.tell(op.ino, taken)

    def of(self, op: Op) -> tuple[str, ...] | None:
        """Whom the operation waits for; None: all other members."""
        return self._taken.get(op.seq)

    def done(self, seq: Seq) -> None:
        """The operation has left the log."""
        if self._taken.pop(seq, None) is not None:
            self._state.change("DELETE FROM op_needs WHERE seq = ?", (seq,))

    def forget(self, node: str) -> bool:
        """No operation that is logged waits for that node any more; whether any did."""
        waiting = [seq for seq, nodes in self._taken.items() if node in nodes]
        for seq in waiting:
            self._save(seq, tuple(one for one in self._taken[seq] if one != node))
        return bool(waiting)

    def _save(self, seq: Seq, nodes: tuple[str, ...]) -> None:
        self._taken[seq] = nodes
        self._state.change("INSERT OR REPLACE INTO op_needs VALUES (?, ?)", (seq, ",".join(nodes)))
