"""What a member gives of what it has, and when bytes that it gave do not count. A file system
without FUSE, and no network: members are in one process.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from acpfs.backing.directory import BackingDirectory
from acpfs.exchange.beside import Loan, MemberFailedError
from acpfs.exchange.exchange_records import Availability, Has, MemberAddress, VersionName
from acpfs.filesystem.lending import BUSY_BYTES
from acpfs.filesystem.records import AttributeChange, Lane
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run, world

clause = pytest.mark.clause
MIB = 1 << 20
SIZE = 3 * MIB + 5
WAIT_S = 60.0


def version(w: World, name: str) -> VersionName:
    """A file as the storage shows it now."""
    st = (w.backing / name).stat()
    return VersionName(name.encode(), st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)


def lend(w: World, file: VersionName, offset: int = 0, size: int = MIB) -> Loan | None:
    return w.inner.lending.lend(file, offset, size, "other").result(WAIT_S)


def lent_bytes(w: World, loan: Loan, offset: int, size: int) -> tuple[bytes, bool]:
    """What arrives elsewhere, and whether it counts."""
    data = os.pread(loan.fd, size, offset)
    return data, w.inner.lending.end(loan)


async def stored(w: World, name: str = "model", size: int = SIZE) -> bytes:
    """A file that was written here, and is persisted."""
    data = os.urandom(size)
    await w.write(name.encode(), data)
    await w.drained()
    return data


@clause("S540")
def test_what_is_clean_is_given(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        data = await stored(w)
        file = version(w, "model")
        assert w.inner.lending.has(file, "other") == Availability(Has.WHOLE)
        for offset, size in ((0, MIB), (MIB + 3, 2 * MIB), (SIZE - 1, 1)):
            loan = lend(w, file, offset, size)
            assert loan is not None
            assert lent_bytes(w, loan, offset, size) == (data[offset : offset + size], True)

    run(tmp_path, scenario)


@clause("S540")
def test_what_is_not_persisted_is_given_to_nobody(tmp_path: Path) -> None:
    """Not under the name of what lies there still, either."""

    async def scenario(w: World) -> None:
        await stored(w)
        before = version(w, "model")
        w.engine.hold(True)
        await w.write(b"model", os.urandom(SIZE))
        assert version(w, "model") == before
        assert w.inner.lending.has(before, "other") == Availability(Has.NO)
        assert lend(w, before) is None

    run(tmp_path, scenario)


@clause("S543")
@pytest.mark.parametrize("field", ["path", "ino", "size", "mtime_ns", "ctime_ns"])
def test_another_version_is_not_given(tmp_path: Path, field: str) -> None:
    async def scenario(w: World) -> None:
        await stored(w)
        file = version(w, "model")
        values = {
            name: getattr(file, name) for name in ("path", "ino", "size", "mtime_ns", "ctime_ns")
        }
        other = VersionName(**{**values, field: b"other" if field == "path" else 99})
        assert w.inner.lending.has(other, "other") == Availability(Has.NO)
        assert lend(w, other) is None

    run(tmp_path, scenario)


@clause("S543")
def test_what_somebody_has_changed_on_the_storage_is_not_given_for_it(tmp_path: Path) -> None:
    """Others ask for what they see there; RAM has what was there before."""

    async def scenario(w: World) -> None:
        await stored(w)
        (w.backing / "model").write_bytes(os.urandom(SIZE))
        assert lend(w, version(w, "model")) is None

    run(tmp_path, scenario)


@clause("S543")
@pytest.mark.parametrize("change", ["mode", "name", "mode, over another member's file"])
def test_a_new_name_or_mode_is_the_same_file_and_another_ones_is_not(
    tmp_path: Path, change: str
) -> None:
    """Another member puts its own there just before this one has changed the mode: what lies there
    then is not what RAM has, whatever this one takes it for.
    """

    async def scenario(w: World) -> None:
        data = await stored(w)
        ino = (await w.do(w.fs.lookup(ROOT, b"model"))).ino
        name = "model"
        if change == "name":
            name = "renamed"
            await w.do(w.fs.rename(ROOT, b"model", ROOT, b"renamed", 0))
        else:
            if change != "mode":
                (w.backing / "theirs").write_bytes(os.urandom(SIZE))
                (w.backing / "theirs").rename(w.backing / "model")
            await w.do(w.fs.setattr(ino, AttributeChange(mode=0o600), None, CALLER))
        await w.drained()
        loan = lend(w, version(w, name))
        assert (loan is None) == (change not in ("mode", "name"))
        if loan is not None:
            assert lent_bytes(w, loan, 0, MIB) == (data[:MIB], True)

    run(tmp_path, scenario)


@clause("S543")
def test_a_version_that_is_replaced_between_question_and_range_is_not_given(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        await stored(w)
        before = version(w, "model")
        assert w.inner.lending.has(before, "other").has is Has.WHOLE
        data = await stored(w)
        assert lend(w, before) is None
        loan = lend(w, version(w, "model"))
        assert loan is not None
        assert lent_bytes(w, loan, 0, MIB) == (data[:MIB], True)

    run(tmp_path, scenario)


async def _writes(w: World, ino: Ino) -> None:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
    await w.do(w.fs.write(opened.handle, 0, b"x" * MIB))
    await w.close(opened)


async def _opens_to_write(w: World, ino: Ino) -> None:
    """And writes nothing yet: in the kernel's lane nobody would see it."""
    opened = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
    await w.close(opened)


