"""What a worker leaves that dies in the middle of a step: what it has done to tier files, and the
transaction that did not come.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem.closing import Closing
from acpfs.filesystem.records import AttributeChange, Lane, OpenFile
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, take_picture, world
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
    """The worker is killed when the file is empty, and before the next one could know who has it
    open.
    """
    life = tmp_path / "life"
    after = tmp_path / "after"
    life.mkdir()

    async def main() -> None:
        async with world(life, session=session) as w:
            ino = await made(w)
            record = w.inner.handles.kept.opened

            def picture(handle: Any) -> None:
                take_picture(life, after)
                record(handle)

            monkeypatch.setattr(w.inner.handles.kept, "opened", picture)
            await w.close(await w.do(w.fs.open(ino, TRUNCATING, CALLER)))
        async with world(after, session=session, hold=False) as w:
            await w.drained()
            assert (w.backing / "f").read_bytes() == await shown(w) == OLD

    trio.run(main)


HALF = b"half of what is new" * 4096
KILLED, OPENER, KEEPER = (CALLER._replace(pid=pid, unique=pid) for pid in (5, 6, 7))


async def found(w: World, keeper: str, *, is_half: bool) -> tuple[Ino, OpenFile | None]:
    """A file that the backing directory has, perhaps with a half in its place, and somebody who has
    that in the kernel.
    """
    w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
    ino = await in_ram(w)
    if is_half:
        killed = await w.do(w.fs.open(ino, TRUNCATING, KILLED))
        await w.do(w.fs.write(killed.handle, 0, HALF))
        await w.close(killed, KILLED.pid)
        assert w.fs.statistics().interrupted_files == 1
    w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
    if not keeper:
        return ino, None
    kept = await w.do(w.fs.open(ino, os.O_RDONLY if keeper == "reader" else os.O_WRONLY, KEEPER))
    assert kept.lane is Lane.PASSTHROUGH
    return ino, kept


WORLD: dict[str, Any] = {
    "closing": lambda pid: Closing.KILL if pid == KILLED.pid else Closing.CALL,
    "unknown_bytes": 4096,
    "max_dirty_age_s": 0,
}
KEEPERS = pytest.mark.parametrize("keeper", ["", "reader", "writer"])
HALVES = pytest.mark.parametrize("is_half", [False, True], ids=["whole", "half"])


async def open_with_pictures(
    w: World, ino: Ino, monkeypatch: pytest.MonkeyPatch, take: Callable[[str], None]
) -> OpenFile:
    """An open with O_TRUNC; `take` is told before the tier file is cut, after that, and when the
    open is about to be known.
    """
    record = w.inner.handles.kept.opened
    truncate = os.ftruncate

    def cut(fd: int, size: int) -> None:
        take("before")
        truncate(fd, size)
        take("after")

    def opened(handle: Any) -> None:
        take("record")
        record(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", cut)
        patch.setattr(w.inner.handles.kept, "opened", opened)
        return await w.do(w.fs.open(ino, TRUNCATING, OPENER))


async def write_anew(w: World, opened: OpenFile) -> bytes:
    """Write and close."""
    new = b"all that is new" * 4096
    if opened.lane is Lane.PASSTHROUGH:
        with w.fs.lock:
            node = w.inner.handles.handle(opened.handle).node
            os.pwrite(w.inner.contents.opened(node.body), new, 0)
    else:
        await w.do(w.fs.write(opened.handle, 0, new))
    await w.close(opened)
    return new


@pytest.mark.clause("S193", "S465")
@HALVES
@pytest.mark.parametrize(
    ("keeper", "then"),
    [
        *itertools.product(["", "reader", "writer"], ["is gone", "comes again"]),
        ("writer", "he writes on"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after", "record"])
def test_nor_does_one_of_a_file_that_somebody_has_in_the_kernel_publish_anything(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keeper: str,
    when: str,
    then: str,
    *,
    is_half: bool,
) -> None:
    """The worker is killed, and the caller with it, or not."""
    life = tmp_path / "life"
    after = tmp_path / "after"
    life.mkdir()

    def take(moment: str) -> None:
        if moment in (when, "record") and not after.exists():
            take_picture(life, after)

    async def main() -> None:
        async with world(life, session="s", **WORLD) as w:
            ino, kept = await found(w, keeper, is_half=is_half)
            await w.close(await open_with_pictures(w, ino, monkeypatch, take))
            if kept is not None:
                await w.close(kept)
        async with world(after, session="s", hold=False, **WORLD) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            await w.drained()
            new = b""
            if then == "comes again":
                ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
                new = await write_anew(w, await w.do(w.fs.open(ino, TRUNCATING, OPENER)))
            elif then == "he writes on":
                assert kept is not None
                new = await write_anew(w, kept)
            if kept is not None and then != "he writes on":
                await w.close(kept)
            await w.drained()
            if new:
                assert (w.backing / "f").read_bytes()[: len(new)] == new
                assert w.fs.statistics().interrupted_files == 0
            else:
                assert (w.backing / "f").read_bytes() == OLD
                is_kept = not keeper or when == "before"
                assert await shown(w) == ((HALF if is_half else OLD) if is_kept else b"")
                assert w.fs.statistics().interrupted_files == (is_half or bool(keeper))

    trio.run(main)


@pytest.mark.clause("S465")
@KEEPERS
@pytest.mark.parametrize("size", [0, 1000])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_half_that_is_shortened_by_path_stays_one_until_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeper: str, size: int, when: str
) -> None:
    life = tmp_path / "life"
    after = tmp_path / "after"
    life.mkdir()

    async def main() -> None:
        async with world(life, session="s", **WORLD) as w:
            ino, kept = await found(w, keeper, is_half=True)
            truncate = os.ftruncate

            def cut(fd: int, length: int) -> None:
                if when == "after":
                    truncate(fd, length)
                take_picture(life, after)
                truncate(fd, length)

            with monkeypatch.context() as patch:
                patch.setattr(os, "ftruncate", cut)
                await w.do(w.fs.setattr(ino, AttributeChange(size=size), None, OPENER))
            if kept is not None:
                await w.close(kept)
        if not after.exists():
            assert (keeper, size) == ("", 0)  # it gets another tier file
            return
        async with world(after, session="s", hold=False, **WORLD) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            if kept is not None:
                await w.close(kept)
            await w.drained()
            assert (w.backing / "f").read_bytes() == OLD
            assert w.fs.statistics().interrupted_files == 1

    trio.run(main)


@pytest.mark.clause("S193", "S465")
@KEEPERS
@HALVES
@pytest.mark.parametrize("where", ["truncation", "record"])
def test_nor_does_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeper: str, where: str, *, is_half: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        async with world(tmp_path, **WORLD) as w:
            ino, kept = await found(w, keeper, is_half=is_half)
            with monkeypatch.context() as patch:
                if where == "truncation" and keeper:
                    patch.setattr(os, "ftruncate", full)
                elif where == "truncation":
                    patch.setattr(w.inner.contents, "create", full)
                else:
                    patch.setattr(w.inner.handles.kept, "opened", full)
                with pytest.raises(OSError, match="No space"):
                    await w.do(w.fs.open(ino, TRUNCATING, OPENER))
            w.engine.hold(False)
            if kept is not None:
                await w.close(kept)
            await w.drained()
            assert (w.backing / "f").read_bytes() == OLD
            is_kept = where == "truncation"
            assert await shown(w) == ((HALF if is_half else OLD) if is_kept else b"")
            assert w.fs.statistics().interrupted_files == (is_half or not is_kept)

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
            owner: Any = w.inner.handles.kept if where == "opened" else w.inner.lane_use
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
    """The worker is killed in the close of a file that was written in passthrough, when it has
    looked at it and not yet made a version.

    The mark says that all is known; if the node's row did not say so in the same transaction, the
    next worker published an empty file.
    """
    life = tmp_path / "life"
    after = tmp_path / "after"
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


@pytest.mark.clause("S81")
def test_what_the_kernel_writes_does_not_leave_ram_in_a_takeover(tmp_path: Path) -> None:
    """The next worker has less RAM than is taken, and knows late who has files open: what was
    written would be in a file that nobody reads.
    """

    async def main() -> None:
        async with world(tmp_path, session="s", hold=False) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            ino = await w.write(b"f.pt", bytes(1 << 20))
            await w.drained()
            opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
            assert opened.lane is Lane.PASSTHROUGH
            kernel_fd = os.dup(opened.backing_fd)
            os.pwrite(kernel_fd, b"synced", 0)
            await w.do(w.fs.fsync(opened.handle, datasync=False))
            await w.drained()
        async with world(tmp_path, session="s", hold=False, budget_bytes=1 << 18) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            os.pwrite(kernel_fd, b"later!", 0)
            os.close(kernel_fd)
            await w.close(opened)
            await w.drained()
            assert (w.backing / "f.pt").read_bytes()[:6] == b"later!"

    trio.run(main)
