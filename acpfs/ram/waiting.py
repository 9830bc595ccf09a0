"""Who waits for room in the RAM tier, and whose turn it is: writers get as many bytes each, also of
what there was before RAM was full.

First come, first served is not fair here: who was first in filling RAM keeps that lead, and
finished 2.8 times as fast as the others where four writers had five times the budget to write. So
turns are given by bytes had, as a fair queue in a network gives them. Knows numbers and names
nothing: what an applicant's file is called, and which command its process runs, is found out by
whoever shows it. Used under the file system's lock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from acpfs.runtime.clock import Clock
from acpfs.types import NO_INO, Ino


class Purpose(enum.Enum):
    """What room is wanted for."""

    WRITE = "write"
    ALLOCATE = "allocate"
    """fallocate."""
    BRING_UP = "bring up"
    """A file of the backing directory, to be changed."""
    COPY_ASIDE = "copy aside"
    """Bytes that a version needs and that are about to change."""
    RELEASE = "let go on"
    """A writer in the passthrough lane is held until then."""


NO_OWNER = -1
"""Nobody's share is used."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """Who wants room; `pid` 0: not known."""

    ino: Ino
    purpose: Purpose
    pid: int = 0
    urgent: bool = False
    """May take what is kept for urgent files, and goes before all who may not."""
    uid: int = NO_OWNER
    """The owner of the file: whose share it is (`ram.shares`)."""
    dirties_bytes: int = 0
    """What is in RAM already, and becomes part of that share by what is about to be written."""


NOBODY = Applicant(NO_INO, Purpose.WRITE)


@dataclass(slots=True, eq=False)
class Waiting:
    """A place in the queue."""

    size: int
    applicant: Applicant
    turn: float
    """Who has the smallest one is next, of those that are urgent first."""
    urgent: bool
    """At first the applicant's; a file may become urgent while its writer waits, or cease to be."""
    since: float
    """Wall clock, seconds."""
    room: Future[None] = field(default_factory=Future)
    """Done when the bytes are reserved; fails when there will be none."""


LIVE_S = 5.0
"""What a writer had is forgotten when it wanted nothing for so long: then it does not compete any
more.
"""
PURGE_S = 1.0


class Turns:
    """The queue, and how many bytes each writer had.

    A clock runs by bytes given, divided by the number of writers. A turn is the clock's time when
    room was asked for, or later by what the writer has had beyond its share. So a lead is made up
    for, and nobody starves: whoever comes new gets no turn before the clock's time, and that goes
    on.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._time = 0.0
        self._had: dict[int, tuple[float, float]] = {}
        """Writer → (the turn that it would get now if the clock stood, when it last wanted
        something).
        """
        self._waiting: list[Waiting] = []
        self._purge_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        """In the order of turns."""
        return iter(sorted((one for one in self._waiting if not one.room.cancelled()), key=_place))

    def had(self, applicant: Applicant, size: int, lead_bytes_max: int) -> None:
        """Bytes were given without waiting, or taken unseen.

        `lead_bytes_max`: a larger lead is not made up for.
        """
        self._take_turn(applicant, size, lead_bytes_max)
        self._time += size / len(self._had)

    def turn(self, applicant: Applicant) -> float:
        """That it would get now."""
        return self._turn_of(_writer(applicant))

    def _turn_of(self, writer: int) -> float:
        return max(self._had.get(writer, (0.0, 0.0))[0], self._time)

    def add(self, applicant: Applicant, size: int, lead_bytes_max: int) -> Waiting:
        """Somebody has to wait."""
        turn = self._take_turn(applicant, size, lead_bytes_max)
        waiting = Waiting(size, applicant, turn, applicant.urgent, self._clock.wall())
        self._waiting.append(waiting)
        return waiting

    def first(self, may: Callable[[Waiting], bool] = lambda _one: True) -> Waiting | None:
        """Whose turn it is, of those that may have room: who may not stands in nobody's way."""
        if not self._waiting:
            return None
        if any(one.room.cancelled() for one in self._waiting):
            self._waiting = [one for one in self._waiting if not one.room.cancelled()]
        return min(filter(may, self._waiting), key=_place, default=None)

    def before(self, may: Callable[[Waiting], bool] = lambda _one: True, *, urgent: bool) -> int:
        """How many wait that go before somebody who comes now, of those that may have room."""
        return (
            sum(one.urgent and not one.room.cancelled() and may(one) for one in self._waiting)
            if urgent
            else sum(map(may, self._waiting))
        )

    def tell_urgent(self, is_urgent: Callable[[Ino], bool]) -> None:
        """Which files are urgent now."""
        for one in self._waiting:
            one.urgent = is_urgent(one.applicant.ino)

    def serve(self, waiting: Waiting) -> None:
        """It gets its room.

        Only those who wait share the clock now: not everybody who came, had a little and ended
        since.
        """
        self._time += waiting.size / len({_writer(one.applicant) for one in self._waiting})
        self._waiting.remove(waiting)

    def give_up(self, ones: Iterable[Waiting]) -> list[Waiting]:
        """Take these out of the queue, as far as they are in it still."""
        given_up = [one for one in ones if one in self._waiting]
        self._waiting = [one for one in self._waiting if one not in given_up]
        return given_up

    def _take_turn(self, applicant: Applicant, size: int, lead_bytes_max: int) -> float:
        now = self._clock.now()
        if now >= self._purge_at:
            self._purge(now)
        writer = _writer(applicant)
        had = self._had.get(writer)
        turn = self._time
        if had is not None:
            turn = min(max(had[0], turn), turn + lead_bytes_max)
        self._had[writer] = (turn + size, now)
        return turn

    def _purge(self, now: float) -> None:
        self._purge_at = now + PURGE_S
        waiting = {_writer(one.applicant) for one in self._waiting}
        self._had = {
            w: had for w, had in self._had.items() if had[1] > now - LIVE_S or w in waiting
        }


def _place(one: Waiting) -> tuple[bool, float]:
    return not one.urgent, one.turn


def _writer(applicant: Applicant) -> int:
    return applicant.pid or -applicant.ino
