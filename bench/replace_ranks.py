"""The training script of `bench.replace`: `-m bench.replace_ranks CONFIG` under `acpfs-run`, with
torch's interpreter.

CONFIG is JSON: `directory` (to save in), `events` (a file), `mib` (of state), `frozen` (MiB of
parameters that no step touches: the state is large and the step is short, as on an accelerator),
`snapshot` (whether one is written behind update 2), `hurt` (a directory: a rank that finds its
number there loses its memory). Each line of `events` says who was where when, on the clock of all;
that of `loaded` how many bytes this rank has read while it restored, and that of `digest` what all
of its state is, by two steps later.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "ACPFS_BENCH_BEGUN": str(time.monotonic()),
}

import bench.replace_imports  # noqa: F401, I001  # before torch: where what is missing comes from

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from acpfs.training import resilient
from acpfs.training.torch.device import DeviceMemoryError
from acpfs.training.torch.digest import digest_of

COPIES = 2
WIDTH = 2048
STATE_BYTES = 12
PARAMETER_BYTES = 4
TOLD_STEPS = 3
"""Of a parameter: itself and Adam's moments; the first steps of a generation are told one by
one.
"""
SNAPSHOT_STEP = 2
DIGEST_AFTER = 2
"""So many steps behind the start of an era its state is compared; where there is a snapshot, behind
that.
"""
DIGEST_DIGITS = 15
"""Of hexadecimal: a number as all others are."""


class Events:
    """A line each; whole, since one call writes it."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._rank = int(os.environ["RANK"])
        self._attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def tell(
        self, name: str, generation: int = -1, number: int = 0, at: float | None = None
    ) -> None:
        """Now, or at that time."""
        moment = time.monotonic() if at is None else at
        os.write(
            self._file,
            f"{name} {self._rank} {os.getpid()} {self._attempt} {generation} {number} "
            f"{moment}\n".encode(),
        )


class Model(torch.nn.Module):  # type: ignore[misc]  # torch is not there where types are checked
    """Layers that are trained, and others that are only part of the state."""

    def __init__(self, mib: float, frozen_mib: float) -> None:
        super().__init__()
        self.trained = torch.nn.Sequential(*layers(mib * (1 << 20) / STATE_BYTES))
        self.frozen = (
            torch.nn.ModuleList(layers(frozen_mib * (1 << 20) / PARAMETER_BYTES))
            if frozen_mib
            else torch.nn.ModuleList()
        )
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, values: Any) -> Any:
        return self.trained(values)


def layers(parameters: float) -> list[Any]:
    """Square ones with about so many parameters."""
    width = WIDTH if parameters >= WIDTH**2 else max(2, int(parameters**0.5))
    return [
        torch.nn.Linear(width, width, bias=False)
        for _ in range(max(1, round(parameters / width**2)))
    ]


def built(mib: float, frozen_mib: float) -> tuple[Any, Any]:
    """Model and optimizer with so much state, in two copies.

    Its values are set at once: what a restart would load over them anyway.
    """
    with torch.device("meta"):
        model = Model(mib, frozen_mib)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (COPIES, world // COPIES), mesh_dim_names=("replicate", "shard"))
    for layer in (*model.trained, *model.frozen):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.detach().to_local().fill_(1 / parameter.shape[-1])
    return model, torch.optim.Adam(model.trained.parameters(), lr=1e-4)


def step(model: Any, optimizer: Any) -> None:
    """One."""
    width = next(iter(model.parameters())).shape[-1]
    optimizer.zero_grad()
    model(torch.ones(1, width)).square().mean().backward()
    optimizer.step()


def digest(model: Any, optimizer: Any) -> int:
    """Of all that this rank has: parameters and moments, bit for bit."""
    values: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        values |= {
            name: parameter,
            **{f"{name} {key}": value for key, value in optimizer.state.get(parameter, {}).items()},
        }
    return int(digest_of(values)[:DIGEST_DIGITS], 16)


def read_bytes() -> int:
    """What this process has got by read(2) and its like so far, wherever it was."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


def lose_memory(model: Any, optimizer: Any) -> None:
    """As a device does: what was there may be anything, and it says so."""
    for parameter in model.parameters():
        for value in (parameter.detach(), *optimizer.state.get(parameter, {}).values()):
            (value.to_local() if hasattr(value, "to_local") else value).fill_(float("nan"))
    raise DeviceMemoryError("simulated: UCE ERROR")


def train(run: Any, config: dict[str, Any], events: Events) -> None:
    """Until it is killed, or `events` has a neighbour named `end`."""
    events.tell("entered", run.generation)
    try:
        dist.init_process_group("gloo")
        events.tell("grouped", run.generation)
        model, optimizer = built(config["mib"], config["frozen"])
        events.tell("built", run.generation)
        before = read_bytes()
        number = run.restore(model=model, optimizer=optimizer)
        events.tell("restored", run.generation, number)
        events.tell("loaded", run.generation, read_bytes() - before)
        hurt = Path(config["hurt"]) / os.environ["RANK"]
        end = torch.zeros(1)
        told = 0
        while not end.item():
            number = number + 1
            begun = time.monotonic()
            if hurt.exists():
                hurt.unlink()
                events.tell("hurt", run.generation, number)
                lose_memory(model, optimizer)
            step(model, optimizer)
            told += 1
            if (number - SNAPSHOT_STEP if config["snapshot"] else told) == DIGEST_AFTER:
                events.tell("digest", run.generation, digest(model, optimizer))
            if told <= TOLD_STEPS:
                events.tell("step", run.generation, number)
                events.tell("begun-step", run.generation, number, begun)
            if config["snapshot"] and number == SNAPSHOT_STEP:
                run.snapshot()
                events.tell("saved", run.generation, number)
            end.fill_(
                float(dist.get_rank() == 0 and Path(config["events"]).with_name("end").exists())
            )
            dist.broadcast(end, 0)
        sent(events, config["mib"] + config["frozen"])
    finally:
        events.tell("left", run.generation)


def sent(events: Events, mib: float) -> None:
    """What a lost rank needs is sent once more, by itself: half of the state, from the rank with
    the other copy.
    """
    data = torch.zeros(max(1, int(mib * (1 << 20) / 2)), dtype=torch.uint8)
    for _ in range(3):
        dist.barrier()
        begun = time.monotonic()
        if dist.get_rank() in (0, 2):
            (dist.send if dist.get_rank() == 0 else dist.recv)(data, 2 - dist.get_rank())
        dist.barrier()
        events.tell("transfer", number=int(1e6 * (time.monotonic() - begun)))


def main(config: dict[str, Any]) -> None:
    """Entry point."""
    events = Events(config["events"])
    events.tell("begun", at=float(os.environ["ACPFS_BENCH_BEGUN"]))
    events.tell("imported")
    resilient(config["directory"])(train)(config, events)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
