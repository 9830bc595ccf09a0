"""The mirror in one process: the RAM tier is lost, and what was mirrored is shown and drained, in
order, up to where the bytes end.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.content.contents import COPY_AT_FREEZE_BYTES_MAX
from acpfs.filesystem.records import AttributeChange, Attributes, Lane, OpenFile
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.types import ROOT, Ino
from acpfs.writeback.copies import on_disk
from acpfs.writeback.copies.journal_marks import read_mark
from acpfs.writeback.copies.journal_place import Journal
from acpfs.writeback.copies.on_disk import DiskPlace, log_name
from acpfs.writeback.log.ops import VersionState
from acpfs.writeback.sources.mirror import JournalStage, Mirror
from tests.filesystem.stuck_journal import StuckJournal
from tests.filesystem.test_spilling import spilling, until
from tests.filesystem.world import CALLER, World, is_idle
from tests.filesystem.world import run as in_world

pytestmark = pytest.mark.clause("S152")

MIB = 1 << 20
SMALL = 200_000
LARGE = COPY_AT_FREEZE_BYTES_MAX + 1


def run(base: Path, script: Callable[[World], Any], **changes: Any) -> None:
    in_world(base, script, spill=base / "spill", **{"spill_mode": "mirror", **changes})


def lose_ram(base: Path) -> None:
    shutil.rmtree(base / "tier")


def in_a_thread(call: Callable[..., bool], *arguments: Any) -> bool:
    """What another thread gets."""
    found = list[bool]()
    thread = threading.Thread(target=lambda: found.append(call(*arguments)))
    thread.start()
    thread.join()
    return found[0]


async def mirrored(made: World) -> None:
    """Until a reboot would lose nothing."""
    mirror = spilling(made).spill.mirror
    assert mirror is not None
    await until(
        made,
        lambda: (
            spilling(made).unmirrored().files == 0
            and not spilling(made).spill.making
            and mirror.statistics().state == "on"
            and not mirror.statistics().pending_transactions
        ),
    )


async def all_mirrored(made: World) -> None:
    """Until the journal knows all that was logged, though not all bytes are in the mirror."""
    mirror = spilling(made).spill.mirror
    assert mirror is not None
    await until(made, lambda: not mirror.statistics().pending_transactions)


def mode_of(made: World, name: str) -> int:
    """On the storage."""
    return (made.backing / name).stat().st_mode & 0o777


def tree(directory: Path) -> dict[str, bytes | str]:
    """Everything below a directory but acpfs' own, as text or bytes by path."""
    found: dict[str, bytes | str] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if not name.startswith(".acpfs"):
            found[name] = (
                "->" + os.readlink(path)
                if path.is_symlink()
                else "dir"
                if path.is_dir()
                else path.read_bytes()
            )
    return found


def test_everything_that_was_mirrored_is_drained_after_the_loss_of_ram(tmp_path: Path) -> None:
    async def before(made: World) -> None:
        await made.write(b"old", b"1" * MIB)
        await made.drained()
        made.engine.hold(True)
        run1 = await made.do(made.fs.mkdir(ROOT, b"run1", 0o755, CALLER))
        shard = await made.write(b"shard", b"2" * MIB, run1.ino)
        await made.write(b"tmp", b"3" * 100, run1.ino)
        await made.do(made.fs.rename(run1.ino, b"tmp", run1.ino, b"final", 0))
        await made.do(made.fs.symlink(ROOT, b"latest", b"run1", CALLER))
        await made.do(made.fs.link(shard, ROOT, b"linked"))
        await made.do(made.fs.unlink(ROOT, b"old"))
        await made.do(made.fs.setattr(shard, AttributeChange(mode=0o600), None, CALLER))
        await made.write(b"empty", b"", run1.ino)
        await mirrored(made)

    async def after(made: World) -> None:
        assert made.salvaged is not None
        assert made.salvaged.lost == 0
        assert sorted(await made.names()) == [b"latest", b"linked", b"run1"]
        run1 = await made.do(made.fs.lookup(ROOT, b"run1"))
        assert sorted(await made.names(run1.ino)) == [b"empty", b"final", b"shard"]
        shard = await made.do(made.fs.lookup(run1.ino, b"shard"))
        assert (shard.size, shard.nlink, shard.mode & 0o777) == (MIB, 2, 0o600)
        assert await made.read(shard.ino, MIB) == b"2" * MIB
        await made.drained()
        assert tree(made.backing) == {
            "latest": "->run1",
            "linked": b"2" * MIB,
            "run1": "dir",
            "run1/empty": b"",
            "run1/final": b"3" * 100,
            "run1/shard": b"2" * MIB,
        }
        assert (made.backing / "linked").stat().st_ino == (
            made.backing / "run1" / "shard"
        ).stat().st_ino
        await until(
            made,
            lambda: (
                not [
                    n for n in spilling(made).spill.directory.names() if not n.startswith("mirror-")
                ]
            ),
        )

    run(tmp_path, before)
    lose_ram(tmp_path)
    run(tmp_path, after)


def test_a_time_that_was_set_with_another_attribute_is_shown_after_the_loss_of_ram(
    tmp_path: Path,
) -> None:
    """It is one operation with the extended attribute before it, and the mount showed the time of
    the last write until the file was looked at below.
    """
    set_ns = 365012172 * 10**9

    async def before(made: World) -> None:
        ino = await made.write(b"file", b"x" * 100)
        await made.drained()
        made.engine.hold(True)
        await made.do(made.fs.setxattr(ino, b"user.note", b"z"))
        change = AttributeChange(mtime_ns=set_ns)
        await made.do(made.fs.setattr(ino, change, None, CALLER))
        await mirrored(made)

    async def after(made: World) -> None:
        made.engine.hold(True)
        assert (await made.do(made.fs.lookup(ROOT, b"file"))).mtime_ns == set_ns
        made.engine.hold(False)
        await made.drained()
        assert (made.backing / "file").stat().st_mtime_ns == set_ns

    run(tmp_path, before)
    lose_ram(tmp_path)
    run(tmp_path, after)


