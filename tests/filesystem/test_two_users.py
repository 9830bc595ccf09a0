"""One file in two hands: others change it on the backing directory, open it while it moves, close
it while one writes; and one may die.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.content import overflow
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.types import ROOT, Ino
from acpfs.writeback.evidence.verify import digest_of
from tests.filesystem.test_lanes import admitted, opened, persisted, run
from tests.filesystem.test_outgrown import until
from tests.filesystem.test_overflow import BUDGET, MIB, block
from tests.filesystem.test_room import Call, full, writer
from tests.filesystem.world import World


class Slow:
    """A function that does its work when `goes_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
        real = getattr(where, name)
        self.begun = threading.Event()
        self.goes_on = threading.Event()

        def slowly(*arguments: object) -> object:
            self.begun.set()
            self.goes_on.wait(60)
            return real(*arguments)

        monkeypatch.setattr(where, name, slowly)

    async def has_begun(self) -> None:
        assert await trio.to_thread.run_sync(self.begun.wait, 60)


# -- others change it on the backing directory


@pytest.mark.clause("S29")
@pytest.mark.parametrize("change", ["chmod", "replaced", "removed"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_passthrough_writer_writes_outlives_a_native_change(
    tmp_path: Path, change: str, when: str
) -> None:
    """The daemon sees neither the write nor that there will be one: the tier file must not go from
    under the writer.
    """

    async def scenario(w: World) -> None:
        ino, file = await admitted(w)
        kernel = os.dup(file.backing_fd)
        if when == "after":
            os.pwrite(kernel, b"kernel", 3 * MIB)
        await change_natively(w, "iter_1.pt", change)
        await look(w, ino, b"iter_1.pt")
        if when == "before":
            os.pwrite(kernel, b"kernel", 3 * MIB)
        os.close(kernel)
        await w.close(file)
        await w.drained()
        assert persisted(w, "iter_1.pt") == b"a" * 2 * MIB + bytes(MIB) + b"kernel"

    run(tmp_path, scenario, attr_timeout_s=0.0)


@pytest.mark.clause("S29")
def test_a_file_that_is_being_rewritten_takes_the_place_of_what_others_put_there(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"latest", b"old")
        await w.drained()
        file = await opened(w, ino, os.O_WRONLY | os.O_TRUNC)
        await w.do(w.fs.write(file.handle, 0, b"mine"))
        await change_natively(w, "latest", "replaced")
        await look(w, ino, b"latest")
        await w.close(file)
        await w.drained()
        assert persisted(w, "latest") == b"mine"
        assert await w.read((await w.do(w.fs.lookup(ROOT, b"latest"))).ino) == b"mine"

    run(tmp_path, scenario, attr_timeout_s=0.0)


async def change_natively(w: World, name: str, change: str) -> None:
    path = w.backing / name
    if change == "chmod":
        path.chmod(0o600)
    elif change == "removed":
        path.unlink()
    else:
        (w.backing / "theirs").write_bytes(b"theirs")
        (w.backing / "theirs").rename(path)


async def look(w: World, ino: Ino, name: bytes) -> None:
    """As any `ls -l` does."""
    await w.do(w.fs.lookup(ROOT, name))
    await w.do(w.fs.getattr(ino))


# -- it is opened while it moves out of RAM


@pytest.mark.clause("S13", "S53")
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
def test_a_file_that_is_opened_while_it_moves_out_of_ram_is_one_file(
    tmp_path: Path, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier file that the kernel would get is left behind a moment later."""

    async def scenario(w: World) -> None:
        await w.write(b"iter_1.pt", block(1))
        await w.drained()
        w.engine.hold(True)
        big = await writer(w, b"iter_2.pt", 1)
        assert big.lane is Lane.DIRECT
        await w.do(w.fs.write(big.handle, 0, block(1) * 3))
        slow = Slow(monkeypatch, w.lower, "create_staging")
        call = Call(w, big, block(2) * 3, 3 * MIB)
        await slow.has_begun()
        with w.fs.lock:
            w.tier.change_budget(128 * MIB)
        also = await opened(w, (await w.do(w.fs.lookup(ROOT, b"iter_2.pt"))).ino, flags)
        assert also.lane is Lane.DIRECT
        slow.goes_on.set()
        assert await call.done() == 3 * MIB
        await w.do(w.fs.write(big.handle, 0, b"newer"))
        if flags == os.O_RDONLY:
            assert await w.do(w.fs.read(also.handle, 0, 5)) == b"newer"
        else:
            await w.do(w.fs.write(also.handle, 5, b" still"))
        await w.close(also)
        await w.close(big)
        await w.drained()
        assert persisted(w, "iter_2.pt")[:5] == b"newer"

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S53")
def test_who_reads_the_old_file_in_passthrough_does_not_keep_the_new_one_from_leaving_ram(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        (w.backing / "model").write_bytes(block(9) * 2)
        ino = (await w.do(w.fs.lookup(ROOT, b"model"))).ino
        reader = await opened(w, ino, os.O_RDONLY)
        assert reader.lane is Lane.PASSTHROUGH
        file = await opened(w, ino, os.O_WRONLY | os.O_TRUNC)
        for number in range(6):
            await w.do(w.fs.write(file.handle, number * MIB, block(number)))
        await w.close(file)
        await w.drained()
        assert persisted(w, "model") == b"".join(map(block, range(6)))
        await w.close(reader)

    run(tmp_path, scenario, budget_bytes=BUDGET)


# -- one closes it while another writes, and one dies


async def overflowed(w: World) -> OpenFile:
    file = await writer(w, b"big", 1)
    for number in range(6):
        await w.do(w.fs.write(file.handle, number * MIB, block(number)))
    assert w.fs.statistics().overflowed_files == 1
    return file


def is_as_noted(w: World, name: bytes) -> bool:
    digest, _size = digest_of(w.lower, (name,), lambda: None)
    with (w.backing / os.fsdecode(name)).open("rb") as file:
        note = w.lower.noted(file.fileno())
    return note is None or note.digest == digest


@pytest.mark.clause("S8", "S53")
def test_a_write_that_is_under_way_beside_ram_when_somebody_else_syncs_is_published_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks write parts of one file.

    It was published without such a write, or, where that made it longer, never.
    """

    async def scenario(w: World) -> None:
        file = await overflowed(w)
        ino = (await w.do(w.fs.lookup(ROOT, b"big"))).ino
        other = await opened(w, ino, os.O_WRONLY)
        await w.do(w.fs.write(other.handle, 0, b"other"))
        slow = Slow(monkeypatch, overflow, "write_all")
        call = Call(w, file, block(9), 6 * MIB)
        await slow.has_begun()
        await w.do(w.fs.fsync(other.handle, datasync=False))
        w.engine.hold(False)
        await until(w, lambda: w.log.front(1)[0].tries > 0)
        assert not (w.backing / "big").exists()
        slow.goes_on.set()
        assert await call.done() == MIB
        await w.close(other)
        await w.close(file)
        await w.drained()
        assert persisted(w, "big") == b"other" + b"".join([*map(block, range(6)), block(9)])[5:]
        assert is_as_noted(w, b"big")
        assert await w.read(ino, 8 * MIB) == persisted(w, "big")

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S8", "S53")
def test_a_write_beside_ram_whose_process_is_killed_has_ended_when_the_file_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread was still writing, to a descriptor that had been closed: what it wrote came after
    the checksum, or to another file.
    """

    async def scenario(w: World) -> None:
        file = await overflowed(w)
        slow = Slow(monkeypatch, overflow, "write_all")
        call = Call(w, file, block(9))
        await slow.has_begun()
        call.kill()
        assert call.result is None
        slow.goes_on.set()
        assert await call.done() == MIB
        await w.close(file)
        await w.drained()
        assert persisted(w, "big") == block(9) + b"".join(map(block, range(1, 6)))
        assert is_as_noted(w, b"big")

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S132", "S131")
def test_a_write_that_was_broken_off_leaves_nothing_dirty_that_no_close_stores(
    tmp_path: Path,
) -> None:
    """Its handle never learned that the content counts as changed; a reader closed last, and the
    file stayed in RAM for ever.
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", block(1))
        await w.drained()
        w.engine.hold(True)
        await full(w)
        file = await opened(w, ino, os.O_WRONLY)
        reader = await opened(w, ino, os.O_RDONLY)
        call = Call(w, file, block(2), MIB)
        assert len(w.fs.statistics().waiting) == 1
        call.kill()
        await w.close(file)
        await w.close(reader)
        await w.drained()
        assert {report.state for report in w.fs.files_report()} == {"clean"}
        assert w.fs.statistics().content.dirty_bytes == 0
        assert persisted(w, "f") == block(1)

    run(tmp_path, scenario, budget_bytes=5 * MIB)


@pytest.mark.clause("S60")
def test_a_close_that_finds_no_room_for_a_copy_stores_the_file_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passthrough writers have filled the tmpfs, slack and all: close failed, the bytes were never
    stored, and the copy's file stayed.
    """

    async def scenario(w: World) -> None:
        _ino, file = await admitted(w)
        os.pwrite(file.backing_fd, b"kernel", 3 * MIB)
        before = w.tier.statistics().files

        def no_room(*_arguments: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(w.tier, "copy", no_room)
        await w.close(file)
        assert w.tier.statistics().files == before
        await w.drained()
        assert persisted(w, "iter_1.pt")[3 * MIB :] == b"kernel"
        assert w.fs.statistics().open_files == 0

    run(tmp_path, scenario)
