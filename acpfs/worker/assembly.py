"""Puts a worker's parts together, bottom up, and takes them apart again.

The order is the point: first the identity (so that nobody else touches the same staging directory
or RAM tier), then the RAM tier with what an earlier daemon left, then the layers over it. Nothing
is mounted or started here, and nothing is replayed: that happens behind the mount.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from acpfs import __version__
from acpfs.backing import leftovers
from acpfs.backing.anchor import Anchor
from acpfs.backing.calls import CallPool, CallPools
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.identity import Identity, claim, id_name, node_id
from acpfs.backing.late_calls import storage_at
from acpfs.backing.lower import LowerPath
from acpfs.backing.member_records import NodeRecord, NodeRecords
from acpfs.backing.ownership import check_own
from acpfs.backing.probe import ProbeReport, probe
from acpfs.backing.quirks import Features
from acpfs.backing.rivals import Rival
from acpfs.config import AUTO, OFF, Settings
from acpfs.control import registry
from acpfs.errors import MachineError, RefusedError
from acpfs.exchange.beside import Exchange
from acpfs.exchange.exchange_records import MemberAddress
from acpfs.filesystem.awaited_names import AwaitedNames
from acpfs.filesystem.construction import FileSystemParts, Pools, Surroundings
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.scrub import RamScrub
from acpfs.filesystem.upper import UpperLayer
from acpfs.logger import get_logger, shown
from acpfs.mounting.checks import BACKING_WAIT_S, check_not_bare, within
from acpfs.mounting.expected import ExpectedVolume
from acpfs.mounting.spill_place import Holders, SpillPlace
from acpfs.ram import descriptor_limits, mounts, prefault_default
from acpfs.ram import place as places
from acpfs.ram.kept import Kept
from acpfs.ram.memory import budget_bytes, read_memory, unfit
from acpfs.ram.place import HUGE_CHOICES, Place
from acpfs.ram.prefault import MemoryNow, Prefault, takeable_bytes, with_lead
from acpfs.ram.prefault_default import UnusedMemory
from acpfs.ram.shortage import available_bytes
from acpfs.ram.state import STATE_VERSION, DamagedError, StateDatabase, lost
from acpfs.ram.tier import Tier
from acpfs.runtime.file_locks import locked
from acpfs.runtime.given import Runtime
from acpfs.worker import exchanging, mirroring
from acpfs.worker.adoption_watch import (
    AdoptCommand,
    AdoptionStorage,
    AdoptionWatch,
    SilentNodes,
)
from acpfs.worker.bugs import end_by_bug
from acpfs.worker.exchanging import MemberDirectory, Reached
from acpfs.worker.held_copies_watch import HeldCopiesWatch
from acpfs.worker.history import History
from acpfs.worker.learned import LearnedSizes
from acpfs.worker.link import Link
from acpfs.worker.scrubbing import Scrubbing
from acpfs.writeback.adopting.states import may_take_over
from acpfs.writeback.copies.held_copies import HeldCopies, claiming, is_closed_at
from acpfs.writeback.copies.journal_marks import read_mark
from acpfs.writeback.copies.on_member import HolderCandidate
from acpfs.writeback.engine import Engine
from acpfs.writeback.evidence.moving_names import MovingNames
from acpfs.writeback.evidence.verify import Verifier
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.manifest.manifest import Manifest
from acpfs.writeback.members.cluster import Cluster, OwnDrain
from acpfs.writeback.parts import DrainParts
from acpfs.writeback.streams.give_way import GiveWay

COPY_THREADS = 4
"""Copies inside the RAM tier are memory bound: more threads would only share the same bandwidth."""
NODE_THREADS = 24
"""For node records: our own, four or sixteen that read others' for pointers, four or sixteen for
names, and some that may hang.
"""
UNKNOWN_VARIABLE = "ACPFS_EXPECTED_BYTES"
"""For tests: the size to expect of files like which none was seen, so that their writers get the
passthrough lane too.
"""

log = get_logger(__name__)


@dataclass(slots=True)
class Parts:
    """Everything that a worker consists of, short of the transport."""

    settings: Settings
    runtime: Path
    identity: Identity
    directory: BackingDirectory
    probed: ProbeReport
    place: Place
    state: StateDatabase
    tier: Tier
    log: OperationLog
    calls: CallPools
    copies: CallPool
    manifest: Manifest
    verifier: Verifier
    inner: FileSystemParts
    """Of the file system, for what control asks; transports have `fs`."""
    engine: Engine
    prefault: Prefault
    cluster: Cluster
    exchange: Exchange | None
    holding: HeldCopies
    scrubbing: Scrubbing
    history: History
    given: Runtime
    started_at: float = field(init=False)
    holding_watch: HeldCopiesWatch = field(init=False)
    adopting: AdoptionWatch = field(init=False)
    anchor: Anchor = field(init=False)
    fs: FileSystem = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.given.clock.wall()
        self.fs = FileSystem(self.inner)
        self.holding_watch = HeldCopiesWatch(self.holding, self.directory, self.given)
        directory = self.directory
        self.adopting = AdoptionWatch(
            self.settings,
            self.identity.node_id,
            self.holding,
            AdoptionStorage(
                directory,
                directory.newest_claim,
                NodeRecords(directory).read,
                lambda: storage_at(directory.descriptor, mounts.kind_at(directory.descriptor)),
            ),
            SilentNodes(self.cluster, self.exchange, self.fs.lock, self.settings),
            AdoptCommand(self.settings.mountpoint, self.runtime),
            self.given,
        )
        self.anchor = Anchor(self.directory, self.identity.volume_id)

    def warnings(self) -> list[str]:
        """What a user should know about this mount."""
        too_large = unfit(self.tier.budget_bytes, read_memory())
        of_ram = [
            *self.state.warnings(),
            *self.place.warnings,
            *self.inner.missing.warnings(),
            *self.inner.contents.earlier.warnings(),
            *self.scrubbing.warnings(),
        ]
        return [
            *of_ram,
            *self.probed.notes,
            *descriptor_limits.complaints(),
            *([too_large] if too_large else []),
            *map(_nested, self.directory.nested()),
        ]

    def take_apart(self, *, nothing_left: bool) -> None:
        """Close everything; the RAM tier is removed only when nothing is left in it, of others
        neither.
        """
        orphans = self._orphans()
        self.prefault.close()
        self.scrubbing.close()
        self.adopting.close()
        self.holding_watch.close()
        if self.inner.spill is not None:  # before what it may be spoken to by
            mirroring.take_apart(
                self.inner.spill,
                self.directory,
                self.identity.node_id,
                nothing_left=nothing_left,
            )
        if self.exchange is not None:
            self.exchange.close()
        if nothing_left:
            LearnedSizes(self.settings, self.runtime).keep(self.inner.expectations)
            self.history.keep(self.settings, self.runtime)
        self.calls.close()
        self.copies.close()
        self.cluster.close()
        with self.fs.lock:  # a hung call's thread may come back at any time
            self.tier.close()
            self.state.close()
            self.inner.kept.close()
        if orphans:
            log.warning(
                "the RAM tier stays: it holds what lost nodes had not persisted; mount again, and "
                "`acpfs-ctl adopt` drains it",
                nodes=orphans,
            )
        if nothing_left and not orphans:
            places.give_up(self.place)
        else:
            places.let_go(self.place)
        self.identity.release()

    def _orphans(self) -> list[str]:
        """Nodes that are missing, or are being adopted, and of which something is held here.

        Who adopts one writes its record, so it does not look missing meanwhile.
        """
        with self.fs.lock:
            peers = self.cluster.statistics().peers
        missing = {peer.node for peer in peers if peer.missing and not peer.forgotten}
        held = self.holding.statistics()
        return sorted({one.origin for one in held if one.is_frozen or one.origin in missing})


def assemble(settings: Settings, runtime: Path, link: Link, given: Runtime) -> Parts:
    """Build all parts; on failure what was taken is given back. `given`: to all of them.

    Raises:
        MachineError: backing directory, memory or tmpfs do not offer what is needed.
        RefusedError: the identity is in use, or the RAM tier belongs to another backing directory
            or a newer acpfs.
    """
    with ExitStack() as undo, _state_named(runtime):
        directory, identity, probed = _opened_lower(settings, runtime, link, given)
        undo.callback(identity.release)
        place = _take_place(settings, runtime, identity, link)
        undo.callback(places.let_go, place)
        link.step(f"reading the state in {place.directory}")
        state = _open_state(
            settings,
            directory,
            identity,
            place,
            link,
            given,
            lambda error: end_by_bug(link, kept, error),
        )
        undo.callback(state.close)
        tier = Tier(
            place.directory,
            place.budget_bytes,
            given,
            large_pages=place.huge == HUGE_CHOICES[0],
            when_safe=state.after_commit,
            lend=partial(places.lend, place),
        )
        undo.callback(tier.close)
        spill = SpillPlace(settings, identity, state, given)
        history = History(state)
        place.warnings += [] if link.session else spill.prepare()
        operations = OperationLog(state, given.clock)
        tree = LowerTree(state)
        calls = CallPools.make(given, streams=settings.streams * 4)
        copies = CallPool("copies", COPY_THREADS, given)
        reached = exchanging.reached(settings, runtime, identity)
        place.warnings += reached.warnings
        directory_of_members = MemberDirectory(lambda: cluster, given.clock)
        upper = UpperLayer(state, tier, operations, tree, given)
        holding = HeldCopies(tier, upper.lock, identity.volume_id, settings.copies_ram, given)
        exchange = exchanging.exchange(
            settings, reached, directory_of_members, lambda: inner.lending, given, lambda: holding
        )
        kept: Kept = _kept(place, link, given)
        undo.callback(kept.close)
        prefault = _prefault(settings, place, tier, lambda: inner, given)
        inner: FileSystemParts = FileSystemParts(
            settings,
            upper,
            directory,
            Pools(calls.requests, copies, calls.fills),
            surroundings=Surroundings(
                unknown_bytes=_unknown_bytes(),
                # what is ready is given back to whoever writes
                available=lambda: available_bytes() + prefault.ready_bytes,
                ready=prefault,
                members=exchange,
            ),
            kept=kept,
            make_spill=spill.maker(
                tier,
                operations,
                directory,
                _holders(settings, identity, reached, exchange, directory_of_members),
            ),
        )
        manifest = Manifest(state, directory, inner.lock, identity.node_id)
        before = mirroring.journal(inner.spill, directory, identity)
        drained = DrainParts(
            directory,
            tree,
            operations,
            tier,
            state,
            inner.lock,
            inner.changes,
            calls,
            settings,
            given,
        )
        # it needs the engine's gate
        engine = Engine(drained, manifest, inner.spill, before, lambda: cluster.place())  # noqa: PLW0108
        cluster: Cluster = _cluster(
            settings,
            identity,
            directory,
            engine,
            operations,
            state,
            calls,
            inner.awaited,
            given,
            reached,
            holding,
            place.kept_until,
        )
        scrub = RamScrub(
            inner.upper,
            inner.mending,
            inner.changes,
            manifest,
            directory,
        )
        state.accept(holds=settings.listens != OFF or holding.has_place())
        mirroring.begin(
            inner.spill
        )  # after the last table was created: the journal begins with a copy of them all
        if not link.workers_before:
            _begin(
                settings,
                runtime,
                inner,
                history,
                partial(
                    calls.commits.submit, "leftovers", _clear_leftovers, directory, place, given
                ),
            )
        undo.pop_all()
    return Parts(
        settings,
        runtime,
        identity,
        directory,
        probed,
        place,
        state,
        tier,
        operations,
        calls,
        copies,
        manifest,
        Verifier(
            manifest, directory, inner.lock, given.threads, MovingNames(operations, tree).cover
        ),
        inner,
        engine,
        prefault,
        cluster,
        exchange,
        holding,
        _scrubbing(settings, scrub, inner, operations, given),
        history,
        given,
    )


def _begin(
    settings: Settings,
    runtime: Path,
    inner: FileSystemParts,
    history: History,
    clear_leftovers: Callable[[], object],
) -> None:
    """For the first worker of a mount: what the last one has learnt."""
    LearnedSizes(settings, runtime).recall(inner.expectations)
    history.recall(settings, runtime)
    clear_leftovers()


def _scrubbing(
    settings: Settings,
    scrub: RamScrub,
    inner: FileSystemParts,
    operations: OperationLog,
    given: Runtime,
) -> Scrubbing:
    give_way = GiveWay(inner.changes.is_writing, lambda: False, operations.clock.age_s, given)
    return Scrubbing(scrub, settings.scrub_ram_s, give_way, operations.clock.now, given)


@contextmanager
def _state_named(runtime: Path) -> Iterator[None]:
    """What SQLite refuses is told as what it is: a state that cannot be read or written, in the RAM
    tier, and nothing of it is lost.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise MachineError(
            f"the state in the RAM tier (below {runtime / 'tiers'}) cannot be read or written: "
            f"{error}; what it keeps stays there"
        ) from error