def test_a_journal_is_begun_while_nobody_else_is_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(made: World) -> None:
        spill = spilling(made).spill
        had = list[bool]()
        assert spill.mirror is not None
        monkeypatch.setattr(
            spill.mirror, "begin", lambda: had.append(in_a_thread(made.fs.lock.acquire, False))
        )
        spill.begin_journal()
        assert had == [False]
        monkeypatch.undo()
        await mirrored(made)

    run(tmp_path, scenario)


def test_what_follows_a_version_without_a_copy_is_lost_and_nothing_before_it(
    tmp_path: Path,
) -> None:
    async def before(made: World) -> None:
        await made.write(b"shard0", b"0" * MIB)
        await mirrored(made)
        spilling(made).spill.set_budget(MIB + 1000)  # the next one has no room there
        await made.write(b"shard1", b"1" * MIB)
        await made.write(b"latest", b"shard1")
        directory = await made.do(made.fs.mkdir(ROOT, b"later", 0o755, CALLER))
        await made.write(b"more", b"4", directory.ino)
        mirror = spilling(made).spill.mirror
        assert mirror is not None
        await until(made, lambda: not mirror.statistics().pending_transactions)
        assert spilling(made).unmirrored().until == 1

    async def after(made: World) -> None:
        assert made.salvaged is not None
        assert (made.salvaged.operations, made.salvaged.lost) == (1, 4)
        assert made.salvaged.lost_names == ["shard1", "latest", "more"]
        assert await made.names() == [b"shard0"]
        await made.drained()
        assert tree(made.backing) == {"shard0": b"0" * MIB}
        await made.write(b"shard1", b"new" * 10)
        await made.drained()
        assert tree(made.backing) == {"shard0": b"0" * MIB, "shard1": b"new" * 10}

    run(tmp_path, before)
    lose_ram(tmp_path)
    run(tmp_path, after)


def test_attributes_that_were_changed_behind_what_is_lost_are_stored_as_they_are_shown(
    tmp_path: Path,
) -> None:
    """The journal's nodes have them; their operations came after the cut."""
    changes = {"kept": 0o600, "directory": 0o711}

    async def before(made: World) -> None:
        kept = await made.write(b"kept", b"0" * 100)
        directory = await made.do(made.fs.mkdir(ROOT, b"directory", 0o755, CALLER))
        await mirrored(made)
        spilling(made).spill.set_budget(1000)  # the next one has no room there
        lost = await made.write(b"lost", b"1" * MIB)
        for ino, mode in zip((kept, directory.ino, lost), (0o600, 0o711, 0o600), strict=True):
            await made.do(made.fs.setattr(ino, AttributeChange(mode=mode), None, CALLER))
        await all_mirrored(made)

    async def after(made: World) -> None:
        assert made.salvaged is not None
        assert made.salvaged.lost_names == ["lost"]
        for name, mode in changes.items():
            found = await made.do(made.fs.lookup(ROOT, name.encode()))
            assert found.mode & 0o777 == mode
        await made.drained()
        assert {name: mode_of(made, name) for name in changes} == changes
        assert tree(made.backing) == {"directory": "dir", "kept": b"0" * 100}

    run(tmp_path, before)
    lose_ram(tmp_path)
    run(tmp_path, after)


@pytest.mark.clause("S152")
@pytest.mark.parametrize("known", ["by its operation", "by the storage", "by what is lost"])
def test_a_content_that_is_kept_has_no_attributes_of_one_that_is_lost(
    tmp_path: Path, known: str
) -> None:
    """A secret that was written anew and then made public: what is kept is the secret."""
    is_renamed = known == "by what is lost"  # an operation is left that says nothing of its mode
    name = "moved" if is_renamed else "secret"
    mode = 0o640
    note = b"user.note"

    async def before(made: World) -> None:
        ino = await made.write(b"secret", b"0" * 100)
        await made.do(made.fs.setattr(ino, AttributeChange(mode=0o640), None, CALLER))
        await made.do(made.fs.setxattr(ino, note, b"secret"))
        if known != "by its operation":
            await made.drained()
        made.engine.hold(True)
        if is_renamed:
            await made.do(made.fs.rename(ROOT, b"secret", ROOT, b"moved", 0))
        await mirrored(made)
        spilling(made).spill.set_budget(1000)  # the next one has no room there
        assert ino == await made.write(name.encode(), b"1" * MIB)
        public = AttributeChange(mode=0o644)
        await made.do(made.fs.setattr(ino, public, None, CALLER))
        await made.do(made.fs.setxattr(ino, note, b"public"))
        await all_mirrored(made)

    async def after(made: World) -> None:
        assert made.salvaged is not None
        assert made.salvaged.lost_names == [name]
        found = await made.do(made.fs.lookup(ROOT, name.encode()))
        assert found.mode & 0o777 == mode
        shown = await made.do(made.fs.getxattr(found.ino, note))
        await made.drained()
        assert mode_of(made, name) == mode
        assert os.getxattr(made.backing / name, note) == shown
        assert shown == b"secret"
        assert tree(made.backing) == {name: b"0" * 100}

    run(tmp_path, before)
    lose_ram(tmp_path)
    run(tmp_path, after)


