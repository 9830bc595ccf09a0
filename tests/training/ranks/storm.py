"""A storm of kills: each round is one job, a fault at a random point, and perhaps something else
that dies meanwhile.

What a round must leave: all survivors left with SAVED, and a whole checkpoint, equal bit for bit to
the same job without a fault at its step, at most one step behind. Rounds are drawn from a seed; one
that fails keeps its directory.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.training.messages import ExitStatus
from tests.cluster.stand import Stand
from tests.rig.mounts import AcpfsMount
from tests.training.gasp_job import until
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.gasps import (
    WORLD,
    Fault,
    assert_same_as_without,
    protected,
    train,
    yardstick,
)
from tests.training.ranks.jobs import JOBS
from tests.training.ranks.nodes import coordinators, node_of

POINTS = ("forward", "backward", "reduce", "ready", "gated", "updating", "updated", "sent_round")
LATER = ("stopping", "settling", "saving", "publishing", "published")
NOTHING = "nothing"
SECOND = "a second rank at a point"
MOMENT = "a second rank"
STOPPED = "SIGSTOP"
COORDINATOR = "the coordinator"
WORKER = "the mount's worker"
ON_ONE = {NOTHING: 5, SECOND: 4, MOMENT: 4, STOPPED: 0.3}
ON_TWO = {NOTHING: 3, SECOND: 2, MOMENT: 2, COORDINATOR: 3, WORKER: 3, STOPPED: 0.3}
"""How often.

