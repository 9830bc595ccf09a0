"""Random reservations against what is promised of the reserve (S279), and mutants of the tier, each
of which must be found.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from acpfs.ram import waiting
from acpfs.ram.tier import Tier
from acpfs.ram.waiting import Applicant, Purpose, Turns, Waiting
from acpfs.runtime.given import Runtime
from acpfs.types import Ino
from tests.rig.runtime import REAL

clause = pytest.mark.clause
BUDGET = 100
FILES = 8
SIZE_MAX = 25
SEEDS = 20


@dataclass
class Asked:
    """Somebody's room."""

    ino: Ino
    size: int
    room: Future[None]
    counted: bool = False


class BrokenError(Exception):
    """A promise was not kept."""


class History:
    """A tier of numbers, and random writers; each step is checked."""

    def __init__(self, tier: Tier, rng: random.Random) -> None:
        self.tier = tier
        self.rng = rng
        self.urgent: set[int] = set()
        self.asked: list[Asked] = []
        self.budget = BUDGET
        tier.keep_for_urgent("30%")

    @property
    def reserve(self) -> int:
        return self.budget * 30 // 100

    def taken(self) -> int:
        return sum(one.size for one in self.asked if one.counted)

    def step(self) -> None:
        before = self.taken()
        getattr(
            self,
            self.rng.choice(
                ("ask", "ask", "ask", "ask_nowait", "give_back", "give_back", "declare", "resize")
            ),
        )()
        granted = [one for one in self.asked if one.room.done() and not one.counted]
        for one in granted:
            one.counted = True
        self._check(granted, before)

    def _applicant(self) -> Applicant:
        ino = self.rng.randrange(FILES)
        return Applicant(Ino(ino), Purpose.WRITE, ino + 1, ino in self.urgent)

    def ask(self) -> None:
        applicant = self._applicant()
        size = self.rng.randint(1, SIZE_MAX)
        self.asked.append(Asked(applicant.ino, size, self.tier.reserve(size, applicant)))

    def ask_nowait(self) -> None:
        """Urgent ones get what there is at once, whoever else waits, but for others that are
        urgent.
        """
        applicant = self._applicant()
        size = self.rng.randint(1, SIZE_MAX)
        waits = [
            one
            for one in self.asked
            if not one.room.done() and (one.ino in self.urgent or not applicant.urgent)
        ]
        fits = self.taken() + size <= self.budget - (0 if applicant.urgent else self.reserve)
        had = self.tier.reserve_nowait(size, applicant)
        if had is not (fits and not waits):
            raise BrokenError(f"at once: {had}, {applicant}")
        if had:
            self.asked.append(Asked(applicant.ino, size, Future()))
            self.asked[-1].room.set_result(None)

    def give_back(self) -> None:
        done = [one for one in self.asked if one.counted]
        if done:
            one = self.rng.choice(done)
            self.asked.remove(one)
            self.tier.release(one.size)

    def declare(self) -> None:
        """Or take it back; also for who waits already."""
        self.urgent ^= {self.rng.randrange(FILES)}
        self.tier.tell_urgent(lambda ino: ino in self.urgent)

    def resize(self) -> None:
        self.budget = self.rng.choice((BUDGET, BUDGET * 3 // 2))
        self.tier.change_budget(self.budget)

    def _check(self, granted: list[Asked], before: int) -> None:
        total = self.taken()
        ordinary = [one for one in granted if one.ino not in self.urgent]
        if granted and total > self.budget and total > before:
            raise BrokenError("more than the budget")
        if ordinary and total > self.budget - self.reserve:
            raise BrokenError("the reserve was given to others")
        waiting_urgent = [
            one for one in self.asked if not one.room.done() and one.ino in self.urgent
        ]
        if ordinary and waiting_urgent:
            raise BrokenError("others went before an urgent one")
        room = self.budget - total
        if waiting_urgent and all(one.size <= room for one in waiting_urgent):
            raise BrokenError("an urgent one waits for room that is there")
        waiting_others = [
            one for one in self.asked if not one.room.done() and one.ino not in self.urgent
        ]
        if (
            waiting_others
            and not waiting_urgent
            and all(one.size <= room - self.reserve for one in waiting_others)
        ):
            raise BrokenError("one waits for room that is there")


def play(tier: Tier, seed: int, steps: int = 300) -> None:
    history = History(tier, random.Random(seed))
    for _ in range(steps):
        history.step()


def play_all(directory: Path, kind: type[Tier]) -> None:
    for seed in range(SEEDS):
        play(kind(directory, BUDGET, REAL), seed)


@clause("S279")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_writers_get_what_is_promised(tmp_path: Path, seed: int) -> None:
    play(Tier(tmp_path, BUDGET, REAL), seed)


class ForEverybody(Tier):
    def free_bytes(self, *, urgent: bool = False) -> int:
        return super().free_bytes(urgent=True)


class ForNobody(Tier):
    def free_bytes(self, *, urgent: bool = False) -> int:
        return super().free_bytes(urgent=False)


class ForgottenAtAnotherBudget(Tier):
    def change_budget(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.room_changed()


class Deaf(Tier):
    """What is declared counts for who comes next, not for who waits."""

    def tell_urgent(self, is_urgent: Callable[[Ino], bool]) -> None:
        self._wake()


class InTurn(Tier):
    """Urgent ones stand in line like others."""

    def __init__(self, directory: Path, budget_bytes: int, runtime: Runtime) -> None:
        super().__init__(directory, budget_bytes, runtime)

        class Fair(Turns):
            def first(self, may: Callable[[Waiting], bool] = lambda _one: True) -> Waiting | None:
                self._waiting = [one for one in self._waiting if not one.room.cancelled()]
                return min(filter(may, self._waiting), key=lambda one: one.turn, default=None)

        self._turns = Fair(runtime.clock)


class BehindOthers(Tier):
    """Whoever comes while others wait has to wait as well."""

    def __init__(self, directory: Path, budget_bytes: int, runtime: Runtime) -> None:
        super().__init__(directory, budget_bytes, runtime)

        class Long(Turns):
            def before(
                self, may: Callable[[Waiting], bool] = lambda _one: True, *, urgent: bool
            ) -> int:
                return len(self)

        self._turns = Long(runtime.clock)


@clause("S279")
@pytest.mark.parametrize(
    "mutant", [ForEverybody, ForNobody, ForgottenAtAnotherBudget, Deaf, InTurn, BehindOthers]
)
def test_mutants_are_found(tmp_path: Path, mutant: type[Tier]) -> None:
    with pytest.raises(BrokenError):
        play_all(tmp_path, mutant)


@pytest.fixture(autouse=True)
def _nothing_is_too_small_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acpfs.ram.tier.UNCOUNTED_BYTES_MAX", 0)
    monkeypatch.setattr(waiting, "PURGE_S", 1e9)
