"""Makes the engine's records from its parts. Used under the file system's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from acpfs.drain_records import QueueEntry
from acpfs.errors import errno_name
from acpfs.writeback.listener import Listener
from acpfs.writeback.log.ops import Op
from acpfs.writeback.log.verdicts import Why


def queue_entry(op: Op, listener: Listener, why: Why, now: float) -> QueueEntry:
    """One operation as `status` shows it; `now`: wall clock."""
    version = op.version
    return QueueEntry(
        seq=op.seq,
        name=os.fsdecode(listener.display_path(op)),
        operation=op.kind.value,
        size=version.size if version else 0,
        state=_state(op),
        age_s=max(0.0, now - op.logged_at),
        tries=op.tries,
        last_error=errno_name(op.last_error) if op.last_error else None,
        last_detail=_detail(op),
        next_attempt=op.next_attempt_at or None,
        streamed_bytes=version.streamed_bytes if version else 0,
        why=_why(op, listener, why),
    )


def _why(op: Op, listener: Listener, why: Why) -> str:
    """The order waits for bytes; whether somebody will close their file, has to decide about it, or
    holds up a write to it, is seen above.
    """
    if why is Why.UNSEALED and listener.is_interrupted(op.ino):
        return Why.HALF.value
    if why is Why.BYTES and op.version is not None:
        writer = listener.held_up_by(op.version)
        if writer is not None:
            return f"{Why.WRITTEN.value}{f' (process {writer})' * bool(writer)}"
    return why.value


def _detail(op: Op) -> str | None:
    """A worker that only found the operation in the log has the errno alone."""
    return (
        None
        if op.last_error is None or op.withheld
        else op.last_detail or os.strerror(op.last_error)
    )


def queue_entries(
    ops: Iterable[Op], listener: Listener, why: Callable[[Op], Why], now: float
) -> tuple[QueueEntry, ...]:
    """Several of them. `now`: wall clock, seconds."""
    return tuple(queue_entry(op, listener, why(op), now) for op in ops)


def _state(op: Op) -> str:
    if op.is_stuck or op.started:
        return op.aside.value if op.is_stuck else "committing"
    return op.version.state.value if op.version else "queued"