def test_what_was_stored_already_is_not_stored_again_over_what_came_after_it(
    tmp_path: Path,
) -> None:
    async def before(made: World) -> None:
        for number in range(3):
            # names that come and go, each made for another node: carried out twice, they would be
            # mixed up
            await made.write(b"a", b"%d" % number * 100)
            await made.drained()
            await made.do(made.fs.rename(ROOT, b"a", ROOT, b"b%d" % number, 0))
            await made.drained()
        await made.do(made.fs.unlink(ROOT, b"b0"))
        await made.drained()
        made.engine.hold(True)
        await made.write(b"c", b"c" * 100)
        await mirrored(made)

    async def after(made: World) -> None:
        await made.drained()
        assert tree(made.backing) == {"b1": b"1" * 100, "b2": b"2" * 100, "c": b"c" * 100}

    run(tmp_path, before)
    lose_ram(tmp_path)
    run(tmp_path, after)


def test_a_journal_that_cannot_be_written_counts_no_more_before_anything_else_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before(made: World) -> None:
        await made.write(b"a", b"first")
        await mirrored(made)
        assert read_mark(made.lower, "test") is not None
        mirror = spilling(made).spill.mirror
        assert mirror is not None
        monkeypatch.setattr(
            mirror, "_apply", lambda _journal, _batch: (_ for _ in ()).throw(OSError(5, "broken"))
        )
        await made.write(b"b", b"second")
        await made.drained()
        assert read_mark(made.lower, "test") is None
        assert mirror.statistics().state == "off"
        assert tree(made.backing) == {"a": b"first", "b": b"second"}

    run(tmp_path, before)


@pytest.mark.parametrize("value", [object(), "\udcff"])
def test_a_value_that_a_journal_cannot_have_ends_the_mirror_with_a_word(
    tmp_path: Path, value: object
) -> None:
    """The state has none; should it ever, its mirror is off, and says so."""

    async def before(made: World) -> None:
        await made.write(b"a", b"first")
        await mirrored(made)
        mirror = spilling(made).spill.mirror
        assert mirror is not None
        mirror._record([("INSERT INTO pin VALUES (?, ?)", (b"a", value), False)])
        await until(made, lambda: mirror.statistics().state == "off")
        await made.drained()
        assert tree(made.backing) == {"a": b"first"}

    run(tmp_path, before)


def test_a_disk_that_hangs_is_waited_for_as_long_as_patience_lasts_and_then_there_is_no_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    async def before(made: World) -> None:
        await made.write(b"a", b"first")
        await mirrored(made)
        mirror = spilling(made).spill.mirror
        assert mirror is not None
        mirror._outage.wait_s = 0.1
        monkeypatch.setattr(mirror, "_apply", lambda _journal, _batch: over.wait(60))
        await made.do(made.fs.rename(ROOT, b"a", ROOT, b"b", 0))
        await made.drained()
        assert tree(made.backing) == {"b": b"first"}
        assert read_mark(made.lower, "test") is None
        assert mirror.statistics().state == "off"
        over.set()

    run(tmp_path, before)


@pytest.mark.clause("X11")
@pytest.mark.parametrize("is_copied_anew", [False, True])
def test_what_was_mirrored_stays_until_what_the_kernel_wrote_since_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copied_anew: bool
) -> None:
    """A program syncs a large file, and writes on: RAM is lost before that is copied, or after."""
    synced = b"s" * LARGE
    later = b"later" + synced[5:]

    async def before(made: World) -> None:
        opened, _attributes = await synced_file(made, synced)
        await mirrored(made)
        spill = spilling(made).spill
        (first,) = spill.copies.values()
        if not is_copied_anew:
            monkeypatch.setattr(spill, "takes", lambda _size: False)
        os.pwrite(opened.backing_fd, b"later", 0)
        with made.fs.lock, made.state.step():
            (version,) = [op.version for op in made.log]
            assert version is not None
            assert not made.inner.contents.kernel.still_frozen(version)
            assert first.vid not in spill.copies
        if is_copied_anew:
            await mirrored(made)
            assert spill.used_bytes == LARGE
            await until(made, lambda: first.name not in spill.directory.names())
        else:
            assert spilling(made).unmirrored().files == 1
            await all_mirrored(made)

    async def after(made: World) -> None:
        assert made.salvaged is not None
        shown = later if is_copied_anew else synced
        ino = (await made.do(made.fs.lookup(ROOT, b"f"))).ino
        assert await made.read(ino, 2 * LARGE) == shown
        await made.drained()
        assert tree(made.backing) == {"f": shown}

    settings = {"unknown_bytes": MIB, "budget_bytes": 128 << 20, "max_dirty_age_s": 0}
    run(tmp_path, before, passthrough=True, **settings)
    lose_ram(tmp_path)
    monkeypatch.undo()
    run(tmp_path, after, **settings)


