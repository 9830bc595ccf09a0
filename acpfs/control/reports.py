"""Records that control hands out: the JSON contracts of docs/reference/json.md, field by field.

That page is made from the text below each field.

Times are seconds (wall clock where the name ends in `_at` or is `next_attempt`), sizes bytes,
absent values None. A field is never removed or given another meaning; new ones may come. Plain
data, no behaviour beyond (de)serialisation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from acpfs.control.socket_messages import Json
from acpfs.drain_records import ConflictReport, GuardedReport, QueueEntry

GAUGE = "gauge"


def gauge(text: str) -> dict[str, str]:
    """Of a field: the metric of that name says the same, and this is its text. See
    `metric_table`.
    """
    return {GAUGE: text}


@dataclass(frozen=True, slots=True)
class OwnerShareReport:
    """What the files of one owner take of his share of RAM (`ram_per_user`)."""

    uid: int
    """The owner."""
    taken_bytes: int
    """That the backing directory has not got."""
    reserved_bytes: int
    """Promised to writers of his files."""
    waiting_writers: int
    """Of his files, that wait since his share is used up."""


@dataclass(frozen=True, slots=True)
class RamReport:
    """The RAM tier. dirty + clean = used.

    Its gauges are called `ram_` and the field, those of `SpillReport` `spill_`.
    """

    budget_bytes: int = field(metadata=gauge("most bytes that the RAM tier may take"))
    used_bytes: int = field(metadata=gauge("bytes in the RAM tier"))
    dirty_bytes: int = field(
        metadata=gauge("bytes in the RAM tier that the backing directory has not got")
    )
    clean_bytes: int = field(metadata=gauge("bytes in the RAM tier that may leave"))
    reserved_bytes: int = field(metadata=gauge("bytes promised to writes under way"))
    files: int = field(metadata=gauge("files in the RAM tier"))
    waiting_writers: int
    """Writers that wait for room in it."""
    directory: str
    """Where it lies."""
    own_tmpfs: bool
    """Whether that is a tmpfs of its own."""
    huge_pages: str
    """What that tmpfs does with huge pages."""
    prefaulted_bytes: int = field(
        default=0, metadata=gauge("bytes made ready for the next save, beside the used ones")
    )
    """Made ready by `prefault` and not given back yet; not among the used ones."""
    prefault: str = ""
    """Why memory is made ready, or why not."""
    retained_bytes: int = field(
        default=0,
        metadata=gauge(
            "clean bytes of checkpoints that stay as long as there is room without them"
        ),
    )
    """Among the clean ones: of checkpoints that stay as long as there is room without them."""
    pinned_bytes: int = field(
        default=0, metadata=gauge("bytes in the RAM tier of files at and below pinned paths")
    )
    """Among the used ones: of files at and below pinned paths."""
    urgent_bytes: int = field(
        default=0, metadata=gauge("last part of the budget, only for urgent files")
    )
    """The last part of the budget, which only files below urgent paths get."""
    share_bytes: int = field(
        default=0, metadata=gauge("most dirty bytes of one owner's files (ram_per_user); 0: any")
    )
    """Most that the files of one owner may take before the backing directory has them
    (`ram_per_user`); 0: no limit.
    """
    owners: list[OwnerShareReport] = field(default_factory=list)
    """Who takes how much of that, the one with most first; empty without a limit."""
    leaving_bytes: int = 0
    """Among the dirty ones: of files that were deleted or replaced, and that a stream still
    reads.
    """
    peak_bytes: int = field(
        default=0, metadata=gauge("most bytes in the RAM tier since the daemon started")
    )
    """The most that was used since the daemon started."""
    tmpfs_used_bytes: int = field(
        default=0, metadata=gauge("what the RAM tier's tmpfs says that it holds")
    )
    """What the RAM tier's own tmpfs says that it holds: the same as used, when nobody is writing.

    0 where it has no tmpfs of its own.
    """
    held_bytes: int = field(
        default=0, metadata=gauge("what the RAM tier holds of other nodes (`copies_ram`)")
    )
    """Copies of other nodes' files and logs; not among the used ones."""
    tmpfs_size_bytes: int = 0
    """What that tmpfs takes at most: the budget and a slack; more, for a while, after the budget
    was lowered.
    """


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """How much of what is not persisted a reboot of the node would leave."""

    state: str
    """on, seeding (the journal is being begun), or off, and `why`."""
    why: str | None
    """Why it is off or being begun."""
    until: int
    """Operations up to this number would be drained after a reboot; what follows is lost with the
    RAM tier.
    """
    behind_files: int
    """Files that have no copy yet, and `behind_bytes` their sizes."""
    behind_bytes: int
    """Sizes of files that have no copy yet."""
    pending: int
    """Steps that the journal does not have yet."""


