"""Judging other nodes, and the clock that it is done with: pure, no waiting."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.ram.node_clock import NodeClock
from acpfs.ram.state import StateDatabase
from acpfs.writeback.members.peers import (
    PAST_CACHES_S,
    RECORDS_AFTER,
    Peer,
    Terms,
    Verdict,
    may_be_of_loss,
)
from tests.rig.runtime import REAL, clock_of

clause = pytest.mark.clause
TERMS = Terms("a", clock_bound_s=0.5, drift_s=0.0, node_timeout_s=30.0, forget_after_s=0.0)
CLOSED = 1000.0


def peer_of(record: NodeRecord, *, clock: float = 1002.0, monotonic: float = 0.0) -> Peer:
    peer = Peer("b", monotonic)
    peer.saw(record, clock, monotonic)
    return peer


def record(**fields: object) -> NodeRecord:
    return replace(
        NodeRecord("b", beat=1, clock=1002.0, watermark=1002.0, heartbeat_s=2.0),
        **fields,  # type: ignore[arg-type]
    )


@clause("S160")
@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, Verdict.PASSES),
        ({"watermark": CLOSED + 0.5}, Verdict.WAITS),
        ({"watermark": CLOSED + 0.501}, Verdict.PASSES),
        ({"watermark": 0.0, "state": NodeState.LEFT}, Verdict.PASSES),
        ({"watermark": 0.0, "state": NodeState.AWAY}, Verdict.MISSING),
        ({"watermark": CLOSED - 1, "gated": CLOSED - 1}, Verdict.WAITS),
        ({"watermark": CLOSED - 1, "gated": CLOSED + 0.1}, Verdict.PASSES),
        ({"lost": (CLOSED - 5, CLOSED + 5)}, Verdict.LOST),
        ({"lost": (CLOSED - 5, CLOSED - 1)}, Verdict.PASSES),
        ({"lost": (CLOSED + 1, CLOSED + 5)}, Verdict.PASSES),
        ({"state": NodeState.GONE, "watermark": 0.0, "lost": (0.0, CLOSED - 1)}, Verdict.PASSES),
        ({"watermark": CLOSED + 1, "drift_s": 3600.0}, Verdict.WAITS),
    ],
)
def test_a_node_passes_only_with_all_that_it_had_closed_before(
    fields: dict[str, object], verdict: Verdict
) -> None:
    assert peer_of(record(**fields)).judge(CLOSED, TERMS) is verdict


@clause("S168")
@pytest.mark.parametrize(
    ("fields", "may_have"),
    [
        ({}, False),
        ({"watermark": CLOSED + 0.5}, True),
        ({"watermark": CLOSED - 1, "gated": CLOSED + 0.1}, True),
        ({"watermark": 0.0, "state": NodeState.LEFT}, False),
        ({"watermark": 0.0, "state": NodeState.AWAY}, False),
        ({"lost": (CLOSED - 5, CLOSED + 5)}, False),
    ],
)
def test_a_reader_waits_for_live_nodes_until_they_have_persisted_all_before(
    fields: dict[str, object], may_have: bool
) -> None:
    """Unlike a pointer also for what only waits for a gate, and never for what is lost or away."""
    peer = peer_of(record(**fields))
    peer.read_at = 1.0
    assert peer.may_have(CLOSED, TERMS, since=1.0) is may_have
    assert Peer("b", 0.0).may_have(CLOSED, TERMS, since=1.0) is True, "it was never read"


@clause("S160")
@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"pointers": CLOSED + 0.501}, Verdict.PASSES),
        ({"pointers": CLOSED + 0.501, "watermark": CLOSED - 60}, Verdict.PASSES),
        ({"pointers": CLOSED + 0.4}, Verdict.WAITS),
        (
            {"pointers": CLOSED + 0.4, "watermark": CLOSED + 0.4, "gated": CLOSED + 0.4},
            Verdict.WAITS,
        ),
        ({"pointers": CLOSED - 1, "lost": (CLOSED - 5, CLOSED + 5)}, Verdict.WAITS),
        ({"pointers": 1002.0, "watermark": 0.0, "state": NodeState.LEFT}, Verdict.PASSES),
        ({"pointers": CLOSED - 1, "state": NodeState.LEFT}, Verdict.MISSING),
        ({"watermark": CLOSED + 0.4}, Verdict.WAITS),
        ({"watermark": 0.0, "state": NodeState.LEFT}, Verdict.PASSES),
    ],
)
def test_a_removal_passes_only_when_no_pointer_from_before_is_still_to_come(
    fields: dict[str, object], verdict: Verdict
) -> None:
    """By clocks as far apart as they may be, whatever else waits there; a node of before says
    nothing of pointers.
    """
    assert peer_of(record(**fields)).judge(CLOSED, TERMS, removes=True, yields=True) is verdict


@clause("S160")
def test_of_two_pointers_that_wait_for_each_other_exactly_one_goes_first() -> None:
    ours = (CLOSED, "a")
    theirs = (CLOSED, "b")
    passes_here = (
        peer_of(record(watermark=CLOSED, gated=CLOSED)).judge(CLOSED, TERMS) is Verdict.PASSES
    )
    other = Peer("a", 0.0)
    other.saw(replace(record(watermark=CLOSED, gated=CLOSED), node="a"), 1002.0, 0.0)
    passes_there = other.judge(CLOSED, replace(TERMS, node="b")) is Verdict.PASSES
    assert (passes_here, passes_there) == (ours < theirs, theirs < ours)


@clause("S161", "S162")
def test_only_silence_makes_a_node_missing() -> None:
    behind = peer_of(record(watermark=0.0))
    behind.asked_at = 30.0
    assert behind.judge(CLOSED, TERMS) is Verdict.WAITS
    behind.asked_at = 30.1
    behind.saw(record(watermark=0.0), 1002.0, 30.2)
    assert behind.judge(CLOSED, TERMS) is Verdict.MISSING, (
        "the same record again is no sign of life"
    )
    behind.saw(record(watermark=0.0, beat=2), 1002.0, 32.0)
    assert behind.judge(CLOSED, TERMS) is Verdict.WAITS
    forgetful = replace(TERMS, forget_after_s=100.0)
    behind.asked_at = 131.0
    assert behind.judge(CLOSED, forgetful) is Verdict.MISSING
    behind.asked_at = 133.0
    assert behind.judge(CLOSED, forgetful) is Verdict.PASSES


@clause("S166")
def test_a_measured_difference_counts_where_it_is_larger() -> None:
    ahead = peer_of(record(clock=1010.0, watermark=1010.0), clock=1002.0)
    assert ahead.bound_s(TERMS) == pytest.approx(8.0 + 2.0 + 0.5), (
        "at least eight seconds ahead: only known from one side"
    )
    assert ahead.judge(CLOSED, TERMS) is Verdict.WAITS
    ahead.saw(record(beat=2, clock=1011.0, watermark=1011.0, heard={"a": -8.4}), 1003.0, 1.0)
    assert ahead.bound_s(TERMS) == pytest.approx(8.4), "known from both sides"
    behind = peer_of(record(clock=990.0, watermark=990.0), clock=1002.0)
    assert behind.bound_s(TERMS) == 0.5, "a clock that is behind costs time, not order"


@pytest.mark.clause("S166")
def test_a_difference_is_measured_anew_where_the_other_still_goes_by_records_from_before() -> None:
    """Somebody set our clock back, and it was worked off: the other's best reading of it is
    older.
    """
    ahead = peer_of(record(clock=1005.0, heard={"a": 0.02}), clock=1002.0)
    assert ahead.bound_s(TERMS) == pytest.approx(3.0 + 2.0 + 0.5)


def heard(*records: tuple[float, float], incarnation: str = "") -> Peer:
    """Of a node; each record: when its reading began, and what it says of its node's clock."""
    peer = Peer("b", 0.0)
    for beat, (began, clock) in enumerate(records):
        peer.saw(
            record(beat=beat, clock=clock, watermark=clock, incarnation=incarnation),
            CLOSED,
            began + 100.0,
            began,
        )
    return peer


