"""One daemon: real file system, real engine, real state and RAM files, over turns and a storage in
memory.

A life ends by kill -9. What it leaves are the files of its RAM tier as they are at that instant,
copied before anything unwinds; from then on nothing that it does has any effect: its state takes no
commit, its calls on the storage end by `Killed`, and its copy of the tier is not used again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio

from acpfs.backing.calls import CallPools
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.health import Health
from acpfs.backing.lower import Lower, LowerPath
from acpfs.backing.member_records import NodeRecord, NodeRecords
from acpfs.config import Settings, WarmReads
from acpfs.filesystem.construction import FileSystemParts, Pools, Surroundings
from acpfs.filesystem.expectations import Expectations, Use
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.hold import Hold
from acpfs.filesystem.records import Lane
from acpfs.filesystem.salvage import Salvaged
from acpfs.filesystem.upper import UpperLayer
from acpfs.ram.kept import Kept
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import BLOCK_BYTES, Tier
from acpfs.runtime.chance import Chance
from acpfs.runtime.clock import Clock
from acpfs.runtime.given import Runtime
from acpfs.transport.native.references import References
from acpfs.types import Ino, TierId
from acpfs.worker.worker import FREEZE_INTERVAL_S
from acpfs.writeback.copies.journal_marks import mark_path
from acpfs.writeback.engine import Engine
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.log.ops import Op
from acpfs.writeback.manifest.manifest import Manifest
from acpfs.writeback.members.cluster import Cluster, OwnDrain
from acpfs.writeback.parts import DrainParts
from tests.sim.choices import MAPPED_BYTES_MAX, MAPPED_PREFIX, Choices, Knobs
from tests.sim.faults import FLUSHES, Death, FaultKind, Faults
from tests.sim.passthrough import Passthrough
from tests.sim.processes import ProcessTable, SeenProcesses
from tests.sim.rounds import Call
from tests.sim.scheduler import Alarm, Killed, NoThreads, Timers, TurnFileCalls, TurnPool, Turns
from tests.sim.spilling import (
    CountedSpill,
    DiskFaults,
    SalvagedCopies,
    SpillWorld,
    salvaged,
    spill_of,
)
from tests.sim.storage import OWN, Storage, error
from tests.sim.trace import Finding, Trace, causes
from tests.sim.virtual import MACHINE, START_S, stamp

POOLS = ("requests", "streams", "commits", "syncs", "fills", "verifies")
THREADS = 8
TURNS_MAX = 60_000
"""Of one life: more than ten times what the longest ones take."""
JOIN_AGAIN_S = 1.0
OUTGROWN = "outgrown"
"""In the names of those threads' jobs."""
QUIET_CALLS = frozenset({"read", "xattrs", "note", "fstat", "lstat"})
"""Not in the trace when they succeed."""


class MortalState(StateDatabase):
    """Kills its life before or after a commit, and commits nothing of a dead one."""

    life: Life | None = None
    bug: BaseException | None = None
    """For which a step was abandoned: a daemon ends by it."""

    def abandon(self, error: BaseException) -> None:
        life = self.life
        if life is None or not life.turns.is_over:
            self.bug = error
        super().abandon(error)

    def commit(self) -> bool:
        life = self.life
        if life is None or not self.has_changes:
            return StateDatabase.commit(self)
        if life.turns.is_over:
            raise Killed
        life.commits += 1
        is_last = life.commits == life.death.commit
        if is_last and not life.death.is_after:
            life.kill("before a commit of the state")
        recorded = super().commit()
        if is_last:
            life.kill("after a commit of the state")
        return recorded

    def _settle(self) -> bool:
        life = self.life
        if life is not None and self._after and not life.turns.is_over:
            life.owing_commits += 1
            if life.owing_commits == life.death.within:
                life.kill("within a commit of the state")
        return super()._settle()

    def join(self) -> None:
        super().join()
        life = self.life
        if life is None or life.turns.is_over:
            return
        life.joins += 1
        if life.joins == life.death.join:
            life.death.commit = life.commits + 1
            life.at_join()

    def must_commit(self) -> None:
        life = self.life
        if life is None:
            super().must_commit()
            return
        life.musts += 1
        is_last = life.musts == life.death.must
        if is_last and not life.death.is_after:
            life.kill("before what it does is recorded")
        super().must_commit()
        if is_last:
            life.kill("after what it does was recorded")


