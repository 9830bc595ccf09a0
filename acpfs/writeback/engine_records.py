"""What the write-back engine says about itself: frozen records for `status`, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass

from acpfs.backing.member_records import NodeRecord
from acpfs.drain_records import ConflictReport, GuardedReport, QueueEntry
from acpfs.writeback.log.ops import Op

QUEUE_ENTRIES_MAX = 1000
"""Most queue entries in one record; the counts are always complete.

`status` must answer quickly with a million files queued.
"""


@dataclass(frozen=True, slots=True)
class GuardStatistics:
    """The guard as of now."""

    checkpoints: tuple[GuardedReport, ...]
    """Oldest deletion first."""
    operations: int
    """All that is set aside: with removals of directories above."""
    released: dict[str, int]
    """Checkpoints let go since the daemon started, by reason."""
    orphans: tuple[tuple[bytes, ...], ...] = ()
    """Paths of what was moved aside by a mount whose RAM tier was lost: nobody will remove it."""


@dataclass(frozen=True, slots=True)
class PeerReport:
    """Another node, as this one sees it."""

    node: str
    record: NodeRecord | None
    """None: it could not be read yet."""
    silent_s: float
    """Since this node last heard something new."""
    missing: bool
    forgotten: bool
    ahead_s_min: float
    """Its clock is ahead of ours by at least so much (by minus infinity: not measured) …"""
    ahead_s_max: float
    """… and by at most so much."""
    clock_bound_s: float
    """What is reckoned with."""
    clock_wait_s: float
    """How much longer pointers wait for it because of clocks, at most."""
    error: str


@dataclass(frozen=True, slots=True)
class WaitingPointer:
    """An operation that waits for other members."""

    op: Op
    missing: dict[str, str]
    """Node → waits, missing, unknown or lost. Empty: not looked yet."""
    withheld: bool
    needs: tuple[str, ...] | None = None
    """The nodes that its writer named; None: it waits for all."""


@dataclass(frozen=True, slots=True)
class ClusterStatistics:
    """This node among the others, as of now."""

    node: str
    peers: tuple[PeerReport, ...]
    waiting: tuple[WaitingPointer, ...]
    """Oldest first; with `all` only the oldest of them."""
    published: int
    """Records of this node that were written."""
    published_age_s: float | None
    passed: int
    withheld_total: int
    waited_s_max: float
    """The longest time from the close of a pointer until its gate was open."""
    clock_bound_s: float
    """The largest bound that is reckoned with."""
    drift_s: float
    lost: tuple[float, float] | None
    awaited: tuple[bytes, ...]
    """Paths that lookups wait for, because other members are about to persist them."""
    name_waits: int
    name_waits_in_vain: int
    error: str


@dataclass(slots=True)
class DrainCounters:
    """What the engine has done since it was made; its rooms add to it under the lock."""

    persisted_ops: int = 0
    persisted_bytes: int = 0
    streamed_bytes: int = 0
    """All bytes ever written into staging files, retries included."""
    retries: int = 0
    elided_ops: int = 0
    discarded_ops: int = 0
    restarted_streams: int = 0
    """Pieces read a second time because the file was changed while it was streamed."""
    verified_files: int = 0
    verify_failures: int = 0
    equal_files: int = 0
    """Not streamed, because another member had stored the same bytes under the same name."""
    equal_bytes: int = 0
    repairs: int = 0
    """Times the backing directory was not as left (parent removed, name taken from outside) and was
    put right, or taken as it is.
    """
    commit_groups: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The write-back engine as of now."""

    counters: DrainCounters
    """As they were then."""

    queued_ops: int
    dirty_bytes: int
    """Sum of the sizes of all versions that are not persisted."""
    staged_bytes: int
    """Part of `dirty_bytes` that already lies in staging files."""
    oldest_logged_at: float | None
    """Wall clock, seconds: when the oldest queued operation was made; None when the log is
    empty.
    """
    queue: tuple[QueueEntry, ...]
    """Oldest first, at most QUEUE_ENTRIES_MAX."""
    streaming: tuple[QueueEntry, ...]
    parked: tuple[QueueEntry, ...]
    held: bool
    """Paused by an operator or a test."""
    streams_max: int
    conflicts: tuple[ConflictReport, ...]
    """The newest ones."""
    conflicts_total: int
    guard: GuardStatistics
