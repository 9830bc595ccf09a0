"""One rank of a training job with real frameworks, on a node of its own, and what is true of its
checkpoints; a program for torch's Python.

Usage: python -m tests.cluster.torch_rank WORKLOAD RANK NODES MOUNTPOINT KEEP. Reads `enter PORT`
and `save N` line by line, answers each with a line: "" when it went well. A rank that fails leaves
the process group, whose others fail by that. `dcp` is stock torch.distributed.checkpoint with
FileSystemWriter over gloo; `megatron` is torch.save into `iter_%07d/mp_rank_XX/model_optim_rng.pt`.
After both rank 0 overwrites the tracker in place, as Megatron does. Needs no acpfs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.cluster.training import TRACKER

NUMBERS = (1 << 8, 1 << 15)
"""In a rank's tensor: 1 to 128 KiB."""
GLOO_TIMEOUT_S = 240.0


def state(iteration: int, rank: int) -> dict[str, torch.Tensor]:
    """What a rank holds: a tensor of its own, and one that all have."""
    size = random.Random(iteration * 1000 + rank).randrange(*NUMBERS)
    own = torch.randn(size, generator=torch.Generator().manual_seed(iteration * 1000 + rank))
    return {f"rank{rank}.w": own, "step": torch.tensor([iteration])}


def name_of(iteration: int) -> str:
    """Directory of a checkpoint."""
    return f"iter_{iteration:07d}"


def megatron_file(directory: Path, rank: int) -> Path:
    """A rank's file in Megatron's classic layout."""
    return directory / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"


# -- saving


def save_dcp(iteration: int, rank: int) -> None:
    """Collective: fails on all ranks where one fails; the files are fsynced by the writer, and rank
    0 writes .metadata.
    """
    dcp.save(state(iteration, rank), storage_writer=dcp.FileSystemWriter(name_of(iteration)))


def save_megatron(iteration: int, rank: int) -> None:
    """This rank's part alone."""
    path = megatron_file(Path(name_of(iteration)), rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"iteration": iteration, "checkpoint_version": 3.0, "model": state(iteration, rank)}, path
    )


SAVES = {"dcp": save_dcp, "megatron": save_megatron}


def delete_pointer(workload: str, iteration: int) -> None:
    """Of an old checkpoint; one that was given up has none."""
    if workload == "dcp":
        (Path(name_of(iteration)) / ".metadata").unlink(missing_ok=True)


def delete_own(workload: str, iteration: int, rank: int) -> None:
    """This rank's part of an old checkpoint."""
    directory = Path(name_of(iteration))
    for path in (
        [megatron_file(directory, rank)]
        if workload == "megatron"
        else directory.glob(f"__{rank}_*")
    ):
        path.unlink(missing_ok=True)


def write_tracker(iteration: int) -> None:
    """In place, without temporary file or fsync."""
    with open(TRACKER, "w", encoding="ascii") as tracker:
        tracker.write(str(iteration))


class Rank:
    """What it is told, it does."""

    def __init__(self, workload: str, rank: int, nodes: int, mountpoint: Path, keep: int) -> None:
        self._workload = workload
        self._rank = rank
        self._nodes = nodes
        self._mountpoint = mountpoint
        self._keep = keep
        self._port = 0

    def enter(self, port: int) -> None:
        """Work in what is mounted now: when it is gone, not in what lies beneath.

        Another port is another process group.
        """
        os.chdir(self._mountpoint)
        if port != self._port:
            self.leave()
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group(
                "gloo",
                rank=self._rank,
                world_size=self._nodes,
                timeout=timedelta(seconds=GLOO_TIMEOUT_S),
            )
            self._port = port

    def leave(self) -> None:
        """The process group; who waits for this rank there fails at once."""
        self._port = 0
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # it is broken already
                dist.destroy_process_group()

    def save(self, iteration: int) -> None:
        """All ranks, then the tracker, then what is old; nobody takes the next step before all have
        done this one.
        """
        workload = self._workload
        rank = self._rank
        old = iteration - self._keep
        SAVES[workload](iteration, rank)
        dist.barrier()
        if rank == 0:
            write_tracker(iteration)
            if self._keep and old > 0:
                delete_pointer(workload, old)
        dist.barrier()
        if self._keep and old > 0:
            delete_own(workload, old, rank)


def serve(rank: Rank) -> None:
    """Until the end of standard input."""
    print(flush=True)  # ready
    for line in sys.stdin:
        verb, _, number = line.strip().partition(" ")
        try:
            (rank.enter if verb == "enter" else rank.save)(int(number))
            said = ""
        except Exception as error:  # noqa: BLE001
            # whatever a framework makes of a mount that is gone; the job goes on with the next save
            said = f"{type(error).__name__}: {error}".replace("\n", " ")
            rank.leave()
        print(said, flush=True)


# -- looking


def reason(said: str) -> str:
    """Of what torch says: the end of its stack."""
    return (said.strip().splitlines() or [""])[-1].strip()[:400]


def wrong_with_dcp(nodes: int, backing: Path, pointed: str) -> str:
    """Loaded as a restarted job would, by the stock reader, and compared."""
    expected = {
        name: tensor
        for rank in range(nodes)
        for name, tensor in state(int(pointed[5:]), rank).items()
    }
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    try:
        dcp.load(target, storage_reader=dcp.FileSystemReader(backing / pointed), no_dist=True)
    except dcp.CheckpointException as error:
        for failure, _stack in error.failures.values():
            if isinstance(failure, OSError) and not isinstance(failure, FileNotFoundError):
                raise failure from error
        return f"{pointed}: {reason(str(error))}"
    return next(
        (
            f"{pointed}: {name} is wrong"
            for name, tensor in expected.items()
            if not torch.equal(target[name], tensor)
        ),
        "",
    )


def wrong_with_megatron(nodes: int, backing: Path, pointed: str) -> str:
    """All ranks' files, loaded and compared."""
    for rank in range(nodes):
        try:
            content = megatron_file(backing / pointed, rank).read_bytes()
        except FileNotFoundError:
            return f"{pointed}: rank {rank} is missing"
        try:
            loaded = torch.load(io.BytesIO(content))["model"]
        except Exception as error:  # noqa: BLE001 - torch has many for a file that is torn
            return (
                f"{pointed}: rank {rank} cannot be loaded ({len(content)} bytes): "
                f"{reason(str(error))}"
            )
        if not all(
            torch.equal(loaded[name], tensor)
            for name, tensor in state(int(pointed[5:]), rank).items()
        ):
            return f"{pointed}: rank {rank} is wrong"
    return ""


def check_of(workload: str, nodes: int) -> Callable[[Path, str], str]:
    """What is wrong with a checkpoint; "" when nothing is.

    Raises (what is returned):
        OSError: it could not be read.
    """
    return functools.partial(
        {"dcp": wrong_with_dcp, "megatron": wrong_with_megatron}[workload], nodes
    )


if __name__ == "__main__":
    what, number, count, mounted, kept = sys.argv[1:]
    serve(Rank(what, int(number), int(count), Path(mounted), int(kept)))
