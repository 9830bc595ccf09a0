"""A file system with engine and backing directory in one process, without FUSE: calls are made as a
transport makes them.

Everything is real (directories, SQLite, threads) but the kernel: handles and references are kept by
the test.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, RLock
from typing import Any

import trio

from acpfs.backing.calls import CallPool, CallPools
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import SpaceInfo
from acpfs.config import Settings, SpillMode
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.construction import FileSystemParts, Pools, Surroundings
from acpfs.filesystem.content.from_members import MemberSource
from acpfs.filesystem.filesystem import FileSystem, FileSystemStatistics
from acpfs.filesystem.last_close import Copies, Left, Openers
from acpfs.filesystem.records import Attributes, Caller, FileReport, Lane, OpenFile
from acpfs.filesystem.salvage import Salvaged, salvage
from acpfs.filesystem.steps import Call, T, settled
from acpfs.filesystem.upper import UpperLayer
from acpfs.ram.control_groups import LimitedGroup
from acpfs.ram.kept import Kept
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.ram.state import Row, StateDatabase
from acpfs.ram.state_space import StateSpace
from acpfs.ram.tier import Tier
from acpfs.runtime.given import Runtime
from acpfs.types import ROOT, Ino
from acpfs.writeback.copies import on_disk
from acpfs.writeback.copies.journal_marks import read_mark
from acpfs.writeback.engine import Engine
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.log.ops import Op
from acpfs.writeback.manifest.manifest import Manifest
from acpfs.writeback.parts import DrainParts
from acpfs.writeback.sources.mirror import Mirror, NoMirror
from acpfs.writeback.sources.spill import Spill, SpillPools, SpillRules
from tests.rig.runtime import REAL

CALLER = Caller(uid=0, gid=0, pid=1)
BUDGET_BYTES = 64 << 20
PATIENCE_S = 60.0
"""Where the backing directory does not hang, no answer is late, however busy the machine is."""


class KnownOpeners(Openers):
    """What /proc tells is given by the test; each thread is its own process."""

    def __init__(self, left: Left = Left.NONE, copies: Copies = Copies.BY_CHANCE) -> None:
        super().__init__("", REAL.threads)
        self.answer = left
        """What who opens a file has left of it."""
        self.copies = copies
        """Who else has one."""

    def process_of(self, thread: int) -> int:
        return thread

    def left(self, process: int, ino: Ino) -> Left:
        return self.answer

    def has_any_but(self, processes: Collection[int], ino: Ino) -> bool:
        return self.copies is not Copies.NONE_SEEN

    def _copies(self, process: int, ino: Ino) -> Copies:
        return self.copies


class CheckedState(StateDatabase):
    """Knows whether its callers have the lock: without it, a thread of the drain may change what a
    step is about to record, or end the transaction that another one has begun.
    """

    lock: RLock | None = None
    """The file system's, as soon as there is one."""

    def create(self, ddl: str) -> None:
        self._check()
        super().create(ddl)

    def change(self, sql: str, values: Sequence[Any] = ()) -> None:
        self._check()
        super().change(sql, values)

    def change_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self._check()
        super().change_many(sql, rows)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        self._check()
        return super().rows(sql, values)

    def commit(self) -> bool:
        self._check()
        return super().commit()

    def _check(self) -> None:
        assert self.lock is None or self.lock._is_owned(), (  # type: ignore[attr-defined]
            "the state is used under the file system's lock"
        )


class LockedFileSystem(FileSystem):
    """Reports as control has them: it walks through all nodes under the lock, while threads of the
    drain change which have a row.
    """

    def statistics(self) -> FileSystemStatistics:
        with self.lock:
            return super().statistics()

    def files_report(self, prefix: bytes = b"") -> list[FileReport]:
        with self.lock:
            return super().files_report(prefix)


