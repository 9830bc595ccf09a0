"""Puts the parts of the file system together, once, in the order in which they need each other.

Owns no state and no meaning. Transports get the facade (`FileSystem`); the worker hands single
parts on to what control asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower
from acpfs.checkpoints import Checkpoints
from acpfs.config import Settings, WhenKilled
from acpfs.filesystem.admission import Admission, KnownSizes
from acpfs.filesystem.at_once import AtOnce
from acpfs.filesystem.attribute_calls import AttributeCalls
from acpfs.filesystem.awaited_names import AwaitedNames
from acpfs.filesystem.backing_space import BackingSpace, Owed
from acpfs.filesystem.catalogue import Catalogue
from acpfs.filesystem.changes import Changes
from acpfs.filesystem.closes import Closes
from acpfs.filesystem.closing import Closing, closing_of
from acpfs.filesystem.content.charges import Charges
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.eviction_order import EvictionOrder
from acpfs.filesystem.content.fill import Fills
from acpfs.filesystem.content.from_members import Members, MemberSource
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
from acpfs.filesystem.files import Files
from acpfs.filesystem.handles import Handles
from acpfs.filesystem.hold import Hold
from acpfs.filesystem.interrupted import InterruptedFiles
from acpfs.filesystem.invariants import Invariants
from acpfs.filesystem.kept_handles import KeptHandles
from acpfs.filesystem.known_files import KnownFiles
from acpfs.filesystem.lane_use import LaneUse
from acpfs.filesystem.lanes import Lanes
from acpfs.filesystem.last_close import Callers, Openers
from acpfs.filesystem.lending import Lending
from acpfs.filesystem.likely_sizes import LikelySizes
from acpfs.filesystem.loads import Loads
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.marks import Marks
from acpfs.filesystem.mending import Mending
from acpfs.filesystem.missing import Missing
from acpfs.filesystem.names import Names
from acpfs.filesystem.needed_nodes import NeededNodes
from acpfs.filesystem.node_use import NodeUse
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.op_paths import OperationPaths
from acpfs.filesystem.open_files import OpenFiles
from acpfs.filesystem.opens import Opens
from acpfs.filesystem.pages_ahead import NoReadyMemory, PagesAhead, ReadyMemory
from acpfs.filesystem.paths import Paths
from acpfs.filesystem.payers import Limits, Payers
from acpfs.filesystem.pins import Pins
from acpfs.filesystem.pointer_content import PointerContent
from acpfs.filesystem.preloading import Preloading
from acpfs.filesystem.steps import Steps
from acpfs.filesystem.syncing import Syncing
from acpfs.filesystem.upper import UpperLayer
from acpfs.filesystem.urgent import UrgentFiles
from acpfs.ram.control_groups import limits_of_caller
from acpfs.ram.descriptor_limits import Reserve
from acpfs.ram.kept import Kept
from acpfs.ram.shortage import Shortage, available_bytes
from acpfs.writeback.members.peer_names import PeerNames
from acpfs.writeback.sources.spill import Spill


@dataclass(frozen=True, slots=True)
class Pools:
    """Threads."""

    requests: CallPool
    """For calls on the backing directory."""
    copies: CallPool
    """For copies inside the RAM tier."""
    fills: CallPool
    """For reading cold files ahead."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is asked of the machine and its processes."""

    limits: Limits = limits_of_caller
    """As `Payers` has them."""
    unknown_bytes: int | None = None
    """As `KnownSizes` has them."""
    available: Callable[[], int] = available_bytes
    """As `Shortage` has it."""
    closing_of: Callable[[int], Closing] = closing_of
    """How a thread comes to close what it has open."""
    openers: Openers | None = None
    """What is known of the processes that open files."""
    ready: ReadyMemory | None = None
    """Memory that was made ready for writers."""
    members: MemberSource | None = None
    """Others who may have the bytes of cold files."""


