"""The coordinator's state machine with simulated members: dialogues word by word, and random
deaths, doubles and take-overs.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acpfs.training.coordinator.commands import AskWitness, Command, Finish, Record, Send
from acpfs.training.coordinator.election import Ballot
from acpfs.training.coordinator.limits import Limits
from acpfs.training.coordinator.phases import Phases, State
from acpfs.training.messages import (
    ExitStatus,
    FromCoordinator,
    FromMember,
    Gate,
    Goodbye,
    Leave,
    Phase,
    Publish,
    Refused,
    Save,
    Settle,
    Settled,
    Stop,
    Trouble,
    TroubleKind,
)
from tests.training.simulated_member import PAIRS, SimulatedMember, job

clause = pytest.mark.clause
LIMITS = Limits(settle_down_s=0.2)


@dataclass
class Desk:
    """A coordinator, members, and what is on the way between them: in order for each member, in any
    order between members.
    """

    members: list[SimulatedMember]
    phases: Phases = field(default_factory=lambda: Phases("job", LIMITS))
    now: float = 100.0
    term: int = 1
    mine: bool | None = True
    """What the witness answers."""
    dead: set[int] = field(default_factory=set)
    asked: list[AskWitness] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    finished: bool = False
    down: dict[int, deque[tuple[int, int, FromCoordinator]]] = field(default_factory=dict)
    up: dict[int, deque[tuple[int, FromMember]]] = field(default_factory=dict)
    ballots: dict[int, Ballot] = field(default_factory=dict)

    def begin(self) -> Desk:
        self.do(self.phases.take_over(self.term, self.now))
        for member in self.members:
            self.do(self.phases.arrived(member.rank, 0, member.hello(), self.now))
            self.ballots[member.rank] = Ballot()
        self.drain()
        assert all(member.protected for member in self.members)
        return self

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                for rank in command.ranks:
                    self.down.setdefault(rank, deque()).append(
                        (self.phases.term, self.phases.generation, command.message)
                    )
            elif isinstance(command, AskWitness):
                self.asked.append(command)
            elif isinstance(command, Record):
                self.records.append(command)
            elif isinstance(command, Finish):
                self.finished = True

    def waiting(self) -> list[tuple[str, int]]:
        """What could happen next, but for time and deaths."""
        found = [
            ("down", rank) for rank, queue in self.down.items() if queue and rank not in self.dead
        ]
        found += [("up", rank) for rank, queue in self.up.items() if queue]
        return found + [("witness", 0) for _ in self.asked]

    def let(self, what: str, rank: int, *, doubled: bool = False) -> None:
        """One of these happens."""
        if what == "witness":
            self.asked.pop()
            self.do(self.phases.claimed(self.mine, self.now))
        elif what == "up":
            generation, message = self.up[rank].popleft()
            for _ in range(1 + doubled):
                self.do(self.phases.arrived(rank, generation, message, self.now))
        else:
            term, generation, order = self.down[rank].popleft()
            if self.ballots[rank].hears(term, term):
                self.say(rank, *self.members[rank].obey(order, generation))

    def say(self, rank: int, *messages: FromMember) -> None:
        if rank not in self.dead:
            self.up.setdefault(rank, deque()).extend(
                (self.members[rank].generation, message) for message in messages
            )

    def drain(self) -> None:
        while waiting := self.waiting():
            self.let(*waiting[0])

    def kill(self, rank: int) -> None:
        """Its connection ends behind what it had said."""
        self.dead.add(rank)
        self.down.pop(rank, None)
        for generation, message in self.up.pop(rank, ()):
            self.do(self.phases.arrived(rank, generation, message, self.now))
        self.do(self.phases.lose(rank, "killed", self.now))

    def later(self, seconds: float) -> None:
        """Time passes; who lives and has not left beats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1, end)
            for member in self.members:
                if member.rank not in self.dead and member.left is None:
                    self.do(
                        self.phases.arrived(member.rank, member.generation, member.beat(), self.now)
                    )
            self.do(self.phases.tick(self.now))

    def end(self) -> None:
        """Everything that is on the way arrives, and time passes, until nothing more happens."""
        for _ in range(8):
            self.drain()
            self.later(1)
            self.drain()
            for member in self.members:
                if member.left is not None and member.rank not in self.dead:
                    self.kill(member.rank)

    def orders(self, rank: int) -> list[str]:
        return [type(message).__name__ for message in self.members[rank].told]

    @property
    def published(self) -> list[Publish]:
        return list(self.members[0].disk.values())


