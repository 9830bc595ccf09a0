"""Four ranks on one accelerator, or on the double of one: killed at any moment, and what they leave
compared bit for bit; then without the gate, which has to corrupt something; then the gate's cost.

    python -m tests.training.ranks.accelerator --double --kills 20 --seconds 240 [--libraries DIR]

Prints one line of JSON for each case: `what`, `holds` and `seen`. `tools/train-accelerator-check`
runs it, in a process of its own, which has not touched the device: ranks are forked from it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NAIVE_KILLS = 10
COST_STEPS = 20
STEP_S = 0.1
COST_MAX = 0.01
"""Of a step of 100 ms."""


def told(what: str, *, holds: bool, seen: str) -> bool:
    print(json.dumps({"what": what, "holds": holds, "seen": seen}), flush=True)
    return holds


def cases(double: bool, kills: int, until_s: float, seed: int, directory: Path) -> Iterator[bool]:
    """Each as it ends: whether it was as it has to be."""
    # what is needed may come from `--libraries`
    from tests.training.ranks.behind import OnDouble, OnOneGpu, Place, drawn, verdict

    place: Place = OnDouble() if double else OnOneGpu()
    chance = random.Random(seed)
    numbers = iter(range(1_000_000))

    def one(kind: str, gate: str = "") -> tuple[str, float]:
        where = directory / str(next(numbers))
        where.mkdir()
        began = time.monotonic()
        return verdict(drawn(kind, chance, gate), where, directory, place), (
            time.monotonic() - began
        )

    for kind in ("ddp", "hsdp"):
        found: list[tuple[str, float]] = []
        while len(found) < kills // 2 and time.monotonic() < until_s:
            found.append(one(kind))
        wrong = [text for text, _ in found if text not in ("right", "too late")]
        right = sum(text == "right" for text, _ in found)
        seen = (
            f"{right} of {len(found)} jobs left their last step bit for bit, "
            f"{len(found) - right - len(wrong)} had ended before the kill; a job took "
            f"{statistics.median([took for _, took in found] or [0.0]):.1f} s"
        )
        yield told(
            f"{kind} on {place.name}: a rank is killed at any moment, seed {seed}",
            holds=not wrong and right > 0,
            seen=seen + "".join(f"; {text[:300]}" for text in wrong[:2]),
        )
    for number in range(NAIVE_KILLS):
        text, _ = one("ddp", "none")
        if text.startswith("corrupted"):
            yield told(
                "without the gate something is corrupted", holds=True, seen=f"by kill {number + 1}"
            )
            return
    yield told(
        "without the gate something is corrupted", holds=False, seen=f"not by {NAIVE_KILLS} kills"
    )


def cost(double: bool) -> bool:
    """How much later than the device the gate lets the host go on."""
    from acpfs.training.marks import Marks
    from acpfs.training.torch.device import device_named
    from acpfs.training.torch.progress import Progress

    late = []
    if double:
        import threading

        from tests.training.ranks.asynchronous import Double, Stream

        stream = Stream()
        progress = Progress(Double(stream), Marks())
        for step in range(COST_STEPS):
            done: list[float] = []

            def work(done: list[float] = done) -> None:
                threading.Event().wait(STEP_S)
                done.append(time.perf_counter())

            stream.launch(work)
            progress.gradients(step)
            late.append(time.perf_counter() - done[0])
    else:
        import torch

        progress = Progress(device_named("cuda"), Marks())
        value = torch.randn(4096, 4096, device="cuda")

        def launch() -> None:
            for _ in range(40):
                torch.mm(value, value)

        for step in range(COST_STEPS):
            taken = []
            for gate in (False, True):
                torch.cuda.synchronize()
                began = time.perf_counter()
                launch()
                if gate:
                    progress.gradients(step)
                else:
                    torch.cuda.synchronize()
                taken.append(time.perf_counter() - began)
            late.append(taken[1] - taken[0])
    found = statistics.median(late)
    return told(
        "the gate costs at most 1 % of a step of 100 ms",
        holds=found <= COST_MAX * STEP_S,
        seen=f"the host goes on {1e3 * found:.2f} ms behind the device, median of {len(late)}",
    )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--libraries", help="where what acpfs depends on is, if not here")
    given = parser.parse_args()
    if given.libraries:
        sys.path.append(given.libraries)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # the question whether there is a device must not touch it: ranks are forked from here
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    until_s = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(prefix="acpfs-accelerator-") as directory:
        found = list(cases(given.double, given.kills, until_s, given.seed, Path(directory)))
    found.append(cost(given.double))
    return int(not all(found))


if __name__ == "__main__":
    raise SystemExit(main())
