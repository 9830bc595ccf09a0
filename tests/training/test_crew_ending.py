"""The end of a job whose ranks are replaced: who dies between the last step and the word that all
is done, coordinators as well.
"""

from __future__ import annotations

import pytest

from acpfs.training.coordinator.commands import Send
from acpfs.training.coordinator.crew import Crew
from acpfs.training.coordinator.limits import Limits
from acpfs.training.coordinator.states import CrewState
from acpfs.training.messages import (
    Done,
    ExitStatus,
    FromCoordinator,
    Goodbye,
    Leave,
    Protected,
    Stop,
)
from tests.training.test_crew import Ship, beats, run, settle

clause = pytest.mark.clause


def all_done() -> Ship:
    """All loops have ended, and nobody has heard so yet."""
    ship = Ship(3).begin()
    run(ship)
    for rank in range(3):
        ship.let("finish", rank)
        ship.let("up", rank)
    assert ship.at(CrewState.ENDING)
    return ship


def all_done_but_one_killed() -> Ship:
    """Rank 1 dies before it hears that all is done; the others leave in order."""
    ship = all_done()
    ship.let("kill", 1)
    ship.let("bury", 0)
    for rank in (0, 2):
        ship.processes[rank].say(Goodbye())
        settle(ship)
    return ship


@clause("T77")
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


@clause("T77")
def test_it_is_not_waited_for_without_end() -> None:
    ship = all_done_but_one_killed()
    ship.now += Limits().missing_s
    ship.do(ship.crew.tick(ship.now))
    assert ship.over


def standby_of(ship: Ship) -> Crew:
    """It has heard what all coordinators hear."""
    standby = Crew("job", Limits())
    beats(ship, standby, parked=False)
    return standby


def goes_on_with(ship: Ship, standby: Crew) -> None:
    """The one that commanded dies, and what it had said to ranks that live is lost."""
    for process in ship.processes.values():
        process.down.clear()
    ship.crew = standby
    ship.do(standby.take_over(2, ship.now))
    settle(ship)


def leaves(ship: Ship, standby: Crew, rank: int) -> None:
    """It has heard that all is done; the coordinator that said so does not hear it leave."""
    assert standby.arrived(rank, 0, Goodbye(all_done=True), ship.now) == []
    ship.processes[rank].dead = True


def says(standby: Crew) -> tuple[tuple[FromCoordinator, ...], float]:
    """To whom votes for it, and how long it stays for that."""
    return standby.last_words, standby.alone_s


@clause("T166")
def test_a_standby_learns_that_all_is_done_from_who_leaves_and_stays_for_who_died() -> None:
    ship = all_done()
    standby = standby_of(ship)
    standby.lose(1, "killed", ship.now)
    standby.arrived(0, 0, Goodbye(), ship.now)  # it may have left since its protection failed
    assert says(standby) == ((), Limits().replace_s)
    leaves(ship, standby, 2)
    assert says(standby) == ((Protected(), Done()), Limits().missing_s)


@clause("T166")
def test_who_takes_over_when_all_is_done_says_so() -> None:
    """Without, those who have left would be waited for."""
    ship = all_done()
    standby = standby_of(ship)
    leaves(ship, standby, 0)
    goes_on_with(ship, standby)
    assert [ship.processes[rank].state for rank in (1, 2)] == ["over", "over"]
    for rank in (1, 2):
        ship.processes[rank].say(Goodbye(all_done=True))
    settle(ship)
    assert ship.over


@clause("T166")
def test_who_has_taken_over_hears_later_that_all_is_done() -> None:
    ship = all_done()
    standby = standby_of(ship)
    standby.lose(1, "killed", ship.now)
    ship.processes[1].dead = True
    goes_on_with(ship, standby)
    assert ship.at(CrewState.GATHERING)
    ship.processes[0].say(Goodbye(all_done=True))
    settle(ship)
    assert ship.processes[2].state == "over"
    ship.start(1)
    settle(ship)
    assert ship.processes[1].state == "over"


@clause("T155")
def test_who_comes_while_nobody_commands_may_obey_who_does_then() -> None:
    ship = Ship(2)
    for rank in range(2):
        ship.start(rank)
        ship.let("up", rank)
    words = [
        command.message for command in ship.crew.take_over(2, ship.now) if isinstance(command, Send)
    ]
    assert words == [Protected(), Stop(())]


@clause("T77")
def test_that_one_rank_is_taken_for_lost_is_not_the_end_of_the_job() -> None:
    """All may die at once behind that, and be started again: a standby that took over waits for
    them.
    """
    standby = standby_of(Ship(2).begin())
    standby.ended(Leave(ExitStatus.TAKEN_FOR_LOST, "silent"))
    assert standby.alone_s == Limits().replace_s
    standby.ended(Leave(ExitStatus.NOT_SAVED, "update 2 failed 3 times"))
    assert standby.alone_s == Limits().leave_s
