"""The mount shows the upper tree at once, the backing directory follows; what others change there
becomes visible.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.records import AttributeChange
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run, world


def test_directory_renamed_while_its_files_are_still_in_ram(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        directory = await w.do(w.fs.mkdir(ROOT, b"iter_tmp", 0o755, CALLER))
        await w.write(b"shard", b"x" * 100, directory.ino)
        await w.do(w.fs.rename(ROOT, b"iter_tmp", ROOT, b"iter_1", 0))
        await w.write(b"late", b"y", directory.ino)
        assert await w.names() == [b"iter_1"]
        assert not list(w.backing.glob("iter*"))
        await w.drained()
        assert (w.backing / "iter_1/shard").read_bytes() == b"x" * 100
        assert (w.backing / "iter_1/late").read_bytes() == b"y"
        assert not (w.backing / "iter_tmp").exists()

    run(tmp_path, scenario)


def test_lookups_below_a_renamed_directory_of_the_backing_directory(tmp_path: Path) -> None:
    (tmp_path / "backing/old").mkdir(parents=True)
    (tmp_path / "backing/old/file").write_text("content")

    async def scenario(w: World) -> None:
        await w.do(w.fs.lookup(ROOT, b"old"))
        await w.do(w.fs.rename(ROOT, b"old", ROOT, b"new", 0))
        directory = await w.do(w.fs.lookup(ROOT, b"new"))
        found = await w.do(
            w.fs.lookup(directory.ino, b"file")
        )  # lies under old/ on the backing directory still
        assert await w.read(found.ino) == b"content"
        await w.drained()
        assert await w.read(found.ino) == b"content"
        assert (w.backing / "new/file").exists()

    run(tmp_path, scenario)


def test_created_and_deleted_costs_nothing(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        before = w.lower.calls()
        for i in range(50):
            await w.write(b"t%d" % i, b"x")
        for i in range(50):
            await w.do(w.fs.unlink(ROOT, b"t%d" % i))
        await w.drained()
        changed = {
            k: v - before.get(k, 0) for k, v in w.lower.calls().items() if v != before.get(k, 0)
        }
        assert not set(changed) & {"create_staging", "rename", "unlink"}, changed

    run(tmp_path, scenario)


def test_changes_from_outside_become_visible(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"tracker", b"1")
        await w.drained()
        assert await w.read(ino) == b"1"
        (w.backing / "tmp").write_bytes(b"20")
        os.rename(w.backing / "tmp", w.backing / "tracker")
        (w.backing / "other").write_bytes(b"o")
        await trio.sleep(0.06)  # older than attr_timeout_s
        found = await w.do(w.fs.lookup(ROOT, b"tracker"))
        assert await w.read(found.ino) == b"20"
        assert await w.names() == [b"other", b"tracker"]
        os.unlink(w.backing / "other")
        await trio.sleep(0.06)
        with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
            await w.do(w.fs.lookup(ROOT, b"other"))

    run(tmp_path, scenario, attr_timeout_s=0.05)


def test_rename_over_what_is_only_on_the_backing_directory(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing/final").write_bytes(b"old")

    async def scenario(w: World) -> None:
        await w.write(b"tmp", b"new")
        await w.do(w.fs.rename(ROOT, b"tmp", ROOT, b"final", 0))
        assert (w.backing / "final").read_bytes() == b"old"
        await w.drained()
        assert (w.backing / "final").read_bytes() == b"new"
        assert sorted(p.name for p in w.backing.iterdir() if p.name != ".acpfs") == ["final"]

    run(tmp_path, scenario)


def test_hard_links_stay_one_file_when_it_is_rewritten(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"a", b"one")
        await w.do(w.fs.link(ino, ROOT, b"b"))
        await w.drained()
        await w.write(b"b", b"two")
        await w.drained()
        assert (w.backing / "a").read_bytes() == (w.backing / "b").read_bytes() == b"two"
        assert (w.backing / "a").stat().st_ino == (w.backing / "b").stat().st_ino

    run(tmp_path, scenario)


def test_extended_attributes_survive_a_rewrite(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"one")
        await w.do(w.fs.setxattr(ino, b"user.tag", b"kept"))
        await w.drained()
        w.fs.forget([(ino, 100)])
        await w.write(b"f", b"two")
        await w.drained()
        assert os.getxattr(w.backing / "f", "user.tag") == b"kept"

    run(tmp_path, scenario)


def test_directory_times_are_those_of_the_mount(tmp_path: Path) -> None:
    """Trainer picks the checkpoint to delete by directory mtime: the time of the drain must not
    decide.
    """

    async def scenario(w: World) -> None:
        directory = await w.do(w.fs.mkdir(ROOT, b"checkpoint-500", 0o755, CALLER))
        await w.write(b"shard", b"x", directory.ino)
        shown = await w.do(w.fs.getattr(directory.ino))
        await trio.sleep(0.05)
        await w.drained()
        assert os.stat(w.backing / "checkpoint-500").st_mtime_ns == shown.mtime_ns
        assert (await w.do(w.fs.getattr(directory.ino))).mtime_ns == shown.mtime_ns

    run(tmp_path, scenario)


def test_a_restart_finds_names_content_and_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            directory = await w.do(w.fs.mkdir(ROOT, b"d", 0o750, CALLER))
            await w.write(b"shard", b"x" * 5000, directory.ino)
            await w.do(w.fs.rename(ROOT, b"d", ROOT, b"e", 0))
            opened, _ = await w.create(b"half")
            await w.do(w.fs.write(opened.handle, 0, b"torn"))
        async with world(tmp_path) as w:
            directory = await w.do(w.fs.lookup(ROOT, b"e"))
            shard = await w.do(w.fs.lookup(directory.ino, b"shard"))
            assert await w.read(shard.ino) == b"x" * 5000
            assert w.fs.statistics().interrupted_files == 1
            await w.drained()
            assert (w.backing / "e/shard").read_bytes() == b"x" * 5000
            assert not (
                w.backing / "half"
            ).exists()  # its writer was lost before it closed the file
            with w.fs.lock:
                assert w.inner.interrupted.store(b"half") == 1
            await w.drained()
            assert (w.backing / "half").read_bytes() == b"torn"

    trio.run(main)


def test_discarding_an_interrupted_overwrite_shows_the_old_content(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            ino = await w.write(b"f", b"old and complete")
            await w.drained()
            opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
            await w.do(w.fs.write(opened.handle, 0, b"half"))
        async with world(tmp_path) as w:
            found = await w.do(w.fs.lookup(ROOT, b"f"))
            assert await w.read(found.ino) == b"half"
            with w.fs.lock:
                assert w.inner.interrupted.discard(b"f") == (1, [])
            found = await w.do(w.fs.lookup(ROOT, b"f"))
            assert found.size == len(b"old and complete")  # at once: the kernel reads no further
            assert (await w.do(w.fs.getattr(found.ino))).size == found.size
            assert await w.read(found.ino) == b"old and complete"

    trio.run(main)


@pytest.mark.clause("S82")
@pytest.mark.parametrize("rewritten", [False, True], ids=["persisted", "on its way"])
def test_discarding_shows_length_and_time_while_something_of_it_is_under_way(
    tmp_path: Path, *, rewritten: bool
) -> None:
    old = b"old and complete"

    async def main() -> None:
        async with world(tmp_path) as w:
            ino = await w.write(b"f", b"older" if rewritten else old)
            await w.drained()
            w.engine.hold(True)
            if rewritten:
                await w.write(b"f", old)
            change = AttributeChange(mtime_ns=10**18)
            await w.do(w.fs.setattr(ino, change, None, CALLER))
            await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0))
            opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
            await w.do(w.fs.write(opened.handle, 0, b"half"))
        async with world(tmp_path) as w:
            w.engine.hold(True)
            with w.fs.lock:
                assert w.inner.interrupted.discard(b"g") == (1, [])
            found = await w.do(w.fs.lookup(ROOT, b"g"))
            assert (found.size, found.mtime_ns) == (len(old), 10**18)
            assert await w.read(found.ino) == old
            w.engine.hold(False)
            await w.drained()
            st = (w.backing / "g").stat()
            assert (st.st_size, st.st_mtime_ns) == (len(old), 10**18)

    trio.run(main)


@pytest.mark.clause("S82")
def test_discarding_leaves_what_is_open_and_drops_the_rest(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            for name in (b"a", b"b", b"c"):
                opened, _attributes = await w.create(name)
                await w.do(w.fs.write(opened.handle, 0, b"half"))
        async with world(tmp_path) as w:
            reader = await w.do(
                w.fs.open((await w.do(w.fs.lookup(ROOT, b"a"))).ino, os.O_RDONLY, CALLER)
            )
            with w.fs.lock:
                assert w.inner.interrupted.discard(b"") == (2, [b"a"])
            assert await w.names() == [b"a"]
            assert await w.do(w.fs.read(reader.handle, 0, 10)) == b"half"
            await w.close(reader)
            with w.fs.lock:
                assert w.inner.interrupted.discard(b"") == (1, [])
            assert await w.names() == []

    trio.run(main)


@pytest.mark.clause("S28")
def test_many_new_names_are_looked_up_in_one_listing(tmp_path: Path) -> None:
    (tmp_path / "backing/run").mkdir(parents=True)
    (tmp_path / "backing/run/old").write_text("old")

    async def absent(w: World, directory: int, name: bytes) -> bool:
        try:
            await w.do(w.fs.lookup(Ino(directory), name))
        except FileNotFoundError:
            return True
        return False

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"run"))).ino
        asked = w.lower.calls().get("lstat", 0)
        for number in range(200):
            assert await absent(w, directory, b"new-%d" % number)
        assert w.lower.calls()["lstat"] - asked < 100
        assert await w.read((await w.do(w.fs.lookup(directory, b"old"))).ino) == b"old"
        (w.backing / "run/from-outside").write_text("x")
        await trio.sleep(w.fs.settings.attr_timeout_s)
        for number in range(100):
            assert await absent(w, directory, b"newer-%d" % number)
        assert not await absent(w, directory, b"from-outside")

    run(tmp_path, scenario)


@pytest.mark.clause("S18")
def test_the_fsync_mode_of_a_directory_outlives_what_is_known_of_it(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.mkdir(ROOT, b"d", 0o755, CALLER))).ino
        await w.do(w.fs.setxattr(directory, b"user.acpfs.fsync", b"durable"))
        await w.drained()
        w.fs.forget([(directory, 1)])
        found = await w.do(w.fs.lookup(ROOT, b"d"))
        assert w.inner.table[found.ino].xattrs is None
        assert await w.do(w.inner.attributes.fsync_mode_in(w.inner.table[found.ino])) == "durable"

    run(tmp_path, scenario)


@pytest.mark.clause("S28")
def test_what_a_call_asked_for_itself_is_young_enough_for_it(tmp_path: Path) -> None:
    """Found with `attr_timeout` 0, and true of every answer that takes longer than that: lookup,
    stat and listing asked for ever.
    """
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing/file").write_text("content")

    async def scenario(w: World) -> None:
        with pytest.raises(FileNotFoundError):
            await w.do(w.fs.lookup(ROOT, b"none"))
        found = await w.do(w.fs.lookup(ROOT, b"file"))
        assert (await w.do(w.fs.getattr(found.ino))).size == len("content")
        assert await w.names() == [b"file"]
        (tmp_path / "backing/none").write_text("x")
        await w.do(w.fs.lookup(ROOT, b"none"))

    run(tmp_path, scenario, attr_timeout_s=0)


@pytest.mark.clause("S200")
def test_a_file_with_a_time_that_64_bits_cannot_hold_is_like_any_other(tmp_path: Path) -> None:
    """The worker died of it at every look, and at the fourth acpfs gave up."""
    (tmp_path / "backing").mkdir()
    far = tmp_path / "backing/far"
    far_ns = 10_413_792_000_123_456_789
    far.write_text("data")
    os.utime(far, ns=(far_ns, far_ns))
    if far.stat().st_mtime_ns != far_ns:
        pytest.skip("the file system here has no such times")

    async def scenario(w: World) -> None:
        found = await w.do(w.fs.lookup(ROOT, b"far"))
        assert found.mtime_ns == far.stat().st_mtime_ns > 1 << 63
        assert await w.read(found.ino) == b"data"
        await w.write(b"near", b"x")
        await w.do(w.fs.rename(ROOT, b"far", ROOT, b"further", 0))

    async def after_a_kill(w: World) -> None:
        found = await w.do(w.fs.lookup(ROOT, b"further"))
        assert found.mtime_ns > 1 << 63, "as the last worker had it, to the nanosecond"
        assert found.mtime_ns == far_ns
        await w.drained()
        assert (w.backing / "further").stat().st_mtime_ns == far_ns
        assert (w.backing / "near").read_bytes() == b"x"

    run(tmp_path, scenario)
    run(tmp_path, after_a_kill)