async def _opens_and_truncates(w: World, ino: Ino) -> None:
    opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
    await w.close(opened)


async def _truncates(w: World, ino: Ino) -> None:
    await w.do(w.fs.setattr(ino, AttributeChange(size=5), None, CALLER))


async def _evicts(w: World, ino: Ino) -> None:
    with w.fs.lock, w.state.step():
        w.inner.contents.drop(w.inner.table[ino])


async def _cuts(w: World, ino: Ino) -> None:
    with w.fs.lock, w.state.step():
        w.inner.contents.cut(w.inner.table[ino], MIB)


Change = Callable[[World, Ino], Awaitable[None]]


@clause("S543")
@pytest.mark.parametrize("passthrough", [False, True])
@pytest.mark.parametrize(
    "change",
    [_writes, _opens_to_write, _opens_and_truncates, _truncates, _evicts, _cuts],
    ids=lambda one: one.__name__,
)
def test_bytes_that_may_have_changed_while_they_were_lent_do_not_count(
    tmp_path: Path, change: Change, passthrough: bool
) -> None:
    """Whatever was done; what was lent and is back before that, does."""

    async def scenario(w: World) -> None:
        data = await stored(w)
        file = version(w, "model")
        ino = (await w.do(w.fs.lookup(ROOT, b"model"))).ino
        before = lend(w, file)
        assert before is not None
        assert lent_bytes(w, before, 0, MIB) == (data[:MIB], True)
        loan = lend(w, file)
        assert loan is not None
        await change(w, ino)
        assert not w.inner.lending.end(loan)
        await w.drained()

    run(tmp_path, scenario, passthrough=passthrough, unknown_bytes=0)


