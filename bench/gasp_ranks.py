"""One job of four torch ranks whose last one is killed: who was where when.

Started by `bench.gasp` with torch's interpreter.

    TORCH_PYTHON -m bench.gasp_ranks LIBRARIES CONFIG

CONFIG is JSON: `directory` (to save in), `scratch`, `kind` (hsdp, ddp), `mib` (of state), `steps`;
with `plain` a plain save to that directory is timed, too. Without `kill` all steps are timed,
protected and not, and nobody dies. The result is JSON on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(sys.argv[1])  # behind its own: only what is missing there comes from here
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from acpfs.training import protect
from tests.training.ranks.forked import Ranks, join_group

WORLD = 4
DIES = 3
WIDTH = 2048
STATE_BYTES = 12
"""Of a parameter: itself and Adam's moments."""


def made(kind: str, mib: float) -> tuple[Any, Any]:
    """Model and optimizer with so much state."""
    torch.manual_seed(7)
    parameters = mib * (1 << 20) / STATE_BYTES
    layers = max(1, round(parameters / WIDTH**2))
    width = WIDTH if parameters >= WIDTH**2 else max(2, int(parameters**0.5))
    model: Any = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
    )
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard")),
        )
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: Any, optimizer: Any) -> None:
    """One."""
    width = next(iter(model.parameters())).shape[-1]
    optimizer.zero_grad()
    model(torch.ones(1, width)).square().mean().backward()
    optimizer.step()


def dying(rank: int, config: dict[str, Any], scratch: Path) -> None:
    """A rank of a job in which the last one dies in update 3."""
    join_group(rank, WORLD, scratch / "store")
    model, optimizer = made(config["kind"], config["mib"])
    number = 0
    file = (scratch / f"points-{rank}").open("w", buffering=1, encoding="ascii")

    def at(point: str) -> None:
        file.write(f"{point} {time.monotonic()}\n")
        if rank == WORLD - 1 and point == "gated" and number == DIES:
            os.kill(os.getpid(), signal.SIGKILL)

    protection = protect(config["directory"], model=model, optimizer=optimizer)
    with protection:
        protection.at(at)
        for number in range(1, DIES + 2):  # `at` looks at it
            step(model, optimizer)
            if number == DIES - 1 and "plain" in config:
                dist.barrier()
                begun = time.monotonic()
                found, states = get_state_dict(model, optimizer)
                checkpoint.save({"model": found, "optim": states}, checkpoint_id=config["plain"])
                dist.barrier()
                file.write(f"plain {time.monotonic() - begun}\n")


def timed(rank: int, config: dict[str, Any], scratch: Path) -> None:
    """Steps without protection, with it, and what its thread costs while nothing happens."""
    join_group(rank, WORLD, scratch / "store")
    model, optimizer = made(config["kind"], config["mib"])
    found: dict[str, Any] = {}

    def steps(name: str) -> None:
        for warm in (True, False):
            times = []
            for _ in range(config["steps"]):
                begun = time.perf_counter()
                before = time.thread_time()
                step(model, optimizer)
                times.append((time.perf_counter() - begun, time.thread_time() - before))
            found[name] = found.get(name, []) + ([] if warm else times)

    def idle() -> float:
        dist.barrier()
        begun = time.monotonic()
        before = time.process_time()
        time.sleep(config["idle_s"])
        return (time.process_time() - before) / (time.monotonic() - begun)

    steps("without")
    alone = idle()
    with protect(config["directory"], model=model, optimizer=optimizer):
        steps("with")
        found["idle"] = max(0.0, idle() - alone)
        dist.barrier()
    medians = {
        name: statistics.median(wall for wall, _ in found[name]) for name in ("without", "with")
    }
    medians |= {
        f"{name} cpu": statistics.median(cpu for _, cpu in found[name])
        for name in ("without", "with")
    }
    (scratch / f"steps-{rank}").write_text(
        json.dumps({**medians, "idle": found["idle"]}), encoding="ascii"
    )


def points(scratch: Path) -> dict[str, Any]:
    """When who was where, since the kill."""
    told = {
        rank: [
            (point, float(at))
            for point, at in (
                line.split() for line in (scratch / f"points-{rank}").read_text().splitlines()
            )
        ]
        for rank in range(WORLD)
    }
    killed = told[WORLD - 1][-1][1]
    survivors = [told[rank] for rank in range(WORLD - 1)]

    def last(point: str) -> float:
        return max(at for rank in survivors for name, at in rank if name == point) - killed

    found = {name: last(name) for name in ("stopping", "saving", "published")}
    found["updated"] = max(
        0.0, last("updated")
    )  # before the kill: who is not through the gate parks without that update
    return {**found, "plain": [at for name, at in told[0] if name == "plain"]}


def main(config: dict[str, Any]) -> dict[str, Any]:
    """Run it."""
    scratch = Path(config["scratch"])
    run = dying if config["kill"] else timed
    with Ranks(WORLD, scratch, lambda rank: run(rank, config, scratch)) as ranks:
        statuses = ranks.statuses(300)
        if not config["kill"]:
            assert statuses == [0] * WORLD, ranks.said()
            steps = [json.loads((scratch / f"steps-{rank}").read_text()) for rank in range(WORLD)]
            return {name: statistics.median(one[name] for one in steps) for name in steps[0]}
        logs = sorted(Path(config["directory"]).rglob("coordinator-*.log"))
        told = "\n".join(path.read_text(errors="replace")[-6000:] for path in logs)
        assert statuses[:-1] == [75] * (WORLD - 1), f"{statuses}\n{ranks.said()}\n{told}"
    gasp = Path(config["directory"]) / (Path(config["directory"]) / "latest").read_text().strip()
    size = sum(path.stat().st_size for path in gasp.rglob("*") if path.is_file())
    return {**points(scratch), "bytes": size, "lost": DIES - int(gasp.name.removeprefix("step-"))}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[2]))) + "\n")
