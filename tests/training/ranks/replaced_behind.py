"""Ranks that are replaced in a job on the double of a device that runs behind its host, or over
gloo.

Each rank's tensors at the end are compared, bit for bit, with those of a job without a fault; the
double sums elements in the order of ranks, so buckets that are laid out anew change nothing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from acpfs.training import resilient
from tests.training.ranks.asynchronous import DeviceMemory
from tests.training.ranks.behind import (
    BUDDY_EVERY,
    EARLY,
    LAYOUTS,
    Behind,
    Fails,
    Moment,
    OnDouble,
    Place,
    put_wrong,
)
from tests.training.ranks.forked import Ranks
from tests.training.ranks.gasps import STEPS, WORLD
from tests.training.ranks.jobs import assert_same
from tests.training.ranks.replaced import Replaced


def end_of(job: Behind) -> dict[str, Any]:
    """What this rank has."""
    job.place.wait()

    def own(value: Any) -> Any:
        return value.to_local() if hasattr(value, "to_local") else value

    names = {value: name for name, value in job.model.named_parameters()}
    return {
        "model": {name: own(value.detach()) for value, name in names.items()},
        "moments": {
            names[value]: {key: own(found) for key, found in state.items()}
            for optimizer in job.optimizers
            for value, state in getattr(optimizer, "optim", optimizer).state.items()
        },
        "random": torch.get_rng_state(),
        "scheduler": job.scheduler.state_dict(),
        "scaler": None if job.scaler is None else job.scaler.state_dict(),
    }


def train(run: Any, fault: Moment, place: Place, directory: Path, process: int) -> None:
    """As a script is."""
    number = 0
    if isinstance(place, OnDouble):
        place.stream.slow_s = 0.0

    happened = directory / "happened"

    def at(point: str) -> None:
        if not process and not happened.exists():
            if fault.comes_at(run.rank, point, number):
                happened.touch()
            fault.reached(run.rank, point, number)

    def at_work(point: str, number: int, job: Behind) -> None:
        if not process and not (run.generation and happened.exists()):
            fault.at_work(run.rank, point, number, job)

    run.at = at
    dist.init_process_group(place.backend)
    job = LAYOUTS[fault.kind](place)
    job.at_work = at_work
    job.operation = run.long_operation
    if isinstance(fault, Fails):
        job.memory = DeviceMemory(job.model)
    if fault.gate:
        job.model.register_forward_hook(lambda *_: EARLY.append(place.record()))
    step = run.restore(
        model=job.model,
        optimizer=job.optimizers,
        scheduler=job.scheduler,
        scaler=job.scaler,
        after_update=job.after_update,
    )
    for number in range(step + 1, STEPS + 1):
        job.step(number, at)
    torch.save(end_of(job), directory / f"end-{run.rank}.pt")


def begun(
    rank: int, process: int, fault: Moment, directory: Path, place: Place, **settings: Any
) -> None:
    """A process of a rank. `settings`: of `resilient`."""
    place.enter(directory)
    if fault.gate:
        put_wrong(fault.gate)
        settings["interrupt_after_s"] = 2.0  # else it comes before the wrong gate is passed
    if fault.kind == "fsdp":
        settings["buddy_every"] = BUDDY_EVERY
    resilient(directory / "run", **settings)(train)(fault, place, directory, process)


def without_fault(rank: int, kind: str, directory: Path, place: Place) -> None:
    place.join(rank, directory)
    job = LAYOUTS[kind](place)
    for number in range(1, STEPS + 1):
        job.step(number)
    torch.save(end_of(job), directory / f"end-{rank}.pt")


def yardstick(kind: str, directory: Path, place: Place) -> Path:
    """Where it is; made once."""
    found = directory / f"end-{place.name.replace(' ', '-')}-{kind}"
    if not found.exists():
        found.mkdir()
        with Ranks(WORLD, found, lambda rank: without_fault(rank, kind, found, place)) as ranks:
            assert ranks.statuses(600) == [0] * WORLD, ranks.said()
    return found


def verdict(
    fault: Moment, directory: Path, yardsticks: Path, place: Place | None = None, **settings: Any
) -> str:
    """How a job with this fault ends: "right", "too late" where nothing happened to it, or what is
    wrong.
    """
    place = place or OnDouble()
    expected = yardstick(fault.kind, yardsticks, place)
    main = partial(begun, fault=fault, directory=directory, place=place, **settings)
    ranks = Replaced(WORLD, directory, main)
    with ranks:
        counts = ranks.tend()
    try:
        for rank in range(WORLD):
            found, right = (
                torch.load(where / f"end-{rank}.pt", weights_only=True)
                for where in (directory, expected)
            )
            assert_same(found, right, f"rank {rank}")
    except AssertionError as error:
        return f"corrupted, {fault}, processes {counts}: {str(error)[:2000]}"
    return "right" if any(count > 1 for count in counts.values()) else "too late"
