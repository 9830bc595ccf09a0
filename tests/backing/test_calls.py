"""Call pools, patience and health."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace

import pytest

from acpfs.backing import calls as calls_module
from acpfs.backing.calls import LATE_PATIENCE_S, BackingTimeoutError, CallPool
from acpfs.backing.health import (
    RECOVER_AFTER_S,
    REFUSES_FOR_S,
    SLOW_AFTER_S,
    STUCK_AFTER_S,
    Health,
    HealthState,
    current_call,
)
from acpfs.backing.progress import Progress
from acpfs.descriptors import readable
from acpfs.runtime.clock import Timer, TimerThread
from tests.filesystem.world import is_idle
from tests.rig.runtime import REAL, clock_of
from tests.rig.storage.servers import until


class Hang:
    """A call that hangs until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.over = threading.Event()

    def __call__(self) -> str:
        self.begun.release()
        self.over.wait(120)
        return "late"


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.over.set()


@pytest.fixture
def pool() -> Iterator[CallPool]:
    pool = CallPool("test", 3, REAL)
    yield pool
    pool.close()


def fail(number: int) -> None:
    raise OSError(number, "refused")


def test_results_and_errors_reach_the_caller(pool: CallPool) -> None:
    assert pool.submit("add", lambda a, b: a + b, 1, 2).result(60) == 3
    with pytest.raises(OSError, match="refused"):
        pool.submit("fail", fail, errno.EIO).result(60)
    assert pool.statistics().calls == {"add": 1, "fail": 1}


def test_threads_grow_only_as_needed_and_up_to_the_limit(pool: CallPool, hang: Hang) -> None:
    for _ in range(10):
        pool.submit("quick", int).result(60)
        # who has a result may ask again before the thread that gave it waits for more
        until(lambda: is_idle(pool), "the thread has nothing to do")
    assert pool.statistics().threads == 1
    futures = [pool.submit("hang", hang) for _ in range(5)]
    for _ in range(3):
        hang.begun.acquire(timeout=60)
    statistics = pool.statistics()
    assert (statistics.threads, statistics.in_flight, statistics.waiting) == (3, 3, 2)
    hang.over.set()
    assert [future.result(60) for future in futures] == ["late"] * 5
    assert pool.statistics().waiting == 0


def test_patience_ends_before_the_call(pool: CallPool, hang: Hang) -> None:
    call = pool.submit("hang", hang)
    hang.begun.acquire(timeout=60)
    with pytest.raises(BackingTimeoutError) as raised:
        pool.patient(call, 0.02).result(60)
    assert raised.value.errno == errno.ETIMEDOUT
    assert not call.done()
    assert pool.statistics().timed_out == 1
    hang.over.set()
    assert call.result(60) == "late"


def test_patient_future_takes_over_results_and_errors(pool: CallPool) -> None:
    assert pool.patient(pool.submit("ok", lambda: 5), 60).result(60) == 5
    with pytest.raises(FileNotFoundError):
        pool.patient(pool.submit("fail", fail, errno.ENOENT), 60).result(60)


def test_a_call_that_waits_for_a_thread_is_not_made_after_patience_ended(
    pool: CallPool, hang: Hang
) -> None:
    for _ in range(3):
        pool.submit("hang", hang)
    made: list[int] = []
    call = pool.submit("late", made.append, 1)
    with pytest.raises(BackingTimeoutError):
        pool.patient(call, 0.02).result(60)
    hang.over.set()
    pool.submit("after", int).result(60)
    assert call.cancelled()
    assert not made


def test_patience_begins_anew_as_long_as_the_call_moves(pool: CallPool, hang: Hang) -> None:
    looks: list[int] = []

    def moved() -> int:
        looks.append(len(looks))
        return min(5, len(looks))

    call = pool.submit("hang", hang)
    with pytest.raises(BackingTimeoutError):
        pool.patient(call, 0.01, moved=moved).result(60)
    assert len(looks) == 6
    assert pool.statistics().timed_out == 1


