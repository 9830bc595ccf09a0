"""Handlers of signals wait for the end of an update, and nothing of them is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from acpfs.training.held_signals import HELD, HeldSignals

pytestmark = pytest.mark.clause("T172")


class ToldError(Exception):
    """What a handler raises."""


@pytest.fixture
def told() -> Iterator[list[int]]:
    """Signals for which the program's own handler was called; it raises each time."""
    got = list[int]()

    def own(number: int, frame: FrameType | None) -> None:
        got.append(number)
        raise ToldError(number)

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, own) for number in numbers]
    yield got
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_all_that_came_are_handled_behind_it_each_once(told: list[int]) -> None:
    held = HeldSignals()
    held.hold()
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
        signal.raise_signal(number)
    assert told == []
    with pytest.raises(ToldError):
        held.release()
    assert told == [signal.SIGUSR2, signal.SIGUSR1]
    held.release()
    with pytest.raises(ToldError):
        signal.raise_signal(signal.SIGUSR1)


def test_what_came_while_an_update_was_torn_is_dropped(told: list[int]) -> None:
    held = HeldSignals()
    held.hold()
    signal.raise_signal(signal.SIGUSR1)
    held.drop()
    held.release()
    assert told == []


def test_a_handler_that_was_set_meanwhile_stays_and_is_called(told: list[int]) -> None:
    held = HeldSignals()
    newer = list[int]()
    held.hold()
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda number, frame: newer.append(number))
    held.release()
    assert (told, newer) == ([], [signal.SIGUSR1])


def test_what_the_system_does_by_itself_is_left_to_it() -> None:
    """No handler in Python: nothing would be raised."""
    before = {number: signal.getsignal(number) for number in HELD}
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    held = HeldSignals()
    held.hold()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    held.release()
    signal.signal(signal.SIGUSR1, before[signal.SIGUSR1])
    assert {number: signal.getsignal(number) for number in HELD} == before


def test_in_another_thread_nothing_is_held() -> None:
    before = [signal.getsignal(number) for number in HELD]
    seen = list[object]()

    def there() -> None:
        held = HeldSignals()
        held.hold()
        seen.extend(signal.getsignal(number) for number in HELD)
        held.release()

    thread = threading.Thread(target=there)
    thread.start()
    thread.join()
    assert seen == before
