"""Three runs of one script: without a fault, with one, and resumed by the framework's own loader.

Ranks are forked, and die by SIGKILL.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from acpfs.training.manifest import verify
from acpfs.training.messages import ExitStatus, Manifest
from tests.training.adapters import on_double
from tests.training.ranks.forked import Ranks, join_group
from tests.training.ranks.jobs import assert_same

WORLD = 3
STEPS = 8
DIES = 5
"""Ranks, updates in all, and the update at which somebody dies."""
KILLS = 20
"""Within so many a wrong gate is found."""


WIDTH = 16
MANY = 40_000
"""Updates of a loop that is to be ended by a fault."""


def network() -> Any:
    """With random numbers in its forward pass."""
    torch.manual_seed(7)
    first, second, third = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return torch.nn.Sequential(first, torch.nn.Dropout(0.2), torch.nn.Tanh(), second, third)


@dataclass(frozen=True)
class Run:
    """What a script is told. `dies`: rank → point at which it kills itself in update `DIES`."""

    directory: Path
    protected: bool = False
    resumed: bool = False
    dies: Mapping[int, str] = field(default_factory=dict)
    double: bool = False
    """Whether on the double of a device that runs behind its host; else over gloo."""
    gate: str = ""
    """Which one is wrong; empty: none."""
    adam: Callable[..., Any] = torch.optim.Adam
    """Makes one for where the rank's tensors are."""

    @property
    def steps(self) -> int:
        """Garbage ends no loop."""
        return MANY if self.gate else STEPS

    @property
    def options(self) -> dict[str, Any]:
        """Of `protect`: where the exception came first, no wrong gate would be passed."""
        return {"interrupt_after_s": 2.0} if self.gate else {}

    def at(self, rank: int, point: str, update: int) -> None:
        """Called at points by name."""
        if update == DIES and self.dies.get(rank) == point:
            os.kill(os.getpid(), signal.SIGKILL)


Script = Callable[[int, Run], Any]
"""Trains to the end as this rank; gives everything that has to be the same."""


def as_rank(rank: int, script: Script, run: Run, store: Path) -> None:
    """As torchrun would have started it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
    )
    order: Callable[[], object] = int
    if run.double:
        place = on_double.join(rank, WORLD, store, run.gate)
        run = replace(run, adam=place.adam)
        order = place.order
    else:
        join_group(rank, WORLD, store)
    ends = script(rank, run)
    order()
    name = f"end-{rank}{'-resumed' if run.resumed else ''}.pt"
    torch.save(ends, run.directory.parent / name)


def run_all(script: Script, run: Run, name: str) -> Ranks:
    """Ranks that are still running."""
    run.directory.parent.mkdir(parents=True, exist_ok=True)
    store = run.directory.parent / f"store-{name}"
    return Ranks(WORLD, run.directory.parent, lambda rank: as_rank(rank, script, run, store))


def without_fault(script: Script, place: Path, *, double: bool = False) -> Path:
    """Its directory; made once."""
    directory = place / "whole"
    if not (place / f"end-{WORLD - 1}.pt").exists():
        with run_all(script, Run(directory, double=double), "whole") as ranks:
            assert ranks.statuses() == [0] * WORLD, ranks.said()
    return directory


def with_fault(
    script: Script, place: Path, dies: Mapping[int, str], *, double: bool = False
) -> Path:
    """The gasp."""
    run = Run(place / "run", protected=True, dies=dies, double=double)
    with run_all(script, run, "run") as ranks:
        expected = [-signal.SIGKILL if rank in dies else ExitStatus.SAVED for rank in range(WORLD)]
        assert ranks.statuses() == expected, f"{ranks.statuses()} {ranks.said()}"
    (found,) = run.directory.rglob("gasp.json")
    return found.parent


def assert_is_found(
    script: Script,
    place: Path,
    gate: str,
    whole: Path,
    compare: Callable[[Path, Path], object],
    point: str = "begin",
) -> None:
    """A wrong gate, within some kills: what is left is of an update that nobody could have done
    without the dead, or not that one's state.
    """
    chance = random.Random(gate)
    outcomes: list[list[int]] = []
    for kill in range(KILLS):
        run = Run(
            place / str(kill) / "run",
            protected=True,
            dies={chance.randrange(1, WORLD): point},
            double=True,
            gate=gate,
        )
        with run_all(script, run, "run") as ranks:
            outcomes.append(ranks.statuses())
        for found in run.directory.rglob("gasp.json"):
            if verify(found.parent).step > DIES:
                return
            try:
                compare(found.parent, whole)
            except AssertionError:
                return
    pytest.fail(f"{gate} was not found: {outcomes}")


def ends(script: Script, place: Path, *, double: bool = False) -> list[Any]:
    """What a run from the checkpoint below `place / "run"` comes to, by rank."""
    with run_all(script, Run(place / "run", resumed=True, double=double), "resumed") as ranks:
        assert ranks.statuses() == [0] * WORLD, ranks.said()
    return [
        torch.load(place / f"end-{rank}-resumed.pt", weights_only=False) for rank in range(WORLD)
    ]


def assert_resumes(
    script: Script, place: Path, gasp: Path, whole: Path, *, double: bool = False
) -> Manifest:
    """It ends as the run without a fault did, bit for bit."""
    manifest = verify(gasp)
    assert manifest.step in (DIES - 1, DIES)
    for rank, found in enumerate(ends(script, place, double=double)):
        assert_same(
            found, torch.load(whole.parent / f"end-{rank}.pt", weights_only=False), f"rank {rank}"
        )
    return manifest


def assert_resumes_as_from(
    own: Path, script: Script, place: Path, gasp: Path, *, double: bool = False
) -> None:
    """It ends as a run from the framework's own checkpoint of that step does, bit for bit.

    That one need not end as a run without any restart: DDP lays gradients out anew, in the order in
    which they came, behind a job's first step, and with three ranks another place in a bucket may
    be another order of summing.
    """
    assert verify(gasp).step in (DIES - 1, DIES)
    yardstick = place / "own"
    (yardstick / "run").mkdir(parents=True)
    copy = shutil.copytree if own.is_dir() else shutil.copyfile
    copy(own, yardstick / "run" / own.name)
    (yardstick / "run" / "latest").write_text(own.name)
    found, expected = (
        dict(enumerate(ends(script, one, double=double))) for one in (place, yardstick)
    )
    assert_same(found, expected)
