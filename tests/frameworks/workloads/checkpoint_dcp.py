"""torch.distributed.checkpoint with gloo on two processes.

Usage: checkpoint_dcp.py DIRECTORY (save|async|load)...

Each case has processes of its own.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

RANKS = 2


def state(rank: int) -> dict[str, torch.Tensor]:
    """What one rank holds: 24 MiB of its own and some that all have."""
    generator = torch.Generator().manual_seed(rank)
    own = {f"rank{rank}.w{n}": torch.randn(1024, 1024, generator=generator) for n in range(6)}
    return own | {"shared": torch.arange(1000)}


def save(rank: int, directory: str) -> None:
    """Synchronous save; every file is fsynced by the writer."""
    dcp.save(state(rank), checkpoint_id=directory)


def save_async(rank: int, directory: str) -> None:
    """Asynchronous save, then wait for it."""
    dcp.async_save(state(rank), checkpoint_id=directory).result()


def load(rank: int, directory: str) -> None:
    """Load what was saved into zeros, each rank also what the other one wrote."""
    expected = state(0) | state(1)
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(target, checkpoint_id=directory)
    for name, value in expected.items():
        assert torch.equal(target[name], value), name


WORK = {"save": save, "async": save_async, "load": load}


def run(rank: int, case: str, directory: str, meeting: str) -> None:
    """One rank."""
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}/ranks", rank=rank, world_size=RANKS
    )
    try:
        WORK[case](rank, directory)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    for case in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as meeting:
            words = (case, str(Path(sys.argv[1]) / "step-1"), meeting)
            mp.start_processes(
                run, words, nprocs=RANKS, start_method="fork"
            )  # `spawn` would have each rank load torch anew
