"""How much room the drain makes by itself: what whoever waits for RAM may wait for.

No wait may end only by the one who waits, by another application, by a person or by another
machine. So bytes count here only where the storage alone has to do its part: their file is closed,
they are its last version, and nothing stands in front of them in the order that somebody has to
close, decide or persist elsewhere (docs/internals/room.md has the list). A storage that hangs or is
full does not count as such: to wait for it is what `when_full=wait` means. Used under the file
system's lock; nothing here waits or changes anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from acpfs.errors import FULL_ERRNOS
from acpfs.filesystem.content.versions import Versions
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.pins import Pins
from acpfs.ram.tier import Tier
from acpfs.ram.waiting import NO_OWNER
from acpfs.types import NO_TIER, Ino, Seq, TierId
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op
from acpfs.writeback.log.stages import Aside


@dataclass(frozen=True, slots=True)
class Forecast:
    """Room that is about to come."""

    size: int
    """Bytes."""
    files: int
    """How many have to be persisted for it."""


class DrainOutlook:
    """Reads the log for what it will free."""

    def __init__(
        self, log: OperationLog, table: NodeTable, versions: Versions, tier: Tier, pins: Pins
    ) -> None:
        self._log = log
        self._table = table
        self._versions = versions
        self._tier = tier
        self._pins = pins

    def coming(self, wanted: int, uid: int = NO_OWNER) -> Forecast:
        """Bytes of RAM that come free without anybody's doing but the storage's; counts no further
        than what is wanted.

        `uid`: that leave the share of this owner's files.

        It costs a microsecond for each operation that it goes by, and ends at the first that stops
        the order.
        """
        size = 0
        files = 0
        stuck: set[Ino] = set()
        met: Counter[TierId] = Counter()
        for op in self._log.oldest_first():
            if size >= wanted or self.stops(op):
                break
            if op.aside is not Aside.NONE:
                stuck.add(op.ino)
                continue
            for tier_id in self._done_with(op, met, stuck):
                if uid in (NO_OWNER, self._tier.shares.owner(op.ino)):
                    size += self._tier.allocated_bytes(tier_id)
                    files += 1
        return Forecast(size, files)

    def _done_with(self, op: Op, met: Counter[TierId], stuck: set[Ino]) -> Iterator[TierId]:
        """Tier files that nobody needs once the operation, and all before it, are done."""
        mine = op.version.tier_id if op.version is not None else NO_TIER
        if mine:
            met[mine] += 1
            if met[mine] == self._versions.users(mine):
                yield mine  # only versions have it, which are all done then
        node = self._table.get(op.ino)
        if node is None or self._log.last_of(op.ino) is not op or op.ino in stuck:
            return
        content = node.body.tier
        if met[content] == len(self._versions.on(content)) and self._leaves(node, op):
            yield content  # besides these its file has it, which is clean then

    def _leaves(self, node: Node, last: Op) -> bool:
        """Whether the file's content may leave RAM when its last operation is done.

        One whose descriptor was closed just now is open until RELEASE, which comes behind: it is
        known soon whether that was its last.
        """
        body = node.body
        return (
            body.is_whole_in_ram
            and not (body.modified or body.interrupted)
            and (node.handles == 0 or last.tentative)
            and self._pins.covering(self._table.path(node.ino)) is None
        )

    def stops(self, op: Op) -> bool:
        """Whether the order ends before the operation until somebody has closed, decided or
        persisted something.

        Not where it only stands aside: then the others go on. A close of which nobody knows yet
        whether it was the last is known soon.
        """
        if op.aside is not Aside.NONE or op.tentative:
            return False
        if op.awaits_members:
            return True
        node = self._table.get(op.ino)
        if node is None:
            return False
        if op.unsealed:  # it outgrew RAM: the rest of it follows its last close, or a decision
            return node.open_writers > 0 or node.body.interrupted
        version = op.version
        return (
            version is not None
            and version.tier_id != NO_TIER
            and not version.is_staged
            and version.tier_id == node.body.tier
            and node.kernel_rewriters > 0
        )  # the kernel writes to it unseen, and its stream begins anew for as long as somebody does

    def persists(self, ino: Ino) -> bool:
        """Whether the versions on a file's tier file are persisted without anybody's doing but the
        storage's.
        """
        node = self._table.get(ino)
        tier_id = node.body.tier if node is not None else NO_TIER
        seqs = [
            op.seq
            for op in self._log.pending_of(ino)
            if op.version is not None and op.version.tier_id == tier_id != NO_TIER
        ]
        return bool(seqs) and not self.is_held_up(max(seqs))

    def is_storage_full(self) -> bool:
        """Whether what is next in the order has failed for want of room on the backing
        directory.
        """
        first = next(self._log.oldest_first(), None)
        return first is not None and first.last_error in FULL_ERRNOS

    def is_held_up(self, seq: Seq) -> bool:
        """Whether an operation waits for somebody, or for one that does."""
        for op in self._log.oldest_first():
            if op.seq > seq:
                return False
            if op.seq == seq and op.aside is not Aside.NONE:
                return True
            if self.stops(op):
                return True
        return False
