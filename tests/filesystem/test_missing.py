"""Tier files that somebody removed: what the backing directory has is read from there, the rest is
named, and nothing else suffers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.steps import settled
from acpfs.types import ROOT, HandleId, Ino
from tests.filesystem.world import CALLER, World, world

pytestmark = pytest.mark.clause("S198")

Left = Callable[[World], Awaitable[list[Ino]]]
Found = Callable[[World], Awaitable[None]]


def killed(base: Path, leave: Left, find: Found) -> None:
    """`leave` says of which nodes the tier files are removed while no worker is there."""

    async def main() -> None:
        async with world(base) as w:
            nodes = [w.inner.table[ino] for ino in await leave(w)]
            tier_ids = [node.body.tier for node in nodes if not node.body.is_cold]
        for tier_id in tier_ids:
            (base / "tier/data" / str(tier_id)).unlink()
        assert tier_ids
        async with world(base) as w:
            await find(w)

    trio.run(main)


async def open_writer(w: World, name: bytes, flags: int = os.O_WRONLY) -> HandleId:
    found = await w.do(w.fs.lookup(ROOT, name))
    return (await w.do(w.fs.open(found.ino, flags, CALLER))).handle


async def fails_to_read(w: World, name: bytes) -> None:
    found = await w.do(w.fs.lookup(ROOT, name))
    with pytest.raises(OSError, match="gone from the RAM tier") as refused:
        await w.read(found.ino)
    assert refused.value.errno == errno.EIO


def test_what_is_clean_is_read_from_the_backing_directory(tmp_path: Path) -> None:
    async def leave(w: World) -> list[Ino]:
        ino = await w.write(b"f", b"bytes")
        await w.drained()
        return [ino]

    async def find(w: World) -> None:
        found = await w.do(w.fs.lookup(ROOT, b"f"))
        assert await w.read(found.ino) == b"bytes"
        assert w.inner.missing.warnings() == []

    killed(tmp_path, leave, find)


async def leave_two(w: World) -> list[Ino]:
    (w.backing / "lost").write_bytes(b"old")
    await w.write(b"kept", b"kept bytes")
    ino = await w.write(b"lost", b"lost bytes")
    await w.write(b"also-kept", b"more")
    return [ino]


async def drained_but_for_the_lost(w: World) -> None:
    await w.drained()
    assert [op.name for op in w.log.parked()] == [b"lost"]
    with trio.fail_after(60):
        found = await w.do(w.fs.lookup(ROOT, b"also-kept"))
        await settled(w.engine.persisted(w.log.last_seq, found.ino))
    assert (w.backing / "kept").read_bytes() == b"kept bytes"
    assert (w.backing / "also-kept").read_bytes() == b"more"
    assert (w.backing / "lost").read_bytes() == b"old"


def test_what_was_not_persisted_is_named_and_can_be_given_up(tmp_path: Path) -> None:
    async def find(w: World) -> None:
        (warning,) = w.inner.missing.warnings()
        assert "lost before they were persisted are lost;" in warning
        await fails_to_read(w, b"lost")
        await drained_but_for_the_lost(w)
        w.engine.retry()
        await drained_but_for_the_lost(w)
        assert w.engine.discard([op.seq for op in w.log.parked()]) == 1
        found = await w.do(w.fs.lookup(ROOT, b"lost"))
        assert found.size == len(b"old")
        assert await w.read(found.ino) == b"old"
        data = tmp_path / "tier/data"
        assert w.tier.used_bytes == sum(file.stat().st_blocks * 512 for file in data.iterdir())

    killed(tmp_path, leave_two, find)


def test_what_was_not_persisted_can_be_written_anew(tmp_path: Path) -> None:
    async def find(w: World) -> None:
        await drained_but_for_the_lost(w)
        handle = await open_writer(w, b"lost", os.O_WRONLY | os.O_TRUNC)
        await w.do(w.fs.write(handle, 0, b"anew"))
        with pytest.raises(
            OSError, match="Input/output error"
        ):  # what close tells is what became of the version before (S24)
            await w.do(w.fs.flush(handle))
        await w.do(w.fs.release(handle))
        with trio.fail_after(60):
            while len(w.log):
                w.engine.wake()
                await trio.sleep(0.002)
        assert (w.backing / "lost").read_bytes() == b"anew"
        assert not w.log.parked()

    killed(tmp_path, leave_two, find)


def test_what_was_being_written_is_not_stored(tmp_path: Path) -> None:
    async def leave(w: World) -> list[Ino]:
        opened, attributes = await w.create(b"lost")
        await w.do(w.fs.write(opened.handle, 0, b"half"))
        return [attributes.ino]

    async def find(w: World) -> None:
        await fails_to_read(w, b"lost")
        assert [report.state for report in w.fs.files_report()] == ["interrupted"]
        handle = await open_writer(w, b"lost", os.O_WRONLY | os.O_TRUNC)
        await w.do(w.fs.write(handle, 0, b"whole"))
        await w.do(w.fs.flush(handle))
        await w.do(w.fs.release(handle))
        await w.drained()
        assert (w.backing / "lost").read_bytes() == b"whole"

    killed(tmp_path, leave, find)