def _cluster(
    settings: Settings,
    identity: Identity,
    directory: BackingDirectory,
    engine: Engine,
    operations: OperationLog,
    state: StateDatabase,
    calls: CallPools,
    awaited: AwaitedNames,
    given: Runtime,
    reached: Reached,
    holding: HeldCopies,
    kept_until: float | None,
) -> Cluster:
    machine = leftovers.MachineId.this()
    who = NodeRecord(
        identity.node_id,
        version=__version__,
        state_version=STATE_VERSION,
        host=machine.host,
        hardware=machine.hardware,
        boot_id=machine.boot_id,
        lock=identity.lock,
        mountpoint=os.fsencode(settings.mountpoint).decode("utf-8", "replace"),
        started_at=given.clock.wall(),
        addresses=list(reached.addresses),
        port=reached.port,
        key=reached.key,
        domain=settings.failure_domain or "",
    )
    pool = CallPool("nodes", NODE_THREADS, given, calls.health)
    coherent = mounts.kind_at(directory.descriptor) in mounts.LOCAL
    records = NodeRecords(directory)
    drain = OwnDrain(
        engine.gate,
        operations,
        state,
        engine.section,
        engine.wake,
        pending=awaited.pending,
        texts=engine.texts_of_pointers,
        kept_until=kept_until,
        holds=lambda: holding.offered() if reached.place is not None else -1,
    )
    return Cluster(
        records, who, drain, settings, pool, given, coherent=coherent, names=awaited.peers
    )


