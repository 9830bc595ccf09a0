"""Losses of whole nodes in several clusters side by side, each in a process of its own: most of the
time of a loss is waiting. What they saw is summed, and kept after each loss, also when the drill is
ended before.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.record import machine
from tests.cluster.loss_outcome import Outcome, Terms, kept, save, summed
from tests.cluster.losses import NODE_TIMEOUT_S, NODES, pause, run
from tests.cluster.stand import HEARTBEAT_S

LOOK_S = 2.0
ENDS_S = 300.0
"""So long a cluster may take to be taken down."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Plan:
    """What is done."""

    seed: int
    """Of the first cluster; the next one has the next."""
    losses: int
    partitions: int
    parallel: int = 1
    minutes: float = math.inf
    """No further loss after so long."""
    alone: bool = False
    """Holders adopt without being asked."""

    def shares(self) -> list[Plan]:
        """Of each cluster."""
        count = self.parallel
        return [
            replace(
                self,
                seed=self.seed + number,
                losses=self.losses // count + (number < self.losses % count),
                partitions=self.partitions // count + (number < self.partitions % count),
                parallel=1,
            )
            for number in range(count)
        ]


def drill(
    plan: Plan, command: str, base: Path | None, tell: Callable[[str], None], *, add: bool
) -> list[Outcome]:
    """Carry it out; `base`: where it is kept, `add`: with what is there already.

    Raises:
        ValueError: what is there is of another commit, for instance.
    """
    terms = Terms(
        NODES,
        HEARTBEAT_S,
        NODE_TIMEOUT_S,
        platform.release().split("-")[0],
        str(machine()["commit"]),
    )
    commands, before = kept(base, terms) if base is not None and add else ([], [])
    found: list[Outcome] = []

    def keep(outcomes: Sequence[Outcome]) -> None:
        found[:] = outcomes
        if base is not None and outcomes:
            save(base, summed([*before, *outcomes]), [*commands, command], terms)

    with tempfile.TemporaryDirectory(
        prefix="acpfs-cluster-", ignore_cleanup_errors=True
    ) as directory:
        try:
            if plan.parallel > 1:
                _side_by_side(plan, Path(directory), keep)
            else:
                until = time.monotonic() + 60 * plan.minutes
                run(
                    Path(directory),
                    plan.seed,
                    plan.losses,
                    plan.partitions,
                    tell,
                    alone=plan.alone,
                    until=until,
                    kept=keep,
                )
        finally:
            if base is not None and any(one.violations for one in found):
                _keep_evidence(Path(directory), base.with_suffix(".violations"))
    return found


def _side_by_side(plan: Plan, directory: Path, keep: Callable[[list[Outcome]], None]) -> None:
    parts = [directory / f"cluster{number}.json" for number in range(plan.parallel)]
    with _children(plan, directory, parts) as children:
        while True:
            is_over = all(child.poll() is not None for child in children)
            keep(summed(_read(parts)))
            if is_over:
                break
            pause(LOOK_S)
    failed = [child.returncode for child in children if child.returncode not in (0, 1)]
    if failed:
        raise RuntimeError(f"clusters ended with {failed}")


@contextlib.contextmanager
def _children(
    plan: Plan, directory: Path, parts: list[Path]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One per cluster; none of them is left afterwards."""
    code = "import sys; from tests.cluster.loss_drills import child; sys.exit(child())"
    children: list[subprocess.Popen[bytes]] = []
    try:
        for share, part in zip(plan.shares(), parts, strict=True):
            told = json.dumps({**asdict(share), "part": os.fspath(part)})
            environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "TMPDIR": str(directory)}
            children.append(
                subprocess.Popen([sys.executable, "-c", code, told], env=environment, cwd=ROOT)
            )
        yield children
    finally:
        for one in children:
            one.terminate()
        for one in children:
            one.wait(ENDS_S)


def child() -> int:
    """One cluster; `sys.argv[1]`: its plan, and where it says what it saw."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that mounts are taken down
    told = json.loads(sys.argv[1])
    part = Path(told.pop("part"))
    plan = Plan(**told)

    def tell(line: str) -> None:
        print(f"seed {plan.seed}: {line}", flush=True)

    def keep(outcomes: list[Outcome]) -> None:
        temporary = part.with_suffix(".new")
        temporary.write_text(json.dumps([asdict(one) for one in outcomes]))
        temporary.replace(part)

    directory = Path(tempfile.mkdtemp(prefix=f"cluster-{plan.seed}-"))
    until = time.monotonic() + 60 * plan.minutes
    found = run(
        directory,
        plan.seed,
        plan.losses,
        plan.partitions,
        tell,
        alone=plan.alone,
        until=until,
        kept=keep,
    )
    return int(any(one.violations for one in found))


def _read(parts: list[Path]) -> list[Outcome]:
    found = []
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            found += [Outcome(**one) for one in json.loads(part.read_bytes())]
    return found


def _keep_evidence(directory: Path, to: Path) -> None:
    """What a violation is traced by."""
    for found in directory.rglob("evidence*"):
        place = to / found.relative_to(directory)
        shutil.copytree(found, place, dirs_exist_ok=True)