@dataclass(frozen=True, slots=True)
class SpillReport:
    """The spill tier."""

    directory: str
    """Where it lies."""
    mode: str
    """move or mirror."""
    state: str
    """ok, full (its budget or its disk), failing (left alone for a while), stuck (a call does not
    return) or closed (only emptied).
    """
    budget_bytes: int = field(metadata=gauge("most bytes that acpfs takes in the spill directory"))
    used_bytes: int = field(metadata=gauge("bytes of copies in the spill directory"))
    files: int = field(metadata=gauge("copies in the spill directory"))
    copying_files: int
    """Copies that are being made, and `copying_bytes` their sizes."""
    copying_bytes: int = field(metadata=gauge("bytes that are being copied to the spill directory"))
    last_error: str | None = None
    """What the disk said last."""
    mirror: MirrorReport | None = None
    """None: the mode is to move."""


@dataclass(frozen=True, slots=True)
class CopiesReport:
    """What another node holds of this mount (`copies`): what its loss would leave."""

    state: str
    """on, seeding (the copy is being begun), away (the holder is out of reach: what it has can be
    adopted, and what was closed since has no copy), or off, and `why`.
    """
    why: str | None
    """Why it is off, away or being begun."""
    holder: str | None
    """The node that holds the copy; where it is out of reach, that has what was copied before."""
    until: int
    """Operations up to this number would be drained from there; what follows would be lost with
    this node.
    """
    taken_over_by: str | None
    """The node that has adopted the copy, as this one was silent: it drains it, or has, and nothing
    is committed from here any more.
    """
    behind_files: int
    """Files that have no copy yet, and `behind_bytes` their sizes: what would be lost now, with
    what was done after it.
    """
    behind_bytes: int
    """Sizes of files that have no copy yet."""
    pending: int
    """Steps that the holder does not have yet."""
    files: int
    """That have a copy and are not persisted."""
    bytes: int
    """Of copies."""
    copied_files: int
    """That were copied since the daemon started."""
    copied_bytes: int
    """Their bytes."""
    failures: int
    """Times that a holder failed, or had no room."""


@dataclass(frozen=True, slots=True)
class HeldCopyReport:
    """What this mount holds of another node."""

    node: str
    """Whose it is."""
    files: int
    """Copies, and the journal's two."""
    bytes: int
    """What they take of RAM."""
    until: float
    """All that was closed there before then is here, by its clock; seconds since the epoch."""
    silent_s: float
    """Since it was heard of last."""
    claimed: bool
    """Its log was claimed: nothing more is taken."""
    adoption: str | None = None
    """Since it is silent: that its log is adopted, or why that waits for `acpfs-ctl adopt`."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """How the backing directory answers."""

    state: str
    """ok, slow, refusing (calls return, with errors) or stuck (a call does not return)."""
    since: float
    calls_out: int
    """Calls on it that have not returned."""
    calls_stuck: int
    """Those that have not returned for long."""
    oldest_call_s: float
    """How long the oldest of them has been out."""
    failures: int
    """Calls that failed, since the daemon started."""
    last_error: str | None = None
    """What calls that fail now say; null once one of their kind is answered."""
    why: str | None = None
    """What explains the state, in words: the call that does not return, or what calls that fail now
    say; null where it is ok.
    """
    problem: str | None = None
    """What is wrong with the directory at the path (unmounted, another volume, cannot be
    opened).
    """


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The daemon's process."""

    pid: int
    """Of the process that serves."""
    started_at: float
    """When it began."""
    version: str
    """Of acpfs in it."""
    number: int = 1
    """Of this mount's workers; one that dies is followed by the next."""
    pause_s: float = 0.0
    """How long nobody served before this one did."""
    last_end: str = ""
    """Why its predecessor is not there any more: died, hung, reload, what the machine had none of,
    or why a reload was refused.
    """
    reload_failed: str = ""
    """Why the last reload did not get as far as another worker; this one goes on."""
    keeper: bool = False
    """Whether a keeper holds the session, so that the mount outlives the end of all its
    processes.
    """
    log_file: str | None = None
    """Where the log is; None: standard error, which under a service manager is its journal."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A file whose writers wait for room in RAM."""

    path: str
    reason: str
    """RAM is full, the machine is short of memory, or that somebody reads the file so that nothing
    of it can leave RAM.
    """
    since: float
    resident_bytes: int
    """What of it is in RAM."""