@clause("S227")
def test_a_record_begun_after_a_moment_is_known_without_clocks() -> None:
    fresh = CLOSED + PAST_CACHES_S
    in_time = [(fresh + n, 5000.0 + n) for n in range(RECORDS_AFTER)]
    assert heard(*in_time).closed_before(CLOSED, TERMS) == 5000.0 + RECORDS_AFTER - 1
    assert (
        heard((fresh - 0.1, 4999.0), *in_time).closed_before(CLOSED, TERMS)
        == 5000.0 + RECORDS_AFTER - 1
    )
    assert (
        heard(*in_time, (fresh + 9, 5009.0)).closed_before(CLOSED, TERMS)
        == 5000.0 + RECORDS_AFTER - 1
    )
    assert heard((fresh - 0.1, 4999.0), *in_time[1:]).closed_before(CLOSED, TERMS) == math.inf, (
        "one came out of a cache"
    )
    assert heard(*in_time[:-1], in_time[0]).closed_before(CLOSED, TERMS) == math.inf, (
        "an older one, of two readings at a time"
    )
    assert heard(*in_time).closed_before(-math.inf, TERMS) == math.inf, "nobody says since when"
    patient = replace(TERMS, node_timeout_s=PAST_CACHES_S + 1)
    assert heard(*in_time).closed_before(CLOSED, patient) == math.inf, (
        "who waits longer for records has them late"
    )
    again = heard(*in_time)
    again.saw(record(beat=99, clock=1.0, incarnation="another"), CLOSED, fresh + 99)
    assert again.closed_before(CLOSED, TERMS) == math.inf


