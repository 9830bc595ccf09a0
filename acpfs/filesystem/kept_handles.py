"""Open files and directories as they outlive the worker: to records, and from records back to
handles.

Owns the meaning of the words in `ram.kept` that describe handles. A record is written in the step
that opens, before the kernel learns the handle's number, and freed when the step that closes is
committed; where a worker dies between record and transaction, the request was not answered and
comes again. What a record says so that no half is published goes only when what it stands for is
committed to be otherwise. Used under the file system's lock; restoring is part of the start, before
anything is served.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from acpfs.filesystem.close_states import CLOSE_STATES, CloseEvent, CloseState
from acpfs.filesystem.last_close import Close
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.records import Lane
from acpfs.ram.kept import Kept
from acpfs.ram.mapped_records import NO_SLOT
from acpfs.ram.state import StateDatabase
from acpfs.types import HandleId, Ino, TierId
from acpfs.writeback.log.ops import Op

_LANES = list(Lane)
_NUMBER, _UNIQUE, _INO, _FLAGS, _LANE, _PID, _TARGET, _BITS, _TENTATIVE = range(9)
_WROTE = 1
_UNSEEN = 2
_CREATED = 4
_BOUND = 8
_KILLED = 16
_OTHERS = 32
_BY_OPENER = 64
_WAITS = 128
_CLOSED = 256
_RELEASED = 512
_UNEXPECTED = 1024
_READ = 2048
_SYNCED = 4096
_SHARED = 8192
_BEGUN = 16384
_PROCESS_SHIFT = 32
"""Its process stands above the thread that opened it; in the records of an earlier acpfs that is 0:
not known.
"""
UNTOLD = -1
"""A process of which an earlier worker knew that it wrote, and this one does not know which it
is.
"""
_UID_SHIFT = 32
"""The user stands above the bits; in the records of an earlier acpfs that is 0."""
_CLOSED_SHIFT = 32
"""The time of its latest close stands above the flags, in units of `_CLOSED_UNIT_S`; 0: none was
seen, or by an earlier acpfs.
"""
_CLOSED_UNIT_S = 0.1


@dataclass(slots=True, eq=False)
class Handle:
    """One open file."""

    number: HandleId
    node: Node
    flags: int
    lower_fd: int = -1
    """Descriptor on the backing directory while the content is only there; opened at the first
    read.
    """
    lower_ino: int = 0
    """Inode number there of what it is open on."""
    left_fds: list[int] = field(default_factory=list)
    """What it was open on before the file was replaced there."""
    lane: Lane = Lane.LIBFUSE
    pid: int = 0
    """The thread that opened it."""
    process: int = 0
    """That one's process; 0: not known, or it cannot write."""
    uid: int = 0
    """That one's user."""
    unseen: bool = False
    """Opened read-write while the kernel had the tier file for others: it may write through a
    mapping that only the kernel sees.
    """
    bound: bool = False
    """In the daemon's lane, opened while the kernel had a file for the node: mappings through it
    are of that file.
    """
    state: CloseState = CloseState.CLEAN
    """Only `take` changes it."""
    wrote: bool = False
    """It changed the content since its last close, or is about to: so its state says, and it is
    asked with each call.
    """
    store: Op | None = None
    """The STORE of its latest close, as long as that is not known to be the last one: while it is
    LOGGED or OVERTAKEN, and no longer.
    """
    closed_at: float = 0.0
    """Monotonic time, seconds, of its latest close (of a copy of it, since it is still there); 0:
    none was seen. In its record: what is asked after a while is not put off by a new worker.
    """
    by_opener: bool = False
    """The process that opened it has closed a descriptor since the last write, and not only others
    have, as far as that is told.
    """
    writer: int = 0
    """The thread that was seen to write through it last."""
    others_wrote: bool = False
    """A process that did not open it was seen to write through it."""
    wrote_by: set[int] = field(default_factory=set)
    """Processes that were seen to write through it what is in no version that counts; `UNTOLD`:
    perhaps also others.
    """
    has_copies: bool = False
    """A close of it turned out to be that of a copy."""
    changing: int = 0
    """Calls through it that change the content and are under way."""
    begun_as: bytes = b""
    """Opened to read and write while it was empty: its path then, under which the next one like it
    is looked for.
    """
    is_unexpected_to_map: bool = False
    """It can map the file, and is not expected to do so: no room was reserved for that."""
    only_written: bool = True
    """Nobody was seen to read through it, nor to map it."""
    was_synced: bool = False
    """Through it, while nobody has been seen to write through it since."""
    is_shared_or_synced: bool = False
    """Somebody else opened the file to write meanwhile, or it was written on after a sync: what
    databases do.
    """
    is_released: bool = False
    """The kernel has sent RELEASE; it goes on as long as a mapping that was made through it."""
    killed: bool = False
    """Who wrote through it was killed before it closed it, and left a half; copies of the
    descriptor may still be open.
    """
    unique: int = 0
    """Of the request that opened it."""
    created: bool = False
    """That request made the file."""
    former_bytes: int = -1
    """How long the file was when it was opened, and perhaps truncated; -1: it was made then, or by
    an earlier worker.
    """
    opened_at: float = 0.0
    """Monotonic time, seconds, of its open; 0: an earlier worker opened it."""
    place: str = ""
    """Where the bytes were then, see `Loads.place`; only of one that reads."""
    slot: int = field(default=NO_SLOT)
    """Its record."""

    # Asked several times per request, and `flags` stay:
    writable: bool = field(init=False)
    may_map: bool = field(init=False)
    """Whether the file can be mapped through it."""
    synchronous: bool = field(init=False)

    def __post_init__(self) -> None:
        access = self.flags & os.O_ACCMODE
        self.writable = access != os.O_RDONLY
        self.may_map = access != os.O_WRONLY
        self.synchronous = bool(self.flags & os.O_DSYNC)

    def take(self, event: CloseEvent, store: Op | None = None) -> None:
        """Go on. `store`: of its close, where that has a version now.

        Raises:
            IllegalCloseError: that does not lead anywhere from here.
        """
        self.found(CLOSE_STATES[self.state, event])
        if self.state is not CloseState.LOGGED and self.state is not CloseState.OVERTAKEN:
            self.store = None
        elif store is not None:
            self.store = store

    def found(self, state: CloseState) -> None:
        """So an earlier worker has recorded it, or `take` has led there."""
        self.state = state
        self.wrote = state is CloseState.WRITTEN or state is CloseState.OVERTAKEN

    @property
    def is_in_doubt(self) -> bool:
        """Whether its close has a version that may have to be withdrawn."""
        return self.store is not None and self.store.tentative

    def is_fixed(self) -> None:
        """All that was written through it counts: who writes from now on is seen anew."""
        self.wrote_by.clear()
        self.writer = 0

    def may_be_writer(self, process: int) -> bool:
        """Whether a process may have written through it; 0: it is not told which one it is.

        Who opened it always may.
        """
        return process in (0, self.process) or not self.wrote_by.isdisjoint((process, UNTOLD))

    @property
    def writes_unseen(self) -> bool:
        """Whether the kernel may write for it without the daemon."""
        return self.unseen or (self.lane is Lane.PASSTHROUGH and self.writable)

    @property
    def maps_in_kernel(self) -> bool:
        """Whether it is one of the passthrough lane that can be mapped to write; its mappings leave
        a trace (`_is_new` in `lanes`).
        """
        return self.lane is Lane.PASSTHROUGH and self.writable and self.may_map

    @property
    def maps_unseen(self) -> bool:
        """Whether the kernel maps the tier file for it, so that it may be written to without the
        daemon, and without a trace.
        """
        return self.may_map and self.writes_unseen

    @property
    def leaves_trace(self) -> bool:
        """Whether a mapping that is made through it in the kernel sets the tier file's atime."""
        return not self.flags & os.O_NOATIME

    @property
    def rewrites_unseen(self) -> bool:
        """Whether that may be anywhere, and not behind what the file has."""
        return self.writes_unseen and (self.unseen or not self.flags & os.O_APPEND)