@pytest.mark.clause("X11", "S506")
def test_what_a_program_of_a_dead_session_wrote_since_it_was_mirrored_is_mirrored(
    tmp_path: Path,
) -> None:
    """The next mount shows it: then that is what survives."""
    synced = b"s" * LARGE
    later = b"later" + synced[5:]
    theirs: list[int] = []

    async def before(made: World) -> None:
        opened, _attributes = await made.create(b"f")
        assert opened.lane is Lane.PASSTHROUGH
        theirs.append(os.open(f"/proc/self/fd/{opened.backing_fd}", os.O_WRONLY))
        os.pwrite(theirs[0], synced, 0)
        await made.do(made.fs.fsync(opened.handle, False))
        await mirrored(made)

    async def between(made: World) -> None:
        with made.fs.lock:
            assert made.inner.interrupted.discard(b"f") == (1, [])
        ino = (await made.do(made.fs.lookup(ROOT, b"f"))).ino
        assert await made.read(ino, 2 * LARGE) == later
        await mirrored(made)

    async def after(made: World) -> None:
        ino = (await made.do(made.fs.lookup(ROOT, b"f"))).ino
        assert await made.read(ino, 2 * LARGE) == later

    settings = {"unknown_bytes": MIB, "budget_bytes": 128 << 20, "max_dirty_age_s": 0}
    run(tmp_path, before, passthrough=True, **settings)
    os.pwrite(theirs[0], b"later", 0)
    os.close(theirs[0])
    run(tmp_path, between, **settings)
    lose_ram(tmp_path)
    run(tmp_path, after, **settings)


OUTDATED: dict[str, Any] = {
    "unknown_bytes": MIB,
    "budget_bytes": 128 << 20,
    "max_dirty_age_s": 0,
}


async def synced_file(made: World, synced: bytes) -> tuple[OpenFile, Attributes]:
    """`f`, which the kernel writes past the daemon."""
    opened, attributes = await made.create(b"f")
    assert opened.lane is Lane.PASSTHROUGH
    os.pwrite(opened.backing_fd, synced, 0)
    await made.do(made.fs.fsync(opened.handle, False))
    return opened, attributes


async def outdated(made: World, synced: bytes) -> tuple[Ino, str]:
    """A synced file whose copy the kernel has written on since, and of which there is no other; and
    the name of that copy.
    """
    opened, attributes = await synced_file(made, synced)
    await mirrored(made)
    (copy,) = spilling(made).spill.copies.values()
    os.pwrite(opened.backing_fd, b"later", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spilling(made).spill, "takes", lambda _size: False)
        with made.fs.lock, made.state.step():
            (version,) = [op.version for op in made.log if op.version is not None]
            assert not made.inner.contents.kernel.still_frozen(version)
        await all_mirrored(made)
    spilling(made).spill.set_budget(1)
    return attributes.ino, copy.name


@pytest.mark.clause("X11")
def test_what_is_shown_again_as_a_half_is_discarded_is_what_is_stored(tmp_path: Path) -> None:
    """The version that it goes back to was staged, and its file was written to in place since."""
    synced = b"s" * LARGE
    later = b"later" + synced[5:]

    async def before(made: World) -> None:
        await made.do(made.fs.mkdir(ROOT, b"first", 0o755, CALLER))
        opened, attributes = await synced_file(made, synced)
        made.engine.hold(False)
        await until(made, lambda: is_staged(made, attributes.ino))
        os.pwrite(opened.backing_fd, b"later", 0)
        await made.close(opened)
        with made.fs.lock:
            assert made.inner.interrupted.discard(b"f") == (1, [])
        assert await made.read(attributes.ino, 2 * LARGE) == later

    async def after(made: World) -> None:
        ino = (await made.do(made.fs.lookup(ROOT, b"f"))).ino
        assert await made.read(ino, 2 * LARGE) == later
        await made.drained()
        assert tree(made.backing) == {"first": "dir", "f": later}

    killed = {"closing": lambda _pid: Closing.KILL}
    run(tmp_path, before, passthrough=True, make_lower=MakesNone, **killed, **OUTDATED)
    run(tmp_path, after, **OUTDATED)


@pytest.mark.clause("X11")
def test_what_was_staged_since_a_copy_was_outdated_is_what_there_is(tmp_path: Path) -> None:
    synced = b"s" * LARGE
    later = b"later" + synced[5:]

    async def before(made: World) -> None:
        await made.do(made.fs.mkdir(ROOT, b"first", 0o755, CALLER))
        ino, _name = await outdated(made, synced)
        made.engine.hold(False)
        await until(made, lambda: is_staged(made, ino))
        await all_mirrored(made)
        assert spilling(made).spill._outdated

    async def after(made: World) -> None:
        ino = (await made.do(made.fs.lookup(ROOT, b"f"))).ino
        assert await made.read(ino, 2 * LARGE) == later
        await made.drained()
        assert tree(made.backing) == {"first": "dir", "f": later}

    run(tmp_path, before, passthrough=True, make_lower=MakesNone, **OUTDATED)
    lose_ram(tmp_path)
    run(tmp_path, after, **OUTDATED)


@pytest.mark.clause("X11")
def test_what_was_staged_is_stored_though_its_file_has_grown_since(tmp_path: Path) -> None:
    """RAM is lost before it has its place: then all that there is of it is what was staged."""
    synced = b"s" * LARGE

    async def before(made: World) -> None:
        await made.do(made.fs.mkdir(ROOT, b"first", 0o755, CALLER))
        opened, attributes = await synced_file(made, synced)
        made.engine.hold(False)
        await until(made, lambda: is_staged(made, attributes.ino))
        await made.do(made.fs.mkdir(ROOT, b"second", 0o755, CALLER))  # both versions are stored
        os.pwrite(opened.backing_fd, b"later", LARGE)
        await made.close(opened)
        await mirrored(made)

    async def after(made: World) -> None:
        made.engine.hold(False)
        await until(made, lambda: not len(made.log) or made.log.parked_count > 0)
        assert not made.log.parked_count
        content = synced + b"later"
        assert tree(made.backing) == {"first": "dir", "second": "dir", "f": content}

    settings = {**OUTDATED, "make_lower": MakesNone}
    run(tmp_path, before, passthrough=True, **settings)
    lose_ram(tmp_path)
    run(tmp_path, after, **OUTDATED)


