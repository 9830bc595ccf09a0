"""Kills on several nodes while they save: workers, mounts, servers of the storage; streams change
their speed, and clocks differ.

The job goes on as a real one would: a save that fails because a mount is gone is given up, and the
next one begins when all mounts are there. `run` returns what the observer saw.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acpfs.errors import AcpfsError
from tests.cluster.observer import Observer
from tests.cluster.outcome import Outcome
from tests.cluster.ranks import RankJob
from tests.cluster.stand import QUICK, Stand
from tests.cluster.training import Job
from tests.rig.storage.servers import Storage, kill

CLOCK_SHARE = 0.45
"""Of the clock bound: so far clocks are set to either side."""
BANDWIDTHS = ("0", "500K", "200K", "100K")
"""Of all nodes but the first, which writes the pointers: without the order they are there before
the shards. 100K is a delay of seconds.
"""
PAUSE_S = 0.2
BETWEEN_SAVES_S = 0.3
AWAY_S = 1.0
SAVE_WAIT_S = 60.0
DRAIN_S = 180.0
KEEP = 10
OVER_STORAGE: dict[str, object] = {"heartbeat": 2.0, "clock_bound": 0.5, "node_timeout": 120.0}
"""Over a distributed file system, whose clients remember things for a second: what users have.

A node mounted anew is not missing.
"""


@dataclass
class Ground:
    """What a job saves on."""

    backings: Sequence[Path]
    """One per node."""
    seen: Path
    """Where the observer looks."""
    storage: Storage | None = None
    """Whose servers can be killed."""


class _Saver:
    """Saves all the time, in a thread of its own."""

    def __init__(self, job: Job | RankJob, seed: int) -> None:
        self._job = job
        self._random = random.Random(seed)
        self.mounts = threading.Lock()
        """Held by who takes a mount away, until it is there again: no save begins meanwhile, but
        one that is under way fails.
        """
        self._stop = threading.Event()
        self._done = threading.Semaphore(0)
        self.saves = 0
        self.failed = 0
        self.why = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._random.uniform(0, BETWEEN_SAVES_S)):
            self.save()
            self._done.release()

    def save(self) -> None:
        """One, which may be given up."""
        try:
            with self.mounts:
                self._job.enter()
            self._job.save()
            self.saves += 1
        except OSError as error:
            self.failed += 1
            self.why = str(error)

    def wait_save(self) -> None:
        """Until one more save has ended, well or badly."""
        while self._done.acquire(blocking=False):
            pass
        self._done.acquire(timeout=SAVE_WAIT_S)

    def stop(self) -> None:
        """No further saves of its own."""
        self._stop.set()
        self._thread.join(SAVE_WAIT_S)


def run(
    tmp: Path,
    ground: Ground,
    seed: int,
    kills: int,
    tell: Callable[[str], None] = lambda _line: None,
    *,
    workload: str = "files",
    calm: int = 0,
    keep: int = KEEP,
    transport: str = "native",
    **options: Any,
) -> Outcome:
    """`workload`: files, dcp or megatron; `calm`: so many saves at the end, when nobody is killed
    any more, for the pointers' delays.

    `keep`: so many checkpoints, each node deletes its part of older ones, pointers first; 0: all.
    """
    chooser = random.Random(seed)
    began = time.monotonic()
    nodes = len(ground.backings)
    settings = {
        **QUICK,
        **(OVER_STORAGE if ground.storage else {"node_timeout": 20}),
        "no_keep_last_persisted": True,
        **options,
    }
    outcome = Outcome.of(
        workload, seed, nodes, ground.storage.name if ground.storage else "a directory", settings
    )
    stand = Stand(
        tmp, ground.backings, transport, watchdog_s=600.0 + 30 * (kills + calm), **settings
    )
    with (
        stand,
        Observer(ground.seen, tmp, workload, nodes) as observer,
        contextlib.ExitStack() as stack,
    ):
        job = (
            Job(stand.paths(), seed, keep=keep)
            if workload == "files"
            else RankJob(stand.paths(), workload, tmp / "ranks.log", keep=keep)
        )
        stack.callback(job.close)
        stand.nodes[-1].ask("set", key="bandwidth", value=BANDWIDTHS[-1])
        saver = _Saver(job, seed)
        storm = Storm(stand, ground.storage, saver, chooser)
        while outcome.killed < kills:
            saver.wait_save()
            storm.vary()
            if what := storm.kill():
                outcome.kills[what] = outcome.kills.get(what, 0) + 1
                done = f"{saver.saves} saves, {saver.failed} given up {saver.why[:150]}"
                tell(
                    f"{workload} {outcome.killed} after {time.monotonic() - began:.0f} s: "
                    f"{what}; {done}"
                )
        saver.wait_save()
        saver.stop()
        outcome.saves = saver.saves
        outcome.failed_saves = saver.failed
        finish(stand)
        first_calm = job.iteration + 1
        for _ in range(calm):
            storm.vary()
            saver.save()
            for node in stand.nodes:
                node.wait_drained(DRAIN_S)
        job.close()
    outcome.take(observer, first_calm, time.monotonic() - began)
    return outcome


class Storm:
    """What happens to nodes and servers, chosen from a seed."""

    def __init__(
        self, stand: Stand, storage: Storage | None, saver: _Saver, chooser: random.Random
    ) -> None:
        self._stand = stand
        self._storage = storage
        self._saver = saver
        self._random = chooser

    def vary(self) -> None:
        """Another clock somewhere, and another speed."""
        bound_s = float(str(self._stand.nodes[0].options["clock_bound"]))
        ahead_s = self._random.uniform(-CLOCK_SHARE, CLOCK_SHARE) * bound_s
        self._stand.set_clock(self._random.randrange(len(self._stand.nodes)), ahead_s)
        node = self._random.choice(self._stand.nodes[1:])
        bandwidth = self._random.choice(BANDWIDTHS)
        with contextlib.suppress(AcpfsError, OSError):  # its worker is just being replaced
            node.ask("set", key="bandwidth", value=bandwidth)

    def kill(self) -> str:
        """Something, at some moment of a save; says what, and "" where a worker was just being
        replaced.
        """
        node = self._random.choice(self._stand.nodes)
        threading.Event().wait(self._random.uniform(0, PAUSE_S))
        what = self._random.choices(
            ["worker", "mount", "brick"], [12, 5, 3 if self._storage else 0]
        )[0]
        if what == "worker":
            try:
                node.kill_worker()
            except (AcpfsError, OSError):
                return ""
        elif what == "mount":
            with self._saver.mounts:
                node.kill()
                threading.Event().wait(self._random.uniform(0, AWAY_S))
                node.start()
        else:
            assert self._storage is not None
            # always this one: a client takes seconds to find it again, and two away are a lost
            # quorum
            kill(self._storage.server(0))
            threading.Event().wait(self._random.uniform(0, AWAY_S))
            self._storage.restart()
        return what


def finish(stand: Stand) -> None:
    """All is drained at full speed; what lost its writer when its mount was killed is discarded."""
    for node in stand.nodes:
        node.wait_status(lambda status: status["state"] == "serving")
        node.ask("set", key="bandwidth", value="0")
    for node in stand.nodes:
        node.wait_status(lambda status: status["queue_length"] == 0, DRAIN_S)
        node.ask("discard", paths=[""])
