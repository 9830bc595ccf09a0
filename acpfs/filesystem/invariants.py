"""What must hold of nodes, names and tier files at any moment, looked at in pieces.

A worker that breaks one of these rules has a fault: bytes that can never leave RAM, or a name that
leads nowhere. Asks neither the backing directory nor anything else that could hang. Used under the
file system's lock, which is free between two pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from acpfs.filesystem.content.body import Body
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.logger import shown
from acpfs.ram.tier import Tier
from acpfs.runtime.clock import Clock
from acpfs.types import ROOT, Ino, Seq, TierId
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import VersionState

PIECE_S = 0.002
"""About so long the lock is had at a time: a thousand nodes."""

Place = tuple[Ino, bytes | None] | Seq
"""What is looked at in one go: a node, a name in a directory, or an operation."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule that does not hold."""

    path: bytes
    """Of the file, for people."""
    text: str


class Invariants:
    """Looks, and changes nothing."""

    def __init__(self, table: NodeTable, log: OperationLog, tier: Tier, clock: Clock) -> None:
        self._now = clock.now
        self._table = table
        self._log = log
        self._tier = tier

    def pieces(self) -> Iterator[list[Place]]:
        """Where something is wrong, piece by piece.

        What comes or goes between two pieces is looked at as it is then, or not at all.
        """
        found: list[Place] = []
        ends_at = self._now() + PIECE_S
        for place in self._places():
            if self.wrong(place):
                found.append(place)
            if self._now() >= ends_at:
                yield found
                found = []
                ends_at = self._now() + PIECE_S
        yield found

    def _places(self) -> Iterator[Place]:
        for node in self._table:
            yield node.ino, None
            for name in list(node.dir.children) if node.is_dir else ():
                yield node.ino, name
        for op in self._log:
            yield op.seq

    def wrong(self, place: Place) -> list[Violation]:
        """What does not hold there now."""
        if not isinstance(place, tuple):
            return self._wrong_version(place)
        ino, name = place
        node = self._table.get(ino)
        if node is None:
            return []
        if name is not None:
            return self._wrong_name(node, name)
        texts = [*self._wrong_names(node), *self._wrong_bytes(node)]
        return [Violation(self._table.path(ino), text) for text in texts]

    # -- names

    def _wrong_name(self, parent: Node, name: bytes) -> list[Violation]:
        """One name in a directory against the node that it leads to."""
        child = parent.dir.children.get(name) if parent.is_dir else None
        if child is None or not child.ino:
            return []
        node = self._table.get(child.ino)
        text = ""
        if node is None:
            text = "the name leads to a file that is not there"
        elif (parent.ino, name) not in node.names:
            text = "the file does not count this name"
        above = self._table.path(parent.ino)
        return [Violation(above + b"/" + name if above else name, text)] if text else []

    def _wrong_names(self, node: Node) -> Iterable[str]:
        """The names that a node counts against the directories."""
        for parent, name in node.names:
            above = self._table.get(parent)
            child = above.dir.children.get(name) if above is not None and above.is_dir else None
            if child is None or child.ino != node.ino:
                yield f"it counts a name that no directory has ({shown(name)})"
        if len(set(node.names)) < len(node.names):
            yield "it counts a name twice"
        if node.is_dir and len(node.names) > 1:
            yield f"a directory has {len(node.names)} names"
        if node.unlogged and node.unseen_links:
            yield (
                f"its link count is {node.shown_links}, and it has {len(node.names)} names and "
                "was never on the backing directory"
            )

    # -- bytes

    def _wrong_bytes(self, node: Node) -> Iterable[str]:
        if not (node.names or node.handles or node.ino == ROOT) and not node.body.is_only_backing:
            yield "it has bytes in RAM, but no name, and nobody has it open"
        if node.body.head_bytes > node.size:
            yield "the first bytes of an earlier content are still in RAM"
        yield from self._wrong_place(node, node.body)
        if node.body.tier:
            yield from self._wrong_tier_file(node.body.tier, _bytes_in_ram(node, node.body))

    def _wrong_place(self, node: Node, body: Body) -> Iterable[str]:
        """Where a content's bytes are, and whether what has them is still needed there."""
        if wrong := body.wrong():
            yield wrong
        versions = [op.version for op in self._log.pending_of(node.ino) if op.version is not None]
        if (
            body.is_spilled and body.busy is None
        ):  # else it is on its way back, and may have been persisted meanwhile
            if not any(version.spilled and version.vid == body.spilled for version in versions):
                yield "it is in the spill directory, and no version keeps its copy there"
            if not body.is_clean:
                yield "it has changed since its copy was made in the spill directory"
        is_waiting = bool(versions) and versions[-1].state is not VersionState.COMMITTED
        if body.is_cold and is_waiting and (node.names or node.handles):
            yield (
                "its newest version is not on the backing directory, and its content would be "
                "read from there"
            )
        if (
            node.is_file
            and node.names
            and body.is_clean
            and not versions
            and node.identity is not None
            and node.size != node.identity[1]
            and body.busy is None
        ):
            yield (
                f"nobody has changed it, and it has {node.size} bytes, where the backing directory "
                f"has {node.identity[1]}"
            )
        if body.sealed and not any(version.staging_name == body.staging for version in versions):
            yield "it waits for a version of it that is not in the log"

    def _wrong_version(self, seq: Seq) -> list[Violation]:
        op = self._log.get(seq)
        if op is None or op.version is None:
            return []
        version = op.version
        texts: list[str] = []
        if version.tier_id:
            texts += self._wrong_tier_file(version.tier_id, version.size)
        if version.spilled and version.tier_id:
            texts.append("its version is in RAM and in the spill directory")
        if not (version.is_local or version.staging_name):
            texts.append("its version is nowhere")
        if op.unsealed and not op.parked and not self._has_user(op.ino):
            texts.append("the order waits for its last close, and nobody has it")
        return [Violation(self._table.path(op.ino), text) for text in texts]

    def _has_user(self, ino: Ino) -> bool:
        node = self._table.get(ino)
        return node is not None and bool(node.names or node.handles)

    def _wrong_tier_file(self, tier_id: TierId, size: int) -> Iterable[str]:
        """What was lost before the mount is another matter: `status` names it."""
        if self._tier.is_lost(tier_id):
            return
        try:
            found = self._tier.stat(tier_id).st_size
        except FileNotFoundError:
            yield f"its bytes are not in RAM any more (file {tier_id} of the RAM tier)"
            return
        if found < size:
            yield f"RAM has {found} of its {size} bytes (file {tier_id} of the RAM tier)"


def _bytes_in_ram(node: Node, body: Body) -> int:
    """How long the tier file must be, at least; of a file that changes at this moment, nothing is
    said.
    """
    is_still = (
        body.is_whole_in_ram and body.busy is None and not (body.in_flight or node.kernel_writers)
    )
    return node.size if is_still else body.head_bytes