@pytest.mark.clause("X11")
def test_what_was_staged_with_a_half_that_goes_is_stored_without_it(tmp_path: Path) -> None:
    """Two were synced; the first was read again, with what was written behind both, and staged when
    the last one was.
    """
    synced = b"s" * LARGE
    may_begin = threading.Event()

    class StagesTheLastFirst(MakesNone):
        def create_staging(self, name: str) -> int:
            if name.startswith("1-") and not may_begin.is_set():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().create_staging(name)

    async def before(made: World) -> None:
        await made.do(made.fs.mkdir(ROOT, b"first", 0o755, CALLER))
        opened, _attributes = await synced_file(made, synced)
        await made.do(made.fs.mkdir(ROOT, b"second", 0o755, CALLER))  # both versions are stored
        os.pwrite(opened.backing_fd, synced, 0)
        await made.do(made.fs.fsync(opened.handle, False))
        earlier, last = (op.version for op in made.log if op.version is not None)
        made.engine.hold(False)
        await until(made, lambda: last.is_staged)
        os.pwrite(opened.backing_fd, b"half", LARGE)
        may_begin.set()
        await until(made, lambda: earlier.is_staged)
        assert (earlier.size, last.size) == (LARGE + 4, LARGE)
        await made.close(opened)
        with made.fs.lock:
            assert made.inner.interrupted.discard(b"f") == (1, [])
        await mirrored(made)

    async def after(made: World) -> None:
        made.engine.hold(False)
        await until(made, lambda: not len(made.log) or made.log.parked_count > 0)
        assert not made.log.parked_count
        assert tree(made.backing) == {"first": "dir", "second": "dir", "f": synced}

    killed = {"closing": lambda _pid: Closing.KILL}
    run(tmp_path, before, passthrough=True, make_lower=StagesTheLastFirst, **killed, **OUTDATED)
    lose_ram(tmp_path)
    run(tmp_path, after, **OUTDATED)


@pytest.mark.clause("X11")
def test_the_next_worker_keeps_a_copy_that_is_outdated(tmp_path: Path) -> None:
    """As long as there is no other one it is all that there is of what was synced."""
    synced = b"s" * LARGE
    names: list[str] = []

    async def before(made: World) -> None:
        _ino, name = await outdated(made, synced)
        names.append(name)

    async def between(made: World) -> None:
        spill = spilling(made).spill
        await until(made, lambda: spill._ready)
        assert spill.used_bytes == LARGE
        await until(
            made, lambda: spill.mirror is not None and spill.mirror.statistics().state == "on"
        )
        await all_mirrored(made)
        assert names[0] in spill.directory.names()

    async def after(made: World) -> None:
        ino = (await made.do(made.fs.lookup(ROOT, b"f"))).ino
        assert await made.read(ino, 2 * LARGE) == synced

    run(tmp_path, before, passthrough=True, **OUTDATED)
    run(tmp_path, between, spill_budget=1, **OUTDATED)
    lose_ram(tmp_path)
    run(tmp_path, after, **OUTDATED)


def test_a_file_that_had_no_room_in_ram_is_not_mirrored_before_it_is_staged(
    tmp_path: Path,
) -> None:
    """Its bytes are in a staging file that nobody has flushed, and it has no copy: it would be
    lost, and status said that all is mirrored.
    """

    async def before(made: World) -> None:
        made.engine.hold(True)
        await made.write(b"first", b"1" * 100)
        await made.write(b"beyond", b"2" * 3 * MIB)
        assert made.fs.statistics().overflowed_files == 1
        await made.write(b"later", b"3" * 100)
        await all_mirrored(made)
        await until(made, lambda: not spilling(made).spill.making)
        behind = spilling(made).unmirrored()
        (op,) = [op for op in made.log if op.version is not None and not op.version.is_local]
        assert (behind.files, behind.bytes, behind.until) == (1, 3 * MIB, op.seq - 1)
        assert behind.since == op.logged_at

    async def after(made: World) -> None:
        assert made.salvaged is not None
        assert await made.names() == [b"first"]

    async def staged(made: World) -> None:
        made.engine.hold(True)
        await made.write(b"beyond", b"2" * 3 * MIB)
        assert spilling(made).unmirrored().files == 1
        made.engine.hold(False)
        await made.drained()
        assert spilling(made).unmirrored().files == 0

    settings = {"budget_bytes": 2 * MIB, "when_full": "native"}
    run(tmp_path, before, **settings)
    lose_ram(tmp_path)
    run(tmp_path, after, **settings)
    run(tmp_path, staged, **settings)


def test_a_file_is_not_mirrored_before_it_is_recorded_that_it_is_staged(tmp_path: Path) -> None:
    """It needs no copy then; that is recorded with whatever comes next, each second at least."""

    async def script(made: World) -> None:
        made.engine.hold(True)
        ino = await made.write(b"f", b"1" * SMALL)
        op = made.log.last_of(ino)
        assert op is not None
        assert op.version is not None
        with made.fs.lock:
            with made.state.joining_step():
                op.version.state = VersionState.STAGED
                made.log.save_version(op.version)
            spilling(made).look()
            behind = spilling(made).unmirrored()
            assert (behind.files, behind.until) == (1, op.seq - 1)
            made.fs.freeze_old()
            assert not made.state.unrecorded
            behind = spilling(made).unmirrored()
            assert (behind.files, behind.until) == (0, made.log.last_seq)
            assert not spilling(made)._queue, "looked at behind that"

    run(tmp_path, script, spill_budget=1)