class MortalTier(Tier):
    """Kills its life before or after it makes or removes a file."""

    life: Life | None = None
    slack_bytes: int | None = None
    """Of its tmpfs, beyond the budget; None: nobody looks how full that is."""

    def space_left_bytes(self) -> int:
        if self.slack_bytes is None:
            return super().space_left_bytes()
        taken = 0
        for tier_id in self._allocated.keys() - self._lost:  # as `stat`; asked at each look
            taken += os.stat(str(tier_id), dir_fd=self._dir_fd, follow_symlinks=False).st_blocks
        return self.budget_bytes + self.slack_bytes - taken * BLOCK_BYTES

    def _truncate(self, tier_id: TierId, size: int) -> None:
        super()._truncate(tier_id, size)
        fd = self.open(tier_id)
        stamp(fd)
        os.close(fd)

    def create_open(self) -> tuple[TierId, int]:
        with self._change("makes"):
            tier_id, fd = super().create_open()
            stamp(fd)
            return tier_id, fd

    def _unlink(self, tier_id: TierId) -> None:
        with self._change("removes"):
            super()._unlink(tier_id)

    @contextlib.contextmanager
    def _change(self, what: str) -> Iterator[None]:
        life = self.life
        if life is None:
            yield
            return
        if life.turns.is_over:
            raise Killed
        life.tier_changes += 1
        # one that ends while it is being put together has no parts that could be looked at
        is_whole = life.state.life is life
        is_last = is_whole and 0 < life.death.tier_change <= life.tier_changes
        if is_last and not life.death.is_after:
            life.kill(f"before it {what} a RAM file")
        yield
        if is_last:
            life.kill(f"after it {what} a RAM file")


class StorageCaller:
    """What one life notices of the storage."""

    def __init__(self, life: Life, faults: Faults, trace: Trace, storage: Storage) -> None:
        self._life = life
        self._storage = storage
        self._faults = faults
        self._trace = trace

    def begins(self, label: str, arguments: Sequence[object], *, changes: bool) -> bool:
        turns = self._life.turns
        if turns.is_over:
            raise Killed
        if turns.is_main:
            raise Finding("THREADS", f"the thread that serves requests calls the storage: {label}")
        if self._life.fs.lock._is_owned():  # type: ignore[attr-defined]
            raise Finding("LOCK", f"{turns.name} has the lock and calls the storage: {label}")
        turns.point()
        if self._is_spared(arguments):
            return False
        if label in FLUSHES and (chance := self._losing(arguments)) is not None:
            self._life.losses += 1
            self._tell(label, arguments, f"fails, {self._storage.lose(chance)} changes are lost")
            raise error(errno.EIO)
        if slow_s := self._faults.slow_s(changes=changes):
            self._wait(slow_s)
        fault = self._faults.next(changes=changes)
        if fault is FaultKind.HANG:
            self._hang(label, arguments)
        if fault is FaultKind.BEFORE:
            self._tell(label, arguments, "fails, not done")
            raise error(errno.EIO)
        return fault is FaultKind.AFTER

    def _losing(self, arguments: Sequence[object]) -> random.Random | None:
        """The chance of what a flush of what was committed loses, that fails now; None: nothing.

        Where another call hears that a server has ended, and no flush does, nobody can know.
        """
        path = arguments[0] if arguments else ()
        is_own = isinstance(path, tuple) and OWN in path
        return None if is_own else self._faults.loses()

    def _is_spared(self, arguments: Sequence[object]) -> bool:
        """Whether a failure would be told to an application, or park the only bytes (S53): these
        histories have no application that tries again.

        Files that outgrow RAM are moved by threads that try again themselves.
        """
        what = arguments[0] if arguments else None
        return self._storage.is_only_copy(what) and OUTGROWN not in self._life.turns.name

    def ends(
        self, label: str, arguments: Sequence[object], failure: OSError | None, *, is_lost: bool
    ) -> None:
        if failure is None and label not in QUIET_CALLS:
            self._count_change()
        if failure is None and label == "rename" and OWN not in cast("LowerPath", arguments[0]):
            self._count_rename()
        if failure is not None:
            self._tell(label, arguments, f"fails: {failure.strerror}")
        elif is_lost:
            self._tell(label, arguments, "is done, and fails")
            raise error(errno.EIO)
        elif label not in QUIET_CALLS:
            self._tell(label, arguments, "")
        self._life.turns.point()

    def _count_change(self) -> None:
        life = self._life
        life.changes += 1
        if life.changes == life.death.change:
            life.kill("after a call on the storage")

    def _count_rename(self) -> None:
        life = self._life
        life.renames += 1
        if life.renames == life.death.rename:
            life.kill("after a rename")

    def _hang(self, label: str, arguments: Sequence[object]) -> None:
        delay_s = self._faults.hang_s()
        self._tell(label, arguments, f"hangs for {delay_s} s")
        self._wait(delay_s)

    def _wait(self, delay_s: float) -> None:
        until_s = MACHINE.moment_s + delay_s
        self._life.timers.at(delay_s)
        self._life.turns.wait(lambda: MACHINE.moment_s >= until_s)

    def _tell(self, label: str, arguments: Sequence[object], outcome: str) -> None:
        self._trace.note(self._life.who or "storage", label, arguments, outcome)


