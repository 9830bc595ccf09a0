"""Space of the backing file system, as statfs tells applications: asked for anew where what is
known is old, with patience that ends (S43), less what was written here (S433).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock

from acpfs.backing.calls import BackingTimeoutError, CallPool
from acpfs.backing.lower import Lower, SpaceInfo
from acpfs.filesystem.steps import shared, wait

SPACE_MAX_AGE_S = 2.0
"""statfs answers from memory up to this age, and beyond when the backing directory does not
answer. So a storage is asked that often at most, however many programs look while it drains.
"""
ARRIVED_MAX_S = 300.0
"""For so long without an answer, what has arrived since is taken off. What was freed meanwhile is
not known either: where each save replaces an older one, there would be nothing left after some of
them, and programs that look before they save would save nothing more.
"""


@dataclass(frozen=True, slots=True)
class Owed:
    """What was written here, of which the backing directory knows nothing yet."""

    bytes_owed: Callable[[], int]
    bytes_arrived: Callable[[], int]
    """How many it has ever got: they are not owed any more, and take room that an older answer of
    it calls free.
    """


class BackingSpace:
    """What was last heard. Used under the file system's lock."""

    def __init__(
        self,
        lower: Lower,
        calls: CallPool,
        lock: RLock,
        tell: Callable[[SpaceInfo], None],
        owed: Owed,
        patience_s: float,
    ) -> None:
        """`tell`: who else is to know, under the lock. `patience_s`: so long somebody waits for a
        new answer.
        """
        self._tell = tell
        self._owed = owed
        self._patience_s = patience_s
        self._lower = lower
        self._calls = calls
        self._lock = lock
        self._known: SpaceInfo | None = None
        self._known_at = 0.0
        """Monotonic, seconds."""
        self._heard_at = 0.0
        """The same, also of what an earlier worker had heard: when this one heard of it."""
        self._arrived_then = 0
        """Bytes that had arrived when that was asked for."""
        self._asked: Future[None] | None = None
        """The one question that is under way: a storage that hangs costs one thread."""

    def learn(self, space: SpaceInfo, *, of_earlier_worker: bool = False) -> None:
        """What was heard just now, or by an earlier worker."""
        self._known = space
        self._tell(space)
        self._heard_at = self._calls.clock.now()
        self._known_at = 0.0 if of_earlier_worker else self._heard_at

    @property
    def known(self) -> SpaceInfo:
        """What was last heard. `learn` has to come first, as for `left`."""
        assert self._known is not None
        return self._known

    async def left(self) -> SpaceInfo:
        """As applications see it: what they have written is taken, though the backing directory has
        not got it yet.

        Raises:
            InterruptedError: who asked was killed.
        """
        await self._renew()
        space = self.known
        arrived = self._owed.bytes_arrived() - self._arrived_then
        if self._calls.clock.now() - self._heard_at > ARRIVED_MAX_S:
            arrived = 0
        owed = -(-(self._owed.bytes_owed() + arrived) // max(1, space.block_bytes))
        return replace(
            space,
            blocks_free=max(0, space.blocks_free - owed),
            blocks_available=max(0, space.blocks_available - owed),
        )

    async def _renew(self) -> None:
        """Have it asked for anew where it is old; go on with that where no answer comes."""
        if self._calls.clock.now() - self._known_at <= SPACE_MAX_AGE_S:
            return
        with suppress(BackingTimeoutError):
            await wait(self._calls.patient(self._ask(), self._patience_s, when_stuck=0.0))

    def _ask(self) -> Future[None]:
        """Ends when what came is known; also when none came."""
        if self._asked is None:
            ended = shared()
            self._asked = ended
            call = self._calls.submit("statfs", self._lower.space)
            # before it is asked: what arrives while it answers is taken off twice, for 2 s, rather
            # than not at all
            call.add_done_callback(partial(self._answered, ended, self._owed.bytes_arrived()))
            return ended
        return self._asked

    def _answered(self, ended: Future[None], arrived: int, call: Future[SpaceInfo]) -> None:
        with self._lock:
            if self._asked is ended:
                self._asked = None
            if call.exception() is None:
                self._arrived_then = arrived
                self.learn(call.result())
        ended.set_result(None)