def _holders(
    settings: Settings,
    identity: Identity,
    reached: Reached,
    exchange: Exchange | None,
    members: MemberDirectory,
) -> Holders | None:
    if exchange is None:
        return None
    host = leftovers.MachineId.this().host
    address = MemberAddress(identity.node_id, reached.addresses, reached.port, reached.key)
    own = HolderCandidate(address, settings.failure_domain or host, 0)
    return Holders(exchange, members.candidates, own)


def _take_place(settings: Settings, runtime: Path, identity: Identity, link: Link) -> Place:
    link.step("taking the RAM tier")
    budget = budget_bytes(settings.ram, read_memory())
    lock_fd = link.kept.get("tier", [-1])[0]
    names = (identity.volume_id, identity.node_id)
    place = places.take(
        runtime / "tiers",
        *names,
        settings.backing,
        budget,
        numa=settings.numa,
        lock_fd=lock_fd,
        names=(registry.slug(os.fspath(settings.mountpoint)), id_name(settings.mountpoint)),
    )
    if place.found:
        log.info("found the RAM tier of an earlier mount", directory=str(place.directory))
    return place


def _open_state(
    settings: Settings,
    directory: BackingDirectory,
    identity: Identity,
    place: Place,
    link: Link,
    given: Runtime,
    abandoned: Callable[[BaseException], None],
) -> StateDatabase:
    """What the last worker left, or, where the RAM tier was lost, what it mirrored."""
    path = place.directory / places.STATE_FILE
    was_there = path.exists()
    if not link.session:
        mirroring.recover(settings, directory, identity, place, path, given.chance)
        mirroring.remember_node(settings, identity.node_id)
    space = places.state_space(place)
    space.look()
    if link.workers_before or (path.exists() and not was_there):
        return StateDatabase(path, given, space, abandoned=abandoned)
    try:
        if why := lost(path, has_bytes=places.has_bytes(place.directory)):
            raise DamagedError(f"{path} is damaged: {why}")
        return StateDatabase(path, given, space, check=True, abandoned=abandoned)
    except DamagedError as error:
        raise RefusedError(f"{error}; {places.way_out(place)}") from error


