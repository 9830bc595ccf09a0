"""What the write-back engine says about itself: frozen records for `status`, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from acpfs.types import Ino, Seq

QUEUE_ENTRIES_MAX = 1000
"""Most queue entries in one record; the counts are always complete. `status` must answer quickly with a million files queued."""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One operation that the backing directory has not got yet."""

    seq: Seq
    ino: Ino
    name: str
    """Path below the mount point, as `ls` would show it."""
    kind: str
    size: int
    state: str
    """`complete`, `streaming`, `staged` for files, `queued` for others; `committing`, `held` (waits for a parked one), `parked` for all."""
    streamed_bytes: int
    tries: int
    last_error: str | None
    """Symbolic errno."""
    next_attempt_at: float
    """Wall clock, seconds; 0 when none is scheduled."""
    parked: bool
    logged_at: float
    digest: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """An operation that met what somebody had changed on the backing directory while the mount was away."""

    path: bytes
    """Below the backing directory; what is there was left alone."""
    kind: str
    kept_as: bytes
    """Where the mount's content went instead; b"": the operation was not carried out."""
    at: float


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The write-back engine as of now."""

    queued_ops: int
    dirty_bytes: int
    """Sum of the sizes of all versions that are not persisted."""
    staged_bytes: int
    """Part of `dirty_bytes` that already lies in staging files."""
    oldest_logged_at: float | None
    """Wall clock, seconds: when the oldest queued operation was made; None when the log is empty."""
    queue: tuple[QueueEntry, ...]
    """Oldest first, at most QUEUE_ENTRIES_MAX."""
    streaming: tuple[QueueEntry, ...]
    parked: tuple[QueueEntry, ...]
    persisted_ops: int
    persisted_bytes: int
    streamed_bytes: int
    """All bytes ever written into staging files, retries included."""
    retries: int
    elided_ops: int
    discarded_ops: int
    restarted_streams: int
    """Pieces read a second time because the file was changed while it was streamed."""
    verified_files: int
    verify_failures: int
    repairs: int
    """Times the backing directory was not as left (parent removed, name taken from outside) and was put right."""
    commit_groups: int
    held: bool
    """Paused by an operator or a test."""
    bandwidth_bytes_per_s: int
    streams_max: int
    manifest_entries: int
    manifest_written: bool
    """Whether the manifest on the backing directory is up to date."""
    conflicts: tuple[Conflict, ...]
    """The newest ones."""
    conflicts_total: int


@dataclass(frozen=True, slots=True)
class Verification:
    """Outcome for one file."""

    path: PurePosixPath
    """Relative to the backing directory; not-UTF-8 bytes as surrogate escapes."""
    expected: str | None
    found: str | None
    status: str
    """`ok`, `mismatch`, `missing` (recorded, but not there), `unknown` (there, but never recorded), `unreadable`."""
    size: int
    error: str | None = None