After the coordinator's death more than half of the ranks must be left to elect the next one, so no
second rank then.
"""
ENDS_S = 300.0
"""A rank has not ended by then: only bounds what hangs."""
DELAY_S = 0.6
"""Whatever else dies does so this long after the first rank, at most."""


@dataclass(frozen=True)
class Round:
    """One job."""

    number: int
    kind: str
    nodes: int
    fault: Fault
    also: str
    who: int
    """The second rank."""
    delay_s: float

    def __str__(self) -> str:
        where = "two mounts" if self.nodes == 2 else "a directory"
        return (
            f"{self.number}: {self.kind} in {where}, {dict(self.fault.ranks)}, also {self.also} "
            f"({self.who}) after {self.delay_s:.2f} s"
        )


def drawn(number: int, chance: random.Random, nodes: int) -> Round:
    """Ranks whose numbers differ by an odd one hold different shards, so a cover is left of what
    the two leave.
    """
    kind = chance.choice(sorted(JOBS))
    first = chance.randrange(WORLD)
    who = (first + chance.choice([1, 3])) % WORLD
    weights = ON_ONE if nodes == 1 else ON_TWO
    also = chance.choices(list(weights), list(weights.values()))[0]
    faulty = {first: chance.choice(POINTS)}
    if also == SECOND:
        faulty[who] = chance.choice(LATER)
    return Round(number, kind, nodes, Fault(kind, faulty), also, who, chance.random() * DELAY_S)


def drained(node: AcpfsMount) -> bool:
    """Whether all is in the storage; a worker that is just started again says nothing.

    The guard keeps the checkpoints of rounds that are over for half an hour, because nothing newer
    lies beside them, and until they may go, the other node's removals wait: so they are let go
    here.
    """
    with contextlib.suppress(Exception):
        node.ask("release")
        return bool(node.status()["queue_length"] == 0)
    return False


@dataclass
class Storm:
    """Runs rounds; a context manager that has the mounts."""

    directory: Path
    seed: int
    python: str
    tell: Callable[[str], object] = print
    share_on_two: float = 0.4
    done: Counter[str] = field(default_factory=Counter)
    steps: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    kills: int = 0

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Stand]:
        (self.directory / "shared").mkdir()
        stand = Stand(
            self.directory,
            [self.directory / "shared"] * 2,
            "native",
            python=self.python,
            watchdog_s=7200.0,
        )
        with stand:
            yield stand
            until(lambda: not any(coordinators(node) for node in stand.nodes))

    def run(self, kills: int, minutes: float = math.inf) -> None:
        """So many kills, or a few more; or fewer, when the time is over."""
        until_s = time.monotonic() + 60 * minutes
        chance = random.Random(self.seed)
        (self.directory / "yardsticks").mkdir()
        for kind in JOBS:
            yardstick(kind, self.directory / "yardsticks")
        with self.mounted() as stand:
            while self.kills < kills and time.monotonic() < until_s:
                one = drawn(
                    sum(self.done.values()), chance, 2 if chance.random() < self.share_on_two else 1
                )
                self.done[one.also] += 1
                self.kinds[
                    f"{one.kind} in {'two mounts' if one.nodes == 2 else 'a directory'}"
                ] += 1
                self._round(one, stand)

    def _round(self, one: Round, stand: Stand) -> None:
        directory = self.directory / f"round-{one.number}"
        began = time.monotonic()
        directory.mkdir()
        save = stand.backings[0] / directory.name if one.nodes == 2 else directory / "run"
        try:
            with Ranks(
                WORLD, directory, lambda rank: self._rank(rank, one, directory, stand)
            ) as ranks:
                self._disturb(one, ranks, stand, directory.name)
                self._judge(one, ranks)
            until(lambda: (save / "latest").exists())
            if one.nodes == 2:  # a second gasp of the same step takes the first one's place there
                until(lambda: all(drained(node) for node in stand.nodes))
            manifest = assert_same_as_without(one.fault, save, self.directory / "yardsticks")
            self.steps[manifest.step] += 1
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the verdict
            what = "WRONG" if (save / "latest").exists() else "MISSING"
            self.failed.append(f"{what} {one}: {type(error).__name__}: {str(error)[-3000:]}")
            self.tell(f"FAILED {self.failed[-1]}")
            return
        shutil.rmtree(directory)
        if one.nodes == 2:
            shutil.rmtree(stand.nodes[0].path / directory.name, ignore_errors=True)
        self.tell(
            f"{self.kills} kills, {time.monotonic() - began:.1f} s, step {manifest.step}, {one}"
        )

    def _rank(self, rank: int, one: Round, directory: Path, stand: Stand) -> None:
        if one.nodes == 1:
            protected(rank, one.fault, directory / "run", directory / "store")
            return
        mount = stand.nodes[node_of(rank)]
        os.environ[ENVIRONMENT_VARIABLE] = str(mount.runtime_dir)
        join_group(rank, WORLD, directory / "store")
        train(rank, one.fault, mount.path / directory.name)

    def _disturb(self, one: Round, ranks: Ranks, stand: Stand, name: str) -> None:
        """What else happens, after the first rank's death."""
        first = next(iter(one.fault.ranks))
        assert ranks.status(first, ENDS_S) == -signal.SIGKILL, ranks.said()
        self.kills += len(one.fault.ranks) + (one.also not in (NOTHING, SECOND))
        threading.Event().wait(one.delay_s)
        if one.also in (MOMENT, STOPPED):
            ranks.kill(one.who, signal.SIGSTOP if one.also == STOPPED else signal.SIGKILL)
        elif one.also == COORDINATOR:
            pid = coordinators(stand.nodes[0], name).get(0)
            if pid is not None:  # it may have ended already
                os.kill(pid, signal.SIGKILL)
        elif one.also == WORKER:
            stand.nodes[node_of(one.who)].kill_worker()

    def _judge(self, one: Round, ranks: Ranks) -> None:
        may_have_left = {one.who} if one.also in (MOMENT, STOPPED) else set(one.fault.ranks)
        for rank in sorted(set(range(WORLD)) - may_have_left - one.fault.ranks.keys()):
            assert ranks.status(rank, ENDS_S) == ExitStatus.SAVED, ranks.said()

    def told(self) -> str:
        """The result, in words."""
        what = ", ".join(f"{name} {count}" for name, count in sorted(self.done.items()))
        behind = ", ".join(f"step {step}: {count}" for step, count in sorted(self.steps.items()))
        return (
            f"seed {self.seed}: {self.kills} kills in {sum(self.done.values())} jobs, "
            f"{sum(text.startswith('WRONG') for text in self.failed)} wrong checkpoints, "
            f"{sum(text.startswith('MISSING') for text in self.failed)} missing; "
            f"beside the first rank died: {what}; saved {behind} (the fault was in update 5)"
        )

    def kept(self, command: str, where: str) -> str:
        """The result, as a page for bench/results."""
        rows = [f"| {name} | {count} |" for name, count in sorted(self.kinds.items())]
        failed = [f"* {text.splitlines()[0]}" for text in self.failed] or ["None failed."]
        lines = [
            "# Storm of kills in torch jobs",
            "",
            f"`{command}`, {where}.",
            "",
            f"{self.told()[0].upper()}{self.told()[1:]}.",
        ]
        return "\n".join([*lines, "", "| layout | jobs |", "|---|---|", *rows, "", *failed, ""])