@dataclass
class World:
    """One mount's parts."""

    fs: FileSystem
    inner: FileSystemParts
    """What the file system is made of."""
    engine: Engine
    log: OperationLog
    tree: LowerTree
    tier: Tier
    state: StateDatabase
    lower: BackingDirectory
    calls: CallPools
    backing: Path
    salvaged: Salvaged | None = None
    """What was found in the mirror."""

    async def do(self, call: Call[T]) -> T:
        """Make one call."""
        with trio.fail_after(60):
            return await self.fs.steps.drive(call)

    async def create(
        self, name: bytes, parent: Ino = ROOT, flags: int = os.O_WRONLY
    ) -> tuple[OpenFile, Attributes]:
        return await self.do(self.fs.create(parent, name, 0o644, flags, CALLER))

    async def write(self, name: bytes, data: bytes, parent: Ino = ROOT) -> Ino:
        """Create or overwrite, write, close."""
        opened, attributes = await self.create(name, parent, os.O_WRONLY)
        if attributes.size:
            await self.close(opened)
            opened = await self.do(self.fs.open(attributes.ino, os.O_WRONLY | os.O_TRUNC, CALLER))
        await self.do(self.fs.write(opened.handle, 0, data))
        await self.close(opened)
        return attributes.ino

    async def close(self, opened: OpenFile, pid: int = 0) -> None:
        await self.do(self.fs.flush(opened.handle, pid))
        await self.do(self.fs.release(opened.handle))

    async def read(self, ino: Ino, size: int = 1 << 20) -> bytes:
        opened = await self.do(self.fs.open(ino, os.O_RDONLY, CALLER))
        try:
            return await self.do(self.fs.read(opened.handle, 0, size))
        finally:
            await self.close(opened)

    async def names(self, directory: Ino = ROOT) -> list[bytes]:
        handle = await self.do(self.fs.opendir(directory))
        entries = await self.do(self.fs.readdir(handle, 0, with_attributes=False))
        await self.do(self.fs.releasedir(handle))
        return [entry.name for entry in entries if entry.name not in (b".", b"..")]

    async def freeze_old(self) -> int:
        """As the worker does every few seconds;

        returns when what the kernel writes is frozen as well.
        """
        with self.fs.lock:
            count = self.fs.freeze_old()
            marked = [node.body.tier for node in self.inner.table if node.body.marking]
        for (
            tier_id
        ) in marked:  # what follows in the same thread comes when the mark has been heeded
            await settled(self.tier.calls.submit(tier_id, int))
        return count

    async def at_rest(self) -> None:
        """Until no call on the backing directory is under way or waits for a thread: before a test
        sets the clock forward, for which one that is under way then has been out so long.
        """

        pools = self.calls.all()
        with trio.fail_after(60):
            while not all(map(is_idle, pools)):  # noqa: ASYNC110 - threads set no event
                await trio.sleep(0.001)

    async def drained(self) -> None:
        """Until everything that was logged is persisted."""
        self.engine.hold(False)
        with self.fs.lock:
            future = self.log.when_done(self.log.last_seq)
        with trio.fail_after(60):
            await settled(future)


def is_idle(pool: CallPool) -> bool:
    """Whether no call waits, is about to be made, or is under way in its threads."""
    with pool._lock:
        return not pool._waiting and pool._idle == pool._threads


def violations(w: World) -> list[str]:
    """What must never be so, and is; while no call is under way."""
    with w.fs.lock:
        found = [
            violation
            for piece in w.inner.invariants.pieces()
            for place in piece
            for violation in w.inner.invariants.wrong(place)
        ]
    return [
        f"{violation.path.decode(errors='backslashreplace')}: {violation.text}"
        for violation in found
    ]


def take_picture(life: Path, after: Path) -> None:
    """What a worker that is killed now leaves. Under the lock, that no step is half recorded.

    Other threads may be at work on their temporary files.
    """

    def copy(source: str, target: str) -> None:
        with suppress(FileNotFoundError):
            shutil.copy2(source, target)

    shutil.copytree(life, after, copy_function=copy)


def settings_for(base: Path, **changes: Any) -> Settings:
    backing = base / "backing"
    backing.mkdir(exist_ok=True)
    quick = {"retry_delay_min_s": 0.01, "retry_delay_max_s": 0.05, "patience_s": PATIENCE_S}
    return Settings(backing=backing, mountpoint=base / "mnt", **(quick | changes))


def _spill(
    settings: Settings,
    state: StateDatabase,
    tier: Tier,
    log: OperationLog,
    lower: BackingDirectory,
    runtime: Runtime,
) -> Callable[[RLock], Spill] | None:
    if settings.spill is None:
        return None
    directory = SpillDirectory(settings.spill / "acpfs-test", REAL.chance)
    directory.path.parent.mkdir(exist_ok=True)
    directory.prepare()
    mirror = (
        Mirror(on_disk.DiskPlace(directory), state, log, lower, "test", runtime)
        if settings.spill_mode is SpillMode.MIRROR
        else None
    )
    return lambda lock: Spill(
        on_disk.DiskCopies(directory),
        state,
        tier,
        lock,
        SpillRules(settings.spill_mode, settings.spill_budget),
        SpillPools.make(runtime),
        mirror=mirror,
    )


def _journal(spill: Spill | None, lower: BackingDirectory) -> Callable[[Sequence[Op]], None]:
    return (
        NoMirror(lower, "test").before
        if spill is None or spill.mirror is None
        else spill.mirror.before
    )


def _salvaged(settings: Settings, lower: BackingDirectory, state: Path) -> Salvaged | None:
    """As after a reboot: what the mirror has, where the RAM tier is gone."""
    mark = read_mark(lower, "test")
    if mark is None or state.exists() or settings.spill is None:
        return None
    directory = SpillDirectory(settings.spill / "acpfs-test", REAL.chance)
    read_into = partial(on_disk.read_into, directory.path, mark["token"])
    return salvage(read_into, directory.path, state, directory.size)