def _prefault(
    settings: Settings,
    place: Place,
    tier: Tier,
    inner: Callable[[], FileSystemParts],
    given: Runtime,
) -> Prefault:
    memory = read_memory()
    asked = settings.prefault
    if asked and asked != AUTO and not place.own_tmpfs:
        place.warnings.append("`prefault` has no effect: it takes a tmpfs of its own")
    choice = (
        prefault_default.choose(memory.cgroup_bytes)
        if asked == AUTO
        else prefault_default.PrefaultChoice(asked, "set")
    )
    return Prefault(
        partial(places.spare_tmpfs, place),
        wanted=lambda: (
            choice.bytes(tier.budget_bytes, with_lead(inner().expectations.largest_save()))
            if place.own_tmpfs
            else 0
        ),
        memory=MemoryNow(
            budget=lambda: tier.budget_bytes,
            used=partial(places.taken_bytes, place),
            available=UnusedMemory(takeable_bytes, given.clock).bytes
            if asked == AUTO
            else takeable_bytes,
            machine_bytes=memory.usable_bytes,
        ),
        runtime=given,
        why=choice.reason if place.own_tmpfs else "the RAM tier has no tmpfs of its own",
        writers=lambda: inner().contents.writers,
    )


def _kept(place: Place, link: Link, given: Runtime) -> Kept:
    """The session's records; for a new session, which still has to be mounted, empty ones under a
    new name.
    """
    session = link.session or given.chance.token(16)
    kept = Kept(place.directory / "session", session)
    if link.session and not kept.taken_over:
        raise MachineError(
            "the session cannot be taken over: its records are not in the RAM tier "
            f"{place.directory}"
        )
    link.session_name = session
    return kept


