"""Which files may be written in the passthrough lane: those for which there is room, because holding a writer back there is hard.

Room is asked for by the size that is expected, with a margin, beside what others that write in this lane are still to need;
and the pages are charged to the writer's memory control group, so that one must be able to pay (`payers`). A file of which no size
is known, but that is likely to be large, is admitted while RAM is plentiful (`plenty`), and its writer is held if it is not any more.
Who is not admitted takes the daemon's lane, which can wait for room and overflow. Used under the file system's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.earlier_saves import EarlierSaves
from acpfs.filesystem.expectations import UNBOUNDED_BYTES, WORTH_LEARNING_BYTES, Expectations, pattern_of
from acpfs.filesystem.kept_handles import Handle
from acpfs.filesystem.likely_sizes import LikelySizes
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.payers import Payers
from acpfs.filesystem.plenty import Plenty
from acpfs.ram.tier import BLOCK_BYTES, Tier
from acpfs.types import Ino

MARGIN = 1.25
"""Checkpoints of one job differ by a few percent (optimizer state that is made lazily, logs that grow)."""
MARGIN_BYTES = 16 << 20
UNSURE_MAX = 1000
UNKNOWN_MAX = 256
"""Of files that are written at a time: each may take a thread to hold it."""


class Admission:
    """Promises room to writers that the daemon cannot stop."""

    def __init__(
        self,
        table: NodeTable,
        contents: Contents,
        tier: Tier,
        expectations: Expectations,
        payers: Payers,
        likely: LikelySizes,
        plenty: Plenty,
        earlier: EarlierSaves,
        is_urgent: Callable[[Node], bool],
        unknown_bytes: int | None = None,
    ) -> None:
        """`unknown_bytes`: what to expect of a file like which none was seen; None: `likely` and `plenty` decide."""
        self._table = table
        self._contents = contents
        self._tier = tier
        self._expectations = expectations
        self._payers = payers
        self._likely = likely
        self._plenty = plenty
        self._earlier = earlier
        self._is_urgent = is_urgent
        self._unknown_bytes = unknown_bytes
        self._promised: dict[Ino, int] = {}
        self._ours: dict[Ino, bool] = {}
        """Files with a promise → whether the daemon may take their pages: nobody else pays for them."""
        self._unknown: dict[Ino, bool] = {}
        """Files of unknown size → whether their writers may go on, or are stopped."""
        self._unsure: dict[bytes, None] = {}
        """Patterns of files the last of which took much less than was expected: sparse, or shorter."""

    def refuse(self, handle: Handle) -> str:
        """Why not, or "": then the room is promised until `settle`."""
        node = handle.node
        path = self._table.path(node.ino)
        expected = self._expectations.expect(path)
        if expected is None and handle.flags & os.O_TRUNC and handle.former_bytes >= WORTH_LEARNING_BYTES:
            expected = handle.former_bytes
        if expected is None:
            expected = self._unknown_bytes
        if expected is None:
            return self._refuse_unknown(handle, path)
        wanted = int(expected * MARGIN) + MARGIN_BYTES
        urgent = self._is_urgent(node)
        if wanted > self._tier.most_bytes(urgent=urgent):
            return "larger than RAM"
        missing = wanted - (self._tier.free_bytes(urgent=urgent) - self.outstanding())
        if missing > 0:
            self._tier.ladder.make_room(missing)
        if wanted > self._tier.free_bytes(urgent=urgent) - self.outstanding() or self._tier.waiting(urgent=urgent):
            return "RAM is short"
        refusal = self._payers.refuse(node, handle.pid, wanted, self.outstanding_of)
        if not refusal:
            self._unknown.pop(node.ino, None)
            self._promised[node.ino] = wanted
            self._ours[node.ino] = self._payers.pays_as_we_do
        return refusal

    def _refuse_unknown(self, handle: Handle, path: bytes) -> str:
        """A writer that appends is one of a log, and one of a file that was small goes on as it began: the daemon sees what they write."""
        if handle.former_bytes >= 0 or handle.flags & os.O_APPEND or not self._likely.may_be_large(path):
            return "its size is not known from an earlier file"
        for parent, name in handle.node.names[:1]:
            self._earlier.made(self._table[parent], name)
        if not self._plenty.is_caught():
            return "its size is not known from an earlier file"
        if len(self._unknown) >= UNKNOWN_MAX or not self._plenty.is_there(self.outstanding()):
            return "its size is not known, and RAM is not plentiful"
        # The hold looks at RAM, not at who pays for it: who may take all of it must be able to pay for all.
        refusal = self._payers.refuse(handle.node, handle.pid, self._tier.budget_bytes, self.outstanding_of)
        if not refusal:
            self._unknown[handle.node.ino] = True
        return refusal

    def outstanding(self) -> int:
        """What was promised to all and not written yet, and what those may still take of whom nothing is known."""
        nodes = (self._table.get(ino) for ino in self._promised)
        promised = sum(self.outstanding_of(node) for node in nodes if node is not None and node.kernel_writers)
        return promised + self._plenty.reach_bytes() * self.unstopped()

    def unstopped(self) -> int:
        """How many files of unknown size have writers that go on."""
        nodes = (self._table.get(ino) for ino, goes_on in self._unknown.items() if goes_on)
        return sum(node is not None and node.kernel_writers > 0 for node in nodes)

    def outstanding_of(self, node: Node) -> int:
        """What was promised to the writers of a file and not written yet."""
        return max(0, self._promised.get(node.ino, 0) - self._has_bytes(node))

    def _has_bytes(self, node: Node) -> int:
        """What the file takes already, also beyond its end (`pages_ahead`)."""
        ahead = self._tier.allocated_bytes(node.body.tier) if not node.body.is_cold else 0
        return max(node.blocks * BLOCK_BYTES, ahead)

    def sure_bytes(self, handle: Handle) -> int:
        """How much of what was promised to a writer may be taken at its open: all that is expected, or nothing."""
        wanted = self._promised.get(handle.node.ino, 0)
        if not wanted or not self._ours[handle.node.ino] or pattern_of(self._table.path(handle.node.ino)) in self._unsure:
            return 0
        expected = int((wanted - MARGIN_BYTES) / MARGIN)
        return expected if self._plenty.is_there(self.outstanding() + expected) else 0

    def unsure(self, node: Node) -> None:
        """Much of what was taken for a file like this was not needed: the next one takes what it writes."""
        self._unsure[pattern_of(self._table.path(node.ino))] = None
        if len(self._unsure) > UNSURE_MAX:
            del self._unsure[next(iter(self._unsure))]

    def restored(self, node: Node) -> None:
        """It was admitted by an earlier worker, and what was promised to it is not known any more."""
        self._unknown[node.ino] = True

    def stopped(self, node: Node) -> None:
        """Its writers cannot go on, or have been given room of their own."""
        if node.ino in self._unknown:
            self._unknown[node.ino] = False

    def goes_on(self, node: Node) -> None:
        """Its writers may write unseen again."""
        if node.ino in self._unknown:
            self._unknown[node.ino] = True

    def settle(self, node: Node) -> None:
        """Nobody writes to the file in this lane any more."""
        self._promised.pop(node.ino, None)
        self._ours.pop(node.ino, None)
        self._unknown.pop(node.ino, None)

    def never(self, path: bytes) -> None:
        """Files like this one cannot be written in this lane."""
        self._expectations.learn(path, UNBOUNDED_BYTES)

    def learn(self, node: Node) -> None:
        """The file is complete."""
        if node.size >= WORTH_LEARNING_BYTES:
            path = self._table.path(node.ino)
            self._expectations.learn(path, node.size)
            self._likely.learn(path, node.size)
        elif node.ino in self._unknown:
            self._likely.learn(self._table.path(node.ino), node.size)
