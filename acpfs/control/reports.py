"""Records that control hands out: the JSON contracts of docs/OPERATIONS.md, field by field.

Times are seconds (wall clock where the name ends in `_at` or is `next_attempt`), sizes bytes, absent values None. A field is never
removed or given another meaning; new ones may come. Plain data, no behaviour beyond (de)serialisation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from acpfs.control.protocol import Json


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One operation that the backing directory has not seen yet."""

    seq: int
    name: str
    operation: str
    size: int
    state: str
    """complete, streaming, staged (files), queued (others), committing, held (waits for a parked one), parked, or
    interrupted (its writer was lost)."""
    age_s: float
    tries: int = 0
    last_error: str | None = None
    next_attempt: float | None = None
    streamed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RamReport:
    """The RAM tier. dirty + clean = used."""

    budget_bytes: int
    used_bytes: int
    dirty_bytes: int
    clean_bytes: int
    reserved_bytes: int
    files: int
    waiting_writers: int
    directory: str
    own_tmpfs: bool
    huge_pages: str
    prefaulted_bytes: int = 0
    """Made ready by `prefault` and not given back yet; not among the used ones."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """How the backing directory answers."""

    state: str
    """ok, slow, refusing (calls return, with errors) or stuck (a call does not return)."""
    since: float
    calls_out: int
    calls_stuck: int
    oldest_call_s: float
    failures: int
    last_error: str | None = None
    problem: str | None = None
    """What is wrong with the directory at the path (unmounted, another volume, cannot be opened)."""


@dataclass(frozen=True, slots=True)
class ConflictReport:
    """One operation that met something on the backing directory that acpfs had not left there."""

    path: str
    """What is there natively, untouched."""
    operation: str
    kept_as: str | None
    """Where what the mount had went instead; None: the operation (a deletion, a rename) was not carried out."""
    at: float


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The daemon's process."""

    pid: int
    started_at: float
    version: str
    number: int = 1
    """Of this mount's workers; one that dies is followed by the next."""
    pause_s: float = 0.0
    """How long nobody served before this one did."""
    last_end: str = ""
    """Why its predecessor is not there any more: died, hung, reload, or why a reload was refused."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A file whose writers wait for room in RAM."""

    path: str
    reason: str
    since: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """Answer of `status`."""

    state: str
    """serving, bypassed, or draining (asked to end)."""
    mount: str
    backing: str
    node: str
    volume: str
    transport: str
    lanes: dict[str, int]
    """Lane → open files that use it."""
    fsync: str
    worker: WorkerReport
    ram: RamReport
    queue: list[QueueEntry]
    """The oldest entries; `queue_length` counts all."""
    queue_length: int
    queue_bytes: int
    parked: int
    """Operations that the backing directory refused for good; `retry` or `discard` them."""
    interrupted: int
    """Files whose writer was lost with an earlier daemon; `retry` stores them as they are, `discard` drops them."""
    open_files: int
    oldest_unpersisted_age_s: float
    backing_health: HealthReport
    features: dict[str, bool | int]
    counters: dict[str, int]
    """Fall-backs and other events since the daemon started."""
    warnings: list[str] = field(default_factory=list)
    transport_reason: str = ""
    """Why this transport."""
    lane_choices: dict[str, int] = field(default_factory=dict)
    """Why opens took the lane they took → how many, since the daemon started."""
    on_failure: str = "stop"
    """native or stop: what applications meet when acpfs cannot go on. stop also where the backing directory could not be bound beneath."""
    bypassed_since: float | None = None
    """New opens are native since then: the mount was taken away from over the backing directory."""
    bypass_reason: str | None = None
    conflicts: list[ConflictReport] = field(default_factory=list)
    """The newest; `conflicts_total` counts all."""
    conflicts_total: int = 0
    """What was not drained to its place because somebody had changed that on the backing directory meanwhile."""

    held_files: list[HeldFile] = field(default_factory=list)
    """Files in the passthrough lane whose writers are held back."""

    def to_json(self) -> Json:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FileState:
    """One line of `ls`."""

    path: str
    size: int
    state: str
    """writing, complete, streaming, staged, committed, clean, parked or interrupted."""
    lane: str
    tier: str
    """ram, backing or ram+backing: where its bytes are."""
    checksum: str | None
    """xxh3-128 of the persisted or staged content."""
    error: str | None
    age_s: float
    """Since the content was complete (or last changed)."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What of the log up to some number is still to be done."""

    operations: int
    size_bytes: int
    stuck: bool
    """Nothing of it will be done without an operator: what is left is parked, or waits for something parked."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One file of `verify`."""

    path: str
    status: str
    """ok, mismatch, missing (recorded, but not there), unknown (there, but never recorded) or unreadable; of repair also repaired."""
    size: int = 0
    expected: str | None = None
    found: str | None = None
    error: str | None = None