@dataclass(frozen=True, slots=True)
class UrgentReport:
    """A path whose files take from what is kept for urgent files."""

    path: str
    left_s: float
    """For how much longer."""
    uid: int
    """Who declared it."""


@dataclass(frozen=True, slots=True)
class WaitingReport:
    """Somebody who waits for room in RAM."""

    path: str
    pid: int | None
    """The thread whose call it is; None: not known."""
    command: str | None
    """Its name; None: not known."""
    purpose: str
    """write, allocate, bring up (a file of the backing directory, to be changed), copy aside (what
    a version needs), or let go on (a writer in the passthrough lane is held until then).
    """
    wanted_bytes: int
    """What it waits for."""
    since: float
    reason: str
    """RAM is full, RAM holds more than its budget, which was lowered, the machine is short of
    memory …
    """


@dataclass(frozen=True, slots=True)
class OpenWriter:
    """A process that is in the middle of a file: it has it open, has written to it, or may have,
    and has not closed it.
    """

    pid: int
    """Of the process."""
    command: str | None
    """None: it is gone, or not seen."""


@dataclass(frozen=True, slots=True)
class WrittenFileReport:
    """A file that somebody writes: what it has now is published when all of these have closed
    it.
    """

    path: str
    since: float
    """Seconds since the epoch: the first change that is in no version."""
    writers: list[OpenWriter]
    """At most 8 of the processes that are not done with it, as far as they are known."""


@dataclass(frozen=True, slots=True)
class WaitingCallReport:
    """A call of an application that has waited for some seconds: for the backing directory, for
    room, or to be persisted.
    """

    path: str
    """Of the file, or of the directory in which a name is looked up or made."""
    pid: int | None
    """The thread whose call it is; None: not known."""
    command: str | None
    """Its name; None: not known."""
    call: str
    """As the kernel calls it: lookup, open, readdir, fsync …"""
    waited_s: float
    """Until now."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One mount of the backing directory, as another one sees it.

    Times are seconds; None: not known.
    """

    node: str
    """Its node id."""
    state: str
    """this (the mount that answers), live, missing (not heard for long), away (ended with something
    in its RAM tier), left (unmounted in order), gone (its machine was started again, its RAM tier
    is lost), forgotten (missing for longer than `node_forget_after`), unreadable.
    """
    host: str
    """Its machine."""
    mount: str
    """Its mount point."""
    version: str
    """Of acpfs there."""
    silent_s: float
    """Since something new was heard of it."""
    lag_s: float | None
    """By how much its watermark is behind its clock: all older than that is persisted."""
    operations: int
    """That it has not persisted."""
    dirty_bytes: int
    """That it has not persisted."""
    withheld: int
    """Pointers that it holds back because of other nodes."""
    clock_ahead_s: tuple[float | None, float | None]
    """Bounds, as measured, of what its clock is ahead of this node's."""
    clock_bound_s: float
    """What is reckoned with."""
    drift_s: float
    """What its wall clock was set by, and has not been made up for yet, in what was closed before,
    either.
    """
    lost: tuple[float, float] | None
    """What it closed between these times may be lost."""
    errors: list[str] = field(default_factory=list)
    """What its record says that is wrong, and why nothing is exchanged with it."""
    got_bytes: int = 0
    """Of cold files, that this mount had from it directly (`exchange`), since its daemon began."""
    given_bytes: int = 0
    """That this mount gave it."""
    held_bytes: int = 0
    """Of what it has not persisted, held here for its loss (`copies`)."""
    is_holder: bool = False
    """It holds what this mount has not persisted."""