def test_nobody_hears_that_all_is_mirrored_before_what_was_left_out_is_recorded(
    tmp_path: Path,
) -> None:
    """A stream's thread leaves out what comes next, and that joins the next step, too: until then
    the journal names a file without bytes, behind which nothing survives.
    """

    async def before(made: World) -> None:
        made.engine.hold(True)
        await mirrored(made)
        await made.write(b"f", b"1" * SMALL)
        await made.do(made.fs.unlink(ROOT, b"f"))
        await made.do(made.fs.mkdir(ROOT, b"d", 0o755, CALLER))
        await all_mirrored(made)
        mirror = spilling(made).spill.mirror
        assert mirror is not None
        first = made.log.first()
        assert first is not None
        told: list[float] = []
        with made.fs.lock:
            assert spilling(made).unmirrored().until == first.seq - 1
            copied = spilling(made).when_copied(ROOT, made.log.last_seq)
            copied.add_done_callback(lambda _done: told.append(mirror._pending.known_changes))
            with made.state.joining_step():
                assert made.engine._elide(first)
            left_out = made.state.changes
            with made.state.step():  # as each second
                spilling(made).look()
                assert not copied.done()
                assert made.state.recorded_changes < left_out
        # it is heard of with that very step
        await trio.to_thread.run_sync(copied.result, 60, abandon_on_cancel=True)
        assert told[0] >= left_out

    async def after(made: World) -> None:
        assert await made.names() == [b"d"]

    run(tmp_path, before, spill_budget=1)
    lose_ram(tmp_path)
    run(tmp_path, after, spill_budget=1)


def test_a_file_whose_staging_file_is_lost_is_mirrored_after_all(tmp_path: Path) -> None:
    """As it was staged there was no room for a copy, and it needed none."""

    async def before(made: World) -> None:
        await made.do(made.fs.mkdir(ROOT, b"first", 0o755, CALLER))
        made.engine.hold(False)
        ino = await made.write(b"f", b"1" * SMALL)
        await until(made, lambda: is_staged(made, ino))
        await until(made, lambda: not spilling(made)._queue)
        assert spilling(made).unmirrored().files == 0
        made.engine.hold(True)
        op = made.log.last_of(ino)
        assert op is not None
        with made.fs.lock, made.state.step():
            made.engine._stream_again(op)
            assert spilling(made).unmirrored().files == 1
        spilling(made).spill.set_budget(MIB)
        await mirrored(made)
        assert len(spilling(made).spill.copies) == 1

    run(tmp_path, before, spill_budget=1, make_lower=MakesNone)


def test_a_journal_that_failed_keeps_its_copies_as_long_as_it_counts(tmp_path: Path) -> None:
    """Found by reading: nothing is recorded any more, so what it names seemed to be known to it at
    once.
    """

    async def script(made: World) -> None:
        await mirrored(made)
        mirror = spilling(made).spill.mirror
        removed = threading.Event()
        assert mirror is not None
        with mirror._marking:  # the mark stays that of the failed journal until all is asserted
            with made.fs.lock:
                with mirror._changed:
                    mirror._fail_locked(mirror._token, "the test says so")
                mirror.when_safe(removed.set)
                made.state.commit()
                assert not removed.is_set()
                mirror.begin()
            with mirror._changed:
                assert mirror._changed.wait_for(lambda: mirror._stage is JournalStage.FOLLOWING, 20)
            with made.fs.lock:
                mirror.when_safe(lambda: None)  # has the mirror look at all that is put off
                made.state.commit()
            assert not removed.is_set()
        await until(made, removed.is_set)
        assert mirror.statistics().state == "on"

    run(tmp_path, script)


def test_a_worker_that_is_replaced_leaves_the_copies_of_the_journal_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backing directory takes no mark, so that one stays: the next worker's journal may be long
    in coming to count.
    """

    async def first(made: World) -> None:
        await made.write(b"old", b"1" * 5000)
        await mirrored(made)
        mirror = spilling(made).spill.mirror
        assert mirror is not None

        def refuses(_lower: BackingDirectory, _path: LowerPath, _content: bytes) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(BackingDirectory, "write_own", refuses)
        with made.fs.lock, mirror._changed:
            mirror._fail_locked(mirror._token, "the test says so")
        await made.write(b"old", b"2" * 5000)
        made.engine.hold(False)
        await until(
            made, lambda: len(made.log) == 1
        )  # it stands for the first one, whose copy nobody but that journal needs

    async def second(made: World) -> None:
        spill = spilling(made).spill
        await until(made, spill.usable)
        await until(made, lambda: not spill.making and is_idle(spill.calls))

    async def third(made: World) -> None:
        assert await made.names() == [b"old"]
        assert await made.read((await made.do(made.fs.lookup(ROOT, b"old"))).ino) == b"1" * 5000

    run(tmp_path, first)
    run(tmp_path, second)
    monkeypatch.undo()
    lose_ram(tmp_path)
    run(tmp_path, third)


def test_a_journal_that_is_begun_while_the_last_one_is_marked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark's thread removed it as one of the old ones: it ended, or counted without a file that
    a reboot would find.
    """

    async def script(made: World) -> None:
        await mirrored(made)
        mirror = spilling(made).spill.mirror
        assert mirror is not None
        first = mirror._token
        place = mirror._place
        assert isinstance(place, DiskPlace)
        names = place._directory.names

        def names_later() -> list[str]:
            monkeypatch.undo()
            with made.fs.lock:
                with mirror._changed:
                    mirror._fail_locked(first, "the test says so")
                mirror.begin()
            with mirror._changed:
                assert mirror._changed.wait_for(lambda: mirror._stage is JournalStage.FOLLOWING, 20)
            return names()

        monkeypatch.setattr(place._directory, "names", names_later)
        with mirror._marking:
            mirror._set_mark(first)
        await until(made, lambda: mirror.statistics().state == "on")
        assert mirror._token != first
        assert log_name(mirror._token) in names()

    run(tmp_path, script)


