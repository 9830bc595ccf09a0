"""The conductor of a job with one node: what launchers do together, asked in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from acpfs.training.coordinator.launchers import Launchers, Post
from acpfs.training.messages import Exited, FromLauncher, Idle, Launcher, Planned, ToLauncher


class Alone:
    """One per launcher. Nothing has to be waited for: with one node there is no time-out."""

    def __init__(self) -> None:
        self._launchers = Launchers()
        self._name = ""
        self._said: deque[ToLauncher] = deque()
        self._news = trio.Event()

    def begin(self, introduce: Callable[[str], Launcher]) -> None:
        """Register; nobody is on another node."""
        self.tell(introduce("127.0.0.1"))

    def tell(self, message: FromLauncher) -> None:
        """Ask what is to be done now."""
        self._said.extend(post.message for post in self._answer(message))
        self._news.set()

    async def next(self) -> ToLauncher:
        """What is to be done."""
        while not self._said:
            self._news = trio.Event()
            await self._news.wait()
        return self._said.popleft()

    def _answer(self, message: FromLauncher) -> list[Post]:
        now = trio.current_time()
        launchers = self._launchers
        if isinstance(message, Launcher):
            self._name = message.name
            return launchers.registered(message, now)
        if isinstance(message, Exited):
            return launchers.exited(
                self._name, message.rank, message.status, now, updated=message.updated
            )
        if isinstance(message, Idle):
            return launchers.idle(self._name, message.port, now)
        assert isinstance(message, Planned)
        return launchers.planned(self._name, now)
