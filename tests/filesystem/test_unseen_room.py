"""What is reserved for stores through mappings: each file has what they may still need, whatever
opens, lengthens, allocates, closes, evicts and dies, and nothing stays reserved at the end.

The test is the kernel and the programs: it writes to the descriptors that opens hand out.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import trio

from acpfs.config import WhenFull
from acpfs.filesystem import admission, lanes
from acpfs.filesystem.admission import Net
from acpfs.filesystem.content import contents
from acpfs.filesystem.content.body import Body
from acpfs.filesystem.content.unseen_room import Lengthening
from acpfs.filesystem.expectations import Use
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import AttributeChange, Attributes, Caller, Lane, OpenFile
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world
from tests.rig.syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, cached_pages

PAGE = mmap.PAGESIZE
PAGES = 4096
"""Of the whole budget."""
FILE_PAGES = 256
FILES_MAX = 8
LIVES = 4
STEPS = 60
"""Of each worker."""
LOOK_S = 0.02
"""While calls are under way."""


class Locks:
    """Double of what takes inode locks, and looks: at once."""

    def __init__(self, w: World) -> None:
        self._w = w
        self._held: dict[Ino, Future[bool]] = {}
        self._is_due = False
        w.inner.hold.offer(self, Net.HOLDS)

    def take(self, ino: Ino) -> None:
        until = self._w.inner.hold.taken(ino)
        if until is not None:
            self._held[ino] = until

    def look_soon(self) -> None:
        """By `look`."""
        self._is_due = True

    def look(self) -> None:
        """Until nothing happens any more; under the lock.

        Room that came for a held writer while it was looked is its file's with the next look.
        """
        self._is_due = True
        while self._is_due:
            self._is_due = False
            self._w.inner.hold.tick()

    def is_held(self, ino: Ino) -> bool:
        return ino in self._held and not self._held[ino].done()


@dataclass(eq=False)
class Program:
    """One open file: as the kernel has it."""

    opened: OpenFile
    ino: Ino
    access: int
    descriptor: int = -1
    """The kernel's, which outlives workers; -1: its bytes go through the daemon."""
    mapping: mmap.mmap | None = field(default=None, repr=False)
    is_firm: bool = False
    """Opened to be mapped, and with all the room for that."""