@dataclass(frozen=True)
class Seat:
    """Where a daemon lives that is a member of a cluster."""

    wall: Callable[[], float]
    settings: Mapping[str, object]
    """That are other than without other members."""
    is_cached: bool
    """The storage's client remembers listings and records."""
    caller: Callable[[Life, Faults, Trace], StorageCaller]


class Life:
    """See above."""

    def __init__(
        self,
        number: int,
        base: Path,
        storage: Storage,
        choices: Choices,
        knobs: Knobs,
        trace: Trace,
        seat: Seat | None = None,
        processes: ProcessTable | None = None,
        passthrough: Passthrough | None = None,
    ) -> None:
        """`base`: its RAM tier, as the life before left it.

        `seat`: None: there are no other members.

        `passthrough`: None: the kernel has no such lane.
        """
        is_last = number >= knobs.lives - 1
        self.number = number
        self._base = base
        self._trace = trace
        self._seat = seat
        self.who = f"{storage.node} " if seat else ""
        self._storage = storage
        streams = (*((storage.node,) if seat else ()), number)
        self.death = Death() if is_last else Death.drawn(choices, *streams)
        self._passthrough = passthrough
        self._keeps_session = knobs.keeps_session
        self._leaves_writers = knobs.leaves_writers
        self._look = Call()
        self._wants_look = False
        self._processes = processes or ProcessTable()
        self.closes = Counter[str]()
        self.salvaged: Salvaged | None = None
        """RAM was lost: what came of what was mirrored."""
        self.salvaged_copies = SalvagedCopies()
        self._kill_turn = math.inf
        """Once as many copies were outdated as it lives to see."""
        self.commits = 0
        self.joins = 0
        self.at_join: Callable[[], None] = lambda: None
        """Asks what is mirrored then."""
        self.musts = 0
        self.tier_changes = 0
        self.changes = 0
        self.losses = 0
        self.renames = 0
        self.answered = 0
        self.owing_commits = 0
        self._pages_missed = 0
        self._handed_on = 0
        self.is_serving = False
        self._is_buried = False
        self.left: Path | None = None
        """Its RAM tier as it was when it died."""
        self.died = trio.Event()
        self.kept_back_at_first: list[str] = []
        """Before anybody could call it."""
        self.undecided: set[Ino] = set()
        """Halves that were kept back as an operator wanted them stored."""
        self._asked: set[trio.CancelScope] = set()
        """Of programs that wait for its answers."""
        self.turns = Turns(choices.stream("turns", *streams), in_order=choices.in_order)
        self.timers = Timers()
        threads = NoThreads(self.turns, self.timers)
        self.runtime = Runtime(self._clock(), threads, MACHINE, Chance(MACHINE.chance))
        self.settings = Settings(**(self._wanted(knobs) | dict(seat.settings if seat else {})))
        disk = choices.stream("journal", *streams)
        self._journal_faults = (
            DiskFaults(disk, knobs.journal_error_rate, knobs.journal_hang_rate)
            if knobs.mirrors
            else None
        )
        self._assemble(storage, knobs)
        now_s = MACHINE.moment_s
        until_s = now_s + knobs.last_faults_s if is_last else math.inf
        faults = Faults(choices, streams, knobs, now_s + knobs.outage_s, until_s)
        if seat is None:
            storage.caller = StorageCaller(self, faults, trace, storage)
        else:
            storage.caller = seat.caller(self, faults, trace)
        self.state.life = self

    @staticmethod
    def _wanted(knobs: Knobs) -> dict[str, Any]:
        return {
            "backing": Path("/backing"),
            "mountpoint": Path("/mnt"),
            "keep_last_persisted": False,
            "cluster_order": "off",
            "retry_delay_min_s": 0.2,
            "retry_delay_max_s": 5,
            "patience_s": 1000,
            "backing_timeout_s": 5000,
            "max_dirty_age_s": 0,
            "scrub_ram_s": 0,
            "warm_reads": WarmReads.OFF if knobs.has_passthrough else WarmReads.AUTO,
            "when_full": knobs.when_full,
            "ram_per_user": knobs.share_bytes,
            "fsync": knobs.fsync,
        }

    def _clock(self) -> Clock:
        wall = self._seat.wall if self._seat else MACHINE.wall

        def wall_ns() -> int:
            return int(wall() * 1e9)

        return Clock(MACHINE.now, wall, wall_ns, wall_ns, MACHINE.now, MACHINE.sleep, self.timers)

    def _assemble(self, storage: Storage, knobs: Knobs) -> None:
        directory = self._base / "tier"
        directory.mkdir(parents=True, exist_ok=True)
        spill_place = self._base.parent / "spill"
        if knobs.mirrors and not (directory / "state.sqlite").exists():
            mark = storage.own_content(mark_path(storage.node))
            state = directory / "state.sqlite"
            of_copies = (self.runtime.chance, self.salvaged_copies)
            self.salvaged = salvaged(spill_place, mark, state, *of_copies)
        self.state = MortalState(directory / "state.sqlite", self.runtime)
        ram_bytes = knobs.later_ram_bytes if self.number else knobs.ram_bytes
        self.tier = MortalTier(
            directory, ram_bytes, self.runtime, when_safe=self.state.after_commit
        )
        self.tier.life = self
        self.tier.calls = TurnFileCalls(self.runtime.threads, self._is_written)
        self.log = OperationLog(self.state, self.runtime.clock)
        tree = LowerTree(self.state)
        health = Health(self.runtime.clock)
        self._nodes = TurnPool("nodes", THREADS, self.runtime, health)
        pools = {name: TurnPool(name, THREADS, self.runtime, health) for name in POOLS}
        calls = CallPools(**pools, health=health)
        lower: Lower = storage
        upper = UpperLayer(self.state, self.tier, self.log, tree, self.runtime)
        timers = self.timers
        world = SpillWorld(spill_place, self.runtime, self.turns, timers, self._journal_faults)
        self.inner = FileSystemParts(
            self.settings,
            upper,
            lower,
            Pools(calls.requests, TurnPool("copies", 2, self.runtime), calls.requests),
            surroundings=Surroundings(
                limits=lambda _pid: [],
                unknown_bytes=knobs.unknown_bytes,
                available=lambda: 1 << 62,
                closing_of=self._processes.closing,
                openers=SeenProcesses(self._processes, self.closes),
            ),
            kept=Kept(directory / "session", "session") if knobs.keeps_session else None,
            make_spill=None
            if knobs.spill_bytes is None
            else partial(spill_of, world, knobs.spill_bytes, upper, lower),
        )
        self.inner.lower_view.nameless.calls = TurnPool("keep", 1, self.runtime)
        self.fs = FileSystem(self.inner)
        if self._passthrough is not None:
            # the tmpfs is as large as before
            self.tier.slack_bytes = knobs.slack_bytes + knobs.ram_bytes - ram_bytes
            expect_mapped(self.inner.expectations)
            self._passthrough.serve(self)
        elif knobs.full_ram_s:
            MACHINE.is_full = partial(self._is_full, knobs.full_ram_s)
        elif knobs.sees_writers:
            self.fs.offer_lanes(Lane.DIRECT, passthrough=False)
        self.references = References(self.inner.kept)
        parts = (self.fs.lock, self.inner.changes, calls, self.settings)
        self.engine = Engine(
            DrainParts(lower, tree, self.log, self.tier, self.state, *parts, self.runtime),
            Manifest(self.state, lower, self.fs.lock, storage.node),
            self.inner.spill,
            self._before(),
        )
        self.cluster = None if self._seat is None else self._member(storage, self._seat)

    def _is_full(self, spans_s: Sequence[tuple[float, float]], fd: int) -> bool:
        """Whether a tier file can take no page now."""
        now_s = MACHINE.now() - START_S
        if not any(begin <= now_s < end for begin, end in spans_s):
            return False
        is_full = "/tier/data/" in os.readlink(f"/proc/self/fd/{fd}")
        self._pages_missed += is_full
        return is_full

    def _before(self) -> Callable[[Sequence[Op]], None]:
        """What the engine asks ahead of each operation."""
        spill = self.inner.spill
        if spill is None or spill.mirror is None:
            return lambda _op: None  # there never was a mirror
        return spill.mirror.before

    def is_mirrored(self) -> bool:
        """Whether status says that a loss of RAM would lose nothing now."""
        spill = self.inner.spill
        if spill is None or spill.mirror is None or not self.is_serving:
            return False
        with self.fs.lock:
            behind = self.fs.statistics().unmirrored
        said = spill.mirror.statistics()
        is_on = said.state == "on" and not said.pending_transactions
        return is_on and behind is not None and not behind.files

    def _is_written(self, tier_id: TierId) -> bool:
        return self._passthrough is not None and self._passthrough.is_written(tier_id)

    def _member(self, storage: Storage, seat: Seat) -> Cluster:
        directory = cast("BackingDirectory", storage)
        return Cluster(
            NodeRecords(directory),
            NodeRecord(storage.node),
            OwnDrain(
                self.engine.gate,
                self.log,
                self.state,
                self.engine.section,
                self.engine.wake,
                self.inner.awaited.pending,
                self.engine.texts_of_pointers,
            ),
            self.settings,
            self._nodes,
            self.runtime,
            coherent=not seat.is_cached,
            names=self.inner.awaited.peers,
        )

    # -- living

    async def live(self) -> None:
        """Until it dies, or is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._guarded, self._serve, nursery)
            await self.died.wait()
            nursery.cancel_scope.cancel()
        self.is_serving = False

    async def _guarded(self, run: Any, *arguments: Any) -> None:
        """What a dead life's tasks end by is of no interest."""
        try:
            await run(*arguments)
        except BaseException as failure:
            if isinstance(failure, trio.Cancelled) or not self.is_of_death(failure):
                raise
            self.has_died()

    def is_of_death(self, failure: BaseException) -> bool:
        """Whatever the file system's code comes to is; what the simulation finds is not."""
        is_found = any(isinstance(one, AssertionError) for one in causes(failure))
        return self.turns.is_over and not is_found

    async def _serve(self, nursery: trio.Nursery) -> None:
        await self.fs.steps.drive(self.fs.start(None))
        if self._keeps_session and self._seat is None:
            kept = {Ino(number): fd for number, fd in self._storage.handed_on().items()}
            self._handed_on = len(kept)
            self.fs.keep_deleted(kept, self._keep)
        if self.cluster is not None:
            await self._join(self.cluster)
            nursery.start_soon(self._guarded, self.cluster.run)
        if self.inner.spill is not None:
            self.inner.spill.begin_journal()
            self.inner.spill.start()
        nursery.start_soon(self._guarded, self.engine.run)
        nursery.start_soon(self._guarded, self._look_after)
        if self._passthrough is not None:
            nursery.start_soon(self._guarded, self._watch_writers, self._passthrough)
        self.kept_back_at_first = self.kept_back()
        self.is_serving = True

    def _keep(self, ino: Ino, fds: list[int]) -> None:
        """The supervisor does, whatever becomes of this life."""
        if not self.turns.is_over:
            self._storage.keep(ino, fds)

    async def _join(self, cluster: Cluster) -> None:
        """A mount that cannot write its record fails, and somebody mounts again."""
        while True:
            try:
                await cluster.join()
            except OSError:
                await trio.sleep(JOIN_AGAIN_S)
            else:
                return

    def step(self) -> bool:
        """One of its threads has a turn; whether one could. Called by trio's thread."""
        if self.turns.is_over:
            self.has_died()
            return False
        try:
            return self._step()
        except BaseException as failure:
            if not self.is_of_death(failure):
                raise
            self.has_died()
            return True

    @property
    def outdated_copies(self) -> int:
        """Of its time."""
        spill = self.inner.spill
        return spill.outdated if isinstance(spill, CountedSpill) else 0

    def _step(self) -> bool:
        turns = self.turns
        death = self.death
        if death.outdated < math.inf and self.outdated_copies >= death.outdated:
            self._kill_turn = min(self._kill_turn, turns.count + death.turns_later)
        if death.losses < math.inf and self.losses >= death.losses:
            self._kill_turn = min(self._kill_turn, turns.count + death.turns_later)
        if turns.count >= death.turn or turns.count >= self._kill_turn:
            self.kill("at a turn")
        if turns.count > TURNS_MAX:
            raise Finding("LIVELOCK", f"{TURNS_MAX} turns in one life, and no end")
        Turns.current = turns
        did = turns.turn()
        self.timers.fire()
        if self._wants_look:
            self._wants_look = False
            self._look.come()
        return did

    # -- as `passthrough` knows it

    @property
    def hold(self) -> Hold:
        return self.inner.hold

    @property
    def is_dead(self) -> bool:
        return self.turns.is_over

    def look_soon(self) -> None:
        """See `passthrough.Worker`."""
        self._wants_look = True

    async def _watch_writers(self, passthrough: Passthrough) -> None:
        """What a transport's thread does while the kernel writes."""
        while True:
            with self.fs.lock:
                wait_s = self.fs.tick()
            passthrough.wake()
            await self._look.heard(wait_s)
            passthrough.wake()

    async def _look_after(self) -> None:
        """What a worker does each second."""
        while True:
            await trio.sleep(FREEZE_INTERVAL_S)
            await self.fs.steps.drive(self.fs.settle_closes())
            with self.fs.lock:
                self.fs.freeze_old()
                self.fs.look_after_waiting()

    # -- dying

    @contextlib.contextmanager
    def asked(self, most_s: float) -> Iterator[trio.CancelScope]:
        """Whoever waits within is cancelled at its death, and when that time is over."""
        over = Alarm()
        with trio.CancelScope() as scope:
            if self.died.is_set():
                scope.cancel()
            self._asked.add(scope)
            over.action = scope.cancel
            if most_s < math.inf:
                self.timers.start(most_s, over)
            try:
                yield scope
            finally:
                over.action = None
                self._asked.remove(scope)

    def has_died(self) -> None:
        """Called in a task: tell those who wait."""
        self.died.set()
        for scope in self._asked:
            scope.cancel()

    def kill(self, where: str) -> None:
        """kill -9, here and now."""
        if self.left is None:
            self.left = self._base.with_name(f"life-{self.number + 1}")
            copy_of_tier(self._base, self.left)
            if self._passthrough is not None:
                self._passthrough.died(
                    self._base,
                    self.left,
                    ends_session=not self._keeps_session,
                    leaves_writers=self._leaves_writers,
                )
            self.turns.is_over = True
            self.state.is_abandoned = True  # steps of the dead end nowhere
            self._trace.note("world", f"KILL of {self.who}life {self.number}", (), where)
            if self.turns.is_main:
                self.has_died()  # else `step` does so: trio's events are its thread's
        raise Killed

    def kept_back(self) -> list[str]:
        """Files that status says are kept back: a dead session's writers have them (S506)."""
        with self.fs.lock:
            warnings = self.inner.contents.earlier.warnings()
        return [warning.partition(" is kept back: ")[0] for warning in warnings]

    def kept_back_in_vain(self) -> list[str]:
        """Of these, files of which nothing but want of room is said to be in the way of a copy, and
        there is room.
        """
        if self.tier.waiting():
            return []
        earlier = self.inner.contents.earlier
        free_bytes = self.tier.free_bytes()
        with self.fs.lock:
            files = [
                os.fsdecode(earlier._path(ino))
                for tier_id, ino in earlier._files.items()
                if not (tier_id in earlier._leaving or tier_id in earlier._again_at)
                and self.tier.allocated_bytes(tier_id) <= free_bytes
            ]
        return sorted({*files} & {*self.kept_back()})

    def kept_back_as(self, tier_id: TierId) -> str:
        """The file of which that is kept back; "": it is not."""
        earlier = self.inner.contents.earlier
        with self.fs.lock:
            ino = earlier._files.get(tier_id)
            path = "" if ino is None else os.fsdecode(earlier._path(ino))
        return path if path in self.kept_back() else ""

    def discard_halves(self) -> None:
        """As an operator does."""
        with self.fs.lock:
            halves = [one for one in self.inner.table if one.is_file and one.body.interrupted]
            for node in halves:
                node.handles = 0
                if self.log.unsealed_of(
                    node.ino
                ):  # what was synced is to stay, and it has no more (S478)
                    if not self.inner.interrupted.store(self.inner.table.path(node.ino)):
                        self.undecided.add(node.ino)
                else:
                    self.inner.changes.discard(node)
            self.state.commit()

    def store_kept_back(self) -> None:
        """An operator asks once more for halves that took no decision as they were kept back."""
        with self.fs.lock:
            for node in [one for one in self.inner.table if one.is_file and one.body.interrupted]:
                if self.log.unsealed_of(node.ino) and not node.handles:
                    self.inner.interrupted.store(self.inner.table.path(node.ino))

    def decide_once_more(self) -> None:
        """An operator comes back to halves that were kept back as he wanted them stored."""
        with self.fs.lock:
            for ino in [*self.undecided]:
                node = self.inner.table.get(ino)
                is_half = node is not None and node.body.interrupted and not node.handles
                if not is_half or self.inner.interrupted.store(self.inner.table.path(ino)):
                    self.undecided.discard(ino)

    def reached(self) -> dict[str, int]:
        """Places that a history may come to: a bug at one where none comes is not found."""
        counters = self.engine._counters
        contents = self.inner.contents
        files = [node for node in self.inner.table if node.is_file]
        return {
            "copies aside": contents._aside.copied_bytes,
            "evictions": contents.retention._evicted_files,
            "restarted streams": counters.restarted_streams,
            "operations left out": counters.elided_ops,
            "retries": counters.retries,
            "lost names": self.losses,
            "repairs": counters.repairs,
            "overflowed files": sum(node.body.is_overflowed for node in files),
            "files in the spill directory": self.fs.statistics().spilled.files,
            "outdated copies": self.outdated_copies,
            "outdated copies of an earlier life": self._outdated_before(),
            "outdated copies that RAM was lost beside": self.salvaged_copies.outdated,
            "outdated copies beside what was staged": self.salvaged_copies.staged_since,
            "holds": self.inner.hold.holds,
            "files that outgrew RAM": self.inner.outgrown.files,
            "descriptors of deleted files": self._handed_on,
            "writes without a page": self._pages_missed,
            **self.closes,
        }

    def _outdated_before(self) -> int:
        spill = self.inner.spill
        return spill.outdated_before if isinstance(spill, CountedSpill) else 0

    def bury(self) -> None:
        """Nothing of it is left in this process."""
        if self._is_buried:
            return
        self._is_buried = True
        self.turns.bury()
        self.state.life = None
        self.state._db.close()
        self.tier.close()
        kept = self.inner.kept
        for slots in (kept.handles, kept.directories, kept.references, kept.backings, kept.calls):
            slots._view.release()
            slots.close()
        for node in self.inner.table:
            if node.body.is_whole_in_ram and node.body.fd >= 0:
                os.close(node.body.fd)


