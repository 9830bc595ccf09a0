"""A running worker as control sees it: turns the layers' records into the contracts of
`acpfs.control.reports`.

Takes the file system's lock for each answer and never calls the backing directory, except in
`verify`, which does so on threads that may hang.
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Protocol

import trio

from acpfs import __version__
from acpfs.checksum import of_reads
from acpfs.config import CHANGEABLE, field_named, validated
from acpfs.control.metrics import Metrics
from acpfs.control.reports import (
    CheckpointFile,
    CheckpointReport,
    DurationsReport,
    FileState,
    HealthReport,
    HeldFile,
    MirrorReport,
    OwnerShareReport,
    RamReport,
    Remaining,
    SpillReport,
    Status,
    UrgentReport,
    WorkerReport,
)
from acpfs.control.socket_messages import Json
from acpfs.control.verbs import GUARDED
from acpfs.control.worker_contract import Incomplete, Unseen
from acpfs.drain_records import GuardedReport, QueueEntry, Verification
from acpfs.errors import ConfigError
from acpfs.filesystem.content.spilling import Unmirrored
from acpfs.filesystem.durations import BOUNDS_S, Durations
from acpfs.filesystem.eviction import PINNED_SHARE_MAX
from acpfs.filesystem.filesystem import FileSystemStatistics
from acpfs.filesystem.records import FileReport
from acpfs.filesystem.steps import settled
from acpfs.logger import get_logger, shown
from acpfs.ram import place as places
from acpfs.types import ROOT, Seq
from acpfs.worker import waiting_reports
from acpfs.worker.assembly import Parts
from acpfs.worker.checkpoint_view import CheckpointView
from acpfs.worker.drain_progress import DrainPace, is_below_any, remaining
from acpfs.worker.link import Link
from acpfs.worker.mapped_pages import MappedPages
from acpfs.worker.node_reports import (
    cluster_counters,
    cluster_report,
    copies_report,
    exchange_counters,
    exchange_report,
    held_reports,
)
from acpfs.worker.setting_changes import CHANGES, answered
from acpfs.writeback import engine_records
from acpfs.writeback.sources.spill import SpillStatistics

PINNED_FULL = (
    f"pins keep more than {PINNED_SHARE_MAX:.0%} of the RAM tier's budget: little is left for "
    "the next save"
)
STATUS_QUEUE_ENTRIES_MAX = 100
PROBLEM_LOOK_S = 2.0
HASH_BUFFER_BYTES = 4 << 20
RELEASED_BECAUSE = ("newer", "small", "gone", "time", "operator", "space", "needed")
"""Why held deletions were carried out."""
UNPERSISTED = ("writing", "complete", "interrupted")


log = get_logger(__name__)


class Life(Protocol):
    """What the worker does about its own end."""

    @property
    def transport(self) -> str: ...
    @property
    def transport_reason(self) -> str: ...
    @property
    def stopping(self) -> bool: ...
    @property
    def link(self) -> Link: ...
    @property
    def bypassed(self) -> tuple[float, str] | None: ...
    @property
    def beneath(self) -> bool: ...
    @property
    def detached(self) -> str: ...
    def waiting_calls(self) -> list[waiting_reports.WaitingCall]: ...
    async def unmount(self, *, leave: bool, patience_s: float = math.inf) -> None: ...
    async def bypass(self, reason: str) -> None: ...
    def reload(self) -> None: ...
    async def finished(self) -> list[QueueEntry]: ...


class WorkerSubject:
    """Implements `acpfs.control.worker_contract.Subject`."""

    def __init__(self, parts: Parts, life: Life) -> None:
        self._parts = parts
        self.clock = parts.given.clock
        self._life = life
        self._view = CheckpointView(parts)
        self.metric_registry = Metrics(self.status)
        self._pace = DrainPace()
        self._mapped = MappedPages(parts.settings.mountpoint, parts.given.threads)

    # -- reading

    def look(self) -> None:
        """Every second, under the lock."""
        self._pace.look(self.clock.now(), self._parts.log)

    def status(self) -> Status:
        parts = self._parts
        with parts.fs.lock:
            fs = parts.fs.statistics()
            engine = parts.engine.statistics()
            cluster = cluster_report(parts, parts.inner.changes.display_path)
            exchange = exchange_report(parts)
            urgent = parts.inner.urgent.declared()
            ram = _ram(parts, fs)
            counters = _counters(fs, engine, parts)
            calls = waiting_reports.calls(
                self._life.waiting_calls(), parts.inner.paths.of, self.clock.now()
            )
            durations = _durations(parts.inner.durations)
        now = self.clock.wall()
        bypassed = self._life.bypassed
        link = self._life.link
        return Status(
            state="draining" if self._life.stopping else "bypassed" if bypassed else "serving",
            mount=os.fspath(parts.settings.mountpoint),
            backing=os.fspath(parts.settings.backing),
            node=parts.identity.node_id,
            volume=parts.identity.volume_id,
            transport=self._life.transport,
            transport_reason=self._life.transport_reason,
            lanes=fs.open_lanes,
            lane_choices=fs.lane_choices,
            fsync=parts.settings.fsync.value,
            worker=WorkerReport(
                os.getpid(),
                parts.started_at,
                __version__,
                link.workers_before + 1,
                link.pause_s,
                link.reason,
                link.reload_failed,
                link.keeper_holds,
                None if parts.settings.log_file is None else os.fspath(parts.settings.log_file),
            ),
            ram=ram,
            queue=list(engine.queue[:STATUS_QUEUE_ENTRIES_MAX]),
            queue_length=engine.queued_ops,
            queue_bytes=engine.dirty_bytes,
            parked=sum(entry.state != "withheld" for entry in engine.parked),
            interrupted=fs.interrupted_files,
            open_files=fs.open_files,
            oldest_unpersisted_age_s=0.0
            if engine.oldest_logged_at is None
            else max(0.0, now - engine.oldest_logged_at),
            backing_health=self._health(
                [entry for entry in engine.parked if entry.state != "withheld"]
            ),
            features=asdict(parts.directory.features),
            counters=counters,
            warnings=[
                *parts.warnings(),
                *([self._life.detached] if self._life.detached else []),
                *([str(lack)] if (lack := self._parts.given.threads.lack()) is not None else []),
                *([PINNED_FULL] if fs.is_pinned_full else []),
                *map(_orphan, engine.guard.orphans),
            ],
            pins=[os.fsdecode(path) for path in fs.pins],
            urgent=[UrgentReport(os.fsdecode(one.path), left_s, one.uid) for one, left_s in urgent],
            on_failure="native" if self._life.beneath else "stop",
            bypassed_since=bypassed[0] if bypassed else None,
            bypass_reason=bypassed[1] if bypassed else None,
            conflicts=list(engine.conflicts),
            conflicts_total=engine.conflicts_total,
            spill=None if parts.settings.copies else _spill(fs.spill, fs.unmirrored),
            copies=copies_report(parts, fs),
            held=held_reports(parts),
            pace=self._pace.report(),
            guarded=list(engine.guard.checkpoints),
            guarded_operations=engine.guard.operations,
            held_files=[
                HeldFile(os.fsdecode(h.path), h.reason, now - h.since_s, h.resident_bytes)
                for h in fs.held
            ],
            waiting=[waiting_reports.writer(one) for one in fs.waiting],
            waiting_calls=calls,
            being_written=waiting_reports.written(
                parts.fs.being_written(waiting_reports.TOLD_MAX), self.clock.now(), now
            ),
            when_full=parts.settings.when_full.value,
            cluster=cluster,
            exchange=exchange,
            durations=durations,
        )

    def _health(self, refused: Sequence[QueueEntry]) -> HealthReport:
        """Calls that are answered well are no sign of health while the directory refuses operations
        for good.
        """
        health = self._parts.calls.health.statistics()
        state = health.state
        error = health.last_error
        if state == "ok" and refused:
            state = "refusing"
            error = f"{refused[0].operation} {refused[0].name}: {refused[0].last_detail}"
        return HealthReport(
            state,
            health.since,
            health.in_flight,
            health.stuck,
            health.oldest_s,
            health.failures,
            error or None,
            _why(state, error, health.oldest_call, health.oldest_s),
            self._parts.anchor.problem or None,
        )

    async def problem(self) -> str:
        anchor = self._parts.anchor
        looked = self._parts.calls.syncs.submit("look", anchor.confirmed)
        with trio.move_on_after(PROBLEM_LOOK_S):
            await settled(looked)
        return looked.result() if looked.done() and looked.exception() is None else anchor.problem

    def trouble(self) -> str:
        health = self._parts.calls.health.statistics()
        said = f" ({health.last_error})" if health.last_error else ""
        calls = {
            "stuck": "the backing directory does not answer",
            "refusing": f"the backing directory refuses calls{said}",
        }
        return self._parts.anchor.problem or calls.get(health.state, "")

    def configuration(self) -> Json:
        return self._parts.settings.as_json()

    def metrics(self) -> str:
        return self.metric_registry.text()

    def files(self, prefix: bytes) -> list[FileState]:
        with self._parts.fs.lock:
            return [self._file(report) for report in self._parts.fs.files_report(prefix)]

    def _file(self, report: FileReport) -> FileState:
        checksum = report.checksum
        if not checksum and report.state == "clean":
            checksum = self._parts.manifest.digest(tuple(report.path.split(b"/")))
        return FileState(
            os.fsdecode(report.path),
            report.size,
            report.state,
            report.lane,
            report.tier,
            checksum or None,
            report.error or None,
            report.age_s,
            waiting_reports.open_writers(report.writers),
        )

    # -- what is left

    async def follow(self, path: bytes) -> list[bytes]:
        return await self._parts.fs.steps.drive(self._parts.inner.paths.follow(path))

    async def complete_until(self, paths: Sequence[bytes], timeout_s: float | None = None) -> int:
        await self._parts.fs.steps.drive(self._parts.fs.settle_mappings())
        with self._parts.fs.lock:
            known = self._parts.fs.closes_known(paths)
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            await settled(known)
        with self._parts.fs.lock:
            return self._parts.fs.complete_until(paths)

    def incomplete(self, paths: Sequence[bytes]) -> list[Incomplete]:
        with self._parts.fs.lock:
            found = self._parts.fs.incomplete(paths)
        return [
            Incomplete(
                one.ino,
                os.fsdecode(one.path),
                one.is_half,
                one.is_stored_log,
                one.versions,
                tuple(waiting_reports.open_writers(one.writers)),
            )
            for one in found
        ]

    async def written_back(self, paths: Sequence[bytes]) -> list[Unseen]:
        parts = self._parts
        files = parts.fs.maybe_mapped(paths)
        if not files:
            return []
        errors = await self._mapped.write_back(files)
        # One that was renamed or closed meanwhile, or has no name any more, is another question.
        still = parts.fs.maybe_mapped(paths)
        return [
            Unseen(os.fsdecode(still[ino]), os.strerror(number))
            for ino, number in errors.items()
            if ino in still
        ]

    def remaining(self, until: int, paths: Sequence[bytes] = ()) -> Remaining:
        parts = self._parts
        with parts.fs.lock:
            return remaining(parts.log, until, paths, parts.inner.changes.display_path)

    def copied(self, until: int) -> Future[None]:
        parts = self._parts
        spilling = parts.inner.spilling
        if spilling is None or not spilling.copies_to_members:
            return Future()
        with parts.fs.lock, parts.state.step():
            return spilling.when_copied(ROOT, Seq(until))

    def left(self, until: int) -> list[QueueEntry]:
        return [entry for entry in self._parts.engine.statistics().queue if entry.seq <= until]

    def interrupted(self) -> list[QueueEntry]:
        with self._parts.fs.lock:
            return [
                _lost(report)
                for report in self._parts.fs.files_report()
                if report.state == "interrupted"
            ]

    def everything_left(self) -> list[QueueEntry]:
        """What the RAM tier holds and the backing directory does not, at the end of the mount."""
        with self._parts.fs.lock:
            queued = self.left(self._parts.log.last_seq)
            named = {entry.name for entry in queued}
            reports = self._parts.fs.files_report()
        queued += [_held(guarded, self.clock.wall()) for guarded in self.guarded()]
        return queued + [
            _lost(r) for r in reports if r.state in UNPERSISTED and os.fsdecode(r.path) not in named
        ]

    async def persisted(self, until: int) -> bool:
        future = self._parts.engine.persisted(Seq(until))
        await settled(future)
        return not future.cancelled() and future.exception() is None

    async def decided(self) -> None:
        await self._parts.engine.guard.decided()

    async def nodes_seen(self) -> None:
        await self._parts.cluster.looked()

    async def recorded(self) -> None:
        await self._parts.engine.recorded()

    async def restore(self, verdict: Verification) -> int | str:
        """The checksum is taken of the bytes that will be stored, and of nothing else: RAM can be
        wrong too.
        """
        path = os.fsencode(verdict.path)
        parts = self._parts
        with parts.fs.lock:
            held = parts.inner.mending.held(path)
        if isinstance(held, str):
            return held
        future = parts.copies.submit("hash", _digest_and_close, held.fd, held.size)
        await settled(future)
        if future.result() != verdict.expected:
            return (
                "RAM has another content than was recorded: it is not written over the damaged one"
            )
        with parts.fs.lock, parts.state.step():
            seq = parts.inner.mending.store_again(path, held.tier_id)
        if seq is None:
            return "it was changed meanwhile: look again"
        log.warning("repair: stored once more from RAM", path=verdict.path, was=verdict.status)
        return seq

    # -- changing

    def retry(self, path: bytes) -> int:
        with self._parts.fs.lock:
            statistics = self._parts.engine.statistics()
            failed = {
                Seq(entry.seq)
                for entry in (*statistics.queue, *statistics.parked)
                if entry.tries and _below(entry, path)
            }
            resumed = self._parts.inner.interrupted.store(path)
        return resumed + (self._parts.engine.retry(failed) if failed else 0)

    def discard(self, path: bytes) -> tuple[int, list[bytes]]:
        with self._parts.fs.lock:
            dropped, left = self._parts.inner.interrupted.discard(path)  # first: it may park some
            parked = [
                Seq(entry.seq)
                for entry in self._parts.engine.statistics().parked
                if _below(entry, path)
            ]
        return dropped + (self._parts.engine.discard(parked) if parked else 0), left

    async def checkpoints(self, path: bytes) -> list[CheckpointReport]:
        await settled(self._parts.copies.submit("measure RAM", self._view.measure))
        await self._view.learn(path)
        return self._view.reports(path)

    def reports_of(self, path: bytes) -> list[CheckpointReport]:
        """As `checkpoints`, of what is known without asking; in a thread."""
        return self._view.reports(path)

    def moments(self, report: CheckpointReport) -> tuple[float, float]:
        return self._view.moments(report)

    def checkpoint_files(self, report: CheckpointReport) -> list[CheckpointFile]:
        return self._view.files(report)

    def persisted_files(self, path: bytes) -> tuple[int, int]:
        return self._view.persisted_files(path)

    def settlements(self) -> int:
        return self._parts.inner.catalogue.settlements

    def guarded(self) -> list[GuardedReport]:
        with self._parts.fs.lock:
            return list(self._parts.engine.guard.statistics().checkpoints)

    def release(self, path: bytes) -> int:
        return self._parts.engine.guard.release(tuple(path.split(b"/")) if path else ())

    async def change(self, key: str, value: str) -> Json:
        field = field_named(key)
        if field not in CHANGEABLE:
            raise ConfigError(
                f"{key} cannot be changed while mounted; these can: {', '.join(CHANGEABLE)}"
            )
        wanted = getattr(
            validated({**self._parts.settings.as_json(given_only=True), field: value}), field
        )
        asked = CHANGES[field](self._parts, wanted)
        if asked is not None:
            await answered(asked)
        setattr(self._parts.settings, field, wanted)
        self._life.link.change(self._parts.settings.as_json(given_only=True))
        return {"key": field, "value": wanted}

    # -- the end

    async def unmount(self, *, leave: bool, patience_s: float = math.inf) -> None:
        await self._life.unmount(leave=leave, patience_s=patience_s)

    def reload(self) -> None:
        self._life.reload()

    async def bypass(self, reason: str) -> None:
        await self._life.bypass(reason)

    async def finished(self) -> list[QueueEntry]:
        return await self._life.finished()

    # -- verify

    def records(self, path: bytes) -> bool:
        rows = self._parts.manifest.rows(tuple(path.split(b"/")) if path else ())
        return next(rows, None) is not None

    def _absolve(self, path: bytes) -> None:
        with self._parts.fs.lock:
            node = self._parts.inner.mending.node(path)
            if node is not None:
                self._parts.inner.warming.absolve(node)

    async def verify(
        self, paths: Sequence[bytes], tell: Callable[[Verification], Awaitable[None]]
    ) -> None:
        """Each verdict is fetched by a call of its own, so that a hang is cancellable between two
        files.
        """
        good = set[bytes]()
        began_at = self.clock.wall()
        verdicts = self._parts.verifier.verify(
            [tuple(path.split(b"/")) if path else () for path in paths]
        )
        while True:
            future = self._parts.calls.verifies.submit("verify", next, verdicts, None)
            await settled(future)
            verdict: Verification | None = future.result()
            if verdict is None:
                for path in paths or [b""]:
                    self._view.verified(path, good, began_at)
                return
            name = os.fsencode(verdict.path)
            if verdict.status == "ok":
                good.add(name)
                self._absolve(name)
            if verdict.status != "unknown":
                self._view.read_back(name, is_whole=verdict.status == "ok")
            await tell(verdict)


def _digest_and_close(fd: int, size: int) -> str:
    """Of the first bytes of a tier file."""
    try:
        buffer = memoryview(bytearray(min(size, HASH_BUFFER_BYTES)))
        return of_reads(lambda piece, at: os.preadv(fd, [piece], at), buffer, size)[0]
    finally:
        os.close(fd)


def _why(state: str, error: str, oldest_call: str, oldest_s: float) -> str | None:
    """Of a state of the backing directory: an error explains refusals, and no hang."""
    if state in ("slow", "stuck"):
        return f"{oldest_call} is out for {oldest_s:.0f} s" if oldest_call else None
    return error or None if state == "refusing" else None


def _orphan(path: tuple[bytes, ...]) -> str:
    return (
        f"a mount whose RAM tier was lost kept an old checkpoint as {shown(path)}: move it back "
        "on the backing directory, or remove it"
    )


def _held(guarded: GuardedReport, now: float) -> QueueEntry:
    """As an unmount names it."""
    return QueueEntry(
        0, guarded.path, "delete", guarded.size, GUARDED, max(0.0, now - guarded.since)
    )


def _lost(report: FileReport) -> QueueEntry:
    return QueueEntry(0, os.fsdecode(report.path), "store", report.size, report.state, report.age_s)


def _spill(spill: SpillStatistics | None, behind: Unmirrored | None) -> SpillReport | None:
    if spill is None:
        return None
    copying = (spill.copying_files, spill.reserved_bytes)
    place = (
        spill.directory,
        spill.mode,
        spill.state,
        spill.budget_bytes,
        spill.used_bytes,
        spill.files,
    )
    mirror = None
    if spill.mirror is not None and behind is not None:
        state = (spill.mirror.state, spill.mirror.why or None)
        mirror = MirrorReport(
            *state, behind.until, behind.files, behind.bytes, spill.mirror.pending_transactions
        )
    return SpillReport(*place, *copying, last_error=spill.last_error or None, mirror=mirror)


def _ram(parts: Parts, fs: FileSystemStatistics) -> RamReport:
    """Under the lock: the tmpfs says at the same moment what it holds."""
    used = fs.tier.used_bytes
    dirty = fs.content.dirty_bytes
    own = parts.place.own_tmpfs
    return RamReport(
        budget_bytes=parts.tier.budget_bytes,
        used_bytes=used,
        dirty_bytes=dirty,
        clean_bytes=max(0, used - dirty),
        reserved_bytes=fs.tier.reserved_bytes,
        files=fs.tier.files,
        waiting_writers=len(fs.waiting),
        directory=os.fspath(parts.place.directory),
        own_tmpfs=parts.place.own_tmpfs,
        huge_pages=parts.place.huge,
        prefaulted_bytes=parts.prefault.ready_bytes,
        prefault=parts.prefault.why,
        retained_bytes=fs.content.retained_bytes,
        pinned_bytes=fs.pinned_bytes,
        urgent_bytes=parts.tier.urgent_bytes,
        share_bytes=parts.tier.shares.limit_bytes,
        owners=[
            OwnerShareReport(one.uid, one.taken_bytes, one.reserved_bytes, one.waiting)
            for one in parts.inner.room.owners()
        ],
        leaving_bytes=fs.tier.leaving_bytes,
        peak_bytes=fs.tier.peak_bytes,
        held_bytes=parts.tier.held_bytes,
        tmpfs_used_bytes=places.taken_bytes(parts.place) if own else 0,
        tmpfs_size_bytes=places.size_bytes(parts.place) if own else 0,
    )


def _durations(durations: Durations) -> dict[str, DurationsReport]:
    return {
        name: DurationsReport(list(BOUNDS_S), list(one.counts), one.sum_s)
        for name, one in durations.all().items()
    }


def _counters(fs: Any, engine: engine_records.EngineStatistics, parts: Parts) -> dict[str, int]:
    """Everything that is counted, by one flat name each. Under the lock."""
    counters: dict[str, int] = asdict(engine.counters)
    counters |= {
        name: value for name, value in asdict(fs.lower_view).items() if isinstance(value, int)
    }
    counters |= {name: value for name, value in asdict(fs.warm).items() if name != "warming"}
    counters |= {
        name: value
        for name, value in asdict(fs.content).items()
        if name.startswith(("evicted", "copied"))
    }
    if fs.spill is not None:
        spill = fs.spill
        moved = fs.spilled
        counters |= {
            "spill_copied_files": spill.copied_files,
            "spill_copied_bytes": spill.copied_bytes,
            "spill_failures": spill.failures,
        }
        counters |= {
            "spill_mismatches": spill.mismatches,
            "spill_moved_files": moved.files,
            "spill_moved_bytes": moved.bytes,
        }
    counters |= {
        f"refused_{kind}": count for kind, count in parts.directory.refused_attributes().items()
    }
    counters |= {
        f"guard_released_{why}": engine.guard.released.get(why, 0) for why in RELEASED_BECAUSE
    }
    counters |= cluster_counters(parts.cluster.statistics())
    counters |= exchange_counters(parts)
    counters |= parts.scrubbing.counters()
    counters["backing_reopened"] = parts.anchor.reopened
    counters["backing_timeouts"] = sum(pool.timed_out for pool in parts.calls.statistics())
    return counters


def _below(entry: QueueEntry, path: bytes) -> bool:
    return not path or is_below_any(os.fsencode(entry.name), (path,))
