"""Ports for those who must be told one before anybody listens there: torch's meeting point,
launchers, a scrape.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

BEGIN = 15_000
END = 65_536
"""Below lie the well-known ones."""
TRIES = 100


def candidates(kernel_first: int, kernel_last: int) -> range:
    """Ports that the kernel gives to nobody: below its own, else above them; where it has nearly
    all, any.
    """
    below = range(BEGIN, min(kernel_first, END))
    above = range(max(kernel_last + 1, BEGIN), END)
    return next((some for some in (below, above) if len(some) >= TRIES), range(BEGIN, END))


def free_port() -> int:
    """A TCP port at which nobody listens, and which the kernel gives to nobody: it takes its own
    from its range, for each connection.

    One that it gave out and that was closed again would be anybody's until it is used.
    """
    first, last = (
        int(word)
        for word in Path("/proc/sys/net/ipv4/ip_local_port_range")
        .read_text(encoding="ascii")
        .split()
    )
    for port in random.SystemRandom().sample(candidates(first, last), TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError(f"{TRIES} ports are in use")
