"""The process that takes inode locks, by its messages; with real locks: `test_native_hold`."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import queue
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from acpfs.filesystem.admission import Net
from acpfs.filesystem.filesystem import FileSystem
from acpfs.transport.native import hold_process
from acpfs.transport.native.hold_process import BESIDE_MAX, Locks, serve
from acpfs.transport.native.holding import (
    BEGIN_AGAIN_S,
    BEGIN_S,
    TELL_AGAIN_S,
    Holding,
    HoldProcess,
    net,
)
from acpfs.types import Ino
from tests.rig.processes import stop_processes

WAIT_S = 120.0


class Seen(Locks):
    """Locks that are not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.all_taken = threading.Event()

    def watch(self, inos: list[int], tree: int) -> None:
        self.calls.append(f"watch {inos}")

    def find(self) -> OSError | None:
        return None

    def take(self, ino: int) -> None:
        self.calls.append(f"take {ino}")

    def take_all(self) -> None:
        self.calls.append("all")
        self.all_taken.set()


class Wired:
    def __init__(self) -> None:
        self.locks = Seen()
        self.channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.thread = threading.Thread(target=serve, args=(self._theirs, self.locks))
        self.thread.start()

    def tell(self, **message: object) -> None:
        self.channel.send(json.dumps(message).encode())

    def end(self) -> list[str]:
        self.channel.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self._theirs.close()
        return self.locks.calls


@pytest.fixture
def wired() -> Iterator[Wired]:
    made = Wired()
    yield made
    made.end()


@pytest.mark.clause("S213")
def test_all_locks_are_taken_once_when_the_worker_is_late(wired: Wired) -> None:
    wired.tell(watch=[7, 8], within_s=0.01)
    assert wired.locks.all_taken.wait(WAIT_S)
    wired.tell(within_s=None)
    assert wired.end() == ["watch [7, 8]", "all"]


@pytest.mark.clause("S213")
def test_a_worker_that_comes_back_is_heard_again(wired: Wired) -> None:
    for _ in range(3):
        wired.locks.all_taken.clear()
        wired.tell(within_s=0.01)
        assert wired.locks.all_taken.wait(WAIT_S)
    wired.tell(take=5, within_s=None)
    assert wired.end() == ["all"] * 3 + ["take 5"]


def test_it_ends_with_the_last_holder_of_its_channel(wired: Wired) -> None:
    other = wired.channel.dup()
    wired.channel.close()
    other.send(json.dumps({"take": 1}).encode())
    other.close()
    assert wired.end() == ["take 1"]


class Waiting:
    """Double of the call that takes a lock: it ends when and as the test says.

    A thread is known by its descriptor.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = queue.SimpleQueue[int]()
        self.answers: defaultdict[int, queue.SimpleQueue[int]] = defaultdict(queue.SimpleQueue)
        monkeypatch.setattr(hold_process, "change_nothing", self._change_nothing)

    def _change_nothing(self, fd: int) -> int:
        self.calls.put(fd)
        return self.answers[fd].get(timeout=WAIT_S)

    def called(self) -> int:
        return self.calls.get(timeout=WAIT_S)


def test_who_is_asked_once_more_has_another_thread_wait_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one may wait without being handed the lock: a second that comes while a writer has
    it makes the kernel hand it over.
    """
    lock = Waiting(monkeypatch)
    locks = Locks()
    locks._files[7] = os.open(tmp_path, os.O_PATH)
    locks.take(7)
    first = lock.called()
    locks.take(7)
    second = lock.called()
    assert first != second
    lock.answers[second].put(errno.EAGAIN)
    lock.answers[first].put(errno.EAGAIN)
    assert lock.called() == first  # again and again; the other one only once
    lock.answers[first].put(errno.ECANCELED)
    assert lock.called() == first  # once more: it was asked for meanwhile
    lock.answers[first].put(errno.ECANCELED)
    while locks._taking:
        threading.Event().wait(0.01)
    assert lock.calls.empty()
    locks.watch([], -1)


def test_few_threads_wait_for_a_lock_that_one_write_keeps_for_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Waiting(monkeypatch)
    locks = Locks()
    locks._files[7] = os.open(tmp_path, os.O_PATH)
    before = set(threading.enumerate())
    for _ in range(20):
        locks.take(7)
    assert len(set(threading.enumerate()) - before) == 1 + BESIDE_MAX
    waiting = [lock.called() for _ in range(1 + BESIDE_MAX)]
    lock.answers[waiting[-1]].put(errno.EAGAIN)
    while locks._beside[7] == BESIDE_MAX:
        threading.Event().wait(0.01)
    locks.take(7)
    waiting[-1] = lock.called()
    for fd in waiting:
        lock.answers[fd].put(errno.ECANCELED)
    lock.answers[lock.called()].put(errno.ECANCELED)  # the first one, that was asked for once more
    while locks._taking or locks._beside:
        threading.Event().wait(0.01)
    locks.watch([], -1)


