"""Two ranks on the double of a device that runs behind its host, with the gate and without it.

Started by `bench.gate` with torch's interpreter.

    TORCH_PYTHON -m bench.gate_ranks LIBRARIES CONFIG SCRATCH

CONFIG is JSON: `rounds`, `steps`, `step_ms`. The result is JSON on stdout: milliseconds of a step
by kind, one for each round, of the rank that was slower.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(sys.argv[1])  # behind its own: only what is missing there comes from here
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
import torch.distributed as dist

from acpfs.training.marks import Marks
from acpfs.training.torch.gate import ExplicitGate, Gate, NoGate
from acpfs.training.torch.hooks import UpdateCalls, UpdateHooks
from acpfs.training.torch.progress import Progress
from tests.training.ranks.asynchronous import AsynchronousAdam, Double, Stream, Waiting
from tests.training.ranks.forked import Ranks, join_group

WORLD = 2
PIECES = 20
"""A step's work is launched in so many."""
KINDS = ("none", "event", "reduced")


class Loop:
    """One parameter; a device that takes its time for the gradients, and an update behind them."""

    def __init__(self, kind: str, stream: Stream, step_s: float) -> None:
        self._stream = stream
        self._piece_s = step_s / PIECES
        parameter: Any = torch.nn.Parameter(torch.zeros(1000))
        parameter.grad = torch.ones(1000)
        self._optimizer = AsynchronousAdam([parameter], stream, lr=0.01)
        if kind == "none":
            return
        marks = Marks()
        gate: Gate = ExplicitGate(dist.new_group()) if kind == "reduced" else NoGate()
        calls = UpdateCalls(lambda _: None)
        progress = Progress(Double(stream), marks)
        UpdateHooks([self._optimizer], marks, gate, calls, progress=progress).install()

    def _works(self) -> None:
        threading.Event().wait(self._piece_s)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(PIECES):
                self._stream.launch(self._works)
            self._optimizer.step()
        self._stream.synchronize()


def train(rank: int, config: dict[str, Any], scratch: Path) -> None:
    join_group(rank, WORLD, scratch / "store")
    Waiting.spins = False  # two devices and two hosts share the processors
    stream = Stream()
    loops = {kind: Loop(kind, stream, config["step_ms"] / 1000) for kind in KINDS}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(config["rounds"] + 1):
        for kind, loop in loops.items():
            dist.barrier()
            begun = time.perf_counter()
            loop.run(config["steps"])
            took = torch.tensor(1000 * (time.perf_counter() - begun) / config["steps"])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number:  # the first one warms up
                found[kind].append(float(took))
    if rank == 0:
        (scratch / "found").write_text(json.dumps(found))


def main() -> None:
    config = json.loads(sys.argv[2])
    scratch = Path(sys.argv[3])
    with Ranks(WORLD, scratch, lambda rank: train(rank, config, scratch)) as ranks:
        assert ranks.statuses() == [0] * WORLD, ranks.said()
    print((scratch / "found").read_text())


main()