@clause("S227")
def test_a_node_passes_by_its_own_clock_alone() -> None:
    hours_ahead = record(clock=9000.0, watermark=8000.0, drift_s=9000.0)
    assert peer_of(hours_ahead).judge(CLOSED, TERMS) is Verdict.WAITS
    assert peer_of(hours_ahead).judge(CLOSED, TERMS, mark=7999.0) is Verdict.PASSES
    assert peer_of(hours_ahead).judge(CLOSED, TERMS, mark=8000.0) is Verdict.WAITS
    assert (
        peer_of(replace(hours_ahead, pointers=7000.0)).judge(
            CLOSED, TERMS, yields=True, mark=7999.0
        )
        is Verdict.WAITS
    )
    lost = replace(hours_ahead, lost=(CLOSED - 5, CLOSED + 5))
    assert peer_of(lost).judge(CLOSED, TERMS, mark=7999.0) is Verdict.LOST


@clause("S227")
def test_what_was_lost_holds_nothing_up_that_was_closed_after_the_return_was_known() -> None:
    """It came back with a clock that is an hour ahead, so its loss seems to last that long."""
    lost = (CLOSED - 5, CLOSED + 3600)
    returned = peer_of(record(lost=lost, incarnation="2", watermark=CLOSED + 9000), clock=CLOSED)
    assert returned.judge(CLOSED, TERMS) is Verdict.LOST, "closed at that very moment"
    assert returned.judge(CLOSED + 0.001, TERMS) is Verdict.PASSES
    returned.saw(
        record(lost=lost, incarnation="2", beat=2, watermark=CLOSED + 9000), CLOSED + 50, 1.0
    )
    assert returned.judge(CLOSED + 0.001, TERMS) is Verdict.PASSES
    returned.saw(record(lost=lost, incarnation="3", watermark=CLOSED + 9000), CLOSED + 60, 2.0)
    assert returned.judge(CLOSED + 60, TERMS) is Verdict.LOST


@clause("S227")
def test_how_long_a_clock_holds_pointers_up() -> None:
    most = PAST_CACHES_S + RECORDS_AFTER * 2.0
    assert peer_of(record()).clock_wait_s(TERMS) == 0.5
    assert peer_of(record(drift_s=-7.0)).clock_wait_s(TERMS) == 7.5
    assert peer_of(record(clock=992.0)).clock_wait_s(TERMS) == 10.5, (
        "behind: its watermark comes as much later"
    )
    assert peer_of(record(clock=1012.0)).clock_wait_s(TERMS) < TERMS.clock_bound_s + 13.0
    assert peer_of(record(drift_s=7200.0)).clock_wait_s(TERMS) == most


