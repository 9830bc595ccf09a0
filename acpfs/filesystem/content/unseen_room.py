"""Room for what is written to RAM files without the daemon: one account for each file that somebody
may write so.

What is reserved for a file stands here and nowhere else: when its writers were admitted, when they
were held and got more, and when the file became longer. Counting what the kernel has written moves
bytes from "reserved" to "used"; nobody else can have them in between. Nothing can hold who stores
through a mapping, and where the tmpfs is full a store ends the program (SIGBUS). So of a file that
may be mapped, that much stays reserved as stores into its present length may still need. Knows
nodes and the budget, not handles, lanes or policies. Used under the file system's lock; nothing
here waits.
"""

from __future__ import annotations

import enum
import mmap
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from acpfs.filesystem.nodes import Node
from acpfs.ram.tier import BLOCK_BYTES, Tier
from acpfs.ram.waiting import Applicant
from acpfs.types import Ino


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class Promise(enum.Enum):
    """What the writers of a file were told of room when they got the kernel's lane."""

    NOTHING = "nothing"
    """They are of the daemon's lane, and may store through a mapping beside those of the
    kernel's.
    """
    EXPECTED = "expected"
    """So much as files like it take; who writes more is held."""
    RESERVED = "reserved"
    """All that is expected is kept from everybody else: they are likely to store through a
    mapping.
    """
    UNKNOWN = "unknown"
    """Nobody knows how much they will write, or what an earlier worker promised them."""
    RESTORED = "restored"
    """An earlier worker reserved what was expected, and nobody knows how much that was."""

    @property
    def has_size(self) -> bool:
        """Whether it is known how much its writers were promised."""
        return self is Promise.EXPECTED or self is Promise.RESERVED

    @property
    def is_open(self) -> bool:
        """Whether they may write any amount."""
        return self is Promise.UNKNOWN or self is Promise.RESTORED

    @property
    def covers_stores(self) -> bool:
        """Whether the file gets no length without the room that stores into it need."""
        return self is Promise.RESERVED or self is Promise.RESTORED


@dataclass(frozen=True, slots=True, eq=False)
class Lengthening:
    """A call that makes a file so long, from when there is room for it until the file has that
    length, or will not have it. Calls of one length are two.
    """

    size: int


@dataclass(slots=True, eq=False)
class Account:
    """One file's room."""

    node: Node
    counted_bytes: int
    """What the file took when it was last counted."""
    promise: Promise = Promise.NOTHING
    size: int = 0
    """Bytes that its writers were promised; 0 where that is not known."""
    reserved_bytes: int = 0
    """Kept in the budget for its writers, and not taken by the file yet."""
    claims: dict[Hashable, bool] = field(default_factory=dict)
    """Who may write the file unseen → whether also through a mapping."""
    paid_by_us: bool = False
    """Whether the daemon may take their pages: nobody else pays for them."""
    stopped: bool = False
    """Its writers are held: they cannot go on."""
    is_mapped: bool = False
    """The kernel has told that the file may have been mapped."""
    is_beyond: bool = False
    """More was written than was reserved, since something was reserved last."""
    allocated_to: int = 0
    """So far its users have allocated pages without lengthening the file (fallocate), also with an
    earlier worker.
    """
    growing: Future[None] | None = None
    """Somebody waits for room to make the file longer."""
    lengthening: list[Lengthening] = field(default_factory=list)
    """Who has that room, and not yet the length: nobody else's look at the present one takes it."""

    @property
    def may_store(self) -> bool:
        """Whether any of its writers can map the file."""
        return any(self.claims.values())

    @property
    def keeps_room(self) -> bool:
        """Whether room for stores is reserved: where a mapping was expected, or is there."""
        return (self.promise.covers_stores or self.is_mapped) and self.may_store

    @property
    def promised_bytes(self) -> int:
        """What its writers may take: room is kept for more where the file became longer."""
        return max(self.size, self.node.size) if self.promise is Promise.RESERVED else self.size

    def needed_bytes(self, size: int | None = None) -> int:
        """What stores into a length, the present one by default, and into each that is under way,
        may still need: pages that are not there.
        """
        if not self.keeps_room or self.node.body.is_cold:
            return 0
        size = self.node.size if size is None else size
        pages = _whole_pages(max(size, *(one.size for one in self.lengthening), 0))
        # Where they are is not known, as to ask takes the inode lock: those behind the end, which
        # are there only by fallocate, are not in the length.
        behind = min(self.counted_bytes, max(self.allocated_to - pages, 0))
        return pages - min(self.counted_bytes - behind, pages)

    @property
    def spare_bytes(self) -> int:
        """Reserved beyond what stores may need: its writers may write so much."""
        return max(0, self.reserved_bytes - self.needed_bytes())


