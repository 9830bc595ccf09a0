"""What is known of the closes of an open file: only along its table, and as records have it."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.close_states import (
    CLOSE_STATES,
    CloseEvent,
    CloseState,
    IllegalCloseError,
    next_state,
)
from acpfs.filesystem.records import Lane
from tests.filesystem.world import CALLER, KnownOpeners, world

WROTE = 1
WAITS = 128
CLOSED = 256
BITS = 7
TENTATIVE = 8
"""Words of a record, and bits of one, as docs/FORMATS.md has them: earlier workers left them."""


def test_nothing_happens_that_is_in_no_table() -> None:
    """A version is known from its close on, and only as long as that may have been a copy's."""
    with pytest.raises(IllegalCloseError, match=r"clean: a descriptor of it was closed"):
        next_state(CloseState.CLEAN, CloseEvent.CLOSED)
    have_version = {CloseState.LOGGED, CloseState.OVERTAKEN}
    makes_one = {CloseEvent.PUBLISHED, CloseEvent.FOUND}
    assert [
        (before, event)
        for (before, event), after in CLOSE_STATES.items()
        if after in have_version and before not in have_version and event not in makes_one
    ] == []


def test_every_state_is_reached_and_left() -> None:
    reached = {CloseState.CLEAN}
    chance = random.Random(41)
    state = CloseState.CLEAN
    for _event in range(10_000):
        event = chance.choice([event for at, event in CLOSE_STATES if at is state])
        state = next_state(state, event)
        reached.add(state)
    assert reached == set(CloseState)


@pytest.mark.parametrize(
    ("bits", "in_doubt", "expected"),
    [
        (0, False, CloseState.CLEAN),
        (WROTE, False, CloseState.WRITTEN),
        (WAITS, False, CloseState.WAITING),
        (CLOSED, False, CloseState.OVER),
        (0, True, CloseState.LOGGED),
        # a call wrote, or was about to, when the worker died, and the version is there still
        (WROTE, True, CloseState.OVERTAKEN),
        # a close whose wait was not committed: its request comes again
        (WROTE | WAITS, False, CloseState.WRITTEN),
        # an earlier acpfs left this bit where a copy went on
        (WROTE | CLOSED, False, CloseState.WRITTEN),
        (WAITS | CLOSED, False, CloseState.WAITING),
        (CLOSED, True, CloseState.LOGGED),
        # the version was withdrawn for another's sake, which was not committed
        (WAITS, True, CloseState.LOGGED),
    ],
)
@pytest.mark.clause("S468")
def test_the_next_worker_finds_the_state_in_every_record(
    tmp_path: Path, bits: int, *, in_doubt: bool, expected: CloseState
) -> None:
    made = partial(world, tmp_path, openers=KnownOpeners(), session="s", max_dirty_age_s=0)

    async def main() -> None:
        async with made() as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
            ino = await w.write(b"f", b"old")
            opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER._replace(unique=1)))
            await w.do(w.fs.write(opened.handle, 0, b"new"))
            await w.do(w.fs.flush(opened.handle, CALLER.pid))
            ((slot, words),) = w.inner.kept.handles
            assert words[TENTATIVE], "of its close"
            kept = w.inner.kept.handles
            kept.set(slot, BITS, words[BITS] & ~(WROTE | WAITS | CLOSED) | bits)
            kept.set(slot, TENTATIVE, words[TENTATIVE] if in_doubt else 0)
        async with made() as w:
            handle = w.inner.handles.handle(opened.handle)
            assert handle.state is expected
            assert (handle.store is not None) is in_doubt
            if in_doubt:
                assert handle.is_in_doubt

    trio.run(main)
