"""The crash matrix: kills everything at any time and says what was lost. Run through tools/drill.

fault × workload × times tried × losses, from a seed. Ends with 1 when something was lost.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import click
from rich.console import Console

from tests.drill import soak as soaking
from tests.drill.block import KINDS
from tests.drill.mutants import MUTANTS
from tests.drill.points import POINTS, label
from tests.drill.result import Result
from tests.drill.run import Drill, Plan
from tests.drill.workloads import GUARDED, LARGE, WORKLOADS

SPILL_STANDS = {"move": ["move", "move", "spill fails"], "mirror": ["mirror"]}
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


def _list(_context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        for name, kind in KINDS.items():
            console.print(f"{name}: {', '.join(kind.faults)}")
        for number in range(len(POINTS)):
            console.print(label(number))
        sys.exit(0)


@click.command()
@click.option("--kills", default=200, help="how many")
@click.option("--minutes", default=10.0, help="at most so long")
@click.option("--seed", default=1)
@click.option("--parallel", default=2, help="independent mounts at a time")
@click.option(
    "--stand",
    "stands",
    multiple=True,
    type=click.Choice(list(KINDS)),
    help="kinds of stands; default: disk, power, server",
)
@click.option(
    "--workload", "workloads", multiple=True, type=click.Choice([*WORKLOADS, *GUARDED, *LARGE])
)
@click.option(
    "--transport",
    "transports",
    multiple=True,
    help="native, native-direct, native-passthrough, libfuse",
)
@click.option(
    "--spill",
    type=click.Choice(["move", "mirror"]),
    help="instead: mounts with little RAM and a spill directory",
)
@click.option(
    "--guard",
    is_flag=True,
    help=(
        "instead: mounts with keep_last_persisted, applications that delete the old checkpoint "
        "first"
    ),
)
@click.option(
    "--large",
    is_flag=True,
    help="instead: files of 1 to 60 MB, in place and beside, guard on and off, with an observer",
)
@click.option("--only", multiple=True, help="faults, by name")
@click.option("--cycles", default=0, help="per mount; default: 6 to 12")
@click.option(
    "--mutant",
    default="",
    type=click.Choice(["", *MUTANTS]),
    help="break acpfs on purpose: the drill must find it",
)
@click.option(
    "--torch",
    is_flag=True,
    help="real torch.save; ACPFS_TORCH_PYTHON names an interpreter that has torch",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    help="keep the result in this .md and the .json beside it",
)
@click.option(
    "--onto",
    type=click.Path(path_type=Path, exists=True),
    help="count the kept .json of an earlier run too",
)
@click.option(
    "--soak", default=0.0, help="instead: so many minutes of mixed load and faults on one mount"
)
@click.option("--quiet", is_flag=True, help="only the table")
@click.option(
    "--list",
    "_listed",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_list,
    help="show faults and fault points",
)
def main(
    kills: int,
    minutes: float,
    seed: int,
    parallel: int,
    stands: tuple[str, ...],
    workloads: tuple[str, ...],
    transports: tuple[str, ...],
    spill: str | None,
    guard: bool,
    large: bool,
    only: tuple[str, ...],
    cycles: int,
    mutant: str,
    torch: bool,
    save: Path | None,
    onto: Path | None,
    soak: float,
    quiet: bool,
) -> None:
    """Kill everything, at any time, and check what is left."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that mounts are taken down
    tell: Callable[[str], None] = (
        (lambda _line: None) if quiet else lambda line: console.print(line, markup=False)
    )
    if soak:
        finish(soaking.soak(seed, soak, (transports or ("native",))[0], tell)[0], save)
    plan = Plan(
        seed, kills, minutes, parallel, only=list(only), mutant=mutant, torch=torch, cycles=cycles
    )
    if guard:
        plan.kinds = ["guard"]
        plan.workloads = list(GUARDED)
    if large:
        plan.kinds = ["large", "large guard"]
        plan.workloads = list(LARGE)
    plan.kinds = list(stands) or SPILL_STANDS.get(spill or "") or plan.kinds
    plan.workloads = list(workloads) or plan.workloads
    plan.transports = list(transports) or plan.transports
    result = Drill(plan, tell).run()
    if onto is not None:
        result.add(json.loads(onto.read_text()))
    finish(result, save)


def finish(result: Result, save: Path | None) -> NoReturn:
    """Table, files, exit code."""
    console.print(result.table())
    console.print(result.was_written())
    if save is not None:
        result.save(save)
    sys.exit(1 if result.losses else 0)


if __name__ == "__main__":
    main()
