"""A running worker as control sees it: turns the layers' records into the contracts of `acpfs.control.reports`.

Takes the file system's lock for each answer and never calls the backing directory, except in `verify`, which does so on
threads that may hang.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import structlog
import xxhash

from acpfs import __version__
from acpfs.config import CHANGEABLE, field_named, validated
from acpfs.control.metrics import Metrics
from acpfs.control.protocol import Json
from acpfs.control.reports import (
    ConflictReport,
    FileState,
    HealthReport,
    HeldFile,
    QueueEntry,
    RamReport,
    Remaining,
    Status,
    Verdict,
    WorkerReport,
)
from acpfs.errors import AcpfsError, ConfigError
from acpfs.filesystem.records import FileReport
from acpfs.filesystem.steps import settled
from acpfs.ram import place as places
from acpfs.ram.memory import budget_bytes, read_memory
from acpfs.supervisor import logs
from acpfs.supervisor.assembly import Parts
from acpfs.supervisor.link import Link
from acpfs.types import Seq
from acpfs.writeback import records
from acpfs.writeback.ops import Op

HELD = ("held", "parked")
COUNTED_OPS_MAX = 10_000
"""Operations that are counted one by one, under the lock, four times a second while somebody waits; beyond, a bound is told."""
STATUS_QUEUE_ENTRIES_MAX = 100
HASH_BUFFER_BYTES = 4 << 20
ENGINE_COUNTERS = (
    "persisted_ops",
    "persisted_bytes",
    "streamed_bytes",
    "retries",
    "elided_ops",
    "discarded_ops",
    "restarted_streams",
    "verified_files",
    "verify_failures",
    "repairs",
    "commit_groups",
)
UNPERSISTED = ("writing", "complete", "interrupted")


log = structlog.get_logger(__name__)


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
    async def unmount(self, *, leave: bool) -> None: ...
    async def bypass(self, reason: str) -> None: ...
    def reload(self) -> None: ...
    async def finished(self) -> list[QueueEntry]: ...


class WorkerSubject:
    """Implements `acpfs.control.subject.Subject`."""

    def __init__(self, parts: Parts, life: Life) -> None:
        self._parts = parts
        self._life = life
        self.metric_registry = Metrics(self.status)

    # -- reading

    def status(self) -> Status:
        parts = self._parts
        with parts.fs.lock:
            fs, engine = parts.fs.statistics(), parts.engine.statistics()
        now, bypassed, link = time.time(), self._life.bypassed, self._life.link
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
            worker=WorkerReport(os.getpid(), parts.started_at, __version__, link.workers_before + 1, link.pause_s, link.reason),
            ram=_ram(
                parts,
                fs.tier.used_bytes,
                fs.tier.reserved_bytes,
                fs.tier.files,
                fs.content.dirty_bytes,
                max(fs.waiting_writers, len(fs.held)),
            ),
            queue=[_entry(entry, now) for entry in engine.queue[:STATUS_QUEUE_ENTRIES_MAX]],
            queue_length=engine.queued_ops,
            queue_bytes=engine.dirty_bytes,
            parked=len(engine.parked),
            interrupted=fs.interrupted_files,
            open_files=fs.open_files,
            oldest_unpersisted_age_s=0.0 if engine.oldest_logged_at is None else max(0.0, now - engine.oldest_logged_at),
            backing_health=self._health(),
            features=asdict(parts.directory.features),
            counters=_counters(fs, engine, parts),
            warnings=parts.warnings(),
            on_failure="native" if self._life.beneath else "stop",
            bypassed_since=bypassed[0] if bypassed else None,
            bypass_reason=bypassed[1] if bypassed else None,
            conflicts=[_conflict(conflict) for conflict in engine.conflicts],
            conflicts_total=engine.conflicts_total,
            held_files=[HeldFile(os.fsdecode(h.path), h.reason, now - h.since_s, h.resident_bytes) for h in fs.held],
        )

    def _health(self) -> HealthReport:
        health = self._parts.calls.health.statistics()
        return HealthReport(
            health.state,
            health.since,
            health.in_flight,
            health.stuck,
            health.oldest_s,
            health.failures,
            health.last_error or None,
            self._parts.anchor.problem or None,
        )

    def configuration(self) -> Json:
        return self._parts.settings.model_dump(mode="json")

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
        )

    # -- what is left

    def complete_until(self, paths: Sequence[bytes]) -> int:
        with self._parts.fs.lock:
            return self._parts.fs.complete_until(paths)

    def remaining(self, until: int, paths: Sequence[bytes] = ()) -> Remaining:
        parts = self._parts
        with parts.fs.lock:
            front = parts.log.front(COUNTED_OPS_MAX)
            ours = [op for op in front if op.seq <= until]
            if not any(op.parked for op in ours):
                if len(ours) < COUNTED_OPS_MAX:
                    return Remaining(len(ours), _bytes_of(ours), stuck=False)
                newer = max(0, parts.log.last_seq - until)
                return Remaining(max(len(ours), len(parts.log) - newer), parts.engine.statistics().dirty_bytes, stuck=False)
            queue = parts.engine.statistics().queue
        return _beside_parked(ours, [entry for entry in queue if entry.seq <= until], paths)

    def left(self, until: int) -> list[QueueEntry]:
        now = time.time()
        return [_entry(entry, now) for entry in self._parts.engine.statistics().queue if entry.seq <= until]

    def interrupted(self) -> list[QueueEntry]:
        with self._parts.fs.lock:
            return [_lost(report) for report in self._parts.fs.files_report() if report.state == "interrupted"]

    def everything_left(self) -> list[QueueEntry]:
        """What the RAM tier holds and the backing directory does not, at the end of the mount."""
        with self._parts.fs.lock:
            queued = self.left(self._parts.log.last_seq)
            named = {entry.name for entry in queued}
            reports = self._parts.fs.files_report()
        return queued + [_lost(r) for r in reports if r.state in UNPERSISTED and os.fsdecode(r.path) not in named]

    async def persisted(self, until: int) -> bool:
        future = self._parts.engine.persisted(Seq(until))
        await settled(future)
        return not future.cancelled() and future.exception() is None

    async def recorded(self) -> None:
        await self._parts.engine.recorded()

    async def restore(self, verdict: Verdict) -> int | str:
        """The checksum is taken of the bytes that will be stored, and of nothing else: RAM can be wrong too."""
        path, parts = os.fsencode(verdict.path), self._parts
        with parts.fs.lock:
            held = parts.fs.mending.held(path)
        if isinstance(held, str):
            return held
        future = parts.copies.submit("hash", _digest_and_close, held.fd, held.size)
        await settled(future)
        if future.result() != verdict.expected:
            return "RAM has another content than was recorded: it is not written over the damaged one"
        with parts.fs.lock:
            seq = parts.fs.mending.store_again(path, held.tier_id)
            parts.state.commit()
        if seq is None:
            return "it was changed meanwhile: look again"
        log.warning("repair: stored once more from RAM", path=verdict.path, was=verdict.status)
        return seq

    # -- changing

    def retry(self, path: bytes) -> int:
        with self._parts.fs.lock:
            statistics = self._parts.engine.statistics()
            failed = {entry.seq for entry in (*statistics.queue, *statistics.parked) if entry.tries and _below(entry, path)}
            resumed = self._parts.fs.resume_interrupted(path)
        return resumed + (self._parts.engine.retry(failed) if failed else 0)

    def discard(self, path: bytes) -> int:
        with self._parts.fs.lock:
            parked = [entry.seq for entry in self._parts.engine.statistics().parked if _below(entry, path)]
            try:
                dropped = self._parts.fs.discard_interrupted(path)
            except OSError as error:
                raise AcpfsError(f"{os.fsdecode(path)}: {error.strerror}") from error
        return dropped + (self._parts.engine.discard(parked) if parked else 0)

    async def change(self, key: str, value: str) -> Json:
        field = field_named(key)
        if field not in CHANGEABLE:
            raise ConfigError(f"{key} cannot be changed while mounted; these can: {', '.join(CHANGEABLE)}")
        wanted = getattr(validated({**self._parts.settings.model_dump(), field: value}), field)
        _CHANGES[field](self._parts, wanted)
        setattr(self._parts.settings, field, wanted)
        self._life.link.tell(settings=json.loads(self._parts.settings.model_dump_json(exclude_unset=True)))
        return {"key": field, "value": wanted}

    # -- the end

    async def unmount(self, *, leave: bool) -> None:
        await self._life.unmount(leave=leave)

    def reload(self) -> None:
        self._life.reload()

    async def bypass(self, reason: str) -> None:
        await self._life.bypass(reason)

    async def finished(self) -> list[QueueEntry]:
        return await self._life.finished()

    # -- verify

    async def verify(self, paths: Sequence[bytes], tell: Callable[[Verdict], Awaitable[None]]) -> None:
        """Each verdict is fetched by a call of its own, so that a hang is cancellable between two files."""
        verdicts = self._parts.verifier.verify([tuple(path.split(b"/")) if path else () for path in paths])
        while True:
            future = self._parts.calls.commits.submit("verify", next, verdicts, None)
            await settled(future)
            verdict: records.Verification | None = future.result()
            if verdict is None:
                return
            await tell(
                Verdict(
                    os.fspath(verdict.path), verdict.status, verdict.size, verdict.expected or None, verdict.found or None, verdict.error
                )
            )


def _digest_and_close(fd: int, size: int) -> str:
    """Of the first bytes of a tier file."""
    hasher, buffer, position = xxhash.xxh3_128(), memoryview(bytearray(min(size, HASH_BUFFER_BYTES))), 0
    try:
        while position < size and (count := os.preadv(fd, [buffer[: size - position]], position)):
            hasher.update(buffer[:count])
            position += count
    finally:
        os.close(fd)
    return hasher.hexdigest()


def _beside_parked(ours: Sequence[Op], queue: Sequence[records.QueueEntry], paths: Sequence[bytes]) -> Remaining:
    """What is left without what is parked (or held up by that) elsewhere; stuck when nothing else is left."""
    elsewhere = {entry.seq for entry in queue if entry.state in HELD and paths and not _below_any(os.fsencode(entry.name), paths)}
    wanted = [op for op in ours if op.seq not in elsewhere]
    seen = [entry for entry in queue if entry.seq not in elsewhere]
    return Remaining(len(wanted), _bytes_of(wanted), stuck=bool(seen) and all(entry.state in HELD for entry in seen))


def _bytes_of(ops: Iterable[Op]) -> int:
    return sum(op.version.size for op in ops if op.version is not None)


def _entry(entry: records.QueueEntry, now: float) -> QueueEntry:
    return QueueEntry(
        seq=entry.seq,
        name=entry.name,
        operation=entry.kind,
        size=entry.size,
        state=entry.state,
        age_s=max(0.0, now - entry.logged_at),
        tries=entry.tries,
        last_error=entry.last_error,
        next_attempt=entry.next_attempt_at or None,
        streamed_bytes=entry.streamed_bytes,
    )


def _conflict(conflict: records.Conflict) -> ConflictReport:
    return ConflictReport(os.fsdecode(conflict.path), conflict.kind, os.fsdecode(conflict.kept_as) or None, conflict.at)


def _lost(report: FileReport) -> QueueEntry:
    return QueueEntry(0, os.fsdecode(report.path), "store", report.size, report.state, report.age_s)


def _ram(parts: Parts, used: int, reserved: int, files: int, dirty: int, waiting: int) -> RamReport:
    return RamReport(
        budget_bytes=parts.tier.budget_bytes,
        used_bytes=used,
        dirty_bytes=dirty,
        clean_bytes=max(0, used - dirty),
        reserved_bytes=reserved,
        files=files,
        waiting_writers=waiting,
        directory=os.fspath(parts.place.directory),
        own_tmpfs=parts.place.own_tmpfs,
        huge_pages=parts.place.huge,
        prefaulted_bytes=parts.prefault.ready_bytes,
    )


def _counters(fs: Any, engine: records.EngineStatistics, parts: Parts) -> dict[str, int]:
    """Everything that is counted, by one flat name each."""
    counters = {name: int(getattr(engine, name)) for name in ENGINE_COUNTERS}
    counters |= {name: value for name, value in asdict(fs.lower_view).items() if isinstance(value, int)}
    counters |= {name: value for name, value in asdict(fs.content).items() if name.startswith(("evicted", "copied"))}
    counters |= {f"refused_{kind}": count for kind, count in parts.directory.refused_attributes().items()}
    counters["backing_reopened"] = parts.anchor.reopened
    counters["backing_timeouts"] = sum(pool.timed_out for pool in parts.calls.statistics())
    return counters


def _below(entry: records.QueueEntry, path: bytes) -> bool:
    return not path or _below_any(os.fsencode(entry.name), (path,))


def _below_any(name: bytes, paths: Iterable[bytes]) -> bool:
    return any(not path or name == path or name.startswith(path + b"/") for path in paths)


def _change_ram(parts: Parts, wanted: int | str) -> None:
    budget = budget_bytes(wanted, read_memory())
    with parts.fs.lock:
        places.resize(parts.place, budget)
        parts.tier.budget_bytes = budget
        parts.tier.room_changed()


_CHANGES: dict[str, Callable[[Parts, Any], None]] = {
    "bandwidth": lambda parts, wanted: parts.engine.set_bandwidth(wanted),
    "streams": lambda parts, wanted: parts.engine.set_streams(wanted),
    "log_level": lambda _parts, wanted: logs.set_level(wanted),
    "ram": _change_ram,
}
