"""Which files may be written in the passthrough lane: those for which there is room, because
holding a writer back there is hard.

Room is asked for by the size that is expected, with a margin, beside what others that write in this
lane are still to need; and the pages are charged to the writer's memory control group, so that one
must be able to pay (`payers`). A file of which no size is known, but that is likely to be large, is
admitted while RAM is plentiful, and its writer is held if it is not any more. RAM is plentiful
while a quarter of the budget is left, and of the machine's memory as much, beside all that writers
in that lane could take before they are held: what was promised, and a *reach* for each whose size
is not known. The reach is what one of them may write between the look that finds RAM short and the
moment when its inode lock is had. Who is not admitted takes the daemon's lane, which can wait for
room and overflow. Used under the file system's lock.
"""

from __future__ import annotations

import enum
import errno
import os
from dataclasses import dataclass

from acpfs.config import WhenFull
from acpfs.filesystem.content.retention import Retention
from acpfs.filesystem.content.room import Room
from acpfs.filesystem.content.unseen_room import Account, Lengthening, Promise
from acpfs.filesystem.earlier_saves import EarlierSaves
from acpfs.filesystem.expectations import (
    UNBOUNDED_BYTES,
    WORTH_LEARNING_BYTES,
    Expectations,
    Use,
    pattern_of,
)
from acpfs.filesystem.kept_handles import Handle
from acpfs.filesystem.likely_sizes import LikelySizes
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.payers import Payers
from acpfs.filesystem.records import Lane
from acpfs.filesystem.steps import shared, wait
from acpfs.filesystem.upper import UpperLayer
from acpfs.ram.shortage import Shortage
from acpfs.ram.tier import BLOCK_BYTES
from acpfs.ram.waiting import Purpose

MARGIN = 1.25
"""Checkpoints of one job differ by a few percent (optimizer state that is made lazily, logs that
grow).
"""
MARGIN_BYTES = 16 << 20
UNSURE_MAX = 1000
UNKNOWN_MAX = 256
"""Of files that are written at a time: each may take a thread to hold it."""
REACH_BYTES_MAX = 256 << 20
REACH_SHARE = 16
"""At 8 GB/s, 30 ms of writing; and a sixteenth of a small budget."""
LOOK_SHARE = 8
"""Of a reach: it is looked every 2 ms when little room is left, and a lock may take 30."""
PLENTY_SHARE = 4
MAPPED_SHARE = 2
"""Of RAM, one that is opened to read and write is expected to take a half at most, and so are all
together that are likely to be mapped.
"""
READ_BACK_SHARE = 8
"""Of RAM, one that is likely to be mapped is expected to take so little."""


class Net(enum.Enum):
    """What becomes of a writer that nobody expected to write so much, when RAM is full."""

    NONE = "none"
    """It meets the end of the tmpfs: there is nobody to hold it, or a lock is not sure to be had in
    turn.
    """
    HOLDS = "holds"
    """It is held in time."""


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """What is known of how much a file will take."""

    expectations: Expectations
    likely: LikelySizes
    earlier: EarlierSaves
    unknown_bytes: int | None = None
    """What to expect of a file like which none was seen; None: `likely` says, and whether RAM is
    plentiful.
    """


