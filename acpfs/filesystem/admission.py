"""Which files may be written in the passthrough lane: those for which there is room, because holding a writer back there is hard.

Room is asked for by the size that is expected, with a margin, beside what others that write in this lane are still to need;
and the pages are charged to the writer's memory control group, so that one must be able to pay (`payers`). Who is not admitted takes
the daemon's lane, which can wait for room and overflow. Used under the file system's lock.
"""

from __future__ import annotations

from acpfs.filesystem.contents import Contents
from acpfs.filesystem.expectations import WORTH_LEARNING_BYTES, Expectations
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.payers import Payers
from acpfs.ram.tier import BLOCK_BYTES, Tier
from acpfs.types import Ino

MARGIN = 1.25
"""Checkpoints of one job differ by a few percent (optimizer state that is made lazily, logs that grow)."""
MARGIN_BYTES = 16 << 20


class Admission:
    """Promises room to writers that the daemon cannot stop."""

    def __init__(
        self,
        table: NodeTable,
        contents: Contents,
        tier: Tier,
        expectations: Expectations,
        payers: Payers,
        unknown_bytes: int | None = None,
    ) -> None:
        """`unknown_bytes`: what to expect of a file like which none was seen; None: it is not admitted."""
        self._table = table
        self._contents = contents
        self._tier = tier
        self._expectations = expectations
        self._payers = payers
        self._unknown_bytes = unknown_bytes
        self._promised: dict[Ino, int] = {}

    def refuse(self, node: Node, pid: int) -> str:
        """Why not, or "": then the room is promised until `settle`."""
        expected = self._expectations.expect(self._table.path(node.ino))
        if expected is None:
            expected = self._unknown_bytes
        if expected is None:
            return "its size is not known from an earlier file"
        wanted = int(expected * MARGIN) + MARGIN_BYTES
        if wanted > self._tier.budget_bytes:
            return "larger than RAM"
        missing = wanted - (self._tier.free_bytes() - self.outstanding())
        if missing > 0:
            self._contents.retention.make_room(missing)
        if wanted > self._tier.free_bytes() - self.outstanding() or self._tier.waiting():
            return "RAM is short"
        refusal = self._payers.refuse(node, pid, wanted, self.outstanding_of)
        if not refusal:
            self._promised[node.ino] = wanted
        return refusal

    def outstanding(self) -> int:
        """What was promised to all and not written yet."""
        nodes = (self._table.get(ino) for ino in self._promised)
        return sum(self.outstanding_of(node) for node in nodes if node is not None and node.kernel_writers)

    def outstanding_of(self, node: Node) -> int:
        """What was promised to the writers of a file and not written yet."""
        return max(0, self._promised.get(node.ino, 0) - node.blocks * BLOCK_BYTES)

    def settle(self, node: Node) -> None:
        """Nobody writes to the file in this lane any more."""
        self._promised.pop(node.ino, None)

    def never(self, path: bytes) -> None:
        """Files like this one cannot be written in this lane."""
        self._expectations.learn(path, 1 << 60)

    def learn(self, node: Node) -> None:
        """The file is complete."""
        if node.size >= WORTH_LEARNING_BYTES:
            self._expectations.learn(self._table.path(node.ino), node.size)