class Story:
    """Random calls, and what must be so between them."""

    def __init__(self, chance: Random, when_full: WhenFull) -> None:
        self.chance = chance
        self.when_full = when_full
        self.open: list[Program] = []
        self.number = 0
        self.requests = 0
        """Files that had passthrough, and room for all that they are expected to need."""
        self.told: list[str] = []
        """What was done, for who reads a failure."""
        self._inode_locks: dict[Ino, trio.Lock] = {}

    async def life(self, base: Path, patch: pytest.MonkeyPatch, *, is_last: bool) -> None:
        async with world(
            base,
            budget_bytes=PAGES * PAGE,
            max_dirty_age_s=0,
            hold=False,
            session="s",
            when_full=self.when_full,
        ) as self.w:
            self.patch = patch
            w = self.w
            w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            self.locks = Locks(w)
            self.check("a new worker")
            for _ in range(STEPS):
                await self.step()
            if is_last:
                with trio.fail_after(60):
                    await self.end()

    async def end(self) -> None:
        while self.open:
            await self.close(self.open.pop())
        self.check("all are closed")
        assert self.w.tier.reserved_bytes == 0, self.history()
        for name in await self.w.names():  # halves stay in RAM until somebody decides
            await self.w.do(self.w.fs.unlink(ROOT, name))
        await self.w.drained()
        assert self.w.tier.reserved_bytes == 0, self.history()
        for _ in itertools.count():  # what was logged is forgotten behind the last answer
            if not self.w.tier.used_bytes:
                break
            await trio.sleep(0.01)

    async def step(self) -> None:
        steps: list[tuple[int, Callable[[], Awaitable[str]]]] = [
            (4, self.begin),
            (3, self.open_again),
            (1, self.fail_to_open),
            (6, self.lengthen),
            (2, self.lengthen_twice),
            (5, self.allocate),
            (6, self.store),
            (2, self.append),
            (2, self.write_through_daemon),
            (3, self.end_one),
            (3, self.save_another),
            (2, self.drain),
            (1, self.evict),
        ]
        calls = self.chance.choices(
            [call for _weight, call in steps],
            [weight for weight, _call in steps],
            k=self.chance.choice((1, 1, 1, 2)),
        )
        if self.fail_to_open in calls:
            calls = [self.fail_to_open]  # others would fail, too
        if self.store in calls and {self.lengthen, self.lengthen_twice} & set(calls):
            calls = [self.store]  # into what is cut off meanwhile is SIGBUS, as it has to be
        said: list[str] = []

        async def do(call: Callable[[], Awaitable[str]]) -> None:
            said.append(await call())

        async with trio.open_nursery() as daemon:
            daemon.start_soon(self.look_after_waiting)
            async with trio.open_nursery() as nursery:
                for call in calls:
                    nursery.start_soon(do, call)
            daemon.cancel_scope.cancel()
        self.check(", at once ".join(said))

    async def look_after_waiting(self) -> None:
        """What the daemon does all the time, and the more often the less room there is: who waits
        in vain is told so.
        """
        while True:
            await trio.sleep(LOOK_S)
            with self.w.fs.lock:
                self.locks.look()
                self.w.fs.look_after_waiting()

    # -- what must be so

    def node(self, ino: Ino) -> Node:
        return self.w.inner.table[ino]

    def check(self, said: str) -> None:
        w = self.w
        self.told.append(said)
        with w.fs.lock:
            self.locks.look()
            kept = {ino: self.kept(ino) for ino in {one.ino for one in self.open}}
            assert w.tier.reserved_bytes == sum(kept.values()), self.history()
            for one in self.open:
                if one.is_firm or (one.mapping is not None and not self.is_short(one)):
                    assert kept[one.ino] >= needed(one), (one, kept[one.ino], self.history())

    def kept(self, ino: Ino) -> int:
        return self.w.inner.room.unseen.reserved_bytes(self.node(ino))

    def is_short(self, one: Program) -> bool:
        """Of one that nobody expected to be mapped: there is not so much."""
        return bool(self.w.tier.waiting()) or self.w.tier.free_bytes() < needed(one)

    def history(self) -> str:
        return "\n".join(one for one in self.told if one != "nothing")

    # -- calls

    def inode_lock(self, one: Program) -> trio.Lock:
        """The kernel's of the mount's file: it has that until one of these calls is answered
        (`docs/internals/concurrency.md`, "Inode locks").
        """
        return self._inode_locks.setdefault(one.ino, trio.Lock())

    def some(self, *, in_kernel: bool = False) -> Program | None:
        among = [one for one in self.open if one.descriptor >= 0 or not in_kernel]
        return self.chance.choice(among) if among else None

    def pages(self, most: int) -> int:
        return self.chance.randint(0, most) * PAGE

    async def begin(self) -> str:
        if len(self.open) >= FILES_MAX:
            return "nothing"
        name = self.new_name(self.chance.choice(("map", "map", "map", "new")))
        opened, made = await self.create(name)
        one = self.take(opened, made.ino, os.O_RDWR)
        one.is_firm = one.descriptor >= 0 and name.startswith("map")
        return f"create {name}: {opened.lane.value}"

    def new_name(self, kind: str) -> str:
        """Like that of no file before: what became of those is no matter."""
        self.number += 1
        return kind + "".join("-" + "abcdefghij"[int(digit)] for digit in str(self.number))

    async def create(self, name: str) -> tuple[OpenFile, Attributes]:
        known = self.w.inner.expectations
        use = Use.READ_BACK if name.startswith("map") else Use.ONLY_WRITTEN
        with self.w.fs.lock, self.w.state.step():
            known.learn(name.encode(), FILE_PAGES * PAGE)
            known.learn_use(name.encode(), use)
        call = self.w.fs.create(ROOT, name.encode(), 0o644, os.O_RDWR, self.caller())
        return await self.w.do(call)

    def caller(self) -> Caller:
        """Of a request that no other one is taken for by the next worker."""
        self.requests += 1
        return CALLER._replace(unique=self.requests)

    def take(self, opened: OpenFile, ino: Ino, access: int) -> Program:
        one = Program(opened, ino, access)
        target = opened.backing_fd
        if opened.lane is Lane.PASSTHROUGH:
            # By another open file, as the kernel has it: its use leaves a trace.
            one.descriptor = os.open(f"/proc/self/fd/{target}", access)
        self.open.append(one)
        return one

    async def open_again(self) -> str:
        before = self.some(in_kernel=True) or self.some()
        if before is None or len(self.open) >= FILES_MAX:
            return "nothing"
        access = self.chance.choice((os.O_WRONLY, os.O_WRONLY, os.O_RDWR))
        try:
            opened = await self.w.do(self.w.fs.open(before.ino, access, self.caller()))
        except OSError as error:
            return f"open {before.ino} again: {error}"
        self.take(opened, before.ino, access)
        return f"open {before.ino} again ({access}): {opened.lane.value}"

    async def fail_to_open(self) -> str:
        others = [self.node(one.ino).body for one in self.open]
        opened_as_it_is = self.w.inner.contents.opened

        def fails(body: Body) -> int:
            if body in others:
                return opened_as_it_is(body)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with self.patch.context() as patch:
            patch.setattr(self.w.inner.contents, "opened", fails)
            with suppress(OSError):
                opened, made = await self.create(self.new_name("map"))
                self.take(opened, made.ino, os.O_RDWR)
        return "an open that fails"

    async def lengthen(self) -> str:
        one = self.some()
        if one is None:
            return "nothing"
        size = self.pages(self.chance.choice((FILE_PAGES, 2 * FILE_PAGES, PAGES // 4, PAGES)))
        size += self.chance.choice((0, 1, PAGE - 1))
        async with self.inode_lock(one):
            if one not in self.open:
                return "nothing"
            return f"ftruncate {one.ino} {size}: {await self.resize(one, size)}"

    async def resize(self, one: Program, size: int) -> str:
        change = AttributeChange(size=size)
        try:
            await self.w.do(self.w.fs.setattr(one.ino, change, one.opened.handle, CALLER))
        except OSError as error:
            self.is_answer(error, errno.ENOSPC, errno.EBADF, errno.EBUSY)
            return error.strerror or ""
        return "done"

    def is_answer(self, error: OSError, *known: int) -> None:
        """EBADF: another call has closed it meanwhile. EBUSY: it outgrows RAM (S61)."""
        if error.errno not in known:
            raise error

    async def lengthen_twice(self) -> str:
        """Two calls that the kernel asks for one after the other: neither is to rely on that."""
        one = self.some()
        if one is None:
            return "nothing"
        sizes = [self.pages(PAGES // 2) for _ in range(2)]
        async with self.inode_lock(one), trio.open_nursery() as nursery:
            for size in sizes if one in self.open else ():
                nursery.start_soon(self.resize, one, size)
        return f"ftruncate {one.ino} at once {sizes}"

    async def allocate(self) -> str:
        one = self.some()
        if one is None:
            return "nothing"
        mode = self.chance.choice((0, 0, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE))
        offset = self.pages(FILE_PAGES)
        length = self.pages(FILE_PAGES) + 1
        said = f"fallocate {one.ino} {mode} {offset} {length}"
        try:
            async with self.inode_lock(one):
                if one not in self.open:
                    return "nothing"
                await self.w.do(self.w.fs.fallocate(one.opened.handle, mode, offset, length))
        except OSError as error:
            return f"{said}: {error}"
        return said

    async def store(self) -> str:
        """Only into the length, as a mapping can."""
        one = self.some(in_kernel=True)
        size = 0 if one is None else os.fstat(one.descriptor).st_size
        if one is None or not size or one.access != os.O_RDWR:
            return "nothing"
        if one.mapping is None:
            one.mapping = mmap.mmap(one.descriptor, size)
        start = self.chance.randrange(size)
        end = min(size, start + 1 + self.pages(FILE_PAGES // 2), len(one.mapping))
        for at in range(start, end, PAGE):
            one.mapping[at] = 1
        return f"store {one.ino} {start} {end}"

    async def append(self) -> str:
        """write(2), in the kernel."""
        one = self.some(in_kernel=True)
        if one is None or self.locks.is_held(one.ino):
            return "nothing"
        data = b"w" * self.pages(FILE_PAGES // 4)
        async with self.inode_lock(one):
            if one not in self.open or self.locks.is_held(one.ino):
                return "nothing"
            os.pwrite(one.descriptor, data, os.fstat(one.descriptor).st_size)
        return f"append {one.ino} {len(data)}"

    async def write_through_daemon(self) -> str:
        one = self.some()
        if one is None or one.descriptor >= 0:
            return "nothing"
        offset = self.pages(FILE_PAGES)
        data = b"d" * self.pages(FILE_PAGES // 4)
        said = f"write {one.ino} {offset} {len(data)}"
        try:
            async with self.inode_lock(one):
                if one not in self.open:
                    return "nothing"
                await self.w.do(self.w.fs.write(one.opened.handle, offset, data))
        except OSError as error:
            self.is_answer(error, errno.ENOSPC, errno.EIO, errno.EBADF)
            return f"{said}: {error}"
        return said

    async def end_one(self) -> str:
        one = self.some()
        if one is None:
            return "nothing"
        self.open.remove(one)  # nobody uses it from now on
        async with self.inode_lock(one):
            pass  # a call that is under way keeps the file: the kernel tells of the close behind it
        await self.close(one)
        return f"close {one.ino}"

    async def close(self, one: Program) -> None:
        if one.mapping is not None:
            one.mapping.close()
        if one.descriptor >= 0:
            os.close(one.descriptor)
        with suppress(OSError):  # it is told what became of its bytes
            await self.w.do(self.w.fs.flush(one.opened.handle, 0))
        await self.w.do(self.w.fs.release(one.opened.handle))

    async def save_another(self) -> str:
        size = self.pages(PAGES // 2)
        try:
            await self.w.write(self.new_name("other").encode(), b"o" * size)
        except OSError as error:
            self.is_answer(error, errno.ENOSPC)
            return "another save: no room"
        return f"another save {size}"

    async def drain(self) -> str:
        await self.w.drained()
        return "drained"

    async def evict(self) -> str:
        with self.w.fs.lock, self.w.state.step():
            self.w.inner.eviction.evict(b"")
        return "evicted"


def needed(one: Program) -> int:
    """Bytes of pages that stores into the file's length may still take: those not there."""
    size = os.fstat(one.descriptor).st_size
    pages = -(-size // PAGE)
    return (pages - cached_pages(one.descriptor, pages * PAGE)) * PAGE


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.clause("S493", "S533", "S390", "S61")
@pytest.mark.parametrize(
    "when_full",
    [WhenFull.WAIT, WhenFull.NATIVE, WhenFull.ERROR],
)
def test_each_file_has_room_for_stores_whatever_comes_and_nothing_stays_reserved(
    base: Path, monkeypatch: pytest.MonkeyPatch, seed: int, when_full: WhenFull
) -> None:
    monkeypatch.setattr(admission, "MARGIN_BYTES", 16 * PAGE)
    monkeypatch.setattr(contents, "ALLOCATE_PIECE_BYTES", 8 * PAGE)
    monkeypatch.setattr(lanes, "ARRIVAL_S", 0.0)  # no answer is on its way to a kernel here
    story = Story(Random(seed), when_full)

    async def main() -> None:
        for life in range(LIVES):
            await story.life(base, monkeypatch, is_last=life == LIVES - 1)

    # How many files get the lane is not asked: other programs' use of memory has a say in that.
    trio.run(main)


@pytest.mark.clause("S493")
def test_the_next_worker_keeps_room_for_stores_beyond_a_budget_that_is_smaller(
    base: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Or that others have gone beyond: who stores into the mapping asks nobody."""
    monkeypatch.setattr(admission, "MARGIN_BYTES", 16 * PAGE)
    story = Story(Random(seed), WhenFull.WAIT)
    size = FILE_PAGES * PAGE

    async def life(pages: int) -> None:
        async with world(base, budget_bytes=pages * PAGE, session="s") as story.w:
            story.w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            story.locks = Locks(story.w)
            if not story.open:
                opened, made = await story.create(story.new_name("map"))
                if opened.lane is not Lane.PASSTHROUGH:
                    pytest.skip(f"other programs have the machine's memory: {opened.lane}")
                story.take(opened, made.ino, os.O_RDWR)
                story.open[0].is_firm = True
                assert await story.resize(story.open[0], size) == "done"
            story.check("a new worker")
            assert story.kept(story.open[0].ino) >= size
            if pages < FILE_PAGES:
                await story.close(story.open.pop())
                assert story.w.tier.reserved_bytes == 0

    async def main() -> None:
        await life(PAGES)
        await life(FILE_PAGES // 2)

    trio.run(main)


@pytest.mark.clause("S493")
def test_the_next_worker_knows_how_far_pages_reach_behind_the_end(
    base: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """They are no room for stores into the length, before they are within it."""
    monkeypatch.setattr(admission, "MARGIN_BYTES", 16 * PAGE)
    monkeypatch.setattr(lanes, "ARRIVAL_S", 0.0)
    story = Story(Random(seed), WhenFull.WAIT)

    async def allocate(start: int, end: int) -> None:
        handle = story.open[0].opened.handle
        call = story.w.fs.fallocate(handle, FALLOC_KEEP_SIZE, start * PAGE, (end - start) * PAGE)
        await story.w.do(call)

    def check() -> None:
        story.check("looked at")
        assert story.kept(story.open[0].ino) == needed(story.open[0])

    async def main() -> None:
        async with world(base, budget_bytes=PAGES * PAGE, session="s") as story.w:
            story.w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            story.locks = Locks(story.w)
            opened, made = await story.create(story.new_name("map"))
            if opened.lane is not Lane.PASSTHROUGH:
                pytest.skip(f"other programs have the machine's memory: {opened.lane}")
            story.take(opened, made.ino, os.O_RDWR)
            story.open[0].is_firm = True
            assert await story.resize(story.open[0], 24 * PAGE) == "done"
            await allocate(100, 200)
        async with world(base, budget_bytes=PAGES * PAGE, session="s") as story.w:
            story.w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            story.locks = Locks(story.w)
            check()
            await allocate(24, 100)
            check()
            assert await story.resize(story.open[0], 300 * PAGE) == "done"
            check()
            await story.close(story.open.pop())

    trio.run(main)


@pytest.mark.clause("S493")
@pytest.mark.parametrize("size", [0, 24 * PAGE])
def test_pages_behind_the_end_count_no_more_once_the_file_was_cut(
    base: Path, monkeypatch: pytest.MonkeyPatch, seed: int, size: int
) -> None:
    monkeypatch.setattr(admission, "MARGIN_BYTES", 16 * PAGE)
    story = Story(Random(seed), WhenFull.WAIT)

    async def main() -> None:
        async with world(base, budget_bytes=PAGES * PAGE, session="s") as story.w:
            story.w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            story.locks = Locks(story.w)
            opened, made = await story.create(story.new_name("map"))
            if opened.lane is not Lane.PASSTHROUGH:
                pytest.skip(f"other programs have the machine's memory: {opened.lane}")
            one = story.take(opened, made.ino, os.O_RDWR)
            one.is_firm = True
            assert await story.resize(one, 48 * PAGE) == "done"
            behind = (FALLOC_KEEP_SIZE, 1000 * PAGE, 100 * PAGE)
            await story.w.do(story.w.fs.fallocate(opened.handle, *behind))
            assert await story.resize(one, size) == "done"
            assert await story.resize(one, 900 * PAGE) == "done"
            await story.w.do(story.w.fs.fallocate(opened.handle, 0, 0, 500 * PAGE))
            story.check("looked at")
            assert story.kept(one.ino) == needed(one)
            await story.close(story.open.pop())

    trio.run(main)


@pytest.mark.clause("S493")
@pytest.mark.parametrize("pages", [300, 2 * PAGES])
def test_a_write_behind_the_end_has_room_for_stores_into_the_hole_first(
    base: Path, monkeypatch: pytest.MonkeyPatch, seed: int, pages: int
) -> None:
    """Or it is refused, and the file is as long as it was: who has it mapped would get SIGBUS."""
    monkeypatch.setattr(admission, "MARGIN_BYTES", 16 * PAGE)
    monkeypatch.setattr(lanes, "ARRIVAL_S", 0.0)
    story = Story(Random(seed), WhenFull.ERROR)

    async def main() -> None:
        async with world(
            base, budget_bytes=PAGES * PAGE, session="s", when_full=WhenFull.ERROR
        ) as story.w:
            story.w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            story.locks = Locks(story.w)
            opened, made = await story.create(story.new_name("map"))
            if opened.lane is not Lane.PASSTHROUGH:
                pytest.skip(f"other programs have the machine's memory: {opened.lane}")
            one = story.take(opened, made.ino, os.O_RDWR)
            one.is_firm = True
            assert await story.resize(one, 24 * PAGE) == "done"
            write = story.w.fs.write(opened.handle, (pages - 1) * PAGE, b"x" * PAGE)
            if pages > PAGES:
                with pytest.raises(OSError, match="No space left"):
                    await story.w.do(write)
            else:
                assert await story.w.do(write) == PAGE
            story.check("written")
            assert os.fstat(one.descriptor).st_size == (24 if pages > PAGES else pages) * PAGE
            await story.close(story.open.pop())

    trio.run(main)


def test_a_look_at_the_length_gives_no_room_away_that_another_call_has_for_its_own(
    base: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two ftruncate of one file: the longer one has its room when the other one ends."""
    monkeypatch.setattr(admission, "MARGIN_BYTES", 16 * PAGE)
    story = Story(Random(seed), WhenFull.WAIT)

    async def main() -> None:
        async with world(base, budget_bytes=PAGES * PAGE, session="s") as story.w:
            story.w.inner.lanes.offer(Lane.DIRECT, passthrough=True)
            story.locks = Locks(story.w)
            opened, made = await story.create(story.new_name("map"))
            if opened.lane is not Lane.PASSTHROUGH:
                pytest.skip(f"other programs have the machine's memory: {opened.lane}")
            story.take(opened, made.ino, os.O_RDWR)
            node = story.node(made.ino)
            longer = Lengthening(2 * FILE_PAGES * PAGE)
            await story.w.do(story.w.inner.lane_use.lengthens(node, longer))
            assert await story.resize(story.open[0], PAGE) == "done"
            assert story.kept(made.ino) == longer.size
            with story.w.fs.lock:
                story.w.inner.lane_use.resized(node, longer)
            assert story.kept(made.ino) < longer.size
            await story.close(story.open.pop())
            assert story.w.tier.reserved_bytes == 0

    trio.run(main)