def test_a_journal_that_has_become_long_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the drain goes on; each of them has all that was mirrored."""
    monkeypatch.setattr(on_disk, "LONG_BYTES", 2000)
    monkeypatch.setattr(on_disk, "LONG_SEEDS", 0)
    left = dict[str, bytes | str]()

    async def before(made: World) -> None:
        await mirrored(made)
        mirror = spilling(made).spill.mirror
        assert mirror is not None
        for turn in range(3):
            first = mirror._token
            for number in range(10):
                await made.write(b"%d-%d" % (turn, number), b"%d" % number)
            await until(made, partial(_has_another, mirror, first))
            await mirrored(made)
        await made.drained()
        made.engine.hold(True)
        await made.write(b"last", b"1")
        await made.do(made.fs.unlink(ROOT, b"0-0"))
        await mirrored(made)

    async def after(made: World) -> None:
        assert made.salvaged is not None
        assert made.salvaged.lost == 0
        await made.drained()
        left.update(tree(made.backing))

    run(tmp_path, before)
    lose_ram(tmp_path)
    run(tmp_path, after)
    numbers = [f"{turn}-{number}" for turn in range(3) for number in range(10)][1:]
    assert left == {"last": b"1", **{name: name[-1].encode() for name in numbers}}


def _has_another(mirror: Mirror, first: str) -> bool:
    return mirror._token != first


def test_a_journal_counts_only_when_it_is_seeded_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: an older journal's thread that ended its seeding late said so of the new
    one, which was empty still.
    """
    seeding = {"old": threading.Event(), "new": threading.Event()}

    async def script(made: World) -> None:
        await mirrored(made)
        mirror = spilling(made).spill.mirror
        which = iter(seeding.values())
        assert mirror is not None
        seed = mirror._seed

        def seed_later(token: str, snapshot: sqlite3.Connection) -> Journal:
            go_on = next(which)
            journal = seed(token, snapshot)
            assert go_on.wait(60)
            return journal

        def begin_anew() -> threading.Thread:
            before = set(threading.enumerate())
            with made.fs.lock:
                with mirror._changed:
                    mirror._fail_locked(mirror._token, "the test says so")
                mirror.begin()
            return next(
                thread for thread in set(threading.enumerate()) - before if thread.name == "mirror"
            )

        with monkeypatch.context() as patched:
            patched.setattr(mirror, "_seed", seed_later)
            old = begin_anew()
            new = begin_anew()
            seeding["old"].set()
            old.join(60)
            assert not old.is_alive()
            assert mirror._stage is not JournalStage.FOLLOWING
            assert mirror.statistics().state == "seeding"
            seeding["new"].set()
            await until(made, lambda: mirror.statistics().state == "on")
        assert new.is_alive()

    run(tmp_path, script)