def test_progress_is_what_the_call_moves_or_before_it_has_a_thread_what_others_move() -> None:
    together = Progress()
    first = Progress(together)
    second = Progress(together)
    before = second.mark()
    first.begin()
    first.moved(1)
    assert second.mark() != before
    second.begin()
    before = second.mark()
    first.moved(1)
    assert second.mark() == before
    second.moved(1)
    assert second.mark() != before
    second.give_up()
    with pytest.raises(OSError, match="cancel"):
        second.moved(1)


def test_many_patient_calls_at_once(hang: Hang) -> None:
    timers = TimerThread(REAL.threads)
    pool = CallPool("test", 3, replace(REAL, clock=clock_of(timers=timers)))
    call = pool.submit("hang", hang)
    patient: list[Future[str]] = [pool.patient(call, 0.01 + 0.001 * (i % 20)) for i in range(200)]
    done, _not_done = wait(patient, 60)
    assert len(done) == 200
    quick = pool.submit("quick", int)
    for _ in range(6000):
        pool.patient(quick, 1000).result(60)
    assert len(timers) < 5000  # those that are over are swept out


def test_a_full_queue_fails_at_once(
    pool: CallPool, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "WAITING_CALLS_MAX", 4)
    for _ in range(3):
        pool.submit("hang", hang)
        hang.begun.acquire(timeout=60)
    for _ in range(4):
        pool.submit("wait", int)
    with pytest.raises(BackingTimeoutError):
        pool.submit("more", int).result(0)


