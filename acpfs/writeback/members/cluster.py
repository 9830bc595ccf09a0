"""The cluster: tells other members how far this one is, and finds out whether pointers that are
committed here have to wait for them.

Two tasks. One publishes this node's record, at most twice per heartbeat. The other, only while
something is gated: publishes, lists the nodes anew, reads the records of those that have not passed
yet, and opens the gate or withholds. All file I/O is on threads of its own, so a backing directory
that hangs stops nothing else. Why this keeps the order: docs/internals/order-between-members.md.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import trio

from acpfs.backing.calls import CallPool
from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.config import Settings
from acpfs.errors import RefusedError
from acpfs.logger import get_logger, shown
from acpfs.ram.state import StateDatabase
from acpfs.runtime.given import Runtime
from acpfs.writeback.arrival import outcome
from acpfs.writeback.engine_records import ClusterStatistics, PeerReport, WaitingPointer
from acpfs.writeback.log.log import REMOVING, OperationLog
from acpfs.writeback.members.far_clocks import FarClocks
from acpfs.writeback.members.gate import Gate, Gated
from acpfs.writeback.members.incarnation import Incarnation, in_use
from acpfs.writeback.members.pace import BETWEEN_WRITES, Pace
from acpfs.writeback.members.peer_names import NOTHING, PeerNames, Pending
from acpfs.writeback.members.peers import (
    RECORDS_AFTER,
    Peer,
    Terms,
    Verdict,
    may_be_of_loss,
)
from acpfs.writeback.members.standing_elsewhere import StandingElsewhere, Texts

HEARD_MAX = 16
"""So many others' clocks are told of in a record, and so many records are read per record of ours
while nothing is gated; of many, less.
"""
BEATS_PER_LISTING = 5
"""While nothing is gated, the nodes are listed so seldom; with many nodes more seldom."""
HEARD_BEATS = 2.0
"""After that many without a record, and before the three after which others count this node as
silent, it goes by no listing that shows nobody: what its client remembers may be old.
"""
KNOWN_BEATS_MAX = 4.0
"""Heartbeats that a mount waits at most until those who were alone know of it."""
LEAVE_WAIT_S = 10.0
"""How long the end of a mount waits for its last record to be written."""
LOOK_PATIENCE_S = 10.0
"""How long who asks about missing nodes waits for a look at them; after that it goes by what is
known, as where storage hangs.
"""
WITHHOLDING = (
    Verdict.MISSING,
    Verdict.UNKNOWN,
    Verdict.LOST,
    Verdict.WITHHELD,
    Verdict.NAMED,
)
WITHHELD_THERE = (Verdict.WITHHELD, Verdict.NAMED)
"""Because of what others withhold."""
THERE = frozenset(verdict.value for verdict in WITHHELD_THERE)
"""The same, in words."""

_log = get_logger(__name__)

T = TypeVar("T")


class Records(Protocol):
    """See `acpfs.backing.member_records.NodeRecords`."""

    def publish(self, record: NodeRecord) -> None: ...
    def names(self) -> list[str]: ...
    def read(self, node: str) -> NodeRecord | None: ...
    def remove(self, node: str) -> None: ...
    def remove_temporary(self, node: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of reading one record."""

    record: NodeRecord | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class OwnDrain:
    """What of this member's drain waits for others, and what they are told of it."""

    gate: Gate
    log: OperationLog
    state: StateDatabase
    section: Callable[[], AbstractContextManager[object]]
    wake: Callable[[], None]
    pending: Callable[[], Pending] = lambda: NOTHING
    """What others must not take for whole; called under the lock."""
    texts: Texts = lambda _paths: {}
    """What pointers say."""
    kept_until: float | None = None
    """All that the incarnation before had closed before then is here; None: not known."""
    holds: Callable[[], int] = lambda: -1
    """Bytes that are given to copies of others yet; -1: none at any time. Called under the lock."""


