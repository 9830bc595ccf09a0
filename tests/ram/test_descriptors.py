"""Descriptors: what applications may not take, and how many there are."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import ExitStack

import pytest

from acpfs.ram import descriptor_limits
from acpfs.ram.descriptor_limits import (
    FEW,
    RESERVE,
    WANTED,
    Reserve,
    complaints,
    raise_limit,
    reserve,
    taken,
)
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S220")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> int:
    """A limit that leaves 30 descriptors beside the reserve."""
    count = next(count for count in range(10_000) if count - reserve(count) - taken() == 30)
    monkeypatch.setattr(descriptor_limits, "limit", lambda: count)
    return 30


def open_all(kept: Reserve, stack: ExitStack, each: int) -> int:
    """Open files of so many descriptors until that is refused; how many descriptors."""
    opened = 0
    while True:
        try:
            kept.before_open(0, 0)
        except OSError:
            return opened
        for _ in range(each):
            stack.callback(os.close, os.dup(0))
            opened += 1


def test_the_last_ones_are_not_for_applications(room: int) -> None:
    kept = Reserve(True, REAL.clock)
    with ExitStack() as stack:
        assert room - descriptor_limits.PER_OPEN <= open_all(kept, stack, 1) <= room
        with pytest.raises(OSError) as refused:
            kept.before_open(0, 0)
        assert refused.value.errno == errno.ENFILE
    kept.before_open(0, 0)


def test_what_an_open_takes_at_most_does_not_reach_into_the_reserve(room: int) -> None:
    with ExitStack() as stack:
        assert (
            open_all(Reserve(True, REAL.clock), stack, descriptor_limits.PER_OPEN)
            < room + descriptor_limits.PER_OPEN
        )


def test_the_reserve_of_a_low_limit_leaves_most_to_applications() -> None:
    assert (reserve(1 << 20), reserve(1024), reserve(1)) == (RESERVE, 256, 0)


def test_a_low_limit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptor_limits, "limit", lambda: FEW)
    assert complaints() == []
    monkeypatch.setattr(descriptor_limits, "limit", lambda: 4096)
    assert complaints() == [
        (
            "the daemon may have 4096 descriptors, so some 1792 files can be open: raise the limit "
            "(ulimit -Hn, LimitNOFILE)"
        )
    ]


@pytest.mark.parametrize("may", [True, False])
def test_the_limit_is_raised_as_far_as_the_process_may(
    monkeypatch: pytest.MonkeyPatch, may: bool
) -> None:
    limits = (100, 4096)

    def setrlimit(_which: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        if wanted[1] > limits[1] and not may:
            raise ValueError("not allowed to raise maximum limit")
        limits = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _which: limits)
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    raise_limit()
    wanted = min(WANTED, int(descriptor_limits.NR_OPEN.read_text())) if may else 4096
    assert limits == (wanted, wanted)
