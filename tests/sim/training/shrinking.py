"""Leaves harms out of a history that fails, as long as it fails by the same rule."""

from __future__ import annotations

from collections.abc import Callable


def shrink(harms: int, fails: Callable[[frozenset[int]], bool]) -> frozenset[int]:
    """Which of so many harms the failure does not need: halves, quarters, …, single ones; the last
    ones first.

    `fails`: whether the history without these fails as with all of them.
    """
    without = frozenset[int]()
    size = max(1, harms // 2)
    while True:
        for end in range(harms, 0, -size):
            piece = frozenset(range(max(0, end - size), end))
            if not piece <= without and fails(without | piece):
                without |= piece
        if size == 1:
            return without
        size //= 2
