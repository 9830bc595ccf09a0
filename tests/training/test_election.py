"""Terms and votes under lost, doubled and reordered messages and splits: never two active in one
term, no member obeys a lower one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acpfs.training.coordinator.election import FIRST_TERM, Ballot, Standing, next_to_stand
from acpfs.training.coordinator.witness import Claimant, claim

clause = pytest.mark.clause


@dataclass
class World:
    """Three coordinators, some members, and a network that does what it likes."""

    members: int
    chance: random.Random
    standings: list[Standing] = field(
        default_factory=lambda: [Standing(number) for number in range(3)]
    )
    ballots: list[Ballot] = field(default_factory=list)
    on_the_way: list[Callable[[], None]] = field(default_factory=list)
    won: dict[int, set[int]] = field(default_factory=dict)
    """Term → who was active in it."""
    obeyed: dict[int, list[int]] = field(default_factory=dict)
    """Member → terms of what it obeyed, in order."""
    owner: int | None = None
    """Whose the claim on the job is."""
    halves: int = 0
    """How many won with it."""

    def __post_init__(self) -> None:
        self.ballots = [Ballot() for _ in range(self.members)]
        self.standings[0].begin()
        self.won[FIRST_TERM] = {0}

    def post(self, action: Callable[[], None]) -> None:
        """On its way: lost, doubled, and in any order."""
        self.on_the_way += [action] * self.chance.choice([0, 1, 1, 1, 2])

    def command(self, number: int) -> None:
        """A coordinator that believes to be active says so to everybody that it reaches."""
        standing = self.standings[number]
        if standing.commands:
            term = standing.term
            for member in range(self.members):
                self.post(lambda member=member: self.hear(member, term, number))  # type: ignore[misc]
            for other in self.standings:
                self.post(lambda other=other: other.hears(term, number) and None)  # type: ignore[misc]

    def hear(self, member: int, term: int, number: int) -> None:
        if self.ballots[member].hears(term, number):
            self.obeyed.setdefault(member, []).append(term)

    def stand(self, number: int) -> None:
        standing = self.standings[number]
        if not standing.commands:
            term = standing.ask()
            for member in range(self.members):
                self.post(lambda member=member: self.vote(member, number, term))  # type: ignore[misc]

    def vote(self, member: int, number: int, term: int) -> None:
        granted = self.ballots[member].vote(term)
        self.post(lambda: self.count(member, number, term, granted))

    def count(self, member: int, number: int, term: int, granted: bool) -> None:
        if self.standings[number].voted(member, term, granted, 0, self.members):
            self.won.setdefault(term, set()).add(number)

    def claim(self, number: int) -> None:
        """A standby with half of the votes asks the witness, whose answer is late."""
        if (term := self.standings[number].half_of(self.members)) is not None:
            self.owner = number if self.owner is None else self.owner
            if self.owner == number:
                self.post(lambda: self.claimed(number, term))

    def claimed(self, number: int, term: int) -> None:
        if self.standings[number].claimed(term):
            self.won.setdefault(term, set()).add(number)
            self.halves += 1

    def cut(self) -> None:
        member = self.chance.randrange(self.members)
        number = self.chance.randrange(3)
        self.ballots[member].disconnected(number)


@clause("T21")
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 5))
def test_never_two_active_in_a_term_and_no_lower_term_obeyed(seed: int, members: int) -> None:
    world = World(members, random.Random(seed))
    for _ in range(150):
        dice = world.chance.random()
        world.claim(world.chance.randrange(3))
        if dice < 0.55 and world.on_the_way:
            world.on_the_way.pop(world.chance.randrange(len(world.on_the_way)))()
        elif dice < 0.7:
            world.command(world.chance.randrange(3))
        elif dice < 0.85:
            world.cut()
        else:
            world.stand(world.chance.randrange(3))
    assert all(len(active) == 1 for active in world.won.values())
    assert all(terms == sorted(terms) for terms in world.obeyed.values())
    assert all(term in world.won for terms in world.obeyed.values() for term in terms)


@clause("T63")
def test_half_of_the_votes_wins_with_the_claim_and_only_in_its_term() -> None:
    standing = Standing(1)
    term = standing.ask()
    assert standing.half_of(4) is None
    assert not standing.voted(2, term, granted=True, generation=0, world=4)
    assert standing.half_of(4) is None, "one of four"
    assert not standing.voted(3, term, granted=True, generation=0, world=4)
    assert standing.half_of(4) == term
    again = standing.ask()
    assert not standing.claimed(term), "votes for another term were asked for meanwhile"
    assert standing.claimed(again)
    assert standing.commands
    assert standing.half_of(4) is None


@clause("T21")
def test_a_standby_takes_over_when_more_than_half_have_lost_the_active_one() -> None:
    ballots = [Ballot() for _ in range(4)]
    standby = Standing(1)
    for ballot in ballots:
        assert ballot.hears(FIRST_TERM, 0)
    standby.hears(FIRST_TERM, 0)
    for ballot in ballots[:2]:
        ballot.disconnected(0)
    term = standby.ask()
    assert [ballot.vote(term) for ballot in ballots] == [True, True, False, False]
    assert not any(standby.voted(rank, term, rank < 2, 0, 4) for rank in range(4)), (
        "two of four are no majority"
    )
    for ballot in ballots[2:]:
        ballot.disconnected(0)
    again = standby.ask()
    assert [
        standby.voted(rank, again, ballot.vote(again), 3, 4) for rank, ballot in enumerate(ballots)
    ] == [False, False, True, False]
    assert (standby.commands, standby.generation) == (True, 3)
    assert not ballots[0].hears(FIRST_TERM, 0), "the old one is not obeyed any more"
    assert ballots[0].hears(again, 1)


def test_an_active_coordinator_that_hears_of_a_higher_term_stands_back() -> None:
    standing = Standing(0)
    standing.begin()
    assert not standing.hears(FIRST_TERM, 1)
    assert standing.commands
    assert standing.hears(FIRST_TERM + 1, None)
    assert not standing.commands


@clause("T50")
def test_a_standby_that_asked_in_vain_hears_the_active_one_again() -> None:
    """One that was silent for a moment. The standby asked for ever higher terms, for as long as the
    job lived, and each vote that it got by the way deposed whoever commanded.
    """
    standby = Standing(1)
    standby.hears(FIRST_TERM, 0)
    term = standby.ask()
    assert not standby.voted(2, term, granted=False, generation=0, world=4)
    standby.hears(FIRST_TERM, 0)
    assert (standby.active, standby.term) == (0, term)
    assert standby.ask() == term + 1, "no term is asked for twice"
    standby.hears(FIRST_TERM, 0)
    assert standby.active == 0


def test_a_standby_that_somebody_voted_for_does_not_withdraw() -> None:
    """Who voted obeys no lower term any more."""
    standby = Standing(1)
    standby.hears(FIRST_TERM, 0)
    term = standby.ask()
    assert not standby.voted(2, term, granted=True, generation=0, world=4)
    standby.hears(FIRST_TERM, 0)
    assert standby.active is None
    assert not standby.voted(3, term, granted=True, generation=0, world=4)
    assert standby.voted(1, term, granted=True, generation=0, world=4)


def test_a_standby_hears_no_active_one_that_another_has_followed() -> None:
    standby = Standing(2)
    standby.hears(FIRST_TERM, 0)
    standby.hears(FIRST_TERM + 1, 1)
    standby.ask()
    standby.hears(FIRST_TERM, 0)
    assert standby.active is None
    standby.hears(FIRST_TERM + 1, 1)
    assert standby.active == 1


def test_standbys_ask_one_after_the_other() -> None:
    assert [next_to_stand(number, {0: "", 1: "", 2: ""}) for number in range(3)] == [0, 1, 2]


# -- the witness


@clause("T19")
def test_a_claim_belongs_to_the_side_that_was_first_and_stays_its(tmp_path: Path) -> None:
    one = Claimant(0, 1, majority=False)
    other = Claimant(1, 2, majority=False)
    assert claim(tmp_path, 0, one)
    assert claim(tmp_path, 0, one), "asked again because the answer was lost"
    assert not claim(tmp_path, 0, other)
    assert claim(tmp_path, 1, other), "another generation"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claim-0", "claim-1"]


@clause("T19")
def test_a_majority_goes_on_where_an_earlier_majority_began(tmp_path: Path) -> None:
    assert claim(tmp_path, 0, Claimant(0, 1, majority=True))
    assert claim(tmp_path, 0, Claimant(1, 2, majority=True))
    assert not claim(tmp_path, 0, Claimant(2, 3, majority=False))
    assert not claim(tmp_path, 0, Claimant(2, 1, majority=True))


@clause("T19")
def test_an_owner_that_has_lost_its_majority_keeps_its_claim(tmp_path: Path) -> None:
    assert claim(tmp_path, 0, Claimant(0, 1, majority=True))
    assert claim(tmp_path, 0, Claimant(0, 1, majority=False))
    assert not claim(tmp_path, 0, Claimant(1, 2, majority=True)), "it may save by now"
    assert len(list((tmp_path / "claim-0").iterdir())) == 1


@clause("T63")
def test_an_owner_keeps_its_claim_in_a_later_term(tmp_path: Path) -> None:
    """The answer to its first one was late, and it asked for votes again meanwhile."""
    assert claim(tmp_path, 0, Claimant(1, 2, majority=False))
    assert claim(tmp_path, 0, Claimant(1, 3, majority=False))
    assert not claim(tmp_path, 0, Claimant(1, 2, majority=False)), "an older one of its own is over"
    assert not claim(tmp_path, 0, Claimant(0, 4, majority=False))


def test_a_claim_in_a_directory_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        claim(tmp_path / "file", 0, Claimant(0, 1, majority=True))
