"""Operations that were carried out, and of which the journal may not know that they were.

Whoever goes on from the journal carries them out again. That is harmless for some of them, as long
as no two have to do with the same name or node.
"""

from __future__ import annotations

from acpfs.writeback.log.ops import Op, OpKind

UNKNOWN_OPS_MAX = 1024


class UnknownOps:
    """Since the journal last had all; for one thread."""

    def __init__(self, repeatable: frozenset[OpKind]) -> None:
        """`repeatable`: kinds that can be carried out again."""
        self._repeatable = repeatable
        self._names: set[tuple[int, bytes]] = set()
        self._nodes: set[int] = set()
        self._is_alone = False

    def begin_anew(self) -> None:
        """The journal has all that was carried out."""
        self._names.clear()
        self._nodes.clear()
        self._is_alone = False

    def stands_alone(self) -> None:
        """The one that is carried out now, if any, is to be known before another one is."""
        self._is_alone = True

    def add(self, op: Op) -> None:
        """It is about to be carried out."""
        self._nodes.add(op.ino)
        self._names.update(op.touches())
        self._is_alone = op.kind not in self._repeatable

    def would_spoil(self, op: Op) -> bool:
        """Whether to carry these out again would spoil something, once this one is carried out."""
        return (
            self._is_alone
            or op.kind not in self._repeatable
            or len(self._nodes) >= UNKNOWN_OPS_MAX
            or op.ino in self._nodes
            or any(name in self._names for name in op.touches())
        )
