"""What is known of a mount beside its descriptors, and goes on: to each worker with its orders, and
from one supervisor to the next.

Owns the three forms of it, which other versions read and write, too. Pure; the supervisor's,
standard library only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from acpfs.errors import unknown_version
from acpfs.supervisor.instances import next_generation

RECORD_VERSION = 1
"""Of what one supervisor leaves to the next. New fields do not count: who does not know them does
without, and who misses them knows what an older acpfs did.
"""


def unknown(record: dict[str, Any]) -> str:
    """Why a mount cannot be gone on with by what was left of it; "": it can."""
    return unknown_version(
        "what its supervisor left",
        record.get("version", 1),
        RECORD_VERSION,
        "go on with it with the newer acpfs",
    )


@dataclass
class MountState:
    """One per supervisor."""

    settings: dict[str, Any]
    """As JSON has them."""
    instance: str = ""
    """Who this supervisor is (`instances`)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What workers have remembered for the next one; not looked into."""
    workers: int = 0
    """How many have served."""
    died_at: float | None = None
    """Monotonic, seconds: since when nobody serves; None: somebody does, or nobody has yet."""
    reason: str = ""
    """Why the last worker is not there any more."""
    lineage: dict[str, Any] = field(default_factory=dict)
    """Who had the mount (`instances`)."""

    def record(self) -> dict[str, Any]:
        """For the next supervisor."""
        return {
            "facts": self.facts,
            "workers": self.workers,
            "settings": self.settings,
            "version": RECORD_VERSION,
            **self.lineage,
        }

    def orders(self) -> dict[str, Any]:
        """For the next worker."""
        return {
            "settings": self.settings,
            "facts": self.facts,
            "workers_before": self.workers,
            "died_at": self.died_at,
            "reason": self.reason,
            "lineage": self.lineage,
            # absent: an older supervisor, whose second signal ends a worker at once
            "says_hurry": True,
        }

    def begin(self) -> None:
        """Nobody had the mount before."""
        self.workers = 0
        self.died_at = None
        self.reason = ""
        self.lineage = self.lineage or next_generation({}, self.instance)

    def go_on_from(self, record: dict[str, Any], renewed: dict[str, Any], why: str) -> None:
        """Take over from another supervisor, whose record is not `unknown`; `renewed`: settings
        that hold from now on.

        A record of an older acpfs may have no settings.
        """
        self.settings = record.get("settings", self.settings) | renewed
        self.reason = why
        self.facts = record["facts"]
        self.workers = max(1, record["workers"])
        self.died_at = record.get("died_at", time.monotonic())
        self.lineage = next_generation(record, self.instance)

    def adopt(self, message: dict[str, Any]) -> None:
        """Take over from a living worker; an older one knows no lineage."""
        self.settings = message["settings"]
        self.facts = message["facts"]
        self.workers = message["workers"]
        self.lineage = message.get("lineage") or next_generation({}, "")

    def served(self) -> None:
        """Another worker serves."""
        self.workers += 1
        self.died_at = None
        self.reason = ""