@clause("S544")
def test_nothing_is_given_of_a_file_that_somebody_may_write_to(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await stored(w)
        file = version(w, "model")
        ino = (await w.do(w.fs.lookup(ROOT, b"model"))).ino
        opened = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
        assert lend(w, file) is None
        assert w.inner.lending.has(file, "other") == Availability(Has.NO)
        await w.close(opened)

    run(tmp_path, scenario, passthrough=True, unknown_bytes=0)


@clause("S544")
def test_nothing_is_given_of_a_file_that_somebody_has_mapped_to_write(tmp_path: Path) -> None:
    """He has closed it: only the kernel knows of him."""

    async def scenario(w: World) -> None:
        await stored(w)
        file = version(w, "model")
        ino = (await w.do(w.fs.lookup(ROOT, b"model"))).ino
        mapped = w.tier.open(w.inner.table[ino].body.tier)
        assert lend(w, file) is None
        os.close(mapped)
        loan = lend(w, file)
        assert loan is not None
        assert w.inner.lending.end(loan)

    run(tmp_path, scenario)


@clause("S544")
def test_who_only_reads_it_here_keeps_nobody_from_it(tmp_path: Path) -> None:
    """In the kernel's lane, where a mapping of an earlier writer could not be told from him: so it
    is known from before.
    """

    async def scenario(w: World) -> None:
        data = await stored(w)
        file = version(w, "model")
        assert w.inner.lending.has(file, "other") == Availability(Has.WHOLE)
        ino = (await w.do(w.fs.lookup(ROOT, b"model"))).ino
        opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
        assert opened.lane is Lane.PASSTHROUGH
        loan = lend(w, file)
        assert loan is not None
        assert lent_bytes(w, loan, 0, MIB) == (data[:MIB], True)
        await w.close(opened)

    run(tmp_path, scenario, passthrough=True, unknown_bytes=0)


@clause("S547")
def test_a_member_that_has_much_to_drain_gives_nothing(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await stored(w)
        file = version(w, "model")
        w.engine.hold(True)
        opened, _attributes = await w.create(b"next")
        await w.do(w.fs.write(opened.handle, BUSY_BYTES, b"x"))  # a hole counts as it is stored
        await w.close(opened)
        is_busy = w.log.sizes.unstored_bytes > BUSY_BYTES
        assert (lend(w, file) is None) == is_busy
        await w.drained()
        loan = lend(w, file)
        assert loan is not None
        assert w.inner.lending.end(loan)

    run(tmp_path, scenario, budget_bytes=128 << 20)


@clause("S543")
def test_ram_that_is_lent_counts_until_it_is_back(tmp_path: Path) -> None:
    """The other process has the file open: its pages are taken for as long."""

    async def scenario(w: World) -> None:
        await stored(w)
        file = version(w, "model")
        ino = (await w.do(w.fs.lookup(ROOT, b"model"))).ino
        loan = lend(w, file)
        assert loan is not None
        used = w.tier.used_bytes
        await _evicts(w, ino)
        assert w.tier.used_bytes == used
        assert not w.inner.lending.end(loan)
        assert w.tier.used_bytes < used

    run(tmp_path, scenario)


# -- two members that read the same


class Together:
    """Members of one process, each with a world: who asks is answered by the other's lending."""

    def __init__(self, node: str, worlds: dict[str, World]) -> None:
        self.node = node
        self._worlds = worlds
        self.took_bytes = 0
        self.fails = False
        self.spoils: Callable[[bytes], bytes] = lambda data: data

    def others(self) -> Sequence[MemberAddress]:
        return [
            MemberAddress(node, ("here",), 1, "0" * 64)
            for node in self._worlds
            if node != self.node
        ]

    def ask(self, to: MemberAddress, file: VersionName) -> Callable[[], Availability]:
        found = self._worlds[to.node].inner.lending.has(file, self.node)
        return lambda: found

    def get(self, to: MemberAddress, file: VersionName, offset: int, size: int) -> int:
        if self.fails:
            raise MemberFailedError("silent")
        lending = self._worlds[to.node].inner.lending
        loan = lending.lend(file, offset, size, self.node).result(WAIT_S)
        if loan is None:
            return -1
        data = self.spoils(os.pread(loan.fd, size, offset))
        if not lending.end(loan) or len(data) != size:
            return -1
        memory = os.memfd_create("range", os.MFD_CLOEXEC)
        os.write(memory, data)
        return memory

    def took(self, _node: str, size: int) -> None:
        self.took_bytes += size


def together(
    tmp_path: Path, count: int, scenario: Callable[[list[World], list[Together]], Awaitable[None]]
) -> None:
    """Members over one backing directory."""

    async def main() -> None:
        backing = tmp_path / "shared"
        backing.mkdir()
        worlds: dict[str, World] = {}
        sources = [Together(f"n{number}", worlds) for number in range(count)]
        async with AsyncExitStack() as stack:
            for source in sources:
                base = tmp_path / source.node
                base.mkdir()
                (base / "backing").symlink_to(backing)
                worlds[source.node] = await stack.enter_async_context(
                    world(base, members=source, budget_bytes=256 << 20)
                )
            await scenario(list(worlds.values()), sources)

    trio.run(main)


async def read_whole(w: World, name: bytes, size: int) -> bytes:
    """As a program reads a file."""
    ino = (await w.do(w.fs.lookup(ROOT, name))).ino
    opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
    data = b""
    while len(data) < size and (more := await w.do(w.fs.read(opened.handle, len(data), MIB))):
        data += more
    await w.close(opened)
    return data


class Counting:
    """What is read from the storage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._lock = threading.Lock()
        read = BackingDirectory.read

        def counted(this: BackingDirectory, fd: int, buffer: memoryview, offset: int) -> int:
            got = read(this, fd, buffer, offset)
            with self._lock:
                self.count += got
            return got

        monkeypatch.setattr(BackingDirectory, "read", counted)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


@clause("S540")
def test_what_another_member_has_is_not_read_from_the_storage(
    tmp_path: Path, storage: Counting
) -> None:
    async def scenario(worlds: list[World], sources: list[Together]) -> None:
        data = await stored(worlds[0], size=20 * MIB + 7)
        before = storage.count
        assert await read_whole(worlds[1], b"model", len(data)) == data
        assert storage.count == before
        assert sources[1].took_bytes == len(data)

    together(tmp_path, 2, scenario)


@clause("S541")
@pytest.mark.parametrize("count", [2, 3, 5])
def test_members_that_read_a_file_together_read_it_from_the_storage_about_once(
    tmp_path: Path, storage: Counting, count: int
) -> None:
    """Not so often as there are members, however they meet."""

    async def scenario(worlds: list[World], _sources: list[Together]) -> None:
        data = os.urandom(41 * MIB + 3)
        (worlds[0].backing / "cold").write_bytes(data)
        found: list[bytes] = []

        async def reads(w: World) -> None:
            found.append(await read_whole(w, b"cold", len(data)))

        async with trio.open_nursery() as nursery:
            for w in worlds:
                nursery.start_soon(reads, w)
        assert [one == data for one in found] == [True] * count
        for w in worlds:
            await trio.to_thread.run_sync(_settled, w)
        assert storage.count < (count - 0.3) * len(data)

    together(tmp_path, count, scenario)


def _settled(w: World) -> None:
    """Until nothing is on its way to RAM."""
    gone = threading.Event()
    while w.inner.fills.counts.warming:
        gone.wait(0.01)


@clause("S542")
def test_a_member_that_fails_is_no_error_to_who_reads(tmp_path: Path) -> None:
    async def scenario(worlds: list[World], sources: list[Together]) -> None:
        data = await stored(worlds[0], size=20 * MIB)
        sources[1].fails = True
        assert await read_whole(worlds[1], b"model", len(data)) == data
        assert sources[1].took_bytes == 0

    together(tmp_path, 2, scenario)


@clause("S543")
def test_a_member_that_gives_other_bytes_is_found_out(tmp_path: Path) -> None:
    """By the checksum that lies at the file: nothing of it becomes content."""

    async def scenario(worlds: list[World], sources: list[Together]) -> None:
        data = await stored(worlds[0], size=9 * MIB)
        sources[1].spoils = lambda one: bytes(len(one))
        await read_whole(worlds[1], b"model", len(data))
        await trio.to_thread.run_sync(_settled, worlds[1])
        ino = (await worlds[1].do(worlds[1].fs.lookup(ROOT, b"model"))).ino
        assert worlds[1].inner.table[ino].body.is_cold
        sources[1].fails = True
        assert await read_whole(worlds[1], b"model", len(data)) == data

    together(tmp_path, 2, scenario)


def test_a_range_from_a_member_needs_a_descriptor(tmp_path: Path) -> None:
    """None left: the storage is read."""

    async def scenario(worlds: list[World], _sources: list[Together]) -> None:
        data = await stored(worlds[0], size=9 * MIB)

        def none_left(_tier_id: object) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        read_long = worlds[0].tier.read_long
        worlds[0].tier.read_long = none_left  # type: ignore[method-assign,assignment]
        assert await read_whole(worlds[1], b"model", len(data)) == data
        worlds[0].tier.read_long = read_long  # type: ignore[method-assign]

    together(tmp_path, 2, scenario)


@clause("S541")
def test_nobody_waits_for_a_piece_that_is_awaited_from_somebody_else(tmp_path: Path) -> None:
    """Two members that would wait for each other would do so until a time-out."""

    async def scenario(worlds: list[World], _sources: list[Together]) -> None:
        data = os.urandom(20 * MIB)
        (worlds[0].backing / "cold").write_bytes(data)
        asks = Future[int]()
        waits = threading.Event()

        class Holds(Together):
            def get(self, to: MemberAddress, file: VersionName, offset: int, size: int) -> int:
                if not asks.done():
                    asks.set_result(offset)
                waits.wait(WAIT_S)
                return -1

        w = worlds[1]
        w.inner.warming._members._source = Holds("n1", {"n0": worlds[0]})
        worlds[0].inner.warming._members._source = None
        ino = (await worlds[0].do(worlds[0].fs.lookup(ROOT, b"cold"))).ino
        first = await worlds[0].do(worlds[0].fs.open(ino, os.O_RDONLY, CALLER))
        for number in range(20):
            await worlds[0].do(worlds[0].fs.read(first.handle, number * MIB, MIB))
        ino = (await w.do(w.fs.lookup(ROOT, b"cold"))).ino
        opened = await w.do(w.fs.open(ino, os.O_RDONLY, CALLER))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(w.do, w.fs.read(opened.handle, 0, MIB))
            offset = await trio.to_thread.run_sync(asks.result, WAIT_S)
            loan = w.inner.lending.lend(version(w, "cold"), offset, MIB, "n2")
            assert loan.result(WAIT_S) is None
            waits.set()
        await w.close(opened)
        await worlds[0].close(first)

    together(tmp_path, 2, scenario)
