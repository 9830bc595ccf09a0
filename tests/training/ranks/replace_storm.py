"""A storm of faults in jobs that go on: each round is one job through one or two mounts, in which
something happens at random moments.

Ranks die, two at a time too, or stop; a coordinator dies; of a mount the worker or the supervisor
dies; the storage hangs or is slow; the cable between two nodes is pulled. What a round must leave:
the job has ended in order, everything is, bit for bit, as without a fault, and the snapshot in the
mount is whole. Where both copies of a shard died together the job went on from the snapshot, which
changes nothing of that. Rounds are drawn from a seed; one that fails keeps its directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from acpfs.training.manifest import verify
from tests.cluster.stand import Stand
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount
from tests.training.gasp_job import until
from tests.training.ranks.networks import Networks
from tests.training.ranks.nodes import coordinators, on_nodes
from tests.training.ranks.replaced import WORLD, Plan, Replaced, run_job

KINDS = ("hsdp", "zero", "ddp", "tensor", "expert groups")
STEPS = 60
SNAPSHOT_AT = 5
ONE = "a rank"
TWO = "two ranks"
STOPPED = "a rank is stopped"
COORDINATOR = "the coordinator"
WORKER = "the mount's worker"
SUPERVISOR = "the mount's supervisor"
HUNG = "the storage hangs"
SLOW = "the storage is slow"
CUT = "a cable"
HOW_OFTEN = {
    ONE: 12,
    TWO: 5,
    STOPPED: 0.5,
    COORDINATOR: 3,
    WORKER: 3,
    SUPERVISOR: 2,
    HUNG: 2,
    SLOW: 1,
    CUT: 2,
}
PAUSE_S = 2.5
"""Between two faults, at most; the first comes when the snapshot is there."""
FAULTS_PER_JOB = 6
WHILE_S = 10.0
"""So long, at most, a storage hangs or a cable is out: some are shorter and some longer than a
member may be silent.
"""
SLOWLY_S = 0.3
"""For each call."""
ROUND_S = 300.0
SHARE_ON_TWO = 0.5
"""Of rounds, where there are network namespaces."""
WATCHDOG_S = 14400.0
DAEMON = {WORKER, SUPERVISOR}


class Weather:
    """What passes by itself: at most one of each at a time, ended at the latest when a round is
    over.
    """

    def __init__(self) -> None:
        self._ends: dict[str, tuple[float, Callable[[], object]]] = {}

    def begin(
        self, what: str, seconds: float, begin: Callable[[], object], end: Callable[[], object]
    ) -> None:
        begin()
        self._ends[what] = (time.monotonic() + seconds, end)

    def is_on(self, what: str) -> bool:
        return what in self._ends

    def look(self, *, over: bool = False) -> None:
        """End what has lasted long enough."""
        for what, (due, end) in list(self._ends.items()):
            if over or time.monotonic() >= due:
                del self._ends[what]
                end()


@dataclass
class Round:
    """One job: where it runs, and what has happened to it."""

    name: str
    kind: str
    nodes: int
    directory: Path
    happened: list[str] = field(default_factory=list)
    due: float | None = None
    """Of the next fault; None: the snapshot is not there yet."""

    def __str__(self) -> str:
        return f"{self.name}, {self.kind} on {self.nodes} nodes, {self.happened}"


class Scene:
    """Two mounts over one storage, each with a network of its own where there can be one.

    A context manager.
    """

    def __init__(self, directory: Path, python: str) -> None:
        self.cables = None if Networks.missing() else Networks(2)
        self.storage = FaultFs(
            directory / "source", directory / "storage", python=python, watchdog_s=WATCHDOG_S
        )
        self._stand = Stand(
            directory, [directory / "storage"] * 2, "native", python=python, watchdog_s=WATCHDOG_S
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Scene:
        with contextlib.ExitStack() as stack:
            for part in (self.storage, self.cables, self._stand):
                if part is not None:
                    stack.enter_context(part)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            if kind is None:
                until(lambda: not any(coordinators(mount) for mount in self.mounts))

    @property
    def mounts(self) -> list[AcpfsMount]:
        return self._stand.nodes


@dataclass
class ReplaceStorm:
    """Runs rounds."""

    directory: Path
    seed: int
    scene: Scene
    tell: Callable[[str], object] = print
    until: float = float("inf")
    """Of `time.time`: no round begins later."""
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    """From a fault until all ranks had done a step, as coordinators say."""
    jobs: int = 0

    def run(self, faults: int) -> None:
        """So many, or a few more."""
        chance = random.Random(self.seed)
        (self.directory / "yardsticks").mkdir()
        while self.faults.total() < faults and time.time() < self.until:
            nodes = 2 if self.scene.cables and chance.random() < SHARE_ON_TWO else 1
            one = Round(
                f"round-{self.jobs}",
                chance.choice(KINDS),
                nodes,
                self.directory / f"round-{self.jobs}",
            )
            self.jobs += 1
            self._round(one, chance)

    def _round(self, one: Round, chance: random.Random) -> None:
        began = time.monotonic()
        weather = Weather()
        one.directory.mkdir()
        site = on_nodes(
            self.scene.mounts[: one.nodes], one.name, self.scene.cables if one.nodes > 1 else None
        )
        save = site.directory(0)

        def turn(ranks: Replaced) -> None:
            weather.look()
            if one.due is None:
                one.due = time.monotonic() if (save / "latest").exists() else None
            elif len(one.happened) < FAULTS_PER_JOB and time.monotonic() >= one.due:
                one.due = time.monotonic() + chance.random() * PAUSE_S
                what = self._drawn(one, weather, chance)
                one.happened.append(what)
                self.faults[what] += 1
                self._strike(what, one, ranks, weather, chance)

        plan = Plan(one.kind, snapshot_at=SNAPSHOT_AT, steps=STEPS)
        try:
            try:
                counts = run_job(
                    plan, one.directory, self.directory / "yardsticks", turn, ROUND_S, site
                )
            finally:
                weather.look(over=True)
            verify(save / (save / "latest").read_text().strip())
            self._note_times(save)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the verdict
            self.failed.append(
                f"{one} in {one.directory}: {type(error).__name__}: {str(error)[-6000:]}"
            )
            self.tell(f"FAILED {self.failed[-1]}")
            return
        shutil.rmtree(one.directory)
        self.tell(
            f"{self.faults.total()} faults, {time.monotonic() - began:.1f} s, {one}, processes "
            f"{list(counts.values())}"
        )

    def _note_times(self, save: Path) -> None:
        log = save / ".acpfs-job" / "job" / "faults.jsonl"
        self.took_s += (
            [float(json.loads(line)["took_s"]) for line in log.read_text().splitlines()]
            if log.exists()
            else []
        )

    def _drawn(self, one: Round, weather: Weather, chance: random.Random) -> str:
        what = chance.choices(list(HOW_OFTEN), list(HOW_OFTEN.values()))[0]
        daemon = what in DAEMON and bool(DAEMON & {*one.happened})  # both at once end a mount
        again = (
            what == COORDINATOR and COORDINATOR in one.happened
        )  # its successor may not be there yet: one more might end the last
        return (
            ONE
            if daemon or again or weather.is_on(what) or (what == CUT and one.nodes == 1)
            else what
        )

    def _strike(
        self, what: str, one: Round, ranks: Replaced, weather: Weather, chance: random.Random
    ) -> None:
        mount, seconds, storage, cables = (
            self.scene.mounts[chance.randrange(one.nodes)],
            chance.random() * WHILE_S,
            *self._weathers(),
        )
        if what in (ONE, TWO):
            for rank in chance.sample(range(WORLD), 2 if what == TWO else 1):
                ranks.kill(rank)
        elif what == STOPPED:
            rank = chance.randrange(WORLD)
            pid = ranks.pids[rank]
            weather.begin(
                what,
                WHILE_S,
                lambda: ranks.kill(rank, signal.SIGSTOP),
                lambda: send(pid, signal.SIGCONT),
            )
        elif what == COORDINATOR:
            send(coordinators(self.scene.mounts[0], one.name).get(0), signal.SIGKILL)
        elif what == WORKER:
            mount.kill_worker()
        elif what == SUPERVISOR:
            send(mount.supervisor, signal.SIGKILL)
        elif what == HUNG:
            weather.begin(what, seconds, storage.freeze, storage.thaw)
        elif what == SLOW:
            weather.begin(
                what,
                seconds,
                lambda: storage.slow(SLOWLY_S),
                lambda: storage.order(order="remove", action="delay"),
            )
        elif what == CUT and cables is not None:
            weather.begin(what, seconds, lambda: cables.cut(1), lambda: cables.join(1))

    def _weathers(self) -> tuple[FaultFs, Networks | None]:
        return self.scene.storage, self.scene.cables

    def told(self) -> str:
        """The result, in words."""
        what = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return (
            f"seed {self.seed}: {self.faults.total()} faults ({what}) in {self.jobs} jobs, "
            f"{len(self.failed)} failed or ended wrong"
        )


def send(pid: int | None, number: int) -> None:
    """It may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, number)
