"""What goes to the spill directory and when, and what comes back: complete dirty files, when RAM is
short, or (mirror) all at once.

Chooses versions, and gives up the RAM of those that have a copy; does not know how a copy is made
or kept (`writeback.sources.spill`). Clean contents leave before anything is copied (`retention`),
and only what nobody has open, and is not being copied aside, leaves RAM. What a writer without room
costs does not grow with what there is: a version that may not leave now, as its file is open for
instance, is looked at again when its file is closed for the last time, and every few seconds. Used
under the file system's lock; `bring_back` waits as described in `steps`. Nothing here touches the
disk.
"""

from __future__ import annotations

import errno
import heapq
import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from acpfs.backing.progress import Progress
from acpfs.config import SpillMode
from acpfs.filesystem.content.body import Body, SpillCopy
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.overflow import Overflow
from acpfs.filesystem.content.room import Room
from acpfs.filesystem.content.versions import Versions
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.steps import shared, wait
from acpfs.filesystem.upper import UpperLayer
from acpfs.ram.ladder import Rung
from acpfs.ram.waiting import Purpose
from acpfs.types import NO_VERSION, Ino, Seq, VersionId
from acpfs.writeback.log.ops import Op, Version, VersionState
from acpfs.writeback.sources.mirror import Mirror
from acpfs.writeback.sources.spill import COPY_THREADS, Spill

SHORT_SHARE = 4
"""RAM is short when less than a quarter of the budget is free or clean: a writer at 2 GB/s fills
that of 16 GiB in two seconds.
"""
CLOCK_S = 0.1
"""So often a holder is told until when it has all, at most."""
ALIVE_S = 15.0
"""So often a holder hears of us at least: what nobody speaks of goes after a minute, unless the
mark names it.
"""
LATER_S = 5.0
"""A version that could not be copied, because its file is being written, or may not leave RAM, is
tried again after so long.
"""
_STAGED = (VersionState.STAGED, VersionState.COMMITTED)


@dataclass(frozen=True, slots=True)
class Unmirrored:
    """How far the mirror is behind."""

    files: int
    bytes: int
    until: Seq
    """Everything up to here would be drained after a reboot."""
    since: float | None = None
    """When the first of what would not be was logged; None: there is none."""