def test_who_finds_no_thread_is_held_when_there_are_threads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = Waiting(monkeypatch)
    locks = Locks()
    locks._files[7] = os.open(tmp_path, os.O_PATH)
    open_before = open_at(tmp_path)
    start = threading.Thread.start
    is_short = True

    def start_if_there_is_room(thread: threading.Thread) -> None:
        if is_short:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_room)
    locks.take(7)
    assert not locks._taking
    is_short = False
    locks.take(7)
    first = lock.called()
    is_short = True
    for _ in range(BESIDE_MAX + 1):
        locks.take(7)
    assert not locks._beside
    is_short = False
    locks.take(7)
    second = lock.called()
    for fd in (second, first):
        lock.answers[fd].put(errno.ECANCELED)
    lock.answers[lock.called()].put(errno.ECANCELED)
    while locks._taking or locks._beside or open_at(tmp_path) != open_before:
        threading.Event().wait(0.01)
    assert "node 7 cannot be held: can't start new thread" in capsys.readouterr().err
    locks.watch([], -1)


def open_at(path: Path) -> int:
    """How many descriptors this process has of it."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            count += os.readlink(entry) == str(path)
    return count


def end(process: HoldProcess) -> None:
    """And wait for it: one that is left to die is a warning in another test."""
    process.end()
    assert process._child is not None
    process._child.wait(WAIT_S)


class Quiet:
    """What `Holding` asks of the file system: nothing is open in passthrough, and nothing is to be
    looked at again.
    """

    def __init__(self, mountpoint: Path) -> None:
        self.lock = threading.RLock()
        self.settings = SimpleNamespace(mountpoint=mountpoint)
        self.watched_writers = list[Ino]
        self.held_files = list[Ino]
        self.lost = 0

    def tick(self) -> float:
        return math.inf

    def holder_lost(self) -> None:
        self.lost += 1


@pytest.mark.clause("S213")
def test_a_process_that_has_no_room_for_the_message_is_told_again(tmp_path: Path) -> None:
    """It keeps a copy of the mount as long as it has files to watch: the session would outlive the
    unmounting.
    """
    process = HoldProcess.start()
    try:
        stop_processes([process.pid])
        while process.tell({"within_s": None}):
            pass
        process.watched = frozenset({Ino(7)})
        holding = Holding(cast("FileSystem", Quiet(tmp_path)))
        holding._processes[0] = process
        assert holding._look() <= TELL_AGAIN_S
        assert process.watched == {7}
        os.kill(process.pid, signal.SIGCONT)
        while holding._look() <= TELL_AGAIN_S:
            threading.Event().wait(TELL_AGAIN_S)
        assert process.watched == set()
    finally:
        end(process)


@pytest.mark.clause("S213")
def test_a_file_is_wanted_until_the_process_has_room_for_the_message(tmp_path: Path) -> None:
    """Its writer would go on unheld while RAM is full, and end with ENOSPC."""
    process = HoldProcess.start()
    spare = HoldProcess.start()
    try:
        stop_processes([process.pid])
        while process.tell({"within_s": None}):
            pass
        holding = Holding(cast("FileSystem", Quiet(tmp_path)))
        holding._processes[:] = [process, spare]
        holding.take(Ino(7))
        holding.take(Ino(8))
        assert holding._look() <= TELL_AGAIN_S
        assert list(holding._wanted) == [7, 8]
        os.kill(process.pid, signal.SIGCONT)
        while holding._look() <= TELL_AGAIN_S:
            threading.Event().wait(TELL_AGAIN_S)
        assert not holding._wanted
    finally:
        end(process)
        end(spare)


@pytest.mark.clause("S436")
def test_where_no_process_can_be_started_it_is_tried_again_and_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who needs none waits longer for the next try.

    (A socket that such a try left open would be a warning.)
    """
    fs = Quiet(tmp_path)
    holding = Holding(cast("FileSystem", fs))
    tries: list[None] = []

    def refuse(*_: object, **__: object) -> None:
        tries.append(None)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("acpfs.transport.native.holding.subprocess.Popen", refuse)
    holding._begin_at = 0.0
    for count in range(1, 4):
        holding._begin_at = 0.0
        assert holding._look() <= BEGIN_S
        assert (fs.lost, len(tries)) == (count, count)
    fs.watched_writers = lambda: [Ino(7)]  # type: ignore[assignment]
    assert holding._look() <= BEGIN_AGAIN_S
    monkeypatch.undo()
    fs.watched_writers = list[Ino]
    holding._begin_at = 0.0
    holding._look()
    assert holding._processes[0] is not None
    end(holding._processes[0])


@pytest.mark.clause("S436")
def test_a_look_that_fails_comes_again_before_a_writer_has_filled_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = Quiet(tmp_path)
    holding = Holding(cast("FileSystem", fs))

    def no_descriptor() -> float:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(fs, "tick", no_descriptor)
    for count in range(1, 4):
        assert holding._look_again() <= BEGIN_AGAIN_S
        assert fs.lost == count
    monkeypatch.undo()
    assert holding._look_again() == math.inf
    assert fs.lost == 3


@pytest.mark.clause("S436")
def test_what_the_machine_has_no_memory_for_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = HoldProcess.start()
    try:
        holding = Holding(cast("FileSystem", Quiet(tmp_path)))
        holding._processes[0] = process

        def no_memory(*_: object) -> int:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

        monkeypatch.setattr("acpfs.transport.native.holding.socket.send_fds", no_memory)
        assert holding._look() <= TELL_AGAIN_S
        monkeypatch.undo()
        assert holding._look() == math.inf
    finally:
        end(process)


@pytest.mark.clause("S247")
def test_nobody_trusts_to_be_held_where_locks_are_not_handed_over_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    before = os.sched_getscheduler(0)
    assert net() is Net.NONE or os.geteuid() == 0
    assert os.sched_getscheduler(0) == before
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert net() is Net.NONE