def test_descriptors_are_closed_however_many_calls_wait(
    pool: CallPool, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: the closing was refused, too, and each leaked a descriptor."""
    monkeypatch.setattr(calls_module, "WAITING_CALLS_MAX", 0)
    read_end, write_end = os.pipe()
    pool.close_later(write_end)
    assert readable(read_end, 120), "the other end is closed"
    os.close(read_end)


def test_who_has_lost_patience_takes_no_place_in_the_queue(
    pool: CallPool, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: `ls`, again and again, on a backing directory that hangs, filled it for
    everybody else.
    """
    monkeypatch.setattr(calls_module, "WAITING_CALLS_MAX", 4)
    for _ in range(3):
        pool.submit("hang", hang)
        hang.begun.acquire(timeout=60)
    tired = [pool.submit("wait", int) for _ in range(4)]
    assert all(call.cancel() for call in tired)
    assert all(call.cancel() for call in tired), "a second time is as good"
    assert wait(tired, 60).not_done == set()
    assert pool.statistics().waiting == 0
    more = pool.submit("more", int)
    hang.over.set()
    assert more.result(60) == 0


def test_closing_does_not_wait_for_hung_threads(hang: Hang) -> None:
    pool = CallPool("closing", 2, REAL)
    pool.submit("hang", hang)
    hang.begun.acquire(timeout=60)
    pool.close()  # nobody ends the call
    with pytest.raises(BackingTimeoutError):
        pool.submit("after", int).result(0)


@pytest.mark.clause("S206")
def test_who_has_older_knowledge_does_not_wait_anew_beside_a_call_that_is_late(
    hang: Hang,
) -> None:
    """A save asks many questions: with a second for each, the first one after a hang took five."""
    clock = [0.0]
    delays = list[float]()

    class NoTimers:
        def start(self, delay_s: float, _timer: Timer) -> None:
            delays.append(delay_s)

    given = replace(REAL, clock=clock_of(lambda: clock[0], timers=NoTimers()))
    pool = CallPool("test", 3, given)
    call = pool.submit("lstat", hang)
    hang.begun.acquire(timeout=60)
    for clock[0] in (0.5, 2.0, STUCK_AFTER_S + 1.0):  # in time, late, known to hang
        pool.patient(call, 1.0, when_stuck=0.0)
        pool.patient(call, 1.0)  # who knows nothing waits
    assert delays == [1.0, 1.0, LATE_PATIENCE_S, 1.0, 0.0, 1.0]
    pool.close()


class TestHealth:
    now = 0.0

    @pytest.fixture
    def health(self) -> Health:
        return Health(clock_of(lambda: self.now))

    def test_gets_worse_at_once_and_better_after_a_while(self, health: Health) -> None:
        with health.call("pool", "lstat"):
            assert health.state() is HealthState.OK
            self.now += SLOW_AFTER_S + 0.1
            assert health.state() is HealthState.SLOW
            self.now += STUCK_AFTER_S
            assert health.is_stuck()
            assert health.statistics().stuck == 1
        assert health.is_stuck()
        self.now += RECOVER_AFTER_S / 2
        assert health.is_stuck()
        self.now += RECOVER_AFTER_S
        assert health.state() is HealthState.OK

    def test_a_long_call_that_makes_progress_is_not_stuck(self, health: Health) -> None:
        with health.call("pool", "stream") as call:
            for _ in range(10):
                self.now += STUCK_AFTER_S / 2
                assert current_call() is call
                call.progress()
                assert health.state() is HealthState.OK
            call.pause()
            self.now += 1000
            assert health.state() is HealthState.OK

    def test_failures_in_a_row_make_it_refusing(self, health: Health) -> None:
        for _ in range(3):
            with pytest.raises(OSError, match="refused"), health.call("commits", "rename"):
                fail(errno.EIO)
        with health.call("requests", "lstat"):
            pass  # that others succeed means little
        assert health.state() is HealthState.REFUSING
        assert health.statistics().last_error == "rename: refused"
        with health.call("commits", "rename"):
            pass
        assert health.statistics().last_error == "", "what was answered since"
        health.state()
        self.now += RECOVER_AFTER_S + 0.1
        assert health.state() is HealthState.OK

    @pytest.mark.clause("S470", "S521")
    def test_what_nobody_tries_again_is_told_for_a_while(self, health: Health) -> None:
        """A file that did not fit was removed: nothing of its kind may be called for days."""
        for _ in range(3):
            with pytest.raises(OSError, match="refused"), health.call("streams", "stream"):
                fail(errno.ENOSPC)
        self.now += REFUSES_FOR_S - 1
        assert health.state() is HealthState.REFUSING
        with pytest.raises(OSError, match="refused"), health.call("streams", "stream"):
            fail(errno.ENOSPC)
        self.now += REFUSES_FOR_S - 1
        assert health.state() is HealthState.REFUSING, "it was tried again meanwhile"
        self.now += 2
        health.state()
        self.now += RECOVER_AFTER_S + 0.1
        assert health.state() is HealthState.OK
        assert health.statistics().last_error == ""

    @pytest.mark.clause("S470", "S521")
    def test_what_is_tried_again_rarely_is_told_until_then(self, health: Health) -> None:
        """With a larger `retry_delay_max` it said "ok" between two tries."""
        health.retries_every(600.0)
        for _ in range(3):
            with pytest.raises(OSError, match="refused"), health.call("streams", "stream"):
                fail(errno.ENOSPC)
        self.now += 600.0
        assert health.state() is HealthState.REFUSING

    @pytest.mark.clause("S470")
    def test_what_hangs_is_named_and_an_older_error_does_not_explain_it(
        self, health: Health
    ) -> None:
        with pytest.raises(OSError, match="refused"), health.call("syncs", "heartbeat"):
            fail(errno.ENOSPC)
        with pytest.raises(OSError, match="refused"), health.call("streams", "stream"):
            fail(errno.ENOSPC)
        assert health.statistics().last_error == "stream: refused", "the latest"
        with health.call("streams", "stream"):
            pass
        assert health.statistics().last_error == "heartbeat: refused", "and still the other"
        with health.call("requests", "listdir"):
            self.now += 1.0
            with health.call("streams", "stream"):
                self.now += SLOW_AFTER_S
                found = health.statistics()
        assert (found.state, found.oldest_call) == ("slow", "listdir")

    def test_answers_about_names_are_not_failures(self, health: Health) -> None:
        for _ in range(10):
            with pytest.raises(FileNotFoundError), health.call("requests", "lstat"):
                fail(errno.ENOENT)
        assert health.state() is HealthState.OK