class Cluster:
    """This node among the others."""

    def __init__(
        self,
        records: Records,
        who: NodeRecord,
        drain: OwnDrain,
        settings: Settings,
        pool: CallPool,
        runtime: Runtime,
        *,
        coherent: bool = False,
        names: PeerNames | None = None,
    ) -> None:
        """`who`: what is always the same in our record.

        `coherent`: the backing directory is local, its listings are never old.

        `names`: learns what others have pending.
        """
        self._standing = StandingElsewhere(drain.gate, drain.texts)
        self._monotonic = runtime.clock.now
        self._chance = runtime.chance.source
        self._records = records
        self._who = who
        self._gate = drain.gate
        self._log = drain.log
        self._settings = settings
        self._pool = pool
        self._section = drain.section
        self._wake = drain.wake
        self._coherent = coherent
        self._own = Incarnation(
            who.node,
            drain.state,
            drain.section,
            lambda: self._call("read", records.read, who.node),
            runtime.chance,
        )
        self._holds = drain.holds
        self._kept_until = drain.kept_until
        self._names = names or PeerNames(settings, runtime.clock)
        self._pending = drain.pending
        self._names.known = False
        self._listed = False
        self._names.others = True  # until it is known
        self._names.anybody = True
        self._beat = self._chance.getrandbits(40)
        self._state = NodeState.LIVE
        self._peers: dict[str, Peer] = {}
        self._publishing = trio.Lock()
        self._writes = 0
        self._write_done = 0
        self._pace = Pace(settings.heartbeat_s, runtime)
        self._published_at = 0.0
        self._error = ""
        self._bell = drain.gate.bell
        self._far_clocks = FarClocks()
        self._looked = trio.Event()
        self._looks = 0
        self._looks_done = 0
        self.published = 0
        self.pointers_passed = 0
        self.pointers_withheld = 0
        self.waited_s_max = 0.0

    # -- life

    async def join(self) -> None:
        """Before the mount serves its first request: from when this returns, others find this node.

        Raises:
            OSError: the record cannot be written, or is not there afterwards.
            RefusedError: another mount took the same node id at the same moment.
        """
        node = self._who.node
        await self._call("clear", self._records.remove_temporary, node)
        earlier = await self._own.other()
        if earlier is not None:
            self._own.follows(earlier, self._log.clock.now(), self._kept_until)
            with self._section():
                self._gate.learn_placed(earlier.placed)
        await self.publish()
        await self._list()
        rival = await self._own.other()
        if rival is not None:
            raise RefusedError(in_use(rival))
        with trio.move_on_after(KNOWN_BEATS_MAX * self._pace.heartbeat_s):
            await self._until_known()

    async def _until_known(self) -> None:
        """Until members that were alone know that they are not (S163): they hold back no removal
        for a pointer of somebody else.

        They say so with their next record but one. Two that begin at once wait for each other's.
        """
        if len(self._peers) > HEARD_MAX:
            return  # most of them know each other; to read all would cost much
        await self._quietly(partial(self._read, self._peers))
        while alone := self._alone():
            await self._quietly(partial(self._publish_after, BETWEEN_WRITES))
            # a client remembers for seconds which file a name was, and learns that from a listing
            await self._quietly(self._list)
            await self._quietly(partial(self._read, alone))

    def _alone(self) -> list[str]:
        with self._section():
            terms = self.terms()
            clock = self._log.clock.now()
            return [peer.node for peer in self._peers.values() if peer.is_alone(clock, terms)]

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        with self._section():
            self._gate.begin()
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat_forever)
            nursery.start_soon(self._gate_forever)
            nursery.start_soon(self._read_names_forever)

    async def leave(self, *, nothing_left: bool) -> None:
        """The end of the mount; if the backing directory hangs, others find out by our silence."""
        with self._section():
            settled = self._gate.watermark(math.inf) == math.inf
        self._state = NodeState.LEFT if nothing_left or settled else NodeState.AWAY
        with trio.move_on_after(LEAVE_WAIT_S):
            await self._quietly(self.publish)

    async def _beat_forever(self) -> None:
        """Between a half and three quarters of a heartbeat: with the look of others, a tenth, none
        waits longer than a whole one.
        """
        until_listing = 0.0
        while True:
            await self._quietly(partial(self._publish_after, self._pace.next_write()))
            if not self._peers:
                until_listing = 0.0  # whoever has just come waits for it
            if until_listing <= 0:
                await self._quietly(self._list)
                until_listing += BEATS_PER_LISTING / self._pace.share
            await self._quietly(self._read_some)
            until_listing -= 1

    async def _quietly(self, action: Callable[[], Awaitable[object]]) -> None:
        try:
            await action()
        except OSError as error:
            self._error = error.strerror or str(error)

    async def _call(self, label: str, function: Callable[..., T], *arguments: object) -> T:
        return await outcome(self._pool.submit(f"node record: {label}", function, *arguments))

    # -- our own record

    async def publish(self) -> None:
        """Write our record as of now.

        Raises:
            OSError: the backing directory refuses.
        """
        async with self._publishing:
            await self._publish()

    async def _publish(self) -> None:
        if self._writes % BEATS_PER_LISTING == BEATS_PER_LISTING - 1:
            await self._quietly(self._own.look_for_rival)
        with self._section():
            record = self._observe()
            pending = NOTHING if self._listed and not self._peers else self._pending()
            self._pace.writes(self._log.last_seq, behind=record.watermark < record.clock)
        record = replace(record, pending=pending.to_text(record.beat))
        self._writes += 1
        await self._call("publish", self._records.publish, record)
        self._write_done = self._writes
        self._published_at = self._monotonic()
        self._gate.heard_until = record.clock + HEARD_BEATS * record.heartbeat_s
        self._error = ""
        self.published += 1

    async def _publish_after(self, heartbeats: float) -> None:
        """So long after the last record was begun.

        Nothing is left to do where another one was begun and done meanwhile.

        Raises:
            OSError: the backing directory refuses.
        """
        begun = self._writes
        await trio.sleep(self._pace.until_write_s(heartbeats))
        async with self._publishing:
            if self._write_done <= begun:
                await self._publish()

    def _observe(self) -> NodeRecord:
        """Under the lock: nothing is logged between the reading of the clock and that of the
        log.
        """
        clock = self._log.clock
        clock.work_off()
        self._beat += 1
        now = clock.now()
        pointers = self._gate.pointers(now)
        standing, standing_of_lost = self._gate.standing()
        heard = sorted(self._peers.values(), key=lambda peer: -peer.heard_at)[:HEARD_MAX]
        return replace(
            self._who,
            incarnation=self._own.name,
            beat=self._beat,
            state=self._state,
            clock=now,
            watermark=self._gate.watermark(now),
            pointers=pointers,
            held=self._gate.held(),
            placed=self._gate.placed(),
            standing=standing,
            standing_of_lost=standing_of_lost,
            gated=self._gate.head(),
            drift_s=self._wrong_by_s(),
            moved_s=clock.moved_s(self._oldest_stamp),
            heard={peer.node: peer.ahead_s_min for peer in heard if peer.record is not None},
            lost=self._own.lost,
            heartbeat_s=self._pace.heartbeat_s,
            operations=len(self._log),
            dirty_bytes=self._log.sizes.dirty_bytes,
            withheld=len(self._gate.withheld()),
            holds=self._holds(),
            errors=tuple(filter(None, (self._own.rivalry, self._error))),
        )

    # -- the others

    async def _list(self) -> list[str]:
        """All other members that have a record."""
        names = [
            name for name in await self._call("list", self._records.names) if name != self._who.node
        ]
        now = self._monotonic()
        with self._section():
            for peer in self._peers.values():
                peer.listed = False
            for name in names:
                if name not in self._peers:
                    self._peers[name] = Peer(name, now)
                self._peers[name].listed = True
            self._gate.has_peers = bool(self._peers)
            self._names.anybody = self._gate.has_peers
            self._listed = True
            self._names.others = self._others_act()
            self._pace.nodes = len(self._peers) + 1
        return names

    def _others_act(self) -> bool:
        return any(peer.may_act() for peer in self._peers.values())

    async def _read_some(self) -> None:
        """While nothing is gated: a few of many, all of few, so that who is missing and how clocks
        differ is known before it matters.
        """
        names = list(self._peers)
        await self._read(self._chance.sample(names, self._pace.reads(min(len(names), HEARD_MAX))))

    async def _read(self, names: Iterable[str]) -> None:
        wanted = list(names)
        readers = self._pace.readers
        began = self._monotonic()
        answers: dict[str, _Answer] = {}
        async with trio.open_nursery() as nursery:
            for start in range(min(readers, len(wanted))):
                nursery.start_soon(self._read_share, wanted[start::readers], answers)
        with self._section():
            clock = self._log.clock.now()
            now = self._monotonic()
            for name, answer in answers.items():
                peer = self._peers.get(name)
                if peer is None:
                    continue
                peer.asked_at = max(peer.asked_at, began)
                if answer.record is None and not answer.error:
                    if peer.is_removed():
                        del self._peers[name]
                    continue
                peer.read_at = max(peer.read_at, began)
                peer.error = answer.error
                if answer.record is not None:
                    peer.saw(answer.record, clock, now, began)
            terms = self.terms()
            for name in answers:
                self._names.learn(name, self._peers.get(name), terms)
            self._names.others = not self._listed or self._others_act()
            self._far_clocks.look(self._peers.values(), terms)
        self._names.tell()

    async def _read_share(self, names: list[str], answers: dict[str, _Answer]) -> None:
        answers.update(await self._call("read", _read_records, self._records, names))

    async def _read_names_forever(self) -> None:
        """What is pending elsewhere is known here a quarter of a heartbeat after it was told, as
        long as lookups may wait for it.

        With very many nodes after as many quarters as it takes to read all; but what somebody waits
        for is always read.
        """
        while True:
            if self._settings.wait_for_peers_s:
                await self._quietly(self._read_names)
            await trio.sleep(self._pace.look_s(pointers=False))

    async def _read_names(self) -> None:
        if not self._names.known:
            await self._read(await self._list())
            self._names.known = True
            self._names.tell()
            return
        with self._section():
            longest_ago = sorted(self._peers.values(), key=lambda peer: peer.asked_at)[
                : self._pace.reads(HEARD_MAX)
            ]
            wanted = dict.fromkeys([*self._names.sources(), *(peer.node for peer in longest_ago)])
        await self._read(wanted)

    # -- the gate

    async def _gate_forever(self) -> None:
        """While a pointer waits, look ten times per heartbeat: then it is known a tenth after
        others have told.
        """
        while True:
            began = trio.current_time()
            self._looks = self._looks + 1
            with self._section():
                gated = self._gate.gated()
                unknown = self._gate.unasked()
            if not gated:
                self._has_looked()
                await self._bell.heard()
                continue
            records = 0
            try:
                records = await self._look(gated, unknown)
            except OSError as error:
                self._error = error.strerror or str(error)
            with self._section():
                goes_on = self._judge(gated)
                only_guarded = all(self._log.is_aside(one.op) for one in gated)
            self._wake()
            self._has_looked()
            if not goes_on:
                pointers = any(one.op.kind not in REMOVING and not one.op.withheld for one in gated)
                pause_s = (
                    self._pace.heartbeat_s
                    if only_guarded
                    else self._pace.look_s(pointers=pointers, records=records)
                )
                await self._bell.heard(began + pause_s)

    def _has_looked(self) -> None:
        self._looks_done = self._looks
        self._looked.set()
        self._looked = trio.Event()

    async def looked(self) -> None:
        """Return when the nodes that pointers wait for were looked at since now, or do not let
        themselves be looked at for so long.

        For who would otherwise say of a node that it is missing because of a look from before its
        return. A node that withholds something may have done so because of such a look of its own,
        so it is given time to tell what it has found since.
        """
        since = self._monotonic()
        with trio.move_on_after(LOOK_PATIENCE_S):
            await self._look_once_more()
            while self._is_to_hear_more(since):
                await trio.sleep(self._pace.look_s(pointers=False))
                await self._look_once_more()

    async def _look_once_more(self) -> None:
        next_one = self._looks + 1
        while self._looks_done < next_one:
            looked = self._looked
            self._bell.ring()
            await looked.wait()

    def _is_to_hear_more(self, since: float) -> bool:
        """Whether something is withheld for nothing but what others withhold, who have not told
        since whether they still do.
        """
        with self._section():
            return any(
                self._peers[name].records_since(since) < RECORDS_AFTER
                for one in self._gate.withheld()
                if not THERE.isdisjoint(whys := set(one.missing.values()))
                and whys <= {*THERE, Verdict.WAITS.value}
                for name, why in one.missing.items()
                if why in THERE and name in self._peers
            )

    async def _look(self, gated: list[Gated], unknown: list[Gated]) -> int:
        """How many records it has read."""
        with self._section():
            self._standing.said({})  # also where this look is refused on its way
        told = await self._told_since(unknown)
        with self._section():
            to_read = self._to_read(gated)
        changes = any(peer.absent for peer in self._peers.values()) or any(
            one.unknown for one in gated
        )
        if told or changes or (to_read and not self._coherent):
            # also before each reading: a client remembers for seconds which file a name was, and
            # learns from a listing that it is another
            names = await self._list()
            # one for all: there may be 100,000 removals, and as many nodes
            required = dict.fromkeys(names)
            listed_at = self._monotonic()
            with self._section():
                for one in told:
                    one.listed_at = listed_at
                    self._gate.asks(one, required, self._who.node)
                to_read = self._to_read(gated)
        await self._read(sorted(to_read))
        await self._read_standing(gated)
        return len(to_read)

    async def _read_standing(self, gated: list[Gated]) -> None:
        """What others' pointers say that may name what waits here.

        Until that is known they name all.
        """
        with self._section():
            wanted = self._standing.wanted(gated, self._peers.values(), self.terms())
        if wanted:
            found = await self._call("pointers", self._standing.read, wanted)
            with self._section():
                self._standing.said(found)

    async def _told_since(self, unknown: list[Gated]) -> list[Gated]:
        """Of those, which were closed before our newest record was begun; that is written now if it
        may be.

        A rename of ours in the directory: what our own client remembers of its listing is outdated
        by it, on every file system.
        """
        if not unknown or self._coherent:
            return unknown
        for one in unknown:
            one.writes_before = self._writes if one.writes_before is None else one.writes_before
        if (
            self._write_done <= max(one.writes_before or 0 for one in unknown)
            and not self._pace.until_write_s()
        ):
            await self._publish_after(BETWEEN_WRITES)
        return [one for one in unknown if self._write_done > (one.writes_before or 0)]

    def _to_read(self, gated: list[Gated]) -> set[str]:
        """Nodes that something waits for, and whose next record may be there. Under the lock."""
        terms = self.terms()
        clock = self._log.clock.now()
        wanted = {
            name
            for one in gated
            for name in one.required or ()
            if self._verdict(name, one, terms) is not Verdict.PASSES
        }
        return {
            name
            for name in wanted
            if (peer := self._peers.get(name)) is not None and peer.may_have_written(clock, terms)
        }

    def _judge(self, gated: list[Gated]) -> bool:
        """Open the gate for what may pass; whether that changed anything: then there may be more to
        look at than was. Under the lock.
        """
        terms = self.terms()
        goes_on = self._supersede(gated, terms)
        telling = [name for name, peer in self._peers.items() if peer.tells_of_loss]
        for one in gated:
            if one.required is None or self._gate.is_open(one.op):
                continue
            verdicts = {name: self._verdict(name, one, terms) for name in one.required}
            if set(verdicts.values()) <= {Verdict.PASSES}:
                # also those that its writer has not named
                verdicts.update((name, self._verdict_of_loss(name, one, terms)) for name in telling)
            one.missing = {
                name: verdict.value
                for name, verdict in verdicts.items()
                if verdict is not Verdict.PASSES
            }
            if self._waits_for_its_loss(one):
                self._gate.need([one.op], makes_room=True)
                goes_on = True
                continue
            # one that tells of an older change has not brought it, though it passes by time
            older = [name for name in telling if self._older_of_loss(name, one, terms) is not None]
            one.required = dict.fromkeys((*one.missing, *older))
            # said at the operation, for who would wait for what stands behind it
            # (`content.outlook`)
            one.op.awaits_members = bool(one.missing) and not self._gate.yields(one.op)
            withholding = {verdict for verdict in verdicts.values() if verdict in WITHHOLDING}
            one.for_all = Verdict.MISSING in withholding or any(
                verdict in WITHHELD_THERE and self._peers[name].waits_for_all
                for name, verdict in verdicts.items()
            )
            one.of_what_is_lost = withholding == {Verdict.LOST}
            if not one.missing:
                self.pointers_passed += one.makes is None
                self.waited_s_max = max(self.waited_s_max, self._log.clock.now() - one.op.logged_at)
                self._gate.passes(one)
                goes_on = True
            elif withholding:
                goes_on = self._withhold(one) or goes_on
            else:
                self._gate.frees(one)
        return goes_on

    def _waits_for_its_loss(self, one: Gated) -> bool:
        """Whether it removes something for a lost node, and waits for pointers that others may
        withhold for the loss of that very node: which is forgotten when it has left, and it leaves
        when this is done.
        """
        return (
            self._settings.adopts is not None
            and self._own.lost is not None
            and bool(one.missing)
            and self._gate.yields(one.op)
            and all(name in self._peers and self._peers[name].tells_of_loss for name in one.missing)
        )

    def _supersede(self, gated: list[Gated], terms: Terms) -> bool:
        """Leave out what other members have replaced since; whether there was any.

        The newest first: it may stand on an older one.
        """
        found = False
        for one in reversed(gated):
            names = self._gate.names_made(one)
            at = one.op.logged_at
            if not names or self._gate.is_open(one.op):
                continue
            replaced = (
                peer for peer in self._peers.values() if peer.has_replaced(names, at, terms)
            )
            by = next(replaced, None)
            if by is not None and self._gate.supersede(one):
                found = True
                _log.warning(
                    "a pointer file is not persisted any more: another node has a later one there",
                    node=by.node,
                    seq=one.op.seq,
                    name=shown(one.op.new_name or one.op.name),
                )
        return found

    def _verdict(self, name: str, one: Gated, terms: Terms) -> Verdict:
        verdict = self._verdict_by_time(name, one, terms)
        peer = self._peers.get(name)
        if verdict is not Verdict.PASSES or peer is None:
            return verdict
        verdict = self._verdict_of_loss(name, one, terms)
        if verdict is not Verdict.PASSES:
            return verdict
        is_named = self._standing.name(peer, one, terms)
        return peer.judge_named(terms, one.listed_at) if is_named else verdict

    def _older_of_loss(self, name: str, one: Gated, terms: Terms) -> float | None:
        """When a member has closed an older change of the same pointer, which it withholds for a
        loss; None: it tells of none.
        """
        peer = self._peers.get(name)
        if peer is None or not peer.tells_of_loss:
            return None
        return peer.older_of_loss(self._gate.changes(one), one.op.logged_at, terms)

    def _verdict_of_loss(self, name: str, one: Gated, terms: Terms) -> Verdict:
        """Nobody waits for what a loss holds back (S164). But when the loss is forgotten, all of it
        is free at once, here and there, and the older change has to be made first.
        """
        since = self._older_of_loss(name, one, terms)
        if since is None or self._is_held_by_loss(since, terms):
            return Verdict.PASSES
        return self._peers[name].judge_freed(terms, one.listed_at)

    def _is_held_by_loss(self, since: float, terms: Terms) -> bool:
        """Whether a loss that is known here, our own too, holds back what was closed at `since` by
        any member's clock: then it may never come.
        """
        return may_be_of_loss(self._own.lost, since, terms.clock_bound_s) or any(
            may_be_of_loss(peer.lost(terms), since, peer.bound_s(terms))
            for peer in self._peers.values()
        )

    def _verdict_by_time(self, name: str, one: Gated, terms: Terms) -> Verdict:
        peer = self._peers.get(name)
        if peer is None:
            return Verdict.UNKNOWN if name in one.unknown else Verdict.PASSES
        one.unknown.discard(name)
        if one.named is not None and name not in one.named:
            keys = self._gate.keys_of_its_name(one)
            return peer.judge_name(one.op.logged_at, terms, asks=keys, since=one.listed_at)
        removes = one.op.kind in REMOVING
        yields = self._gate.yields(one.op)
        mark = peer.mark(one.marks, one.listed_at, terms)
        return peer.judge(
            one.op.logged_at,
            terms,
            removes=removes,
            yields=yields,
            asks=() if yields else self._gate.keys(one),
            since=one.listed_at,
            mark=mark,
        )

    def _withhold(self, one: Gated) -> bool:
        """Whether it was not yet, and is now."""
        if not self._gate.withholds(one):
            return False
        if Verdict.NAMED.value in one.missing.values():
            self._tell_named(one)
        elif one.op.kind not in REMOVING and one.makes is None:
            self._tell_withheld(one)
        return True

    def _tell_named(self, one: Gated) -> None:
        for name, why in one.missing.items():
            if why == Verdict.NAMED.value:
                _log.warning(
                    "something keeps its name: a pointer names it whose change another node "
                    "withholds",
                    node=name,
                    seq=one.op.seq,
                    name=shown(one.op.name),
                )

    def _tell_withheld(self, one: Gated) -> None:
        self.pointers_withheld += 1
        for name, why in one.missing.items():
            if why == Verdict.WITHHELD.value:
                _log.warning(
                    "a pointer file is withheld: another node withholds one that was closed before",
                    node=name,
                    seq=one.op.seq,
                    name=shown(one.op.new_name or one.op.name),
                )
            elif why != Verdict.WAITS.value:
                _log.error(
                    "a pointer file is withheld: a node that may have what it points at is "
                    "missing; "
                    "`acpfs-ctl nodes` shows it, `acpfs-ctl nodes forget` goes on without it",
                    node=name,
                    why=why,
                    seq=one.op.seq,
                    needs=self._gate.needs(one.op),
                    name=shown(one.op.new_name or one.op.name),
                )

    # -- readers

    async def others_persisted(self, tell: Callable[[list[str]], None]) -> None:
        """Return when every other member that lives has persisted what it had closed before now;
        `tell` who has not, look by look.

        A backing directory that refuses is asked again. Where listings and records are cached, a
        node that joined a moment ago, or is back after it was missing, may be overlooked.
        """
        with self._section():
            closed_at = self._log.clock.now()
        behind: list[str] | None = None
        listed_at = 0.0
        marks = dict[str, float]()
        while behind is None or behind:
            try:
                if behind is None:
                    behind = await self._list()
                    listed_at = self._monotonic()
                elif not self._coherent:
                    await self._list()  # see `_look`
                await self._read(behind)
            except OSError as error:
                self._error = error.strerror or str(error)
            else:
                with self._section():
                    behind = self._behind(behind, closed_at, listed_at, marks)
                tell(behind)
            if behind is None or behind:
                await trio.sleep(self._pace.look_s(pointers=True))

    def _behind(
        self, names: list[str], closed_at: float, since: float, marks: dict[str, float]
    ) -> list[str]:
        """Under the lock."""
        terms = self.terms()
        peers = [peer for name in names if (peer := self._peers.get(name)) is not None]
        return [
            peer.node
            for peer in peers
            if peer.may_have(closed_at, terms, since, peer.mark(marks, since, terms))
        ]

    def terms(self) -> Terms:
        """What nodes are judged by at the moment."""
        settings = self._settings
        return Terms(
            self._who.node,
            settings.clock_bound_s,
            self._wrong_by_s(),
            settings.node_timeout_s,
            settings.node_forget_after_s,
            self._log.clock.moved_s(self._oldest_stamp),
        )

    def _wrong_by_s(self) -> float:
        return self._log.clock.wrong_by_s(self._oldest_stamp)

    def _oldest_stamp(self) -> float:
        """Of all that is to come; infinity: nothing is."""
        first = self._log.first()
        waiting = (*self._log.all_aside(), *([] if first is None else [first]))
        stamps = (*self._log.replaced_since(), *(op.logged_at for op in waiting))
        return min(stamps, default=math.inf)

    # -- for operators

    async def look(self) -> None:
        """Read all records now.

        Raises:
            OSError: the backing directory refuses.
        """
        await self._read(await self._list())

    async def forget(self, node: str) -> bool:
        """Go on without a node: pointers wait for it no more. False: it lives, or there is none.

        Of this node itself: what it had lost.

        Raises:
            OSError: the backing directory refuses.
        """
        if node == self._who.node:
            self._own.set_lost(None)
            await self.publish()
            return True
        await self.look()
        peer = self._peers.get(node)
        if peer is not None and not peer.is_dispensable(self.terms()):
            return False
        with self._section():
            was_needed = self._gate.forgets(node)
            told = {} if peer is None else peer.placed_by_our_clock(self.terms())
            self._gate.learn_placed(told)
        if told:
            # before its record goes: who was away with an older pointer hears of it from here
            await self.publish()
        if peer is None:
            self._bell.ring()
            return was_needed
        await self._call("remove", self._records.remove, node)
        with self._section():
            self._peers.pop(node, None)
            self._names.learn(node, None, self.terms())
        self._bell.ring()
        _log.warning("a node was forgotten by an operator", node=node)
        return True

    def record(self) -> NodeRecord:
        """What would be told now. Under the lock."""
        return self._observe()

    def live_records(self) -> list[NodeRecord]:
        """Of other members that live, as they were last read. Thread-safe."""
        terms = self.terms()
        peers = [peer for peer in list(self._peers.values()) if not peer.is_missing(terms)]
        records = [peer.record for peer in peers]
        return [one for one in records if one is not None and one.state is NodeState.LIVE]

    def record_anew(self, node: str) -> Future[NodeRecord | None]:
        """Another member's record as it is now."""
        return self._pool.submit("node record: read", self._records.read, node)

    def close(self) -> None:
        """After `run` has ended; a call that hangs goes on in its thread."""
        self._pool.close()

    def place(self) -> float:
        """0: the first of the nodes that live, by name; near 1 the last.

        One that died without a word leaves a gap. Under the lock.
        """
        live = [
            peer.node
            for peer in self._peers.values()
            if peer.record is None or peer.record.state is NodeState.LIVE
        ]
        return sum(node < self._who.node for node in live) / (len(live) + 1)

    def statistics(self) -> ClusterStatistics:
        """What `status`, `nodes`, the metrics and the tests see. Under the lock."""
        terms = self.terms()
        now = self._monotonic()
        waiting = [
            WaitingPointer(one.op, dict(one.missing), one.op.withheld, self._gate.needs(one.op))
            for one in self._gate.gated()
            if one.makes is None
            and (one.op.kind not in REMOVING or Verdict.NAMED.value in one.missing.values())
        ]
        return ClusterStatistics(
            node=self._who.node,
            peers=tuple(
                _told(peer, terms)
                for peer in sorted(self._peers.values(), key=lambda peer: peer.node)
            ),
            waiting=tuple(waiting),
            published=self.published,
            published_age_s=now - self._published_at if self._published_at else None,
            passed=self.pointers_passed,
            withheld_total=self.pointers_withheld,
            waited_s_max=self.waited_s_max,
            clock_bound_s=max(
                [terms.clock_bound_s, *(peer.bound_s(terms) for peer in self._peers.values())]
            ),
            drift_s=terms.drift_s,
            lost=self._own.lost,
            awaited=tuple(self._names.awaited),
            name_waits=self._names.waits,
            name_waits_in_vain=self._names.waits_in_vain,
            error=self._own.rivalry or self._error,
        )


def _read_records(records: Records, names: list[str]) -> dict[str, _Answer]:
    """On a thread."""
    answers = {}
    for name in names:
        try:
            answers[name] = _Answer(records.read(name))
        except (OSError, ValueError) as error:
            answers[name] = _Answer(None, str(error) or type(error).__name__)
    return answers


def _told(peer: Peer, terms: Terms) -> PeerReport:
    return PeerReport(
        node=peer.node,
        record=peer.record,
        silent_s=peer.silent_s,
        missing=peer.is_missing(terms),
        forgotten=peer.is_forgotten(terms),
        ahead_s_min=peer.ahead_s_min,
        ahead_s_max=peer.ahead_s_max(terms.node),
        clock_bound_s=peer.bound_s(terms),
        clock_wait_s=peer.clock_wait_s(terms),
        error=peer.error,
    )
