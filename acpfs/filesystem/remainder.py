"""Remainders: the first bytes of large files whose rest has left RAM.

A file of which a part was evicted has no content any more and counts as one that is only on the backing directory; what is left of it
in RAM is kept beside, and spares reads of these bytes. So everybody who does not know remainders is right about the file. Its row is
committed before the tier file is cut: a crash in between leaves more than the row says, never less. Used under the file system's lock.
"""

from __future__ import annotations

import os

from acpfs.filesystem.content import Remainder
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.versions import Versions
from acpfs.ram.tier import Tier
from acpfs.types import TierId

CUT_FILE_BYTES_MIN = 64 << 20
"""Smaller files leave as a whole: reading them again costs less than a second request for the rest."""
CUT_BYTES_MIN = 32 << 20
"""A cut frees so much at least: a row and two system calls for each write of a megabyte would be dear."""
ALIGNMENT_BYTES = 2 << 20
"""A huge page: parts of one are not freed."""


class Remainders:
    """Makes, reads and gives up remainders."""

    def __init__(self, tier: Tier, table: NodeTable, versions: Versions) -> None:
        """Those that the last worker left: what the tier has not got any more, the backing directory has."""
        self._tier, self._table, self._versions = tier, table, versions
        there = set(tier.ids())
        for node in table.recorded():
            if node.remainder is not None and node.remainder.tier_id in there:
                versions.use(node.remainder.tier_id)
            elif node.remainder is not None:
                node.remainder = None
                table.changed(node)

    @staticmethod
    def size_after(node_size: int, taken: int, wanted: int) -> int:
        """How many first bytes stay when `wanted` of the `taken` ones are to come free; 0: the file is better let go of as a whole."""
        if node_size < CUT_FILE_BYTES_MIN or taken < CUT_BYTES_MIN:
            return 0
        stays = (min(taken, node_size) - max(wanted, CUT_BYTES_MIN)) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return stays if stays >= CUT_BYTES_MIN else 0

    def cut(self, node: Node, tier_id: TierId, size: int) -> None:
        """The node keeps the first bytes of a tier file that it uses already, and nothing else of its content."""
        node.remainder = Remainder(tier_id, size)
        self._table.changed(node)
        self._tier.cut(tier_id, size)

    def drop(self, node: Node) -> None:
        """Nothing of it is needed any more."""
        remainder, node.remainder = node.remainder, None
        if remainder is not None:
            self._table.changed(node)
            self._versions.unuse(remainder.tier_id)

    def read(self, remainder: Remainder, offset: int, size: int) -> bytes:
        """What RAM has of a range, from its beginning on; without the lock. b"" also where it has just been given up."""
        size = min(size, remainder.size - offset)
        if size <= 0:
            return b""
        try:
            fd = self._tier.open(remainder.tier_id)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)
