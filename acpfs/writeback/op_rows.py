"""How an operation is read back from its row in the state database; `OperationLog` writes it."""

from __future__ import annotations

from acpfs.types import Seq
from acpfs.writeback.ops import Metadata, Op, OpKind, Version

COMMITTED = 2
"""In the column `committed`: 0 not handed to the backing directory yet, 1 begun, 2 committed."""
PARKED, LET_GO = 1, 2
"""Bits in the column `parked`."""


def op_from_row(row: tuple[object, ...], versions: dict[int, Version]) -> tuple[Op, bool]:
    """The operation, and whether it creates its node."""
    seq, kind, ino, parent, name, new_parent, new_name, victim, meta, payload, vid, logged_at, creates, *failure = row
    tries, last_error, next_attempt_at, parked, committed = failure
    op = Op(
        Seq(seq),  # type: ignore[arg-type]
        OpKind(kind),
        ino,  # type: ignore[arg-type]
        parent,  # type: ignore[arg-type]
        name,  # type: ignore[arg-type]
        new_parent,  # type: ignore[arg-type]
        new_name,  # type: ignore[arg-type]
        victim,  # type: ignore[arg-type]
        Metadata.from_json(str(meta)),
        payload,  # type: ignore[arg-type]
        versions.get(vid) if vid is not None else None,  # type: ignore[call-overload]
        logged_at,  # type: ignore[arg-type]
        tries,  # type: ignore[arg-type]
        last_error,  # type: ignore[arg-type]
        next_attempt_at,  # type: ignore[arg-type]
        parked=bool(int(parked) & PARKED),  # type: ignore[call-overload]
        let_go=bool(int(parked) & LET_GO),  # type: ignore[call-overload]
        begun=bool(committed),
        committed=committed == COMMITTED,
        started=committed == COMMITTED,
    )
    return op, bool(creates)
