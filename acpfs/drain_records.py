"""Records that the drain makes and control hands out as they are: a part of the JSON contracts of
docs/reference/json.md (`control.reports`).

Times are seconds (wall clock where the name ends in `_at` or is `next_attempt`), sizes bytes,
absent values None, paths as in a shell: what is no UTF-8 in them as surrogate escapes. A field is
never removed or given another meaning; new ones may come. Plain data.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One operation that the backing directory has not seen yet."""

    seq: int
    """Its place in the order."""
    name: str
    """The path that it is about."""
    operation: str
    """store, rename, unlink, mkdir …"""
    size: int
    state: str
    """complete, streaming, staged (files), queued (others), committing, held (waits for a parked
    one), parked, interrupted (its writer was lost), or guarded (a deletion that is held back; only
    in what an unmount leaves).
    """
    age_s: float
    """Since it was logged."""
    tries: int = 0
    """That failed."""
    last_error: str | None = None
    """The errno of the last of them; null: none failed."""
    next_attempt: float | None = None
    """When it is tried again."""
    streamed_bytes: int = 0
    """What the staging file has of it by now."""
    last_detail: str | None = None
    """What `last_error` means, in words, as the log has it."""
    why: str = ""
    """Why it is not committed yet, in words: what the order of commits decided by."""


@dataclass(frozen=True, slots=True)
class ConflictReport:
    """One operation that met something on the backing directory that acpfs had not left there."""

    path: str
    """What is there natively, untouched."""
    operation: str
    """What the mount was about to do."""
    kept_as: str | None
    """Where what the mount had went instead; None: the operation (a deletion, a rename) was not
    carried out.
    """
    at: float


@dataclass(frozen=True, slots=True)
class GuardedReport:
    """A checkpoint that was deleted in the mount and stays on the backing directory until a newer
    one is persisted.
    """

    path: str
    """With `*` for what tells several files of one checkpoint apart."""
    kept_as: str | None
    """Where on the backing directory it lies, if not there."""
    operations: int
    """Deletions that are held back."""
    files: int
    """That it has."""
    size: int
    since: float
    until: float
    """When it goes at the latest."""
    why: str
    """What it waits for."""


@dataclass(frozen=True, slots=True)
class Verification:
    """One file of `verify`."""

    path: str
    status: str
    """ok, mismatch, missing (recorded, but not there), unknown (there, but never recorded) or
    unreadable; of repair also repaired.

    Of RAM: ok, unknown, repaired (a bad copy has left RAM) or damaged.
    """
    size: int = 0
    expected: str | None = None
    """The checksum that was recorded."""
    found: str | None = None
    """The one that the bytes have."""
    error: str | None = None
