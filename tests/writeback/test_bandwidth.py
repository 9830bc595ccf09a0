"""The token bucket."""

from __future__ import annotations

import threading

import pytest

from acpfs.writeback.streams.bandwidth import BURST_S, SLICE_MAX_BYTES, SLICE_MIN_BYTES, TokenBucket
from tests.rig.runtime import REAL, runtime_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_no_limit_never_waits(clock: Clock) -> None:
    bucket = TokenBucket(0, runtime_of(clock))
    assert bucket.take_nowait(1 << 40) == 0
    assert bucket.slice_bytes() == SLICE_MAX_BYTES


def test_the_rate_holds_over_time(clock: Clock) -> None:
    bucket = TokenBucket(1000, runtime_of(clock))
    taken = 0
    while clock.now < 100:
        taken += 50
        clock.now += bucket.take_nowait(50)
    assert taken == pytest.approx(100 * 1000, rel=0.01)


def test_what_is_saved_up_is_bounded(clock: Clock) -> None:
    bucket = TokenBucket(1000, runtime_of(clock))
    clock.now += 3600
    assert bucket.take_nowait(int(1000 * BURST_S)) == 0
    assert bucket.take_nowait(1000) == pytest.approx(1.0)


def test_slices_follow_the_rate(clock: Clock) -> None:
    assert TokenBucket(1, runtime_of(clock)).slice_bytes() == SLICE_MIN_BYTES
    assert TokenBucket(10 << 20, runtime_of(clock)).slice_bytes() == 1 << 20
    assert TokenBucket(10 << 30, runtime_of(clock)).slice_bytes() == SLICE_MAX_BYTES


@pytest.mark.parametrize("release", ["raise", "lift", "close"])
def test_a_change_of_the_limit_is_felt_by_those_who_wait(release: str) -> None:
    bucket = TokenBucket(1, REAL)
    waiting = threading.Thread(target=bucket.take, args=(1 << 30,))
    waiting.start()
    if release == "close":
        bucket.close()
    else:
        bucket.set_rate(0 if release == "lift" else 1 << 50)
    waiting.join(60)
    assert not waiting.is_alive()


def test_what_was_not_written_is_given_back(clock: Clock) -> None:
    bucket = TokenBucket(1000, runtime_of(clock))
    bucket.take_nowait(1000)
    bucket.give_back(900)
    assert bucket.debt_s() == pytest.approx(0.1)
