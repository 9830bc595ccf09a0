"""Several programs have one file open: what one of them closes is published when nobody else is in
the middle of it, and then at once.

Each history is a file of its own; all of them go through one world side by side, and after every
step the storage has of each what a small model of the rule says.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from acpfs.filesystem import closes
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.last_close import Copies, Left
from acpfs.filesystem.names import RENAME_EXCHANGE
from acpfs.filesystem.records import AttributeChange, Lane, OpenFile
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.ops import OpKind
from tests.filesystem.world import CALLER, KnownOpeners, World, run, world

OLD = b"oooooooo"
REGIONS = {"A": 0, "B": 4}
OPENER_STEPS = ("write", "close", "fsync", "kill", "child closes", "copy closes")
PATH_STEPS = ("truncate", "rename", "A-renames", "unlink", "touch")
STRANGER = 3
WRITER = CALLER._replace(pid=7)
OTHER = CALLER._replace(pid=8)


@dataclass
class Opener:
    """One of the two, and what is left of it."""

    pid: int
    opened: OpenFile
    is_open: bool = True


@dataclass
class Model:
    """What must be so."""

    content: bytes = OLD
    stored: bytes | None = OLD
    at_it: set[str] = field(default_factory=set)
    is_modified: bool = False
    is_half: bool = False

    def publish(self) -> None:
        if self.is_modified and self.stored is not None:
            self.stored = self.content
            self.is_modified = False
            self.is_half = False

    def change(self, content: bytes) -> None:
        self.content = content
        self.is_modified = True
        self.is_half = False

    def done(self) -> None:
        if not (self.at_it or self.is_half):
            self.publish()


class Known(KnownOpeners):
    """Who has a file open still, as /proc would tell."""

    def __init__(self) -> None:
        super().__init__(Left.SOME, Copies.PROGRAM)
        self.gone: set[int] = set()

    def left(self, process: int, ino: Ino) -> Left:
        return Left.GONE if process in self.gone else Left.SOME


@dataclass
class History:
    """One file, its openers, and what is done to it."""

    number: int
    steps: tuple[str, ...]
    unseen: bool
    """The kernel writes, and does not say for whom."""
    model: Model = field(default_factory=Model)
    openers: dict[str, Opener] = field(default_factory=dict)
    ino: Ino = ROOT

    @property
    def name(self) -> bytes:
        return b"f%d" % self.number

    async def begin(self, w: World) -> None:
        for place, who in enumerate(REGIONS):
            pid = 1000 + 2 * self.number + place
            caller = CALLER._replace(pid=pid, unique=pid)
            flags = os.O_WRONLY if self.unseen else os.O_RDWR
            opened = await w.do(w.fs.open(self.ino, flags, caller))
            assert (opened.lane is Lane.PASSTHROUGH) is self.unseen, w.inner.lanes.reasons
            self.openers[who] = Opener(pid, opened)

    async def take(self, w: World, step: str, killed: set[int], known: Known) -> None:
        who, _space, what = step.partition(" ")
        if who in self.openers:
            await self._take(w, who, what, killed, known)
        elif self.model.stored is not None:
            await self._by_path(w, step)

    async def _take(self, w: World, who: str, what: str, killed: set[int], known: Known) -> None:
        opener = self.openers[who]
        model = self.model
        if not opener.is_open:
            return
        if what == "write":
            await self._write(w, who)
        elif what == "fsync":
            await w.do(w.fs.fsync(opener.opened.handle, datasync=False))
            if not model.is_half:
                model.publish()
                model.at_it.clear()
        elif what == "child closes":
            await w.do(w.fs.flush(opener.opened.handle, STRANGER))
        elif what == "copy closes":
            await w.do(w.fs.flush(opener.opened.handle))
        else:
            opener.is_open = False
            if what == "kill":
                killed.add(opener.pid)
                model.is_half = model.is_half or (model.is_modified and who in model.at_it)
            wrote = who in model.at_it
            model.at_it.discard(who)
            if wrote:
                model.done()
            known.gone.add(opener.pid)
            await w.close(opener.opened, opener.pid)

    async def _write(self, w: World, who: str) -> None:
        start = REGIONS[who]
        opened = self.openers[who].opened
        data = bytes([self.model.content[start] + 1 & 0x7F]) * 4
        padded = self.model.content.ljust(start, b"\0")
        self.model.change(padded[:start] + data + padded[start + 4 :])
        if self.unseen:
            os.pwrite(opened.backing_fd, data, start)
            self.model.at_it.update(one for one, had in self.openers.items() if had.is_open)
        else:
            await w.do(w.fs.write(opened.handle, start, data))
            self.model.at_it.add(who)

    async def _by_path(self, w: World, step: str) -> None:
        model = self.model
        if step == "truncate":
            await w.do(w.fs.setattr(self.ino, AttributeChange(size=8), None, CALLER))
            model.change(model.content[:8].ljust(8, b"\0"))
            model.done()
        elif step in ("rename", "A-renames"):
            pid = STRANGER if step == "rename" else self.openers["A"].pid
            there = self.name + b"r"
            await w.do(w.fs.rename(ROOT, self.name, ROOT, there, 0, pid))
            if not (model.is_half or model.at_it - ({"A"} if pid != STRANGER else set())):
                model.publish()
                model.at_it.clear()
            await w.do(w.fs.rename(ROOT, there, ROOT, self.name, 0, pid))
        elif step == "unlink":
            await w.do(w.fs.unlink(ROOT, self.name))
            model.stored = None
        else:
            caller = CALLER._replace(pid=STRANGER)
            opened = await w.do(w.fs.open(self.ino, os.O_WRONLY | os.O_APPEND, caller))
            await w.close(opened, STRANGER)


def histories(length: int) -> Iterator[tuple[str, ...]]:
    """Each, but for those that are others with the names of the openers exchanged."""
    steps = [f"{who} {step}" for who in REGIONS for step in OPENER_STEPS]
    for taken in itertools.product([*steps, *PATH_STEPS], repeat=length):
        first = next((step for step in taken if step not in PATH_STEPS), "")
        if first.startswith("A"):
            yield taken


def chosen(seed: int, count: int, length: int) -> Iterator[tuple[str, ...]]:
    """Longer ones by chance, of which most steps are writes and closes."""
    draw = random.Random(seed)
    steps = [f"{who} {step}" for who in REGIONS for step in (*OPENER_STEPS, "write", "write")]
    for _each in range(count):
        yield tuple(draw.choice([*steps, *PATH_STEPS]) for _step in range(length))


async def settle(w: World) -> None:
    with w.fs.lock:
        w.fs.closes_known()  # somebody asks, so all that can be known is found out
    await w.do(w.fs.settle_closes())
    await w.drained()


def check(w: World, history: History, at: object) -> None:
    path = w.backing / os.fsdecode(history.name)
    stored = path.read_bytes() if path.exists() else None
    assert stored == history.model.stored, (history.steps, at)


def go(tmp_path: Path, lane: Lane, taken: list[tuple[str, ...]], *, each: bool) -> None:
    """`each`: the storage is looked at after every step, else when all of them were taken."""
    killed: set[int] = set()
    known = Known()

    async def main() -> None:
        async with world(
            tmp_path,
            openers=known,
            closing=lambda pid: Closing.KILL if pid in killed else Closing.CALL,
            unknown_bytes=4096,
            budget_bytes=1 << 36,
            max_dirty_age_s=0,
        ) as w:
            unseen = lane is Lane.PASSTHROUGH
            all_of_them = [History(number, steps, unseen) for number, steps in enumerate(taken)]
            for one in all_of_them:
                one.ino = await w.write(one.name, OLD)
            await w.drained()
            w.inner.lanes.offer(
                Lane.LIBFUSE if lane is Lane.LIBFUSE else Lane.DIRECT, passthrough=unseen
            )
            for one in all_of_them:
                await one.begin(w)
            for place in range(len(taken[0])):
                w.engine.hold(not each)
                for one in all_of_them:
                    await one.take(w, one.steps[place], killed, known)
                if each:
                    await settle(w)
                    for one in all_of_them:
                        check(w, one, place)
            await settle(w)
            for one in all_of_them:
                check(w, one, "end")
                for who in REGIONS:
                    await one.take(w, f"{who} close", killed, known)
            await settle(w)
            for one in all_of_them:
                check(w, one, "all closed")

    trio.run(main)


@pytest.fixture(autouse=True)
def asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closes, "LAST_CLOSE_WAIT_S", 0.0)


LANES = pytest.mark.parametrize("lane", [Lane.DIRECT, Lane.PASSTHROUGH], ids=lambda one: one.value)


@pytest.mark.clause("S468", "S469", "S477")
@LANES
@pytest.mark.parametrize("each", [True, False], ids=["each step", "at the end"])
def test_all_short_histories_of_two_openers_publish_no_half(
    tmp_path: Path, lane: Lane, each: bool
) -> None:
    go(tmp_path, lane, list(histories(2)), each=each)


@pytest.mark.clause("S468", "S469", "S477")
@LANES
@pytest.mark.parametrize("each", [True, False], ids=["each step", "at the end"])
def test_nor_do_longer_ones(tmp_path: Path, lane: Lane, each: bool) -> None:
    go(tmp_path, lane, list(chosen(9, 120, 6)), each=each)


@pytest.mark.clause("S477")
@pytest.mark.parametrize("by", ["its own", "another"])
@pytest.mark.parametrize("what", ["removed", "replaced", "linked", "moved", "exchanged"])
def test_a_name_that_changes_takes_back_a_close_that_was_that_of_a_copy(
    tmp_path: Path, what: str, by: str
) -> None:
    """Who removes a file, or puts another one there, had shown the half in its place for a
    moment.
    """
    takes_back = by == "another" or what in ("removed", "replaced")

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", OLD)
        await w.write(b"other", b"other")
        await w.drained()
        w.engine.hold(True)
        caller = CALLER._replace(pid=7)
        pid = caller.pid if by == "its own" else STRANGER
        opened = await w.do(w.fs.open(ino, os.O_WRONLY, caller))
        await w.do(w.fs.write(opened.handle, 0, b"half"))
        await w.do(w.fs.flush(opened.handle))
        assert [op.tentative for op in w.log] == [True]
        if what == "removed":
            await w.do(w.fs.unlink(ROOT, b"f"))
        elif what == "replaced":
            await w.do(w.fs.rename(ROOT, b"other", ROOT, b"f", 0, pid))
        elif what == "linked":
            await w.do(w.fs.link(ino, ROOT, b"g", pid))
        elif what == "moved":
            await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0, pid))
        else:
            await w.do(w.fs.rename(ROOT, b"f", ROOT, b"other", RENAME_EXCHANGE, pid))
        stores = [op for op in w.log if op.kind is OpKind.STORE]
        assert len(stores) == (0 if takes_back else 1)
        assert not any(op.tentative for op in stores)
        await w.close(opened)

    run(tmp_path, scenario, openers=Known())


async def publish(w: World, opened: OpenFile, by: str, killed: set[int]) -> str:
    """Have what was written counted, by something else than a close; the name that the file has
    then.
    """
    if by == "rename":
        await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0, WRITER.pid))
        return "g"
    if by == "link":
        [ino] = [node.ino for node in w.inner.table if node.names and node.names[0][1] == b"f"]
        await w.do(w.fs.link(ino, ROOT, b"g", WRITER.pid))
    elif by == "fsync":
        await w.do(w.fs.fsync(opened.handle, datasync=False))
    elif by == "age":
        assert await w.freeze_old() == 1
    else:
        other, _attributes = await w.do(w.fs.create(ROOT, b"f", 0o644, os.O_WRONLY, OTHER))
        await w.do(w.fs.write(other.handle, 0, b"one"))
        killed.add(OTHER.pid)
        await w.close(other, OTHER.pid)
        with w.fs.lock:
            assert w.inner.interrupted.store(b"f") == 1
        killed.clear()
    return "f"


@pytest.mark.clause("S464")
@pytest.mark.parametrize("lane", [Lane.DIRECT, Lane.LIBFUSE], ids=lambda one: one.value)
@pytest.mark.parametrize("by", ["rename", "link", "fsync", "age", "retry"])
@pytest.mark.parametrize("then", ["keeps it open", "is killed", "goes on"])
def test_whose_writes_are_in_a_version_keeps_nothing_back_until_he_writes_again(
    tmp_path: Path, lane: Lane, by: str, then: str
) -> None:
    killed: set[int] = set()

    async def scenario(w: World) -> None:
        w.inner.lanes.offer(lane, passthrough=False)
        ino = await w.write(b"f", OLD)
        await w.drained()
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_APPEND, WRITER))
        await w.do(w.fs.write(opened.handle, len(OLD), b"one"))
        path = w.backing / await publish(w, opened, by, killed)
        await w.drained()
        assert path.read_bytes() != OLD
        before = path.read_bytes()

        other = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, OTHER))
        await w.do(w.fs.write(other.handle, 0, b"another"))
        if then == "goes on":
            await w.do(w.fs.write(opened.handle, 7, b" half"))
        elif then == "is killed":
            killed.add(WRITER.pid)
            await w.close(opened, WRITER.pid)
        await w.close(other, OTHER.pid)
        await w.drained()
        assert path.read_bytes() == (before if then == "goes on" else b"another")
        if then == "goes on":
            await w.do(w.fs.write(opened.handle, 12, b" whole"))
            await w.close(opened, WRITER.pid)
            await w.drained()
            assert path.read_bytes() == b"another half whole"

    closing = {True: Closing.KILL, False: Closing.CALL}
    run(
        tmp_path,
        scenario,
        openers=Known(),
        closing=lambda pid: closing[pid in killed],
        max_dirty_age_s=1e-9,
    )


@pytest.mark.clause("S468", "S180")
def test_what_the_kernel_wrote_is_no_log_when_only_who_appends_is_left(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"f.pt", OLD * 4096)
        await w.drained()
        flags = (os.O_WRONLY, os.O_WRONLY | os.O_APPEND)
        writer, appender = [await w.do(w.fs.open(ino, one, CALLER)) for one in flags]
        assert writer.lane is appender.lane is Lane.PASSTHROUGH
        os.pwrite(writer.backing_fd, b"half", 0)
        await w.close(writer)
        await w.drained()
        assert (w.backing / "f.pt").read_bytes() == OLD * 4096
        await w.close(appender)
        await w.drained()
        assert (w.backing / "f.pt").read_bytes()[:4] == b"half"

    run(tmp_path, scenario, passthrough=True, unknown_bytes=4096)
