"""Puts the parts of the file system together, once, in the order in which they need each other.

Owns no state and no meaning. Transports get the facade (`FileSystem`); the worker hands single
parts on to what control asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import RLock

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower
from acpfs.checkpoints import Checkpoints
from acpfs.config import Settings, WhenKilled
from acpfs.filesystem.admission import Admission
from acpfs.filesystem.at_once import AtOnce
from acpfs.filesystem.attribute_calls import AttributeCalls
from acpfs.filesystem.awaited_names import AwaitedNames
from acpfs.filesystem.backing_space import BackingSpace
from acpfs.filesystem.catalogue import Catalogue
from acpfs.filesystem.changes import Changes
from acpfs.filesystem.closing import Closing, closing_of
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.eviction_order import EvictionOrder
from acpfs.filesystem.content.fill import Fills
from acpfs.filesystem.content.outgrown import OutgrownFiles
from acpfs.filesystem.content.outlook import DrainOutlook
from acpfs.filesystem.content.overflow import Overflow
from acpfs.filesystem.content.reads import Reads
from acpfs.filesystem.content.room import Room
from acpfs.filesystem.content.spilling import Spilling
from acpfs.filesystem.content.versions import Versions
from acpfs.filesystem.content.warming import Warming
from acpfs.filesystem.content.writable import Writable
from acpfs.filesystem.directories import Directories
from acpfs.filesystem.doubtful_closes import DoubtfulCloses
from acpfs.filesystem.durations import Durations
from acpfs.filesystem.earlier_calls import EarlierCalls
from acpfs.filesystem.earlier_saves import EarlierSaves
from acpfs.filesystem.eviction import Eviction
from acpfs.filesystem.expectations import Expectations
from acpfs.filesystem.file_reports import Reports
from acpfs.filesystem.file_writers import FileWriters
from acpfs.filesystem.files import Files
from acpfs.filesystem.hold import Hold
from acpfs.filesystem.interrupted import InterruptedFiles
from acpfs.filesystem.invariants import Invariants
from acpfs.filesystem.kept_handles import KeptHandles
from acpfs.filesystem.known_files import KnownFiles
from acpfs.filesystem.lane_use import LaneUse
from acpfs.filesystem.lanes import Lanes
from acpfs.filesystem.last_close import Openers
from acpfs.filesystem.likely_sizes import LikelySizes
from acpfs.filesystem.loads import Loads
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.marks import Marks
from acpfs.filesystem.mending import Mending
from acpfs.filesystem.missing import Missing
from acpfs.filesystem.names import Names
from acpfs.filesystem.needed_nodes import NeededNodes
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.op_paths import OperationPaths
from acpfs.filesystem.open_files import OpenFiles
from acpfs.filesystem.pages_ahead import NoReadyMemory, PagesAhead, ReadyMemory
from acpfs.filesystem.paths import Paths
from acpfs.filesystem.payers import Limits, Payers
from acpfs.filesystem.pins import Pins
from acpfs.filesystem.preloading import Preloading
from acpfs.filesystem.steps import Steps
from acpfs.filesystem.urgent import UrgentFiles
from acpfs.ram.control_groups import limits_of_caller
from acpfs.ram.descriptor_limits import Reserve
from acpfs.ram.kept import Kept
from acpfs.ram.shortage import Shortage, available_bytes
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.runtime.given import Runtime
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree
from acpfs.writeback.sources.spill import Spill


class FileSystemParts:
    """All parts, over one lock; `changes` is the engine's listener."""

    def __init__(  # noqa: PLR0915  # one statement for each part
        self,
        settings: Settings,
        runtime: Runtime,
        state: StateDatabase,
        tier: Tier,
        log: OperationLog,
        tree: LowerTree,
        lower: Lower,
        calls: CallPool,
        copies: CallPool,
        *,
        limits: Limits = limits_of_caller,
        unknown_bytes: int | None = None,
        available: Callable[[], int] = available_bytes,
        kept: Kept | None = None,
        make_spill: Callable[[RLock], Spill] | None = None,
        fills: CallPool | None = None,
        closing: Callable[[int], Closing] = closing_of,
        openers: Openers | None = None,
        ready: ReadyMemory | None = None,
    ) -> None:
        """`calls`: threads for calls on the backing directory; `copies`: threads for copies inside
        the RAM tier.

        `fills`: threads for reading cold files ahead (None: those of `calls`). `closing`: how a
        thread comes to close what it has open. `limits`: as `Payers` has them, `unknown_bytes`: as
        `Admission`; `available`: as `Shortage` has it. `kept`: records for, and from, other workers
        of the kernel session. `make_spill`: the spill tier, given the file system's lock. `ready`:
        memory that was made ready for writers. `openers`: what is known of the processes that open
        files.
        """
        self.runtime = runtime
        self.settings = settings
        self.lock = RLock()
        self.durations = Durations(runtime.clock)
        self.steps = Steps(self.lock, state, runtime.clock)
        self.state = state
        self.tier = tier
        self.log = log
        self.lower = lower
        self.calls = calls
        self.kept = (
            Kept() if kept is None else kept
        )  # what the next worker of the session will need; transports keep theirs here too
        self.table = NodeTable(state, log, tree, runtime.clock)
        self.missing = Missing(self.table, log, tier)
        self.earlier_calls = EarlierCalls()
        self.overflow = Overflow(
            lower,
            calls,
            tier,
            self.lock,
            settings.backing_timeout_s,
            self.earlier_calls,
            runtime.chance,
            self.steps.spare,
        )
        versions = Versions(tier, log)
        self.urgent = UrgentFiles(state, self.table, tier, settings.reserve, runtime.clock)
        self.pins = Pins(state, runtime.clock)
        self.outlook = DrainOutlook(log, self.table, versions, tier, self.pins)
        self.room = room = Room(tier, settings.when_full, self.outlook, self.urgent.covers)
        shapes = Checkpoints(settings.checkpoint_patterns)
        self.fills = Fills(tier)
        self.catalogue = Catalogue(
            state, self.table, log, shapes, runtime.clock, verifies=settings.verify_after_write
        )
        self.contents = self._make_contents(copies, versions)
        self.lower_view = LowerView(
            settings, lower, calls, tree, log, self.table, self.contents, tier, self.lock, runtime
        )
        op_paths = OperationPaths(self.table, log, tree)
        self.changes = Changes(
            self.table,
            log,
            self.contents,
            self.lower_view,
            self.steps,
            self.catalogue,
            self.durations,
            op_paths,
            runtime.clock,
        )
        self.awaited = AwaitedNames(settings, self.table, self.lower_view, log, runtime.clock)
        self.expectations = Expectations(state)
        earlier = EarlierSaves(
            lower, calls, tree, self.table, self.lock, self.expectations, state.step
        )
        openers = openers or Openers(os.fspath(settings.backing))
        self.writers = FileWriters(self.contents.kernel, openers)
        self.kept_handles = KeptHandles(self.kept, state.after_commit)
        self.closes = DoubtfulCloses(self.writers, self.changes, self.kept_handles, openers)
        self.names = Names(
            self.table,
            self.lower_view,
            self.changes,
            self.contents,
            self.awaited,
            earlier,
            self.writers,
            self.closes,
        )
        self.attributes = AttributeCalls(
            settings,
            self.table,
            self.lower_view,
            self.changes,
            self.contents,
            NeededNodes(log.needs),
        )
        self.at_once = AtOnce(
            settings, self.table, self.lower_view, self.attributes, self.steps, runtime.clock
        )
        self.lanes = Lanes(runtime.clock)
        self.payers = Payers(state, self.table, self.contents.retention, limits)
        sizes = (self.expectations, self.payers, LikelySizes(shapes), earlier, unknown_bytes)
        admission = Admission(
            self.table,
            tier,
            room,
            self.contents.retention,
            Shortage(runtime.clock, available),
            *sizes,
        )
        rest = (
            self.contents,
            self.table,
            log,
            state,
            admission,
            self.lock,
            self.earlier_calls,
            runtime.chance,
        )
        self.outgrown = OutgrownFiles(lower, calls, tier, *rest)
        self.hold = Hold(
            self.contents,
            admission,
            tier,
            room,
            self.table.path,
            self.outgrown.relieve,
            runtime,
        )
        shared = (tier, calls, fills or calls, self.lock, state.step, self.fills, runtime.threads)
        self.warming = Warming(settings, self.table, self.contents, self.lower_view, *shared)
        self.spilling = (
            None if make_spill is None else self._spilling(make_spill(self.lock), versions, room)
        )
        self.spill = None if self.spilling is None else self.spilling.spill
        writable = self._writable(room)
        places = (
            self.contents,
            self.overflow,
            self.outgrown,
            self.spill,
            self.warming,
            self.lower_view.reads,
        )
        self.reads = Reads(*places, writable.persisting)
        self.open_files, self.files = self._regular_files(
            admission,
            writable,
            closing,
            openers,
            copies,
            ready or NoReadyMemory(),
        )
        self.directories = Directories(
            self.table, self.names, self.attributes, self.lower_view, self.kept
        )
        self.paths = Paths(self.table, self.lower_view, settings.mountpoint)
        self.preloading = Preloading(
            self.table,
            self.lower_view,
            self.reads,
            self.warming,
            shapes,
            self.open_files.closed,
            self.paths,
        )
        self.mending = Mending(self.table, log, self.contents, self.changes, tier, self.lower_view)
        self.known_files = KnownFiles(self.table, log, tier)
        self.eviction = Eviction(self.table, log, tier, self.contents.retention)
        self.invariants = Invariants(self.table, log, tier, runtime.clock)
        self.reports = Reports(self.table, log, self.open_files, op_paths, runtime.clock)
        self.interrupted = InterruptedFiles(
            state,
            self.table,
            self.reports,
            self.changes,
            self.closes,
            self.finish_outgrown,
            self.contents.earlier.may_write,
        )
        self.space = BackingSpace(
            lower, calls, self.lock, self.files.learn_capacity, self.files.owed_bytes
        )
        self.descriptors = Reserve(settings.allow_other, runtime.clock)

    def _regular_files(
        self,
        admission: Admission,
        writable: Writable,
        closing: Callable[[int], Closing],
        openers: Openers,
        threads: CallPool,
        ready: ReadyMemory,
    ) -> tuple[OpenFiles, Files]:
        """The calls on regular files, over the parts that are there."""
        closing = (
            closing if self.settings.when_killed is WhenKilled.KEEP else lambda _pid: Closing.CALL
        )
        self.ahead = PagesAhead(self.tier, self.contents, admission, threads, self.lock, ready)
        lane_use = LaneUse(
            self.lanes,
            self.attributes,
            self.contents,
            admission,
            self.hold,
            self.lower_view,
            self.warming,
            self.ahead,
            self.runtime.clock,
        )
        parts = (
            self.contents,
            writable,
            admission,
            self.outgrown,
            self.warming,
            self.log,
            self.kept_handles,
            closing,
            openers,
            threads,
        )
        self.loads = Loads(
            self.table, self.catalogue.recognise, self.durations.load, self.runtime.clock
        )
        told = (self.durations, self.loads, ready, self.writers, self.closes)
        opened = OpenFiles(
            self.table,
            self.lanes,
            lane_use,
            self.names,
            self.attributes,
            self.lower_view,
            self.changes,
            *parts,
            *told,
        )
        files = Files(
            opened,
            self.attributes,
            self.reads,
            self.closes,
            self.contents,
            writable,
            self.outgrown,
            self.table,
            self.log,
            self.runtime.clock,
        )
        return opened, files

    def _spilling(self, spill: Spill, versions: Versions, room: Room) -> Spilling:
        return Spilling(
            spill,
            self.tier,
            self.log,
            self.table,
            self.contents,
            versions,
            room,
            self.overflow,
            self.state,
        )

    def _writable(self, room: Room) -> Writable:
        bring_back = None if self.spilling is None else self.spilling.bring_back
        parts = (
            self.contents,
            self.overflow,
            self.outgrown,
            self.tier,
            room,
            self.log,
            self.outlook,
            self.warming,
            bring_back,
        )
        return Writable(self.table, self.lower_view, *parts)

    def _make_contents(self, copies: CallPool, versions: Versions) -> Contents:
        order = EvictionOrder(self.table, self.catalogue, self.pins, self.settings.keep_checkpoints)
        parts = (self.overflow, versions, self.room, order, Marks(self.state), self.fills)
        return Contents(self.tier, self.log, self.table, copies, *parts)

    def finish_outgrown(self, node: Node) -> None:
        """The last close of a file that outgrew RAM came in an earlier daemon, or was decided now:
        the rest follows in the background.
        """
        self.outgrown.seal_taken_up(node)
        if node.body.is_outgrown and not node.kernel_writers and not node.interrupted:
            self.steps.start(self.open_files.finish_outgrown(node), lambda _value, _error: None)
