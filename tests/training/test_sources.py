"""From where each rank takes its state when all have met again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from acpfs.training.messages import Phase, Stopped
from acpfs.training.sources import Having, Origin, sources

clause = pytest.mark.clause
HOLDERS = {0: {"a": (0, 2)}, 1: {"b": (1, 3)}, 2: {"a": (0, 2)}, 3: {"b": (1, 3)}}


def having(rank: int, done: int | None, phase: Phase = Phase.COMPUTING, **more: Any) -> Having:
    """`done` None: a process that is new. READY and UPDATING are those of the next update."""
    damaged = more.pop("damaged", ())
    ready = 0 if done is None else done + (phase is not Phase.COMPUTING)
    stopped = None if done is None else Stopped(done, ready, phase, damaged)
    host = () if done is None else (done, ready) if ready != done else (done - 1, done)
    return Having(HOLDERS[rank], stopped, host, **more)


@clause("T79")
def test_a_new_process_takes_its_shard_from_another_holder_and_random_numbers_from_its_buddy() -> (
    None
):
    found = sources(
        {
            0: having(0, 5, kept={2: (4, 5)}),
            1: having(1, 4, Phase.READY),
            2: having(2, None),
            3: having(3, 5),
        }
    )
    assert (found.origin, found.step, set(found.coming)) == (Origin.MEMORY, 5, {1})
    assert found.wanting == {"a": (2,)}
    assert found.givers["a"] == 0
    assert found.hosts == {0: 0, 1: 1, 2: 0, 3: 3}


@clause("T79")
def test_where_the_buddy_is_gone_too_nobody_has_the_random_numbers() -> None:
    found = sources({0: having(0, 5), 1: having(1, 5), 2: having(2, None), 3: having(3, None)})
    assert found.wanting == {"a": (2,), "b": (3,)}
    assert (found.hosts[2], found.hosts[3]) == (None, None)


@clause("T81")
def test_a_rank_that_lost_its_memory_is_given_its_shards_and_keeps_its_random_numbers() -> None:
    torn = sources(
        {0: having(0, 5), 1: having(1, 4, Phase.UPDATING), 2: having(2, 5), 3: having(3, 5)}
    )
    assert (torn.step, torn.wanting, torn.hosts[1]) == (5, {"b": (1,)}, 1)
    outside = sources(
        {0: having(0, 5), 1: having(1, 5, damaged=("b",)), 2: having(2, 5), 3: having(3, 5)}
    )
    assert (outside.step, outside.wanting, outside.givers["b"]) == (5, {"b": (1,)}, 3)


@clause("T82")
def test_where_no_copy_is_left_it_is_the_mount_and_where_that_has_none_the_beginning() -> None:
    left = {
        0: having(0, 5, mount=3),
        1: having(1, 5, damaged=("b",), mount=3),
        2: having(2, 5, mount=3),
        3: having(3, None, mount=3),
    }
    assert (sources(left).origin, sources(left).step) == (Origin.MOUNT, 3)
    assert sources({rank: having(rank, None) for rank in range(4)}).origin is Origin.BEGINNING


@clause("T82")
def test_a_checkpoint_counts_when_all_see_it_and_when_it_is_newer() -> None:
    mixed = {rank: having(rank, None, mount=3 if rank else None) for rank in range(4)}
    assert sources(mixed).origin is Origin.BEGINNING
    older = {rank: having(rank, 5, mount=3) for rank in range(4)}
    newer = {rank: having(rank, 5, mount=8) for rank in range(4)}
    assert [(found.origin, found.step) for found in (sources(older), sources(newer))] == [
        (Origin.MEMORY, 5),
        (Origin.MOUNT, 8),
    ]


@clause("T159")
def test_what_was_left_before_the_job_went_back_is_void() -> None:
    """Ranks have begun at the snapshot of step 3 in generation 2, and done steps again; then a
    state of generation 1 turns up.
    """
    again = {rank: having(rank, 5, lineage=2) for rank in (0, 1, 2)}
    found = sources({**again, 3: having(3, 5, lineage=1)})
    assert (found.origin, found.step, found.wanting, found.hosts[3], found.lineage) == (
        Origin.MEMORY,
        5,
        {"b": (3,)},
        None,
        2,
    )
    nobody = {
        0: again[0],
        1: having(1, None, mount=3),
        2: again[2],
        3: having(3, 5, lineage=1, mount=3),
    }
    assert sources(nobody).origin is Origin.BEGINNING
    assert (
        sources({rank: replace(one, mount=3) for rank, one in nobody.items()}).origin
        is Origin.MOUNT
    )


@clause("T159")
def test_what_a_process_has_left_counts_as_its_own() -> None:
    left = sources(
        {
            0: having(0, 5, lineage=2),
            1: having(1, 4, Phase.READY, lineage=2),
            2: having(2, 5, lineage=2),
            3: having(3, None),
        }
    )
    assert (left.origin, left.step, set(left.coming), left.givers["b"]) == (
        Origin.MEMORY,
        5,
        {1},
        1,
    )
