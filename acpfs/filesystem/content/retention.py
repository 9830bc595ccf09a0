"""Which contents may leave the RAM tier, and letting them go.

Decides whether a content may leave: clean, closed, equal to what the backing directory has;
`leaving` says in which order. Does not know how a content is made, changed or let go of
(`Contents.drop`), nor who asks for room. Used under the file system's lock; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from acpfs.filesystem.content.eviction_order import Claim, EvictionOrder
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.ram.ladder import Rung
from acpfs.ram.tier import Tier
from acpfs.types import Ino
from acpfs.writeback.log.log import OperationLog

CUT_FILE_BYTES_MIN = 64 << 20
"""Smaller files leave as a whole: reading them again costs less than a second request for the
rest.
"""
CUT_BYTES_MIN = 32 << 20
"""A cut frees so much at least: a row and two system calls for each write of a megabyte would be
dear.
"""
ALIGNMENT_BYTES = 2 << 20
"""A huge page: parts of one are not freed."""


@dataclass(frozen=True, slots=True)
class RetentionStatistics:
    """Clean content in the RAM tier, and what has left it so far."""

    clean_bytes: int
    clean_files: int
    retained_bytes: int
    """Among the clean ones: of checkpoints that stay as long as there is room without them."""
    evicted_files: int
    evicted_bytes: int


class Retention:
    """Lets clean contents go."""

    def __init__(
        self,
        tier: Tier,
        log: OperationLog,
        table: NodeTable,
        order: EvictionOrder,
        drop: Callable[[Node], None],
        cut: Callable[[Node, int], None],
    ) -> None:
        """A step of the tier's ladder.

        `drop`: lets a node's content go; `cut`: all but its first bytes.
        """
        self._tier = tier
        self._log = log
        self._table = table
        self._drop = drop
        self._cut = cut
        self.order = order
        self._evicted_files = 0
        self._evicted_bytes = 0
        tier.ladder.gives(Rung.CLEAN, partial(self.let_leave, also_retained=True))

    def begin(self) -> None:
        """It is known from now on who has files open: what the last worker left may leave."""
        self._tier.room_changed()

    def settle(self, node: Node) -> None:
        """Note whether the node's content may leave from now on."""
        if self.may_leave(node):
            self.order.add(node)
            self._tier.room_changed()
        else:
            self.order.discard(node.ino)

    def settle_again(self, node: Node) -> None:
        """The same where it may have changed since, and nobody has used it."""
        if self.may_leave(node) is not (node.ino in self.order):
            self.settle(node)

    def may_leave(self, node: Node) -> bool:
        """Whether the node's content is in RAM only for those who will read it."""
        body = node.body
        return (
            node.handles == 0
            and node.identity is not None
            and (body.here.size > 0 if body.is_cold else body.is_whole_in_ram and not body.modified)
            and not self._log.is_active(node.ino)
        )

    def let_leave(self, wanted_bytes: int, *, also_retained: bool) -> int:
        """Let clean contents go until so many bytes came free; returns how many.

        Without `also_retained`, none of a retained checkpoint.
        """
        if not self._table.open_files_are_known:
            return 0
        freed = 0
        for node in self.order.candidates(also_retained=also_retained):
            if freed >= wanted_bytes:
                break
            if self._log.is_active(node.ino):
                # renamed or the like since it was clean; it comes back when that is persisted
                self.order.discard(node.ino)
            else:
                freed += self.evict(node, wanted_bytes - freed)
        return freed

    def let_these_leave(self, inos: Collection[Ino], wanted_bytes: int) -> None:
        """The same for some files only, whatever they belong to; pinned ones stay."""
        claims = self.order.claims()
        freed = 0
        in_order = [ino for ino in claims if ino in inos]  # least recently used first
        for ino in sorted(in_order, key=lambda ino: claims[ino] is Claim.RETAINED):
            node = self._table[ino]
            if freed >= wanted_bytes:
                break
            if self._log.is_active(ino):
                self.order.discard(node.ino)
            elif claims[ino] is not Claim.PINNED:
                freed += self.evict(node, wanted_bytes - freed)

    def evictable(self, wanted_bytes: int) -> int:
        """How many bytes could leave; counts no further than what is wanted."""
        found = 0
        for ino, claim in self.order.claims().items():
            found += (
                self._tier.allocated_bytes(self._table[ino].body.tier)
                if claim is not Claim.PINNED
                else 0
            )
            if found >= wanted_bytes:
                break
        return found

    def left_bytes(self, uid: int) -> int:
        """How many bytes can be written now to new files of a user, without a wait."""
        free = self._tier.free_bytes()
        share = self._tier.shares.left_bytes(uid)
        if free >= share:
            return share
        return min(share, free + self.evictable(share - free))

    def evict(self, node: Node, wanted_bytes: int | None = None) -> int:
        """Let one content go that may leave, or as much of its end as is wanted; returns the bytes
        that came free.
        """
        assert self._table.open_files_are_known, node.ino
        assert node.body.is_cold or not node.body.modified, node.ino
        assert not self._log.is_active(node.ino), node.ino
        assert not node.kernel_writers, node.ino  # they would go on in a file that nobody reads
        taken = self._tier.allocated_bytes(node.body.tier)
        stays = 0 if wanted_bytes is None else head_after(node.size, taken, wanted_bytes)
        if stays:
            self._cut(node, stays)
        else:
            self._evicted_files += 1
            self._drop(node)
        self._evicted_bytes += taken - stays
        return taken - stays

    def statistics(self) -> RetentionStatistics:
        """What `status`, the metrics and the tests see."""
        clean_bytes = 0
        retained_bytes = 0
        for ino, claim in self.order.claims().items():
            taken = self._tier.allocated_bytes(self._table[ino].body.tier)
            clean_bytes += taken
            retained_bytes += taken if claim is Claim.RETAINED else 0
        return RetentionStatistics(
            clean_bytes, len(self.order), retained_bytes, self._evicted_files, self._evicted_bytes
        )


def head_after(size: int, taken: int, wanted: int) -> int:
    """How many first bytes of a file stay when `wanted` of the `taken` ones are to come free; 0: it
    is better let go of as a whole.
    """
    if size < CUT_FILE_BYTES_MIN or taken < CUT_BYTES_MIN:
        return 0
    stays = (min(taken, size) - max(wanted, CUT_BYTES_MIN)) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return stays if stays >= CUT_BYTES_MIN else 0
