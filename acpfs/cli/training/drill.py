"""`acpfs-train drill`: kill ranks of a user's own job at points by name, and judge what the others
left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import click

from acpfs.cli import show
from acpfs.cli.training import units
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.errors import ConfigError, ExitCode
from acpfs.training.drill import OF_A_FAULT, OF_AN_UPDATE, Kill, Verdict, jobs, judge, parsed
from acpfs.training.policy import PREFIX

COORDINATOR_S = 15.0
"""So long the coordinator may take to note the fault when the job has ended."""
LOOK_AGAIN_S = 0.1


@click.command(
    "drill", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--point",
    "points",
    multiple=True,
    type=click.Choice([*OF_AN_UPDATE]),
    help="Where the rank dies; default: each in turn.",
)
@click.option("--rank", default=1, show_default=True, help="Who dies.")
@click.option(
    "--update",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="In which update since protection began.",
)
@click.option(
    "--second",
    metavar="RANK:POINT",
    help=f"Another rank that dies meanwhile: at {', '.join(OF_A_FAULT)}.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=units.time,
    default="10m",
    show_default=True,
    help="For one run of the job.",
)
@click.option(
    "--tracker",
    default="latest",
    show_default=True,
    help="The file that names the newest checkpoint; empty: there is none.",
)
@JSON_OPTION
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def command(
    points: tuple[str, ...],
    rank: int,
    update: int,
    second: str | None,
    timeout_s: float,
    tracker: str,
    as_json: bool,
    directory: Path,
    words: tuple[str, ...],
) -> int:
    """Run a job that uses `protect`, once per point, and kill one of its ranks there.

    DIRECTORY is where the job saves; COMMAND starts it: `torchrun --nproc-per-node 4 train.py`.
    Each run is judged by what the job left: whole, by its checksums; named by the tracker; at most
    one step behind the rank that died. The checkpoints stay, so take a directory for the drill, or
    a copy of the job's own. A job that goes on from the newest checkpoint goes on from the last
    drill's.

    Exit code 0: all checkpoints are right; 1: one is not, and the table says why; 2: an option
    makes no sense.
    """
    others = parsed(second) if second else ()
    if any(other.point in OF_AN_UPDATE or other.rank == rank for other in others):
        raise ConfigError(f"--second: another rank than {rank}, at one of {', '.join(OF_A_FAULT)}")
    found: list[tuple[str, Verdict]] = []
    for point in points or OF_AN_UPDATE:
        kills = (Kill(rank, point, update), *others)
        found.append((point, _run(directory, words, kills, timeout_s, tracker)))
    if as_json:
        show.print_json([{"point": point, **asdict(verdict)} for point, verdict in found])
    else:
        rows = [
            (
                point,
                "" if verdict.step is None else str(verdict.step),
                "" if verdict.lost is None else str(verdict.lost),
                "" if verdict.took_s is None else show.duration(verdict.took_s),
                show.printable(verdict.wrong) or "right",
            )
            for point, verdict in found
        ]
        show.table(
            ("rank dies at", "saved step", "lost", "took", "verdict"),
            rows,
            numbers=("saved step", "lost"),
        )
    return int(ExitCode.FAILED if any(verdict.wrong for _point, verdict in found) else ExitCode.OK)


def _run(
    directory: Path, words: tuple[str, ...], kills: tuple[Kill, ...], timeout_s: float, tracker: str
) -> Verdict:
    before = jobs(directory)
    environment = {**os.environ, f"{PREFIX}DRILL": ",".join(map(str, kills))}
    try:
        job = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"{words[0]}: {error.strerror}") from error
    try:
        job.wait(timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        return Verdict(f"the job went on for {show.duration(timeout_s)}")
    deadline = time.monotonic() + COORDINATOR_S
    while (
        (verdict := judge(directory, before, kills, tracker)).wrong
        and jobs(directory) > before
        and time.monotonic() < deadline
    ):
        time.sleep(LOOK_AGAIN_S)
    return verdict