class FileSystemParts:
    """All parts, over one lock; `changes` is the engine's listener."""

    def __init__(
        self,
        settings: Settings,
        upper: UpperLayer,
        lower: Lower,
        pools: Pools,
        *,
        surroundings: Surroundings | None = None,
        kept: Kept | None = None,
        make_spill: Callable[[RLock], Spill] | None = None,
    ) -> None:
        """`kept`: records for, and from, other workers of the kernel session; transports keep
        theirs there, too. `make_spill`: the spill tier, given the file system's lock.
        """
        self.settings = settings
        self.upper = upper
        self.lower = lower
        self.kept = Kept() if kept is None else kept
        self._pools = pools
        self._around = surroundings or Surroundings()
        self.lock = upper.lock
        self.state = upper.state
        self.tier = upper.tier
        self.table = upper.table
        clock = upper.runtime.clock
        self.steps = Steps(self.lock, self.state, clock)
        self.durations = Durations(clock)
        self._shapes = Checkpoints(settings.checkpoint_patterns)
        self._openers = self._around.openers or Openers(
            os.fspath(settings.backing), upper.runtime.threads
        )
        self._op_paths = OperationPaths(self.table, upper.log, upper.tree)
        versions = self._make_contents()
        self._make_changes()
        self._make_handles()
        self._make_names()
        self._make_lanes()
        self._make_bytes(versions, make_spill)
        self._make_calls()
        self._make_preloading()
        self._make_decisions()

    def _make_contents(self) -> Versions:
        """Where bytes are, and who leaves RAM; all that is known without the backing directory."""
        upper = self.upper
        clock = upper.runtime.clock
        self.missing = Missing(self.table, upper.log, self.tier)
        self.earlier_calls = EarlierCalls()
        self.overflow = Overflow(
            self.lower,
            self._pools.requests,
            self.tier,
            self.lock,
            self.settings.backing_timeout_s,
            self.earlier_calls,
            upper.runtime.chance,
            self.steps.spare,
        )
        versions = Versions(self.tier, upper.log)
        self.charges = Charges(self.tier, self.table, versions, self.settings.ram_per_user)
        self.urgent = UrgentFiles(self.state, self.table, self.tier, self.settings.reserve, clock)
        self.pins = Pins(self.state, clock)
        self.outlook = DrainOutlook(upper.log, self.table, versions, self.tier, self.pins)
        self.room = Room(self.tier, self.settings.when_full, self.outlook, self.urgent.covers)
        self.fills = Fills(self.tier)
        self.catalogue = Catalogue(
            self.state,
            self.table,
            upper.log,
            self._shapes,
            clock,
            verifies=self.settings.verify_after_write,
        )
        self.contents = Contents(
            upper,
            self._pools.copies,
            self.overflow,
            versions,
            self.room,
            EvictionOrder(self.table, self.catalogue, self.pins, self.settings.keep_checkpoints),
            Marks(self.state),
            self.fills,
        )
        return versions

    def _make_changes(self) -> None:
        """What is known of the backing directory, and what the log is told."""
        clock = self.upper.runtime.clock
        peers = PeerNames(self.settings, clock)
        self.lower_view = LowerView(
            self.settings, self.upper, self.lower, self._pools.requests, self.contents, peers
        )
        self.contents.earlier.follow(self.lower_view.notices.changed)
        self.changes = Changes(
            self.upper,
            self.contents,
            self.lower_view,
            self.steps,
            self.catalogue,
            self.durations,
            self._op_paths,
        )
        self.awaited = AwaitedNames(
            self.settings,
            self.table,
            self.lower_view,
            self.upper.log,
            peers,
            clock,
        )
        self.expectations = Expectations(self.state)
        self._earlier = EarlierSaves(
            self.lower,
            self._pools.requests,
            self.upper.tree,
            self.table,
            self.lock,
            self.expectations,
            self.state.step,
        )

    def _make_handles(self) -> None:
        """The table of open files, and what is in doubt about their closes."""
        clock = self.upper.runtime.clock
        self.lanes = Lanes(clock)
        self.loads = Loads(self.table, self.catalogue.recognise, self.durations.load, clock)
        self.handles = Handles(
            self.upper,
            self.contents,
            self.lanes,
            KeptHandles(self.kept, self.state),
            self._openers,
            self.durations,
            self.loads,
        )
        self.doubtful = DoubtfulCloses(self.handles, self.changes, self._openers)

    def _make_names(self) -> None:
        """Names and attributes."""
        self.names = Names(
            self.table,
            self.lower_view,
            self.changes,
            self.contents,
            self.awaited,
            self._earlier,
            self.doubtful,
            PointerContent(
                self.settings, self.upper, self.contents, self.changes, self.awaited.peers
            ),
        )
        self.attributes = AttributeCalls(
            self.settings,
            self.table,
            self.lower_view,
            self.changes,
            self.contents,
            NeededNodes(self.upper.log.needs),
        )
        self.at_once = AtOnce(
            self.settings,
            self.table,
            self.lower_view,
            self.attributes,
            self.steps,
            self.upper.runtime.clock,
        )

    def _make_lanes(self) -> None:
        """How bytes travel, who may write in the kernel's lane, and who is held there."""
        upper = self.upper
        runtime = upper.runtime
        self.payers = Payers(self.state, self.table, self.contents.retention, self._around.limits)
        sizes = KnownSizes(
            self.expectations,
            LikelySizes(self._shapes),
            self._earlier,
            self._around.unknown_bytes,
        )
        admission = Admission(
            upper,
            self.room,
            self.contents.retention,
            Shortage(runtime.clock, self._around.available),
            self.payers,
            sizes,
        )
        self.outgrown = OutgrownFiles(
            upper,
            self.lower,
            self._pools.requests,
            self.contents,
            admission,
            self.earlier_calls,
        )
        self.hold = Hold(
            self.contents,
            admission,
            self.tier,
            self.room,
            self.table.path,
            self.outgrown.relieve,
            runtime,
        )
        self.warming = Warming(
            self.settings,
            upper,
            self.contents,
            self.lower_view,
            self._pools.requests,
            self._pools.fills,
            self.fills,
            Members(self._around.members, runtime),
        )
        self.ahead = PagesAhead(
            self.tier,
            self.contents,
            admission,
            self._pools.copies,
            self.lock,
            self._around.ready or NoReadyMemory(),
        )
        self.lane_use = LaneUse(
            self.lanes,
            self.attributes,
            self.contents,
            admission,
            self.hold,
            self.lower_view,
            self.warming,
            self.ahead,
        )

    def _make_bytes(self, versions: Versions, make_spill: Callable[[RLock], Spill] | None) -> None:
        """Reading and changing bytes, wherever they are."""
        self.spilling = (
            None
            if make_spill is None
            else Spilling(
                make_spill(self.lock),
                self.upper,
                self.contents,
                versions,
                self.room,
                self.overflow,
            )
        )
        self.spill = None if self.spilling is None else self.spilling.spill
        self._writable = Writable(
            self.upper,
            self.lower_view,
            self.contents,
            self.overflow,
            self.outgrown,
            self.room,
            self.warming,
            self.spilling,
        )
        self.reads = Reads(
            self.contents,
            self.overflow,
            self.outgrown,
            self.spill,
            self.warming,
            self.lower_view.reads,
            self._writable.persisting,
        )

    def _make_calls(self) -> None:
        """The calls on open files and directories."""
        upper = self.upper
        keeps = self.settings.when_killed is WhenKilled.KEEP
        closing = self._around.closing_of if keeps else _by_call
        self.use = NodeUse(self.table, self.changes, self.warming, self.contents, self.lower_view)
        self.closes = Closes(
            upper,
            self.handles,
            self.doubtful,
            self.changes,
            self.contents,
            self.outgrown,
            self.lane_use,
            Callers(self._openers, closing, self._pools.copies),
        )
        self.opens = Opens(
            self.handles,
            self.closes,
            self.lane_use,
            self.names,
            self.lower_view,
            self.contents,
            self._writable,
            self.use,
        )
        self.open_files = OpenFiles(
            upper,
            self.handles,
            self.closes,
            self.lane_use,
            self.contents,
            self.lower_view,
            self.outgrown,
            self.use,
        )
        self.syncing = Syncing(
            upper,
            self.handles,
            self.closes,
            self.attributes,
            self.contents,
            self._writable,
            self.outgrown,
            self.use,
        )
        self.files = Files(
            self.handles,
            self.closes,
            self.syncing,
            self.reads,
            self.contents,
            self._writable,
            self.use,
            self.lane_use,
        )
        self.directories = Directories(
            self.table, self.names, self.attributes, self.lower_view, self.kept
        )

    def _make_preloading(self) -> None:
        """What comes to RAM before it is asked for."""
        self.paths = Paths(self.table, self.lower_view, self.settings.mountpoint)
        self.preloading = Preloading(
            self.table,
            self.lower_view,
            self.reads,
            self.warming,
            self._shapes,
            self.use.closed,
            self.paths,
        )

    def _make_decisions(self) -> None:
        """What people ask and decide, and what is looked after by itself."""
        upper = self.upper
        clock = upper.runtime.clock
        self.mending = Mending(
            self.table, upper.log, self.contents, self.changes, self.tier, self.lower_view
        )
        self.lending = Lending(upper, self.contents, self.fills, self.lower_view, self.mending)
        self.known_files = KnownFiles(self.table, upper.log, self.tier)
        self.eviction = Eviction(self.table, upper.log, self.tier, self.contents.retention)
        self.invariants = Invariants(self.table, upper.log, self.tier, clock)
        self.reports = Reports(upper, self.handles, self.closes, self._op_paths)
        self.interrupted = InterruptedFiles(
            self.state,
            self.table,
            self.reports,
            self.changes,
            self.doubtful,
            self.finish_outgrown,
            self.contents.earlier.may_write,
        )
        self.space = BackingSpace(
            self.lower,
            self._pools.requests,
            self.lock,
            self.files.learn_capacity,
            Owed(self.files.owed_bytes, lambda: upper.log.sizes.stored_bytes),
            self.settings.patience_s,
        )
        self.descriptors = Reserve(self.settings.allow_other, clock)

    def finish_outgrown(self, node: Node) -> None:
        """The last close of a file that outgrew RAM came in an earlier daemon, or was decided now:
        the rest follows in the background.
        """
        self.outgrown.seal_taken_up(node)
        if node.body.is_outgrown and not node.kernel_writers and not node.body.interrupted:
            self.steps.start(self.open_files.finish_outgrown(node), lambda _value, _error: None)


def _by_call(_pid: int) -> Closing:
    """Where it makes no difference whether a writer was killed."""
    return Closing.CALL
