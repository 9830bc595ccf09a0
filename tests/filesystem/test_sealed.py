"""Changing a file that overflowed and was closed, while one that outgrew RAM stands before it in
the order, and stays open.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from acpfs.config import WhenFull
from acpfs.filesystem.records import AttributeChange, Lane
from acpfs.types import Ino
from tests.filesystem.held_call import HeldCall
from tests.filesystem.test_hold import Kernel, run, writer
from tests.filesystem.test_outgrown import MIB, outgrow, patterned, until
from tests.filesystem.world import CALLER, World

pytestmark = pytest.mark.clause("S53", "S18")

SIZE = 70 * MIB

Change = Callable[[World, Ino, bytearray], Awaitable[None]]


def behind_an_open_one(base: Path, change: Change) -> None:
    """Make a change, and the same to the bytes that are expected; then close the open file, and
    look.
    """

    async def scenario(w: World, kernel: Kernel) -> None:
        w.engine.hold(False)
        big, opened = await writer(w, b"big")
        data = patterned(100 * MIB)
        await outgrow(w, kernel, opened, big, data)
        await w.do(w.fs.fsync(opened.handle, False))
        w.inner.room.change_policy(WhenFull.NATIVE)
        w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
        expected = bytearray(patterned(SIZE, seed=7))
        ino = await w.write(b"behind", bytes(expected))
        assert [(op.name, op.unsealed) for op in w.log] == [(b"big", True), (b"behind", False)]
        await change(w, ino, expected)
        assert await w.read(ino, 2 * SIZE) == expected
        assert not (w.backing / "behind").exists()
        await w.close(opened)
        await w.drained()
        assert (w.backing / "big").read_bytes() == data
        assert (w.backing / "behind").read_bytes() == expected
        await until(w, lambda: not w.lower.list_staging())

    run(base, scenario)


def test_writing_to_it_does_not_wait_for_a_close_that_may_be_the_writers_own(
    tmp_path: Path,
) -> None:
    async def change(w: World, ino: Ino, expected: bytearray) -> None:
        opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(opened.handle, 3, b"xyz"))
        expected[3:6] = b"xyz"
        await w.close(opened)

    behind_an_open_one(tmp_path, change)


def test_nor_does_truncating_it(tmp_path: Path) -> None:
    async def change(w: World, ino: Ino, expected: bytearray) -> None:
        await w.do(w.fs.setattr(ino, AttributeChange(size=5 * MIB + 7), None, CALLER))
        del expected[5 * MIB + 7 :]

    behind_an_open_one(tmp_path, change)


def test_a_copy_that_is_not_changed_goes(tmp_path: Path) -> None:
    """It was made for a write that then failed: what was closed before is what the file has."""

    async def change(w: World, ino: Ino, _expected: bytearray) -> None:
        opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        with w.fs.lock:
            node = w.inner.table[ino]
        await w.do(w.inner.files._writable.ensure(node))
        assert not node.body.sealed
        await w.close(opened)
        assert node.body.sealed

    behind_an_open_one(tmp_path, change)


def test_a_write_that_was_late_for_its_close_is_in_the_copy_too(tmp_path: Path) -> None:
    """It was under way when another descriptor was closed: it goes to the sealed file, which the
    close waits for.
    """

    async def change(w: World, ino: Ino, expected: bytearray) -> None:
        copy = w.inner.overflow._copy
        held = HeldCall(lambda: None)

        def copied(source: int, target: int, size: int) -> None:
            copy(source, target, size)
            held()

        w.inner.overflow._copy = copied  # type: ignore[method-assign]
        with w.fs.lock:
            node = w.inner.table[ino]
        async with trio.open_nursery() as nursery:
            opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            nursery.start_soon(w.do, w.fs.write(opened.handle, 3, b"xyz"))
            assert await trio.to_thread.run_sync(held.began.wait, 60)
            await w.do(w.inner.contents.write(node, MIB, b"late"))
            held.go_on.set()
        expected[3:6] = b"xyz"
        expected[MIB : MIB + 4] = b"late"
        await w.close(opened)

    behind_an_open_one(tmp_path, change)


def test_a_close_that_was_not_the_last_one_leaves_nothing_behind(tmp_path: Path) -> None:
    """A copy of its descriptor goes on after another one has changed the file: what that close had
    fixed is nobody's any more.
    """

    async def change(w: World, ino: Ino, expected: bytearray) -> None:
        first = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(first.handle, 0, b"1"))
        await w.do(w.fs.flush(first.handle))
        other = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(other.handle, 1, b"2"))
        await w.do(w.fs.write(first.handle, 2, b"3"))
        expected[:3] = b"123"
        await w.close(other)
        await w.close(first)
        await until(
            w,
            lambda: (
                set(w.lower.list_staging())
                <= {op.version.staging_name for op in w.log if op.version is not None}
            ),
        )

    behind_an_open_one(tmp_path, change)