@clause("T16")
def test_a_death_is_a_dialogue_that_ends_with_a_published_gasp() -> None:
    desk = Desk(job())
    desk.members[0].phase = Phase.READY
    desk.members[3].phase = Phase.READY
    desk.members[2].done = 6
    desk.begin()
    desk.kill(1)
    desk.end()
    assert desk.orders(0) == ["Protected", "Stop", "Settle", "Save", "Publish", "Leave"]
    assert desk.orders(2) == ["Protected", "Stop", "Settle", "Save", "Leave"]
    assert desk.orders(3) == ["Protected", "Stop", "Settle", "Save", "Leave"]
    (publish,) = desk.published
    assert (publish.manifest.step, publish.manifest.lost, publish.name, publish.directory) == (
        6,
        (1,),
        "step-6",
        "step-6.gasp-job-1.tmp",
    )
    assert publish.manifest.cover == {"opt0": 0, "opt1": 2}
    assert publish.manifest.digests == {"opt0": "opt0@6", "opt1": "opt1@6"}
    assert len(publish.manifest.files) == 2
    left = desk.members[0].left
    assert left is not None
    assert (left.status, left.gasp) == (ExitStatus.SAVED, "step-6")
    assert desk.finished
    assert desk.records[0].fields["marks"] == {1: ""}


def test_signs_that_come_within_settle_down_are_one_fault() -> None:
    desk = Desk(job(world=8)).begin()
    desk.kill(0)
    desk.kill(3)
    desk.end()
    assert desk.members[1].told.count(Stop((0, 3))) == 1
    assert desk.published[0].manifest.generation == 1


@clause("T17")
@pytest.mark.parametrize("order", [Stop, Settle, Save, Publish])
def test_a_second_fault_goes_back_to_stopping(order: type) -> None:
    desk = Desk(job(holders={"all": (0, 1, 2, 3)})).begin()
    desk.kill(3)
    desk.later(0.2)
    while not any(isinstance(message, order) for message in desk.members[0].told):
        desk.let(*desk.waiting()[0])
    if order in (Save, Publish):
        desk.members[0].disk.clear()  # it had not come so far
        desk.up.pop(0, None)
    desk.kill(0)
    desk.end()
    (publish,) = desk.published
    assert (publish.manifest.generation, publish.manifest.lost) == (2, (0, 3))
    assert publish.directory == "step-5.gasp-job-2.tmp"


def test_the_death_of_a_rank_that_writes_nothing_does_not_begin_the_save_again() -> None:
    desk = Desk(job(holders={"all": (0, 1, 2, 3)})).begin()
    desk.kill(3)
    desk.later(0.2)
    while not any(isinstance(message, Save) for message in desk.members[2].told):
        desk.let(*desk.waiting()[0])
    desk.kill(2)
    desk.end()
    (publish,) = desk.published
    assert (publish.manifest.generation, publish.manifest.lost) == (1, (2, 3))


@clause("T14")
def test_without_a_cover_nothing_is_saved_and_the_status_says_so() -> None:
    desk = Desk(job()).begin()
    desk.kill(0)
    desk.kill(1)
    desk.end()
    left = desk.members[2].left
    assert isinstance(left, Leave)
    assert (left.status, left.text) == (ExitStatus.NOT_SAVED, "no survivor can write opt0")
    assert desk.published == []


