"""What became of a commit group: told by the committer to the flusher and the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from acpfs.backing.lower import LowerStat
from acpfs.types import Ino, Seq
from acpfs.writeback.log.ops import Op


@dataclass(slots=True)
class GroupOutcome:
    """See above."""

    done: list[tuple[Op, LowerStat | None]] = field(default_factory=list)
    """In order; visible, not yet flushed."""
    failed: Op | None = None
    """The first one that did not succeed; those behind it were not tried."""
    error: OSError | None = None
    lost: Op | None = None
    """Its staging file is gone."""
    directories: Counter[Ino] = field(default_factory=Counter)
    """Directories that the operations mention, and how often."""
    synced: dict[Ino, None] = field(default_factory=dict)
    """Further directories whose entries changed."""
    entries: dict[Ino, None] = field(default_factory=dict)
    """Nodes whose attributes changed."""
    settled: list[tuple[Ino, LowerStat]] = field(default_factory=list)
    """Directories that were given their times, as they are now."""
    undone: list[Op] = field(default_factory=list)
    """Contents that were committed, and are not there any more after a flush failed."""

    unflushed: set[Ino] = field(default_factory=set)
    """Of what is to be flushed: what was not yet, or was made again since."""
    made_again: bool = False
    """A look made something again, and not all was flushed since."""
    given_again: set[Ino] = field(default_factory=set)
    """Nodes that a look gave their attributes again.

    Only giving them tells whether they were there.
    """
    remade: set[Ino] = field(default_factory=set)
    """Directories that a look made again: what is above them may hand on another ACL by now."""
    safe: set[Seq] = field(default_factory=set)
    """What a look found there after the flush of all that it touches: no server can forget it any
    more.
    """

    is_doubtful: bool = False
    """A flush of some of it failed when an earlier worker had committed it: what there is of it is
    not known.
    """
    missing: dict[Seq, int] = field(default_factory=dict)
    """Of these, what does not lie where it was put: its inode number; 0: not known."""

    @property
    def has_ended(self) -> bool:
        """Whether one did not succeed."""
        return self.failed is not None or self.lost is not None
