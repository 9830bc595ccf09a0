"""Space of the backing file system, as statfs tells applications: from memory, renewed behind the
answer, so that `df` never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import RLock

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower, SpaceInfo

SPACE_MAX_AGE_S = 2.0
"""statfs answers from memory up to this age, and beyond when the backing directory does not
answer.
"""


class BackingSpace:
    """What was last heard. Used under the file system's lock."""

    def __init__(
        self,
        lower: Lower,
        calls: CallPool,
        lock: RLock,
        tell: Callable[[SpaceInfo], None],
        owed_bytes: Callable[[], int],
    ) -> None:
        """`tell`: who else is to know, under the lock.

        `owed_bytes`: what was written here and is not there yet.
        """
        self._tell = tell
        self._owed_bytes = owed_bytes
        self._lower = lower
        self._calls = calls
        self._lock = lock
        self._known: SpaceInfo | None = None
        self._known_at = 0.0
        """Monotonic, seconds."""
        self._asked = False

    def learn(self, space: SpaceInfo, *, of_earlier_worker: bool = False) -> None:
        """What was heard just now, or by an earlier worker."""
        self._known = space
        self._tell(space)
        self._known_at = 0.0 if of_earlier_worker else self._calls.clock.now()

    def left(self) -> SpaceInfo:
        """As applications see it: what they have written is taken, though the backing directory has
        not got it yet.
        """
        space = self.now()
        owed = -(-self._owed_bytes() // max(1, space.block_bytes))
        return replace(
            space,
            blocks_free=max(0, space.blocks_free - owed),
            blocks_available=max(0, space.blocks_available - owed),
        )

    def now(self) -> SpaceInfo:
        """The last answer, which is asked for anew where it is old. `learn` has to come first."""
        assert self._known is not None
        if self._calls.clock.now() - self._known_at > SPACE_MAX_AGE_S and not self._asked:
            self._asked = True
            future = self._calls.submit("statfs", self._lower.space)
            future.add_done_callback(
                lambda f: self._answered(None if f.exception() else f.result())
            )
        return self._known

    def _answered(self, space: SpaceInfo | None) -> None:
        with self._lock:
            self._asked = False
            if space is not None:
                self.learn(space)
