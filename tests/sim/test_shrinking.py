"""A history is made shorter, and can be run again by what is printed."""

from __future__ import annotations

from tests.sim.choices import Choices, Profile
from tests.sim.shrinking import calls_of, shrink, to_words

NEEDED = {("p0", 2), ("p0", 3)}


def fails_with_two_calls(choices: Choices) -> bool:
    return not NEEDED & choices.without_calls


def test_what_a_failure_does_not_need_is_left_out() -> None:
    shortest = shrink(Choices(3, Profile.PLAIN), fails_with_two_calls)
    assert shortest.without_faults
    assert shortest.in_order
    assert shortest.lives_max == 1
    assert ("p0", 0) in shortest.without_calls
    assert ("p0", 1) in shortest.without_calls
    assert ("p0", 4) in shortest.without_calls


def test_what_is_printed_runs_the_same_history() -> None:
    without = frozenset({("p0", 1), ("p0", 2), ("p0", 3), ("p0", 7), ("p1", 0)})
    words = to_words(Choices(5, Profile.POWER, without, in_order=True))
    assert words == "--profile power --seed 5 --in-order --without p0:1-3,7 --without p1:0"
    assert calls_of("p0:1-3,7") | calls_of("p1:0") == without
