"""A member and its parked main thread against a scripted coordinator: every word, in any order,
from whoever may say it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from acpfs.errors import RefusedError
from acpfs.training.calling import Calling
from acpfs.training.credentials import NAME, Credentials, connect
from acpfs.training.marks import Mark
from acpfs.training.member import GenerationOverError
from acpfs.training.messages import (
    Active,
    Beat,
    Goodbye,
    Hello,
    Leave,
    Manifest,
    Phase,
    Publish,
    Published,
    Refused,
    Running,
    Save,
    Saved,
    SavedFile,
    Settle,
    Settled,
    ShowStacks,
    Stacks,
    Stop,
    Stopped,
    StoreAnswer,
    StoreAsk,
    StoreVerb,
    Trouble,
    TroubleKind,
    Vote,
    Voted,
    Welcome,
)
from acpfs.training.park import CutOffError, Park
from acpfs.training.policy import Policy
from acpfs.training.wire import LinkClosedError
from tests.rig.processes import stop_processes
from tests.training.gasp_job import GaspJob, until
from tests.training.scripted_coordinator import FakeRank, Rig, ScriptedCoordinator

TROUBLE = Trouble(TroubleKind.COLLECTIVE, "connection closed")
SAVE = Save(1, {"ranks-0-1": 0}, (0,), "step-1.gasp-1.tmp", "step-1", (1,))


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Makes `Rig`s; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(**words: Any) -> Rig:
            made = Rig(**words)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()


class Script:
    """The coordinator's part, in a thread of its own; what it raises is the test's."""

    def __init__(self, part: Callable[[], None]) -> None:
        self._part = part
        self._error = list[BaseException]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._part()
        except BaseException as error:  # noqa: BLE001  # raised again in the test
            self._error.append(error)

    def end(self) -> None:
        self._thread.join()
        if self._error:
            raise self._error[0]


def parked(
    rig: Rig, directory: Path, part: Callable[[ScriptedCoordinator, FakeRank], None]
) -> tuple[Leave, FakeRank]:
    """The main thread parks; `part` is the coordinator's."""
    rank = FakeRank(rig.marks)
    park = Park(rig.member, rig.interrupter, rig.marks, rank, 0, directory, rig.policy)
    script = Script(lambda: part(rig.coordinator, rank))
    leave = park.run(TROUBLE)
    script.end()
    return leave, rank


def stop(coordinator: ScriptedCoordinator, generation: int) -> Stopped:
    coordinator.generation = generation
    coordinator.say(Stop((1,)))
    return coordinator.hears(Stopped)


@pytest.mark.clause("T48")
def test_it_says_where_the_marks_are(rig: Rig) -> None:
    rig.start()
    rig.marks.ready()
    rig.clues = lambda: {"0": 7}
    rig.member.long_operation = True
    while not rig.coordinator.hears(
        Beat
    ).long_operation:  # of one that was being made some words may be older
        pass
    assert rig.coordinator.hears(Beat) == Beat(0, 1, Phase.READY, {"0": 7}, long_operation=True)

    def part() -> None:
        rig.coordinator.hears(Goodbye)
        with contextlib.suppress(LinkClosedError):
            while True:
                rig.coordinator.hears(Beat)  # one may be due in the moment in which it leaves
        rig.coordinator.say(
            ShowStacks()
        )  # a plain close would have thrown away what was said before, had this come earlier
        rig.coordinator.link.close()

    script = Script(part)
    rig.member.end()
    script.end()


@pytest.mark.clause("T25")
def test_clues_and_collectives_that_fail_are_no_end_of_it(rig: Rig) -> None:
    def fails() -> int:
        rig.aborted.set()
        raise ZeroDivisionError("a bug")

    rig.member._abort = fails
    rig.clues = fails  # type: ignore[assignment]
    rig.start()
    assert rig.coordinator.hears(Beat).clues == {}
    rig.gets_out(lambda: rig.coordinator.say(Stop((1,)), generation=1))
    assert rig.member.stopped