def keep(parts: Parts, link: Link) -> None:
    """Have the supervisor keep what the next worker needs to get this far without asking the
    backing directory.

    The identity last: it says that the rest is there.
    """
    link.remember(
        session=link.session_name,
        node=parts.identity.node_id,
        volume=parts.identity.volume_id,
        tier=os.fspath(parts.place.directory),
        features=asdict(parts.directory.features),
        notes=list(parts.probed.notes),
    )
    link.keep("tier", [parts.place.lock_fd])
    link.keep("backing", [parts.directory.descriptor])
    link.keep("identity", [parts.identity.lock_fd])


def _nested(path: LowerPath) -> str:
    return (
        f"{shown(b'/'.join(path))} is the backing directory of other acpfs mounts: there is no "
        "order between those and this one, "
        "and no pointer waits for the other's files"
    )


def _opened_lower(
    settings: Settings, runtime: Path, link: Link, given: Runtime
) -> tuple[BackingDirectory, Identity, ProbeReport]:
    found = (
        _kept_lower(settings, link, given)
        if link.knows_lower
        else _lower(settings, runtime, link, given)
    )
    if settings.copies or settings.adopts is not None:  # somebody may take the log over
        found[0].fence_own_files()
    return found


def _kept_lower(
    settings: Settings, link: Link, given: Runtime
) -> tuple[BackingDirectory, Identity, ProbeReport]:
    """What an earlier worker of the session opened, claimed and probed."""
    facts = link.facts
    directory = BackingDirectory(
        settings.backing,
        facts["node"],
        given,
        kept_fd=link.kept["backing"][0],
        by=settings.adopts or "",
    )
    # a session that began without them: its kernel checks by modes alone
    features = {"acls": False} | facts["features"]
    probed = ProbeReport(Features(**features), tuple(facts["notes"]))
    directory.adapt(probed.features)
    return directory, Identity(facts["node"], facts["volume"], link.kept["identity"][0]), probed


def _clear_leftovers(directory: BackingDirectory, place: places.Place, given: Runtime) -> None:
    """Of node ids that ended with an earlier boot.

    They cost space, not correctness: where it fails now, the next mount does it.
    """
    try:
        place.warnings += leftovers.clear(directory, leftovers.MachineId.this(), given.clock)
    except OSError as error:
        log.warning(
            "what earlier boots left in the backing directory is not removed", error=error.strerror
        )


def _unknown_bytes() -> int | None:
    value = os.environ.get(UNKNOWN_VARIABLE)
    return None if value is None else int(value)


