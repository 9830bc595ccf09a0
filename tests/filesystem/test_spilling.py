"""The spill tier in one process: what leaves RAM, what is read from there, what comes back, and a
disk that fails or spoils bytes.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.backing import filling
from acpfs.filesystem.content import spilling as spilling_module
from acpfs.filesystem.content.spilling import Spilling
from acpfs.filesystem.records import Lane
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.types import HandleId, Ino
from acpfs.writeback.copies.on_disk import DiskCopies
from acpfs.writeback.log.ops import Version, VersionState
from acpfs.writeback.sources import spill as spill_module
from tests.filesystem.world import CALLER, World, violations
from tests.filesystem.world import run as in_world
from tests.rig.runtime import runtime_of

pytestmark = pytest.mark.clause("S150")

MIB = 1 << 20
BUDGET = 16 * MIB
FILE = 3 * MIB


def content(number: int, size: int = FILE) -> bytes:
    return bytes([number % 251 + 1]) * size


def spilling(made: World) -> Spilling:
    assert made.inner.spilling is not None
    return made.inner.spilling


async def until(made: World, wanted: Callable[[], bool]) -> None:
    """Looks under the lock until something is so; there is nobody to ring for it."""
    with trio.fail_after(60):
        while True:
            with made.fs.lock:
                if wanted():
                    return
                made.fs.freeze_old()
            await trio.sleep(0.002)


def place_of(made: World) -> Path:
    """Where the copies are."""
    place = spilling(made).spill.directory
    assert isinstance(place, DiskCopies)
    return place.path


async def rested(made: World) -> None:
    """Until nothing more is on its way to the spill directory."""
    await until(made, lambda: not spilling(made).spill.making and spilling(made).spill.usable())


def copies(made: World) -> list[str]:
    """Files in the spill directory but for the mirror's journal."""
    return [
        name for name in spilling(made).spill.directory.names() if not name.startswith("mirror-")
    ]


def spilled_versions(made: World) -> list[Version]:
    with made.fs.lock:
        return [op.version for op in made.log if op.version is not None and op.version.spilled]


def run(base: Path, script: Callable[[World], Any], **changes: Any) -> None:
    in_world(base, script, budget_bytes=BUDGET, spill=base / "spill", **changes)


def test_writers_go_on_while_nothing_drains(tmp_path: Path) -> None:
    async def script(made: World) -> None:
        inos = [
            await made.write(b"f%d" % number, content(number)) for number in range(15)
        ]  # three times the budget
        assert made.tier.used_bytes <= BUDGET
        assert spilled_versions(made)
        assert not list(made.backing.glob("f*"))
        for number, ino in enumerate(inos):
            assert await made.read(ino, FILE) == content(number)
        await made.drained()
        for number in range(15):
            assert (made.backing / f"f{number}").read_bytes() == content(number)
        await until(made, lambda: not copies(made))
        assert spilling(made).spill.statistics().used_bytes == 0

    run(tmp_path, script)


@pytest.mark.parametrize("policy", ["native", "error"])
def test_the_spill_directory_comes_before_the_policy_for_a_full_tier(
    tmp_path: Path, policy: str
) -> None:
    async def script(made: World) -> None:
        for number in range(10):
            await made.write(b"f%d" % number, content(number))
        assert made.fs.statistics().overflowed_files == 0
        await made.drained()
        assert (made.backing / "f9").read_bytes() == content(9)

    run(tmp_path, script, when_full=policy)