@dataclass(frozen=True, slots=True)
class WaitingPointerReport:
    """A pointer file that waits for other nodes, or what keeps its name because of a pointer that
    another node is to change.
    """

    path: str
    closed_at: float
    """When it was closed, or renamed into place."""
    waits_for: dict[str, str]
    """Node → waits, missing, unknown (there is no record of it), lost, withheld (an earlier one) or
    named (by a pointer that it is to change); empty as long as nobody has looked.
    """
    withheld: bool
    """Set aside: a node that may have what it points at is missing, or has lost it."""
    needs: list[str] | None = None
    """The nodes that its writer named (`user.acpfs.needs`); null: it needs all."""


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """This node among those that share the backing directory."""

    order: str
    """pointers, all or off."""
    nodes: int
    """Others that have a record."""
    live: int
    """Of them: those that are heard."""
    missing: list[str]
    """Of them: the node ids of those that are not heard, and may have what is not persisted."""
    waiting: list[WaitingPointerReport]
    """Pointers that wait, and what keeps its name because of one."""
    withheld: int
    """How many of these are withheld."""
    clock_bound_s: float
    """The largest that is reckoned with; more than `clock_bound` where clocks were measured to
    differ more, or were set.
    """
    drift_s: float
    """What the wall clock was set by, and has not been made up for yet, in what was closed before,
    either.
    """
    record_age_s: float | None
    """Since this node's own record was last written."""
    awaited: list[str]
    """Paths that lookups wait for, because other nodes are about to persist them
    (`wait_for_peers`).
    """
    last_error: str | None = None
    """What the records of nodes met last."""
    clock_problem: str | None = None
    """Which clock holds pointers up, by how much, and what helps, in words."""


@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """What goes directly between this node and others, of files that are cold (`exchange`)."""

    listens: list[str]
    """Addresses with the port at which others reach it."""
    encrypted: bool
    """Whether more than the keys is (`peer_encryption`)."""
    got_bytes: int
    """Of cold files, that other nodes gave since the daemon started; by node in `nodes`."""
    given_bytes: int
    """That this one gave."""
    failures: int
    """Times that another node did not answer: the storage was read instead."""
    process: int
    """The process that does it; 0: it is being started again."""
    ways: dict[str, str] = field(default_factory=dict)
    """Node → how what goes between it and this one is protected, as of their last connection:
    `sealed`, `tls`, or `plain`.
    """
    strange: dict[str, str] = field(default_factory=dict)
    """Node → why nothing goes between it and this one: it speaks another version. A sentence with
    both.
    """


@dataclass(frozen=True, slots=True)
class DurationsReport:
    """How long something took, since the daemon started, in buckets."""

    bounds_s: list[float]
    """Upper bounds of the buckets."""
    counts: list[int]
    """As many as took no longer than that bound and longer than the one before; one more, at the
    end, for what took longer than all.
    """
    sum_s: float
    """Of all that was measured."""


@dataclass(frozen=True, slots=True)
class PaceReport:
    """Whether the drain keeps up with what comes."""

    in_per_s: float
    """Operations that were logged, over the last half minute."""
    out_per_s: float
    """Operations that were persisted, or left out."""
    falls_behind: bool
    """More and more wait, and they are many."""