def _lower(
    settings: Settings, runtime: Path, link: Link, given: Runtime
) -> tuple[BackingDirectory, Identity, ProbeReport]:
    """Open, claim and probe the backing directory, which may hang."""
    node = node_id(
        runtime,
        settings.mountpoint,
        given.chance,
        settings.node_id,
        mirroring.remembered_node(settings, runtime),
    )
    link.step(f"opening and probing the backing directory {settings.backing}")
    complaint = f"backing directory {settings.backing} does not answer"
    claimed: list[tuple[BackingDirectory, Identity]] = []
    probed: list[ProbeReport] = []

    def open_and_claim() -> None:
        check_not_bare(settings.backing, runtime / "tiers")
        expected = ExpectedVolume(settings, runtime)
        expected.check()
        directory = BackingDirectory(settings.backing, node, given, by=settings.adopts or "")
        try:
            check_own(directory.descriptor, settings.backing, given.chance)
            claimed.append((directory, claim(directory, runtime)))
        except OSError as error:
            raise MachineError(
                f"backing directory {settings.backing} cannot be used: {error.strerror} (at .acpfs)"
            ) from error
        expected.remember(claimed[0][1].volume_id)

    within(BACKING_WAIT_S, complaint, open_and_claim)
    directory, identity = claimed[0]
    with ExitStack() as undo:
        undo.callback(identity.release)
        _refuse_rival(directory, identity, link, complaint, given)
        if settings.adopts is not None:  # it is silent: whatever it still does comes to nothing
            link.step("shutting out what the lost node still does")
            assert settings.spill is not None, "Settings refuses that"
            within(
                BACKING_WAIT_S,
                complaint,
                partial(
                    shut_out,
                    directory,
                    identity.node_id,
                    settings.adopts,
                    settings.spill,
                    alone=settings.adopts_alone,
                ),
            )
        within(BACKING_WAIT_S, complaint, lambda: probed.append(probe(directory)))
        undo.pop_all()
    return directory, identity, probed[0]


def shut_out(
    directory: BackingDirectory, node: str, me: str, session: Path, *, alone: bool
) -> None:
    """Claim the log of a silent node, and fence what was before, for an adopter. `session`: what is
    held of it, which is closed; `alone`: the node may live.

    Raises:
        RefusedError: another member has claimed it, or no copy at this one counts.
        OSError: as `BackingDirectory.take_over`.
    """
    _check_closed(session, node)  # else the lock's file would come to be in any directory
    with locked(claiming(session), may_wait=True):
        _check_closed(session, node)
        claim = directory.newest_claim(node.encode())
        mark = None
        with suppress(ValueError):  # damaged: it names nobody
            mark = read_mark(directory, node)
        claimed_by = "" if claim is None else claim.by
        marked = (mark or {}).get("holder", "")
        if marked == me and (mark or {}).get("session") != session.name:
            marked = ""  # an earlier session, which counts no more
        if not may_take_over(me, claimed_by, marked, alone=alone):
            raise RefusedError(
                f"node {claimed_by} has taken over the log of node {node}, and nothing that is "
                f"held here counts: `acpfs-ctl adopt {node}` there goes on"
                if claimed_by
                else f"nothing that is held of {node} here counts any more"
            )
        directory.take_over()


def _check_closed(session: Path, node: str) -> None:
    """It is opened again by the holder, after this mount was begun: what comes would be lost.

    Raises:
        RefusedError: it is, or is no session at all.
    """
    if not is_closed_at(session):
        raise RefusedError(
            f"what is held of {node} is not claimed any more: `acpfs-ctl adopt {node}` begins anew"
        )


def _refuse_rival(
    directory: BackingDirectory, identity: Identity, link: Link, complaint: str, given: Runtime
) -> None:
    """Before anything under this node id is touched."""
    found: list[Rival | None] = []
    parts = (NodeRecords(directory), identity.node_id, leftovers.MachineId.this(), identity.lock)
    within(BACKING_WAIT_S, complaint, lambda: found.append(Rival.found(*parts)))
    rival = found[0]
    if rival is None:
        return

    for pause_s in rival.pauses():
        link.step(f"watching whether node id {identity.node_id} is in use elsewhere")
        # the main thread, which SIGTERM ends at once: signals have their default action until the
        # worker serves
        given.clock.sleep(pause_s)
        within(BACKING_WAIT_S, complaint, rival.look)
