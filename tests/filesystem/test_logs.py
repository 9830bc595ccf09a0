"""Files that stay open and grow: what a version more of them costs, and that it is whole under its
name all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from acpfs.backing.directory import BackingDirectory
from acpfs.filesystem.content.contents import COPY_AT_FREEZE_BYTES_MAX
from acpfs.filesystem.records import Lane
from tests.filesystem.world import CALLER, World, world

KiB = 1 << 10
MiB = 1 << 20
AGE_S = 1e-9
"""Everything is older."""
PIECE_BYTES = 64 * KiB
COSTS_BYTES_MAX = 4 * PIECE_BYTES
"""Of a version that is one piece longer: each of the two copies gets what the other one got."""


class Log:
    """A program that writes one, and holds it open."""

    def __init__(self, w: World, name: bytes = b"log") -> None:
        self._w = w
        self._name = name
        self.data = b""
        self.path = w.backing / os.fsdecode(name)

    def goes_on(self, w: World) -> None:
        """With the next worker."""
        self._w = w

    async def begin(self, size: int, flags: int = os.O_WRONLY | os.O_APPEND) -> None:
        self.opened, attributes = await self._w.create(self._name, flags=flags)
        self.ino = attributes.ino
        await self.append(os.urandom(size))

    async def append(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            await self._w.do(self._w.fs.write(self.opened.handle, len(self.data), piece))
            self.data += piece

    async def stored_by_age(self) -> int:
        """Returns how many bytes went to the storage for it."""
        before = self._w.engine.statistics().counters.streamed_bytes
        assert await self._w.freeze_old() == 1
        return await self.drained(before)

    async def drained(self, before: int) -> int:
        await self._w.drained()
        assert self.path.read_bytes() == self.data
        return self._w.engine.statistics().counters.streamed_bytes - before

    async def grown_by_age(self, times: int = 1) -> list[int]:
        costs = []
        for _time in range(times):
            await self.append(os.urandom(PIECE_BYTES))
            costs.append(await self.stored_by_age())
        return costs


@pytest.mark.clause("S12", "S230")
def test_a_log_that_grows_is_stored_at_the_cost_of_what_was_appended(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, max_dirty_age_s=AGE_S) as w:
            log = Log(w)
            await log.begin(4 * MiB)
            assert await log.stored_by_age() == len(log.data)
            assert max((await log.grown_by_age(6))[1:]) <= COSTS_BYTES_MAX

    trio.run(main)


@pytest.mark.clause("S230", "S233")
def test_so_it_is_by_fsync_and_by_close(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, max_dirty_age_s=AGE_S) as w:
            log = Log(w)
            await log.begin(4 * MiB)
            await log.stored_by_age()
            await log.grown_by_age(2)
            before = w.engine.statistics().counters.streamed_bytes
            await log.append(b"line")
            await w.do(w.fs.fsync(log.opened.handle, False))
            assert await log.drained(before) <= COSTS_BYTES_MAX
            await log.append(b"line")
            await w.close(log.opened)
            assert await log.drained(before) <= 2 * COSTS_BYTES_MAX
            with trio.fail_after(60):
                while not w.engine.drained():  # noqa: ASYNC110 - threads have no trio event to set
                    await trio.sleep(0.01)
            assert list((w.backing / ".acpfs" / "staging" / "test").iterdir()) == []

    trio.run(main)


@pytest.mark.clause("S230")
def test_so_it_is_for_a_program_that_opens_its_log_for_each_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            log = Log(w)
            await log.begin(4 * MiB)
            await w.close(log.opened)
            await log.drained(0)
            costs = []
            for _line in range(6):
                before = w.engine.statistics().counters.streamed_bytes
                log.opened = await w.do(w.fs.open(log.ino, os.O_WRONLY | os.O_APPEND, CALLER))
                await log.append(b"line")
                await w.close(log.opened)
                costs.append(await log.drained(before))
            assert max(costs[1:]) <= COSTS_BYTES_MAX

    trio.run(main)


@pytest.mark.clause("S81", "S232")
def test_the_next_worker_streams_one_version_whole(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, session="s", max_dirty_age_s=AGE_S) as w:
            log = Log(w)
            await log.begin(2 * MiB)
            await log.stored_by_age()
            await log.grown_by_age(3)
        async with world(tmp_path, session="s", max_dirty_age_s=AGE_S) as w:
            log.goes_on(w)
            costs = await log.grown_by_age(5)
            assert costs[0] > 2 * MiB
            assert max(costs[1:]) <= COSTS_BYTES_MAX
            assert len(list((w.backing / ".acpfs" / "staging" / "test").iterdir())) == 1

    trio.run(main)


class Lively(BackingDirectory):
    """Whatever is written there, the program has something to say meanwhile."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.meanwhile()
        return super().write(fd, data, offset)


@pytest.mark.clause("S12", "S230")
@pytest.mark.parametrize("by_path", [False, True])
def test_a_log_that_is_appended_to_while_it_is_copied_is_not_copied_again(
    tmp_path: Path, *, by_path: bool
) -> None:
    """In passthrough, where nobody sees it.

    `by_path`: its beginning is changed, too; then the copy is of several moments.
    """

    async def main() -> None:
        async with world(
            tmp_path,
            unknown_bytes=MiB,
            budget_bytes=256 * MiB,
            max_dirty_age_s=AGE_S,
            make_lower=Lively,
        ) as w:
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            opened, _attributes = await w.create(b"log", flags=os.O_WRONLY | os.O_APPEND)
            assert opened.lane is Lane.PASSTHROUGH
            size = COPY_AT_FREEZE_BYTES_MAX + MiB
            os.pwrite(opened.backing_fd, os.urandom(size), 0)
            lines: list[int] = []

            def meanwhile() -> None:
                if len(lines) < 100:
                    lines.append(os.pwrite(opened.backing_fd, b"line", size + 4 * len(lines)))
                    if by_path and len(lines) < 20:
                        os.pwrite(opened.backing_fd, b"%d" % len(lines), 0)

            w.lower.meanwhile = meanwhile  # type: ignore[attr-defined]
            assert await w.freeze_old() == 1
            await w.drained()
            shown = (w.backing / "log").read_bytes()
            now = os.pread(opened.backing_fd, 2 * size, 0)
            assert now.startswith(shown)
            assert by_path or w.engine.statistics().counters.streamed_bytes == size == len(shown)
            w.lower.meanwhile = lambda: None  # type: ignore[attr-defined]
            now = os.pread(opened.backing_fd, 2 * size, 0)
            await w.close(opened)
            await w.drained()
            assert (w.backing / "log").read_bytes() == now
            assert w.engine.statistics().dirty_bytes == 0, "whatever sizes its versions have had"

    trio.run(main)
