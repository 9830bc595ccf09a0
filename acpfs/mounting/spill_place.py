"""The spill directory of a mount: may it be used, whose is it, what an earlier mount left in it.

Looks at the disk only before a mount, from a thread that may hang; a worker that takes a session
over asks it nothing. Not thread-safe: used at start and end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
from acpfs.writeback.copies.on_disk import DiskPlace
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.sources.mirror import Mirror
from acpfs.writeback.sources.spill import Spill, SpillPools, SpillRules, recorded_place

SPILL_WAIT_S = 30.0
REMOVE_WAIT_S = 10.0
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


class SpillPlace:
    """The directory of one volume and node below the spill directory."""

    def __init__(
        self, settings: Settings, identity: Identity, state: StateDatabase, runtime: Runtime
    ) -> None:
        """Where the bytes that an earlier mount left are is known from its state.

        Raises:
            RefusedError: they are not where this mount is to look.
        """
        left = recorded_place(state)
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

    def maker(
        self, tier: Tier, operations: OperationLog, lower: Lower
    ) -> Callable[[RLock], Spill] | None:
        """Makes the spill tier, given the file system's lock."""
        settings = self._settings
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
            directory,
            state,
            tier,
            lock,
            SpillRules(mode, settings.spill_budget, closed),
            SpillPools.make(self._runtime),
            mirror=mirror,
        )
