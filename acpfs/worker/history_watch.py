"""Looks every few seconds at what has changed, and notes it in the history: what `status` says, and
checkpoints that were persisted.

By looking, because then no call of an application pays for it; what came and went between two looks
is not noted. The looks are made in a thread: which files a checkpoint has is known only by going
through its directory. A look that fails is told in the log and ends nothing: the next one notes the
same, and nobody's files depend on a history.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import trio

from acpfs.checkpoints import Checkpoint
from acpfs.control.reports import CheckpointReport, HistoryEntry, Status
from acpfs.filesystem.loads import Load
from acpfs.logger import get_logger
from acpfs.worker.assembly import Parts

LOOK_INTERVAL_S = 5.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SeenStatus:
    """What the last look saw of what can change."""

    health: str = "ok"
    parked: int = 0
    interrupted: int = 0
    withheld: int = 0
    missing: tuple[str, ...] = ()
    conflicts: int = 0
    bypassed: str | None = None
    holder: str = ""
    """The member that holds what is not persisted here; "": none, or it is out of reach."""
    held: tuple[str, ...] = ()
    """Nodes of which something is held here."""
    claimed: tuple[str, ...] = ()
    """Of them: those whose log is claimed for its adoption."""

    @classmethod
    def of(cls, status: Status) -> SeenStatus:
        cluster = status.cluster
        return cls(
            status.backing_health.state,
            status.parked,
            status.interrupted,
            0 if cluster is None else cluster.withheld,
            () if cluster is None else tuple(cluster.missing),
            status.conflicts_total,
            status.bypass_reason or "" if status.bypassed_since is not None else None,
            _holder(status),
            tuple(sorted({one.node for one in status.held})),
            tuple(sorted({one.node for one in status.held if one.claimed})),
        )


def _holder(status: Status) -> str:
    copies = status.copies
    return "" if copies is None or copies.state != "on" else copies.holder or ""


def begun(status: Status) -> tuple[str, str]:
    """Kind and text of a worker's first entry."""
    worker = status.worker
    if worker.number == 1:
        return (
            "mount",
            (
                f"acpfs {worker.version} serves: {status.transport}, "
                f"{status.ram.budget_bytes / (1 << 30):.1f} GiB of RAM"
            ),
        )
    return (
        "takeover",
        (
            f"worker {worker.number} (acpfs {worker.version}) serves; the last one: "
            f"{worker.last_end}; pause {worker.pause_s:.1f} s"
        ),
    )


def changes(before: SeenStatus, now: SeenStatus, why: str) -> list[tuple[str, str]]:
    """(kind, text) of what became different. `why`: what explains the storage's state."""
    found = []
    if now.health != before.health:
        said = f": {why}" if why else ""
        found.append(("storage", f"{before.health} → {now.health}{said}"))
    for kind, was, has, text in (
        ("refused", before.parked, now.parked, "operations that the storage refused for good"),
        ("interrupted", before.interrupted, now.interrupted, "files whose writer was lost"),
        (
            "withheld",
            before.withheld,
            now.withheld,
            "pointers that are withheld because of other members",
        ),
        (
            "conflict",
            before.conflicts,
            now.conflicts,
            "native changes of the backing directory that were met",
        ),
    ):
        if has != was:
            found.append((kind, f"{has} {text} (before: {was})"))
    found += [
        ("member", f"{node} is missing") for node in now.missing if node not in before.missing
    ]
    found += [
        ("member", f"{node} is not missing any more")
        for node in before.missing
        if node not in now.missing
    ]
    if now.holder != before.holder:
        text = f"{now.holder} holds copies of what is not persisted"
        found.append(("copies", text if now.holder else f"{before.holder} is out of reach"))
    found += [("copies", told) for told in _adoptions(before, now)]
    if now.bypassed is not None and before.bypassed is None:
        found.append(("bypass", f"new opens are native: {now.bypassed}"))
    return found


def _adoptions(before: SeenStatus, now: SeenStatus) -> list[str]:
    told = [
        f"the log of {node} is being adopted" for node in now.claimed if node not in before.claimed
    ]
    for node in before.claimed:
        if node not in now.held:
            told.append(f"{node} is adopted: what it had copied here is on the storage")
        elif node not in now.claimed:
            told.append(f"{node} is not adopted: what is held of it is open to it again")
    return told


def saved(report: CheckpointReport, now: float) -> HistoryEntry:
    """What the history keeps of a checkpoint."""
    return HistoryEntry(
        at=report.persisted_at or now,
        kind="checkpoint",
        text=report.state,
        path=report.path,
        step=report.step,
        files=report.files,
        bytes=report.bytes,
        began_at=report.began_at,
        save_s=report.save_s,
        persist_s=report.persist_s,
        verified=report.verified_at is not None,
    )


def loaded(checkpoint: Checkpoint, load: Load, behind: float) -> HistoryEntry:
    """What the history keeps of a load.

    `behind`: what the wall clock is ahead of the one that loads are measured by.
    """
    return HistoryEntry(
        at=behind + load.ended,
        kind="load",
        text=f"loaded from {load.place}",
        path=os.fsdecode(checkpoint.path),
        step=checkpoint.step,
        files=len(load.files),
        bytes=sum(load.files.values()),
        began_at=behind + load.began,
        load_s=load.ended - load.began,
        loaded_from=load.place,
    )


class HistoryWatch:
    """One per worker."""

    def __init__(
        self,
        parts: Parts,
        status: Callable[[], Status],
        reports: Callable[[bytes], list[CheckpointReport]],
    ) -> None:
        """`reports`: of the checkpoints at a path, see `CheckpointView`."""
        self._parts = parts
        self._status = status
        self._reports = reports
        self._clock = parts.given.clock
        self._now = self._clock.wall
        self._seen: SeenStatus | None = None
        self._failed = False
        """Whether the last look did."""

    async def run(self) -> None:
        """For as long as the worker lives."""
        while True:
            await self._parts.given.threads.run_sync(self.look)
            await trio.sleep(LOOK_INTERVAL_S)

    def look(self) -> None:
        """Note what has changed since the last look; in a thread."""
        try:
            self._look()
        except Exception:
            if not self._failed:  # the next ones very likely fail alike
                log.exception("the history could not be kept up")
            self._failed = True
        else:
            self._failed = False

    def _look(self) -> None:
        status = self._status()
        now = self._now()
        lock = self._parts.fs.lock
        inner = self._parts.inner
        seen = SeenStatus.of(status)
        why = status.backing_health.why or ""
        noted = [] if self._seen is not None else [begun(status)]
        noted += changes(self._seen or SeenStatus(), seen, why)
        with lock:
            settled = inner.catalogue.newly_settled()
        entries = [HistoryEntry(at=now, kind=kind, text=text) for kind, text in noted]
        for checkpoint in settled:
            path = os.fsdecode(checkpoint.path)
            entries += [
                saved(report, now)
                for report in self._reports(checkpoint.path)
                if report.path == path and report.persisted_at
            ]
        with lock, self._parts.state.step():
            entries += [
                loaded(checkpoint, load, now - self._clock.now())
                for checkpoint, load in inner.loads.take()
            ]
            for entry in entries:
                self._parts.history.note(entry)
            inner.catalogue.told(settled)
        self._seen = seen
