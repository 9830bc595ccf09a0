"""What a thread is to do waits where the machine has none left, and whoever asked for it goes
on.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from acpfs.backing.calls import CallPool
from acpfs.errors import MachineError, NoThreadError, wanted
from acpfs.runtime.threads import AGAIN_S, THREADS, Lack, Threads
from tests.rig.runtime import REAL
from tests.rig.scarcity import no_thread_left

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

WAIT_S = 120.0
pytestmark = pytest.mark.clause("S440")


@pytest.fixture
def threads() -> Threads:
    made = Threads()
    made.be_ready(WAIT_S)
    return made


def lack_of(threads: Threads) -> Lack:
    found = threads.lack()
    assert found is not None
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(0.01)


def test_what_is_started_without_a_thread_is_done_when_there_is_one(threads: Threads) -> None:
    done = threading.Event()
    with no_thread_left():
        running = threads.start("late", done.set)
        assert running.is_alive()
        assert lack_of(threads).names == ("late",)
    assert done.wait(WAIT_S)
    assert running.join(WAIT_S)
    wait_until(lambda: threads.lack() is None)


def test_where_nobody_tries_again_it_is_an_error_of_the_system() -> None:
    with no_thread_left(), pytest.raises(NoThreadError) as raised:
        Threads().start("never", print)
    assert raised.value.errno == errno.EAGAIN


def test_what_waits_for_a_thread_is_withdrawn_and_never_done(threads: Threads) -> None:
    done = threading.Event()
    with no_thread_left():
        running = threads.start("withdrawn", done.set)
        assert running.end()
        assert not running.is_alive()
        assert threads.lack() is None
    threads.start("other", lambda: None).join(WAIT_S)
    assert not done.is_set()


def test_a_task_waits_for_a_thread_and_can_be_cancelled_meanwhile() -> None:
    """As where the machine has none: trio has threads from earlier tests, so
    `idle_threads_busy`.
    """
    threads = Threads()

    async def ask() -> int:
        async with trio.open_nursery() as nursery:
            with no_thread_left() as there_are_some:
                nursery.start_soon(lift, there_are_some)
                return await threads.run_sync(abs, -3)

    async def lift(there_are_some: Callable[[], None]) -> None:
        await trio.sleep(AGAIN_S / 2)
        assert lack_of(threads).names == ("abs",)
        there_are_some()

    async def give_up() -> bool:
        with no_thread_left(), trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel, scope)
                await threads.run_sync(abs, -3)
        return scope.cancelled_caught

    async def cancel(scope: trio.CancelScope) -> None:
        await trio.sleep(AGAIN_S / 2)
        assert lack_of(threads).names == ("abs",)
        scope.cancel()

    with idle_threads_busy():
        assert trio.run(give_up, clock=MockClock(autojump_threshold=0))
        assert trio.run(ask, clock=MockClock(autojump_threshold=0)) == 3
    assert threads.lack() is None


@contextmanager
def idle_threads_busy() -> Iterator[None]:
    """Those that trio keeps from earlier tests."""
    from trio._core._thread_cache import THREAD_CACHE

    kept = dict(THREAD_CACHE._idle_workers)
    THREAD_CACHE._idle_workers.clear()
    try:
        yield
    finally:
        THREAD_CACHE._idle_workers.update(kept)


def test_a_call_waits_for_a_thread_as_it_waits_for_the_backing_directory(threads: Threads) -> None:
    pool = CallPool("test", 3, replace(REAL, threads=threads))
    with no_thread_left():
        answer = pool.submit("add", lambda a, b: a + b, 1, 2)
        assert not answer.done()
    assert answer.result(WAIT_S) == 3
    pool.close()


def test_a_pool_that_is_ready_goes_on_without_more_threads(threads: Threads) -> None:
    pool = CallPool("test", 3, replace(REAL, threads=threads))
    pool.be_ready()
    with no_thread_left():
        answers = [pool.submit("add", lambda a, b: a + b, n, n) for n in range(8)]
        assert [answer.result(WAIT_S) for answer in answers] == [2 * n for n in range(8)]
    pool.close()


def test_a_function_that_fails_like_that_is_no_lack_of_threads() -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError):
        trio.run(THREADS.run_sync, fail)


def test_what_the_machine_had_not_got_is_found_in_errors() -> None:
    assert wanted(RuntimeError("can't start new thread")) == "threads"
    assert wanted(NoThreadError("a")) == "threads"
    assert wanted(MemoryError()) == "memory"
    assert wanted(OSError(errno.ENFILE, "")) == "descriptors"
    assert wanted(ExceptionGroup("", [ValueError(), OSError(errno.EMFILE, "")])) == "descriptors"
    outer = MachineError("cannot mount")
    outer.__cause__ = OSError(errno.ENOMEM, "")
    assert wanted(outer) == "memory"
    for other in (OSError(errno.EIO, ""), RuntimeError("bug"), BlockingIOError(errno.EAGAIN, "")):
        assert wanted(other) == ""