class UnseenRoom:
    """The accounts."""

    def __init__(self, tier: Tier, applicant: Callable[[Node], Applicant]) -> None:
        """`applicant`: a file's writers, as the queue for room knows them."""
        self._tier = tier
        self._applicant = applicant
        self._accounts: dict[Ino, Account] = {}

    def __iter__(self) -> Iterator[Account]:
        return iter(list(self._accounts.values()))

    def find(self, node: Node) -> Account | None:
        """The account of a file that somebody may write unseen."""
        return self._accounts.get(node.ino)

    def open(self, node: Node, claim: Hashable, *, may_map: bool) -> Account:
        """Somebody is about to write the file unseen, until `close`; asked twice it is the same."""
        account = self._accounts.get(node.ino)
        if account is None:
            account = Account(node, node.blocks * BLOCK_BYTES)
            self._accounts[node.ino] = account
        account.claims[claim] = may_map
        return account

    def close(self, node: Node, claim: Hashable) -> None:
        """That one does so no more, or never did; what is reserved goes with the last one."""
        account = self._accounts.get(node.ino)
        if account is None or account.claims.pop(claim, None) is None:
            return
        if not account.claims:
            del self._accounts[node.ino]
            self._give(account, account.reserved_bytes)
        else:
            self.trim(node)

    def reserved_bytes(self, node: Node) -> int:
        """What is reserved for a file, and was not written when it was last looked at."""
        account = self._accounts.get(node.ino)
        return 0 if account is None else account.reserved_bytes

    def is_provided(self, node: Node) -> bool:
        """Whether its writers may go on, however little room is left: what they are about to write
        is reserved. Also where that is for stores alone, as long as nothing else was seen to be
        written.
        """
        account = self._accounts.get(node.ino)
        if account is None:
            return False
        return account.spare_bytes > 0 or (account.reserved_bytes > 0 and not account.is_beyond)

    def add(self, node: Node, size: int) -> None:
        """So many bytes, which the budget has reserved already, are the file's; where nobody writes
        it any more they go back.
        """
        account = self._accounts.get(node.ino)
        if account is None:
            self._tier.release(size, node.ino)
            return
        account.reserved_bytes += size
        account.is_beyond = False

    def count(self, node: Node, *, is_mapped: bool) -> None:
        """The file was looked at: what it has taken of its room is not reserved any more.

        `is_mapped`: the kernel tells that it may have been mapped.
        """
        account = self._accounts.get(node.ino)
        if account is None:
            return
        account.is_mapped |= is_mapped
        taken = node.blocks * BLOCK_BYTES
        grown = taken - account.counted_bytes
        account.counted_bytes = taken
        if grown > 0:
            self._count_written(account, grown)
        missing = account.needed_bytes() - account.reserved_bytes
        if missing <= 0:
            return
        # What a hole has freed is taken before anybody else can have it.
        freed = min(missing, max(0, -grown))
        if freed:
            self._tier.keep(freed, self._applicant(node))
        account.reserved_bytes += freed
        # It became longer unseen (a write(2) far behind its end), or was mapped unexpectedly.
        self.provide(account)

    def _count_written(self, account: Account, grown: int) -> None:
        """What was written behind the end has not used up what stores within it may need."""
        kept = min(account.reserved_bytes, account.needed_bytes())
        used = min(grown, account.reserved_bytes - kept)
        account.reserved_bytes -= used
        account.is_beyond |= grown > used
        self._tier.settled(used, account.node.ino)
        self._tier.had(self._applicant(account.node), grown - used)

    def provide(self, account: Account, size: int | None = None) -> bool:
        """Reserve what stores into a length may need, as far as all of it is free; whether they
        have it.
        """
        missing = account.needed_bytes(size) - account.reserved_bytes
        if missing > 0:
            if not self._tier.take_for_stores(missing, self._applicant(account.node)):
                return False
            account.reserved_bytes += missing
        return True

    def restore(self, account: Account) -> None:
        """Reserve what an earlier worker had reserved for stores into the present length, also
        beyond the budget: those who go on do not ask again.

        Others may have been let beyond it meanwhile, or it is smaller now; the tmpfs has the space.
        """
        if not self.provide(account):
            missing = account.needed_bytes() - account.reserved_bytes
            if self._tier.reserve_slack(missing, self._applicant(account.node), 0):
                account.reserved_bytes += missing

    def own_bytes(self, node: Node, offset: int, length: int, size: int) -> int:
        """Of a range that the daemon is about to write or allocate: so much is reserved for the
        file, and need not be asked for again.

        `size`: how long the file is then. What stores elsewhere may need is left alone.
        """
        account = self._accounts.get(node.ino)
        if account is None or not account.reserved_bytes:
            return 0
        within = max(0, min(offset + length, size) - offset)
        spare = max(0, account.reserved_bytes - account.needed_bytes(size))
        return min(account.reserved_bytes, length, within + spare)

    def hole_bytes(self, node: Node, offset: int) -> int:
        """Of a file that the daemon is about to write at `offset`: what stores into the hole that
        this leaves behind the present end may need, and the file has not yet.
        """
        account = self._accounts.get(node.ino)
        if account is None or offset <= node.size or not account.promise.covers_stores:
            return 0
        return max(0, account.needed_bytes(offset) - account.reserved_bytes)

    def lengthens(self, node: Node, length: Lengthening, size: int = 0) -> None:
        """The file is about to become so long; `size` bytes, which the budget has reserved already,
        are for that. `resized` follows, whatever becomes of it.
        """
        self.add(node, size)
        account = self._accounts.get(node.ino)
        if account is not None:
            account.lengthening.append(length)

    def resized(self, node: Node, length: Lengthening) -> None:
        """The file has that length now, or will not have it: what it does not need goes back."""
        account = self._accounts.get(node.ino)
        if account is not None and length in account.lengthening:
            account.lengthening.remove(length)
        self.trim(node)

    def allocates(self, node: Node, end: int) -> None:
        """Pages up to there are about to be allocated, which does not make the file longer."""
        account = self._accounts.get(node.ino)
        if account is not None:
            account.allocated_to = max(account.allocated_to, _whole_pages(end))

    def cut(self, node: Node, size: int) -> None:
        """The file was made so long, which is shorter: there are no pages behind that any more."""
        account = self._accounts.get(node.ino)
        if account is not None:
            account.allocated_to = min(account.allocated_to, _whole_pages(size))

    def trim(self, node: Node) -> None:
        """The file may be shorter now, or did not become longer after all: what was reserved for
        that, beyond what was promised, goes.
        """
        account = self._accounts.get(node.ino)
        if account is None or not account.promise.covers_stores:
            return
        promised = account.size - account.counted_bytes if account.promise.has_size else 0
        self._give(account, account.reserved_bytes - max(account.needed_bytes(), promised))

    def _give(self, account: Account, size: int) -> None:
        if size > 0:
            account.reserved_bytes -= size
            self._tier.release(size, account.node.ino)
