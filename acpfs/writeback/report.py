"""Makes the engine's records from its parts. Used under the file system's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from acpfs.errors import errno_name
from acpfs.types import Ino
from acpfs.writeback.engine_records import QueuedOp
from acpfs.writeback.listener import Listener
from acpfs.writeback.log.ops import Op
from acpfs.writeback.log.verdicts import Why


def queue_entry(op: Op, listener: Listener, why: Why) -> QueuedOp:
    """One operation as `status` shows it."""
    version = op.version
    return QueuedOp(
        seq=op.seq,
        ino=Ino(op.ino),
        name=os.fsdecode(listener.display_path(op)),
        kind=op.kind.value,
        size=version.size if version else 0,
        state=_state(op),
        streamed_bytes=version.streamed_bytes if version else 0,
        tries=op.tries,
        last_error=errno_name(op.last_error) if op.last_error else None,
        last_detail=_detail(op),
        next_attempt_at=op.next_attempt_at,
        parked=op.parked,
        logged_at=op.logged_at,
        digest=version.digest if version else "",
        why=why.value,
    )


def _detail(op: Op) -> str | None:
    """A worker that only found the operation in the log has the errno alone."""
    return None if op.last_error is None or op.withheld else op.last_detail or os.strerror(op.last_error)


def queue_entries(ops: Iterable[Op], listener: Listener, why: Callable[[Op], Why]) -> tuple[QueuedOp, ...]:
    """Several of them."""
    return tuple(queue_entry(op, listener, why(op)) for op in ops)


def _state(op: Op) -> str:
    if op.is_stuck or op.started:
        return op.aside.value if op.is_stuck else "committing"
    return op.version.state.value if op.version else "queued"
