"""Prometheus metrics, made from one `Status` per scrape: the same numbers as `acpfs-ctl status`, so they cannot disagree.

Every metric is named acpfs_… with its unit last and carries the labels mount and node. `start_http` serves them from a
thread of its own; the status function must therefore be thread-safe. prometheus_client, which brings an HTTP server along, is imported
when metrics are first asked for: most mounts never are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from acpfs.control.reports import MirrorReport, Status

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

HEALTH_STATES = ("ok", "slow", "refusing", "stuck")
LABELS = ("mount", "node")


class _FromStatus:
    """Turns a status into metric families; a `Collector` by its shape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        where = (status.mount, status.node)
        for name, (text, value) in _gauges(status).items():
            gauge = GaugeMetricFamily(f"acpfs_{name}", text, labels=LABELS)
            gauge.add_metric(where, value)
            yield gauge
        health = GaugeMetricFamily("acpfs_backing_health", "1 for the state that the backing directory is in", labels=(*LABELS, "state"))
        for state in HEALTH_STATES:
            health.add_metric((*where, state), float(state == status.backing_health.state))
        yield health
        for name, count in status.counters.items():
            counter = CounterMetricFamily(f"acpfs_{name}", name.replace("_", " ") + " since the daemon started", labels=LABELS)
            counter.add_metric(where, count)
            yield counter


class Metrics:
    """A registry of its own, so that several in one process (tests) do not meet."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    @cached_property
    def _registry(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(cast("Collector", _FromStatus(self._status)))
        return registry

    def text(self) -> str:
        """Prometheus text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry).decode()

    def write(self, file: Path) -> None:
        """Replace a file for a textfile collector, atomically."""
        from prometheus_client import write_to_textfile

        write_to_textfile(str(file), self._registry)

    def start_http(self, port: int, address: str) -> Callable[[], None]:
        """Serve at this address; returns what stops it.

        Raises:
            OSError: the port is taken, or the address is none of this machine.
        """
        from prometheus_client import start_http_server

        server, thread = start_http_server(port, addr=address, registry=self._registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop


def _longest_s(status: Status) -> float:
    return max((max(0.0, time.time() - one.since) for one in status.waiting), default=0.0)


def _mirror_gauges(mirror: MirrorReport | None) -> dict[str, tuple[str, float]]:
    if mirror is None:
        return {}
    return {
        "mirror_on": ("1: a reboot of the node loses nothing but what is behind", float(mirror.state == "on")),
        "mirror_behind_bytes": ("bytes of files that are complete and have no copy yet", mirror.behind_bytes),
    }


def _spill_gauges(status: Status) -> dict[str, tuple[str, float]]:
    spill = status.spill
    if spill is None:
        return {}
    return {
        "spill_budget_bytes": ("most bytes that acpfs takes in the spill directory", spill.budget_bytes),
        "spill_used_bytes": ("bytes of copies in the spill directory", spill.used_bytes),
        "spill_files": ("copies in the spill directory", spill.files),
        "spill_copying_bytes": ("bytes that are being copied to the spill directory", spill.copying_bytes),
        **_mirror_gauges(spill.mirror),
        "spill_usable": ("1: the spill directory takes copies", float(spill.state == "ok")),
    }


def _cluster_gauges(status: Status) -> dict[str, tuple[str, float]]:
    cluster = status.cluster
    if cluster is None:
        return {}
    return {
        "nodes": ("other nodes that have a record in the backing directory", cluster.nodes),
        "live_nodes": ("other nodes that are heard", cluster.live),
        "missing_nodes": ("other nodes that are not heard, and may have what is not persisted", len(cluster.missing)),
        "withheld_pointers": ("pointer files that are withheld because of other nodes", cluster.withheld),
        "waiting_pointers": ("pointer files that wait for other nodes", len(cluster.waiting)),
        "awaited_names": ("names that lookups wait for, because other nodes are about to persist them", len(cluster.awaited)),
        "clock_bound_seconds": ("the most that clocks of other nodes are taken to differ by", cluster.clock_bound_s),
        "clock_drift_seconds": ("what the wall clock was set by, and has not been made up for yet", cluster.drift_s),
        "node_record_age_seconds": ("since this node's own record was written", cluster.record_age_s or 0.0),
    }


def _gauges(status: Status) -> dict[str, tuple[str, float]]:
    ram = status.ram
    return (
        _spill_gauges(status)
        | _cluster_gauges(status)
        | {
            "ram_budget_bytes": ("most bytes that the RAM tier may take", ram.budget_bytes),
            "ram_urgent_bytes": ("last part of the budget, only for urgent files", ram.urgent_bytes),
            "ram_used_bytes": ("bytes in the RAM tier", ram.used_bytes),
            "ram_dirty_bytes": ("bytes in the RAM tier that the backing directory has not got", ram.dirty_bytes),
            "ram_clean_bytes": ("bytes in the RAM tier that may leave", ram.clean_bytes),
            "ram_reserved_bytes": ("bytes promised to writes under way", ram.reserved_bytes),
            "ram_prefaulted_bytes": ("bytes made ready for the next save, beside the used ones", ram.prefaulted_bytes),
            "ram_retained_bytes": ("clean bytes of checkpoints that stay as long as there is room without them", ram.retained_bytes),
            "ram_pinned_bytes": ("bytes in the RAM tier of files at and below pinned paths", ram.pinned_bytes),
            "ram_files": ("files in the RAM tier", ram.files),
            "ram_tmpfs_used_bytes": ("what the RAM tier's tmpfs says that it holds", ram.tmpfs_used_bytes),
            "ram_peak_bytes": ("most bytes in the RAM tier since the daemon started", ram.peak_bytes),
            "waiting_writers": ("writers that wait for room in the RAM tier", ram.waiting_writers),
            "waiting_bytes": ("bytes that they wait for", sum(one.wanted_bytes for one in status.waiting)),
            "longest_wait_seconds": ("how long the first of them has waited", _longest_s(status)),
            "queue_operations": ("operations that are not persisted", status.queue_length),
            "queue_bytes": ("bytes of contents that are not persisted", status.queue_bytes),
            "parked_operations": ("operations that the backing directory refused for good", status.parked),
            "interrupted_files": ("files whose writer was lost with an earlier daemon", status.interrupted),
            "open_files": ("open files", status.open_files),
            "oldest_unpersisted_age_seconds": ("age of the oldest operation that is not persisted", status.oldest_unpersisted_age_s),
            "backing_calls_out": ("calls on the backing directory that have not returned", status.backing_health.calls_out),
            "backing_calls_stuck": ("calls on the backing directory that have not returned for long", status.backing_health.calls_stuck),
            "backing_oldest_call_seconds": ("how long the oldest such call has been out", status.backing_health.oldest_call_s),
            "bypassed": ("1: new opens do not go through acpfs", float(status.bypassed_since is not None)),
            "guarded_checkpoints": ("deleted checkpoints that stay on the backing directory for now", len(status.guarded)),
            "guarded_operations": ("deletions that are held back", status.guarded_operations),
            "guarded_bytes": ("bytes that held deletions would free on the backing directory", sum(g.size for g in status.guarded)),
            "guarded_since_seconds": ("when the oldest of them was deleted, seconds since the epoch; 0: none", _oldest(status)),
            "conflicts": (
                "operations that met a native change of the backing directory, and were kept beside or left out",
                status.conflicts_total,
            ),
            "worker_start_time_seconds": ("when the daemon started, seconds since the epoch", status.worker.started_at),
        }
    )


def _oldest(status: Status) -> float:
    return min((guarded.since for guarded in status.guarded), default=0.0)
