"""A directory as witness: of two sides of a split job, one may save.

`claim-<generation>` in the job's directory belongs to the side whose name is inside. It is made by
renaming a directory that has the name already: a rename onto a directory that is not empty fails,
wherever it is carried out, so there is never a claim without an owner, and a side whose answer was
lost finds its own name. (A bare `mkdir` would leave one.) It must be the backing directory, not the
mount, whose answer would be this node's. `owner_after` blocks; `Witness` asks in a thread, for the
directory may hang.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import trio

from acpfs.logger import get_logger

_log = get_logger(__name__)
_OWNER = re.compile(r"coordinator-(\d{1,9})\.term-(\d{1,18})(\.majority)?")


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims."""

    coordinator: int
    term: int
    majority: bool
    """Whether more than half of the world obeys it."""

    @property
    def name(self) -> str:
        """The file inside a claim."""
        return (
            f"coordinator-{self.coordinator}.term-{self.term}{'.majority' if self.majority else ''}"
        )


class Witness:
    """The directory, asked from trio's thread."""

    def __init__(self, directory: Path, claim_s: float) -> None:
        """`claim_s`: how long it may take to answer."""
        self._directory = directory
        self._claim_s = claim_s

    async def owner(self, claimant: Claimant, generation: int) -> Claimant | None:
        """Whose the claim is when this claimant has tried to get it; None when the directory did
        not answer in time.
        """
        owner = None
        with trio.move_on_after(self._claim_s):
            try:
                owner = await trio.to_thread.run_sync(
                    owner_after, self._directory, generation, claimant, abandon_on_cancel=True
                )
            except OSError as error:
                _log.error("the witness fails", error=str(error))
        _log.info("claim", claimant=claimant.name, owner=None if owner is None else owner.name)
        return owner


def claim(directory: Path, generation: int, claimant: Claimant) -> bool:
    """Whether this claimant may save this generation; see `owner_after`."""
    return owner_after(directory, generation, claimant) == claimant


def owner_after(directory: Path, generation: int, claimant: Claimant) -> Claimant:
    """Whose the claim is when this claimant has tried to get it.

    A majority may go on where an earlier majority of the same job began: those who voted for it
    obey the other one no more. An owner keeps its claim in a later term, and says with its next
    claim that it has lost its majority.

    Raises:
        OSError: the directory does not answer as a directory should.
    """
    wanted = directory / f"claim-{generation}"
    owner = _claim(directory, generation, claimant)
    same = owner.coordinator == claimant.coordinator and claimant.term >= owner.term
    if owner == claimant or not (
        same or (owner.majority and claimant.majority and claimant.term > owner.term)
    ):
        return owner
    try:  # of two who change a claim one does: it is one file
        (wanted / owner.name).rename(wanted / claimant.name)
    except FileNotFoundError:
        return _owner(wanted)
    return claimant


def _claim(directory: Path, generation: int, claimant: Claimant) -> Claimant:
    """Whose it is, after trying to make it ours."""
    wanted = directory / f"claim-{generation}"
    made = directory / f".claim-{generation}.{claimant.name}"
    if not wanted.exists():
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        (made / claimant.name).touch(mode=0o600)
        try:
            made.rename(wanted)
        except OSError:
            if not wanted.exists():  # not because somebody was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return _owner(wanted)


def _owner(wanted: Path) -> Claimant:
    for entry in sorted(wanted.iterdir()):
        if match := _OWNER.fullmatch(entry.name):
            return Claimant(int(match[1]), int(match[2]), match[3] is not None)
    raise FileNotFoundError(f"{wanted} has no owner")
