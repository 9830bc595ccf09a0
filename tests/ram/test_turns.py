"""Whose turn it is: writers that compete get equally many bytes, and nobody starves.

The clock is the test's own.
"""

from __future__ import annotations

import random

import pytest

from acpfs.ram.waiting import LIVE_S, PURGE_S, Applicant, Purpose, Turns
from acpfs.types import Ino
from tests.rig.runtime import clock_of

pytestmark = pytest.mark.clause("S132")

MIB = 1 << 20
LEAD_MAX = 64 * MIB


def writer(pid: int) -> Applicant:
    return Applicant(Ino(2), Purpose.WRITE, pid)


def serve(turns: Turns) -> int:
    """The next one gets its room; who it was."""
    first = turns.first()
    assert first is not None
    turns.serve(first)
    return first.applicant.pid


def contend(turns: Turns, pids: list[int], total: int, size: int = MIB) -> dict[int, int]:
    """All of them want more as soon as they have got something; bytes that each got."""
    got = dict.fromkeys(pids, 0)
    for pid in pids:
        turns.add(writer(pid), size, LEAD_MAX)
    while sum(got.values()) < total:
        pid = serve(turns)
        got[pid] += size
        turns.add(writer(pid), size, LEAD_MAX)
    return got


def test_who_was_first_in_filling_ram_waits_until_the_others_have_as_much() -> None:
    turns = Turns(clock_of(lambda: 0.0))
    for pid in (1, 2, 3, 4):
        turns.had(writer(pid), MIB, LEAD_MAX)
    turns.had(writer(1), 24 * MIB, LEAD_MAX)
    got = contend(turns, [1, 2, 3, 4], 40 * MIB)
    assert got[1] <= 8 * MIB
    got[1] += 24 * MIB
    assert max(got.values()) < 2.5 * min(got.values())


def test_equal_writers_take_turns_whatever_the_size_of_their_requests() -> None:
    turns = Turns(clock_of(lambda: 0.0))
    for pid, size in ((1, MIB), (2, 8 * MIB)):
        for _ in range(2):
            turns.add(writer(pid), size, LEAD_MAX)
    got = {1: 0, 2: 0}
    for _ in range(200):
        first = turns.first()
        assert first is not None
        turns.serve(first)
        got[first.applicant.pid] += first.size
        turns.add(first.applicant, first.size, LEAD_MAX)
    assert abs(got[1] - got[2]) <= 16 * MIB


def test_new_writers_that_keep_coming_do_not_starve_one_that_had_much() -> None:
    turns = Turns(clock_of(lambda: 0.0))
    turns.had(writer(2), MIB, LEAD_MAX)
    turns.had(writer(1), 32 * MIB, LEAD_MAX)
    mine = turns.add(writer(1), MIB, LEAD_MAX)
    served = 0
    while mine in list(turns):
        served += 1
        assert served < 2000
        turns.add(writer(served + 2), MIB, LEAD_MAX)
        serve(turns)


def test_a_lead_of_more_than_the_budget_is_not_made_up_for() -> None:
    turns = Turns(clock_of(lambda: 0.0))
    turns.had(writer(2), MIB, LEAD_MAX)
    for _ in range(1000):
        turns.had(writer(1), 16 * MIB, LEAD_MAX)
    got = contend(turns, [1, 2], 4 * LEAD_MAX)
    assert got[2] - got[1] <= 2 * LEAD_MAX


def test_what_was_had_long_ago_is_forgotten() -> None:
    now = 0.0
    turns = Turns(clock_of(lambda: now))
    turns.had(writer(2), MIB, LEAD_MAX)
    turns.had(writer(1), 32 * MIB, LEAD_MAX)
    now += LIVE_S + PURGE_S
    got = contend(turns, [1, 2], 16 * MIB)
    assert abs(got[1] - got[2]) <= MIB


@pytest.mark.parametrize("seed", range(5))
def test_random_writers_get_the_same(seed: int) -> None:
    """Whatever they had before, as long as it was less than a budget, and whatever the sizes:
    within a few requests of the same sum.
    """
    chance = random.Random(seed)
    turns = Turns(clock_of(lambda: 0.0))
    pids = list(range(1, chance.randint(3, 8)))
    had = dict.fromkeys(pids, 0)
    for _ in range(50):
        pid = chance.choice(pids)
        size = chance.randint(1, MIB)
        turns.had(writer(pid), size, LEAD_MAX)
        had[pid] += size
    for pid in pids:
        turns.add(writer(pid), MIB, LEAD_MAX)
    for _ in range(400):
        pid = serve(turns)
        had[pid] += MIB
        turns.add(writer(pid), MIB, LEAD_MAX)
    assert max(had.values()) < 1.2 * min(had.values()), seed