@dataclass(slots=True, eq=False)
class AwaitedCopy:
    """Somebody waits until a holder has a node as it is."""

    ino: Ino
    seq: Seq | None
    """All operations up to this one; None: up to the last one of the node."""
    future: Future[None]
    journal: str = ""
    """Token of the one that was asked to tell."""

    def arrived(self) -> None:
        """It has; in whatever thread."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(None)


class CopyQueue:
    """Versions that are to be copied, each once."""

    def __init__(self, *, oldest_first: bool) -> None:
        """`oldest_first`: as what survives a reboot ends at the first version without a copy. Else
        the largest first, and among about equal ones the oldest, so that what stays is the newest.
        """
        self._oldest_first = oldest_first
        self._heap: list[tuple[int, VersionId]] = []
        self._has: set[VersionId] = set()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __iter__(self) -> Iterator[VersionId]:
        return iter(self._has)

    def push(self, version: Version) -> None:
        if version.vid in self._has:
            return
        self._has.add(version.vid)
        rank = 0 if self._oldest_first else -version.size.bit_length()
        heapq.heappush(self._heap, (rank, version.vid))

    def pop(self) -> VersionId:
        """The next one. It may be finished already."""
        _rank, vid = heapq.heappop(self._heap)
        self._has.discard(vid)
        return vid


@dataclass(slots=True)
class MovedOut:
    """What left RAM so far."""

    files: int = 0
    bytes: int = 0


class Spilling:
    """Moves versions between RAM and the spill directory."""

    def __init__(
        self,
        spill: Spill,
        upper: UpperLayer,
        contents: Contents,
        versions: Versions,
        room: Room,
        overflow: Overflow,
    ) -> None:
        """A step of the tier's ladder, and a watcher of versions.

        Looks at all versions that the last worker left, once it has begun.
        """
        self.spill = spill
        self._tier = upper.tier
        self._log = upper.log
        self._table = upper.table
        self._contents = contents
        self._versions = versions
        self._room = room
        self._overflow = overflow
        self._state = upper.state
        self._mirrors = spill.mode is SpillMode.MIRROR
        self._frees_ram = spill.directory.frees_ram
        self.moved = MovedOut()
        self._live: dict[VersionId, Version] = {}
        self._queue = CopyQueue(oldest_first=self._mirrors)
        self._later: list[tuple[float, VersionId]] = []
        """A heap: when to look at them again."""
        self._put_off: dict[Ino, VersionId] = {}
        """Of these the newest of each file: they are looked at when it is closed, too."""
        self._to_share: dict[VersionId, Version] = {}
        """Those of `_doubled` whose file may be closed and unchanged."""
        self._to_leave: dict[VersionId, Version] = {}
        """With a copy, which they do not need to wait for, and in RAM still; only where all are
        copied.
        """
        self._beyond_ram: dict[VersionId, Version] = {}
        """Whose bytes are in a staging file alone: nothing is copied of them, and they survive once
        that is flushed.
        """
        self._looks = False
        self._doubled: dict[VersionId, Version] = {}
        """Those with other bytes than their file's content has: mostly copied at their close, as
        the kernel could have written on.
        """
        self._clock_told = 0.0
        self._clock_asked = ""
        """Token of the journal that is to have all before the clock is told."""
        self._awaited: list[AwaitedCopy] = []
        versions.watch(self)
        if self._frees_ram:
            self._tier.ladder.begins(Rung.SPILL, self._relieve)
        self._owed = self._taken_up()
        """What an earlier place of the copies may have, and the present one lacks."""

    def _taken_up(self) -> set[VersionId]:
        """What the last worker left; of it what has no copy here."""
        for op in self._log:
            if op.version is None:
                continue
            self.new(op.version)
            if op.version.is_local:
                self._look_at(op.version)
        # copies of it may lie elsewhere: the mark on the storage says so
        owed = set(filter(self._lacks_copy, self._live))
        self.spill.directory.lacks = bool(owed)
        return owed

    def begin(self) -> None:
        """Who has files open is known from now on."""
        self._look_soon()

    # -- which versions there are

    def new(self, version: Version) -> None:
        """See `VersionWatcher`.

        Its operation is logged when the step ends, which is when it is looked at.
        """
        if not version.is_local:
            self._beyond_ram[version.vid] = version
            return
        self._live[version.vid] = version
        _node, body = self._content_on(version)
        if body is None:
            self._doubled[version.vid] = version
            self._to_share[version.vid] = version
        self._queue.push(version)
        self._look_soon()

    def closed(self, ino: Ino) -> None:
        """See `VersionWatcher`. What could not leave RAM perhaps can now."""
        version = self._live.get(self._put_off.pop(ino, NO_VERSION))
        if version is not None:
            self._look_at(version)
            self._look_soon()

    def _look_at(self, version: Version) -> None:
        """It may leave RAM, or share it, when there is need next."""
        if version.vid in self._doubled:
            self._to_share[version.vid] = version
        if version.vid in self.spill.copies:
            if self._mirrors and self._frees_ram and version.tier_id:
                self._to_leave[version.vid] = version
        elif version.vid not in self.spill.making:
            self._queue.push(version)

    def _look_later(self, version: Version) -> None:
        """It may not leave RAM now."""
        self._put_off[version.ino] = max(version.vid, self._put_off.get(version.ino, NO_VERSION))
        heapq.heappush(self._later, (self.spill.calls.clock.now() + LATER_S, version.vid))

    def finished(self, version: Version) -> None:
        if self._beyond_ram.pop(version.vid, None) is not None:
            return
        for known in (self._live, self._doubled, self._to_share, self._to_leave):
            known.pop(version.vid, None)
        if self._put_off.get(version.ino) == version.vid:
            del self._put_off[version.ino]
        self.spill.forget(version)
        left = self._versions.on(version.tier_id) if version.tier_id else ()
        if len(left) == 1:  # the last one on a tier file may leave
            self._look_at(left[0])

    def renewed(self, version: Version) -> None:
        """See `VersionWatcher`.

        The kernel wrote to its file: what was copied is not the version any more.
        """
        if version.vid in self._live:
            self.spill.outdate(version)
            self._to_leave.pop(version.vid, None)
            self._look_later(version)

    def unstaged(self, version: Version) -> None:
        """See `VersionWatcher`. As long as it was staged, it needed no copy."""
        if version.vid in self._live:
            self._look_at(version)
            self._look_soon()

    def still_frozen(self, version: Version) -> bool:
        return self._contents.kernel.still_frozen(version)

    def not_copied(self, version: Version) -> None:
        if version.vid in self._live:
            self._look_later(version)
            self._look_soon()

    def _look_soon(self) -> None:
        if self._table.open_files_are_known and not self._looks:
            self._looks = True
            self._state.after_commit(self.look)

    # -- copying

    def look(self) -> None:
        """Begin what is to be done now; called after changes and about once a second."""
        self._looks = False
        if not self._table.open_files_are_known:
            return
        if not self._frees_ram:
            self.spill.usable()  # a holder is looked for before there is something to be held
        for vid in self.spill.take_forgotten():
            if vid in self._live:
                self._owed.add(vid)
                self._queue.push(self._live[vid])
        self._look_what_is_owed()
        if self.spill.mirror is not None:
            self.spill.mirror.look()
            if self._state.unrecorded:
                self._look_soon()  # nobody is told before
            self._tell_clock(self.spill.mirror)
            self._tell_awaited(self.spill.mirror)
        self._due()
        if self._mirrors:
            self._mirror()
        if self._frees_ram and (short := self._short_bytes()) > 0:
            self._shed(short)
        if not self.spill.is_moving():
            self._room.look_again()

    def _look_what_is_owed(self) -> None:
        """Copies that an earlier place had and the present one lacks: no longer those that were
        made again, are not needed, or have a staging file.
        """
        self._owed = {vid for vid in self._owed if self._lacks_copy(vid)}
        self.spill.directory.lacks = bool(self._owed)

    def _lacks_copy(self, vid: VersionId) -> bool:
        version = self._live.get(vid)
        if version is None or vid in self.spill.copies:
            return False
        return not self._is_staged(version)

    def _is_staged(self, version: Version) -> bool:
        """Whether its staging file stands for a copy: who only has what is recorded knows it."""
        return version.is_staged and version.changed <= self._state.recorded_changes

    @property
    def copies_to_members(self) -> bool:
        """Whether copies are at another member."""
        return not self._frees_ram

    def when_copied(self, ino: Ino, seq: Seq | None = None) -> Future[None]:
        """Done when a holder has all that was logged about a node, or up to an operation, with the
        bytes and all that came before; perhaps never. Whoever waits cancels it.
        """
        awaited = AwaitedCopy(ino, seq, Future())
        self._awaited.append(awaited)
        self._look_soon()
        return awaited.future

    def _tell_awaited(self, mirror: Mirror) -> None:
        """Ask the journal that is written now to tell who waits when it has what is copied."""
        self._awaited = [one for one in self._awaited if not one.future.done()]
        if not self._awaited or self._state.unrecorded:
            # what was left out, for instance, is in the journal still, perhaps without its bytes
            return
        until = self.unmirrored().until
        for one in self._awaited:
            op = self._log.last_of(one.ino)
            last = one.seq if one.seq is not None else Seq(0) if op is None else op.seq
            if one.journal != mirror.token and last <= until:
                one.journal = mirror.token
                mirror.when_current(one.arrived)

    def _tell_clock(self, mirror: Mirror) -> None:
        """A holder learns now and then until when it has all: what was closed elsewhere before then
        names nothing of ours that would be lost.

        That is when the first file was closed that has no copy yet; where there is none, now. Once
        the journal has what was logged until now, too.
        """
        now = self.spill.calls.clock.now()
        if self._frees_ram or now < self._clock_told + CLOCK_S:
            return
        # it has not come so far since it was asked last, or cannot have all that memory has
        if self._clock_asked == mirror.token or self._state.unrecorded:
            if now > self._clock_told + ALIVE_S:  # but the session is to stay
                self._clock_told = now
                self.spill.tell_clock(0.0)
            return
        self._clock_asked = mirror.token
        self._clock_told = now
        since = self.unmirrored().since
        until = self._log.clock.now() if since is None else since
        mirror.when_current(lambda: self._told_until(until))

    def _told_until(self, until: float) -> None:
        """In whatever thread."""
        self._clock_asked = ""
        self.spill.tell_clock(until)

    def _due(self) -> None:
        now = self.spill.calls.clock.now()
        while self._later and self._later[0][0] <= now:
            version = self._live.get(heapq.heappop(self._later)[1])
            if version is not None:
                self._look_at(version)

    def _mirror(self) -> None:
        """Oldest first, as the prefix of the log that survives a reboot ends at the first version
        that has no copy.
        """
        put_back: list[VersionId] = []
        while self._queue and len(self.spill.making) < COPY_THREADS:
            vid = self._queue.pop()
            version = self._live.get(vid)
            if version is None or vid in self.spill.copies or self._is_staged(version):
                continue  # a staging file survives as well
            if version.is_staged:  # which will be recorded soon: it is not mirrored before
                put_back.append(vid)
                continue
            op = self._op(version)
            if not self.spill.takes(version.size):
                put_back.append(vid)
                break
            if op is None or op.tentative or vid in self.spill.making:
                put_back.append(vid)
            else:
                self.spill.begin(version, self)
        for vid in put_back:
            self._queue.push(self._live[vid])

    def _short_bytes(self) -> int:
        """How much more is to leave RAM than is on its way already."""
        free_bytes = self._tier.free_bytes()
        short = self._tier.most_bytes() // SHORT_SHARE - free_bytes
        if short <= 0 and not self._tier.waiting():
            return 0
        short = max(short, 1)
        if not self._tier.waiting():
            short -= self._contents.retention.evictable(short)
        return short - sum(making.version.size for making in self.spill.making.values())

    def _shed(self, wanted: int) -> None:
        """Let go what is there twice, and what has a copy; begin to copy for the rest.

        What may not leave now is put off.
        """
        for candidates, give_up in (
            (self._to_share, self._share),
            (self._to_leave, self._leave_ram),
        ):
            while wanted > 0 and candidates:
                version = candidates.pop(next(iter(candidates)))
                freed = give_up(version)
                wanted -= freed
                if not freed:
                    self._look_later(version)
        while (
            wanted > 0
            and not self._mirrors  # which copies all, and frees RAM by what has a copy
            and self._queue
            and len(self.spill.making) < COPY_THREADS
            and self.spill.usable()
        ):
            wanted -= self._begin(self._queue.pop())

    def _begin(self, vid: VersionId) -> int:
        """Copy a version, or put that off; returns how much RAM will come free."""
        version = self._live.get(vid)
        if version is None or vid in self.spill.copies or not version.tier_id:
            return 0
        if (
            vid in self.spill.making
            or version.state in _STAGED
            or not self.spill.takes(version.size)
            or not self._may_leave(version)
        ):
            self._look_later(version)
            return 0
        self.spill.begin(version, self)
        return version.size

    def _relieve(self) -> bool:
        """A writer finds no room: whether something is about to leave for the spill directory, or
        has left.
        """
        if not self._table.open_files_are_known:
            return False
        before = self._tier.used_bytes
        self._due()
        self._shed(max(1, self._short_bytes()))
        return self.spill.is_moving() or self._tier.used_bytes < before

    def unmirrored(self) -> Unmirrored:
        """What of the log would not survive a reboot: from the first version on that has neither
        copy nor staging file.
        """
        waiting = (
            {*self._queue, *self.spill.making, *(vid for _at, vid in self._later)}
            if self._mirrors
            else set()
        )
        versions = [self._live[vid] for vid in waiting if self._lacks_copy(vid)]
        versions += [one for one in self._beyond_ram.values() if not self._is_staged(one)]
        mirror = self.spill.mirror
        if mirror is not None and (until := mirror.counts_until) is not None:
            known = {version.vid for version in versions}
            moved = self.spill.moved  # they have a copy there
            versions = [version for version in versions if version.vid not in moved]
            versions += [
                version
                for version in self._live.values()
                if version.vid not in known
                and not self._is_staged(version)
                and ((op := self._op(version)) is None or op.seq > until)
            ]
        if not versions:
            return Unmirrored(0, 0, self._log.last_seq)
        ops = [op for version in versions if (op := self._op(version)) is not None]
        first = min(ops, key=lambda op: op.seq, default=None)
        return Unmirrored(
            len(versions),
            sum(version.size for version in versions),
            self._log.last_seq if first is None else Seq(first.seq - 1),
            # what stands for something older would take that along
            None if first is None else min([first.logged_at, *self._log.replaced_since()]),
        )

    # -- leaving RAM

    def copied(self, version: Version) -> None:
        if self._mirrors:
            if self._frees_ram:
                self._to_leave[version.vid] = version
                if (short := self._short_bytes()) > 0:
                    self._shed(short)
        elif version.vid in self._live and not self._leave_ram(version):
            self.spill.forget(version)  # opened or changed meanwhile
            self.not_copied(version)
        self._look_soon()

    def _op(self, version: Version) -> Op | None:
        return next((op for op in self._log.pending_of(version.ino) if op.version is version), None)

    def _content_on(self, version: Version) -> tuple[Node | None, Body | None]:
        node = self._table.get(version.ino)
        body = node.body if node is not None else None
        return (
            (node, body)
            if body is not None and not body.is_cold and body.tier == version.tier_id
            else (node, None)
        )

    def _may_leave(self, version: Version) -> bool:
        """Whether nobody has the file open, and its content is what the newest version on the same
        tier file is.
        """
        on = self._versions.on(version.tier_id)
        op = self._op(version)
        if op is None or op.tentative or len(on) != 1:
            return False
        node, body = self._content_on(version)
        if node is None or body is None:
            return True
        return self._is_idle(node, body) and body.is_clean and on[-1].size == node.size

    def _share(self, version: Version) -> int:
        """Let a file's content and its last version, which are equal, have the same bytes; returns
        how many of RAM come free.

        Their bytes are there twice where the kernel could have written on after the close. Not
        before the last descriptor is closed: only then is it known that nobody did.
        """
        node, body = self._content_beside(version)
        if node is None or body is None:
            self._doubled.pop(version.vid, None)
            return 0
        if not (self._is_last(version, node) and self._is_idle(node, body)):
            return 0
        if not version.spilled:
            taken = self._tier.allocated_bytes(version.tier_id)
            self._versions.move(version.tier_id, body.tier)
            return taken
        taken = self._tier.allocated_bytes(body.tier)
        self._move_out(node, body, version)
        self.moved.bytes += taken
        return taken

    def _content_beside(self, version: Version) -> tuple[Node | None, Body | None]:
        """The content of a version's file, where that is in RAM and on another tier file than the
        version.
        """
        node = self._table.get(version.ino)
        body = node.body if node is not None else None
        if body is None or not (body.tier and body.is_whole_in_ram) or body.is_on(version):
            return node, None
        return node, body

    def _is_last(self, version: Version, node: Node) -> bool:
        """Whether the content of the file is what the version is: nothing has changed it since, or
        may have.
        """
        op = self._op(version)
        later = [
            one
            for one in self._log.pending_of(node.ino)
            if one.version is not None and one.version.vid > version.vid
        ]
        return (
            op is not None
            and not (op.tentative or later)
            and not self._versions.on(node.body.tier)
            and not self._tier.is_lost(node.body.tier)
            and node.body.is_clean
            and node.size == version.size
        )

    @staticmethod
    def _is_idle(node: Node, body: Body) -> bool:
        """Whether nobody has the file open, or is at work on its bytes."""
        return not node.handles and body.busy is None and not body.in_flight and body.fd < 0

    def _move_out(self, node: Node, body: Body, version: Version) -> None:
        """The version's copy in the spill directory has the content from now on."""
        source = body.tier
        body.move_out(SpillCopy(version.vid))
        self._contents.retention.order.discard(node.ino)
        self._table.changed(node)
        self._versions.unuse(source)

    def _leave_ram(self, version: Version) -> int:
        """Give up the RAM of a version that has a copy, and of the content that is equal to it;
        returns the bytes that come free.
        """
        if not version.tier_id or not self._may_leave(version):
            return 0
        source = version.tier_id
        node, body = self._content_on(version)
        taken = self._tier.allocated_bytes(source)
        self._versions.spilled(version)
        if node is not None and body is not None:
            self._move_out(node, body, version)
        self.moved.files += 1
        self.moved.bytes += taken
        return max(1, taken)

    # -- coming back

    async def bring_back(self, node: Node) -> None:
        """Have a spilled content in RAM again, to be changed; where RAM has no room, in a staging
        file.

        Raises:
            OSError: EIO: the disk's, or what it has is not what was written.
        """
        body = node.body
        if not body.is_spilled:
            return
        if body.busy is not None:
            await wait(body.busy)
            return
        done = shared()
        body.busy = done
        try:
            await self._bring_back(node, body)
        except OSError as error:
            if node.body is body and body.spilled not in self.spill.copies:
                # persisted meanwhile: the backing directory has it, and whoever wants to change it
                # has it brought up from there
                self._contents.drop(node)
                return
            number = errno.ENOSPC if error.errno == errno.ENOSPC else errno.EIO
            raise OSError(number, os.strerror(number)) from error
        finally:
            body.busy = None
            done.set_result(None)

    async def _bring_back(self, node: Node, body: Body) -> None:
        source = body.spilled
        progress = Progress()
        if not await self._room.reserve(node.size, node, Purpose.BRING_UP):
            moved = await self._overflow.filled(self.spill.filler(source, progress))
            if node.body is body:
                self._contents.adopt_overflow(node, moved)
            else:
                self._overflow.let_go(moved, remove=True)
            return
        size = node.size
        tier_id = self._tier.create()
        try:
            await wait(self.spill.copy_back(source, tier_id, progress))
            self._tier.settle(tier_id)
        except BaseException:
            progress.give_up()
            self._tier.discard(tier_id)
            raise
        finally:
            self._tier.release(size, node.ino)
        if node.body is not body:
            self._tier.remove(tier_id)
            return
        self._versions.use(tier_id)
        body.fetch(tier_id)
        self._table.changed(node)
