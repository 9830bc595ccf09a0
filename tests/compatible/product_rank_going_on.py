"""A rank of a script of the product that goes on (`enable_arf`), without a framework: `python
product_rank_going_on.py CONFIG`.

CONFIG is as for `product_rank`. Its state is two numbers, which the repair handler sends and
receives as files; what handlers are told goes to `told-RANK`, a line each, and the state at the end
to `end-RANK`.
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
STEPS = 6
process = int(os.environ.get("ACPFS_GENERATION", "0"))
forced = threading.Event()
state = {"step": 0, "weight": 1.0, "moment": 0.0}


def tell(what: str, *values: object) -> None:
    with (directory / f"told-{rank}").open("a") as file:
        file.write(json.dumps([process, what, *values]) + "\n")


def meet(name: str) -> None:
    """A collective: all ranks come here. A device that was stopped gets the main thread out."""
    (directory / f"{name}-{rank}").touch()
    while not all((directory / f"{name}-{other}").exists() for other in range(world)):
        if forced.wait(0.02):
            raise RuntimeError("FORCE STOP of the device")


def happens(point: str) -> None:
    if config.get("die") == [rank, point] and process == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("memory") == [rank, point] and not (directory / "lost").exists():
        (directory / "lost").touch()
        state["weight"] = float("nan")
        state["moment"] = state["weight"]
        raise RuntimeError("UCE ERROR: device memory is lost")


def stop(args: Any, ctx: Any) -> None:
    tell("stop", ttp.tft_get_repair_type())
    forced.set()


def clean(is_uce_error: bool, args: Any, ctx: Any) -> int:
    tell("clean", is_uce_error)
    forced.clear()
    return int(config.get("clean", 0))


def rebuild_group(fault_ranks: list[int], args: Any, ctx: Any) -> None:
    tell("rebuild_group", fault_ranks)


def repair(
    step: int, need_rebuild: bool, error_ranks: list[int], info: dict[str, Any], args: Any, ctx: Any
) -> None:
    tell("repair", step, need_rebuild, error_ranks, info)
    if info["repair_type"] == ttp.RepairType.RT_SEND.value:
        for target in info["dst"]:
            made = directory / f".state-{step}-{target}"
            made.write_text(json.dumps(state))
            made.rename(directory / f"state-{step}-{target}")
        return
    sent = directory / f"state-{step}-{rank}"
    while not sent.exists():
        threading.Event().wait(0.02)
    state.update(json.loads(sent.read_text()))


def rollback(step: int, args: Any, ctx: Any) -> None:
    tell("rollback", step)
    assert state["step"] == step


def begin() -> None:
    if rank == 0 and process == 0:
        ttp.tft_init_controller(rank, world, False, enable_arf=True)
        ttp.tft_start_controller("127.0.0.1", config["port"], False)
    ttp.tft_init_processor(rank, world, False, False, enable_arf=True)
    ttp.tft_start_processor("127.0.0.1", config["port"])
    rebooted = ttp.tft_is_reboot_node()
    assert rebooted == (process > 0)
    if rebooted:  # as MindSpore does
        ttp.tft_report_error(ttp.ReportState.RS_INIT_FINISH.value)
        assert ttp.tft_get_reboot_type() == "arf"
        assert ttp.tft_wait_next_action() == ttp.Action.RETRY.value
    for name, handler in {
        "stop": stop,
        "clean": clean,
        "rebuild_group": rebuild_group,
        "repair": repair,
        "rollback": rollback,
    }.items():
        getattr(ttp, f"tft_register_{name}_handler")(handler)
    ttp.set_mindio_export_version("MindSpeed")
    ttp.tft_set_optimizer_replica(
        rank, [{"rank_list": list(range(world)), "replica_cnt": world, "replica_shift": 0}]
    )


@ttp.tft_exception_handler  # type: ignore[untyped-decorator]
def train() -> None:
    if ttp.tft_is_reboot_node():
        raise RuntimeError("ARF FINISH")
    for step in range(int(state["step"]) + 1, STEPS + 1):
        meet(f"gradients-{step}")
        happens(f"gradients-{step}")
        ttp.tft_start_updating_os(-1)
        happens(f"updating-{step}")
        state["moment"] = 0.9 * state["moment"] + step * state["weight"]
        state["weight"] -= 0.01 * state["moment"]
        state["step"] = step
        ttp.tft_end_updating_os(step)
        happens(f"updated-{step}")


begin()
if config.get("die") == [rank, "leaving"] and process == 0:  # when all is done
    ttp.tft_exception_handler.__globals__["tft_destroy_processor"] = lambda: happens("leaving")
train()
(directory / f"end-{rank}").write_text(json.dumps(state))
