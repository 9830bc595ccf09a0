"""Drills: a rank kills itself at a point by name, and what the others left is judged.

No torch; for any job that uses `protect`.

What dies where is said by the setting `drill` (`ACPFS_TRAIN_DRILL`): `RANK:POINT:UPDATE`, several
divided by commas. Updates count from the beginning of protection; the points of a fault that others
have begun need none. Before it dies a rank notes where it was, in the job's directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from acpfs.errors import ConfigError
from acpfs.training.manifest import GaspError, verify
from acpfs.training.marks import Marks
from acpfs.training.naming import read_tracker

OF_AN_UPDATE = {
    "ready": "its gradients are complete, before the gate",
    "gated": "all ranks' gradients are complete",
    "updating": "the update has begun",
    "updated": "its own update is done, before parameters are sent round",
}
OF_A_FAULT = {
    "stopping": "it is out of its collectives",
    "settling": "it is told at which step all meet",
    "saving": "it begins to write",
    "publishing": "all is written, and has no name",
    "published": "the checkpoint has its name, and nobody knows",
}
NOTES = "drill.jsonl"
FAULTS = "faults.jsonl"
SAVED = "SAVED"
JOBS = ".acpfs-job"
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank that dies."""

    rank: int
    point: str
    update: int = 0

    def __str__(self) -> str:
        return f"{self.rank}:{self.point}" + (f":{self.update}" if self.update else "")


def parsed(text: str) -> tuple[Kill, ...]:
    """What a setting says; nothing: nobody.

    Raises:
        ConfigError: it makes no sense.
    """
    found = []
    for word in filter(None, text.split(",")):
        rank, _, rest = word.partition(":")
        point, _, update = rest.partition(":")
        if (
            point not in OF_AN_UPDATE | OF_A_FAULT
            or not rank.isdecimal()
            or (update and not update.isdecimal())
        ):
            raise ConfigError(
                f"drill = {word!r}: RANK:POINT:UPDATE; points are "
                f"{', '.join(OF_AN_UPDATE | OF_A_FAULT)}"
            )
        if (point in OF_AN_UPDATE) != (int(update or 0) > 0):
            raise ConfigError(
                f"drill = {word!r}: "
                + ("say in which update" if point in OF_AN_UPDATE else f"{point} has no update")
            )
        found.append(Kill(int(rank), point, int(update or 0)))
    return tuple(found)


class Points:
    """Where a rank's points are told: called with the name of each that it reaches."""

    def __init__(self) -> None:
        self._followers: list[Callable[[str], object]] = []

    def follow(self, reached: Callable[[str], object]) -> None:
        """Have this called, before those who asked earlier: a drill, which asks when protection
        begins, may end the process.
        """
        self._followers.insert(0, reached)

    def __call__(self, point: str) -> None:
        for reached in self._followers:
            reached(point)


class Drill:
    """One rank's: called at every point that it reaches."""

    def __init__(
        self, kills: tuple[Kill, ...], rank: int, marks: Marks, job_directory: Path
    ) -> None:
        self._kills = [kill for kill in kills if kill.rank == rank]
        self._marks = marks
        self._begun = marks.now.done
        self._notes = job_directory / NOTES

    def __call__(self, point: str) -> None:
        mark = self._marks.now
        update = max(mark.done, mark.ready) - self._begun
        for kill in self._kills:
            if kill.point == point and kill.update in (0, update):
                with self._notes.open("a", encoding="ascii") as file:
                    file.write(
                        json.dumps({**asdict(kill), "done": mark.done, "ready": mark.ready}) + "\n"
                    )
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a drill has left."""

    wrong: str
    """Why it is not right; empty: it is."""
    step: int | None = None
    """Of that checkpoint; null: there is none."""
    lost: int | None = None
    """Completed steps that are not in the checkpoint."""
    took_s: float | None = None
    """From the fault until the checkpoint was there, or was given up; null: not known."""
    gasp: str = ""
    """The checkpoint that was found; empty: none."""


def jobs(directory: Path) -> set[str]:
    """Runs that saved there."""
    return {path.name for path in (directory / JOBS).glob("*") if path.is_dir()}


def lines(path: Path) -> list[Json]:
    """Of a file of JSON lines; those that are whole, and objects."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found: list[Json] = []
    for line in text.split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict):
                found.append(said)
    return found


def judge(directory: Path, before: set[str], kills: tuple[Kill, ...], tracker: str) -> Verdict:
    """Of the run that was not among those `before`."""
    new = sorted(jobs(directory) - before)
    if not new:
        return Verdict(f"no rank began protection in {directory}")
    notes = lines(directory / JOBS / new[-1] / NOTES)
    faults = lines(directory / JOBS / new[-1] / FAULTS)
    reached = {(note["rank"], note["point"]) for note in notes}
    missed = [str(kill) for kill in kills if (kill.rank, kill.point) not in reached]
    if missed:
        return Verdict(f"{', '.join(missed)}: the job never came there")
    if not faults:
        return Verdict("a rank died, and the coordinator noted no fault")
    fault = faults[-1]
    name = Path(str(fault.get("gasp", ""))).name
    took_s = fault.get("took_s")
    if fault.get("status") != SAVED:
        return Verdict(f"not saved: {fault.get('text')}", took_s=took_s)
    try:
        manifest = verify(directory / name)
    except (GaspError, OSError) as error:
        return Verdict(
            f"the checkpoint is not what its manifest says: {error}", took_s=took_s, gasp=name
        )
    lost = max(0, max(note["done"] for note in notes) - manifest.step)
    wrong = f"{lost} steps are lost" if lost > 1 else ""
    if tracker and not wrong:
        try:
            named = read_tracker(directory / tracker).name
        except (GaspError, OSError):
            named = "nothing"
        wrong = "" if named in (name, str(manifest.step)) else f"{tracker} names {named}"
    return Verdict(wrong, manifest.step, lost, took_s, name)
