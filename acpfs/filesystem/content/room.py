"""Room in the RAM tier for a call that is about to write: reserved, waited for, or refused, as the
policy for a full tier says.

Does not know contents; how room is made and in which order is the business of the tier's ladder
(`ram.ladder`), whose turn it is that of its queue. Used under the file system's lock; `reserve`
waits as described in `steps`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from acpfs.config import WhenFull
from acpfs.filesystem.content.outlook import DrainOutlook
from acpfs.filesystem.content.unseen_room import UnseenRoom
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.records import WaitingWriter
from acpfs.filesystem.steps import wait
from acpfs.ram.shares import OwnerReport
from acpfs.ram.tier import BLOCK_BYTES, HUGE_PAGE_BYTES, Tier
from acpfs.ram.waiting import NO_OWNER, Applicant, Purpose, Waiting
from acpfs.types import Ino


class Room:
    """Bytes of the budget for calls that write."""

    def __init__(
        self,
        tier: Tier,
        when_full: WhenFull,
        outlook: DrainOutlook,
        is_urgent: Callable[[Node], bool] = lambda _node: False,
    ) -> None:
        """`outlook`: what comes by itself. `is_urgent`: of `UrgentFiles`."""
        self._tier = tier
        self.is_urgent = is_urgent
        self.when_full = when_full
        self.outlook = outlook
        self.unseen = UnseenRoom(tier, lambda node: self.applicant(node, Purpose.RELEASE))
        self._sure_for = 0
        """So many versions may be persisted before it has to be looked again whether somebody waits
        in vain.
        """

    async def reserve(self, size: int, node: Node, purpose: Purpose = Purpose.WRITE) -> bool:
        """Reserve bytes of the budget, waiting for them where that can help; the caller releases
        them after settling.

        False: there will be no room, the file has to overflow to the backing directory.

        Raises:
            OSError: ENOSPC when that is the policy.
        """
        applicant = self.applicant(node, purpose)
        if self._tier.reserve_nowait(size, applicant):
            return True
        helps = self.waiting_helps(size, applicant)
        if helps and await self._wait(self._tier.reserve(size, applicant), size, applicant.ino):
            return True
        if self.when_full is WhenFull.ERROR:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return False

    def at_once(self, size: int, node: Node) -> bool:
        """`reserve` of what is free: nothing else happens to any file."""
        return self._tier.take_free(size, self.applicant(node, Purpose.WRITE))

    def applicant(self, node: Node, purpose: Purpose) -> Applicant:
        """Somebody who writes to a file, as the queue knows it."""
        tier = self._tier
        limited = tier.shares.limit_bytes > 0
        covered = not limited or tier.shares.is_charged(node.body.tier)
        return Applicant(
            node.ino,
            purpose,
            node.writer_pid,
            self.is_urgent(node),
            node.uid if limited else NO_OWNER,
            0 if covered else tier.allocated_bytes(node.body.tier),
        )

    def is_covered(self, node: Node) -> bool:
        """Whether all that RAM has of the file is in its owner's share, or there are no shares."""
        tier_id = node.body.tier
        return not tier_id or self._tier.shares.is_charged(tier_id)

    async def _wait(self, room: Future[None], size: int, ino: Ino) -> bool:
        """Whether there is room at last."""
        try:
            await wait(room)
        except BaseException as error:
            if not room.cancel() and room.exception() is None:
                self._tier.release(size, ino)  # it came, and whom it was for is gone
            self._tier.room_changed()
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                return False
            raise
        return True

    def waiting_helps(self, size: int, applicant: Applicant) -> bool:
        """Whether so much is about to come by itself: from what moves to the spill directory, or,
        where that is the policy, the drain.
        """
        short = self._tier.shares.short_by(size, applicant)
        if short <= 0 and self._tier.ladder.is_coming():
            return True
        if self.when_full is not WhenFull.WAIT:
            return False
        missing = self._missing(size, urgent=applicant.urgent)
        return (
            self._comes(missing) and (short <= 0 or self._comes(short, applicant.uid))
        ) or self._ends_without(applicant)

    def _comes(self, missing: int, uid: int = NO_OWNER) -> bool:
        """Whether the drain frees so much, of the files of one owner where one is named."""
        return missing <= 0 or self.outlook.coming(missing, uid).size >= missing

    def _ends_without(self, applicant: Applicant) -> bool:
        """Whether the room will not be needed any more: when the version is persisted that is to be
        copied aside.
        """
        return applicant.purpose is Purpose.COPY_ASIDE and self.outlook.persists(applicant.ino)

    def _missing(self, size: int, *, urgent: bool) -> int:
        """Nothing or less: whoever wants so much waits for its turn alone, and those before it get
        theirs or go.
        """
        return size - self._tier.free_bytes(urgent=urgent) if size else 0

    def change_policy(self, when_full: WhenFull) -> None:
        """From now on, also for those who wait already."""
        self.when_full = when_full
        self.look_again()

    def drained(self) -> None:
        """A version is persisted: what it made room for is free, and the last of them may have been
        what somebody waited for.

        What was found coming turns into what is free. So nobody waits in vain before half of the
        files are persisted that it was found in: to count them again for each of thousands would be
        dear.
        """
        if self._tier.shares.limit_bytes and self._tier.has_waiting():
            self._tier.room_changed()  # an owner's share has room, though RAM may have no more
        if self._sure_for:
            self._sure_for -= 1
        else:
            self.look_again()

    def look_again(self) -> None:
        """Who of those that wait does so in vain: they go the other way."""
        self._sure_for = 0
        queue = self._tier.queue()
        if not queue:
            return
        if self._tier.shares.limit_bytes:
            self._tier.room_changed()
        if not self._tier.ladder.is_coming():
            self._tier.fail_waiting(errno.ENOSPC, self._in_vain(self._tier.queue()))
            return
        # where a share is short, the spill directory is not waited for (`waiting_helps`)
        short = [one for one in self._tier.queue() if self._short(one) > 0]
        self._tier.fail_waiting(errno.ENOSPC, self._in_vain(short))

    def _short(self, one: Waiting) -> int:
        return self._tier.shares.short_by(one.size, one.applicant)

    def _in_vain(self, queue: Sequence[Waiting]) -> list[Waiting]:
        if self.when_full is not WhenFull.WAIT:
            return list(queue)
        missing = [(self._missing(one.size, urgent=one.urgent), one) for one in queue]
        coming = self.outlook.coming(max((short for short, _one in missing), default=0))
        self._sure_for = coming.files // 2
        most: dict[int, int] = {}
        """Owner → what is short of his share, for the one of his files that wants most."""
        for one in queue:
            if self._short(one) > 0:
                most[one.applicant.uid] = max(most.get(one.applicant.uid, 0), self._short(one))
        of_owners = {uid: self.outlook.coming(short, uid) for uid, short in most.items()}
        for found in of_owners.values():
            self._sure_for = min(self._sure_for, found.files // 2)
        return [
            one
            for short, one in missing
            if not self._ends_without(one.applicant)
            and (
                short > coming.size
                or (self._short(one) > 0 and self._short(one) > of_owners[one.applicant.uid].size)
            )
        ]

    def reason(self, short: int = 0, uid: int = NO_OWNER) -> str:
        """Why there is none.

        `short`: so much the owner's share is too small, if it is.
        """
        tier = self._tier
        if short > 0:
            shares = tier.shares
            return (
                f"user {uid} has {_mib(shares.limit_bytes - shares.left_bytes(uid))} of RAM, and "
                f"his share is {_mib(shares.limit_bytes)} (ram_per_user): {_mib(short)} too much"
            )
        if tier.withheld_bytes:
            return "the machine is short of memory"
        if tier.used_bytes > tier.budget_bytes:
            return "RAM holds more than its budget, which was lowered"
        if tier.urgent_bytes and tier.free_bytes(urgent=True) > 0:
            return "RAM is full but for the reserve, which is for urgent files"
        if self.outlook.is_storage_full():
            return "RAM is full, and the backing directory has no room for what would leave it"
        return "RAM is full"

    def owners(self) -> tuple[OwnerReport, ...]:
        """What each owner's files take of RAM; nobody where there are no shares."""
        queue = self._tier.queue()
        return self._tier.shares.report(one.applicant for one in queue if self._short(one) > 0)

    def statistics(self, path: Callable[[Ino], bytes]) -> tuple[WaitingWriter, ...]:
        """Who waits, in the order of their turns."""
        return tuple(
            WaitingWriter(
                one.applicant.ino,
                path(one.applicant.ino),
                one.applicant.pid,
                one.applicant.purpose.value,
                one.size,
                one.since,
                self.reason(self._short(one), one.applicant.uid),
            )
            for one in self._tier.queue()
        )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def pages_wanted(node: Node, offset: int, size: int) -> int:
    """Bytes of RAM that a write may take.

    In a hole the kernel fills whole huge pages, however little is written.
    """
    if offset + size > node.size:
        return size
    if node.blocks * BLOCK_BYTES >= node.size:
        return 0
    start = offset // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    end = -(-(offset + size) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return min(end, node.size) - start