@dataclass(frozen=True, slots=True)
class Status:
    """Answer of `status`."""

    state: str
    """serving, bypassed, or draining (asked to end)."""
    mount: str
    """The mount point."""
    backing: str
    """The backing directory."""
    node: str
    """This mount's identity among all that share the backing directory."""
    volume: str
    """The backing directory's identity."""
    transport: str
    """How the kernel is spoken to: native or libfuse."""
    lanes: dict[str, int]
    """Lane → open files that use it."""
    fsync: str
    """ordered, copied or durable."""
    worker: WorkerReport
    """The process that serves."""
    ram: RamReport
    """The RAM tier."""
    queue: list[QueueEntry]
    """The oldest entries; `queue_length` counts all."""
    queue_length: int
    """All operations that are not persisted."""
    queue_bytes: int
    """Bytes of contents in them."""
    parked: int
    """Operations that the backing directory refused for good; `retry` or `discard` them."""
    interrupted: int
    """Files whose writer was lost with an earlier daemon; `retry` stores them as they are,
    `discard` drops them.
    """
    open_files: int
    """Files that programs have open."""
    oldest_unpersisted_age_s: float
    """Age of the oldest operation that is not persisted; 0 when there is none."""
    backing_health: HealthReport
    """How the backing directory answers."""
    features: dict[str, bool | int]
    """What the backing file system can do, as probed at mount."""
    counters: dict[str, int]
    """Since the daemon started: what was persisted, and every fall-back (`retries`,
    `restarted_streams`, `repairs`, `stale_answers`, `backing_timeouts`, `evicted_files` …).
    """
    warnings: list[str] = field(default_factory=list)
    """What you should know about this mount."""
    transport_reason: str = ""
    """Why this transport."""
    lane_choices: dict[str, int] = field(default_factory=dict)
    """Why opens took the lane they took → how many, since the daemon started; `passthrough`:
    nothing was against it.
    """
    on_failure: str = "stop"
    """native or stop: what applications meet when acpfs cannot go on. stop also where the backing
    directory could not be bound beneath.
    """
    bypassed_since: float | None = None
    """New opens are native since then: the mount was taken away from over the backing directory."""
    bypass_reason: str | None = None
    """Why it was taken away."""
    conflicts: list[ConflictReport] = field(default_factory=list)
    """The newest; `conflicts_total` counts all."""
    conflicts_total: int = 0
    """What was not drained to its place because somebody had changed that on the backing directory
    meanwhile.
    """

    pins: list[str] = field(default_factory=list)
    """Paths whose files do not leave RAM."""
    urgent: list[UrgentReport] = field(default_factory=list)
    """Paths that are urgent now."""
    spill: SpillReport | None = None
    """None: the mount has no spill directory."""
    copies: CopiesReport | None = None
    """null: nothing is copied to other nodes (`copies = 0`)."""
    held: list[HeldCopyReport] = field(default_factory=list)
    """What is held of other nodes, the largest first."""
    guarded: list[GuardedReport] = field(default_factory=list)
    """Deleted checkpoints whose deletion is held back; `release` lets go."""
    guarded_operations: int = 0
    """All deletions that are held back; they count in no other number."""
    held_files: list[HeldFile] = field(default_factory=list)
    """Files in the passthrough lane whose writers are held back."""
    waiting: list[WaitingReport] = field(default_factory=list)
    """Who waits for room in RAM, in the order of turns; held writers are among them."""
    when_full: str = "wait"
    """wait, native or error."""
    waiting_calls: list[WaitingCallReport] = field(default_factory=list)
    """Calls that have waited for more than two seconds, the longest first, 20 at most; native
    transport.
    """
    being_written: list[WrittenFileReport] = field(default_factory=list)
    """Files that somebody writes, those first that have been so for longest, 20 at most."""
    exchange: ExchangeReport | None = None
    """What other nodes give and are given; null: nothing (`exchange = off`)."""
    cluster: ClusterReport | None = None
    """This mount among the others of the backing directory."""
    pace: PaceReport = PaceReport(0.0, 0.0, falls_behind=False)
    """Whether the drain keeps up."""
    durations: dict[str, DurationsReport] = field(default_factory=dict)
    """What was measured (file_save, file_persist, file_load, fsync) → how long it took; the
    histograms of the metrics.
    """

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
    """How its bytes travel now: passthrough, direct or libfuse; `-`: nobody has it open."""
    tier: str
    """ram, backing or ram+backing: where its bytes are."""
    checksum: str | None
    """xxh3-128 of the persisted or staged content."""
    error: str | None
    age_s: float
    """Since the content was complete (or last changed)."""
    writers: list[OpenWriter] = field(default_factory=list)
    """Who is in the middle of it, as far as that is known; at most 8."""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """One checkpoint; times and durations None where they are not known (not written through this
    mount, or not there yet).
    """

    path: str
    """Relative to the mount point; with `*` for what tells the files of one checkpoint apart."""
    save_dir: str
    """The directory that it lies in."""
    step: int | None
    """By its name; null: the name has none."""
    epoch: int
    """By its name; 0: the name has none."""
    state: str
    """writing, interrupted, complete (closed, nothing persisted), persisting, persisted, verified,
    evicted or damaged.

    Evicted: persisted, and nothing in RAM. Interrupted: some of it lost its writer, and nobody
    writes at it. Damaged: persisted, and `verify` found that a file of it is not what was stored.
    """
    files: int
    """That it has."""
    persisted_files: int
    """Of these."""
    bytes: int
    """Of all files."""
    ram_bytes: int
    """Of these, in RAM."""
    began_at: float | None
    """First create."""
    closed_at: float | None
    """Last close, or rename into place."""
    persisted_at: float | None
    """When the last file was."""
    verified_at: float | None
    """When `verify` or `wait --verified` found it good."""
    save_s: float | None
    """From first create to last close."""
    persist_s: float | None
    """From first create until all was persisted."""
    copied_files: int
    """Of those that are not persisted, such as another node has as well (`copies`)."""
    holder: str | None
    """That node."""
    loads_from: str
    """ram, spill, backing or mixed."""
    estimated_load_s: float | None
    """By the rates at which RAM and the backing directory were read so far; of the spill directory
    none is known.
    """


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One thing that happened to a mount. Figures are of checkpoints, None with all others."""

    at: float
    kind: str
    """checkpoint (persisted), load (of one), mount, takeover (of another worker), storage (its
    health), refused, interrupted, withheld, conflict, member, copies (who holds them), bypass.
    """
    text: str
    """In words."""
    path: str = ""
    step: int | None = None
    """Of a checkpoint."""
    files: int | None = None
    """Of a checkpoint."""
    bytes: int | None = None
    """Of a checkpoint."""
    began_at: float | None = None
    """First create, or first open for reading."""
    save_s: float | None = None
    """From first create to last close."""
    persist_s: float | None = None
    """As of `CheckpointReport`: from the first create."""
    verified: bool = False
    """Whether it was read back."""
    load_s: float | None = None
    """From the first open for reading to the last close; only of loads."""
    loaded_from: str = ""
    """As `CheckpointReport.loads_from`; only of loads."""


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint."""

    path: str
    size: int
    persisted: bool
    checksum: str | None
    """xxh3-128 of what is persisted."""


@dataclass(frozen=True, slots=True)
class PreloadedFile:
    """A file that `preload` was to bring to RAM."""

    path: str
    size: int
    status: str
    """verified, unknown (no checksum to compare with), in RAM (it was), no room, changed, mismatch,
    differs, failed: why.
    """


@dataclass(frozen=True, slots=True)
class StayedFile:
    """A file that `evict` left in RAM."""

    path: str
    reason: str
    """pinned, being written, not persisted yet, open or mapped …"""
    size: int
    """In RAM."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What of the log up to some number is still to be done."""

    operations: int
    size_bytes: int
    stuck: bool
    """Nothing of it will be done without an operator: what is left is parked, or waits for
    something parked.
    """
    withheld: bool = False
    """Nothing of that was refused: it waits for nodes that are missing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something of `doctor` that must never be so."""

    path: str
    fault: str
    """In words."""
