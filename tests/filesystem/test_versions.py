"""A version's bytes stay what they were at close, whatever happens to the file afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem.records import AttributeChange, OpenFile
from acpfs.filesystem.steps import Call, settled
from acpfs.types import ROOT
from acpfs.writeback.log.ops import Metadata, VersionState
from tests.filesystem.held_call import HeldCall
from tests.filesystem.world import CALLER, World, run, world
from tests.rig.syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE


def stored_by(w: World, name: bytes) -> list[bytes]:
    """Contents that the log would store under a name, oldest first."""
    contents = []
    for op in w.log:
        if op.version is not None and op.name == name:
            fd = w.tier.open(op.version.tier_id)
            contents.append(os.pread(fd, op.version.size, 0))
            os.close(fd)
    return contents


def test_each_close_is_a_version_of_its_own(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"tracker", b"1")
        await w.write(b"shard", b"s")
        await w.write(b"tracker", b"2")
        assert stored_by(w, b"tracker") == [b"1", b"2"]

    run(tmp_path, scenario)


def test_append_shares_the_tier_file(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"log", b"first")
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_APPEND, CALLER))
        await w.do(w.fs.write(opened.handle, 5, b" second"))
        await w.close(opened)
        assert stored_by(w, b"log") == [b"first", b"first second"]
        assert w.fs.statistics().content.copied_aside_bytes == 0

    run(tmp_path, scenario)


@pytest.mark.parametrize("size", [100, 3 << 20], ids=["inline", "in a thread"])
def test_overwriting_in_place_copies_the_version_aside(tmp_path: Path, size: int) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"db", b"a" * size)
        opened = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
        await w.do(w.fs.write(opened.handle, 10, b"b" * 10))
        await w.close(opened)
        old, new = stored_by(w, b"db")
        assert old == b"a" * size
        assert new == b"a" * 10 + b"b" * 10 + b"a" * (size - 20)
        assert w.fs.statistics().content.copied_aside_bytes == size

    run(tmp_path, scenario)


def test_a_copy_aside_whose_writer_is_killed_has_its_room_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread fills pages still. What it has made is of use to who comes next."""
    size = 3 << 20

    async def scenario(w: World) -> None:
        ino = await w.write(b"db", b"a" * size)
        opened = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
        held = HeldCall(w.tier.copy)
        monkeypatch.setattr(w.tier, "copy", held)
        dying = w.fs.write(opened.handle, 10, b"b" * 10)
        copying = w.fs.steps.step(dying, None)
        assert await trio.to_thread.run_sync(held.began.wait, 60)
        told: Future[None] = Future()
        told.cancel()
        assert w.fs.steps.step(dying, told) is copying
        assert w.tier.reserved_bytes == size
        assert w.inner.table[ino].body.busy is not None
        held.go_on.set()
        await settled(copying)
        await go_on(w, dying, copying)
        assert w.tier.reserved_bytes == 0
        await w.do(w.fs.write(opened.handle, 20, b"c" * 10))
        await w.close(opened)
        assert w.fs.statistics().content.copied_aside_bytes == size

    run(tmp_path, scenario)


async def go_on(w: World, call: Call[Any], done: Future[Any]) -> None:
    """Make the rest of a call."""
    with suppress(StopIteration):
        while True:
            done = w.fs.steps.step(call, done)
            await settled(done)


def test_truncating_copies_the_version_aside(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"0123456789")
        await w.do(w.fs.setattr(ino, AttributeChange(size=4), None, CALLER))
        assert stored_by(w, b"f") == [b"0123456789", b"0123"]

    run(tmp_path, scenario)


