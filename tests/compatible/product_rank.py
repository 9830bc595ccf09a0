"""A rank of a script of the product, without a framework: `python product_rank.py CONFIG`, with
PYTHONPATH as `acpfs mindio-path` has it.

CONFIG is JSON: rank, world, port, directory, and what happens. Ranks go in step by files, which
stand for collectives. What handlers are told goes to `told-RANK`, a line each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from mindio_ttp import framework_ttp as ttp

config: dict[str, Any] = json.loads(sys.argv[1])
rank = config["rank"]
world = config["world"]
directory = Path(config["directory"])
forced = threading.Event()


def tell(what: str, *values: object) -> None:
    with (directory / f"told-{rank}").open("a") as file:
        file.write(json.dumps([what, *values]) + "\n")


def meet(name: str) -> None:
    """A collective: all ranks come here. A device that was stopped gets the main thread out."""
    (directory / f"{name}-{rank}").touch()
    while not all((directory / f"{name}-{other}").exists() for other in range(world)):
        if forced.wait(0.02):
            raise RuntimeError("FORCE STOP of the device")


def die_at(point: str) -> None:
    (directory / f"{point}-{rank}").touch()
    if config.get("die") == [rank, point]:
        while not all(
            (directory / f"{point}-{other}").exists() for other in range(world)
        ):  # else a slow one would not be as far as this
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("fail") == [rank, point]:
        raise ValueError(f"a defect of rank {rank}")
    if config.get("memory") == [rank, point]:
        raise RuntimeError("UCE ERROR: device memory is lost")


def save_ckpt(step: int, info: list[dict[str, Any]], args: Any, ctx: Any) -> None:
    tell("save_ckpt", step, info, args, ctx)
    if config.get("cannot_save") == rank:
        raise OSError("no room")
    (directory / f"step_{step}_tmp").mkdir(exist_ok=True)
    (directory / f"step_{step}_tmp" / f"rank-{rank}").write_text(str(step))


def rename(step: int, given: Any) -> None:
    tell("rename", step, given)
    (directory / f"step_{step}_tmp").rename(directory / f"step_{step}")


def stop(args: Any, ctx: Any) -> None:
    tell("stop", args, ctx)
    forced.set()


def clean(is_uce_error: bool, args: Any, ctx: Any) -> int:
    tell("clean", is_uce_error, args, ctx)
    return int(config.get("clean", {}).get(str(rank), 0))


def leave(ctx: Any) -> None:
    tell("exit", ctx, ttp.tft_get_repair_type())
    os._exit(31)


def begin() -> None:
    if rank == 0:
        ttp.tft_init_controller(rank, world, False)
        ttp.tft_start_controller("127.0.0.1", config["port"], config["tls"])
    ttp.tft_init_processor(rank, world, False, config["tls"])
    ttp.tft_start_processor("127.0.0.1", config["port"])
    assert ttp.tft_is_reboot_node() is False
    ttp.tft_register_save_ckpt_handler(save_ckpt, "c1")
    ttp.tft_register_rename_handler(rename, "c2")
    ttp.tft_register_stop_handler(stop, "c3")
    ttp.tft_register_clean_handler(clean, "c4")
    if config["exit_handler"]:
        ttp.tft_register_exit_handler(leave, "c5")
    if config["framework"]:
        ttp.set_mindio_export_version(config["framework"])
    ttp.tft_set_step_args("arguments")
    ttp.tft_set_optimizer_replica(
        rank,
        [{"rank_list": list(range(world)), "replica_cnt": config["copies"], "replica_shift": 0}],
    )


@ttp.tft_exception_handler  # type: ignore[untyped-decorator]
def train(name: str) -> str:
    for step in range(1, 5):
        meet(f"gradients-{step}")
        die_at(f"gradients-{step}")
        ttp.tft_start_updating_os(-1)
        die_at(f"updating-{step}")
        ttp.tft_end_updating_os(step)
        die_at(f"updated-{step}")
    return f"{name} is done"


begin()
tell("result", train("training"))
