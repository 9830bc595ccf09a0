"""What is known of the closes of an open file: only along its table, and as records have it."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem.close_states import (
    CLOSE_STATES,
    CloseEvent,
    CloseState,
    IllegalCloseError,
)
from acpfs.filesystem.records import Lane
from acpfs.types import ROOT
from tests.filesystem.world import CALLER, KnownOpeners, world

WROTE = 1
WAITS = 128
CLOSED = 256
OTHERS = 32
BITS = 7
TENTATIVE = 8
"""Words of a record, and bits of one, as docs/FORMATS.md has them: earlier workers left them."""


def test_nothing_happens_that_is_in_no_table() -> None:
    """A version is known from its close on, and only as long as that may have been a copy's."""
    with pytest.raises(IllegalCloseError, match=r"clean: a descriptor of it was closed"):
        _ = CLOSE_STATES[CloseState.CLEAN, CloseEvent.CLOSED]
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
        state = CLOSE_STATES[state, event]
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
            kept.record(slot)[BITS] = words[BITS] & ~(WROTE | WAITS | CLOSED) | bits
            kept.record(slot)[TENTATIVE] = words[TENTATIVE] if in_doubt else 0
        async with made() as w:
            handle = w.inner.handles.handle(opened.handle)
            assert handle.state is expected
            assert (handle.store is not None) is in_doubt
            if in_doubt:
                assert handle.is_in_doubt

    trio.run(main)


@pytest.mark.clause("S14", "S391")
def test_a_record_says_that_it_is_written_to_before_the_first_byte_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that somebody else did it: that request does not come again where its caller is killed
    with the worker.
    """

    async def main() -> None:
        async with world(tmp_path, openers=KnownOpeners(), max_dirty_age_s=0) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
            ino = await w.write(b"f", b"old")
            await w.drained()
            opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            seen = []
            write = w.inner.contents.write

            def looked(*arguments: Any, **words: Any) -> Any:
                ((_slot, record),) = w.inner.kept.handles
                seen.append(record[BITS] & (WROTE | OTHERS))
                return write(*arguments, **words)

            monkeypatch.setattr(w.inner.contents, "write", looked)
            await w.do(w.fs.write(opened.handle, 0, b"new", CALLER.pid + 1))
            assert seen == [WROTE | OTHERS]

    trio.run(main)


def test_a_step_writes_a_record_once_and_clears_it_when_that_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens to the open file in it: each word costs as much as a statement of Python."""

    async def main() -> None:
        async with world(tmp_path, openers=KnownOpeners(), max_dirty_age_s=0) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
            opened, _node = await w.do(w.fs.create(ROOT, b"f", 0o644, os.O_WRONLY, CALLER))
            await w.do(w.fs.write(opened.handle, 0, b"new"))
            kept = w.inner.kept.handles
            words: list[tuple[int, int]] = []
            find = kept.record

            class Noted:
                """A record, and what is put into it."""

                def __init__(self, slot: int) -> None:
                    self._record = find(slot)

                def __getitem__(self, word: int) -> int:
                    return self._record[word]

                def __setitem__(self, word: int, value: int) -> None:
                    words.append((word, value & WROTE if word == BITS else value))
                    self._record[word] = value

            with monkeypatch.context() as patch:
                patch.setattr(kept, "record", Noted)
                await w.do(w.fs.flush(opened.handle, CALLER.pid))
            said = [value for word, value in words if word == BITS]
            assert said == [WROTE, 0], "before the commit it is written to, and not any more after"
            assert [word for word, _value in words].count(TENTATIVE) == 2
            await w.do(w.fs.release(opened.handle))

    trio.run(main)


@pytest.mark.clause("S81")
def test_requests_without_a_number_are_not_the_same_one(tmp_path: Path) -> None:
    """Another program's open must not get the handle that the last worker gave to somebody: who
    closes first would close it for both.
    """

    async def main() -> None:
        async with world(tmp_path, session="s") as w:
            ino = await w.write(b"f", b"bytes")
            directories = [await w.do(w.fs.opendir(ROOT))]
            files = [await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))]
        async with world(tmp_path, session="s") as w:
            directories.append(await w.do(w.fs.opendir(ROOT)))
            files.append(await w.do(w.fs.open(ino, os.O_RDONLY, CALLER)))
            assert directories[0] != directories[1]
            assert files[0].handle != files[1].handle

    trio.run(main)