def expect_mapped(expectations: Expectations) -> None:
    """Files that programs map are expected not to be: such a one came before each of them."""
    expect = expectations.expect
    use_of = expectations.use_of

    def expected(path: bytes) -> int | None:
        return MAPPED_BYTES_MAX if is_mapped(path) else expect(path)

    expectations.expect = expected  # type: ignore[method-assign]
    expectations.use_of = (  # type: ignore[method-assign]
        lambda path: Use.ONLY_WRITTEN if is_mapped(path) else use_of(path)
    )


def is_mapped(path: bytes) -> bool:
    """Whether a program has made it to map it."""
    return path.rpartition(b"/")[2].startswith(MAPPED_PREFIX)


def copy_of_tier(source: Path, target: Path) -> None:
    """Files as they are, with holes and times: what a kill leaves."""
    for at, _directories, files in os.walk(source):
        place = target / os.path.relpath(at, source)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in files:
            _copy(os.path.join(at, name), os.path.join(place, name))


def _copy(source: str, target: str) -> None:
    st = os.stat(source)
    reading = os.open(source, os.O_RDONLY)
    writing = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(writing, st.st_size)
        at = 0
        while at < st.st_size:
            try:
                at = os.lseek(reading, at, os.SEEK_DATA)
            except OSError:
                break  # a hole to the end
            end = os.lseek(reading, at, os.SEEK_HOLE)
            while at < end:
                at += os.pwrite(writing, os.pread(reading, min(1 << 20, end - at), at), at)
        os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))
    finally:
        os.close(reading)
        os.close(writing)