@pytest.mark.parametrize("policy", ["native", "error"])
def test_a_full_spill_directory_leaves_the_policy_as_it_is(tmp_path: Path, policy: str) -> None:
    async def script(made: World) -> None:
        for number in range(5):
            await made.write(b"f%d" % number, content(number))
        if policy == "error":
            with pytest.raises(OSError, match="No space") as refused:
                await made.write(b"f5", content(5, 2 * FILE))
            assert refused.value.errno == errno.ENOSPC
        else:
            await made.write(b"f5", content(5, 2 * FILE))
            assert made.fs.statistics().overflowed_files == 1
        await made.drained()

    run(tmp_path, script, when_full=policy, spill_budget=FILE // 2)


def test_a_spilled_file_is_changed_in_ram_and_both_versions_come_in_order(tmp_path: Path) -> None:
    async def script(made: World) -> None:
        inos = [await made.write(b"f%d" % number, content(number)) for number in range(8)]
        await rested(made)
        victim = next(
            number
            for number, ino in enumerate(inos)
            if ino in {version.ino for version in spilled_versions(made)}
        )
        opened = await made.do(made.fs.open(inos[victim], os.O_WRONLY, CALLER))
        await made.do(made.fs.write(opened.handle, 10, b"changed"))
        await made.close(opened)
        wanted = content(victim)[:10] + b"changed" + content(victim)[17:]
        assert await made.read(inos[victim], FILE) == wanted
        await made.drained()
        assert (made.backing / f"f{victim}").read_bytes() == wanted

    run(tmp_path, script)


@pytest.mark.clause("S132", "S131")
def test_who_is_killed_while_a_file_comes_back_leaves_nobody_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the thread: the descriptor that it wrote to would be another file's by then."""
    written: list[int] = []
    copy: list[int] = []
    write_all, begun, goes_on, ended = filling.write_all, *(threading.Event() for _ in range(3))

    async def script(made: World) -> None:
        for number in range(8):
            await made.write(b"f%d" % number, content(number))
        await rested(made)
        open_copy = spilling(made).spill.directory.open
        close = os.close
        before = made.tier.statistics().files

        def hangs(name: str) -> int:
            fd = open_copy(name)
            begun.set()
            goes_on.wait(60)
            copy.append(fd)
            return fd

        def closes(fd: int) -> None:
            close(fd)
            if [fd] == copy:
                ended.set()

        def writes(fd: int, data: bytes | memoryview, offset: int) -> None:
            written.append(fd)
            write_all(fd, data, offset)

        monkeypatch.setattr(spilling(made).spill.directory, "open", hangs)
        monkeypatch.setattr(os, "close", closes)
        monkeypatch.setattr(spill_module, "write_all", writes)
        call = made.fs.open(spilled_versions(made)[0].ino, os.O_WRONLY, CALLER)
        waiting = made.fs.steps.step(call, None)
        assert await trio.to_thread.run_sync(begun.wait, 60)
        assert not waiting.done()
        gone: Future[Any] = Future()
        gone.cancel()
        with pytest.raises(OSError):
            made.fs.steps.step(call, gone)
        assert (made.tier.statistics().files, made.tier.reserved_bytes) == (before, 0)
        goes_on.set()
        assert await trio.to_thread.run_sync(ended.wait, 60)
        assert written == []

    run(tmp_path, script)


def test_truncation_append_and_deletion_of_spilled_files(tmp_path: Path) -> None:
    async def script(made: World) -> None:
        inos = [await made.write(b"f%d" % number, content(number)) for number in range(12)]
        await rested(made)
        away = {version.ino for version in spilled_versions(made)}
        spilled = [number for number, ino in enumerate(inos) if ino in away]
        assert len(spilled) >= 3
        cut, emptied, gone = spilled[:3]
        opened = await made.do(made.fs.open(inos[cut], os.O_WRONLY | os.O_APPEND, CALLER))
        await made.do(made.fs.write(opened.handle, FILE, b"more"))
        await made.close(opened)
        await made.close(
            await made.do(made.fs.open(inos[emptied], os.O_WRONLY | os.O_TRUNC, CALLER))
        )
        await made.do(made.fs.unlink(Ino(1), b"f%d" % gone))
        await made.drained()
        assert (made.backing / f"f{cut}").read_bytes() == content(cut) + b"more"
        assert (made.backing / f"f{emptied}").read_bytes() == b""
        assert not (made.backing / f"f{gone}").exists()
        await until(made, lambda: not copies(made))

    run(tmp_path, script)


def test_a_reader_goes_on_when_its_file_is_persisted_and_its_copy_goes(tmp_path: Path) -> None:
    async def script(made: World) -> None:
        inos = [await made.write(b"f%d" % number, content(number)) for number in range(8)]
        await rested(made)
        ino = spilled_versions(made)[0].ino
        opened = await made.do(made.fs.open(ino, os.O_RDONLY, CALLER))
        before = await made.do(made.fs.read(opened.handle, 0, 100))
        await made.drained()
        assert (
            await made.do(made.fs.read(opened.handle, 100, 100))
            == before
            == content(inos.index(ino), 100)
        )
        await made.close(opened)

    run(tmp_path, script)


@pytest.mark.parametrize("mode", ["move", "mirror"])
def test_the_next_worker_drains_from_the_spill_directory(tmp_path: Path, mode: str) -> None:
    async def before(made: World) -> None:
        for number in range(8):
            await made.write(b"f%d" % number, content(number))
        await rested(made)
        assert spilled_versions(made)
        (tmp_path / "spill" / "acpfs-test" / "999-half").write_bytes(
            b"of a copy that was being made"
        )

    async def after(made: World) -> None:
        await rested(made)
        await made.drained()
        for number in range(8):
            assert (made.backing / f"f{number}").read_bytes() == content(number)
        await until(made, lambda: not copies(made))

    run(tmp_path, before, spill_mode=mode)
    run(tmp_path, after, spill_mode=mode)


def spoil(made: World, version: Version) -> None:
    """The disk changes some bytes of a copy."""
    with (place_of(made) / spilling(made).spill.copies[version.vid].name).open("r+b") as file:
        file.seek(FILE // 2)
        file.write(b"rotten")


def test_a_copy_that_the_disk_spoiled_is_not_stored(tmp_path: Path) -> None:
    async def script(made: World) -> None:
        for number in range(8):
            await made.write(b"f%d" % number, content(number))
        await rested(made)
        version = spilled_versions(made)[0]
        spoil(made, version)
        made.engine.hold(False)
        await until(made, lambda: bool(made.log.parked()))
        assert made.log.parked()[0].version is version
        assert spilling(made).spill.statistics().mismatches == 3
        name = made.log.parked()[0].name.decode()
        assert not (made.backing / name).exists()

    run(tmp_path, script)


def test_a_copy_that_the_disk_spoiled_is_not_changed_either(tmp_path: Path) -> None:
    """Else a write would give the spoiled bytes a checksum of their own."""

    async def script(made: World) -> None:
        for number in range(8):
            await made.write(b"f%d" % number, content(number))
        await rested(made)
        version = spilled_versions(made)[0]
        spoil(made, version)
        with pytest.raises(OSError, match="Input/output error"):
            await made.do(made.fs.open(version.ino, os.O_WRONLY, CALLER))
        assert version in spilled_versions(made)

    run(tmp_path, script)


def test_ram_gives_a_file_up_only_when_its_copy_and_its_name_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[str] = set()
    flush = os.fdatasync

    def fdatasync(fd: int) -> None:
        flush(fd)
        flushed.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    def sync_names(_self: SpillDirectory) -> None:
        named.update(flushed)

    named: set[str] = set()
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(SpillDirectory, "sync_names", sync_names)

    async def script(made: World) -> None:
        for number in range(8):
            await made.write(b"f%d" % number, content(number))
        await rested(made)
        moved = [
            spilling(made).spill.copies[version.vid].name for version in spilled_versions(made)
        ]
        assert moved
        assert named >= set(moved)

    run(tmp_path, script)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.clause("S151")
def test_a_disk_is_used_as_soon_as_it_has_answered(tmp_path: Path) -> None:
    """Who asks while it is being looked at does not make it rest."""

    async def script(made: World) -> None:
        spill = spilling(made).spill
        await until(made, lambda: spill._ready)
        with made.fs.lock:
            spill._ready = False
            assert not spill.usable()
        await until(made, lambda: spill._ready)
        assert spill.usable()

    run(tmp_path, script, runtime=runtime_of(Clock()))


@pytest.mark.clause("S151")
def test_a_disk_that_is_being_looked_at_is_not_looked_at_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later answer could be older than a failure, and end the rest that begins with that."""
    names = SpillDirectory.names
    answers = threading.Event()

    def late(directory: SpillDirectory) -> list[str]:
        answers.wait()
        return names(directory)

    monkeypatch.setattr(SpillDirectory, "names", late)

    async def script(made: World) -> None:
        spill = spilling(made).spill
        with made.fs.lock:
            asked = [spill.usable() for _ in range(3)]
        looks = spill.calls.statistics().calls["look"]
        answers.set()
        assert not any(asked)
        assert looks == 1
        await until(made, spill.usable)

    run(tmp_path, script)


@pytest.mark.clause("S151")
def test_a_disk_that_failed_is_tried_again_ever_later_and_used_when_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    create = SpillDirectory.create
    tries: list[float] = []

    def refuse(_self: SpillDirectory, _name: str) -> int:
        tries.append(clock.now)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(SpillDirectory, "create", refuse)

    async def script(made: World) -> None:
        spill = spilling(made).spill
        await until(made, spill.usable)
        await made.write(b"f", content(1))
        version = next(op.version for op in made.log if op.version is not None)
        for number, rest_s in enumerate((5, 10, 20, 40, 60, 60), 1):
            with made.fs.lock:
                spill.begin(version, spilling(made))
            await until(
                made, partial(lambda number: len(tries) == number and not spill.making, number)
            )
            clock.now += rest_s - 0.1
            assert not spill.usable()
            assert spill.statistics().state == "failing"
            clock.now += 0.2
            assert spill.usable()
        monkeypatch.setattr(SpillDirectory, "create", create)
        with made.fs.lock:
            spill.begin(version, spilling(made))
        await until(made, lambda: spill.statistics().state == "ok")

    run(tmp_path, script, runtime=runtime_of(clock))


@pytest.mark.clause("S151")
def test_a_failing_disk_is_left_alone_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: SpillDirectory, _name: str) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(SpillDirectory, "create", refuse)

    async def script(made: World) -> None:
        for number in range(5):
            await made.write(b"f%d" % number, content(number))
        await until(made, lambda: spilling(made).spill.statistics().state == "failing")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                made.write, b"f5", content(5, 2 * FILE)
            )  # waits for the drain, as without a spill directory
            await until(made, lambda: made.tier.waiting() > 0)
            made.engine.hold(False)
        await made.drained()
        assert (made.backing / "f5").read_bytes() == content(5, 2 * FILE)
        assert spilling(made).spill.statistics().failures == 1

    run(tmp_path, script)


@pytest.mark.clause("S151")
def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(_self: SpillDirectory, _name: str) -> int:
        released.wait(60)
        raise OSError(errno.EIO, "was hung")

    monkeypatch.setattr(SpillDirectory, "create", hang)

    async def script(made: World) -> None:
        try:
            inos = [await made.write(b"f%d" % number, content(number)) for number in range(5)]
            assert await made.read(inos[0], 10) == content(0, 10)
            await (
                made.drained()
            )  # the versions that are being copied are streamed from RAM meanwhile
            assert (made.backing / "f4").read_bytes() == content(4)
        finally:
            released.set()

    run(tmp_path, script)


@pytest.mark.clause("S151")
def test_what_moved_to_a_disk_that_hangs_is_eio_and_stored_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers are told instead of waiting for ever, what RAM has is read meanwhile, and the order
    waits.
    """
    opened = SpillDirectory.open
    released = threading.Event()
    monkeypatch.setattr(spill_module, "PATIENCE_S", 0.05)

    def hang(self: SpillDirectory, name: str) -> int:
        released.wait(60)
        return opened(self, name)

    async def script(made: World) -> None:
        inos = [await made.write(b"f%d" % number, content(number)) for number in range(8)]
        await rested(made)
        moved = {version.ino for version in spilled_versions(made)}
        stays = next(ino for ino in inos if ino not in moved)
        first = next(number for number, ino in enumerate(inos) if ino in moved)
        monkeypatch.setattr(SpillDirectory, "open", hang)
        try:
            with pytest.raises(OSError) as read:
                await made.read(inos[first], 10)
            assert read.value.errno == errno.EIO
            with pytest.raises(OSError) as changed:
                await made.do(made.fs.open(inos[first], os.O_RDWR, CALLER))
            assert changed.value.errno == errno.EIO
            assert await made.read(stays, 10) == content(inos.index(stays), 10)
            made.engine.hold(False)
            await until(made, lambda: any(op.tries for op in made.log if op.ino == inos[first]))
            assert not any((made.backing / f"f{number}").exists() for number in range(first, 8))
        finally:
            monkeypatch.setattr(
                spill_module, "PATIENCE_S", 60.0
            )  # what does not hang has the time that it takes
            released.set()
        assert await made.read(inos[first], 10) == content(first, 10)
        await made.drained()
        for number in range(8):
            assert (made.backing / f"f{number}").read_bytes() == content(number)

    run(tmp_path, script)


def test_sparse_and_empty_files_come_through(tmp_path: Path) -> None:
    async def script(made: World) -> None:
        opened, _attributes = await made.create(b"sparse")
        await made.do(made.fs.write(opened.handle, 40 * MIB, b"end"))
        await made.close(opened)
        await made.write(b"empty", b"")
        await until(made, lambda: len(spilling(made).spill.copies) == 2)
        copy = next(copy for copy in spilling(made).spill.copies.values() if copy.size)
        assert (place_of(made) / copy.name).stat().st_blocks * 512 < MIB
        await made.drained()
        assert (made.backing / "sparse").read_bytes() == bytes(40 * MIB) + b"end"

    run(tmp_path, script, spill_mode="mirror")


@pytest.mark.clause("S234")
def test_who_opens_a_spilled_file_when_ram_is_full_and_leaves_it_alone_changes_nothing(
    tmp_path: Path,
) -> None:
    """It came to a staging file to be changed; without a change its bytes are the copy's again, and
    not those of the older file.
    """

    async def script(made: World) -> None:
        ino = await made.write(b"victim", content(100))
        await made.drained()
        made.engine.hold(True)
        await made.write(
            b"victim", content(0)
        )  # the backing directory has other bytes, of the same length
        for number in range(1, 8):
            await made.write(b"f%d" % number, content(number))
        await rested(made)
        assert ino in {version.ino for version in spilled_versions(made)}
        filler, _attributes = await made.create(b"filler")
        for offset in range(0, BUDGET - FILE + MIB, MIB):
            await made.do(made.fs.write(filler.handle, offset, bytes(MIB)))
        opened = await made.do(made.fs.open(ino, os.O_RDWR, CALLER))
        assert made.inner.table[ino].body.is_overflowed
        await made.close(opened)
        assert violations(made) == []
        assert await made.read(ino, FILE) == content(0)
        opened = await made.do(made.fs.open(ino, os.O_RDWR, CALLER))
        await made.do(made.fs.write(opened.handle, 10, b"changed"))
        await made.close(opened)
        wanted = content(0)[:10] + b"changed" + content(0)[17:]
        assert await made.read(ino, FILE) == wanted
        await made.close(filler)
        await made.drained()
        assert (made.backing / "victim").read_bytes() == wanted

    run(tmp_path, script, when_full="native")


def test_a_stream_that_waits_for_the_storage_keeps_no_room(tmp_path: Path) -> None:
    """All streams have begun, and the storage takes nothing: what they read moves out of RAM, which
    is free then.

    More than is left beside those four is asked for, and they are too few to move before anybody
    needs room.
    """
    few = BUDGET * 5 // 32
    large = BUDGET * 7 // 16

    async def script(made: World) -> None:
        made.engine.hold(False)
        for number in range(4):
            await made.write(b"iter_%d.pt" % number, content(number, few))

        def all_streaming() -> bool:
            states = [op.version.state for op in made.log if op.version is not None]
            return states == [VersionState.STREAMING] * 4

        await until(made, all_streaming)
        with trio.fail_after(60):
            for number in range(4, 8):
                await made.write(b"iter_%d.pt" % number, content(number, large))
        made.engine.set_bandwidth(0)
        await made.drained()
        for number in range(8):
            assert (made.backing / f"iter_{number}.pt").read_bytes() == content(
                number, few if number < 4 else large
            )

    run(tmp_path, script, bandwidth=1, when_full="error")


@pytest.mark.parametrize("short", ["before its release", "after its release"])
def test_what_the_kernel_had_open_at_its_close_is_in_ram_once(tmp_path: Path, short: str) -> None:
    """Its version got a copy of its own, as the kernel could have written on; nobody did, so one of
    the two leaves first.
    """

    async def script(made: World) -> None:
        await made.write(b"iter_0.pt", content(0, 2 * FILE))
        await made.drained()
        made.engine.hold(True)
        writer, attributes = await made.create(b"iter_1.pt")
        assert writer.lane is Lane.PASSTHROUGH, made.fs.statistics().lane_choices
        os.pwrite(writer.backing_fd, content(1, 2 * FILE), 0)
        await made.do(made.fs.flush(writer.handle, 0))
        if short == "after its release":
            await made.do(made.fs.release(writer.handle))
        for number in range(2, 8):
            await made.write(b"iter_%d.pt" % number, content(number, 2 * FILE))
        await rested(made)
        if short == "before its release":
            await made.do(made.fs.release(writer.handle))
        for number in range(8, 12):
            await made.write(b"iter_%d.pt" % number, content(number, 2 * FILE))
        await rested(made)
        with made.fs.lock:
            node = made.inner.table[attributes.ino]
            version = next(op.version for op in made.log if op.ino == attributes.ino and op.version)
            assert node.body.is_on(version)
        assert await made.read(attributes.ino, 2 * FILE) == content(1, 2 * FILE)
        await made.drained()
        assert (made.backing / "iter_1.pt").read_bytes() == content(1, 2 * FILE)

    in_world(
        tmp_path,
        script,
        passthrough=True,
        budget_bytes=2 * BUDGET,
        spill=tmp_path / "spill",
    )


@pytest.mark.parametrize("changed", ["before its release", "by another open"])
def test_what_is_changed_after_its_close_shares_no_bytes_with_its_version(
    tmp_path: Path, changed: str
) -> None:
    async def script(made: World) -> None:
        await made.write(b"iter_0.pt", content(0, 2 * FILE))
        await made.drained()
        made.engine.hold(True)
        writer, attributes = await made.create(b"iter_1.pt")
        os.pwrite(writer.backing_fd, content(1, 2 * FILE), 0)
        await made.do(made.fs.flush(writer.handle, 0))
        if changed == "before its release":
            os.pwrite(writer.backing_fd, b"changed", 5)
        await made.do(made.fs.release(writer.handle))
        if changed == "by another open":
            other = await made.do(made.fs.open(attributes.ino, os.O_WRONLY, CALLER))
            await made.do(made.fs.write(other.handle, 5, b"changed"))
            await made.do(made.fs.flush(other.handle, 0))
            await made.do(made.fs.release(other.handle))
        for number in range(2, 12):
            await made.write(b"iter_%d.pt" % number, content(number, 2 * FILE))
        await rested(made)
        wanted = content(1, 2 * FILE)[:5] + b"changed" + content(1, 2 * FILE)[12:]
        assert await made.read(attributes.ino, 2 * FILE) == wanted
        await made.drained()
        assert (made.backing / "iter_1.pt").read_bytes() == wanted

    in_world(
        tmp_path,
        script,
        passthrough=True,
        budget_bytes=2 * BUDGET,
        spill=tmp_path / "spill",
    )


def test_a_worker_that_takes_over_an_open_file_leaves_its_synced_bytes_apart(
    tmp_path: Path,
) -> None:
    """With little RAM, what had been synced shared its bytes with the file again before the open
    file was known, and was stored with what the kernel wrote since.
    """
    left: list[tuple[Ino, int, HandleId]] = []

    async def before(made: World) -> None:
        writer, attributes = await made.create(b"open.pt")
        assert writer.lane is Lane.PASSTHROUGH, made.fs.statistics().lane_choices
        os.pwrite(writer.backing_fd, content(1), 0)
        await made.do(made.fs.fsync(writer.handle, datasync=False))
        left.append((attributes.ino, os.dup(writer.backing_fd), writer.handle))

    async def after(made: World) -> None:
        ((ino, fd, handle),) = left
        with made.fs.lock:
            (version,) = (op.version for op in made.log if op.version is not None)
            assert not made.inner.table[ino].body.is_on(version)
        os.pwrite(fd, b"later", 0)
        os.close(fd)
        made.engine.hold(False)
        await until(made, lambda: (made.backing / "open.pt").exists())
        assert (made.backing / "open.pt").read_bytes() == content(1)
        await made.do(made.fs.flush(handle, 0))
        await made.do(made.fs.release(handle))

    with_spill = partial(in_world, tmp_path, session="s", spill=tmp_path / "spill", unknown_bytes=0)
    with_spill(before, passthrough=True, budget_bytes=BUDGET)
    with_spill(after, passthrough=True, budget_bytes=2 * FILE + MIB // 2)


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[object]:
    """What a method was called with."""
    called: list[object] = []
    method = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        called.append(arguments[0])
        return method(*arguments)

    monkeypatch.setattr(owner, name, call)
    return called


OPEN_FILES = 12
SHORTAGES = 50


@pytest.mark.clause("S482")
def test_open_files_are_not_looked_at_by_each_writer_that_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes are there twice. Whoever closes one has it shared when room is needed next."""
    monkeypatch.setattr(spilling_module, "LATER_S", math.inf)

    async def script(made: World) -> None:
        made.inner.lanes.offer(Lane.DIRECT, passthrough=True)
        files = []
        for number in range(OPEN_FILES):
            opened, _attributes = await made.create(b"f%d" % number)
            assert opened.lane is Lane.PASSTHROUGH
            os.pwrite(opened.backing_fd, b"x" * 4096, 0)
            await made.do(made.fs.fsync(opened.handle, False))
            files.append(opened)
        sharing = counted(monkeypatch, spilling(made), "_share")
        asking = counted(monkeypatch, spilling(made).spill, "takes")
        with made.fs.lock:
            for _ in range(SHORTAGES):
                spilling(made)._shed(1 << 40)
            assert len(sharing) <= OPEN_FILES
            assert len(asking) <= OPEN_FILES
            used = made.tier.used_bytes
        await made.close(files[3])
        with made.fs.lock:
            spilling(made)._shed(1 << 40)
            assert made.tier.used_bytes == used - 4096
            assert len(sharing) <= OPEN_FILES + 2
        for opened in files[:3] + files[4:]:
            await made.close(opened)
        await made.drained()

    in_world(
        tmp_path,
        script,
        budget_bytes=16 * BUDGET,
        spill=tmp_path / "spill",
        spill_budget=1,
        unknown_bytes=0,
    )


@pytest.mark.clause("S482")
def test_what_is_mirrored_and_open_is_not_looked_at_by_each_writer_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilling_module, "LATER_S", math.inf)

    async def script(made: World) -> None:
        readers = []
        for number in range(OPEN_FILES):
            ino = await made.write(b"f%d" % number, content(number, 4096))
            readers.append(await made.do(made.fs.open(ino, os.O_RDONLY, CALLER)))
        await until(made, lambda: len(spilling(made).spill.copies) == OPEN_FILES)
        leaving = counted(monkeypatch, spilling(made), "_leave_ram")
        with made.fs.lock:
            for _ in range(SHORTAGES):
                spilling(made)._shed(1 << 40)
            assert len(leaving) <= OPEN_FILES
            assert not [op for op in made.log if op.version is not None and op.version.spilled]
        await made.close(readers[3])
        with made.fs.lock:
            spilling(made)._shed(1 << 40)
            left = [op.name for op in made.log if op.version is not None and op.version.spilled]
        assert left == [b"f3"]
        for reader in readers[:3] + readers[4:]:
            await made.close(reader)
        await made.drained()

    run(tmp_path, script, spill_mode="mirror")