def test_a_mark_says_that_nothing_counts_before_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: a removal is not flushed; a power failure after the unmount brought the old
    journal back, and its log.
    """
    left: list[dict[str, str] | None] = []

    async def script(made: World) -> None:
        await mirrored(made)
        mirror = spilling(made).spill.mirror
        assert mirror is not None
        assert read_mark(made.lower, "test") is not None
        monkeypatch.setattr(
            made.lower, "remove_own", lambda _names: left.append(read_mark(made.lower, "test"))
        )
        mirror.close(nothing_left=True)

    run(tmp_path, script)
    assert left == [None]


def test_a_mount_without_a_mirror_ends_that_of_an_earlier_one(tmp_path: Path) -> None:
    async def before(made: World) -> None:
        await made.write(b"a", b"first")
        await mirrored(made)

    async def after(made: World) -> None:
        await made.drained()
        assert read_mark(made.lower, "test") is None

    run(tmp_path, before)
    run(tmp_path, after, spill_mode="move")


class History:
    """An application that writes, renames and deletes a few names, and remembers every state that
    it saw.
    """

    def __init__(self, seed: int) -> None:
        self.chooser = random.Random(seed)
        self.model: dict[str, bytes | str] = {}
        self.moments: list[dict[str, bytes | str]] = [{}]

    async def go_on(self, made: World, steps: int) -> None:
        for step in range(steps):
            if self.chooser.random() < 0.15:
                made.engine.hold(self.chooser.random() < 0.3)
            await self.change(made, step)
            self.moments.append(dict(self.model))
            if self.chooser.random() < 0.1:
                await trio.sleep(0.01)

    async def change(self, made: World, step: int) -> None:
        name = self.chooser.choice("abcd")
        target = self.chooser.choice("abcd")
        action = self.chooser.choice(["write", "write", "rename", "unlink"])
        if action == "write":
            data = b"%d." % step * self.chooser.randrange(1, 5000)
            await made.write(name.encode(), data)
            self.moments.append({**self.model, name: b""})  # made or truncated first, then written
            self.model[name] = data
        elif name in self.model and action == "unlink":
            await made.do(made.fs.unlink(ROOT, name.encode()))
            del self.model[name]
        elif name in self.model:
            await made.do(made.fs.rename(ROOT, name.encode(), ROOT, target.encode(), 0))
            self.model[target] = self.model.pop(name)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_history_that_was_mirrored_comes_back_whole(tmp_path: Path, seed: int) -> None:
    history = History(seed)

    async def before(made: World) -> None:
        await history.go_on(made, 60)
        await mirrored(made)

    async def after(made: World) -> None:
        await made.drained()
        assert tree(made.backing) == history.moments[-1]

    run(tmp_path, before)
    lose_ram(tmp_path)
    run(tmp_path, after)


@pytest.mark.parametrize("seed", range(3))
def test_with_copies_missing_a_random_history_comes_back_as_one_of_its_moments(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(seed)
    real = SpillDirectory.create

    def create(self: SpillDirectory, name: str) -> int:
        if history.chooser.random() < 0.1:
            raise OSError(28, "no room for this one")
        return real(self, name)

    async def before(made: World) -> None:
        monkeypatch.setattr(SpillDirectory, "create", create)
        await history.go_on(made, 60)

    async def after(made: World) -> None:
        await made.drained()
        assert tree(made.backing) in history.moments

    run(tmp_path, before)
    monkeypatch.undo()
    lose_ram(tmp_path)
    run(tmp_path, after)


@pytest.mark.parametrize("seed", range(8))
def test_the_drain_never_gets_so_far_ahead_of_a_slow_journal_that_a_history_would_be_mixed_up(
    tmp_path: Path, seed: int
) -> None:
    """The disk stops taking the journal at some moment, nobody notices yet, the drain goes on as
    far as it may, and then RAM is lost.
    """
    history = History(seed)
    count = itertools.count()
    batches = history.chooser.randrange(1, 30)
    journal = StuckJournal(lambda _batch: next(count) > batches)

    async def before(made: World) -> None:
        await mirrored(made)
        journal.begin(made)
        await history.go_on(made, 60)
        made.engine.hold(False)
        await until(made, lambda: not len(made.log) or journal.is_waited_for())

    async def after(made: World) -> None:
        await made.drained()
        assert tree(made.backing) in history.moments

    try:
        with journal.installed():
            run(tmp_path, before)
        lose_ram(tmp_path)
        run(tmp_path, after)
    finally:
        journal.end()


class MakesNone(BackingDirectory):
    """No directory, and so nothing that comes after one."""

    def mkdir(self, path: LowerPath) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def staging_of(made: World) -> Path:
    return made.backing / ".acpfs" / "staging" / "test"


def is_staged(made: World, ino: Ino) -> bool:
    """Whether all of a file's last version has reached the storage."""
    op = made.log.last_of(ino)
    return op is not None and op.version is not None and op.version.is_staged


async def replaced_where_the_journal_names_it(
    made: World, journal: StuckJournal, size: int
) -> Path:
    """The staging file of a first version of `f`, of which the journal knows nothing later."""
    await made.do(made.fs.mkdir(ROOT, b"first", 0o755, CALLER))
    made.engine.hold(False)
    ino = await made.write(b"f", b"1" * size)
    await until(made, lambda: is_staged(made, ino))
    (first,) = [one for one in staging_of(made).iterdir() if one.stat().st_size == size]
    mirror = spilling(made).spill.mirror
    assert mirror is not None
    await until(made, lambda: mirror.statistics().state == "on")
    await all_mirrored(made)
    journal.begin(made)
    await made.write(b"f", b"2" * size)
    await until(made, lambda: journal.is_stuck.is_set())
    await until(made, lambda: len(made.log.pending_of(ino)) == 1 and is_staged(made, ino))
    await until(made, lambda: not made.engine._garbage._under_way)
    return first


@contextmanager
def committing_nothing() -> Iterator[None]:
    """What is committed would wait for the journal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mirror, "before", lambda _self, _op: None)
        yield


async def reads_first(made: World, size: int) -> None:
    found = await made.do(made.fs.lookup(ROOT, b"f"))
    assert await made.read(found.ino, size) == b"1" * size


@pytest.mark.parametrize("is_taken_over", [False, True], ids=["one worker", "taken over"])
def test_a_staging_file_stays_while_the_journal_names_it(
    tmp_path: Path, is_taken_over: bool
) -> None:
    """It is all that there is of a version without a copy, which a later one has replaced since. So
    it is for the next worker, as long as none of its journals counts.
    """
    journal = StuckJournal(lambda _batch: True)

    async def before(made: World) -> None:
        first = await replaced_where_the_journal_names_it(made, journal, SMALL)
        assert first.exists()

    async def next_worker(made: World) -> None:
        made.engine.hold(False)
        mirror = spilling(made).spill.mirror
        assert mirror is not None
        await until(made, lambda: mirror.statistics().why == "no journal")
        other = await made.write(b"other", b"3" * SMALL)
        await until(made, lambda: is_staged(made, other))  # so the engine has cleaned up
        await until(made, lambda: not made.engine._garbage._under_way)

    def refuse(_mirror: Mirror, _token: str, snapshot: sqlite3.Connection) -> Journal:
        snapshot.close()
        raise OSError("no journal")

    try:
        with journal.installed(), committing_nothing():
            run(tmp_path, before, spill_budget=1, make_lower=MakesNone)
            if is_taken_over:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Mirror, "_seed", refuse)
                    run(tmp_path, next_worker, spill_budget=1, make_lower=MakesNone)
        lose_ram(tmp_path)
        run(tmp_path, lambda made: reads_first(made, SMALL), spill_budget=1)
    finally:
        journal.end()
