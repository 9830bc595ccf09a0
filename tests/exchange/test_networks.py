"""Hosts with a network of their own, one after the other in one process."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack

import pytest

from tests.rig.storage.servers import until
from tests.training.ranks.networks import Networks


@pytest.mark.skipif(bool(Networks.missing()), reason=Networks.missing() or "-")
def test_the_next_ones_do_not_wait_for_who_is_left_on_the_last() -> None:
    """A process that ends a moment later keeps its network, and had kept the cable to it."""
    with ExitStack() as stack:
        with Networks(1) as networks:
            own = os.readlink("/proc/self/ns/net")
            words = ["nsenter", f"--net=/run/netns/{networks.names[0]}", "sleep", "infinity"]
            left = subprocess.Popen(words)
            stack.callback(left.wait)
            stack.callback(left.kill)
            until(lambda: os.readlink(f"/proc/{left.pid}/ns/net") != own, "it is there")
        with Networks(1) as networks:
            networks.cut(0)
