"""Who needs which tier file: current contents and versions that are not persisted yet.

Keeps a tier file as long as anybody needs it, and knows how many of its first bytes must not change
(docs/internals/versions-and-streams.md). Does not know nodes, nor how bytes are copied. Used under
the file system's lock; nothing here waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from acpfs.ram.tier import Tier
from acpfs.types import NO_TIER, Ino, TierId
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Version


class VersionWatcher(Protocol):
    """Learns what becomes of versions."""

    def new(self, version: Version) -> None:
        """A content was frozen; its operation is logged in the same step."""

    def renewed(self, version: Version) -> None:
        """It had to become what its file is now."""

    def unstaged(self, version: Version) -> None:
        """The backing directory has lost what it had of it."""

    def finished(self, version: Version) -> None:
        """Nobody needs it any more."""

    def closed(self, ino: Ino) -> None:
        """Nobody has the file open any more."""


class Versions:
    """Counts the users of tier files; removes a file with its last user."""

    def __init__(self, tier: Tier, log: OperationLog) -> None:
        """Finds the versions that the log that the last worker left needs."""
        self._tier = tier
        self._log = log
        self._users: Counter[TierId] = Counter()
        self._frozen: dict[TierId, list[Version]] = {}
        self._of: dict[Ino, list[Version]] = {}
        """Those that have a tier file, by the file that they are of."""
        self._changed: set[Ino] | None = None
        self._watchers: list[VersionWatcher] = []
        for op in log:
            if op.version is not None and op.version.tier_id:
                self.add(op.version)

    # -- users

    def use(self, tier_id: TierId) -> None:
        """A content or version needs the tier file, if it has one."""
        if tier_id:
            self._users[tier_id] += 1

    def unuse(self, tier_id: TierId) -> None:
        """It does not any more."""
        if tier_id:
            self._users[tier_id] -= 1
            if not self._users[tier_id]:
                del self._users[tier_id]
                self._tier.remove(tier_id)

    def is_used(self, tier_id: TierId) -> bool:
        """Whether anybody needs the tier file."""
        return bool(self._users[tier_id])

    def users(self, tier_id: TierId) -> int:
        """How many contents and versions need the tier file."""
        return self._users[tier_id]

    def remove_unused(self) -> None:
        """After the start: what an earlier worker left and nobody needs."""
        for tier_id in self._tier.ids():
            if not self._users[tier_id]:
                self._tier.remove(tier_id)

    # -- versions

    def add(self, version: Version) -> None:
        """The version needs its tier file's first bytes as they are."""
        self.use(version.tier_id)
        self._frozen.setdefault(version.tier_id, []).append(version)
        if version.tier_id:
            self._of.setdefault(version.ino, []).append(version)
        self._tell(version.ino)

    def finished(self, version: Version) -> None:
        """The version is persisted or will never be."""
        if version.tier_id:
            versions = self._frozen[version.tier_id]
            versions.remove(version)
            if not versions:
                del self._frozen[version.tier_id]
            self._leave(version)
            self.unuse(version.tier_id)

    def _leave(self, version: Version) -> None:
        """It has its tier file no more."""
        versions = self._of[version.ino]
        versions.remove(version)
        if not versions:
            del self._of[version.ino]
        self._tell(version.ino)

    def tells_to(self, changed: set[Ino] | None) -> None:
        """Where to note the files whose versions come, go or move; None: nowhere."""
        self._changed = changed

    def _tell(self, ino: Ino) -> None:
        if self._changed is not None:
            self._changed.add(ino)

    def of(self, ino: Ino) -> Sequence[Version]:
        """Versions of a file that have a tier file."""
        return self._of.get(ino, ())

    def spilled(self, version: Version) -> None:
        """Its copy in the spill directory has the version's bytes from now on."""
        self.finished(version)
        version.tier_id = NO_TIER
        version.spilled = True
        self._log.save_version(version)

    def watch(self, watcher: VersionWatcher) -> None:
        """Have it told, from now on."""
        self._watchers.append(watcher)

    def tell_new(self, version: Version) -> None:
        for watcher in self._watchers:
            watcher.new(version)

    def tell_renewed(self, version: Version) -> None:
        for watcher in self._watchers:
            watcher.renewed(version)

    def tell_unstaged(self, version: Version) -> None:
        for watcher in self._watchers:
            watcher.unstaged(version)

    def tell_finished(self, version: Version) -> None:
        for watcher in self._watchers:
            watcher.finished(version)

    def tell_closed(self, ino: Ino) -> None:
        for watcher in self._watchers:
            watcher.closed(ino)

    def on(self, tier_id: TierId) -> Sequence[Version]:
        """Versions that need the tier file."""
        return self._frozen.get(tier_id, ())

    def files(self) -> Iterator[tuple[TierId, Ino]]:
        """Tier files that versions need, each with the file that these are of."""
        for tier_id, versions in self._frozen.items():
            yield tier_id, versions[0].ino

    def frozen_bytes(self, tier_id: TierId) -> int:
        """How many of the first bytes belong to a version and must not change."""
        versions = self._frozen.get(tier_id)
        return max(version.size for version in versions) if versions else 0

    def move(self, source: TierId, target: TierId) -> None:
        """The versions of one tier file have a copy of what they need in another."""
        moved = self._frozen.pop(source, [])
        for version in moved:
            self._leave(version)
            version.tier_id = target
            self._log.save_version(version)
            self.add(version)
            self.unuse(source)
        if not moved:
            self._tier.remove(target)  # they were all persisted meanwhile