class KeptHandles:
    """Writes and reads the records of open files."""

    def __init__(self, kept: Kept, state: StateDatabase) -> None:
        """`state`: with whose transactions the records go."""
        self._slots = kept.handles
        self._after_commit = state.after_commit
        self._changed: dict[Handle, None] = {}
        """Since the last commit; their records are not written yet."""
        state.beside_commit(self._changed, self._write)
        self._given_up = kept.given_up
        self._former = kept.former_handles
        self.first_number = kept.first_number
        """Numbers of open files begin behind it, so that none is that of an earlier worker's."""

    def opened(self, handle: Handle) -> None:
        """A file was opened and has its lane."""
        target = handle.node.kernel_target
        handle.slot = self._slots.add(
            handle.number,
            handle.unique,
            handle.node.ino,
            self._flags(handle),
            _LANES.index(handle.lane),
            handle.pid | handle.process << _PROCESS_SHIFT,
            0 if target is None else target,
            self._bits(handle),
            0,
        )

    @staticmethod
    def _flags(handle: Handle) -> int:
        # Rounded down: to the next worker, too, no close may lie in the future.
        return handle.flags | int(handle.closed_at / _CLOSED_UNIT_S) << _CLOSED_SHIFT

    @staticmethod
    def _bits(handle: Handle) -> int:
        bits = (
            _WROTE * handle.wrote
            | _UNSEEN * handle.unseen
            | _CREATED * handle.created
            | _BOUND * handle.bound
            | _KILLED * handle.killed
            | _OTHERS * handle.others_wrote
            | _BY_OPENER * handle.by_opener
            | _WAITS * (handle.state is CloseState.WAITING)
            | _CLOSED * (handle.state is CloseState.OVER)
            | _RELEASED * handle.is_released
            | _UNEXPECTED * handle.is_unexpected_to_map
            | _READ * (not handle.only_written)
            | _SYNCED * handle.was_synced
            | _SHARED * handle.is_shared_or_synced
            | _BEGUN * bool(handle.begun_as)
        )
        return bits | handle.uid << _UID_SHIFT

    def changed(self, handle: Handle) -> None:
        """Its lane, or whether it wrote, or what is known of its closes changed.

        The record says so when the step is committed. What it says so that no half is published
        it says at once, before the first byte changes: a request whose caller is killed does not
        come again.
        """
        slot = handle.slot
        if slot == NO_SLOT:
            return
        if handle.wrote or handle.others_wrote:
            at_once = _WROTE * handle.wrote | _OTHERS * handle.others_wrote
            self._slots.record(slot)[_BITS] |= at_once
        self._changed[handle] = None

    def _write(self) -> None:
        """Before the commit: whatever has happened to a handle in the step is written once.

        Whoever reads the state as it was before must find that it was written to, and whoever
        reads the new one which version is in doubt: what says either goes only after the commit.
        """
        late = []
        for handle in self._changed:
            slot = handle.slot
            if slot == NO_SLOT:
                continue  # it is freed after the commit, whatever it says
            bits = self._bits(handle)
            tentative = 0 if handle.store is None else handle.store.seq
            record = self._slots.record(slot)
            late_bits = record[_BITS] & ~bits & _WROTE
            late_tentative = record[_TENTATIVE]
            record[_FLAGS] = self._flags(handle)
            record[_LANE] = _LANES.index(handle.lane)
            record[_BITS] = bits | late_bits
            record[_TENTATIVE] = late_tentative or tentative
            if late_bits or late_tentative not in (0, tentative):
                late.append((handle, bits, tentative))
        self._changed.clear()
        if late:
            self._after_commit(partial(self._written, late))

    def _written(self, late: list[tuple[Handle, int, int]]) -> None:
        for handle, bits, tentative in late:
            if handle.slot != NO_SLOT:
                record = self._slots.record(handle.slot)
                record[_BITS] = bits
                record[_TENTATIVE] = tentative

    @staticmethod
    def _restore_use(handle: Handle, bits: int, table: NodeTable) -> None:
        """What the next file like it is expected to be for.

        Of the path under which it was begun, what it is called now is what is left: where it was
        renamed meanwhile, nothing is learnt of the former name.
        """
        handle.only_written = not bits & _READ
        handle.was_synced = bool(bits & _SYNCED)
        handle.is_shared_or_synced = bool(bits & _SHARED)
        if bits & _BEGUN and handle.node.names:
            handle.begun_as = table.path(handle.node.ino)

    @staticmethod
    def _state(bits: int) -> CloseState:
        """As recorded, but for a version that is in doubt; what was written goes before all else,
        as it is in a record until it is committed that it is in a version.
        """
        if bits & _WROTE:
            return CloseState.WRITTEN
        if bits & _WAITS:
            return CloseState.WAITING
        return CloseState.OVER if bits & _CLOSED else CloseState.CLEAN

    @staticmethod
    def _writers(handle: Handle, tentative: int) -> set[int]:
        """Who wrote through it what is in no version that counts, as far as its record says so."""
        if handle.others_wrote:
            return {UNTOLD}
        has_written = handle.wrote or handle.state is CloseState.WAITING or tentative
        return {handle.process} if handle.process and has_written else set()

    def closed(self, handle: Handle) -> None:
        """It is gone, once the step is committed: a RELEASE that comes again finds it."""
        slot = handle.slot
        handle.slot = NO_SLOT
        if slot != NO_SLOT:
            self._after_commit(partial(self._slots.free, slot))

    def forgotten(self, handle: Handle) -> None:
        """The kernel never learned of it: it is gone at once, since another one takes its place."""
        if handle.slot != NO_SLOT:
            self._slots.free(handle.slot)
            handle.slot = NO_SLOT

    def former(self) -> Iterator[tuple[Close, int]]:
        """Closes of the session before, of which it never became known whether they were the last,
        and the numbers of their STOREs.
        """
        for words in self._former:
            if words[_TENTATIVE]:
                bits = words[_BITS]
                yield (
                    Close(
                        Ino(words[_INO]),
                        words[_PID] >> _PROCESS_SHIFT,
                        by_opener=bool(bits & _BY_OPENER),
                        others_wrote=bool(bits & _OTHERS),
                        sees_writers=_LANES[words[_LANE]] is Lane.DIRECT and not bits & _UNSEEN,
                        ended=True,
                    ),
                    words[_TENTATIVE],
                )

    def former_targets(self) -> Iterator[tuple[Ino, TierId]]:
        """Nodes that somebody had open to write in the kernel when the session before ended, with
        the tier files.
        """
        for words in self._former:
            flags = words[_FLAGS]
            is_writable = flags & os.O_ACCMODE != os.O_RDONLY
            in_kernel = _LANES[words[_LANE]] is Lane.PASSTHROUGH or words[_BITS] & _UNSEEN
            if is_writable and in_kernel and words[_TARGET]:
                yield Ino(words[_INO]), TierId(words[_TARGET])

    def restore(self, table: NodeTable) -> Iterator[tuple[Handle, int]]:
        """Open files of the last worker, and the number from which on a STORE of theirs is
        tentative (0: none is).

        Records of nodes that never came to be, and of opens that were given up, go.
        """
        for slot, words in self._slots:
            node = table.get(Ino(words[_INO]))
            # Who opened it was told that it failed, and closes nothing.
            if node is None or not node.is_file or words[_UNIQUE] in self._given_up:
                self._slots.free(slot)
                continue
            bits = words[_BITS]
            handle = Handle(
                HandleId(words[_NUMBER]),
                node,
                words[_FLAGS] & (1 << _CLOSED_SHIFT) - 1,
                lane=_LANES[words[_LANE]],
                pid=words[_PID] & (1 << _PROCESS_SHIFT) - 1,
                process=words[_PID] >> _PROCESS_SHIFT,
            )
            handle.closed_at = (words[_FLAGS] >> _CLOSED_SHIFT) * _CLOSED_UNIT_S
            handle.unique = words[_UNIQUE]
            handle.slot = slot
            handle.uid = bits >> _UID_SHIFT
            handle.found(self._state(bits))
            handle.unseen = bool(bits & _UNSEEN)
            handle.created = bool(bits & _CREATED)
            handle.bound = bool(bits & _BOUND)
            handle.killed = bool(bits & _KILLED)
            handle.others_wrote = bool(bits & _OTHERS)
            handle.wrote_by = self._writers(handle, words[_TENTATIVE])
            handle.by_opener = bool(bits & _BY_OPENER)
            handle.is_released = bool(bits & _RELEASED)
            handle.is_unexpected_to_map = bool(bits & _UNEXPECTED)
            self._restore_use(handle, bits, table)
            if handle.lane is Lane.PASSTHROUGH or handle.bound:
                node.kernel_target = TierId(words[_TARGET])
            yield handle, words[_TENTATIVE]
