"""What all rooms of the engine work on, and how they look at it.

Owns nothing of it, and knows no rule. The methods take the file system's lock for a moment, but
`look`, which calls the backing directory and takes none. `listener` is called under the lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import RLock

from acpfs.backing.calls import CallPools
from acpfs.backing.lower import Lower, LowerPath, LowerStat
from acpfs.config import Settings
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.runtime.given import Runtime
from acpfs.types import Ino
from acpfs.writeback.engine_records import DrainCounters
from acpfs.writeback.listener import Listener
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree, Place


@dataclass(frozen=True, slots=True)
class DrainParts:
    """See above."""

    lower: Lower
    tree: LowerTree
    log: OperationLog
    tier: Tier
    state: StateDatabase
    lock: RLock
    listener: Listener
    calls: CallPools
    settings: Settings
    runtime: Runtime
    counters: DrainCounters = field(default_factory=DrainCounters)

    def section(self) -> Section:
        """Under the lock, one transaction; whose wait is over is told afterwards, without the
        lock.
        """
        return Section(self)

    def path(self, ino: Ino) -> LowerPath | None:
        """Where the committed tree has a node."""
        with self.lock:
            return self.tree.path(ino)

    def path_at(self, place: Place) -> LowerPath | None:
        """The path of a name in a directory; None: the directory is not on the backing
        directory.
        """
        with self.lock:
            return self.tree.path_at(*place)

    def node_at(self, place: Place) -> Ino | None:
        """What the committed tree has there."""
        with self.lock:
            return self.tree.node_at(*place)

    def places(self, ino: Ino) -> list[Place]:
        """All of a node."""
        with self.lock:
            return self.tree.places(ino)

    def look(self, path: LowerPath) -> LowerStat | None:
        """What lies there; None: nothing, as far as the backing directory says."""
        try:
            return self.lower.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None


class Section:
    """See `DrainParts.section`."""

    __slots__ = ("_parts", "is_followed")

    def __init__(self, parts: DrainParts) -> None:
        self._parts = parts
        self.is_followed = False
        """What it found is carried out at once, and that is recorded before it is begun. So where
        this has changed nothing itself, what has joined it (`StateDatabase.joining_step`) needs no
        transaction of its own here.
        """

    def __enter__(self) -> Section:
        self._parts.lock.acquire()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        parts = self._parts
        try:
            if error is None and self.is_followed and not parts.state.is_changed_by_step:
                parts.state.join()
            else:
                parts.state.end_step(error)
            if error is not None:
                return
            deliver = parts.log.answer_waiters()
        finally:
            parts.lock.release()
        deliver()
