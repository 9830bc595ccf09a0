"""What a failure does not need is left out."""

from __future__ import annotations

from tests.sim.training.shrinking import shrink


def test_harms_that_a_failure_does_not_need_are_left_out() -> None:
    tried = list[frozenset[int]]()

    def fails(without: frozenset[int]) -> bool:
        tried.append(without)
        return not {1, 4} & without

    assert shrink(6, fails) == {0, 2, 3, 5}
    assert len(tried) == len(set(tried))


def test_a_failure_that_needs_no_harm_is_left_with_none() -> None:
    assert shrink(5, lambda _without: True) == set(range(5))
