"""Neither readers of a file nor a version of it that waits decide whether its writer fails when RAM
is full.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from acpfs.filesystem.records import Lane, OpenFile
from acpfs.types import Ino
from tests.filesystem.test_outgrown import MIB, patterned
from tests.filesystem.test_slow_backing import until
from tests.filesystem.world import CALLER, World, run

pytestmark = pytest.mark.clause("S432")

BUDGET = 8 * MIB


async def read_in_the_kernel(w: World) -> tuple[Ino, OpenFile, bytes]:
    """A file that is persisted and in RAM, and that somebody reads in the passthrough lane."""
    w.inner.lanes.offer(Lane.DIRECT, passthrough=False)
    data = patterned(5 * MIB)
    ino = await w.write(b"log", data)
    await w.drained()
    w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
    reader = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
    assert reader.lane is Lane.PASSTHROUGH
    return ino, reader, data


async def append(w: World, writer: OpenFile, data: bytes, at: int) -> None:
    for start in range(0, len(data), MIB):
        await w.do(w.fs.write(writer.handle, at + start, data[start : start + MIB]))


@pytest.mark.clause("S53", "X9")
@pytest.mark.parametrize("when_full", ["wait", "native"])
def test_a_reader_in_the_kernel_keeps_what_it_has_and_the_writer_goes_on(
    tmp_path: Path, when_full: str
) -> None:
    async def scenario(w: World) -> None:
        ino, reader, data = await read_in_the_kernel(w)
        in_the_kernel = os.dup(reader.backing_fd)
        writer = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_APPEND, CALLER))
        more = patterned(10 * MIB, seed=5)
        await append(w, writer, more, len(data))
        assert w.inner.table[ino].body.is_overflowed
        assert os.pread(in_the_kernel, 16 * MIB, 0) == (data + more)[:BUDGET]
        os.close(in_the_kernel)
        assert await w.read(ino, 16 * MIB) == data + more
        await w.close(writer)
        await w.drained()
        assert w.tier.used_bytes >= len(data), "the reader's bytes count"
        await w.close(reader)
        await until(lambda: w.tier.used_bytes == 0)
        assert (w.backing / "log").read_bytes() == data + more

    run(tmp_path, scenario, budget_bytes=BUDGET, when_full=when_full)


def test_one_that_may_be_mapped_beside_a_reader_goes_on_into_the_slack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mapping would go on in the tier file, wherever its bytes are."""

    async def scenario(w: World) -> None:
        ino, reader, data = await read_in_the_kernel(w)
        writer = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
        assert w.inner.table[ino].kernel_rewriters == 1
        more = patterned(10 * MIB, seed=5)
        monkeypatch.setattr(w.tier, "space_left_bytes", lambda: 100 * MIB)
        await append(w, writer, more, len(data))
        assert os.pread(reader.backing_fd, 16 * MIB, 0) == data + more
        monkeypatch.setattr(w.tier, "space_left_bytes", lambda: 64 * MIB)
        with pytest.raises(OSError, match="No space left") as refused:
            await w.do(w.fs.write(writer.handle, 15 * MIB, b"x" * MIB))
        assert refused.value.errno == errno.ENOSPC
        monkeypatch.setattr(w.tier, "space_left_bytes", lambda: 100 * MIB)
        await w.do(w.fs.write(writer.handle, 15 * MIB, b"x" * MIB))
        await w.close(reader)
        await w.close(writer)
        await w.drained()
        assert (w.backing / "log").read_bytes() == data + more + b"x" * MIB

    run(tmp_path, scenario, budget_bytes=BUDGET)


@pytest.mark.clause("S53")
@pytest.mark.parametrize(("when_full", "parked"), [("native", False), ("wait", True)])
def test_a_change_of_what_a_version_needs_goes_on_without_room_for_a_copy_of_it(
    tmp_path: Path, when_full: str, *, parked: bool
) -> None:
    async def scenario(w: World) -> None:
        data = patterned(6 * MIB)
        ino = await w.write(b"data", data)
        if parked:
            with w.fs.lock:
                [op] = w.log
                op.last_error = errno.EACCES
                w.log.park(op)
        for at, new in ((5, b"0123456789"), (MIB, b"more")):
            writer = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
            await w.do(w.fs.write(writer.handle, at, new))
            with w.fs.lock:
                w.engine.retry()
            await w.close(writer)
            data = data[:at] + new + data[at + len(new) :]
            assert await w.read(ino, 8 * MIB) == data
            w.engine.hold(False)
        await w.drained()
        assert (w.backing / "data").read_bytes() == data

    run(tmp_path, scenario, budget_bytes=BUDGET, when_full=when_full)


def test_with_wait_the_version_itself_is_waited_for(tmp_path: Path) -> None:
    """When it is persisted, there is nothing to be copied."""

    async def scenario(w: World) -> None:
        ino = await w.write(b"data", patterned(6 * MIB))
        writer = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
        w.engine.hold(False)
        await w.do(w.fs.write(writer.handle, 5, b"0123456789"))
        assert w.fs.statistics().overflowed_files == 0
        assert w.fs.statistics().content.copied_aside_bytes == 0
        await w.close(writer)
        await w.drained()

    run(tmp_path, scenario, budget_bytes=BUDGET)
