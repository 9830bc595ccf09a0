"""The coordinator of a job whose ranks are replaced, with simulated processes: every order of
events, and random ones.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from acpfs.training.coordinator.commands import Command, Finish, Record, Send
from acpfs.training.coordinator.crew import Crew
from acpfs.training.coordinator.limits import FAULTS_MAX, Limits
from acpfs.training.coordinator.states import CREW_TRANSITIONS, Berth, CrewState
from acpfs.training.messages import (
    Beat,
    Done,
    ExitStatus,
    Finished,
    FromCoordinator,
    FromMember,
    Gate,
    Goodbye,
    Hello,
    Leave,
    Phase,
    Protected,
    Resume,
    Running,
    Stop,
    Stopped,
    Trouble,
    TroubleKind,
)

clause = pytest.mark.clause
NOW = 100.0
IN_THE_LOOP = ("entered", "running", "failed", "finished")


@dataclass
class Process:
    """What a rank's process is to the coordinator.

    `failed`: it has met an error, and waits for STOP.
    """

    rank: int
    pid: int
    state: str = "parked"
    generation: int = 0
    done: int = 0
    dead: bool = False
    down: deque[tuple[int, FromCoordinator]] = field(default_factory=deque)
    up: deque[tuple[int, FromMember]] = field(default_factory=deque)

    def say(self, message: FromMember) -> None:
        self.up.append((self.generation, message))

    def obey(self, generation: int, order: FromCoordinator) -> None:
        if isinstance(order, Stop) and generation > self.generation:
            self.generation = generation
            self.state = "parked"
            self.say(Stopped(self.done, self.done, Phase.COMPUTING))
        elif isinstance(order, Resume) and generation >= self.generation:
            self.generation = generation
            self.state = "entered"
        elif isinstance(order, Done | Leave):
            self.state = "over" if isinstance(order, Done) else "sent away"


@dataclass
class Ship:
    """A coordinator, the processes, and what is on its way between them.

    `faults`: so many may still happen.
    """

    world: int
    faults: int = 0
    kind: TroubleKind = TroubleKind.ERROR
    """Of the failures among them."""
    crew: Crew = field(default_factory=lambda: Crew("job", Limits()))
    processes: dict[int, Process] = field(default_factory=dict)
    connected: dict[int, Process] = field(default_factory=dict)
    """Who said HELLO last."""
    gone: list[Process] = field(default_factory=list)
    """Killed, while what they had said is still on its way."""
    pids: int = 0
    now: float = NOW
    over: bool = False
    records: list[Record] = field(default_factory=list)

    def begin(self) -> Ship:
        self.do(self.crew.take_over(1, self.now))
        for rank in range(self.world):
            self.start(rank)
        return self

    def start(self, rank: int) -> None:
        self.pids += 1
        process = Process(rank, self.pids)
        self.processes[rank] = process
        process.say(Hello(rank, self.world, "node0", self.pids, 0, Gate.EXPLICIT, {}))

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Finish):
                self.over = True
            elif isinstance(command, Record):
                self.records.append(command)
            elif isinstance(command, Send) and not isinstance(command.message, Protected):
                if isinstance(command.message, Resume):
                    self.assert_all_wait()
                for rank in command.ranks:
                    self.connected[rank].down.append((self.crew.generation, command.message))

    def assert_all_wait(self) -> None:
        """A generation begins: nobody who lives is in a loop, so no two generations ever meet in a
        collective.
        """
        assert sorted(self.crew.live) == list(range(self.world))
        for process in self.connected.values():
            stops = any(isinstance(order, Stop) for _, order in process.down)
            assert process.dead or (process.state == "parked" and not stops), (
                f"rank {process.rank} is {process.state}"
            )

    def actions(self) -> list[tuple[str, int]]:
        """What could happen next."""
        found = [("hear", number) for number, process in enumerate(self.gone) if process.up] or [
            ("bury", number) for number, _ in enumerate(self.gone)
        ]
        for rank, process in self.processes.items():
            if process.dead:
                found += [("start", rank)]
                continue
            found += [("up", rank)] * bool(process.up) + [("down", rank)] * bool(process.down)
            if process.state == "entered" and all(
                other.generation == process.generation for other in self.in_loops()
            ):
                found.append(("run", rank))
            if process.state == "running":
                found.append(("finish", rank))
            if self.faults and process.state != "over":
                found.append(("kill", rank))
                found += [("fail", rank)] * (process.state in ("entered", "running"))
        return found

    def in_loops(self) -> list[Process]:
        """For a step all ranks have to be there: one that is missing leaves the others in their
        collectives.
        """
        there = [
            process
            for process in self.processes.values()
            if not process.dead and process.state in IN_THE_LOOP
        ]
        return there if len(there) == self.world else [Process(-1, 0, generation=-1)]

    def let(self, what: str, which: int) -> None:
        if what in ("hear", "bury"):
            process = self.gone[which]
            rank = process.rank
            if process.rank in self.connected and self.connected[rank].pid > process.pid:
                process.up.clear()  # the server hears nobody whose place another connection has
            if process.up:
                self.hear(process)
                return
            self.gone.pop(which)
            if self.connected.get(rank) is process:
                self.do(self.crew.lose(rank, "killed", self.now))
            return
        process = self.processes[which]
        if what == "up":
            self.hear(process)
        elif what == "down":
            process.obey(*process.down.popleft())
        elif what == "start":
            self.start(which)
        elif what == "run":
            process.state = "running"
            process.done = process.done + 1
            process.say(Running())
        elif what == "finish":
            process.state = "finished"
            process.say(Finished())
        else:
            self.faults -= 1
            if what == "fail":
                process.state = "failed"
                process.say(Trouble(self.kind, "boom"))
            else:
                process.dead = True
                process.state = "dead"
                process.down.clear()
                self.gone.append(process)

    def at(self, state: CrewState) -> bool:
        return self.crew.state is state

    def hear(self, process: Process) -> None:
        if isinstance(process.up[0][1], Hello):
            self.connected[process.rank] = process
        self.do(self.crew.arrived(process.rank, *process.up.popleft(), self.now))

    def key(self) -> str:
        """What tells two moments apart."""
        roster = self.crew._roster  # all of the state
        own = (
            self.crew.state,
            self.crew.generation,
            [roster[rank] for rank in range(self.world)],
            sorted(self.crew._left),
        )
        first = min((process.pid for process in self.processes.values()), default=0)
        there = [
            (rank, one.pid - first, one.state, one.generation, one.done, one.down, one.up)
            for rank, one in sorted(self.processes.items())
        ]
        return repr(
            (
                own,
                there,
                [(one.rank, one.pid - first, one.up) for one in self.gone],
                self.faults,
                self.over,
            )
        )

    def drain(self, chance: random.Random | None = None) -> None:
        """Let everything happen that does not need another fault."""
        self.faults = 0
        while actions := self.actions():
            self.let(*(chance.choice(actions) if chance else actions[0]))

    def assert_done(self) -> None:
        assert self.at(CrewState.ENDING), self.crew.state
        assert [process.state for process in self.processes.values()] == ["over"] * self.world


def walk(world: int, faults: int) -> int:
    """Every order of events; how many moments there are."""
    first = Ship(world, faults).begin()
    seen = {first.key()}
    left = [first]
    while left:
        ship = left.pop()
        actions = ship.actions()
        if not actions:
            ship.assert_done()
        for action in actions:
            after = copy.deepcopy(ship)
            after.let(*action)
            if (key := after.key()) not in seen:
                seen.add(key)
                left.append(after)
    return len(seen)


@clause("T75", "T76")
def test_every_order_of_events_with_two_ranks_and_a_fault_ends_in_order() -> None:
    assert walk(2, 1) > 500


@pytest.mark.long
@clause("T75", "T76")
def test_many_random_orders() -> None:
    for seed in range(5000):
        end_in_order(random.Random(seed), 2 + seed % 4)


@clause("T75", "T76")
@pytest.mark.parametrize("seed", range(60))
def test_random_orders_with_five_ranks(seed: int) -> None:
    end_in_order(random.Random(seed), 5)


def end_in_order(chance: random.Random, world: int) -> None:
    """Whatever dies and fails, and in which order all is heard."""
    ship = Ship(world, faults=chance.randrange(8)).begin()
    while ship.faults and (actions := ship.actions()):
        ship.let(*chance.choice(actions))
        if ship.at(CrewState.ENDING):  # a rank that failed at one update three times
            return
    ship.drain(chance)
    ship.assert_done()


@clause("T75")
def test_a_killed_rank_is_replaced_word_by_word() -> None:
    ship = Ship(3).begin()
    run(ship)
    assert ship.at(CrewState.RUNNING)
    ship.faults = 1
    ship.let("kill", 1)
    ship.let("bury", 0)
    assert ship.at(CrewState.PARKING)
    assert (ship.crew.generation, dict(ship.crew.lost)) == (1, {1: "killed"})
    settle(ship)
    assert ship.at(CrewState.GATHERING)
    ship.start(1)
    settle(ship)
    assert ship.at(CrewState.REBUILDING)
    assert ship.crew._roster.all(Berth.ENTERED)  # told word by word
    run(ship)
    assert ship.at(CrewState.RUNNING)
    assert [record.fields["lost"] for record in ship.records] == [{1: "killed"}]
    ship.drain()
    ship.assert_done()


@clause("T77")
def test_a_rank_that_builds_may_be_silent_for_longer_than_one_that_runs() -> None:
    ship = Ship(2).begin()
    limits = Limits()

    def silence(seconds: float) -> list[int]:
        """After so long without a word: who is left. The process that looks has not stood still."""
        for _ in range(int(seconds)):
            ship.now += 1.0
            ship.do(ship.crew.tick(ship.now))
        return list(ship.crew.live)

    settle(ship)
    assert ship.at(CrewState.REBUILDING)
    assert silence(limits.building_s - 2) == [0, 1]
    run(ship)
    assert ship.at(CrewState.RUNNING)
    assert silence(limits.silent_s - 1) == [0, 1]
    assert silence(2) == []


@clause("T18", "T77")
def test_words_of_others_do_not_put_off_the_look_for_who_is_silent() -> None:
    ship = Ship(3).begin()
    limits = Limits()
    looks = 0
    settle(ship)
    run(ship)
    seconds = limits.silent_s + 2
    for _ in range(int(10 * seconds)):
        ship.now += 0.1
        for rank in (0, 2):
            ship.do(
                ship.crew.arrived(rank, ship.crew.generation, Beat(1, 1, Phase.COMPUTING), ship.now)
            )
        if ship.now >= ship.crew.wake_at:
            looks += 1
            ship.do(ship.crew.tick(ship.now))
    assert list(ship.crew.lost) == [1]
    assert looks <= 2 * seconds / limits.beat_s + 1, "nor does the coordinator look all the time"


def settle(ship: Ship) -> None:
    """Nothing is on its way."""
    while actions := [
        action for action in ship.actions() if action[0] in ("up", "down", "hear", "bury")
    ]:
        ship.let(*actions[0])


def run(ship: Ship) -> None:
    settle(ship)
    for rank in range(ship.world):
        ship.let("run", rank)
    settle(ship)


def parking() -> Ship:
    """Of two ranks that run one failed, has parked and said so; the other has not yet."""
    ship = Ship(2, faults=1).begin()
    run(ship)
    for happens in ("fail", "up", "down", "up"):
        ship.let(happens, 1)
    return ship


@clause("T76")
def test_a_process_that_comes_takes_the_place_of_one_that_lives() -> None:
    ship = Ship(2).begin()
    run(ship)
    before = ship.processes[0]
    ship.start(0)
    settle(ship)
    assert ship.processes[0].state == ship.processes[1].state == "entered"
    assert ship.crew.generation == 1
    assert before.state == "running"  # its connection is cut by the server


@clause("T77")
def test_a_rank_that_fails_at_one_update_again_and_again_ends_the_job_and_deaths_do_not() -> None:
    ship = Ship(2).begin()
    run(ship)
    for turn in range(3):
        assert not ship.at(CrewState.ENDING), turn
        ship.faults = 1
        ship.let("fail", 0)
        settle(ship)
    assert ship.at(CrewState.ENDING)
    assert ship.processes[1].state == "sent away"
    assert ship.crew.status == "update 2 failed 3 times: rank 0: boom"
    ship = Ship(2).begin()
    run(ship)
    for _ in range(10):
        ship.faults = 1
        ship.let("kill", 0)
        ship.let("bury", 0)
        ship.start(0)
        settle(ship)
    ship.drain()
    ship.assert_done()


@clause("T152")
def test_a_rank_that_is_seen_to_work_may_take_its_time_to_park() -> None:
    ship = parking()
    for _ in range(3 * int(Limits().stuck_s)):
        ship.now += 1
        ship.crew.vouched([0], ship.now)
        ship.do(ship.crew.arrived(1, 0, Beat(1, 1, Phase.COMPUTING), ship.now))
        ship.do(ship.crew.tick(ship.now))
    assert ship.at(CrewState.PARKING)
    ship.now += Limits().silent_s + 1
    for _ in range(4):  # nobody vouches for it any more
        ship.now += 1
        ship.do(ship.crew.arrived(1, 0, Beat(1, 1, Phase.COMPUTING), ship.now))
        ship.do(ship.crew.tick(ship.now))
    assert list(ship.crew.lost) == [0]


def fail_at(ship: Ship, update: int, kind: TroubleKind = TroubleKind.ERROR) -> None:
    """All have done the update before, and rank 0 fails in it."""
    for process in ship.processes.values():
        process.done = update - 1
    ship.faults = 1
    ship.kind = kind
    ship.let("fail", 0)
    settle(ship)


@clause("T151")
def test_failures_at_different_updates_end_no_job_also_where_lost_copies_sent_it_back() -> None:
    ship = Ship(2).begin()
    run(ship)
    for update in (
        101,
        1,
        2,
        3,
        4,
        5,
    ):  # both copies died behind update 100: all began at the beginning
        fail_at(ship, update)
        assert not ship.at(CrewState.ENDING), ship.crew.status
    for _ in range(2):
        fail_at(ship, 5)
    assert ship.crew.status == "update 5 failed 3 times: rank 0: boom"


@clause("T154")
def test_a_program_that_fails_at_two_updates_in_turn_and_never_gets_further_ends() -> None:
    """At one behind its snapshot, and then at one before."""
    ship = Ship(2).begin()
    run(ship)
    for update in (101, 61, 101, 61):
        fail_at(ship, update)
        assert not ship.at(CrewState.ENDING), ship.crew.status
    fail_at(ship, 101)
    assert ship.crew.status == "update 101 failed 3 times: rank 0: boom"


@clause("T154")
def test_an_update_that_was_never_done_before_begins_the_count_anew() -> None:
    ship = Ship(2).begin()
    run(ship)
    for update in range(10, 40):
        for _ in range(2):
            fail_at(ship, update)
            assert not ship.at(CrewState.ENDING), ship.crew.status


@clause("T154")
@pytest.mark.parametrize("kind", [TroubleKind.COLLECTIVE, TroubleKind.MEMORY])
def test_what_comes_of_a_loss_elsewhere_is_nothing_against_the_program_but_has_a_bound(
    kind: TroubleKind,
) -> None:
    ship = Ship(2).begin()
    run(ship)
    for _ in range(FAULTS_MAX - 1):
        fail_at(ship, 7, kind)
        assert not ship.at(CrewState.ENDING), ship.crew.status
    fail_at(ship, 7, kind)
    assert ship.crew.status == f"{FAULTS_MAX} faults, and update 7 was never done: rank 0: boom"


@clause("T154")
def test_deaths_without_a_further_update_end_a_job_at_last() -> None:
    ship = Ship(2).begin()
    run(ship)
    for count in range(FAULTS_MAX):
        assert not ship.at(CrewState.ENDING), count
        ship.faults = 1
        ship.let("kill", 0)
        ship.let("bury", 0)
        ship.start(0)
        settle(ship)
    assert ship.crew.status == f"{FAULTS_MAX} faults, and update 2 was never done: killed"


@clause("T154")
def test_an_error_counts_also_where_its_consequence_in_another_rank_was_heard_first() -> None:
    ship = Ship(2).begin()
    run(ship)
    for _ in range(3):
        assert not ship.at(CrewState.ENDING)
        ship.faults = 2
        ship.kind = TroubleKind.COLLECTIVE
        ship.let("fail", 1)
        ship.kind = TroubleKind.ERROR
        ship.let("fail", 0)  # its groups ended with it, which rank 1 says before
        ship.let("up", 1)
        assert ship.at(CrewState.PARKING)
        settle(ship)
    assert ship.crew.status == "update 2 failed 3 times: rank 1: boom"


@clause("T77")
def test_a_job_for_which_no_process_comes_ends() -> None:
    ship = Ship(2, faults=1).begin()
    run(ship)
    ship.let("kill", 0)
    ship.let("bury", 0)
    settle(ship)
    while ship.at(CrewState.GATHERING):
        ship.now += 1
        ship.processes[1].say(Beat(1, 1, Phase.COMPUTING, parked=True))
        settle(ship)
        ship.do(ship.crew.tick(ship.now))
    assert ship.now == NOW + Limits().replace_s
    settle(ship)
    assert ship.processes[1].state == "sent away"
    assert "ranks [0]" in ship.crew.status


@clause("T77")
def test_a_rank_that_does_not_park_or_says_nothing_is_lost_and_sent_away() -> None:
    ship = parking()
    while ship.at(CrewState.PARKING):
        ship.now += 1
        for rank in (0, 1):
            ship.do(ship.crew.arrived(rank, 0, Beat(1, 1, Phase.COMPUTING), ship.now))
        ship.do(ship.crew.tick(ship.now))
    assert dict(ship.crew.lost) == {0: "not parked after 20 s"}
    assert isinstance(ship.processes[0].down[-1][1], Leave)
    assert ship.processes[0].down[-1][1].status == ExitStatus.TAKEN_FOR_LOST


def beats(ship: Ship, crew: Crew, *, parked: bool) -> None:
    """A standby hears what every coordinator does."""
    for rank, process in ship.processes.items():
        hello = Hello(rank, ship.world, "node0", process.pid, 0, Gate.EXPLICIT, {})
        assert crew.arrived(rank, 0, hello, ship.now) == []
        assert (
            crew.arrived(
                rank, process.generation, Beat(1, 1, Phase.COMPUTING, parked=parked), ship.now
            )
            == []
        )


@clause("T78")
def test_who_takes_over_a_running_job_lets_it_run() -> None:
    ship = Ship(3).begin()
    run(ship)
    standby = Crew("job", Limits())
    beats(ship, standby, parked=False)
    ship.crew = standby
    ship.do(standby.take_over(2, ship.now, 0))
    assert standby.state is CrewState.RUNNING
    ship.faults = 1
    ship.let("kill", 2)
    ship.drain()
    ship.assert_done()


@clause("T78")
@pytest.mark.parametrize("orders", range(4))
def test_who_takes_over_in_the_middle_of_a_fault_stops_all_once_more(orders: int) -> None:
    """`orders`: so many of the commands of the one before have arrived."""
    ship = Ship(3).begin()
    run(ship)
    standby = Crew("job", Limits())
    beats(ship, standby, parked=orders % 2 == 0)
    ship.faults = 1
    ship.let("fail", 0)
    ship.let("up", 0)
    for rank in range(min(orders, 3)):
        ship.let("down", rank)
    for process in ship.processes.values():
        process.down.clear()
    newest = max(process.generation for process in ship.processes.values())
    ship.crew = standby
    ship.do(standby.take_over(2, ship.now, newest))
    for process in ship.processes.values():
        if process.state in (
            "running",
            "entered",
        ):  # its collectives fail: the others are not there
            process.state = "failed"
            process.say(Trouble(TroubleKind.COLLECTIVE, "closed"))
    ship.drain()
    ship.assert_done()
    assert standby.generation > newest


@clause("T76")
def test_a_word_of_an_older_generation_changes_nothing() -> None:
    ship = Ship(2, faults=2).begin()
    run(ship)
    ship.let("fail", 0)
    ship.let("fail", 1)
    settle(ship)
    assert ship.crew.generation == 1
    assert ship.crew.arrived(0, 0, Trouble(TroubleKind.ERROR, "late"), NOW) == []
    assert ship.crew.generation == 1


def test_a_rank_that_leaves_in_order_is_not_waited_for() -> None:
    ship = Ship(2).begin()
    run(ship)
    ship.processes[0].state = "over"
    ship.processes[0].say(Goodbye())
    ship.drain()
    assert ship.processes[1].state == "over"
    assert ship.crew.unprotected == {}


@clause("T178")
def test_a_rank_in_which_acpfs_has_failed_is_named() -> None:
    ship = Ship(2).begin()
    run(ship)
    ship.processes[0].say(Goodbye(why="KeyError: 1"))
    ship.drain()
    assert ship.crew.unprotected == {0: "KeyError: 1"}


def test_each_state_leads_to_an_end() -> None:
    assert CREW_TRANSITIONS.keys() == set(CrewState)
    for state in CrewState:
        reached = {state}
        while (more := reached.union(*(CREW_TRANSITIONS[one] for one in reached))) != reached:
            reached = more
        assert CrewState.ENDING in reached