@pytest.mark.clause("T26")
def test_what_the_last_one_may_not_have_heard_is_said_again_to_the_next(make_rig: MakeRig) -> None:
    rig = make_rig(coordinators=2)
    rig.start()
    first, second = rig.coordinators
    rig.gets_out(lambda: first.say(Stop((1,)), generation=1))
    first.generation = 1
    second.generation = 1
    said = Settled(0)
    rig.member.tell(said)
    assert first.hears(Settled) == said
    first.link.close()
    while True:
        second.say(Vote(2, 1), term=0)
        if second.hears(Voted).granted:
            break
    rig.member.tell(Saved(()))  # between two terms
    second.say(Active(2, 1), term=2)
    assert second.hears(Settled) == said
    assert second.hears(Saved) == Saved(())
    second.say(Settle(0), term=2)
    second.say(Active(3, 1), term=3)  # nothing was said since
    second.say(ShowStacks(), term=3)
    second.hears(Stacks)


@pytest.mark.clause("T26")
def test_what_is_said_again_is_of_the_generation_in_which_it_was_true(make_rig: MakeRig) -> None:
    """The one who takes over stops the job again in the same moment: that this rank had stopped
    before is no answer to that.
    """
    rig = make_rig(coordinators=2)
    rig.start()
    first, second = rig.coordinators
    rig.gets_out(lambda: first.say(Stop((1,)), generation=1))
    rig.member.tell(Stopped(0, 0, Phase.COMPUTING))
    first.hears(Stopped)
    holds = threading.Event()
    goes_on = threading.Event()

    def held() -> dict[str, int]:
        holds.set()
        goes_on.wait()
        return {}

    rig.clues = held
    holds.wait()
    second.say(Active(2, 1), term=2)
    second.say(Stop((1,)), generation=2, term=2)
    rig.gets_out(goes_on.set)
    while not isinstance((sent := second.link.receive(120)).message, Stopped):
        pass
    assert sent.header.generation == 1


@pytest.mark.clause("T27")
def test_an_active_coordinator_that_says_nothing_is_voted_away(make_rig: MakeRig) -> None:
    rig = make_rig(coordinators=2, silent_ones_stay=False, policy=Policy(beat_s=0.05))
    rig.start()
    second = rig.coordinators[1]
    while True:
        second.say(Vote(2, 1), term=0)
        if second.hears(Voted).granted:
            break


