"""Questions to the backing directory: how long their callers are patient, and which answers a
commit has overtaken.

Knows when the committed tree moves, and nothing of what is asked. A question waits in a thread of
its own; whoever has older knowledge goes on with that after `patience_s`, and whoever has none
fails after `backing_timeout_s`. Used by calls, under the file system's lock between their waits.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from threading import RLock
from typing import Any, TypeVar

from acpfs.backing.calls import CallPool
from acpfs.backing.progress import Progress
from acpfs.config import Settings
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.steps import wait
from acpfs.writeback.log.lower_tree import LowerTree

T = TypeVar("T")


class Questions:
    """See above."""

    def __init__(self, settings: Settings, calls: CallPool, tree: LowerTree, lock: RLock) -> None:
        """`calls`: threads for requests' calls on the backing directory."""
        self._settings = settings
        self._calls = calls
        self._tree = tree
        self._lock = lock
        self.stale = 0
        self.overtaken_answers = 0
        """How often somebody went on with older knowledge; answers that do not count."""

    async def call(self, label: str, function: Callable[..., T], *arguments: Any) -> T:
        """A call without which the request cannot go on.

        Raises:
            OSError: what the backing directory answered; EIO when it did not within
                `backing_timeout_s`.
        """
        return await self.answer(label, self._calls.submit(label, function, *arguments))

    async def answer(self, label: str, future: Future[T], progress: Progress | None = None) -> T:
        """`call` for one that is under way; `progress`: patience goes by that, not by the time
        since it began.
        """
        moved = None if progress is None else progress.mark
        try:
            return await wait(
                self._calls.patient(future, self._settings.backing_timeout_s, moved=moved)
            )
        except TimeoutError:
            raise OSError(errno.EIO, f"{label}: no answer from the backing directory") from None

    async def renew(
        self,
        label: str,
        function: Callable[..., T],
        *arguments: Any,
        known: bool,
        late: Callable[[T], None],
    ) -> T | None:
        """A call that renews knowledge; None: go on with what is known.

        `late`: takes, under the lock, an answer that came after that.
        """
        if not known:
            return await self.call(label, function, *arguments)
        epoch = self._tree.epoch
        future = self._calls.submit(label, function, *arguments)
        try:
            return await wait(
                self._calls.patient(future, self._settings.patience_s, when_stuck=0.0)
            )
        except InterruptedError:
            # who asked was killed: that is no answer, and who asks again and again has to end
            raise
        except OSError:
            self.stale += 1
            if not future.done():
                future.add_done_callback(partial(self._came_late, epoch, late))
            return None

    def _came_late(self, epoch: int, late: Callable[[T], None], future: Future[T]) -> None:
        """Else a backing directory that always takes longer than patience lasts would never be
        heard.
        """
        if not future.cancelled() and future.exception() is None:
            with self._lock:
                if not self.overtaken(epoch):
                    late(future.result())

    @property
    def moves(self) -> int:
        """For `overtaken`."""
        return self._tree.epoch

    def overtaken(self, epoch: int) -> bool:
        """Whether a commit moved things while the question was under way."""
        # odd: a move was under way when the question was asked; another number: one came in between
        # (interleaving 3)
        overtaken = epoch % 2 == 1 or self._tree.epoch != epoch
        self.overtaken_answers += overtaken
        return overtaken

    async def at_rest(self, *, known: bool) -> bool:
        """Wait until the move that is under way has ended; False: it takes long, go on with what is
        known.

        Raises:
            OSError: EIO: nothing is known, and it did not end within `backing_timeout_s`.
        """
        patience_s = self._settings.patience_s if known else self._settings.backing_timeout_s
        try:
            await wait(
                self._calls.patient(
                    self._tree.at_rest(), patience_s, when_stuck=0.0 if known else None
                )
            )
        except TimeoutError:
            if known:
                self.stale += 1
                return False
            raise OSError(errno.EIO, "a rename on the backing directory does not end") from None
        return True

    async def at_place(
        self, node: Node, question: Callable[..., Awaitable[T]], *arguments: Any, again: bool = True
    ) -> T:
        """Ask something about a node: `question(path, *arguments)`, with its path on the backing
        directory.

        What a commit that moves things meanwhile made of it does not count: a path that leads
        nowhere, or to something else, for a moment. `again`: ask again also after an answer that
        was overtaken, not only after an error.

        Raises:
            OSError: ESTALE: the node is not there (any more); or what the question raised.
        """
        while True:
            epoch = self._tree.epoch
            path = self._tree.path(node.ino)
            if path is None:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            try:
                answer = await question(path, *arguments)
            except OSError as error:
                if isinstance(error, InterruptedError) or not (
                    self.overtaken(epoch) or self._tree.path(node.ino) != path
                ):
                    raise
            else:
                if not (again and self.overtaken(epoch)):
                    return answer
            await self.at_rest(known=False)
