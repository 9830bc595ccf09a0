"""Kills on several nodes, and an observer; through tools/cluster-drill.

Ends with 1 when a violation was seen.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import click

from tests.cluster import outcome, ranks
from tests.cluster.kills import KEEP, Ground, run
from tests.cluster.loss_drills import Plan, drill
from tests.cluster.loss_outcome import HEAD
from tests.rig.storage import KINDS, UNCACHED, open_storage, why_not
from tests.rig.storage.servers import Storage

WORKLOADS = ("files", *ranks.WORKLOADS)


@click.command()
@click.option("--kills", default=200, help="how many, shared out among the workloads")
@click.option("--nodes", default=4, help="mounts")
@click.option("--seed", default=1)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(WORKLOADS),
    help="default: all that this machine has",
)
@click.option(
    "--calm", default=30, help="saves of each workload without kills, for the pointers' delays"
)
@click.option(
    "--keep",
    default=KEEP,
    help="delete all but so many checkpoints, pointers first, then each node its own part; 0: none",
)
@click.option(
    "--cluster-order",
    "order",
    default="pointers",
    type=click.Choice(["pointers", "all", "off"]),
    help="off: violations are due",
)
@click.option(
    "--storage",
    "kind",
    type=click.Choice(list(KINDS)),
    help="over such a file system, servers are killed too; else a directory",
)
@click.option(
    "--backing",
    "backings",
    multiple=True,
    type=click.Path(path_type=Path),
    help="one per node, mounted already",
)
@click.option(
    "--seen",
    type=click.Path(path_type=Path),
    help="where the observer looks; default: the first --backing",
)
@click.option(
    "--save",
    "kept",
    type=click.Path(path_type=Path),
    help="keep the outcome in this .json, and in a .md beside it",
)
@click.option(
    "--add",
    is_flag=True,
    help="beside the workloads that are kept there already: each can be run by itself",
)
@click.option(
    "--losses",
    default=0,
    help="instead of kills: so many whole nodes with their RAM; their holders adopt what they have",
)
@click.option(
    "--partitions", default=0, help="the same, with the node's network cut some time before"
)
@click.option(
    "--adopt",
    type=click.Choice(["asked", "auto"]),
    default="asked",
    help="with losses: auto, holders adopt without being asked where that is safe",
)
@click.option(
    "--parallel", default=1, help="with losses: so many clusters side by side, which share them"
)
@click.option("--minutes", default=math.inf, help="with losses: no further one after so long")
@click.option("--quick", is_flag=True, help="a smoke: 5 kills on 2 nodes")
def main(
    kills: int,
    nodes: int,
    seed: int,
    workloads: tuple[str, ...],
    calm: int,
    keep: int,
    order: str,
    kind: str | None,
    backings: tuple[Path, ...],
    seen: Path | None,
    kept: Path | None,
    add: bool,
    losses: int,
    partitions: int,
    adopt: str,
    parallel: int,
    minutes: float,
    quick: bool,
) -> None:
    """See the head of tools/cluster-drill."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that mounts are taken down
    if losses or partitions:
        alone = adopt == "auto"
        lose(Plan(seed, losses, partitions, parallel, minutes, alone=alone), kept, add=add)
    if quick:
        kills = 5
        nodes = 2
        workloads = ("files",)
        calm = 1
    if kind is not None and (lacking := why_not(kind)) is not None:
        raise click.ClickException(lacking)
    able = [name for name in workloads or WORKLOADS if possible(name)]
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="acpfs-cluster-", ignore_cleanup_errors=True) as base,
        contextlib.ExitStack() as stack,
    ):
        storage = (
            stack.enter_context(open_storage(kind, Path(base) / "storage"))
            if kind is not None
            else None
        )
        places, looks = (
            backings_of(Path(base), storage, nodes)
            if not backings
            else (list(backings), seen or backings[0])
        )
        for number, name in enumerate(able):
            share = kills // len(able) + (number < kills % len(able))
            (own := Path(base) / name).mkdir()
            (looks / name).mkdir()
            ground = Ground([place / name for place in places], looks / name, storage)
            done = run(
                own,
                ground,
                seed + number,
                share,
                click.echo,
                workload=name,
                calm=calm,
                keep=keep,
                cluster_order=order,
            )
            found.append(done)
            click.echo(dict(zip(outcome.HEAD, done.row(), strict=True)))
            if kept is not None:
                outcome.save(kept, found, sys.argv[1:], add=add)
    for line in [line for one in found for line in one.violations[:10]]:
        click.echo(line)
    sys.exit(any(one.violations or one.end for one in found))


def lose(plan: Plan, kept: Path | None, *, add: bool) -> None:
    """Whole nodes; ends the program."""
    command = shlex.join(["tools/cluster-drill", *sys.argv[1:]])
    try:
        found = drill(plan, command, kept, click.echo, add=add)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    for one in found:
        click.echo(dict(zip(HEAD, one.row(), strict=True)))
    for line in [line for one in found for line in one.violations[:10]]:
        click.echo(line)
    sys.exit(any(one.violations for one in found))


def possible(workload: str) -> bool:
    """Whether this machine has what it needs; says so where not."""
    if workload == "files" or ranks.torch_python() is not None:
        return True
    click.echo(
        f"{workload} is left out: {ranks.PYTHON_VARIABLE} names no interpreter that has torch"
    )
    return False


def backings_of(base: Path, storage: Storage | None, nodes: int) -> tuple[list[Path], Path]:
    """One per node and one for the observer: clients of their own, or the same directory for
    all.
    """
    if storage is None:
        (shared := base / "shared").mkdir()
        return [shared] * nodes, shared
    return [storage.client(f"node{number}") for number in range(nodes)], storage.client(
        "observer", *UNCACHED[storage.name]
    )


if __name__ == "__main__":
    main()
