"""One checkpoint whose deletion is held back, and the watch over space that may end that.

Used under the file system's lock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from acpfs.backing.lower import LowerPath
from acpfs.checkpoints import Checkpoint
from acpfs.errors import FULL_ERRNOS
from acpfs.types import Ino, Seq
from acpfs.writeback.guard.survey import Inventory
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op, VersionState

SPACE_VARIABLE = "ACPFS_GUARD_SPACE_PATIENCE"
"""For tests: the same in seconds."""
SPACE_PATIENCE_S = float(os.environ.get(SPACE_VARIABLE, "30"))
"""How long operations must have failed for want of space before what is held is let go, one
checkpoint per such while.
"""

Key = tuple[Checkpoint, Ino]
"""The checkpoint, and the node by which it was moved away (0: it lies where it always did): two of
one name are not the same.
"""


@dataclass(slots=True, eq=False)
class Guarded:
    """Deletions of one checkpoint."""

    checkpoint: Checkpoint
    moved: Ino
    clock: Callable[[], float]
    """Monotonic, seconds."""
    ops: dict[Seq, Op] = field(default_factory=dict)
    since: float = math.inf
    """Wall clock, seconds: when the first of them was made."""
    newest_at: float = 0.0
    """… and the last: from then on runs the time that it is held for."""
    inventory: Inventory | None = None
    """As last looked at."""
    why: str = "the backing directory was not looked at yet"
    due: float = -math.inf
    """On trio's clock: when to look (again)."""
    earliest: float = -math.inf
    """On trio's clock: not before."""
    asked_since: float | None = None
    """Monotonic, seconds: since when a look is due; None: none is."""
    _seen: dict[Checkpoint, tuple[tuple[int, int, int], float]] = field(default_factory=dict)

    @property
    def save_dir(self) -> LowerPath:
        """As a path."""
        return tuple(self.checkpoint.save_dir.split(b"/")) if self.checkpoint.save_dir else ()

    def add(self, op: Op) -> None:
        self.ops[op.seq] = op
        self.since = min(self.since, op.logged_at)
        self.newest_at = max(self.newest_at, op.logged_at)
        self.look_soon()

    def look_soon(self) -> None:
        """Something changed."""
        self.due = min(self.due, self.earliest)
        if self.asked_since is None:
            self.asked_since = self.clock()

    def looked(self, now: float, pause_s: float, poll_s: float) -> None:
        """At `now` on trio's clock."""
        self.earliest = now + pause_s
        self.due = now + max(pause_s, poll_s)
        self.asked_since = None

    def take_over(self, other: Guarded) -> None:
        """The same one, sorted anew: that alone is nothing to look at again for."""
        self.asked_since = other.asked_since
        self.inventory = other.inventory
        self.why = other.why
        self.due = other.due
        self.earliest = other.earliest
        self._seen = other._seen

    def quiet_s(self, other: Inventory, now: float) -> float:
        """For how long another checkpoint has not changed, as far as was looked."""
        look = (other.files, other.size_bytes, other.newest_ns)
        known, since = self._seen.get(other.checkpoint, (look, now))
        self._seen[other.checkpoint] = (look, since if known == look else now)
        return now - since if known == look else 0.0


class SpaceWatch:
    """Says when the backing directory has been full for so long that something must give."""

    def __init__(self, log: OperationLog) -> None:
        self._log = log
        self._failed: dict[Seq, Op] = {}
        self.due = math.inf
        """On trio's clock."""

    def failed(self, op: Op, number: int | None, now: float) -> bool:
        """An operation failed; whether for want of space."""
        if number not in FULL_ERRNOS:
            return False
        self._failed[op.seq] = op
        self.due = min(self.due, now + SPACE_PATIENCE_S)
        return True

    def is_due(self, now: float) -> bool:
        """Whether operations still want space, after all that time; then the time begins anew."""
        self._failed = {seq: op for seq, op in self._failed.items() if self._wants(op)}
        if not self._failed:
            self.due = math.inf
        if now < self.due:
            return False
        self.due = now + SPACE_PATIENCE_S
        return True

    def _wants(self, op: Op) -> bool:
        if self._log.get(op.seq) is not op or op.last_error not in FULL_ERRNOS:
            return False
        return op.version is None or op.version.state not in (
            VersionState.STAGED,
            VersionState.COMMITTED,
        )
