"""A block of cycles on one stand, in a process of its own: `python -m tests.drill.block JSON`.

Says one JSON line per cycle. A cycle that ends with an exception is a loss too: something hung,
died or was refused that should not; the block ends there, and what acpfs logged last is part of the
report.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.drill import faults, guarded, large, power, server, spill
from tests.drill.faults import Outcome
from tests.drill.stand import Stand

LOG_LINES = 15


@dataclass
class Block:
    """What to do."""

    kind: str
    workload: str
    transport: str
    seed: int
    base: str
    cycles: int
    mutant: str = ""
    torch: bool = False
    only: list[str] = field(default_factory=list)
    """Faults, by name; none: all that the kind of stand has."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A kind of stand, and what is done to it, with weights."""

    stand: type[Stand]
    faults: dict[str, tuple[Callable[[Stand], Outcome], float]]


_OVER_STORAGE: dict[str, tuple[Callable[[Stand], Outcome], float]] = {
    "kill storage": (server.kill_storage, 2),
    "storage hangs": (server.storage_hangs, 1),
    "kill worker": (faults.kill_worker, 1),
    "kill daemon": (faults.kill_daemon, 1),
}
KINDS = {
    "disk": Kind(
        Stand,
        {
            "kill daemon": (faults.kill_daemon, 3),
            "kill worker": (faults.kill_worker, 3),
            "kill supervisor": (faults.kill_supervisor, 1),
            "kill application": (faults.kill_application, 1),
        },
    ),
    "power": Kind(power.PowerStand, {"power loss": (power.lose_power, 1)}),
    "server": Kind(
        server.ServerStand,
        {"server fails": (server.server_fails, 1), "server hangs": (server.server_hangs, 1)},
    ),
    "gluster": Kind(server.GlusterStand, _OVER_STORAGE),
    "moosefs": Kind(server.MooseStand, _OVER_STORAGE),
}
KINDS |= {
    "guard": Kind(guarded.GuardStand, KINDS["disk"].faults),
    "large": Kind(large.LargeStand, KINDS["disk"].faults),
    "large guard": Kind(large.LargeGuardStand, KINDS["disk"].faults),
    "move": Kind(spill.MoveStand, KINDS["disk"].faults),
    "spill fails": Kind(
        spill.FailingStand,
        {
            "spill disk fails": (spill.spill_fails, 2),
            "kill worker": (faults.kill_worker, 1),
            "kill daemon": (faults.kill_daemon, 1),
        },
    ),
    "mirror": Kind(
        spill.MirrorStand,
        {
            "reboot": (spill.reboot, 5),
            "kill daemon": (faults.kill_daemon, 2),
            "kill worker": (faults.kill_worker, 2),
        },
    ),
}
NEED_SUPERVISOR = frozenset({"kill worker", "kill supervisor"})


def run(block: Block) -> None:
    """Cycles until they are done or one has lost something."""
    kind = KINDS[block.kind]
    words = {"mutant": block.mutant, "torch": block.torch, **block.options}
    with kind.stand(
        Path(block.base), block.workload, block.transport, block.seed, **words
    ) as stand:
        supervised = (
            bool(stand.supervisors()) and block.transport != "libfuse"
        )  # which has no takeover: the mount is made anew
        possible = {
            name: fault
            for name, fault in kind.faults.items()
            if (not block.only or name in block.only)
            and (supervised or name not in NEED_SUPERVISOR)
        }
        for cycle in range(block.cycles if possible else 0):
            name = stand.random.choices(
                list(possible), [weight for _fault, weight in possible.values()]
            )[0]
            outcome = one_cycle(stand, possible[name][0])
            say(fault=name, cycle=cycle, writing=stand.under_way.take(), **asdict(outcome))
            if outcome.losses:
                return


def one_cycle(stand: Stand, fault: Callable[[Stand], Outcome]) -> Outcome:
    """One fault; what goes wrong in any other way is a loss as well."""
    try:
        return fault(stand)
    except Exception:  # noqa: BLE001 - whatever it was is what the drill is for
        logged = (
            stand.mount.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            if stand.mount.log.exists()
            else []
        )
        return Outcome(
            [traceback.format_exc(limit=-4) + "\n".join(["", *logged, *_daemon_log(stand)])],
            [faults.AT_RANDOM],
        )


def _daemon_log(stand: Stand) -> list[str]:
    lines: list[str] = []
    for file in sorted((stand.mount.runtime_dir / "logs").glob("*.log")):
        lines += file.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return lines


def say(**words: Any) -> None:
    """One line to whoever reads."""
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    run(Block(**json.loads(sys.argv[1])))