def _let_go(w: World) -> None:
    """Close the descriptors: a run has more worlds than a process may have of them.

    But not under a thread that uses them.
    """
    spill = w.inner.spill
    spill_pools = () if spill is None else (spill.calls, spill.reads)
    pools = (*w.calls.all(), w.inner.contents._copies, *spill_pools)
    patience = 100
    while not all(is_idle(pool) for pool in pools) or _mirrors():
        if not patience:
            return
        patience -= 1
        Event().wait(0.002)
    for node in w.inner.table:
        if node.body.tier and node.body.fd >= 0:
            os.close(node.body.fd)
    kept = w.inner.kept
    for slots in (kept.handles, kept.directories, kept.references, kept.backings, kept.calls):
        slots._view.release()  # the mapping has a descriptor of its own
    w.tier.close()
    w.lower.disconnect()


def _mirrors() -> bool:
    """Whether a mirror is at work still: its threads end by themselves."""
    return any(thread.name.startswith("mirror") for thread in threading.enumerate())


@asynccontextmanager
async def _running(engine: Engine, spill: Spill | None) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
            if spill is not None:
                spill.close()
                if spill.mirror is not None:
                    spill.mirror.close(nothing_left=False)  # no await: this is being cancelled


@asynccontextmanager
async def world(
    base: Path,
    *,
    hold: bool = True,
    budget_bytes: int = BUDGET_BYTES,
    limits: Callable[[int], list[LimitedGroup] | None] = lambda _pid: [],
    available: Callable[[], int] = lambda: 1 << 62,
    unknown_bytes: int | None = None,
    session: str = "",
    make_lower: Callable[[Path, str, Runtime], BackingDirectory] = BackingDirectory,
    state_space: StateSpace | None = None,
    closing: Callable[[int], Closing] = lambda _pid: Closing.CALL,
    openers: Openers | None = None,
    space: SpaceInfo | None = None,
    runtime: Runtime = REAL,
    members: MemberSource | None = None,
    **changes: Any,
) -> AsyncIterator[World]:
    """A world over `base/backing` with its RAM tier in `base/tier`; a second one over the same base
    finds what the first one left.

    `limits`: the limited memory control groups around a process; `available`: bytes of memory that
    the machine has left; `unknown_bytes`: what is expected of a file like which none was seen;
    `session`: the kernel session that worlds of the same name share: there the second one is a
    worker that takes over from the first, and what was open goes on. `state_space`: room for the
    state database; `closing`: as `FileSystem` has it. `openers`: what is left to those who open
    files (nothing). `space`: as its `start` has it: then the backing directory may hang from the
    beginning. `members`: others who may have what is cold.
    """
    settings = settings_for(base, **changes)
    tier_directory = base / "tier"
    tier_directory.mkdir(exist_ok=True)
    lower = make_lower(settings.backing, "test", runtime)
    salvaged = _salvaged(settings, lower, tier_directory / "state.sqlite")
    state = CheckedState(tier_directory / "state.sqlite", runtime, state_space)
    tier = Tier(tier_directory, budget_bytes, runtime, when_safe=state.after_commit)
    log = OperationLog(state, runtime.clock)
    tree = LowerTree(state)
    calls = CallPools.make(runtime)
    kept = Kept(tier_directory / "session" if session else None, session)
    inner = FileSystemParts(
        settings,
        UpperLayer(state, tier, log, tree, runtime),
        lower,
        Pools(calls.requests, CallPool("copies", 2, runtime), calls.requests),
        surroundings=Surroundings(
            limits=limits,
            unknown_bytes=unknown_bytes,
            available=available,
            closing_of=closing,
            openers=openers or KnownOpeners(),
            members=members,
        ),
        kept=kept,
        make_spill=_spill(settings, state, tier, log, lower, runtime),
    )
    fs = LockedFileSystem(inner)
    spill = inner.spill
    manifest = Manifest(state, lower, fs.lock, "test")
    before = _journal(spill, lower)
    engine = Engine(
        DrainParts(lower, tree, log, tier, state, fs.lock, inner.changes, calls, settings, runtime),
        manifest,
        spill,
        before,
    )
    engine.hold(hold)
    state.lock = fs.lock
    made = World(
        fs, inner, engine, log, tree, tier, state, lower, calls, settings.backing, salvaged
    )
    if salvaged is not None:
        engine.expect_foreign_changes(log.last_seq)
    await made.do(fs.start(space))
    if spill is not None:
        spill.begin_journal()
        spill.start()
    try:
        async with _running(engine, spill):
            yield made
            # what a bug has left in memory is half done, and nobody goes on with it
            found = [] if made.state.is_abandoned else violations(made)
            assert found == [], found
    finally:
        # not before the engine has ended: a task that is about to run would be told that there is
        # no answer
        calls.close()
        with fs.lock:
            # after the engine's tasks, which may have their answers already; threads may still be
            # at work
            state.close()
            kept.close()
        _let_go(made)


def run(
    base: Path,
    *scenarios: Callable[[World], Awaitable[None]],
    passthrough: bool = False,
    **changes: Any,
) -> None:
    """Each scenario with a world of its own over the same base, one after the other.

    `passthrough`: the lanes of a kernel that has it.
    """

    async def main() -> None:
        for scenario in scenarios:
            async with world(base, **changes) as made:
                if passthrough:
                    made.inner.lanes.offer(Lane.DIRECT, passthrough=True)
                await scenario(made)

    trio.run(main)
