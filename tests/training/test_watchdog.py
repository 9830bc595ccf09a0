"""Who hangs is named, once, after ten steps or a minute; a first step or an evaluation is not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from acpfs.training.coordinator.watchdog import Patience, Stall, Watchdog, behind
from acpfs.training.messages import Beat, Phase

clause = pytest.mark.clause


def beat(
    done: int,
    phase: Phase = Phase.COMPUTING,
    clues: Mapping[str, int] | None = None,
    *,
    long: bool = False,
) -> Beat:
    return Beat(done, done + (phase is not Phase.COMPUTING), phase, clues or {}, long)


def trained(step_s: float = 1.0, steps: int = 20) -> tuple[Watchdog, float]:
    """Two ranks that have done some steps, and when."""
    watchdog = Watchdog(Patience())
    now = 0.0
    for step in range(steps):
        for rank in range(2):
            watchdog.heard(rank, beat(step), now)
        now += step_s
    return watchdog, now - step_s


@clause("T23")
def test_whoever_the_others_wait_for_is_named_once_until_something_moves() -> None:
    watchdog, now = trained()
    watchdog.heard(0, beat(19, clues={"world": 101}), now)
    watchdog.heard(1, beat(19, clues={"world": 100}), now)
    assert watchdog.look([0, 1], now + 60) is None
    assert watchdog.look([0, 1], now + 61) == Stall((1,), "world", 61.0)
    assert watchdog.look([0, 1], now + 100) is None
    watchdog.heard(1, beat(19, clues={"world": 101}), now + 110)
    assert watchdog.look([0, 1], now + 111) is None
    assert watchdog.look([0, 1], now + 171) == Stall((0, 1), "", 61.0)


@clause("T23")
def test_ten_steps_may_be_longer_than_a_minute() -> None:
    watchdog, now = trained(step_s=30.0)
    assert watchdog.limit_s == 300.0
    assert watchdog.look([0, 1], now + 300) is None
    assert watchdog.look([0, 1], now + 301) is not None


@clause("T23")
def test_a_first_step_and_a_long_operation_are_not_watched() -> None:
    watchdog = Watchdog(Patience())
    watchdog.heard(0, beat(5), 0.0)
    assert watchdog.look([0], 10_000.0) is None
    watchdog, now = trained()
    watchdog.heard(1, beat(19, long=True), now)
    assert watchdog.look([0, 1], now + 10_000) is None
    watchdog.begin_anew()
    assert watchdog.look([0, 1], now + 10_000) is None


def test_the_group_with_the_fewest_behind_says_most() -> None:
    ranks = {
        0: beat(5, clues={"world": 10, "dp0": 7}),
        1: beat(5, clues={"world": 9, "dp0": 6}),
        2: beat(5, clues={"world": 9}),
        3: beat(5, clues={"world": 9}),
    }
    assert behind(ranks) == ((1,), "dp0")


def test_without_numbers_of_collectives_the_marks_say_it() -> None:
    assert behind({0: beat(5, Phase.READY), 1: beat(5), 2: beat(5, Phase.READY)}) == ((1,), "")
