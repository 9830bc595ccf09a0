"""One job of four torch ranks, fully sharded, under `resilient`: what does a step take?

Started by `bench.buddy` with torch's interpreter.

    TORCH_PYTHON -m bench.buddy_ranks LIBRARIES CONFIG

CONFIG is JSON: `scratch` (an empty directory), `mib` (of state, of all ranks together), `batch`,
`steps`, `every` (updates from one copy to the next; 0: none). The result is JSON on stdout: mean
milliseconds of a step of rank 0, by the clock and of the processor (all its threads).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(sys.argv[1])  # behind its own: only what is missing there comes from here
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from acpfs.training import resilient
from tests.rig.ports import free_port
from tests.training.ranks.replaced import Replaced

WORLD = 4
WIDTH = 1024
STATE_BYTES = 12
"""Of a parameter: itself and Adam's moments."""
WARM_STEPS = 3


def train(run: Any, config: dict[str, Any]) -> None:
    """As a script is."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    layers = max(1, round(config["mib"] * (1 << 20) / STATE_BYTES / WIDTH**2))
    model: Any = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    first = run.restore(model=model, optimizer=optimizer)
    begun = 0.0
    used = 0.0
    for number in range(first, WARM_STEPS + config["steps"]):
        if number == WARM_STEPS:
            begun = time.perf_counter()
            used = time.process_time()
        optimizer.zero_grad()
        model(torch.randn(config["batch"], WIDTH)).square().mean().backward()
        optimizer.step()
    if run.rank == 0:
        found = {
            "wall": 1000 * (time.perf_counter() - begun) / config["steps"],
            "processor": 1000 * (time.process_time() - used) / config["steps"],
        }
        (Path(config["scratch"]) / "steps").write_text(json.dumps(found), encoding="ascii")


def main() -> None:
    config = json.loads(sys.argv[2])
    scratch = Path(config["scratch"])
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(_rank: int, _process: int) -> None:
        resilient(scratch / "run", buddy_every=config["every"])(train)(config)

    with Replaced(WORLD, scratch, rank, lambda _: environment) as ranks:
        assert isinstance(ranks, Replaced)
        ranks.tend()
    print((scratch / "steps").read_text(encoding="ascii"))


main()
