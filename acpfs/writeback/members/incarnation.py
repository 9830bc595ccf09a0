"""This mount under its node id: which incarnation it is, what the one before took with it, and
whether another mount has the id, too.

A RAM tier that is new under an old id is another incarnation: what the earlier one had not
persisted may be lost, and pointers of that time are withheld. Owns these two rows of the state
database and nothing else; does not know the other members. `name`, `lost` and `rivalry` change
under the lock or in the trio thread; the reading is the caller's, on threads of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.logger import get_logger
from acpfs.ram.state import StateDatabase
from acpfs.runtime.chance import Chance

DDL = """
CREATE TABLE IF NOT EXISTS incarnation (
  one INTEGER PRIMARY KEY CHECK (one = 1), name TEXT NOT NULL, lost_from REAL, lost_until REAL);
"""

_log = get_logger(__name__)


class Incarnation:
    """Who this member is."""

    def __init__(
        self,
        node: str,
        state: StateDatabase,
        section: Callable[[], AbstractContextManager[object]],
        read: Callable[[], Awaitable[NodeRecord | None]],
        chance: Chance,
    ) -> None:
        """`read`: what the backing directory has as the record of this node id."""
        self._node = node
        self._state = state
        self._section = section
        self._read = read
        self.name, self.lost = _loaded(state, chance)
        self.rivalry = ""
        """`in_use`, of another mount that was found."""

    async def other(self) -> NodeRecord | None:
        """The record of our node id, if another incarnation or mount wrote it.

        Raises:
            OSError: the backing directory refuses.
        """
        try:
            found = await self._read()
        except ValueError:
            return None
        return found if found is not None and found.incarnation not in ("", self.name) else None

    async def look_for_rival(self) -> None:
        """Two that joined at the same moment, or one that a hung backing directory had kept silent
        until another took its id.
        """
        rival = await self.other()
        before = self.rivalry
        self.rivalry = in_use(rival) if rival is not None else ""
        if self.rivalry and not before:
            _log.error(
                "two mounts have the same node id, and remove one another's files: unmount one "
                "of them",
                detail=self.rivalry,
            )

    def follows(self, earlier: NodeRecord, now: float, kept_until: float | None = None) -> None:
        """An earlier incarnation had the node id; what it had closed before `kept_until` is here.

        One interval for all that was lost: only pointers that still wait are held against it.
        """
        since = earlier.watermark
        if kept_until is not None:
            since = max(since, kept_until)
        if earlier.state is NodeState.LEFT:
            self.set_lost(earlier.lost)
        else:
            self.set_lost(
                (
                    min(since, earlier.lost[0]) if earlier.lost else since,
                    now,
                )
            )

    def set_lost(self, lost: tuple[float, float] | None) -> None:
        """What was closed between these times may be lost; None: nothing (any more)."""
        with self._section():
            self.lost = lost
            self._state.change(
                "UPDATE incarnation SET lost_from = ?, lost_until = ?", lost or (None, None)
            )
        if lost is not None:
            _log.error(
                "what this node had not persisted may be lost: pointers of that time are withheld",
                node=self._node,
                times=lost,
            )


def in_use(rival: NodeRecord) -> str:
    """Who else has the node id, in words."""
    return (
        f"node id {rival.node} is in use: {rival.host or 'another machine'} serves "
        f"{rival.mountpoint or 'a mount'} under it"
    )


def _loaded(state: StateDatabase, chance: Chance) -> tuple[str, tuple[float, float] | None]:
    """Of the RAM tier, and what was lost with the one before."""
    state.create(DDL)
    for name, lost_from, lost_until in state.rows(
        "SELECT name, lost_from, lost_until FROM incarnation"
    ):
        return str(name), None if lost_from is None else (lost_from, lost_until)
    name = chance.token(8)
    state.change("INSERT INTO incarnation VALUES (1, ?, NULL, NULL)", (name,))
    state.commit()
    return name, None
