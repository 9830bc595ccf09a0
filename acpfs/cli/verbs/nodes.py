"""`acpfs-ctl nodes`: the mounts that share the backing directory; `acpfs-ctl nodes forget NODE`: go
on without one that is missing.
"""

from __future__ import annotations

from pathlib import Path

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION, TIMEOUT_OPTION
from acpfs.control import registry

HEADINGS = (
    "node",
    "state",
    "host",
    "lag",
    "operations",
    "dirty",
    "heard",
    "clock ahead",
    "bound",
    "read from",
    "given to",
    "held here",
    "holds ours",
    "errors",
)


@click.group("nodes", invoke_without_command=True)
@JSON_OPTION
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """All mounts of the backing directory: who lives, how far each has drained, how their clocks
    differ.
    """
    if ctx.invoked_subcommand is not None:
        return
    target: Target = ctx.obj
    rows: list[show.Json] = ask(target.record(), "nodes", as_json=as_json)["nodes"]
    if as_json:
        show.print_json(rows)
    else:
        show.table(
            HEADINGS,
            map(member_row, rows),
            numbers=(
                "lag",
                "operations",
                "dirty",
                "heard",
                "bound",
                "read from",
                "given to",
                "held here",
            ),
        )
        for row in rows:
            if row["lost"]:
                show.console().print(
                    f"{row['node']} has lost what it had not persisted: pointers of that time "
                    "are withheld",
                    markup=False,
                )


@command.command("wait")
@TIMEOUT_OPTION
@JSON_OPTION
@click.pass_obj
def wait(target: Target, timeout_s: float | None, as_json: bool) -> None:
    """Return when what other nodes had closed before the call is persisted, and can be read here.

    Exit code 4: not in time.

    Nodes that are missing are not waited for.
    """
    done = ask(target.record(), "wait_nodes", {"timeout_s": timeout_s}, as_json=as_json)
    if as_json:
        show.print_json(done)
    else:
        click.echo("all that live have persisted it")


@command.command("forget")
@click.argument("node")
@JSON_OPTION
@click.pass_obj
def forget(target: Target, node: str, as_json: bool) -> None:
    """Have pointers wait no more for NODE, which is missing: what it had not persisted is given up.

    If it returns, it counts again. Of a node that is adopted here: what it had not copied.

    Exit code 5: it lives, or there is none of that name.
    """
    record = target.record()
    # a mount that adopts writes the record of the node, which lives by that
    place = registry.normalised(str(registry.adopting_place(Path(record.runtime_dir), node)))
    adopts = [one for one in registry.records() if one.mountpoint == place and one.alive]
    done = ask([*adopts, record][0], "forget_node", {"node": node}, as_json=as_json)
    if as_json:
        show.print_json(done)
    else:
        click.echo(f"forgotten: {node}")


def member_row(row: show.Json) -> tuple[str, ...]:
    """Of the table of members, under `HEADINGS`."""
    low, high = row["clock_ahead_s"]
    clock = "?" if low is None else f"{low:+.3f} s …" + ("" if high is None else f" {high:+.3f} s")
    lag = "?" if row["lag_s"] is None else show.duration(row["lag_s"])
    heard = "" if row["state"] == "this" else f"{show.duration(row['silent_s'])} ago"
    errors = "; ".join(map(show.printable, row["errors"]))
    return (
        show.printable(row["node"]),
        row["state"],
        show.printable(row["host"]),
        lag,
        str(row["operations"]),
        show.size(row["dirty_bytes"]),
        heard,
        "" if row["state"] == "this" else clock,
        show.duration(row["clock_bound_s"]),
        show.size(row.get("got_bytes", 0)),
        show.size(row.get("given_bytes", 0)),
        show.size(row["held_bytes"]) if row.get("held_bytes") else "",
        "yes" if row.get("is_holder") else "",
        errors,
    )