@pytest.mark.clause("T27")
def test_a_stopped_coordinator_is_replaced_and_what_it_was_told_is_said_to_the_next(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(coordinators=0, policy=Policy(beat_s=0.5), world=1, silent_ones_stay=False)
    with GaspJob(tmp_path, 0, {}, coordinators=2) as job:
        found = Credentials(job.job_directory / NAME)
        rig.member.start(
            {one["number"]: connect(one["address"], found) for one in job.announced}, 120
        )
        until(lambda: job.status(1)["connected"] == 1)
        stop_processes([job.coordinators[0].pid])
        rig.gets_out(lambda: rig.member.tell(TROUBLE))
        assert job.status(1)["active"]
        job.coordinators[0].send_signal(signal.SIGCONT)
        rig.close()


def test_no_protection(rig: Rig) -> None:
    def part() -> None:
        rig.coordinator.hears(Hello)
        rig.coordinator.say(Refused("ranks do not agree"))

    script = Script(part)
    with pytest.raises(RefusedError, match="do not agree"):
        rig.member.start({0: rig.coordinator.member_end}, 120)
    script.end()


def test_a_coordinator_that_dies_before_all_have_registered(rig: Rig) -> None:
    def part() -> None:
        rig.coordinator.hears(Hello)
        rig.coordinator.link.close()

    script = Script(part)
    with pytest.raises(RefusedError, match="gone"):
        rig.member.start({0: rig.coordinator.member_end}, 120)
    script.end()


@pytest.mark.clause("T48")
def test_stop_gets_the_main_thread_out(rig: Rig) -> None:
    rig.start()
    rig.coordinator.generation = 1
    rig.gets_out(lambda: rig.coordinator.say(Stop((1,))))
    assert rig.aborted.is_set()
    assert rig.marks.held


@pytest.mark.clause("T48")
def test_from_trouble_to_leave(rig: Rig, tmp_path: Path) -> None:
    rig.start()
    rig.marks.ready()
    files: list[SavedFile] = []

    def part(coordinator: ScriptedCoordinator, rank: FakeRank) -> None:
        assert coordinator.hears(Trouble) == TROUBLE
        assert stop(coordinator, 1) == Stopped(0, 1, Phase.READY)
        coordinator.say(Settle(1))
        assert coordinator.hears(Settled) == Settled(1, {"ranks-0-1": "digest of 1"})
        coordinator.say(SAVE)
        files.extend(coordinator.hears(Saved).files)
        manifest = Manifest("job", 1, 1, (1,), SAVE.cover, tuple(files), {}, ("node",))
        coordinator.say(Publish(manifest, SAVE.directory, SAVE.name))
        assert coordinator.hears(Published).path == str(tmp_path / "step-1")
        assert stop(coordinator, 2).published == 1
        coordinator.say(Leave(75, "saved", "step-1"))

    leave, rank = parked(rig, tmp_path, part)
    assert leave.status == 75
    assert rank.done == ["finish", "save 1"]
    assert rig.marks.now == Mark(1, 1, Phase.COMPUTING)
    assert (tmp_path / "latest").read_text() == "step-1\n"


@pytest.mark.clause("T49")
def test_another_fault_while_saving(rig: Rig, tmp_path: Path) -> None:
    rig.start()

    def part(coordinator: ScriptedCoordinator, rank: FakeRank) -> None:
        coordinator.hears(Trouble)
        stop(coordinator, 1)
        rank.goes_on.clear()
        coordinator.say(SAVE)
        rank.during_save.wait()
        # it waits for somebody who is dead: the interrupter gets it out, and the old generation's
        # word is void
        assert stop(coordinator, 2) == Stopped(0, 0, Phase.COMPUTING)
        coordinator.say(SAVE, generation=1)
        rank.goes_on.set()
        coordinator.say(SAVE)
        assert coordinator.hears(Saved).files[0].path == "weights"
        coordinator.say(Leave(75, "saved"))

    _, rank = parked(rig, tmp_path, part)
    assert rank.done == ["save 1", "save 1"]


@pytest.mark.clause("T164")
def test_savers_that_nobody_commands_any_more_leave_their_group(rig: Rig, tmp_path: Path) -> None:
    """They may wait for each other there, and only the member's thread can end that."""
    rig.start()
    rank = FakeRank(rig.marks)
    rank.goes_on.clear()
    park = Park(rig.member, rig.interrupter, rig.marks, rank, 0, tmp_path, rig.policy)

    def part() -> None:
        rig.coordinator.hears(Trouble)
        stop(rig.coordinator, 1)
        rig.aborted.clear()
        rig.coordinator.say(SAVE)
        rank.during_save.wait()
        while not rig.coordinator.hears(Beat).moved:
            pass
        rig.coordinator.link.close()
        assert rig.aborted.wait(120)

    script = Script(part)
    with pytest.raises(CutOffError):  # though it waits for somebody who never comes
        park.run(TROUBLE)
    script.end()


@pytest.mark.clause("T49")
def test_an_update_that_fails_is_torn(rig: Rig, tmp_path: Path) -> None:
    rig.start()
    rig.marks.ready()

    def part(coordinator: ScriptedCoordinator, rank: FakeRank) -> None:
        coordinator.hears(Trouble)
        stop(coordinator, 1)
        rank.fails = MemoryError("of the device")
        coordinator.say(Settle(1))
        assert coordinator.hears(Trouble) == Trouble(TroubleKind.SAVE, "MemoryError: of the device")
        assert stop(coordinator, 2) == Stopped(0, 1, Phase.UPDATING)
        coordinator.say(Leave(76, "nobody could save"))

    leave, _ = parked(rig, tmp_path, part)
    assert leave.status == 76


def test_a_rank_that_does_not_save_waits(rig: Rig, tmp_path: Path) -> None:
    rig.start()

    def part(coordinator: ScriptedCoordinator, rank: FakeRank) -> None:
        coordinator.hears(Trouble)
        stop(coordinator, 1)
        coordinator.say(Save(1, {"ranks-0-1": 1}, (1,), "d", "n"))
        coordinator.say(Leave(75, "saved"))

    _, rank = parked(rig, tmp_path, part)
    assert rank.done == []


@pytest.mark.clause("T49")
def test_nobody_left_to_say_anything(rig: Rig, tmp_path: Path) -> None:
    rig.start()
    park = Park(
        rig.member, rig.interrupter, rig.marks, FakeRank(rig.marks), 0, tmp_path, rig.policy
    )
    script = Script(rig.coordinator.link.close)
    with pytest.raises(CutOffError):
        park.run(TROUBLE)
    script.end()


def test_the_store_answers_and_is_void_with_its_generation(rig: Rig) -> None:
    rig.start()

    def part() -> None:
        asked = rig.coordinator.hears(StoreAsk)
        assert (asked.verb, asked.keys, asked.value) == (StoreVerb.ADD, ("k",), "2")
        rig.coordinator.say(StoreAnswer(asked.request, "5"))
        rig.coordinator.hears(StoreAsk)
        rig.coordinator.say(Stop((1,)), generation=1)

    script = Script(part)
    assert rig.member.ask(StoreVerb.ADD, ("k",), "2", "", 5.0).value == "5"

    def asks() -> None:
        with pytest.raises(GenerationOverError):
            rig.member.ask(StoreVerb.GET, ("never",), "", "", 60.0)

    rig.gets_out(asks)
    script.end()


@pytest.mark.clause("T120", "T155")
def test_a_rank_that_nobody_commanded_for_a_while_hears_and_asks_the_next_coordinator(
    make_rig: MakeRig,
) -> None:
    """The last coordinator dies while the successor of the one before is being called."""
    rig = make_rig(policy=Policy(beat_s=3600.0))
    second = ScriptedCoordinator(1)
    called = threading.Event()
    answers = threading.Event()

    def call(_: str) -> Any:
        called.set()
        assert answers.wait(120)
        return second.member_end

    rig.member._calling = Calling(call)
    rig.start()
    rig.coordinator.say(Welcome(0, True, {1: "somewhere"}))
    assert called.wait(120)
    rig.coordinator.link.close()
    until(lambda: rig.member.cut_off_since is not None)
    rig.member.tell(Running())
    answers.set()
    second.hears(Hello)
    second.say(Vote(2, 1), term=0)
    assert second.hears(Voted).granted
    second.term = 2

    def part() -> None:
        second.say(Active(2, 1))
        second.hears(Running)
        asked = second.hears(StoreAsk)
        second.say(StoreAnswer(asked.request, "5"))

    script = Script(part)
    until(lambda: rig.member.commanded)
    assert rig.member.ask(StoreVerb.ADD, ("k",), "5", "", 120.0).value == "5"
    script.end()
    second.link.close()


@pytest.mark.clause("T155")
def test_all_coordinators_are_told_at_once_that_a_rank_is_in_its_loop(make_rig: MakeRig) -> None:
    rig = make_rig(coordinators=2, policy=Policy(beat_s=3600.0))
    rig.start()
    for coordinator in rig.coordinators:
        assert not coordinator.hears(Beat).parked
    for parked in (True, False):
        rig.member.parked = parked
        for coordinator in rig.coordinators:
            while coordinator.hears(Beat).parked is not parked:
                pass


@pytest.mark.clause("T50")
def test_a_vote_only_without_the_active_one_and_no_word_of_an_older_term(make_rig: MakeRig) -> None:
    rig = make_rig(
        coordinators=3, policy=Policy(beat_s=3600.0)
    )  # one that is silent is not gone yet
    rig.start()
    first, second, third = rig.coordinators
    second.say(Vote(2, 1), term=0)
    assert not second.hears(Voted).granted  # the first one is there
    first.link.close()
    while True:
        second.say(Vote(3, 1), term=0)
        if second.hears(Voted).granted:
            break
    third.say(Vote(3, 2), term=0)
    assert third.hears(Voted) == Voted(3, False)  # once per term
    third.say(Stop((1,)), generation=1, term=2)
    second.say(Active(3, 1), term=3)
    second.say(ShowStacks(), term=3)
    assert "test_a_vote_only" in second.hears(Stacks).text
    assert not rig.aborted.is_set()
    rig.gets_out(lambda: second.say(Stop((1,)), generation=1, term=3))
    assert rig.aborted.is_set()


def ask_again_and_again(coordinator: ScriptedCoordinator) -> None:
    """As one for whom no vote is enough."""
    for term in count(3):
        coordinator.say(Vote(term, 1), term=0)
        coordinator.hears(Voted)


@pytest.mark.clause("T158")
@pytest.mark.parametrize("elected", [False, True])
def test_where_nobody_can_be_elected_a_rank_comes_out_of_its_loop(
    make_rig: MakeRig, elected: bool
) -> None:
    """The network is cut: one coordinator says nothing, the other one has too few voters.

    Not so while somebody commands.
    """
    rig = make_rig(
        coordinators=2, policy=Policy(beat_s=3600.0, command_s=0.2, interrupt_after_s=0.05)
    )
    rig.start()
    first, second = rig.coordinators
    if elected:  # the first one is there: a vote that is asked for in vain is nobody's concern
        second.say(Vote(2, 1), term=0)
        assert not second.hears(Voted).granted
        assert not rig.aborted.wait(1.0)
    else:
        first.link.close()

    def asks() -> None:
        if elected:
            first.say(Stop((1,)), generation=5)
        ask_again_and_again(second)

    rig.gets_out(asks)
    order = rig.member.order(0, 60)
    assert order is not None
    assert (order.generation, order.command) == ((5, Stop((1,))) if elected else (1, Stop(())))


@pytest.mark.clause("T160")
def test_what_a_group_opens_behind_a_stop_is_ended_too(make_rig: MakeRig) -> None:
    """A rank that was making the group of savers connected when all connections had been shut down,
    and waited for a dead one.
    """
    rig = make_rig(policy=Policy(interrupt_after_s=0.05, interrupt_every_s=3600.0, beat_s=3600.0))
    aborts: list[int] = []
    again = threading.Event()

    def abort() -> int:
        aborts.append(1)
        if len(aborts) > 1:
            again.set()
        return 1

    rig.member._abort = abort
    rig.start()
    rig.gets_out(lambda: rig.coordinator.say(Stop((1,)), generation=1))
    assert again.wait(60)


@pytest.mark.clause("T27", "T50")
def test_an_active_coordinator_that_asks_for_votes_commands_no_more(make_rig: MakeRig) -> None:
    """The network was cut, a standby of the other side asked for votes, and the active one stood
    back when it heard of that term.
    """
    rig = make_rig(coordinators=2, policy=Policy(beat_s=3600.0))
    rig.start()
    first, second = rig.coordinators
    first.say(Vote(7, 0), term=0)
    assert first.hears(Voted) == Voted(7, True)
    second.say(Vote(8, 1), term=0)
    assert second.hears(Voted) == Voted(8, True)


@pytest.mark.clause("T50")
def test_a_word_for_another_job_ends_the_link(rig: Rig) -> None:
    rig.start()
    rig.coordinator.say(Stop((1,)), generation=1, job="another")
    while rig.member.cut_off_since is None:
        rig.member.order(0, 0.01)
    assert not rig.aborted.is_set()


class InterruptError(Exception):
    """What a signal's handler raises."""


@pytest.mark.clause("T186")
def test_a_member_whose_start_was_interrupted_says_nothing_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ran all the same, for as long as the process lived: nobody had ended it."""
    start = threading.Thread.start
    run = threading.Thread.run
    go = threading.Event()
    started: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise InterruptError

    def held(thread: threading.Thread) -> None:
        go.wait()
        run(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(threading.Thread, "run", held)
    monkeypatch.setattr(threading.Thread, "is_alive", lambda _thread: False)  # not yet
    with pytest.raises(InterruptError):
        rig.member.start({0: rig.coordinator.member_end}, 60.0)
    rig.member.end()
    monkeypatch.undo()
    go.set()
    (thread,) = started
    thread.join(60.0)
    assert not thread.is_alive()


@pytest.mark.clause("T185")
def test_what_came_over_a_connection_that_is_gone_is_not_heard(rig: Rig) -> None:
    """The answer to a vote meets a dead coordinator, whose next word has come already."""
    coordinator = rig.coordinator
    member = rig.member
    member._links = {0: coordinator.member_end}
    coordinator.say(Vote(2, 0), term=0)
    coordinator.say(Active(2, 0), term=2)
    coordinator.link.close()
    member._receive(0, coordinator.member_end)
    assert not member._links
    assert not member.commanded
    assert member._ballot.vote(3)
