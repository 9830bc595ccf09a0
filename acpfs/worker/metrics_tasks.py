"""The worker's tasks that give its metrics away: to a file now and then, and over HTTP.

Their failure never ends a mount that serves.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import trio

from acpfs.config import Settings
from acpfs.control.metrics import Metrics, is_bound_to, listen_for_scrapes
from acpfs.errors import MachineError
from acpfs.logger import get_logger
from acpfs.runtime.threads import Threads

FILE_INTERVAL_S = 15.0
AGAIN_S = 2.0

log = get_logger(__name__)


class MetricsTasks:
    """One per worker."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        threads: Threads,
        kept_fds: Sequence[int],
        keep: Callable[[Sequence[int]], None],
        *,
        taken_over: bool,
    ) -> None:
        """`kept_fds`: the socket at which an earlier worker listened, if it kept one: whatever
        remains of that worker, the port is ours. `keep`: has ours kept for the next one.
        `taken_over`: there was a worker before; where it kept none, its remains may have the port.
        """
        self._settings = settings
        self._metrics = metrics
        self._threads = threads
        self._kept_fds = kept_fds
        self._keep = keep
        self._taken_over = taken_over

    async def write(self) -> None:
        """Replace the file, over and over; ends at once where none is wanted."""
        while self._settings.metrics_file is not None:
            try:
                await self._threads.run_sync(self._metrics.write, self._settings.metrics_file)
            except OSError as error:
                log.warning("metrics file could not be written", error=str(error))
            await trio.sleep(FILE_INTERVAL_S)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Over HTTP; ends at once where that is not wanted.

        Raises:
            MachineError: the port is taken, by somebody else.
        """
        if not self._settings.metrics_port:
            self._let_go()
            task_status.started()
            return
        port = self._settings.metrics_port
        address = self._settings.metrics_address
        listening = self._listen(port, address)
        if listening is None:
            log.warning("metrics are not served until their port is free", port=port)
        task_status.started()
        while listening is None:
            await trio.sleep(AGAIN_S)
            listening = self._listen(port, address)
        with listening:
            stop = self._metrics.serve_http(listening, self._threads)
            try:
                await trio.sleep_forever()
            finally:
                stop()

    def _listen(self, port: int, address: str) -> socket.socket | None:
        """None: not now."""
        try:
            return self._bound(port, address)
        except OSError as error:
            if self._taken_over:
                return None
            raise MachineError(
                f"metrics cannot be served on port {port} of {address}: {error.strerror}"
            ) from error

    def _bound(self, port: int, address: str) -> socket.socket:
        for fd in self._kept_fds:
            kept = socket.socket(fileno=os.dup(fd))
            if is_bound_to(kept, port, address):
                return kept
            kept.close()
        self._let_go()  # else its port is never free
        made = listen_for_scrapes(port, address)
        self._keep(
            [os.dup(made.fileno())]
        )  # given to the next supervisor, too, whoever closes ours
        return made

    def _let_go(self) -> None:
        """Mounted anew with other settings, or in another place: nobody serves at the old one."""
        if not self._kept_fds:
            return
        self._keep([])
        for fd in self._kept_fds:
            os.close(fd)
        self._kept_fds = ()
