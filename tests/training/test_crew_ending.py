"""The end of a job whose ranks are replaced: who dies between the last step and the word that all is done."""

from __future__ import annotations

import pytest

from acpfs.training.coordinator.limits import Limits
from acpfs.training.coordinator.states import CrewState
from acpfs.training.messages import Goodbye
from tests.training.test_crew import Ship, run, settle

pytestmark = pytest.mark.clause("T77")


def all_done_but_one_killed() -> Ship:
    """All loops have ended, and rank 1 dies before it hears so; the others leave in order."""
    ship = Ship(3).begin()
    run(ship)
    for rank in range(3):
        ship.let("finish", rank)
        ship.let("up", rank)
    assert ship.at(CrewState.ENDING)
    ship.let("kill", 1)
    ship.let("bury", 0)
    for rank in (0, 2):
        ship.processes[rank].say(Goodbye())
        settle(ship)
    return ship


def test_who_comes_for_a_rank_that_was_killed_at_the_end_hears_that_all_is_done() -> None:
    """Without, it would wait for ranks that never come, and the job be a failed one."""
    ship = all_done_but_one_killed()
    assert not ship.over
    ship.now += Limits().leave_s + 1
    ship.do(ship.crew.tick(ship.now))
    assert not ship.over
    assert ship.crew.alone_s == Limits().missing_s
    ship.start(1)
    settle(ship)
    assert ship.processes[1].state == "over"
    assert not ship.over
    ship.processes[1].say(Goodbye())
    settle(ship)
    assert ship.over


def test_it_is_not_waited_for_without_end() -> None:
    ship = all_done_but_one_killed()
    ship.now += Limits().missing_s
    ship.do(ship.crew.tick(ship.now))
    assert ship.over
