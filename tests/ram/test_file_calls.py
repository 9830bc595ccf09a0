"""Calls on RAM files that applications may hold up: none of them keeps the others waiting."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from acpfs.ram import file_calls
from acpfs.ram.file_calls import RamFileCalls
from acpfs.ram.kept import RAM_CALL_WORDS
from acpfs.ram.mapped_records import Slots
from acpfs.types import TierId
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S420")
LONG_S = 60.0


class Held:
    """A call that an application holds up until `go_on`."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(LONG_S)
        return "done"


@contextmanager
def held_calls(calls: RamFileCalls, files: range) -> Iterator[list[Held]]:
    """One of each of these files, all of them under way."""
    held = [Held() for _ in files]
    futures = [calls.submit(TierId(n), one) for n, one in zip(files, held, strict=True)]
    try:
        yield held
    finally:
        for one in held:
            one.go_on.set()
        assert [future.result(LONG_S) for future in futures] == ["done"] * len(futures)


def test_a_call_that_is_held_up_holds_up_those_of_its_file_and_no_others() -> None:
    calls = RamFileCalls(REAL.threads)
    with held_calls(calls, range(1, 20)) as held:
        assert all(one.begun.wait(LONG_S) for one in held)
        behind = calls.submit(TierId(1), lambda: "behind")
        assert calls.submit(TierId(20), lambda: "other").result(LONG_S) == "other"
        assert not behind.done()
    assert behind.result(LONG_S) == "behind"


@pytest.mark.clause("S423")
def test_a_file_waits_for_the_call_of_a_killed_worker_and_others_do_not(tmp_path: Path) -> None:
    file = tmp_path / "calls"
    before = RamFileCalls(REAL.threads)
    before.take_over(Slots(file, RAM_CALL_WORDS), lambda _process, _thread: -1)
    with held_calls(before, range(1, 4)) as held:
        assert all(one.begun.wait(LONG_S) for one in held)
        asked: list[int] = []
        end, over = os.pipe()

        def end_of(process: int, thread: int) -> int:
            assert process == os.getpid()
            asked.append(thread)
            return end if len(asked) == 2 else -1

        records = Slots(file, RAM_CALL_WORDS)
        calls = RamFileCalls(REAL.threads)
        held_up = calls.take_over(records, end_of)
        assert len(set(asked)) == len(asked) == 3
        (one,) = held_up
        behind = calls.submit(one, lambda: "behind")
        others = {TierId(n) for n in range(1, 4)} - held_up
        assert [calls.must_queue(other) for other in others] == [False, False]
        assert [calls.submit(other, abs, -1).result(LONG_S) for other in others] == [1, 1]
        assert calls.must_queue(one)
        assert not behind.done()
        os.close(over)
        assert behind.result(LONG_S) == "behind"


def test_a_call_is_noted_while_it_is_made(tmp_path: Path) -> None:
    calls = RamFileCalls(REAL.threads)
    records = Slots(tmp_path / "calls", RAM_CALL_WORDS)
    calls.take_over(records, lambda _process, _thread: -1)
    with held_calls(calls, range(7, 8)) as held:
        assert held[0].begun.wait(LONG_S)
        assert [words[::2] for _slot, words in records] == [(os.getpid(), 7)]
    assert calls.submit(TierId(7), abs, -1).result(LONG_S) == 1
    while len(records):  # its thread has answered, and is about to
        threading.Event().wait(0.01)


def test_calls_of_a_file_are_made_in_their_order_one_at_a_time() -> None:
    calls = RamFileCalls(REAL.threads)
    made = list[int]()
    futures = [calls.submit(TierId(1), made.append, n) for n in range(200)]
    for future in futures:
        future.result(LONG_S)
    assert made == list(range(200))


def test_what_a_call_raises_is_its_answer_and_a_cancelled_one_is_not_made() -> None:
    calls = RamFileCalls(REAL.threads)
    made = list[int]()
    with held_calls(calls, range(1, 2)):
        cancelled = calls.submit(TierId(1), made.append, 1)
        assert cancelled.cancel()
        failed = calls.submit(TierId(1), int, "no number")
    with pytest.raises(ValueError, match="no number"):
        failed.result(LONG_S)
    assert not made


def test_with_many_calls_held_up_no_more_files_are_to_be_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file_calls, "THREADS_MAX", 4)
    monkeypatch.setattr(file_calls, "CROWDED", 3)
    calls = RamFileCalls(REAL.threads)
    assert not calls.is_crowded()
    with held_calls(calls, range(4)):
        assert calls.is_crowded()
    calls.submit(TierId(9), int).result(LONG_S)
    assert not calls.is_crowded()


def test_what_takes_the_lock_of_a_file_waits_until_no_application_can_have_it() -> None:
    calls = RamFileCalls(REAL.threads)
    done = list[str]()
    calls.when_back(TierId(1), lambda: done.append("at once"))
    calls.hand_over(TierId(1))
    calls.hand_over(TierId(1))
    calls.when_back(TierId(1), lambda: done.append("later"))
    calls.when_back(TierId(2), lambda: done.append("another file"))
    calls.take_back(TierId(1))
    assert done == ["at once", "another file"]
    calls.take_back(TierId(1))
    assert done == ["at once", "another file", "later"]
