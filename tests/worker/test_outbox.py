"""A supervisor that is stopped: its worker neither waits for it, nor is killed by it when it goes
on.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from acpfs.supervisor import channel
from acpfs.supervisor.child import Attention, Child, Limits
from acpfs.worker.link import Link
from tests.rig.runtime import REAL

pytestmark = [pytest.mark.clause("S223")]  # what waits for the supervisor here waits for ever


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket]]:
    """A worker's link, and the end of a supervisor that does not read."""
    ours, theirs = channel.pair()
    with ours, theirs:
        yield Link(theirs, {"supervisor": os.getpid()}, {}, REAL), ours


def heard(end: socket.socket, until: dict[str, Any]) -> list[tuple[dict[str, Any], list[int]]]:
    messages: list[tuple[dict[str, Any], list[int]]] = []
    while not messages or messages[-1][0] != until:
        message, fds = channel.receive(end)
        assert message is not None
        messages.append((message, fds))
    return messages


def test_signs_of_life_do_not_wait_and_leave_room_for_the_rest(
    ends: tuple[Link, socket.socket],
) -> None:
    link, supervisor = ends
    for _ in range(10_000):
        link.beat(0.0)
    channel.send(link._end, {"notify": "fits"}, wait=False)
    messages = heard(supervisor, {"notify": "fits"})
    assert 0 < len(messages) < 5000


def test_nothing_waits_and_nothing_is_lost_or_overtaken(ends: tuple[Link, socket.socket]) -> None:
    link, supervisor = ends
    read_fd, write_fd = os.pipe()
    for number in range(2000):
        link.tell(notify=number)
    link.keep("pipe", [read_fd])
    os.close(read_fd)
    link.tell(notify="last")
    link.beat(0.0)
    messages = heard(supervisor, {"notify": "last"})
    assert [message["notify"] for message, _fds in messages if "notify" in message] == [
        *range(2000),
        "last",
    ]
    (kept,) = [fds for message, fds in messages if "keep" in message]
    os.write(write_fd, b"x")
    assert os.read(kept[0], 1) == b"x"
    for fd in (write_fd, *kept):
        os.close(fd)


def test_last_words_are_said_before_the_process_ends(ends: tuple[Link, socket.socket]) -> None:
    link, supervisor = ends
    for number in range(2000):
        link.tell(notify=number)
    speaking = threading.Thread(target=link.last_words, kwargs={"ended": 0})
    speaking.start()
    heard(supervisor, {"ended": 0})
    speaking.join()


def test_a_silence_that_nobody_listened_to_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        worker = Child(ours)
        limits = Limits()
        now = math.floor(time.monotonic()) + 0.0  # whole seconds, so that sums are exact
        worker.serving_at = now
        worker.beat_at = now
        worker.step_at = now
        monkeypatch.setattr(time, "monotonic", lambda: now)
        attention = Attention()
        now += limits.hang_s + 1.0  # the worker is silent, while its supervisor looks every second
        for _ in range(3):
            assert attention.overslept_s(limits.hang_s) == 0.0
        assert not worker.is_well(now, limits)
        worker.heard({"beat": 0.0})
        now += 10 * limits.hang_s
        overslept_s = attention.overslept_s(1.0)
        assert overslept_s == 10 * limits.hang_s - 1.0
        assert not worker.is_well(now, limits)
        worker.dumped_at = now
        worker.excuse(overslept_s)
        assert worker.is_well(now, limits)
        assert not worker.dumped_at
        worker.heard({"beat": 0.0})
        worker.excuse(overslept_s)
        assert not worker.is_well(now + limits.hang_s, limits), (
            "a hang from now on would not be seen"
        )
