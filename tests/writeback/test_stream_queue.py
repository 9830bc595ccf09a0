"""How many small files are streamed at a time: as many as wait for the backing directory, and no
more than that.
"""

from __future__ import annotations

import pytest

from acpfs.writeback.streams.stream_queue import QUICK_FOR_S, QUICK_S, QUICK_STREAMS, StreamQueue
from acpfs.writeback.streams.streams import SMALL_BYTES_MAX, Stream
from tests.rig.runtime import clock_of
from tests.writeback.world import World

STREAMS = 8
NOW = 1000.0


class Clock:
    """Monotonic time, moved by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def queue_of(world: World, clock: Clock, small: int, large: int = 0) -> StreamQueue:
    queue = StreamQueue(world.log, {}, lambda _version: False, STREAMS, clock_of(clock))
    for number in range(small + large):
        queue.add(world.store(f"f{number}", bytes(10 if number < small else SMALL_BYTES_MAX + 1)))
    return queue


def start_all(queue: StreamQueue) -> list[Stream]:
    started = []
    while (op := queue.next(0.0)) is not None:
        started.append(queue.start(op))
    return started


def persist(queue: StreamQueue, seconds: float, count: int = 1) -> None:
    """The next ones are staged; the backing directory took so long for each."""
    for _ in range(count):
        op = queue.next(0.0)
        assert op is not None
        stream = queue.start(op)
        stream.backing_s = seconds
        queue.end(stream)


def test_a_quick_backing_directory_gets_few_threads(world: World, clock: Clock) -> None:
    queue = queue_of(world, clock, 60)
    persist(queue, QUICK_S / 2)
    assert len(start_all(queue)) == QUICK_STREAMS


def test_one_that_is_waited_for_gets_many(world: World, clock: Clock) -> None:
    queue = queue_of(world, clock, 60)
    persist(queue, QUICK_S * 2)
    assert len(start_all(queue)) == queue.threads_max > QUICK_STREAMS


def test_nothing_is_known_of_it_at_first(world: World, clock: Clock) -> None:
    queue = queue_of(world, clock, 60)
    assert len(start_all(queue)) == queue.threads_max


def test_one_that_becomes_slow_is_noticed(world: World, clock: Clock) -> None:
    queue = queue_of(world, clock, 200)
    persist(queue, QUICK_S / 2)
    persist(queue, QUICK_S * 10, 60)
    assert len(start_all(queue)) == queue.threads_max


def test_a_slow_file_among_quick_ones_changes_nothing(world: World, clock: Clock) -> None:
    queue = queue_of(world, clock, 60)
    persist(queue, QUICK_S / 2)
    persist(queue, 1.0)
    assert len(start_all(queue)) == QUICK_STREAMS


def test_a_few_quick_files_among_slow_ones_change_nothing(world: World, clock: Clock) -> None:
    """As where some of them lie on a server near by."""
    queue = queue_of(world, clock, 200)
    for _ in range(8):
        persist(queue, QUICK_S / 2)
        persist(queue, QUICK_S * 10, 9)
    assert len(start_all(queue)) == queue.threads_max


def test_others_go_past_files_that_hang(world: World, clock: Clock) -> None:
    """Those that are under way may lie on a server that does not answer, and the rest on others."""
    queue = queue_of(world, clock, 60)
    persist(queue, QUICK_S / 2)
    assert len(start_all(queue)) == QUICK_STREAMS
    assert queue.next_due(5.0) == 5.0 + QUICK_FOR_S, "nobody else would say that it is time"
    clock.now += QUICK_FOR_S
    assert len(start_all(queue)) == queue.threads_max - QUICK_STREAMS


def test_large_files_keep_their_share(world: World, clock: Clock) -> None:
    queue = queue_of(world, clock, 1, large=STREAMS + 1)
    persist(queue, QUICK_S / 2)
    for _ in range(QUICK_STREAMS):
        queue.add(world.store("more", b"small"))
    assert sum(stream.version.size > SMALL_BYTES_MAX for stream in start_all(queue)) == STREAMS


def test_a_file_whose_staging_file_was_there_already_says_nothing(
    world: World, clock: Clock
) -> None:
    queue = queue_of(world, clock, 60)
    op = queue.next(0.0)
    assert op is not None
    queue.end(queue.start(op))
    assert len(start_all(queue)) == queue.threads_max
