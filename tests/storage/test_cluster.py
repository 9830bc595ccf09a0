"""Several nodes, each over a client of its own of one distributed file system: pointers name what
is there, whoever is killed.

Kills come while a save is written (workers), and between saves, while they drain (all of a node, a
server). The large run has ACPFS_STORAGE_KILLS=200.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.observer import Observer
from tests.cluster.stand import Stand
from tests.cluster.training import Job, looks_right
from tests.rig.storage.servers import kill
from tests.storage.conftest import ALL, Site, by_hand

clause = pytest.mark.clause
KILLS = int(os.environ.get("ACPFS_STORAGE_KILLS", "6"))
NODES = 4 if ALL else 3
pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.timeout(300 + KILLS * 30),
]
SETTLED: dict[str, Any] = {"heartbeat": 1.0, "clock_bound": 0.2, "node_timeout": 120.0}
"""A node that is mounted anew on a busy machine is not missing yet."""
DRAIN_S = 180.0


class Storm:
    """Kills, chosen from a seed."""

    def __init__(self, site: Site, stand: Stand, seed: int) -> None:
        self._site = site
        self._stand = stand
        self._random = random.Random(seed)
        self.kills = 0

    def during(self, job: Job) -> None:
        """A save, and the end of one worker at some moment of it."""
        saving = threading.Thread(target=job.save)
        saving.start()
        self._random.choice(self._stand.nodes).kill_worker()
        saving.join()
        self.kills += 1

    def between(self) -> None:
        """A node, or a server of the storage, dies and comes back while the last save drains."""
        if self._random.random() < 0.5:
            node = self._random.choice(self._stand.nodes)
            node.kill()
            node.start()
        else:
            # always this one: a client takes seconds to find it again, and two away are a lost
            # quorum
            kill(self._site.storage.server(0))
            self._site.storage.restart()
        self.kills += 1


def clients(site: Site, count: int, name: str) -> list[Path]:
    """One directory through that many clients, each with the caches that users have."""
    site.fresh(name)
    mounted = [path for path in site.storage.base.glob("node?") if path.is_dir()]
    mounted += [site.storage.client(f"node{number}") for number in range(len(mounted), count)]
    return [path / name for path in sorted(mounted)[:count]]


@clause("S160", "S81", "S22")
def test_pointers_of_a_cluster(transport: str, site: Site, tmp_path: Path, seed: int) -> None:
    shared = site.observer / tmp_path.name
    with Stand(tmp_path, clients(site, NODES, tmp_path.name), transport, **SETTLED) as stand:
        job = Job(stand.paths(), seed, keep=3)
        storm = Storm(site, stand, seed)
        job.save()
        with Observer(shared, tmp_path) as observer:
            while storm.kills < KILLS:
                storm.during(job)
                storm.between()
            for node in stand.nodes:
                node.flush(timeout_s=DRAIN_S)
        assert looks_right(shared, job.name) == ""
        assert {
            row["status"]
            for node in stand.nodes
            for row in node.ctl("verify", f"{node.path}/{job.name}")
        } == {"ok"}
    assert (observer.violations, observer.looks > 0) == ([], True)


@by_hand
def test_without_the_order_there_are_violations(
    transport: str, site: Site, tmp_path: Path, seed: int
) -> None:
    """The test of the test, on this file system."""
    shared = site.observer / tmp_path.name
    with Stand(
        tmp_path, clients(site, NODES, tmp_path.name), transport, cluster_order="off", **SETTLED
    ) as stand:
        job = Job(stand.paths(), seed)
        with Observer(shared, tmp_path) as observer:
            for node in stand.nodes[1:]:
                node.ask("set", key="bandwidth", value="1")
            job.save()
            stand.nodes[0].flush(timeout_s=DRAIN_S)
            stand.nodes[0].wait_status(lambda _status: observer.complains())
            for node in stand.nodes:
                node.ask("set", key="bandwidth", value="0")
                node.flush(timeout_s=DRAIN_S)
    assert observer.count > 0