@clause("S166", "S400")
@pytest.mark.parametrize(
    ("fields", "terms", "verdict"),
    [
        ({"moved_s": 0.0}, TERMS, Verdict.WITHHELD),
        ({"moved_s": 1.0}, TERMS, Verdict.WITHHELD),
        ({"moved_s": 2.5}, TERMS, Verdict.PASSES),
        ({}, TERMS, Verdict.PASSES),
        ({"moved_s": 0.0, "drift_s": 0.0}, replace(TERMS, drift_s=3.0), Verdict.WITHHELD),
        ({"moved_s": 1.5}, replace(TERMS, moved_s=1.0), Verdict.PASSES),
    ],
)
def test_a_wall_clock_that_is_set_lets_nothing_pass_that_is_withheld(
    fields: dict[str, object], terms: Terms, verdict: Verdict
) -> None:
    """Which of two was first is known by the members' own clocks: only what these were moved by
    counts. An older acpfs does not tell that: there all of the difference may be.
    """
    told = {"drift_s": -3.0, "watermark": CLOSED + 10, "held": {"k": CLOSED - 2}} | fields
    peer = peer_of(record(**told))
    assert peer.judge(CLOSED, terms, asks=("k",)) is verdict


@clause("S164")
@pytest.mark.parametrize(
    ("since", "may_be"),
    [
        (990.0 - 1.001, False),
        (990.0 - 1.0, True),
        (990.0, True),
        (1000.0, True),
        (1000.0 + 0.999, True),
        (1000.0 + 1.0, False),
    ],
)
def test_a_loss_holds_back_what_two_clocks_may_have_put_into_it(
    since: float, *, may_be: bool
) -> None:
    """Who closed the pointer and who has lost something are judged by a third: each of their
    clocks may be off by the bound of 0.5 s.

    What was closed when the loss ended, by a clock that is right, was closed after it.
    """
    assert may_be_of_loss((990.0, 1000.0), since, 0.5) is may_be


@clause("S164")
def test_where_nothing_is_lost_nothing_is_of_a_loss() -> None:
    assert not may_be_of_loss(None, CLOSED, 0.5)


class Clocks:
    """A wall clock and one that only runs."""

    def __init__(self) -> None:
        self.wall = 1000.0
        self.running = 10.0
        self.boot = "boot"

    def pass_s(self, seconds: float) -> None:
        self.wall += seconds
        self.running += seconds

    def clock(self, state: StateDatabase) -> NodeClock:
        return NodeClock(
            state,
            clock_of(wall=lambda: self.wall, since_boot=lambda: self.running),
            lambda: self.boot,
        )


@pytest.fixture
def state(tmp_path: Path) -> StateDatabase:
    return StateDatabase(tmp_path / "state", REAL)


@clause("S166")
@pytest.mark.parametrize("step_s", [60.0, -60.0])
def test_a_wall_clock_that_is_set_does_not_move_the_order(
    state: StateDatabase, step_s: float
) -> None:
    clocks = Clocks()
    clock = clocks.clock(state)
    before = clock.now()
    clocks.wall += step_s
    assert clock.now() == before
    assert clock.drift_s == pytest.approx(step_s)
    last = before
    for _ in range(121):
        clocks.pass_s(1.0)
        clock.work_off()
        assert 0.49 < clock.now() - last < 1.51, "no step, and never back"
        last = clock.now()
    assert clock.drift_s == 0.0
    assert clock.now() == pytest.approx(clocks.wall)


@clause("S166")
@pytest.mark.parametrize("step_s", [3.0, -3.0])
@pytest.mark.parametrize("is_next_worker", [False, True])
def test_what_was_stamped_while_a_clock_was_wrong_is_so_when_it_is_right_again(
    state: StateDatabase, step_s: float, *, is_next_worker: bool
) -> None:
    """A pending pointer was judged by the clock bound alone as soon as its node's clock was right:
    its stamp was of the clock that had followed the wrong one.
    """
    clocks = Clocks()
    clock = clocks.clock(state)
    before = clock.now()
    clocks.wall += step_s
    clocks.pass_s(2.0)
    clock.work_off()
    stamp = clock.now()
    assert clock.wrong_by_s(lambda: before) == pytest.approx(step_s), "either clock may be right"
    assert clock.moved_s(lambda: before) == 1.0
    clocks.wall -= step_s
    for _ in range(2):
        clocks.pass_s(10.0)
        clock.work_off()
    state.commit()
    if is_next_worker:
        clock = clocks.clock(state)
    assert clock.drift_s == 0.0
    moved_s = step_s / 3  # by half of the time
    assert abs(clock.wrong_by_s(lambda: stamp)) == pytest.approx(abs(moved_s))
    assert abs(clock.wrong_by_s(lambda: before)) == pytest.approx(abs(moved_s))
    assert clock.moved_s(lambda: stamp) == pytest.approx(1.0)
    assert clock.wrong_by_s(lambda: math.inf) == 0.0
    assert clock.moved_s(lambda: stamp) == 0.0
    assert clock.wrong_by_s(lambda: stamp) == 0.0, "nothing has such a stamp any more"


