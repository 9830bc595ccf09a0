"""Whether a coordinator stays: it ends behind the last member, and where nobody ever comes.

Pure: times are given, never asked for.
"""

from __future__ import annotations

UNUSED_S = 600.0
"""A coordinator to which nobody ever comes ends."""
ORPHANED_S = 60.0
"""So does a standby whose job ended while it was started, or behind a cut that hid its end; it has
a file open in the mount.
"""


class Lingering:
    """Of one coordinator."""

    def __init__(self, now: float, *, knows_its_job: bool) -> None:
        """`knows_its_job`: it is the job's first one, or one of a job that replaces ranks: members
        are certain to come.
        """
        self._knows_its_job = knows_its_job
        self._last_member = now
        self._is_dismissed = False

    @property
    def is_dismissed(self) -> bool:
        """Whether it was told to end as soon as no rank is connected."""
        return self._is_dismissed

    def dismiss(self) -> None:
        """Schedulers tell all processes of a job to end, also the one that has to command the last
        save.
        """
        self._is_dismissed = True

    def needed(self, now: float) -> None:
        """A member needs it, or did until now."""
        self._last_member = now

    def is_over(
        self, now: float, *, has_members: bool, has_others: bool, alone_s: float | None
    ) -> bool:
        """Whether to end.

        `alone_s`: what the job says of coordinators that are alone; None: nobody has registered
        yet.

        Members that are connected say little by themselves: a network that is cut says nothing of
        their ends.
        """
        unused_s = UNUSED_S if self._knows_its_job or has_others else ORPHANED_S
        patience = 0.0 if self._is_dismissed else unused_s if alone_s is None else alone_s
        return now - self._last_member > max(patience, ORPHANED_S if has_members else 0.0)