def test_fsync_then_more_writes(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        opened, _ = await w.create(b"wal", flags=os.O_RDWR)
        await w.do(w.fs.write(opened.handle, 0, b"one"))
        await w.do(w.fs.fsync(opened.handle, datasync=False))
        await w.do(w.fs.write(opened.handle, 0, b"two"))
        await w.close(opened)
        assert stored_by(w, b"wal") == [b"one", b"two"]

    run(tmp_path, scenario)


def test_close_without_change_makes_no_version(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"x")
        opened = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
        await w.close(opened)
        assert len(w.log) == 1

    run(tmp_path, scenario)


def test_rename_of_a_file_that_is_being_written_carries_its_data(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"final", b"old")
        await w.drained()
        w.engine.hold(True)
        opened, _ = await w.create(b"tmp")
        await w.do(w.fs.write(opened.handle, 0, b"new"))
        await w.do(
            w.fs.rename(ROOT, b"tmp", ROOT, b"final", 0)
        )  # as safetensors does: close comes later
        await w.drained()
        assert (w.backing / "final").read_bytes() == b"new"
        await w.close(opened)
        assert len(w.log) == 0

    run(tmp_path, scenario)


def test_a_write_that_failed_is_not_published(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        opened, _ = await w.create(b"big")
        await w.do(w.fs.write(opened.handle, 0, b"x" * 4096))
        with pytest.raises(OSError, match="No space"):
            await w.do(w.fs.write(opened.handle, 4096, b"y" * (2 << 20)))
        with pytest.raises(OSError, match="No space"):
            await w.do(w.fs.flush(opened.handle))
        await w.do(w.fs.release(opened.handle))
        await w.drained()
        assert not (w.backing / "big").exists()

    run(tmp_path, scenario, budget_bytes=1 << 20, when_full="error")


def test_gauges_return_to_zero(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        for i in range(20):
            await w.write(b"f%d" % i, b"x" * 10_000)
        for i in range(20):
            await w.do(w.fs.unlink(ROOT, b"f%d" % i))
        for attributes in [n for n in w.inner.table if n.ino != 1]:
            w.fs.forget([(attributes.ino, attributes.lookups)])
        await w.drained()
        statistics = w.fs.statistics()
        assert (statistics.open_files, statistics.nodes) == (0, 1)
        assert (
            statistics.tier.used_bytes,
            statistics.tier.reserved_bytes,
            statistics.tier.files,
        ) == (0, 0, 0)
        assert w.tree.path(ROOT) == ()

    run(tmp_path, scenario)


@pytest.mark.clause("S14", "S7")
def test_a_copy_of_the_descriptor_that_is_closed_does_not_publish_half_a_file(
    tmp_path: Path,
) -> None:
    """A thread starts a program while another one saves: the child's exec closes its copy of the
    descriptor, which is a FLUSH.
    """

    async def scenario(w: World) -> None:
        opened, _ = await w.create(b"model.pt")
        await w.do(w.fs.write(opened.handle, 0, b"half"))
        await w.do(w.fs.flush(opened.handle))
        await w.write(b"other", b"x")
        with trio.move_on_after(0.2):
            await w.drained()
        assert not (w.backing / "model.pt").exists()
        await w.do(w.fs.write(opened.handle, 4, b" and half"))
        await w.drained()
        assert (w.backing / "other").exists()
        assert not (w.backing / "model.pt").exists()
        await w.close(opened)
        await w.drained()
        assert (w.backing / "model.pt").read_bytes() == b"half and half"
        assert len(w.log) == 0

    run(tmp_path, scenario)


def test_a_descriptor_that_stays_open_elsewhere_holds_up_the_drain_for_a_while_only(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        opened, _ = await w.create(b"log")
        await w.do(w.fs.write(opened.handle, 0, b"line"))
        await w.do(w.fs.flush(opened.handle))
        with w.fs.lock:
            w.fs.freeze_all()
        await w.drained()
        assert (w.backing / "log").read_bytes() == b"line"
        await w.do(w.fs.write(opened.handle, 4, b" two"))
        await w.close(opened)
        await w.drained()
        assert (w.backing / "log").read_bytes() == b"line two"

    run(tmp_path, scenario)


def test_an_xattr_set_between_two_closes_survives_the_withdrawal_of_the_first(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"old")
        await w.drained()
        opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(opened.handle, 0, b"one"))
        await w.do(w.fs.flush(opened.handle))  # a copy of the descriptor is closed
        await w.do(w.fs.setxattr(ino, b"user.tag", b"kept"))
        await w.do(w.fs.write(opened.handle, 3, b"two"))
        await w.close(opened)
        await w.drained()
        assert (w.backing / "f").read_bytes() == b"onetwo"
        assert os.getxattr(w.backing / "f", "user.tag") == b"kept"

    run(tmp_path, scenario)


@pytest.mark.parametrize("how", ["truncate", "fallocate"])
def test_any_change_through_a_copied_descriptor_withdraws_the_first_close(
    tmp_path: Path, how: str
) -> None:
    async def scenario(w: World) -> None:
        opened, attributes = await w.create(b"f")
        await w.do(w.fs.write(opened.handle, 0, b"half"))
        await w.do(w.fs.flush(opened.handle))
        if how == "truncate":
            await w.do(w.fs.setattr(attributes.ino, AttributeChange(size=2), opened.handle, CALLER))
        else:
            await w.do(w.fs.fallocate(opened.handle, 0, 0, 8))
        assert len(w.log) == 0
        await w.close(opened)
        assert len(w.log) == 1

    run(tmp_path, scenario)


BEHIND_A_CLOSE = {
    "wider": AttributeChange(mode=0o666),
    "narrower": AttributeChange(mode=0o600),
    "times": AttributeChange(mtime_ns=5 * 10**9),
    "xattr": AttributeChange(),
}


def has_mode(path: Path, mode: int) -> bool:
    return path.stat().st_mode & 0o777 == mode


@pytest.mark.clause("S14", "S469")
@pytest.mark.parametrize("then", ["is written to", "is written to by the next worker"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "overwritten"])
@pytest.mark.parametrize("change", BEHIND_A_CLOSE)
def test_attributes_logged_behind_a_close_do_not_keep_it_from_being_taken_back(
    tmp_path: Path, change: str, is_new: bool, then: str
) -> None:
    """They are behind it where its bytes are on their way already, or where rights may not take the
    place of earlier ones.
    """
    given = BEHIND_A_CLOSE[change]

    async def begin(w: World) -> OpenFile:
        if not is_new:
            await w.write(b"f", b"old")
            await w.drained()
        w.engine.hold(True)
        if is_new:
            opened, _attributes = await w.create(b"f")
        else:
            [ino] = [node.ino for node in w.inner.table if node.names and node.is_file]
            opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(opened.handle, 0, b"half"))
        await w.do(w.fs.flush(opened.handle))  # a copy of the descriptor is closed
        [store] = w.log
        await w.write(b"other", b"x")  # what is logged since keeps rights from being folded
        assert store.version is not None
        if given.mode is None:
            store.version.state = VersionState.STAGED
        if change == "xattr":
            await w.do(w.fs.setxattr(store.ino, b"user.tag", b"kept"))
        else:
            await w.do(w.fs.setattr(store.ino, given, None, CALLER))
        assert len(w.log.pending_of(store.ino)) == 2
        with w.fs.lock:
            assert len(w.fs.incomplete([b"f"])) == 1
        return opened

    async def go_on(w: World, opened: OpenFile) -> None:
        await w.do(w.fs.write(opened.handle, 4, b" and half"))
        await w.drained()
        assert (w.backing / "other").exists()
        path = w.backing / "f"
        assert path.exists() is not is_new
        if not is_new:  # and its writer may be killed now: what it has there is what stays
            assert path.read_bytes() == b"old"
            assert has_mode(path, 0o600 if change == "narrower" else 0o644)
        await w.close(opened)
        await w.drained()
        assert path.read_bytes() == b"half and half"
        if change == "xattr":
            assert os.getxattr(path, "user.tag") == b"kept"
        assert given.mode is None or has_mode(path, given.mode)

    async def main() -> None:
        made = partial(world, tmp_path, session="s")
        async with made() as w:
            opened = await begin(w)
            if then == "is written to":
                await go_on(w, opened)
        if then != "is written to":
            async with made() as w:
                await go_on(w, opened)

    trio.run(main)


async def close_in_doubt(w: World, name: bytes = b"f") -> OpenFile:
    """A stored file, which somebody overwrites; a copy of the descriptor is closed."""
    ino = await w.write(name, b"old")
    await w.drained()
    w.engine.hold(True)
    opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
    await w.do(w.fs.write(opened.handle, 0, b"half"))
    await w.do(w.fs.flush(opened.handle))
    return opened


@pytest.mark.clause("S14", "S595")
@pytest.mark.parametrize("change", ["rights", "folded xattr", "xattr behind it"])
def test_what_was_set_behind_a_close_that_is_taken_back_keeps_its_place(
    tmp_path: Path, change: str
) -> None:
    """Who has shut a file off, and then makes what its former readers must not know of, and who
    waits until that is so.
    """

    async def scenario(w: World) -> None:
        opened = await close_in_doubt(w)
        [store] = w.log
        assert store.version is not None
        if change == "rights":
            await w.write(b"before", b"x")  # so that it is not folded into the close
            await w.do(w.fs.setattr(store.ino, AttributeChange(mode=0o600), None, CALLER))
        else:
            if change == "xattr behind it":
                store.version.state = VersionState.STAGED
            await w.do(w.fs.setxattr(store.ino, b"user.tag", b"kept"))
        last = w.log.last_of(store.ino)
        assert last is not None
        assert (last is store) is (change == "folded xattr")
        told = w.engine.persisted(last.seq, store.ino)
        await w.write(b"secret", b"x")
        await w.do(w.fs.write(opened.handle, 4, b" and half"))
        assert not w.log.pending_of(store.ino)[0].tentative, "it is taken back"
        with w.fs.lock:
            tell = w.log.answer_waiters()
        tell()
        assert not told.done()
        (w.backing / "f").chmod(others := 0o604)  # by somebody beside acpfs
        behind = [op.name for op in w.log if op.ino == store.ino or op.name == b"secret"]
        if change != "folded xattr":
            assert behind == [b"", b"secret"], "it has its place"
        await w.drained()
        assert told.done()
        path = w.backing / "f"
        assert path.read_bytes() == b"old"
        if change == "rights":
            assert has_mode(path, 0o600)
        else:
            assert os.getxattr(path, "user.tag") == b"kept"
            assert has_mode(path, others), "it was not asked for"
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S595")
def test_rights_behind_a_close_of_an_older_acpfs_go_to_the_owner_alone(tmp_path: Path) -> None:
    """Its row does not say what permissions the older content has: the call after it was EIO."""

    async def scenario(w: World) -> None:
        opened = await close_in_doubt(w)
        [store] = w.log
        store.meta = Metadata(mtime_ns=store.meta.mtime_ns)
        await w.write(b"before", b"x")  # so that it is not folded into the close
        await w.do(w.fs.setattr(store.ino, AttributeChange(mode=0o640), None, CALLER))
        await w.do(w.fs.write(opened.handle, 4, b" and half"))
        await w.drained()
        assert (w.backing / "f").read_bytes() == b"old"
        assert has_mode(w.backing / "f", 0o600)
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.clause("S595")
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to somebody else")
def test_who_is_given_a_file_reads_no_more_of_the_older_content(tmp_path: Path) -> None:
    """Nor does who had it; neither knows of the other what the mode says."""

    async def scenario(w: World) -> None:
        opened = await close_in_doubt(w)
        [store] = w.log
        await w.do(w.fs.setattr(store.ino, AttributeChange(uid=12, mode=0o640), None, CALLER))
        await w.do(w.fs.write(opened.handle, 4, b" and half"))
        await w.drained()
        st = (w.backing / "f").stat()
        assert (st.st_uid, st.st_mode & 0o777) == (12, 0o440)
        await w.close(opened)
        await w.drained()
        st = (w.backing / "f").stat()
        assert (st.st_uid, st.st_mode & 0o777) == (12, 0o640)

    run(tmp_path, scenario)


@pytest.mark.clause("S595")
def test_wider_rights_behind_a_close_come_with_the_older_content_if_that_is_all(
    tmp_path: Path,
) -> None:
    """Its writer is killed, and a person decides for what was complete before, which is not stored
    yet: the mount shows the rights that were set last, so the storage has them, too.
    """

    async def scenario(w: World) -> None:
        w.engine.hold(True)
        ino = await w.write(b"f", b"old")
        opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(opened.handle, 0, b"half"))
        await w.do(w.fs.flush(opened.handle))
        await w.do(w.fs.setattr(ino, AttributeChange(mode=0o666), None, CALLER))
        await w.do(w.fs.write(opened.handle, 4, b" and half"))
        with w.fs.lock:
            w.inner.table[ino].body.interrupted = True
        await w.do(w.fs.release(opened.handle))
        with w.fs.lock:
            assert w.inner.interrupted.discard(b"") == (1, [])
        await w.drained()
        assert (w.backing / "f").read_bytes() == b"old"
        assert (await w.do(w.fs.getattr(ino))).mode & 0o777 == 0o666
        assert has_mode(w.backing / "f", 0o666)

    run(tmp_path, scenario)


def test_what_waited_behind_a_close_that_is_taken_back_goes_on(tmp_path: Path) -> None:
    """Found by random operations of several processes: nobody told the drain, and an O_SYNC write
    waited for ever.
    """

    async def scenario(w: World) -> None:
        w.engine.hold(False)
        opened, _attributes = await w.create(b"f")
        await w.do(w.fs.write(opened.handle, 0, b"half"))
        await w.do(w.fs.flush(opened.handle))
        await w.write(b"behind", b"bytes")
        with trio.fail_after(120):
            while not all(  # noqa: ASYNC110 - threads
                op.tentative or (op.version is not None and op.version.is_staged) for op in w.log
            ):
                await trio.sleep(0.005)
        await w.do(w.fs.write(opened.handle, 4, b"more"))
        with trio.fail_after(120):
            while len(w.log):  # noqa: ASYNC110 - threads
                await trio.sleep(0.005)
        assert (w.backing / "behind").read_bytes() == b"bytes"
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.parametrize("change", ["write", "truncate", "punch"])
def test_before_the_first_byte_changes_it_is_recorded_that_it_will(
    tmp_path: Path, change: str
) -> None:
    """A kill at the first end of a step (which is a commit): the version has its copy, the content
    is dirty, no byte has changed.
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"db", b"a" * 8192)
        opened = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
        calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "write": lambda: w.fs.write(opened.handle, 10, b"b" * 10),
            "truncate": lambda: w.fs.setattr(ino, AttributeChange(size=5), opened.handle, CALLER),
            "punch": lambda: w.fs.fallocate(
                opened.handle, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 4096
            ),
        }
        call = calls[change]()
        with w.fs.lock:
            call.send(None)
            body = w.inner.table[ino].body  # the state that a kill would leave
            (version,) = [op.version for op in w.log if op.version is not None]
            assert body.modified
            assert version.tier_id != body.tier
            fd = w.tier.open(body.tier)
            assert os.pread(fd, 9000, 0) == b"a" * 8192
            os.close(fd)
            call.close()
        await w.close(opened)

    run(tmp_path, scenario)
