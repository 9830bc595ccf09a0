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


ALONE = {rank: {f"ranks-{rank}": (rank,)} for rank in range(4)}


def alone(rank: int, done: int | None, *copies: tuple[int, int, int], **more: Any) -> Having:
    """Of ranks of which each holds what nobody else does. `copies`: lineage, step, whose."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for lineage, step, whose in copies:
        found[lineage, step] = (*found.get((lineage, step), ()), whose)
    return replace(having(rank, done), holders=ALONE[rank], copies=found, **more)


def kept(step: int, lineage: int = 0, whose: tuple[int, ...] = (0, 1, 2, 3)) -> dict[int, Any]:
    """Who has which copy of that step: each rank its own, and that of half of all further on."""
    return {
        rank: [(lineage, step, one) for one in (rank, (rank + 2) % 4) if one in whose]
        for rank in range(4)
    }


@clause("T209", "T210")
def test_where_a_shard_is_lost_all_go_back_to_the_newest_copy_that_is_whole() -> None:
    """That of step 6 has not come to the buddy of the rank that died."""
    old = kept(4)
    new = kept(6, whose=(0, 2, 3))
    told = {rank: alone(rank, 7, *old[rank], *new[rank]) for rank in (0, 2, 3)}
    found = sources({**told, 1: alone(1, None)})
    assert (found.origin, found.step, found.tag) == (Origin.COPIES, 4, (0, 4))
    assert found.parcels[1] == {"ranks-1": (3, 1)}
    assert found.parcels[2] == {"ranks-2": (2, 2)}
    assert found.hosts == {0: 0, 1: 3, 2: 2, 3: 3}
    assert sources({**told, 1: alone(1, 7)}).origin is Origin.MEMORY
    assert sources({**told, 1: alone(1, 7)}).tag == (0, 4)


@clause("T211")
def test_where_a_rank_and_its_buddy_are_lost_it_is_the_mount() -> None:
    copies = kept(4)
    told = {rank: alone(rank, 7, *copies[rank], mount=2) for rank in (0, 2)}
    lost = {rank: alone(rank, None, mount=2) for rank in (1, 3)}
    assert (sources({**told, **lost}).origin, sources({**told, **lost}).step) == (Origin.MOUNT, 2)
    newer = {rank: alone(rank, 7, *copies[rank], mount=5) for rank in (0, 2, 3)}
    found = sources({**newer, 1: alone(1, None, mount=5)})
    assert (found.origin, found.step, found.tag) == (Origin.MOUNT, 5, None)
    older = {rank: replace(one, mount=3) for rank, one in newer.items()}
    assert sources({**older, 1: alone(1, None, mount=3)}).origin is Origin.COPIES


@clause("T209")
def test_a_copy_counts_whatever_its_lineage_and_the_newer_line_first() -> None:
    """All had gone back to step 4, and a rank has not heard of it; then to a copy taken anew."""
    before = kept(4)
    after = kept(4, lineage=3)
    told = {
        rank: alone(rank, 5, *before[rank], *after[rank], lineage=3 if rank else 2)
        for rank in (0, 2, 3)
    }
    found = sources({**told, 1: alone(1, None)})
    assert (found.origin, found.tag) == (Origin.COPIES, (3, 4))
    without = {rank: alone(rank, 5, *before[rank], lineage=3 if rank else 2) for rank in (0, 2, 3)}
    assert sources({**without, 1: alone(1, None)}).tag == (0, 4)


@clause("T209")
def test_another_holders_copy_will_do() -> None:
    """Ranks 1 and 3 hold the same, and only rank 3's copy is left, without rank 1's host state."""
    told = {rank: having(rank, 5, copies={(0, 4): (rank,)}) for rank in (0, 2)}
    told |= {1: having(1, None), 3: having(3, None, copies={(0, 4): (3,)})}
    found = sources(told)
    assert (found.origin, found.parcels[1], found.hosts[1]) == (Origin.COPIES, {"b": (3, 3)}, None)
