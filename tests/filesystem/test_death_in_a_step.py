"""What a worker leaves that dies in the middle of a step: what it has done to tier files, and the transaction that did not come."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem.closing import Closing
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world
from tests.rig.runtime import REAL

OLD = b"old and complete"
TRUNCATING = os.O_WRONLY | os.O_TRUNC


def test_a_tier_file_outlives_the_state_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "tier" / "data").mkdir(parents=True)
    state = StateDatabase(tmp_path / "state", REAL)
    tier = Tier(tmp_path / "tier", 1 << 20, REAL, when_safe=state.after_commit)
    tier_id = tier.create()
    tier.remove(tier_id)
    assert tier.ids() == []
    assert (tmp_path / "tier" / "data" / str(tier_id)).exists(), (
        "the next worker would find a state without its bytes"
    )
    state.commit()
    assert not (tmp_path / "tier" / "data" / str(tier_id)).exists()


def test_a_tier_file_that_is_gone_already_is_no_bug(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 1 << 20, REAL)
    (tmp_path / "data" / str(tier.create())).unlink()
    tier.remove(tier.ids()[0])
    assert tier.used_bytes == 0


def take_picture(life: Path, after: Path) -> None:
    """What a worker that is killed now leaves. Other threads may be at work on their temporary files."""

    def copy(source: str, target: str) -> None:
        with suppress(FileNotFoundError):
            shutil.copy2(source, target)

    shutil.copytree(life, after, copy_function=copy)


async def in_ram(w: World) -> Ino:
    """A file that the backing directory has, and RAM has for its readers."""
    ino = await w.write(b"f", OLD)
    await w.drained()
    w.engine.hold(True)
    return ino


async def cold(w: World) -> Ino:
    """One that only the backing directory has."""
    (w.backing / "f").write_bytes(OLD)
    return (await w.do(w.fs.lookup(ROOT, b"f"))).ino


async def shown(w: World) -> bytes:
    return await w.read((await w.do(w.fs.lookup(ROOT, b"f"))).ino)


@pytest.mark.clause("S193")
@pytest.mark.parametrize("session", ["", "s"], ids=["a new mount", "a takeover"])
@pytest.mark.parametrize("made", [in_ram, cold])
def test_an_open_that_truncates_and_is_cut_off_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, session: str
) -> None:
    """The worker is killed when the file is empty, and before the next one could know who has it open."""
    life, after = tmp_path / "life", tmp_path / "after"
    life.mkdir()

    async def main() -> None:
        async with world(life, session=session) as w:
            ino = await made(w)
            record = w.inner.open_files._kept.opened

            def picture(handle: Any) -> None:
                take_picture(life, after)
                record(handle)

            monkeypatch.setattr(w.inner.open_files._kept, "opened", picture)
            await w.close(await w.do(w.fs.open(ino, TRUNCATING, CALLER)))
        async with world(after, session=session, hold=False) as w:
            await w.drained()
            assert (w.backing / "f").read_bytes() == await shown(w) == OLD

    trio.run(main)


@pytest.mark.clause("S193")
@pytest.mark.parametrize("where", ["opened", "_choose"], ids=["record", "lane"])
@pytest.mark.parametrize("made", [in_ram, cold])
def test_an_open_that_truncates_and_fails_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, where: str
) -> None:
    """There is no page for the handle's record, or no descriptor for its lane."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        async with world(tmp_path) as w:
            ino = await made(w)
            owner: Any = (
                w.inner.open_files._kept if where == "opened" else w.inner.open_files._lane_use
            )
            with monkeypatch.context() as patch:
                patch.setattr(owner, where, full)
                with pytest.raises(OSError, match="No space"):
                    await w.do(w.fs.open(ino, TRUNCATING, CALLER))
            await w.drained()
            assert (w.backing / "f").read_bytes() == OLD
            assert w.fs.statistics().interrupted_files == 1
            opened = await w.do(w.fs.open(ino, TRUNCATING, CALLER))
            await w.do(w.fs.write(opened.handle, 0, b"new"))
            await w.close(opened)
            await w.drained()
            assert (w.backing / "f").read_bytes() == b"new"

    trio.run(main)


@pytest.mark.clause("S7", "S81")
@pytest.mark.parametrize("call", ["close", "fsync"])
def test_what_the_kernel_wrote_is_known_where_its_mark_is(tmp_path: Path, call: str) -> None:
    """The worker is killed in the close of a file that was written in passthrough, when it has looked at it and not yet made a version.

    The mark says that all is known; if the node's row did not say so in the same transaction, the next worker published an empty file.
    """
    life, after = tmp_path / "life", tmp_path / "after"
    life.mkdir()
    new = b"new" * 100_000

    opened: OpenFile | None = None

    def picture(_pid: int) -> Closing:
        if opened is not None and not after.exists():
            take_picture(life, after)
        return Closing.CALL

    async def finish(w: World, opened: OpenFile) -> None:
        if call == "fsync":
            await w.do(w.fs.fsync(opened.handle, False))
        await w.close(opened)

    async def main() -> None:
        nonlocal opened
        async with world(
            life, closing=picture, session="s", unknown_bytes=1 << 20, max_dirty_age_s=0
        ) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            ino = await w.write(b"f", OLD)
            await w.drained()
            opened = await w.do(w.fs.open(ino, TRUNCATING, CALLER))
            assert opened.lane is Lane.PASSTHROUGH
            os.pwrite(opened.backing_fd, new, 0)
            if (
                call == "fsync"
            ):  # a mark comes, and the picture before anything is said to be finished
                await w.do(w.inner.contents.mark(w.inner.table[ino]))
                picture(0)
            await finish(w, opened)
        async with world(after, session="s", hold=False) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            await finish(w, opened)
            await w.drained()
            assert (w.backing / "f").read_bytes() == await shown(w) == new

    trio.run(main)
