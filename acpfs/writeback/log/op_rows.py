"""The rows of operations and versions in the state database; `OperationLog` writes and reads
them.
"""

from __future__ import annotations

from typing import Any

from acpfs.types import Ino, Seq, TierId, VersionId
from acpfs.writeback.log.ops import WITHHELD, Metadata, Op, OpKind, Version, VersionState
from acpfs.writeback.log.stages import Aside, Stage

_STAGES = (Stage.LOGGED, Stage.IN_DOUBT, Stage.COMMITTED)
COMMITTED = 2
"""In the column `committed`: which of them."""
_NUMBERS = {
    stage: sum(stage >= recorded for recorded in _STAGES[1:]) for stage in Stage
}  # what is done in memory alone stands for what was recorded before it
PARKED = 1
LET_GO = 2
DELAYED = 4
"""Bits in the column `parked`."""
SAVE_OP = "INSERT OR REPLACE INTO op VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
LOAD_VERSIONS = (
    "SELECT vid, ino, tier_id, spilled, size, state, staging_name, staging_ino, digest FROM version"
)
"""`spilled`: the copy in the spill directory has the bytes, and no tier file."""
SAVE_VERSION = """INSERT OR REPLACE INTO version
  (vid, ino, tier_id, spilled, size, state, staging_name, staging_ino, digest)
  VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""


def aside_when_parked(error: object) -> Aside:
    """By the error that it is parked for."""
    return Aside.WITHHELD if error == WITHHELD else Aside.PARKED


def op_row(op: Op, creates: bool) -> tuple[object, ...]:
    """Values for `SAVE_OP`."""
    names = (op.parent, op.name, op.new_parent, op.new_name, op.victim)
    content = (op.meta.to_json(), op.payload, None if op.version is None else op.version.vid)
    bits = PARKED * op.parked | LET_GO * op.let_go | DELAYED * op.delayed
    failure = (op.tries, op.last_error, op.next_attempt_at, bits)
    done = _NUMBERS[op.stage]
    return (op.seq, op.kind.value, op.ino, *names, *content, op.logged_at, creates, *failure, done)


def op_from_row(row: tuple[object, ...], versions: dict[int, Version]) -> tuple[Op, bool]:
    """The operation, and whether it creates its node."""
    (
        seq,
        kind,
        ino,
        parent,
        name,
        new_parent,
        new_name,
        victim,
        meta,
        payload,
        vid,
        logged_at,
        creates,
        *failure,
    ) = row
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
        aside=aside_when_parked(last_error) if int(parked) & PARKED else Aside.NONE,  # type: ignore[call-overload]
        let_go=bool(int(parked) & LET_GO),  # type: ignore[call-overload]
        delayed=bool(int(parked) & DELAYED),  # type: ignore[call-overload]
        stage=_STAGES[int(committed)],  # type: ignore[call-overload]
    )
    return op, bool(creates)


def version_row(version: Version) -> tuple[object, ...]:
    """Values for `SAVE_VERSION`."""
    staged = (version.state.value, version.staging_name, version.staging_ino, version.digest)
    return (version.vid, version.ino, version.tier_id, version.spilled, version.size, *staged)


def version_from_row(row: tuple[Any, ...]) -> Version:
    """A row of `LOAD_VERSIONS`; one that was streaming is complete again."""
    vid, ino, tier_id, spilled, size, state, staging_name, staging_ino, digest = row
    known = VersionState(state)
    known = VersionState.COMPLETE if known is VersionState.STREAMING else known
    place = VersionId(vid), Ino(ino), TierId(tier_id), size
    return Version(
        *place, known, staging_name, int(staging_ino), digest=digest, spilled=bool(spilled)
    )
