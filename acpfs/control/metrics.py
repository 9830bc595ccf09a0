"""Prometheus metrics, made from one `Status` per scrape: the same numbers as `acpfs-ctl status`, so they cannot disagree.

Every metric is named acpfs_… with its unit last and carries the labels mount and node. `start_http` serves them on localhost from a
thread of its own; the status function must therefore be thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from acpfs.control.reports import Status

HEALTH_STATES = ("ok", "slow", "refusing", "stuck")
LABELS = ("mount", "node")
HTTP_ADDRESS = "127.0.0.1"


class _FromStatus(Collector):
    """Turns a status into metric families."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
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
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_FromStatus(status))

    def text(self) -> str:
        """Prometheus text format."""
        return generate_latest(self._registry).decode()

    def write(self, file: Path) -> None:
        """Replace a file for a textfile collector, atomically."""
        write_to_textfile(str(file), self._registry)

    def start_http(self, port: int) -> Callable[[], None]:
        """Serve on localhost; returns what stops it.

        Raises:
            OSError: the port is taken.
        """
        server, thread = start_http_server(port, addr=HTTP_ADDRESS, registry=self._registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop


def _gauges(status: Status) -> dict[str, tuple[str, float]]:
    ram = status.ram
    return {
        "ram_budget_bytes": ("most bytes that the RAM tier may take", ram.budget_bytes),
        "ram_used_bytes": ("bytes in the RAM tier", ram.used_bytes),
        "ram_dirty_bytes": ("bytes in the RAM tier that the backing directory has not got", ram.dirty_bytes),
        "ram_clean_bytes": ("bytes in the RAM tier that may leave", ram.clean_bytes),
        "ram_reserved_bytes": ("bytes promised to writes under way", ram.reserved_bytes),
        "ram_prefaulted_bytes": ("bytes made ready for the next save, beside the used ones", ram.prefaulted_bytes),
        "ram_files": ("files in the RAM tier", ram.files),
        "waiting_writers": ("writers that wait for room in the RAM tier", ram.waiting_writers),
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
        "conflicts": (
            "operations that met a native change of the backing directory, and were kept beside or left out",
            status.conflicts_total,
        ),
        "worker_start_time_seconds": ("when the daemon started, seconds since the epoch", status.worker.started_at),
    }
