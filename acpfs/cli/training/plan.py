"""`acpfs-train plan`: what copies of the state cost, which losses they cover, and whether a node's
RAM tier holds what is saved.
"""

from __future__ import annotations

from dataclasses import asdict

import click

from acpfs.cli import show
from acpfs.cli.training.units import long_duration, size
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.training import planner
from acpfs.training.planner import Plan, Sharding


@click.command("plan")
@click.option("--params", type=float, required=True, help="Parameters of the model: 70e9.")
@click.option("--dp", type=click.IntRange(1), required=True, help="Data parallel size.")
@click.option(
    "--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel size."
)
@click.option(
    "--pp", type=click.IntRange(1), default=1, show_default=True, help="Pipeline parallel size."
)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Copies of each shard in the data parallel group.",
)
@click.option(
    "--sharding",
    type=click.Choice([kind.value for kind in Sharding]),
    default="zero1",
    show_default=True,
)
@click.option("--ranks-per-node", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--model-bytes",
    type=float,
    default=6.0,
    show_default=True,
    help="Weight and gradient, per parameter.",
)
@click.option(
    "--weight-bytes",
    type=float,
    default=2.0,
    show_default=True,
    help="Weight in a checkpoint, per parameter.",
)
@click.option(
    "--optimizer-bytes",
    type=float,
    default=12.0,
    show_default=True,
    help="Optimizer's state, per parameter.",
)
@click.option("--ram", type=size, help="Budget of a node's RAM tier.")
@click.option(
    "--ram-rate",
    type=size,
    default="2G",
    show_default=True,
    help="Bytes per second that a node writes into RAM.",
)
@click.option(
    "--storage-rate", type=size, help="Bytes per second of the storage, all nodes together."
)
@JSON_OPTION
def command(
    params: float,
    dp: int,
    tp: int,
    pp: int,
    replicas: int,
    sharding: str,
    ranks_per_node: int,
    model_bytes: float,
    weight_bytes: float,
    optimizer_bytes: float,
    ram: int | None,
    ram_rate: int,
    storage_rate: int | None,
    as_json: bool,
) -> None:
    """What copies of the state cost, and which losses leave one of every shard.

    Ranks are placed as Megatron and torch do it: tensor parallel ones side by side, then data
    parallel ones, then pipeline stages.
    """
    try:
        layout = Plan(
            params,
            dp,
            tp,
            pp,
            replicas,
            Sharding(sharding),
            ranks_per_node,
            model_bytes,
            weight_bytes,
            optimizer_bytes,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    found = planner.coverage(layout)
    most = planner.most_on_a_node(layout)
    wanted = planner.ram_wanted_bytes(layout)
    if as_json:
        show.print_json(
            {
                "ranks": layout.world,
                "nodes": layout.nodes,
                "copies": layout.copies,
                "rank_bytes": layout.rank_bytes,
                "added_bytes": layout.added_bytes,
                "checkpoint_bytes": layout.checkpoint_bytes,
                "node_bytes": most,
                "ram_wanted_bytes": wanted,
                "buddy_bytes": layout.buddy_bytes,
                "ram_holds": None if ram is None else ram >= wanted,
                "covers": asdict(found),
            }
        )
        return
    for heading, text in (
        _memory(layout, most)
        + _coverage(layout, found)
        + _tier(wanted, ram)
        + _times(layout, most, ram_rate, storage_rate)
    ):
        click.echo(f"{heading:<11} {text}")


def _memory(layout: Plan, most: float) -> list[tuple[str, str]]:
    added = (
        f"; further copies take {show.size(layout.added_bytes)} of all of them"
        if layout.added_bytes
        else ""
    )
    if layout.sharding is Sharding.ZERO1 and layout.copies > 1:
        added += f" (MindIO's formula: {layout.product_added_bytes / 1e9:.0f} GB)"
    return [
        (
            "job",
            (
                f"{layout.world} ranks on {layout.nodes} nodes, {layout.copies} of which hold each "
                "shard"
            ),
        ),
        (
            "device",
            (
                f"{show.size(layout.rank_bytes)} on each rank for weights, gradients and "
                f"optimizer{added}"
            ),
        ),
        (
            "checkpoint",
            f"{show.size(layout.checkpoint_bytes)}, at most {show.size(most)} on one node",
        ),
    ]


def _coverage(layout: Plan, found: planner.Coverage) -> list[tuple[str, str]]:
    if not found.any_rank:
        return [
            (
                "covers",
                (
                    "nothing: each shard is held by one rank; only what was saved is left after a "
                    "fault (--replicas 2)"
                ),
            ),
            (
                "buddy_every",
                (
                    f"{show.size(layout.buddy_bytes)} of each rank's host keep copies of its shard "
                    "and of another rank's, twice that while the next are sent: any one rank"
                ),
            ),
        ]
    if not found.any_node:
        together = (
            "all of them"
            if found.fatal_nodes == layout.nodes
            else f"{found.fatal_nodes} of {layout.nodes} nodes"
        )
        return [
            (
                "covers",
                f"any one rank, not any node: of {together} a shard has all its copies there",
            )
        ]
    if found.any_two_nodes:
        return [("covers", "any one rank, any one node, any two nodes")]
    return [
        (
            "covers",
            (
                f"any one rank and any one node; of two nodes all but {found.fatal_pairs} of "
                f"{found.pairs} pairs"
            ),
        )
    ]


def _tier(wanted: float, ram: int | None) -> list[tuple[str, str]]:
    text = f"{show.size(wanted)} on a node hold two saves and what survivors leave"
    if ram is None:
        return [("RAM tier", text)]
    verdict = "is enough" if ram >= wanted else "is too little: saves would wait for the storage"
    return [("RAM tier", f"{text}: {show.size(ram)} {verdict}")]


def _times(
    layout: Plan, most: float, ram_rate: int, storage_rate: int | None
) -> list[tuple[str, str]]:
    times = [
        (
            "save",
            f"{long_duration(most / max(1, ram_rate))} into RAM at {show.size(ram_rate)}/s a node",
        )
    ]
    if storage_rate:
        times.append(
            (
                "drain",
                (
                    f"{long_duration(layout.checkpoint_bytes / storage_rate)} at "
                    f"{show.size(storage_rate)}/s of the storage"
                ),
            )
        )
    return times
