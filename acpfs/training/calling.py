"""Calls coordinators that were started after this rank: in threads, since a call may wait for a
node that is gone, and a beat must not.

Whoever asks is the member's thread; it takes what came of it. No torch, no policy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from acpfs.errors import AcpfsError
from acpfs.logger import get_logger
from acpfs.training.wire import LinkClosedError, SocketLink

log = get_logger(__name__)
TRIES = 3
PAUSE_S = 1.0


class Calling:
    """Of one member."""

    def __init__(self, call: Callable[[str], SocketLink] | None) -> None:
        """`call`: None where nobody is ever called."""
        self._call = call
        self._called: set[tuple[int, str]] = set()
        """An address is called once: who comes in its place has another one."""
        self._answered: deque[tuple[int, SocketLink]] = deque()
        self._closed = threading.Event()

    def call(self, number: int, address: str, wake: Callable[[], object]) -> None:
        """Call it, unless that was done before; `wake` is called when it has answered."""
        if self._call is None or (number, address) in self._called:
            return
        self._called.add((number, address))
        threading.Thread(
            target=self._run,
            args=(self._call, number, address, wake),
            name="acpfs-calling",
            daemon=True,
        ).start()

    def answered(self) -> list[tuple[int, SocketLink]]:
        """Those that have, since it was asked last."""
        found = []
        with contextlib.suppress(IndexError):  # two threads may take at once, at the end
            while True:
                found.append(self._answered.popleft())
        return found

    def close(self) -> None:
        """Nobody will ask any more: connections that nobody took end, also one that is about to be
        made.
        """
        self._closed.set()
        for _, link in self.answered():
            link.close()

    def _run(
        self,
        call: Callable[[str], SocketLink],
        number: int,
        address: str,
        wake: Callable[[], object],
    ) -> None:
        for _ in range(TRIES):
            if self._closed.is_set():
                return
            try:
                self._answered.append((number, call(address)))
            except (LinkClosedError, AcpfsError, OSError) as error:
                log.info("a coordinator does not answer", number=number, error=str(error))
                time.sleep(PAUSE_S)
                continue
            if self._closed.is_set():
                self.close()
            else:
                wake()
            return
