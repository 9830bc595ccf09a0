"""Whether there is so much RAM that a writer may have the passthrough lane although nobody knows how much it will write.

RAM is plentiful while a quarter of the budget is left, and of the machine's memory as much, beside all that writers in that lane could
take before they are held: what was promised, and a *reach* for each whose size is not known. The reach is what one of them may write
between the look that finds RAM short and the moment when its inode lock is had. Used under the file system's lock.
"""

from __future__ import annotations

import enum

from acpfs.config import WhenFull
from acpfs.filesystem.content.retention import Retention
from acpfs.filesystem.content.room import Room
from acpfs.ram.shortage import Shortage
from acpfs.ram.tier import Tier

REACH_BYTES_MAX, REACH_SHARE = 256 << 20, 16
"""At 8 GB/s, 30 ms of writing; and a sixteenth of a small budget."""
LOOK_SHARE = 8
"""Of a reach: it is looked every 2 ms when little room is left, and a lock may take 30."""
PLENTY_SHARE = 4


class Net(enum.Enum):
    """What becomes of a writer that nobody expected to write so much, when RAM is full."""

    NONE = "none"
    """It meets the end of the tmpfs: there is nobody to hold it, or a lock is not sure to be had in turn."""
    HOLDS = "holds"
    """It is held in time."""


class Plenty:
    """Says what stands against a writer of unknown size."""

    def __init__(self, tier: Tier, room: Room, retention: Retention, shortage: Shortage) -> None:
        self._tier = tier
        self._room = room
        self._retention = retention
        self._shortage = shortage
        self.net = Net.NONE

    def reach_bytes(self) -> int:
        """What a writer of unknown size may write before it is held."""
        return min(REACH_BYTES_MAX, self._tier.budget_bytes // REACH_SHARE)

    def look_bytes(self) -> int:
        """What writers of unknown size write before it is looked again."""
        return self.reach_bytes() // LOOK_SHARE

    def is_caught(self) -> bool:
        """Whether a writer that RAM has no room for would be held. Where such writes are to fail, it would not."""
        return self.net is Net.HOLDS and self._room.when_full is not WhenFull.ERROR

    def is_there(self, outstanding: int) -> bool:
        """Whether there is enough for one more; `outstanding`: what all others may still take."""
        if self._tier.waiting():
            return False
        self.watch_memory()
        wanted = outstanding + self.reach_bytes() + self._tier.budget_bytes // PLENTY_SHARE
        missing = wanted - self._tier.free_bytes()
        return missing <= 0 or self._retention.evictable(missing) >= missing

    def watch_memory(self) -> None:
        """Withhold the part of the budget that the machine has not got now."""
        before = self._tier.withheld_bytes
        self._tier.withheld_bytes = self._shortage.withheld_bytes(self._tier.free_bytes(urgent=True) + before)
        if self._tier.withheld_bytes < before:
            self._tier.room_changed()