def test_before_the_first_update_nothing_is_saved() -> None:
    members = job()
    for member in members:
        member.done = 0
    desk = Desk(members).begin()
    desk.kill(0)
    desk.end()
    assert desk.published == []
    assert (left := desk.members[1].left) is not None
    assert "nothing is lost" in left.text


@clause("T13")
def test_ranks_that_do_not_agree_are_refused_and_told_why() -> None:
    members = job()
    members[1] = SimulatedMember(1, 4, {"opt0": (0, 1), "opt1": (1, 2, 3)})
    desk = Desk(members)
    with pytest.raises(AssertionError):
        desk.begin()
    assert all(isinstance(member.told[-1], Refused) for member in members)
    assert all(member.left is None for member in members), (
        "whether training goes on is its program's business"
    )


@clause("T18")
def test_a_silent_member_is_lost_after_three_beats_and_told_so_when_it_speaks() -> None:
    desk = Desk(job()).begin()
    desk.dead.add(1)  # stopped, with its connection open
    desk.later(5)
    assert desk.phases.state is State.RUNNING
    desk.later(3)
    desk.end()
    assert desk.published[0].manifest.lost == (1,)
    desk.dead.clear()
    desk.phases = Phases("job", LIMITS)
    desk = Desk(job()).begin()
    desk.do(desk.phases.lose(1, "no network", desk.now))
    desk.say(1, desk.members[1].beat())
    desk.end()
    assert [member.left.status for member in desk.members if member.left] == [
        ExitStatus.SAVED,
        ExitStatus.TAKEN_FOR_LOST,
        ExitStatus.SAVED,
        ExitStatus.SAVED,
    ]


@clause("T152")
def test_a_silent_member_for_which_its_node_vouches_is_lost_when_nobody_does_any_more() -> None:
    desk = Desk(job()).begin()
    desk.dead.add(1)
    for _ in range(50):
        desk.phases.vouched([1], desk.now)
        desk.later(1)
    assert desk.phases.state is State.RUNNING
    assert (desk.phases.quiet(desk.now), desk.phases.heard(desk.now)) == (
        [1],
        frozenset({0, 2, 3}),
    )  # it could not vote
    desk.later(LIMITS.silent_s + 1)  # the network to its node is cut, or it is stopped
    assert 1 in desk.phases.lost


@clause("T152")
@pytest.mark.parametrize("copies", [1, 2])
def test_one_that_does_not_park_and_works_is_waited_for_where_nobody_else_has_what_it_has(
    copies: int,
) -> None:
    holders = {"a": (0, 1), "b": (2, 3)} if copies == 1 else {"all": (0, 1, 2, 3)}
    desk = Desk(job(holders=holders)).begin()
    desk.kill(0)
    desk.later(0.2)
    desk.down[1].clear()  # its interpreter is held: it hears nothing, and says nothing
    desk.dead.add(1)
    desk.drain()
    for _ in range(int(LIMITS.stuck_s) + 2):
        desk.phases.vouched([1], desk.now)
        desk.later(1)
    assert (1 in desk.phases.lost) is (copies == 2)
    if copies == 1:
        desk.later(LIMITS.silent_s + LIMITS.beat_s + 1)
        assert 1 in desk.phases.lost  # nobody vouches


@clause("T18")
def test_words_of_others_do_not_put_off_the_look_for_who_is_silent() -> None:
    """The server calls `tick` when `wake_at` has come; of many ranks somebody beats in each
    moment.
    """
    desk = Desk(job()).begin()
    looks = 0
    seconds = LIMITS.silent_s + 2
    for _ in range(int(10 * seconds)):
        desk.now += 0.1
        for rank in (0, 2, 3):
            desk.do(desk.phases.arrived(rank, 0, desk.members[rank].beat(), desk.now))
        if desk.now >= desk.phases.wake_at:
            looks += 1
            desk.do(desk.phases.tick(desk.now))
    assert list(desk.phases.lost) == [1]
    assert looks <= 2 * seconds / LIMITS.beat_s + 1, "nor does the coordinator look all the time"


