"""Prometheus metrics, made from one `Status` per scrape: the same numbers as `acpfs-ctl status`, so
they cannot disagree.

Which there are, `metric_table` says. Every metric is named acpfs_… with its unit last and carries
the labels mount and node, and none a file or a checkpoint: a mount has some 200 series for as long
as it lives. `serve_http` serves them from a thread of its own; the status function must therefore
be thread-safe. prometheus_client, which brings an HTTP server along, is imported when metrics are
first asked for: most mounts never are.
"""

from __future__ import annotations

import socket
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
from acpfs.runtime.threads import Threads

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

LABELS = ("mount", "node")
BACKLOG = 16
"""Scrapes that wait for the next worker."""
_SO_NETNS_COOKIE = 71
"""Missing in Python's `socket`."""


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

    def serve_http(self, listening: socket.socket, threads: Threads) -> Callable[[], None]:
        """Serve at a listening socket, which stays the caller's; returns what stops it."""
        from prometheus_client import make_wsgi_app

        from acpfs.control.metrics_server import MetricsServer

        server = MetricsServer(listening, make_wsgi_app(self._registry))
        serving = threads.start("metrics", server.serve_forever)

        def stop() -> None:
            if not serving.withdraw():  # what has never begun would not hear of it
                server.shutdown()
            server.server_close()

        return stop


def listen_for_scrapes(port: int, address: str) -> socket.socket:
    """Bind the port of the metrics.

    Raises:
        OSError: the port is taken, or the address is none of this machine.
    """
    family, where = _resolved(port, address)
    return socket.create_server(where, family=family, backlog=BACKLOG)


def is_bound_to(listening: socket.socket, port: int, address: str) -> bool:
    """Whether a socket is what `listen_for_scrapes` would make.

    Raises:
        OSError: the address is not known.
    """
    _family, where = _resolved(port, address)
    return bool(listening.getsockname()[:2] == where) and _is_of_this_network(listening)


def _is_of_this_network(bound: socket.socket) -> bool:
    """One that came from a container may be of its network: nobody asks there any more."""
    with socket.socket() as own:
        try:
            mine, its = (
                one.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8) for one in (own, bound)
            )
        except OSError:  # before Linux 5.14
            return True
    return mine == its


def _resolved(port: int, address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _type, _protocol, _name, where = found[0]
    return family, (str(where[0]), port)
