"""The table of metrics: one entry each, or a field of `reports` that is a gauge.

The exposition, the page's table and the dashboard follow from it. Every value comes from one
`Status`, so that metrics and `acpfs-ctl status` cannot disagree. Counters are the status' own, by
their names; those that a person should know are described here. Data only: nothing of
prometheus_client.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from acpfs.control.reports import GAUGE, ClusterReport, RamReport, SpillReport, Status

PREFIX = "acpfs_"
HEALTH_STATES = ("ok", "slow", "refusing", "stuck")


class MetricKind(Enum):
    """As Prometheus has them."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number as it is now."""

    text: str
    value: Callable[[Status], float | None]
    """None: this mount has no such thing."""


def _of_spill(value: Callable[[SpillReport], float]) -> Callable[[Status], float | None]:
    return lambda status: None if status.spill is None else value(status.spill)


def _of_cluster(value: Callable[[ClusterReport], float]) -> Callable[[Status], float | None]:
    return lambda status: None if status.cluster is None else value(status.cluster)


def _mirror_on(spill: SpillReport) -> float:
    return float(spill.mirror is not None and spill.mirror.state == "on")


def _longest_s(status: Status) -> float:
    return max((max(0.0, time.time() - one.since) for one in status.waiting), default=0.0)


def _fields(
    prefix: str, record: type[RamReport | SpillReport], of: Callable[[Status], Any]
) -> dict[str, Gauge]:
    """The gauges of a record's fields that are one."""

    def value(name: str) -> Callable[[Status], float | None]:
        return lambda status: None if (found := of(status)) is None else getattr(found, name)

    return {
        f"{prefix}_{one.name}": Gauge(one.metadata[GAUGE], value(one.name))
        for one in fields(record)
        if GAUGE in one.metadata
    }


GAUGES: dict[str, Gauge] = {
    **_fields("ram", RamReport, lambda s: s.ram),
    "waiting_writers": Gauge(
        "writers that wait for room in the RAM tier", lambda s: s.ram.waiting_writers
    ),
    "waiting_bytes": Gauge(
        "bytes that they wait for", lambda s: sum(one.wanted_bytes for one in s.waiting)
    ),
    "owners_waiting": Gauge(
        "users whose writers wait since their share of RAM is used up",
        lambda s: sum(1 for one in s.ram.owners if one.waiting_writers),
    ),
    "largest_owner_bytes": Gauge(
        "dirty bytes of the user who has most of them; 0 where there are no shares",
        lambda s: max((one.taken_bytes for one in s.ram.owners), default=0),
    ),
    "largest_owner_uid": Gauge(
        "that user; -1: nobody", lambda s: s.ram.owners[0].uid if s.ram.owners else -1
    ),
    "longest_wait_seconds": Gauge("how long the first of them has waited", _longest_s),
    "waiting_calls": Gauge(
        "calls of applications that have waited for more than two seconds (native)",
        lambda s: len(s.waiting_calls),
    ),
    "queue_operations": Gauge("operations that are not persisted", lambda s: s.queue_length),
    "queue_bytes": Gauge("bytes of contents that are not persisted", lambda s: s.queue_bytes),
    "parked_operations": Gauge(
        "operations that the backing directory refused for good", lambda s: s.parked
    ),
    "interrupted_files": Gauge(
        "files whose writer was lost with an earlier daemon", lambda s: s.interrupted
    ),
    "open_files": Gauge("open files", lambda s: s.open_files),
    "oldest_unpersisted_age_seconds": Gauge(
        "age of the oldest operation that is not persisted", lambda s: s.oldest_unpersisted_age_s
    ),
    "operations_in_per_second": Gauge(
        "operations that were logged, over the last half minute", lambda s: s.pace.in_per_s
    ),
    "operations_out_per_second": Gauge(
        "operations that were persisted or left out, over the last half minute",
        lambda s: s.pace.out_per_s,
    ),
    "drain_falls_behind": Gauge(
        "1 while more and more operations wait to be persisted", lambda s: s.pace.falls_behind
    ),
    "backing_calls_out": Gauge(
        "calls on the backing directory that have not returned",
        lambda s: s.backing_health.calls_out,
    ),
    "backing_calls_stuck": Gauge(
        "calls on the backing directory that have not returned for long",
        lambda s: s.backing_health.calls_stuck,
    ),
    "backing_oldest_call_seconds": Gauge(
        "how long the oldest such call has been out", lambda s: s.backing_health.oldest_call_s
    ),
    "bypassed": Gauge(
        "1: new opens do not go through acpfs", lambda s: float(s.bypassed_since is not None)
    ),
    "guarded_checkpoints": Gauge(
        "deleted checkpoints that stay on the backing directory for now", lambda s: len(s.guarded)
    ),
    "guarded_operations": Gauge("deletions that are held back", lambda s: s.guarded_operations),
    "guarded_bytes": Gauge(
        "bytes that held deletions would free on the backing directory",
        lambda s: sum(g.size for g in s.guarded),
    ),
    "guarded_since_seconds": Gauge(
        "when the oldest of them was deleted, seconds since the epoch; 0: none",
        lambda s: min((g.since for g in s.guarded), default=0.0),
    ),
    "conflicts": Gauge(
        "operations that met a native change of the backing directory, and were kept beside or "
        "left out",
        lambda s: s.conflicts_total,
    ),
    "worker_start_time_seconds": Gauge(
        "when the daemon started, seconds since the epoch", lambda s: s.worker.started_at
    ),
    "worker_number": Gauge(
        "workers that this mount has had; more than 1 after a death or a reload",
        lambda s: s.worker.number,
    ),
    **_fields("spill", SpillReport, lambda s: s.spill),
    "spill_usable": Gauge(
        "1: the spill directory takes copies", _of_spill(lambda x: float(x.state == "ok"))
    ),
    "mirror_on": Gauge(
        "1: a reboot of the node loses nothing but what is behind",
        lambda s: None if s.spill is None or s.spill.mirror is None else _mirror_on(s.spill),
    ),
    "copies_on": Gauge(
        "1: another node holds a copy of what is not persisted, as far as it came",
        lambda s: None if s.copies is None else float(s.copies.state == "on"),
    ),
    "copies_behind_bytes": Gauge(
        "bytes of files that the loss of this node would take, with what came after them",
        lambda s: None if s.copies is None else s.copies.behind_bytes,
    ),
    "copies_behind_files": Gauge(
        "files that have no copy at another node yet",
        lambda s: None if s.copies is None else s.copies.behind_files,
    ),
    "held_missing_nodes": Gauge(
        "nodes that are missing, and of which something is held here",
        lambda s: len(
            {one.node for one in s.held} & set(() if s.cluster is None else s.cluster.missing)
        ),
    ),
    "mirror_behind_bytes": Gauge(
        "bytes of files that are complete and have no copy yet",
        lambda s: (
            None if s.spill is None or s.spill.mirror is None else s.spill.mirror.behind_bytes
        ),
    ),
    "nodes": Gauge(
        "other nodes that have a record in the backing directory", _of_cluster(lambda x: x.nodes)
    ),
    "live_nodes": Gauge("other nodes that are heard", _of_cluster(lambda x: x.live)),
    "missing_nodes": Gauge(
        "other nodes that are not heard, and may have what is not persisted",
        _of_cluster(lambda x: len(x.missing)),
    ),
    "withheld_pointers": Gauge(
        "pointer files that are withheld because of other nodes", _of_cluster(lambda x: x.withheld)
    ),
    "waiting_pointers": Gauge(
        "pointer files that wait for other nodes", _of_cluster(lambda x: len(x.waiting))
    ),
    "awaited_names": Gauge(
        "names that lookups wait for, because other nodes are about to persist them",
        _of_cluster(lambda x: len(x.awaited)),
    ),
    "clock_bound_seconds": Gauge(
        "the most that clocks of other nodes are taken to differ by",
        _of_cluster(lambda x: x.clock_bound_s),
    ),
    "clock_drift_seconds": Gauge(
        "what the wall clock was set by, and has not been made up for yet",
        _of_cluster(lambda x: x.drift_s),
    ),
    "node_record_age_seconds": Gauge(
        "since this node's own record was written", _of_cluster(lambda x: x.record_age_s or 0.0)
    ),
}
"""Name without prefix → what it is.

A mount without spill directory or other members has none of theirs.
"""

