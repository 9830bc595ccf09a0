"""One rank of a training job that saves and loads with plain torch: what tools/quickstart and
bench.peers measure.

Usage: python -m bench.rank RANK RANKS RENDEZVOUS BYTES. Takes one order per line as JSON, answers
each with a line of JSON; times are of `time.monotonic`, which all processes of a machine share.
Rank 0 holds BYTES for torch.save; for torch.distributed.checkpoint every rank holds its part of
them. Every checkpoint differs: the number of the step stands in each tensor. Needs no acpfs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench.layout import MODEL, POINTER

TENSORS = 16
STEP_MARKS = 1024


class Rank:
    """What it is told, it does."""

    def __init__(self, rank: int, ranks: int, size: int) -> None:
        self._rank = rank
        self._size = size
        generator = torch.Generator().manual_seed(1)
        self._tensors = {
            f"layer.{n}": torch.rand(size // TENSORS // 4, generator=generator)
            for n in range(TENSORS)
        }
        mine = list(self._tensors)[rank::ranks]
        self._shard = {f"rank{rank}.{name}": self._tensors[name] for name in mine}

    def _at(self, step: int, size: int = 0) -> dict[str, torch.Tensor]:
        """The state at a step; with `size`, only so many bytes of it."""
        count = min(TENSORS, max(1, round(size * TENSORS / self._size))) if size else TENSORS
        names = [f"layer.{n}" for n in range(count)]
        for name in names:
            self._tensors[name][:STEP_MARKS] = float(step)
        return {name: self._tensors[name] for name in names}

    # -- orders

    def save(self, path: str, step: int, size: int = 0, fsync: bool = False) -> dict[str, Any]:
        """torch.save into a directory of the step, then the pointer in place, as DeepSpeed and
        Megatron do.
        """
        state = self._at(step, size)
        directory = Path(path, f"step-{step}")
        begun = time.monotonic()
        directory.mkdir()
        with open(directory / MODEL, "wb") as file:
            torch.save(state, file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        with open(Path(path, POINTER), "w", encoding="ascii") as pointer:
            pointer.write(f"step-{step}")
            if fsync:
                pointer.flush()
                os.fsync(pointer.fileno())
        return {"begun": begun, "ended": time.monotonic()}

    def series(
        self, paths: list[str], first: int, size: int, every_s: float, until: float
    ) -> dict[str, Any]:
        """Saves into each path, again and again, until a time or an error; what each took."""
        saves: list[dict[str, Any]] = []
        error = ""
        step = first
        try:
            while time.monotonic() < until:
                begun = time.monotonic()
                for path in paths:
                    saves.append({"path": path, "begun": time.monotonic(), "ended": 0.0})
                    saves[-1] |= self.save(path, step, size)
                step += 1
                time.sleep(max(0.0, min(until, begun + every_s) - time.monotonic()))
        except (OSError, RuntimeError) as failure:
            error = _line(failure)
            saves[-1]["ended"] = time.monotonic()
        return {"saves": saves, "error": error}

    def dcp(self, path: str, step: int) -> dict[str, Any]:
        """Stock torch.distributed.checkpoint; its writer calls fsync."""
        self._at(step)
        dist.barrier()
        begun = time.monotonic()
        dcp.save(dict(self._shard), storage_writer=dcp.FileSystemWriter(Path(path, f"step-{step}")))
        return {"begun": begun, "ended": time.monotonic()}

    def dcp_async(self, path: str, step: int) -> dict[str, Any]:
        """How long training stands still, and when the rest was done."""
        self._at(step)
        dist.barrier()
        begun = time.monotonic()
        future = dcp.async_save(
            dict(self._shard), storage_writer=dcp.FileSystemWriter(Path(path, f"step-{step}"))
        )
        ended = time.monotonic()
        future.result()
        return {"begun": begun, "ended": ended, "durable": time.monotonic()}

    def load(self, path: str, step: int, size: int = 0) -> dict[str, Any]:
        """torch.load, and whether every bit is as it was saved."""
        begun = time.monotonic()
        try:
            found = torch.load(Path(path, f"step-{step}", MODEL))
        except Exception as error:  # noqa: BLE001 — half a file can raise anything
            return {
                "begun": begun,
                "ended": time.monotonic(),
                "equal": False,
                "error": _line(error),
            }
        ended = time.monotonic()
        wanted = self._at(step, size)
        equal = found.keys() == wanted.keys() and all(
            torch.equal(found[name], wanted[name]) for name in wanted
        )
        return {"begun": begun, "ended": ended, "equal": equal, "error": ""}

    def forget(self, path: str, keep: int) -> dict[str, Any]:
        """Delete all checkpoints but those of the last steps, as jobs do."""
        found = sorted(
            Path(path).glob("step-*"), key=lambda entry: int(entry.name.partition("-")[2])
        )
        for directory in found[: len(found) - keep]:
            shutil.rmtree(directory)
        return {}


def _line(error: Exception) -> str:
    """One line; some exceptions have no words (EOFError of an empty file)."""
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


def main(rank: int, ranks: int, rendezvous: str, size: int) -> None:
    """Answer orders until stdin ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    with contextlib.suppress(KeyboardInterrupt):
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
        )
        worker = Rank(rank, ranks, size)
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            words = json.loads(line)
            try:
                answer = getattr(worker, words.pop("do"))(**words)
            except Exception as error:  # noqa: BLE001 — the one who asked decides what it means
                answer = {"failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # gloo's threads would wait for a rank that was killed


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