@clause("T156")
@pytest.mark.parametrize("copies", [1, 2])
def test_a_saver_that_says_nothing_is_waited_for_only_where_nobody_else_has_what_it_has(
    copies: int,
) -> None:
    """Its node vouches for it all the time: it waits for a storage, which may hang."""
    holders = {"a": (0, 1), "b": (2, 3)} if copies == 1 else {"all": (0, 1, 2, 3)}
    desk = Desk(job(holders=holders)).begin()
    desk.kill(0)
    desk.later(0.2)
    while desk.phases.state is not State.SAVING:
        desk.let(*next(one for one in desk.waiting()))
    desk.down[1].clear()
    desk.dead.add(1)
    desk.drain()
    for _ in range(int(LIMITS.stuck_s) + 2):
        assert 1 not in desk.phases.lost
        desk.phases.vouched([1], desk.now)
        desk.later(1)
        if 1 in desk.phases.lost:
            break
    assert (1 in desk.phases.lost) is (copies == 2)
    if copies == 2:
        desk.end()
        assert desk.published[0].manifest.lost == (0, 1)


def test_who_registered_first_may_wait_long_for_the_others() -> None:
    desk = Desk(job())
    desk.do(desk.phases.take_over(1, desk.now))
    for member in desk.members:
        desk.do(desk.phases.arrived(member.rank, 0, member.hello(), desk.now))
        for _ in range(20):
            desk.now += 1
            desk.do(desk.phases.tick(desk.now))
            if member.rank == 3:
                break
    assert desk.phases.state is State.RUNNING
    assert desk.phases.live == (0, 1, 2, 3)


def test_a_coordinator_that_stood_still_takes_nobody_for_silent() -> None:
    desk = Desk(job()).begin()
    desk.now += 1000
    desk.do(desk.phases.tick(desk.now))
    assert desk.phases.live == (0, 1, 2, 3)


@clause("T18")
def test_a_rank_that_does_not_park_is_lost() -> None:
    desk = Desk(job(holders={"all": (0, 1, 2, 3)})).begin()
    desk.kill(0)
    desk.later(0.2)
    desk.down[1].clear()  # its main thread hangs; its member beats
    desk.drain()
    assert desk.phases.state is State.STOPPING
    desk.later(LIMITS.stuck_s)
    desk.end()
    assert desk.published[0].manifest.lost == (0, 1)


def test_trouble_with_a_collective_stops_all_and_loses_nobody() -> None:
    desk = Desk(job()).begin()
    desk.say(2, Trouble(TroubleKind.COLLECTIVE, "connection reset"))
    desk.end()
    assert desk.published[0].manifest.lost == ()


@clause("T17")
def test_a_rank_that_cannot_write_is_tried_twice_and_then_another() -> None:
    desk = Desk(job(holders={"all": (0, 1, 2, 3)})).begin()
    desk.kill(3)
    for _ in range(60):
        desk.later(0.2)
        for what, rank in desk.waiting():
            if (
                what == "down"
                and rank == 0
                and isinstance(desk.down[0][0][2], Save)
                and 0 in desk.down[0][0][2].savers
            ):
                desk.down[0].popleft()
                desk.say(0, Trouble(TroubleKind.SAVE, "no space left"))
            else:
                desk.let(what, rank)
    (publish,) = desk.published
    assert publish.manifest.cover == {"all": 1}
    assert publish.manifest.generation == 3
    assert desk.phases.state is State.LEAVING


def test_when_nobody_can_write_the_job_ends() -> None:
    desk = Desk(job(holders={"all": (0, 1, 2, 3)})).begin()
    desk.kill(3)
    for _ in range(200):
        desk.later(0.2)
        for what, rank in desk.waiting():
            if (
                what == "down"
                and isinstance(save := desk.down[rank][0][2], Save)
                and rank in save.savers
            ):
                desk.down[rank].popleft()
                desk.say(rank, Trouble(TroubleKind.SAVE, "no space left"))
            else:
                desk.let(what, rank)
    assert desk.published == []
    assert (left := desk.members[1].left) is not None
    assert (left.status, left.text) == (ExitStatus.NOT_SAVED, "nobody could save: no space left")