HISTOGRAMS: dict[str, str] = {
    "file_save": "from a file's open for writing to its first close",
    "file_persist": "from a file's close (or fsync) until it was persisted",
    "file_load": "from a file's open for reading to its last close",
    "fsync": "calls of fsync",
}
"""Name in `Status.durations` → what was measured. Metrics add `_seconds`."""

COUNTERS: dict[str, str] = {
    "persisted_ops": "operations that were persisted",
    "persisted_bytes": "bytes of contents that were persisted",
    "streamed_bytes": "bytes that were written into staging files, also those of failed tries",
    "retries": "operations that failed and were tried again",
    "restarted_streams": (
        "pieces that were read again, because the file was changed while it was copied"
    ),
    "repairs": "times that the backing directory was not as left, and was put right",
    "verify_failures": "streams that read back differently (`verify_after_write`)",
    "checksum_mismatches": "files of the backing directory that are not what was stored in them",
    "backing_timeouts": "requests that the backing directory did not answer in time",
    "backing_reopened": "times that the backing directory was opened again",
    "stale_answers": (
        "requests that were answered from older knowledge, because the backing directory did not "
        "answer"
    ),
    "exchange_got_bytes": "bytes of cold files that other nodes gave (`exchange`)",
    "exchange_given_bytes": "bytes that were given to other nodes",
    "exchange_failures": "times that another node did not answer, and the storage was read",
    "evicted_files": "clean files that left RAM to make room",
    "evicted_bytes": "bytes of them",
}
"""Those that people look at, of the many in `counters` of `status`; metrics have all of them and
add `_total`.
"""

BACKING_HEALTH = "backing_health"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric as the page and the dashboard name it."""

    name: str
    kind: MetricKind
    text: str


def rows() -> list[MetricRow]:
    """All metrics that have a name of their own, in the order of the page."""
    states = ", ".join(f"`{state}`" for state in HEALTH_STATES)
    return [
        *(
            MetricRow(f"{PREFIX}{name}", MetricKind.GAUGE, gauge.text)
            for name, gauge in GAUGES.items()
        ),
        MetricRow(
            f"{PREFIX}{BACKING_HEALTH}",
            MetricKind.GAUGE,
            f"1 for the `state` that the backing directory is in: {states}",
        ),
        *(
            MetricRow(f"{PREFIX}{name}_seconds", MetricKind.HISTOGRAM, text)
            for name, text in HISTOGRAMS.items()
        ),
        *(
            MetricRow(f"{PREFIX}{name}_total", MetricKind.COUNTER, text)
            for name, text in COUNTERS.items()
        ),
    ]


def series() -> set[str]:
    """Every name that a query may use."""
    found: set[str] = set()
    for row in rows():
        found |= (
            {f"{row.name}_{end}" for end in ("bucket", "sum", "count")}
            if row.kind is MetricKind.HISTOGRAM
            else {row.name}
        )
    return found
