"""Callers that die while their call is under way: the INTERRUPT may come before the call waits, and
comes only once.
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from acpfs.filesystem.steps import Call, Steps, wait
from acpfs.processes import directory_of
from acpfs.transport.native import continuations
from acpfs.transport.native.callers import Fate, fate_of
from acpfs.transport.native.continuations import EARLY_MAX, Continuations
from acpfs.transport.native.errnos import errno_of
from acpfs.transport.native.operations import Operation
from tests.rig.runtime import REAL
from tests.transport.test_readers import WAIT_S

UNIQUE = 4
NO_PROCESS = (1 << 22) + 1
"""Larger than the kernel gives to any."""


class RequestDouble:
    """Number and caller; nothing is answered."""

    def __init__(self, pid: int, unique: int = UNIQUE) -> None:
        self.unique = unique
        self.pid = pid


class Recorded:
    """A state database that nothing is changed in."""

    changes = 0
    is_abandoned = False
    is_changed_by_step = False

    def commit(self) -> bool:
        return True


class Under:
    """A call that waits twice, and how it ended."""

    def __init__(self) -> None:
        state: Any = Recorded()
        self.steps = Steps(threading.RLock(), state, REAL.clock)
        self.failed: Future[BaseException] = Future()
        self.continuations = Continuations(
            self.steps,
            lambda _request: None,
            lambda *_: None,
            lambda _request, error: self.failed.set_result(error),
        )
        self.first: Future[None] = Future()
        self.never: Future[None] = Future()
        self.first.set_running_or_notify_cancel()
        self.never.set_running_or_notify_cancel()

    async def call(self) -> None:
        await wait(self.first)
        self.continuations.interrupt(UNIQUE)  # in the middle of a step
        await wait(self.never)

    def begin(self, pid: int) -> None:
        self._suspend(self.call(), RequestDouble(pid))

    def keep_busy(self, bells: SimpleQueue[Future[None]]) -> None:
        """Another call, of a caller that lives, which goes on whenever its latest bell is rung."""

        async def busy() -> None:
            while True:
                bell: Future[None] = Future()
                bells.put(bell)
                await wait(bell)

        self._suspend(busy(), RequestDouble(os.getpid(), UNIQUE + 2))

    def _suspend(self, call: Call[None], request: Any) -> None:
        operation: Any = Operation(lambda _request: call, lambda _request, _value: b"")
        self.continuations.suspend(operation, request, call, self.steps.step(call, None))


@pytest.fixture
def under() -> Iterator[Under]:
    made = Under()
    made.continuations.start()
    yield made
    made.continuations.stop()


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.clause("S132", "S246")
def test_an_interrupt_that_comes_between_two_waits_is_not_lost(under: Under) -> None:
    under.begin(dead_pid())
    under.first.set_result(None)
    assert errno_of(under.failed.result(WAIT_S)) == errno.EINTR


@pytest.mark.clause("S132")
def test_who_dies_after_a_harmless_signal_is_let_go_however_busy_the_others_are(
    under: Under, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of the first signal only; the thread that looks again has always something
    else to do.
    """
    looked = threading.Event()
    bells = SimpleQueue[Future[None]]()

    def look(pid: int) -> Fate:
        fate = fate_of(pid)
        looked.set()
        return fate

    monkeypatch.setattr(continuations, "fate_of", look)
    with subprocess.Popen(["sleep", "infinity"]) as caller:
        under.begin(caller.pid)
        under.first.set_result(None)
        assert looked.wait(WAIT_S)
        caller.kill()
    under.keep_busy(bells)
    deadline = time.monotonic() + WAIT_S
    while not under.failed.done():
        assert time.monotonic() < deadline
        bells.get(timeout=WAIT_S).set_result(None)
    assert errno_of(under.failed.result()) == errno.EINTR


def test_interrupts_of_calls_that_were_answered_are_forgotten(under: Under) -> None:
    for unique in range(10 * EARLY_MAX):
        under.continuations.interrupt(2 * unique)
    assert len(under.continuations._early) == EARLY_MAX


@pytest.mark.parametrize(
    "why", [FileNotFoundError, PermissionError], ids=["hidepid=2", "hidepid=1"]
)
def test_a_caller_that_proc_does_not_show_is_not_taken_for_dying(
    monkeypatch: pytest.MonkeyPatch, why: type[OSError]
) -> None:
    def hidden(*_arguments: object, **_how: object) -> str:
        raise why

    assert fate_of(os.getpid()) is Fate.LIVES
    monkeypatch.setattr(Path, "read_text", hidden)
    assert [fate_of(pid) for pid in (os.getpid(), 1, NO_PROCESS, 0)] == [
        Fate.UNSEEN,
        Fate.UNSEEN,
        Fate.DYING,
        Fate.UNSEEN,
    ]


@pytest.mark.parametrize("text", ["", "?\n", "ShdPnd:\t?\n"])
def test_a_status_that_does_not_tell_of_signals_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "self").symlink_to(str(os.getpid()))
    (tmp_path / str(os.getpid())).mkdir()
    (tmp_path / str(os.getpid()) / "status").write_text(text)
    assert fate_of(os.getpid(), tmp_path) is Fate.UNSEEN


def test_a_proc_of_another_namespace_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "self").symlink_to(str(os.getpid() + 1))
    assert directory_of(1, tmp_path) is None
    assert directory_of(0) is None
    assert directory_of(1) == Path("/proc/1")


@pytest.mark.clause("S242")
@pytest.mark.parametrize("patience_s", [0.0, 3600.0])
def test_a_caller_that_cannot_be_seen_goes_on_waiting_for_a_while_only(
    under: Under, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr(continuations, "UNSEEN_PATIENCE_S", patience_s)
    looked: list[int] = []

    def look(pid: int) -> Fate:
        looked.append(pid)
        return fate_of(pid)

    monkeypatch.setattr(continuations, "fate_of", look)
    under.begin(0)
    under.first.set_result(None)
    if patience_s:
        deadline = time.monotonic() + WAIT_S
        while len(looked) < 2:
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        assert not under.failed.done()
    else:
        assert errno_of(under.failed.result(WAIT_S)) == errno.EINTR