def test_leaving_in_order_is_no_fault() -> None:
    desk = Desk(job()).begin()
    for member in desk.members:
        desk.say(member.rank, Goodbye())
        desk.drain()
        desk.kill(member.rank)
    assert desk.finished
    assert desk.records == []


@clause("T178")
def test_a_rank_in_which_acpfs_has_failed_is_named_and_not_waited_for() -> None:
    desk = Desk(job(holders={"all": (0, 1, 2, 3)})).begin()
    desk.say(1, Goodbye(why="KeyError: 1"))
    desk.drain()
    assert desk.phases.unprotected == {1: "KeyError: 1"}
    desk.kill(1)
    assert not desk.phases.lost


@clause("T15")
def test_copies_that_differ_are_told_in_the_manifest() -> None:
    desk = Desk(job(holders={"all": (0, 1, 2, 3)})).begin()
    desk.kill(3)
    desk.later(0.2)
    while desk.phases.state is not State.SETTLING:
        desk.let(*desk.waiting()[0])
    for rank, digest in enumerate("xyy"):
        desk.down[rank].clear()
        desk.say(rank, Settled(5, {"all": digest}))
    desk.end()
    (publish,) = desk.published
    assert publish.manifest.differing == {"all": {0: "x", 1: "y", 2: "y"}}
    assert publish.manifest.cover == {"all": 1}


@clause("T19")
@pytest.mark.parametrize(
    ("survivors", "mine", "witness", "saved"),
    [
        ((0, 1, 2), True, True, True),
        ((0, 1, 2), None, True, True),
        ((0, 1, 2), False, True, False),
        ((0, 1), True, True, True),
        ((0, 1), None, True, False),
        ((0, 1), False, True, False),
        ((0, 1, 2), None, False, True),
        ((0, 1), None, False, False),
    ],
)
def test_a_side_without_majority_saves_only_with_the_claim(
    survivors: tuple[int, ...], mine: bool | None, witness: bool, saved: bool
) -> None:
    desk = Desk(
        job(holders={"all": (0, 1, 2, 3)}, ranks_per_node=2),
        Phases("job", LIMITS, witness=witness),
        mine=mine,
    ).begin()
    for rank in range(4):
        if rank not in survivors:
            desk.kill(rank)
    desk.end()
    assert bool(desk.published) == saved
    assert (left := desk.members[0].left) is not None
    assert left.status == (ExitStatus.SAVED if saved else ExitStatus.OTHER_SIDE)


@clause("T64")
@pytest.mark.parametrize(
    ("die", "publisher", "elsewhere"), [((0,), 1, ()), ((1, 0), 2, ("node0",))]
)
def test_who_publishes_again_is_on_the_same_node_if_it_can(
    die: tuple[int, ...], publisher: int, elsewhere: tuple[str, ...]
) -> None:
    desk = Desk(job(holders={"all": (0, 2)}, ranks_per_node=2)).begin()
    desk.kill(3)
    desk.later(0.2)
    while not any(isinstance(message, Publish) for message in desk.members[0].told):
        desk.let(*desk.waiting()[0])
    desk.members[0].disk.clear()  # nobody knows whether it had come so far
    desk.up.pop(0, None)
    for rank in die:
        desk.kill(rank)
    desk.end()
    (order,) = desk.published
    assert (order.elsewhere, order.manifest.cover) == (elsewhere, {"all": 2})
    assert [member.rank for member in desk.members if order in member.told] == [publisher]
    assert desk.members[2].left is not None
    assert desk.members[2].left.status == ExitStatus.SAVED


