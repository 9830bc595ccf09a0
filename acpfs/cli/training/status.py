"""`acpfs-train status`: what a job's coordinators on this node say: where the ranks are, who is
lost, who hangs.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import click

from acpfs.cli import show
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import AcpfsError

JOBS = ".acpfs-job"
ANSWER_S = 5.0
RANKS_SHOWN = 16
Json = dict[str, Any]


@click.command("status")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--job", help="Name of the run; default: the one whose coordinator began last.")
@click.option("--stacks", is_flag=True, help="Also the Python stacks of ranks that hang.")
@JSON_OPTION
def command(directory: Path, job: str | None, stacks: bool, as_json: bool) -> None:
    """Ask the coordinators that run on this node. DIRECTORY is the save directory."""
    found = [answer for answer in map(ask, announced(directory, job)) if answer is not None]
    if not found:
        raise AcpfsError(
            f"no coordinator of {job or 'a job'} that saves in {directory} runs on this node"
        )
    if as_json:
        show.print_json(found)
        return
    for answer in found:
        for heading, text in told(answer):
            click.echo(f"{heading:<12} {show.printable(text)}")
        _ranks(answer)
        for rank in answer["ranks"]:
            if stacks and rank["stacks"]:
                click.echo(f"rank {rank['rank']}:\n{rank['stacks']}")


def announced(directory: Path, job: str | None) -> list[str]:
    """Where the coordinators of a job answer."""
    jobs = (
        [directory / JOBS / job]
        if job
        else [path for path in (directory / JOBS).glob("*") if path.is_dir()]
    )
    files = [file for path in jobs for file in path.glob("coordinator-*") if file.is_file()]
    if not files:
        return []
    newest = max(files, key=lambda file: file.stat().st_mtime).parent
    found = []
    for file in sorted(newest.glob("coordinator-*")):
        try:
            found.append(str(json.loads(file.read_text(encoding="utf-8"))["status"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written by a node that died
    return found


def ask(name: str) -> Json | None:
    """What a coordinator says; None: it does not run here."""
    data = bytearray()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ANSWER_S)
        try:
            asking.connect("\0" + name)
            while part := asking.recv(1 << 16):
                data += part
            found: Json = json.loads(data)
        except (OSError, ValueError):
            return None
    return found


def told(answer: Json) -> list[tuple[str, str]]:
    """Lines about the job."""
    lost = {rank["rank"]: rank["lost"] for rank in answer["ranks"] if rank["lost"]}
    off = {rank["rank"]: why for rank in answer["ranks"] if (why := rank.get("unprotected"))}
    role = "active" if answer["active"] else "standing by"
    lines = [
        (
            "job",
            (
                f"{answer['job']}, coordinator {answer['coordinator']} ({role}), term "
                f"{answer['term']}, generation {answer['generation']}"
            ),
        ),
        (
            "state",
            f"{answer['state']}, {answer['connected']} of {answer['world'] or '?'} ranks connected",
        ),
        ("tls", "on" if answer["tls"] else "off: everybody on this network may join"),
    ]
    if answer["shards"] is not None:
        lines.append(("layout", f"{answer['shards']} shards, gate {answer['gate']}"))
    lines += [("lost", f"rank {rank}: {why}") for rank, why in list(lost.items())[:RANKS_SHOWN]]
    lines += [
        ("unprotected", f"rank {rank}: {why}") for rank, why in list(off.items())[:RANKS_SHOWN]
    ]
    if stall := answer["stall"]:
        where = f" in {stall['group']}" if stall.get("group") else ""
        lines.append(
            (
                "behind",
                (
                    f"ranks {', '.join(map(str, stall['behind']))}{where}: nothing moved for "
                    f"{show.duration(stall['waited_s'])}"
                ),
            )
        )
    if answer["counts"]:
        lines.append(
            (
                "refused",
                ", ".join(f"{name} {count}" for name, count in sorted(answer["counts"].items())),
            )
        )
    return lines


def _ranks(answer: Json) -> None:
    rows = [
        (str(rank["rank"]), rank["node"], str(rank["done"]), rank["phase"])
        for rank in answer["ranks"]
        if not rank["lost"] and rank.get("phase") is not None
    ]
    if rows:
        show.table(("rank", "node", "done", "phase"), rows[:RANKS_SHOWN], numbers=("rank", "done"))
    if len(rows) > RANKS_SHOWN:
        click.echo(f"and {len(rows) - RANKS_SHOWN} more ranks (--json)")
