"""Prometheus metrics, made from one `Status` per scrape: the same numbers as `acpfs-ctl status`, so
they cannot disagree.

Which there are, `metric_table` says. Every metric is named acpfs_… with its unit last and carries
the labels mount and node, and none a file or a checkpoint: a mount has some 200 series for as long
as it lives. `start_http` serves them from a thread of its own; the status function must therefore
be thread-safe. prometheus_client, which brings an HTTP server along, is imported when metrics are
first asked for: most mounts never are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, cast

from acpfs.control.metric_table import (
    BACKING_HEALTH,
    COUNTERS,
    GAUGES,
    HEALTH_STATES,
    HISTOGRAMS,
    PREFIX,
)
from acpfs.control.reports import DurationsReport, Status

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

LABELS = ("mount", "node")


class _FromStatus:
    """Turns a status into metric families; a `Collector` by its shape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        status = self._status()
        where = (status.mount, status.node)
        for name, entry in GAUGES.items():
            value = entry.value(status)
            if value is not None:
                gauge = GaugeMetricFamily(f"{PREFIX}{name}", entry.text, labels=LABELS)
                gauge.add_metric(where, value)
                yield gauge
        health = GaugeMetricFamily(
            f"{PREFIX}{BACKING_HEALTH}",
            "1 for the state that the backing directory is in",
            labels=(*LABELS, "state"),
        )
        for state in HEALTH_STATES:
            health.add_metric((*where, state), float(state == status.backing_health.state))
        yield health
        for name, durations in status.durations.items():
            histogram = HistogramMetricFamily(
                f"{PREFIX}{name}_seconds", HISTOGRAMS[name], labels=LABELS
            )
            histogram.add_metric(where, _buckets(durations), durations.sum_s)
            yield histogram
        for name, count in status.counters.items():
            text = COUNTERS.get(name, name.replace("_", " "))
            counter = CounterMetricFamily(
                f"{PREFIX}{name}", f"{text}; since the daemon started", labels=LABELS
            )
            counter.add_metric(where, count)
            yield counter


def _buckets(durations: DurationsReport) -> list[tuple[str, float]]:
    """As Prometheus has them: each with all that is below it."""
    bounds = [*(f"{bound:g}" for bound in durations.bounds_s), "+Inf"]
    return [
        (bound, float(count))
        for bound, count in zip(bounds, accumulate(durations.counts), strict=True)
    ]


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
