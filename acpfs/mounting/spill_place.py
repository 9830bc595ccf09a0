"""The spill directory of a mount: may it be used, whose is it, what an earlier mount left in it.

Looks at the disk only before a mount, from a thread that may hang; a worker that takes a session
over asks it nothing. Not thread-safe: used at start and end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from acpfs.backing.identity import Identity
from acpfs.backing.lower import Lower
from acpfs.config import Settings, SpillMode
from acpfs.errors import RefusedError
from acpfs.mounting.checks import within
from acpfs.ram.mounts import LOCAL, mount_of
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.runtime.given import Runtime
from acpfs.writeback.copies.held_copies import held_scratch
from acpfs.writeback.copies.member_journals import MemberJournals
from acpfs.writeback.copies.on_disk import DiskCopies, DiskPlace
from acpfs.writeback.copies.on_member import RECORDED, HolderCandidate, MemberPlace, Words
from acpfs.writeback.copies.on_storage import StoredJournals
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.sources.mirror import HOLDER_PATIENCE, Mirror
from acpfs.writeback.sources.spill import (
    Spill,
    SpillPools,
    SpillRules,
    forget_copies,
    recorded_place,
)

SPILL_WAIT_S = 30.0
REMOVE_WAIT_S = 10.0
REST_MIN_S = 1.0
REST_MAX_S = 8.0
"""Between looks for a holder, where there was none."""
_MEMORY = frozenset({"tmpfs", "ramfs"})


def complaints(spill: Path, backing: Path | None) -> list[str]:
    """What speaks against the place; nothing that forbids it."""
    place = mount_of(os.path.realpath(spill))
    under = (
        mount_of(os.fspath(backing)) if backing is not None else None
    )  # by its name alone: it may hang
    found = []
    if place is not None and place.kind in _MEMORY:
        found.append(
            f"the spill directory {spill} lies in memory ({place.kind}): what moves there frees "
            "nothing, and survives no reboot"
        )
    elif place is not None and place.kind not in LOCAL:
        found.append(
            f"the spill directory {spill} is on {place.kind}: it is meant for a local disk, a "
            "slow one slows the drain"
        )
    if place is not None and under is not None and place.device == under.device:
        found.append(
            f"the spill directory {spill} is on the file system of the backing directory: it "
            "fills, fails and slows with that"
        )
    return found


@dataclass(frozen=True, slots=True)
class Holders:
    """Who may hold copies of this mount's, and how they are spoken to."""

    words: Words
    candidates: Callable[[], Sequence[HolderCandidate]]
    own: HolderCandidate


class SpillPlace:
    """The directory of one volume and node below the spill directory."""

    def __init__(
        self, settings: Settings, identity: Identity, state: StateDatabase, runtime: Runtime
    ) -> None:
        """Where the bytes that an earlier mount left are is known from its state.

        Raises:
            RefusedError: they are not where this mount is to look.
        """
        recorded = recorded_place(state) or ""
        self._earlier = recorded if recorded.startswith(RECORDED) else ""
        left = Path(recorded) if recorded and not self._earlier else None
        if left is not None and settings.copies:
            raise RefusedError(
                f"the last mount left files in the spill directory {left}: mount without copies "
                "until they are drained"
            )
        if self._earlier and not settings.copies:
            forget_copies(state)  # all bytes are in RAM as well
        if left is not None and settings.spill is not None and left != settings.spill:
            raise RefusedError(
                f"the last mount left files in the spill directory {left}: mount with --spill "
                f"{left} until they are drained"
            )
        self.path = settings.spill or left
        """None: there is no spill tier."""
        self._runtime = runtime
        self._settings = settings
        self._state = state
        self._node_id = identity.node_id
        self._name = f"acpfs-{identity.volume_id}-{identity.node_id}"

    def prepare(self) -> list[str]:
        """Before a mount, not at a takeover: make the directory; returns warnings.

        Raises:
            MachineError: the disk does not answer, or refuses.
        """
        if self.path is None:
            return []
        directory = self.directory
        within(SPILL_WAIT_S, f"spill directory {self.path} does not answer", directory.prepare)
        if self._settings.spill is None:
            return [
                (
                    f"files that the last mount left in the spill directory "
                    f"{self.path} are drained "
                    "from there; nothing new goes there"
                )
            ]
        return complaints(self.path, self._settings.backing)

    @property
    def directory(self) -> SpillDirectory:
        """Of this volume and node."""
        assert self.path is not None
        return SpillDirectory(self.path / self._name, self._runtime.chance)

    def _at_holder(
        self, tier: Tier, operations: OperationLog, lower: Lower, holders: Holders
    ) -> Callable[[RLock], Spill]:
        scratch = held_scratch(tier)
        place = MemberPlace(
            holders.words,
            holders.candidates,
            holders.own,
            scratch,
            self._runtime,
            self._earlier,
        )
        stored = StoredJournals(lower, self._node_id, scratch)
        mirror = Mirror(
            MemberJournals(place, stored, self._runtime),
            self._state,
            operations,
            lower,
            self._node_id,
            self._runtime,
            HOLDER_PATIENCE,
        )
        return lambda lock: Spill(
            place,
            self._state,
            tier,
            lock,
            SpillRules(SpillMode.MIRROR, "100%", False, REST_MIN_S, REST_MAX_S),
            SpillPools.make(self._runtime),
            mirror=mirror,
        )

    def maker(
        self,
        tier: Tier,
        operations: OperationLog,
        lower: Lower,
        holders: Holders | None,
    ) -> Callable[[RLock], Spill] | None:
        """Makes the spill tier, given the file system's lock. `holders`: where other members hold
        copies instead.
        """
        settings = self._settings
        if settings.copies:
            return None if holders is None else self._at_holder(tier, operations, lower, holders)
        if self.path is None:
            return None
        closed = settings.spill is None
        directory = self.directory
        state = self._state
        mode = SpillMode.MOVE if closed else settings.spill_mode
        mirror = (
            Mirror(DiskPlace(directory), state, operations, lower, self._node_id, self._runtime)
            if mode is SpillMode.MIRROR
            else None
        )
        return lambda lock: Spill(
            DiskCopies(directory),
            state,
            tier,
            lock,
            SpillRules(mode, settings.spill_budget, closed),
            SpillPools.make(self._runtime),
            mirror=mirror,
        )