@clause("S166")
def test_a_clock_that_was_moved_in_another_boot_says_nothing_of_this_one(
    state: StateDatabase,
) -> None:
    clocks = Clocks()
    clock = clocks.clock(state)
    clocks.wall += 60.0
    clocks.pass_s(2.0)
    clock.work_off()
    state.commit()
    clocks.boot = "another"
    clocks.running = 1.0
    assert clocks.clock(state).wrong_by_s(lambda: 0.0) == 0.0


@clause("S166")
def test_the_next_worker_has_the_same_clock(state: StateDatabase) -> None:
    clocks = Clocks()
    clock = clocks.clock(state)
    clocks.wall -= 500.0
    clocks.pass_s(2.0)
    clock.work_off()
    told = clock.now()
    state.commit()
    following = clocks.clock(state)
    assert (following.now(), following.drift_s) == (told, clock.drift_s)
    clocks.boot = "another"
    clocks.running = 1.0
    assert clocks.clock(state).now() >= told, "after a reboot too it does not go back"


def test_a_record_is_what_was_written() -> None:
    written = record(heard={"a": -0.5}, lost=(1.0, 2.0), errors=("x",), state=NodeState.AWAY)
    assert NodeRecord.from_bytes(written.to_bytes()) == written
    for torn in (
        b"",
        written.to_bytes()[:40],
        b"[]",
        b'{"node": "b"}',
        b'{"node": "b", "beat": 1, "clock": NaN, "watermark": 1}',
    ):
        with pytest.raises(ValueError, match=r".*"):
            NodeRecord.from_bytes(torn)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beat", "1"),
        ("clock", None),
        ("gated", "x"),
        ("pointers", "x"),
        ("drift_s", []),
        ("heard", {"a": "b"}),
        ("heard", 5),
        ("lost", 5),
        ("lost", [1]),
        ("heartbeat_s", "fast"),
        ("errors", "x"),
        ("errors", [1]),
        ("dirty_bytes", 1.5),
        ("host", 7),
        ("state", "asleep"),
        ("state", 1),
    ],
)
def test_a_record_with_something_else_in_a_field_is_none(field: str, value: object) -> None:
    """Whatever somebody wrote there: `ValueError`, which is a record that cannot be read, and no
    other.
    """
    found = json.loads(record().to_bytes()) | {field: value}
    with pytest.raises(ValueError, match=r"without|not a valid"):
        NodeRecord.from_bytes(json.dumps(found).encode())


@clause("S160")
def test_a_record_is_read_again_from_when_there_may_be_a_newer_one() -> None:
    """A drain takes minutes, and whoever waits for it looks five times a second."""
    peer = peer_of(record(), clock=1002.3)
    assert not peer.may_have_written(1002.3, TERMS)
    assert peer.may_have_written(1002.5, TERMS), (
        "half a heartbeat later, by a clock that is ahead by the bound"
    )
    peer.saw(record(beat=2, clock=1010.0, heard={"a": 0.0}), 1010.1, 0.0)
    assert not peer.may_have_written(1010.9, TERMS), (
        "what it says of our clock is nearer than the bound"
    )
    assert peer.may_have_written(1011.0, TERMS)
    peer.saw(record(beat=3, clock=1020.0, state=NodeState.LEFT), 1020.1, 0.0)
    assert peer.may_have_written(1020.1, TERMS), "it may have come back"
    assert Peer("b", 0.0).may_have_written(0.0, TERMS)