def test_whoever_takes_over_while_ranks_leave_with_a_gasp_says_so_to_the_others() -> None:
    desk = Desk(job()).begin()
    desk.kill(1)
    desk.later(0.2)
    while desk.phases.state is not State.LEAVING:
        desk.let(*desk.waiting()[0])
    outcome = desk.down[2][-1][2]
    assert isinstance(outcome, Leave)
    standby = Phases("job", LIMITS)
    for member in desk.members:
        standby.arrived(member.rank, 0, member.hello(), desk.now)
    standby.ended(outcome)
    for rank in (0, 1):  # these have left; nobody who lives has opt0
        standby.lose(rank, "its connection ended", desk.now)
    sends = [command for command in standby.take_over(2, desk.now, 1) if isinstance(command, Send)]
    assert sends == [Send((2, 3), Leave(ExitStatus.SAVED, outcome.text, "step-5"))]


LAYOUTS = [
    (Gate.EXPLICIT, PAIRS),
    (Gate.NONE, {"all": (0, 1, 2, 3)}),
    (Gate.IMPLICIT, {"a": (0, 1, 2), "b": (1, 2, 3)}),
]


@clause("T12", "T17", "T20")
@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(LAYOUTS), st.integers(1, 3), st.booleans())
def test_whatever_dies_and_whoever_takes_over_one_whole_gasp_at_one_step(
    seed: int, layout: tuple[Gate, dict[str, tuple[int, ...]]], deaths: int, takes_over: bool
) -> None:
    chance = random.Random(seed)
    members = job(holders=layout[1], gate=layout[0])
    passed = layout[0] is not Gate.NONE and chance.random() < 0.5
    for member in members:  # anything that the gate allows; see test_decision for all of it
        member.phase = chance.choice(
            [Phase.READY, Phase.UPDATING] if passed else [Phase.COMPUTING, Phase.READY]
        )
        member.done += passed and member.phase is Phase.UPDATING and chance.random() < 0.5
        member.phase = Phase.COMPUTING if member.done == 6 else member.phase
    done_by_all = [member.done for member in members]
    desk = Desk(members).begin()
    victims = chance.sample(range(4), deaths)
    desk.kill(victims.pop())
    for _ in range(400):
        waiting = desk.waiting()
        dice = chance.random()
        if victims and dice < 0.06:
            desk.kill(victims.pop())
        elif takes_over and dice < 0.1:
            takes_over = False
            take_over(desk)
        elif waiting and dice < 0.9:
            desk.let(*chance.choice(waiting), doubled=chance.random() < 0.1)
        else:
            desk.later(0.3)
    desk.end()
    alive = [
        member
        for member in members
        if member.rank not in set(victims) | desk.dead or member.left is not None
    ]
    assert all(member.left is not None for member in alive)
    assert len({publish.manifest.step for publish in desk.published}) <= 1
    for publish in desk.published:
        assert all(abs(done - publish.manifest.step) <= 1 for done in done_by_all)
        assert publish.manifest.cover.keys() == layout[1].keys()
        assert all(
            members[rank].done == publish.manifest.step for rank in publish.manifest.cover.values()
        )
    lost = set(range(4)) - {member.rank for member in alive}
    if alive and all(set(ranks) - lost for ranks in layout[1].values()):
        assert desk.published, "a cover was left"


def take_over(desk: Desk) -> None:
    """The active coordinator is gone with all that was on the way to it; a standby that knows who
    is dead takes over.
    """
    standby = Phases("job", LIMITS)
    for member in desk.members:
        standby.arrived(member.rank, 0, member.hello(), desk.now)
    for rank in sorted(desk.dead):
        standby.lose(rank, "killed", desk.now)
    desk.up.clear()
    desk.down.clear()
    desk.asked.clear()
    desk.term += 1
    desk.phases = standby
    newest = max(
        (member.generation for member in desk.members if member.rank not in desk.dead), default=0
    )
    desk.do(standby.take_over(desk.term, desk.now, newest))
