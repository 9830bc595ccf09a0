"""Megatron's classic layout, written the way its checkpointing.py does.

Usage: megatron_layout.py DIRECTORY.

Each of four ranks (threads here) saves `iter_%07d/mp_rank_XX/model_optim_rng.pt`; after all of them
the tracker `latest_checkpointed_iteration.txt` is overwritten in place, without temporary file or
fsync.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

TRACKER = "latest_checkpointed_iteration.txt"
RANKS = 4


def state(iteration: int, rank: int) -> dict[str, object]:
    """12 MiB a rank."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    model = {f"layers.{n}.weight": torch.randn(1024, 1024, generator=generator) for n in range(3)}
    return {"iteration": iteration, "checkpoint_version": 3.0, "model": model}


def checkpoint(directory: Path, iteration: int, rank: int) -> Path:
    """Where a rank's file lies."""
    return directory / f"iter_{iteration:07d}" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"


def save(directory: Path, iteration: int) -> None:
    """All ranks, then the tracker."""

    def one(rank: int) -> None:
        path = checkpoint(directory, iteration, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state(iteration, rank), path)

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(one, range(RANKS)))
    with (directory / TRACKER).open("w") as tracker:
        tracker.write(str(iteration))


def load(directory: Path) -> int:
    """What the tracker points at, complete on every rank."""
    iteration = int((directory / TRACKER).read_text())
    for rank in range(RANKS):
        loaded = torch.load(checkpoint(directory, iteration, rank))
        assert loaded["iteration"] == iteration
        assert all(
            torch.equal(loaded["model"][n], t)
            for n, t in state(iteration, rank)["model"].items()  # type: ignore[attr-defined]
        )
    return iteration


if __name__ == "__main__":
    where = Path(sys.argv[1])
    for number in (10, 20, 30):
        save(where, number)
    assert load(where) == 30
