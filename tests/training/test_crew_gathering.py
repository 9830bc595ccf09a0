"""How long those who live wait for the processes that are to take the places of the lost."""

from __future__ import annotations

import pytest

from acpfs.training.coordinator.launchers import AWAY_S, VACANT_S
from acpfs.training.coordinator.limits import Limits
from acpfs.training.coordinator.states import CrewState
from acpfs.training.memory_left import KEPT_S
from acpfs.training.messages import Beat, Goodbye, Phase
from tests.training.test_crew import NOW, Ship, run, settle

pytestmark = pytest.mark.clause("T77", "T123")
LATER_S = 500.0


def passes(ship: Ship, until: float) -> None:
    """Time; those who live say so."""
    while ship.at(CrewState.GATHERING) and ship.now < until:
        ship.now += 1
        for process in ship.processes.values():
            if not process.dead:
                process.say(Beat(1, 1, Phase.COMPUTING, parked=True))
        settle(ship)
        ship.do(ship.crew.tick(ship.now))


@pytest.mark.parametrize("how", ["is lost", "leaves"])
def test_the_time_counts_from_the_rank_that_went_last(how: str) -> None:
    ship = Ship(3, faults=2).begin()
    run(ship)
    ship.let("kill", 0)
    ship.let("bury", 0)
    settle(ship)
    passes(ship, NOW + LATER_S)
    if how == "is lost":
        ship.let("kill", 1)
        ship.let("bury", 0)
    else:
        ship.processes[1].say(Goodbye())
        ship.let("up", 1)
        ship.processes[1].dead = True  # its process ends behind that
    settle(ship)
    assert ship.at(CrewState.GATHERING)
    passes(ship, NOW + 10 * LATER_S)
    assert ship.now == NOW + LATER_S + Limits().replace_s
    assert "ranks [0, 1]" in ship.crew.status


def test_launchers_give_a_node_up_first_and_have_time_to_start_its_ranks() -> None:
    """Else a job would end under a launcher that has just taken the place."""
    assert Limits().replace_s >= AWAY_S + VACANT_S + Limits().building_s


@pytest.mark.clause("T159")
def test_what_a_process_has_left_is_kept_as_long_as_all_wait() -> None:
    assert Limits().replace_s <= KEPT_S
