"""Ports for those who must be told one before anybody listens there: torch's meeting point, launchers, a scrape."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

BEGIN = 15_000
"""Below lie the well-known ones."""


def free_port() -> int:
    """A TCP port at which nobody listens, and which the kernel gives to nobody: it takes its own from above, for each connection.

    One that it gave out and that was closed again would be anybody's until it is used.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for port in random.SystemRandom().sample(range(BEGIN, end), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError("100 ports are in use")
