"""How many write at a time, on storages of several kinds: as many as bring something."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from acpfs.writeback.streams.width import PIECES_MIN, QUICK_PIECES_MIN, REST_WINDOWS, Width

STREAMS = 8
PIECE = 2 << 20
PIECES = 40 * REST_WINDOWS * max(PIECES_MIN * STREAMS, QUICK_PIECES_MIN)


class Storage:
    """Brings so many bytes per second, by the number of writers."""

    def __init__(self, rate: Callable[[int], float], writers: int = STREAMS) -> None:
        self.rate = rate
        self.writers = writers
        self.now = 100.0
        self.width = Width(STREAMS)
        self.seen: list[int] = []

    def write(self, pieces: int = PIECES) -> list[int]:
        """The width at each of the last half of these pieces."""
        self.seen = []
        for _piece in range(pieces):
            began = self.now
            self.now += PIECE / self.rate(min(self.width.now, self.writers))
            self.width.wrote(PIECE, self.writers, began, self.now)
            self.seen.append(self.width.now)
        self.seen = self.seen[pieces // 2 :]
        return self.seen

    def mostly(self) -> int:
        """The width most of the time."""
        return max(set(self.seen), key=self.seen.count)


def disk(_writers: int) -> float:
    """One writer has all of it."""
    return 100e6


def servers(writers: int) -> float:
    """One for each file."""
    return 100e6 * writers


def distant(writers: int) -> float:
    """Each piece is a round trip, until the link is full."""
    return min(200e6 * writers, 700e6)


def shared(writers: int) -> float:
    """A disk that one other client writes to, and that treats all alike."""
    return 100e6 * writers / (writers + 1)


@pytest.mark.parametrize("scale", [0.05, 1, 40], ids=["slow", "as it is", "fast"])
@pytest.mark.parametrize(
    ("rate", "expected"), [(disk, {1}), (servers, {STREAMS}), (distant, {4}), (shared, {1, 2})]
)
def test_as_many_as_bring_something(
    rate: Callable[[int], float], expected: set[int], scale: float
) -> None:
    storage = Storage(lambda writers: scale * rate(writers))
    storage.write()
    assert storage.mostly() in expected


def test_the_oldest_file_is_seldom_disturbed() -> None:
    storage = Storage(disk)
    seen = storage.write()
    assert seen.count(1) / len(seen) > 0.8


def test_a_storage_that_becomes_another_is_noticed() -> None:
    storage = Storage(servers)
    storage.write()
    storage.rate = disk
    storage.write()
    assert storage.mostly() == 1
    storage.rate = servers
    storage.write()
    assert storage.mostly() == STREAMS


def test_nothing_is_tried_where_nobody_waits() -> None:
    storage = Storage(servers, writers=1)
    assert set(storage.write()) == {1}


def test_no_more_than_there_are_streams() -> None:
    storage = Storage(servers)
    storage.write()
    storage.width.set_most(3)
    assert max(storage.write()) <= 3
    storage.width.set_most(1)
    assert set(storage.write()) == {1}


def test_what_stood_still_says_nothing() -> None:
    """A freeze in the midst of a window would make one writer as slow as nothing, and two good."""
    storage = Storage(disk)
    for _freeze in range(100):
        storage.write(PIECES_MIN - 1)
        storage.now += 30.0
        storage.width.begin()
        assert storage.width.now == 1
