"""Calls on RAM files that applications may hold up: none of them keeps the others waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from acpfs.ram import file_calls
from acpfs.ram.file_calls import RamFileCalls
from acpfs.types import TierId

pytestmark = pytest.mark.clause("S420")
LONG_S = 60.0


class Held:
    """A call that an application holds up until `go_on`."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

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
    calls = RamFileCalls()
    with held_calls(calls, range(1, 20)) as held:
        assert all(one.begun.wait(LONG_S) for one in held)
        behind = calls.submit(TierId(1), lambda: "behind")
        assert calls.submit(TierId(20), lambda: "other").result(LONG_S) == "other"
        assert not behind.done()
    assert behind.result(LONG_S) == "behind"


def test_calls_of_a_file_are_made_in_their_order_one_at_a_time() -> None:
    calls, made = RamFileCalls(), list[int]()
    futures = [calls.submit(TierId(1), made.append, n) for n in range(200)]
    for future in futures:
        future.result(LONG_S)
    assert made == list(range(200))


def test_what_a_call_raises_is_its_answer_and_a_cancelled_one_is_not_made() -> None:
    calls, made = RamFileCalls(), list[int]()
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
    calls = RamFileCalls()
    assert not calls.is_crowded()
    with held_calls(calls, range(4)):
        assert calls.is_crowded()
    calls.submit(TierId(9), int).result(LONG_S)
    assert not calls.is_crowded()


def test_what_takes_the_lock_of_a_file_waits_until_no_application_can_have_it() -> None:
    calls, done = RamFileCalls(), list[str]()
    calls.when_back(TierId(1), lambda: done.append("at once"))
    calls.hand_over(TierId(1))
    calls.hand_over(TierId(1))
    calls.when_back(TierId(1), lambda: done.append("later"))
    calls.when_back(TierId(2), lambda: done.append("another file"))
    calls.take_back(TierId(1))
    assert done == ["at once", "another file"]
    calls.take_back(TierId(1))
    assert done == ["at once", "another file", "later"]