class Admission:
    """Promises room to writers that the daemon cannot stop."""

    def __init__(
        self,
        upper: UpperLayer,
        room: Room,
        retention: Retention,
        shortage: Shortage,
        payers: Payers,
        sizes: KnownSizes,
    ) -> None:
        self._table = upper.table
        self._tier = upper.tier
        self._room = room
        self._retention = retention
        self._shortage = shortage
        self._expectations = sizes.expectations
        self._payers = payers
        self._likely = sizes.likely
        self._earlier = sizes.earlier
        self._unknown_bytes = sizes.unknown_bytes
        self._unseen = room.unseen
        self._unsure: dict[bytes, None] = {}
        """Patterns of files the last of which took much less than was expected: sparse, or
        shorter.
        """
        self.net = Net.NONE

    # -- asking

    def refuse(self, handle: Handle) -> str:
        """Why not, or "": then the room is promised until `left`.

        What others who write the file were promised stays.
        """
        node = handle.node
        if self._tier.calls.is_crowded() and not node.kernel_writers:
            return "the writers of many files stand still"
        path = self._table.path(node.ino)
        if handle.may_map and (reason := self._refuse_to_map(path)):
            return reason
        expected = self._expectations.expect(path)
        if (
            expected is None
            and handle.flags & os.O_TRUNC
            and handle.former_bytes >= WORTH_LEARNING_BYTES
        ):
            expected = handle.former_bytes
        if expected is None:
            expected = self._unknown_bytes
        if expected is None:
            return self._refuse_unknown(handle, path)
        wanted = int(expected * MARGIN) + MARGIN_BYTES
        if refusal := self._refuse_for_share(node, wanted):
            return refusal
        urgent = self._room.is_urgent(node)
        most = self._tier.most_bytes(urgent=urgent)
        # What may be read cannot leave RAM before it is closed (`outgrown`).
        if wanted > (most // MAPPED_SHARE if handle.may_map else most):
            return "larger than RAM" if wanted > most else "read and written, and half of RAM"
        if handle.may_map and self._expectations.use_of(path) is Use.READ_BACK:
            return self._refuse_to_store(handle, wanted, most)
        missing = wanted - self.unpromised(urgent=urgent)
        if missing > 0:
            self._tier.ladder.make_room(missing)
        if wanted > self.unpromised(urgent=urgent) or self._tier.waiting(urgent=urgent):
            return "RAM is short"
        refusal = self._payers.refuse(node, handle.pid, wanted, self.outstanding_of)
        if not refusal:
            self._admit(handle, Promise.EXPECTED, wanted)
        return refusal

    def _refuse_for_share(self, node: Node, wanted: int) -> str:
        """Why there is no room for all of a file in its owner's share, or ""."""
        shares = self._tier.shares
        if not shares.limit_bytes:
            return ""
        if wanted > shares.limit_bytes:
            return "larger than its owner's share of RAM"
        tier_id = node.body.tier
        charged = self._tier.allocated_bytes(tier_id) if shares.is_charged(tier_id) else 0
        promised = self.outstanding_of(node)
        if max(0, wanted - charged) > self.unpromised_of(node.uid) + promised:
            return "its owner's share of RAM is used up"
        return ""

    def unpromised_of(self, uid: int) -> int:
        """What an owner's share has left, beside what was promised to writers of his files."""
        outstanding = sum(
            self._outstanding(account)
            for account in self._unseen
            if account.node.uid == uid
            and account.node.kernel_writers
            and account.promise is not Promise.RESERVED
        )
        return self._tier.shares.left_bytes(uid) - outstanding

    def _admit(self, handle: Handle, promise: Promise, size: int = 0) -> None:
        """It may write the file unseen. Who comes later lifts no room that is kept for stores."""
        account = self._unseen.open(handle.node, handle, may_map=handle.may_map)
        account.paid_by_us = self._payers.pays_as_we_do
        handle.is_unexpected_to_map = handle.may_map and not promise.covers_stores
        self._promise(account, promise, size)

    @staticmethod
    def _promise(account: Account, promise: Promise, size: int = 0) -> None:
        if promise.covers_stores or not (account.promise.covers_stores and account.may_store):
            account.size = max(size, account.size) if promise is account.promise else size
            account.promise = promise

    def _refuse_to_map(self, path: bytes) -> str:
        """Why a file that may be mapped to write may not have the lane; "": nothing so far.

        Its writers are held like others, but nothing holds who stores through a mapping. So one
        that is likely to do so takes the daemon's lane, and one of which no size is known.
        """
        if self._expectations.use_of(path) is Use.OTHER:
            return "read and written: no earlier file like it was written at once"
        if self._expectations.expect(path) is None:
            return "its size is not known from an earlier file"
        return "" if self._tier.tells_of_mappings() else "the kernel does not tell of mappings here"

    def _refuse_to_store(self, handle: Handle, wanted: int, most: int) -> str:
        """Why a file that is likely to be mapped may not have the lane, or "".

        Nothing can hold who stores through a mapping, and where the tmpfs is full, a store ends the
        program (SIGBUS). So all that is promised to him is reserved: nobody else gets it.
        """
        if self.net is Net.NONE:
            return "mapped or read back, and other writers cannot be held"
        node = handle.node
        others = sum(
            account.promised_bytes
            for account in self._unseen
            if account.promise is Promise.RESERVED and account.node is not node
        )
        if wanted > most // READ_BACK_SHARE or others + wanted > most // MAPPED_SHARE:
            return "mapped or read back, and too much of RAM"
        refusal = self._payers.refuse(node, handle.pid, wanted, self.outstanding_of)
        if refusal:
            return refusal
        # some of it may be reserved already: its lane was chosen before, or another one opens it
        more = max(0, wanted - self._unseen.reserved_bytes(node))
        applicant = self._room.applicant(node, Purpose.WRITE)
        missing = more - self.unpromised(urgent=applicant.urgent)
        if missing > 0:
            self._tier.ladder.make_room(missing)
        if missing > 0 and more > self.unpromised(urgent=applicant.urgent):
            return "RAM is short"
        if not self._tier.take_free(more, applicant):
            return "RAM is short"
        self._admit(handle, Promise.RESERVED, wanted)
        self._unseen.add(node, more)
        return ""

    def _refuse_unknown(self, handle: Handle, path: bytes) -> str:
        """A writer that appends is one of a log, and one of a file that was small goes on as it
        began: the daemon sees what they write.
        """
        if (
            handle.former_bytes >= 0
            or handle.flags & os.O_APPEND
            or not self._likely.may_be_large(path)
        ):
            return "its size is not known from an earlier file"
        for parent, name in handle.node.names[:1]:
            self._earlier.made(self._table[parent], name)
        if (
            self.net is Net.NONE or self._room.when_full is WhenFull.ERROR
        ):  # where writes are to fail, nobody would hold them
            return "its size is not known from an earlier file"
        shares = self._tier.shares
        if (
            shares.limit_bytes
            and self.unpromised_of(handle.node.uid)
            < shares.limit_bytes // PLENTY_SHARE + self._reach_bytes()
        ):
            return "its size is not known, and its owner's share of RAM is not plentiful"
        if sum(
            account.promise.is_open for account in self._unseen
        ) >= UNKNOWN_MAX or not self._is_plenty(0):
            return "its size is not known, and RAM is not plentiful"
        # The hold looks at RAM, not at who pays for it: who may take all of it must be able to pay
        # for all.
        refusal = self._payers.refuse(
            handle.node, handle.pid, self._tier.budget_bytes, self.outstanding_of
        )
        if not refusal:
            self._admit(handle, Promise.UNKNOWN)
        return refusal

    def _is_plenty(self, more: int) -> bool:
        """Whether RAM is plentiful, also when somebody takes so much more."""
        if self._tier.waiting():
            return False
        self.watch_memory()
        missing = (
            more + self._reach_bytes() + self._tier.budget_bytes // PLENTY_SHARE - self.unpromised()
        )
        return missing <= 0 or self._retention.evictable(missing) >= missing

    def watch_memory(self) -> None:
        """Withhold the part of the budget that the machine has not got now."""
        before = self._tier.withheld_bytes
        self._tier.withheld_bytes = self._shortage.withheld_bytes(
            self._tier.free_bytes(urgent=True) + before
        )
        if self._tier.withheld_bytes < before:
            self._tier.room_changed()

    # -- what was promised

    def unpromised(self, *, urgent: bool = False) -> int:
        """Room beside what was promised and is not written yet, and what those may still take of
        whom nothing is known.
        """
        outstanding = sum(
            self._outstanding(account)
            for account in self._unseen
            if account.node.kernel_writers and account.promise is not Promise.RESERVED
        )
        return self._tier.free_bytes(urgent=urgent) - outstanding

    def _outstanding(self, account: Account) -> int:
        if account.promise.is_open:
            # held, or given room of their own
            is_covered = account.stopped or account.reserved_bytes > 0
            return 0 if is_covered else self._reach_bytes()
        # what the file takes already counts also beyond its end (`pages_ahead`)
        node = account.node
        ahead = self._tier.allocated_bytes(node.body.tier) if not node.body.is_cold else 0
        return max(0, account.promised_bytes - max(node.blocks * BLOCK_BYTES, ahead))

    def outstanding_of(self, node: Node) -> int:
        """What was promised to the writers of a file and not written yet."""
        account = self._unseen.find(node)
        return 0 if account is None or account.promise.is_open else self._outstanding(account)

    def _reach_bytes(self) -> int:
        limits = (self._tier.budget_bytes, self._tier.shares.limit_bytes)
        return min(REACH_BYTES_MAX, min(filter(None, limits)) // REACH_SHARE)

    def look_bytes(self) -> int:
        """What writers of unknown size write before it is looked again; 0: none of them goes on."""
        goes_on = any(
            account.promise.is_open and self._outstanding(account) and account.node.kernel_writers
            for account in self._unseen
        )
        return self._reach_bytes() // LOOK_SHARE if goes_on else 0

    def sure_bytes(self, handle: Handle) -> int:
        """How much of what was promised to a writer may be taken at its open: all that is expected,
        or nothing.
        """
        account = self._unseen.find(handle.node)
        if account is None or not account.paid_by_us or account.promise is not Promise.EXPECTED:
            # Of what is reserved, too: its pages would count beside that. Such a file has large
            # ones without it: its length is set before it is mapped (`huge=within_size`).
            return 0
        if pattern_of(self._table.path(handle.node.ino)) in self._unsure:
            return 0
        expected = int((account.size - MARGIN_BYTES) / MARGIN)
        return expected if self._is_plenty(expected) else 0

    def unsure(self, node: Node) -> None:
        """Much of what was taken for a file like this was not needed: the next one takes what it
        writes.
        """
        self._unsure[pattern_of(self._table.path(node.ino))] = None
        if len(self._unsure) > UNSURE_MAX:
            del self._unsure[next(iter(self._unsure))]

    # -- what became of it

    async def grow(self, node: Node, length: Lengthening) -> None:
        """Reserve what may be stored into a file that is about to become so long, until `trim`;
        waits as a write does. The file was looked at in this step.

        Where no mapping was expected, and yet there may be one, it takes what is there.

        Raises:
            OSError: ENOSPC: there will be no room. Files like this one are not admitted any more.
        """
        size = length.size
        account = self._unseen.find(node)
        while account is not None and account.needed_bytes(size) > account.reserved_bytes:
            if not account.promise.covers_stores:
                self._make_room(account, size)
                return
            if account.growing is not None:
                await wait(account.growing)  # it may be enough for this one, too
            else:
                await self._wait_for_more(account, size)
            account = self._unseen.find(node)
        self._unseen.lengthens(node, length)

    async def _wait_for_more(self, account: Account, size: int) -> None:
        node = account.node
        missing = account.needed_bytes(size) - account.reserved_bytes
        done = shared()
        account.growing = done
        try:
            has_room = await self._room.reserve(missing, node)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            has_room = False
        finally:
            account.growing = None
            done.set_result(None)
        if not has_room:
            self.never(self._table.path(node.ino))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._unseen.add(node, missing)

    def provide(self) -> None:
        """See that there is room for stores into files that became longer unseen, or were mapped
        unexpectedly: what may leave does.
        """
        for account in self._unseen:
            if account.needed_bytes() > account.reserved_bytes:
                self._make_room(account, account.node.size)

    def _make_room(self, account: Account, size: int) -> None:
        if not self._unseen.provide(account, size):
            missing = account.needed_bytes(size) - account.reserved_bytes
            urgent = self._room.is_urgent(account.node)
            self._tier.ladder.make_room(missing - self._tier.free_bytes(urgent=urgent))
            self._unseen.provide(account, size)

    def restored(self, handle: Handle) -> None:
        """A file was admitted by an earlier worker, and what was promised is not known any more.

        What one can store into that may map it is reserved again.
        """
        account = self._unseen.open(handle.node, handle, may_map=handle.may_map)
        if handle.may_map:
            self._unseen.allocates(handle.node, self._end_of_pages(handle.node))
        if handle.lane is not Lane.PASSTHROUGH:
            account.is_mapped = True  # its mapping leaves no trace
        elif handle.may_map and not handle.is_unexpected_to_map:
            self._promise(account, Promise.RESTORED)
            self._unseen.restore(account)  # before others, who had nothing of their own
        else:
            self._promise(account, Promise.UNKNOWN)

    def _end_of_pages(self, node: Node) -> int:
        is_there = node.body.is_whole_in_ram and not self._tier.is_lost(node.body.tier)
        return self._tier.end_of_pages(node.body.tier) if is_there else 0

    def beside(self, handle: Handle) -> None:
        """One of the daemon's lane may store through a mapping beside those of the kernel's."""
        account = self._unseen.open(handle.node, handle, may_map=True)
        account.is_mapped = True  # its mapping leaves no trace
        self._unseen.provide(account)

    def trim(self, node: Node, length: Lengthening | None) -> None:
        """Give back what a file does not need that did not become as long as it was to be, or
        became shorter.
        """
        if length is None:
            self._unseen.trim(node)
        else:
            self._unseen.resized(node, length)

    def stop(self, node: Node, *, stopped: bool) -> None:
        """Whether its writers are held, and cannot write unseen."""
        account = self._unseen.find(node)
        if account is not None:
            account.stopped = stopped

    def left(self, handle: Handle) -> None:
        """It does not write the file unseen any more, or has not got the lane."""
        self._unseen.close(handle.node, handle)

    def never(self, path: bytes) -> None:
        """Files like this one cannot be written in this lane."""
        self._expectations.learn(path, UNBOUNDED_BYTES)

    def learn_use(self, handle: Handle, use: Use) -> None:
        """What became of a file that was opened to read and write, under the name that it had
        then.
        """
        size = handle.node.size
        if size >= WORTH_LEARNING_BYTES or use is not Use.ONLY_WRITTEN:
            self._expectations.learn(handle.begun_as, size)
            self._expectations.learn_use(handle.begun_as, use)

    def learn(self, node: Node) -> None:
        """The file is complete."""
        account = self._unseen.find(node)
        if node.size >= WORTH_LEARNING_BYTES or (account is not None and account.promise.is_open):
            path = self._table.path(node.ino)
            self._expectations.learn(path, node.size)
            self._likely.learn(path, node.size)
