"""The worker's tasks that give its metrics away: to a file now and then, and over HTTP.

Their failure never ends a mount that serves.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from acpfs.config import Settings
from acpfs.control.metrics import Metrics
from acpfs.errors import MachineError, is_no_thread
from acpfs.logger import get_logger
from acpfs.runtime.threads import Threads

FILE_INTERVAL_S = 15.0
PORT_INTERVAL_S = 2.0

log = get_logger(__name__)


class MetricsTasks:
    """One per worker."""

    def __init__(
        self, settings: Settings, metrics: Metrics, threads: Threads, *, taken_over: bool
    ) -> None:
        """`taken_over`: there was a worker before, what remains of which may keep the port."""
        self._settings = settings
        self._metrics = metrics
        self._taken_over = taken_over
        self._threads = threads

    async def write(self) -> None:
        """Replace the file, over and over; ends at once where none is wanted."""
        while self._settings.metrics_file is not None:
            try:
                await self._threads.run_sync(self._metrics.write, self._settings.metrics_file)
            except OSError as error:
                log.warning("metrics file could not be written", error=str(error))
            await trio.sleep(FILE_INTERVAL_S)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Over HTTP.

        What remains of a killed worker keeps the port for as long as its call hangs: no reason not
        to serve the mount.
        """
        stop = self._start_http()
        if stop is None:
            log.warning(
                "metrics are not served until their port is free, and the machine has a thread "
                "for them",
                port=self._settings.metrics_port,
            )
        task_status.started()
        while stop is None:
            await trio.sleep(PORT_INTERVAL_S)
            stop = self._start_http()
        try:
            await trio.sleep_forever()
        finally:
            stop()

    def _start_http(self) -> Callable[[], None] | None:
        try:
            return self._metrics.start_http(
                self._settings.metrics_port, self._settings.metrics_address
            )
        except RuntimeError as error:
            if not is_no_thread(error):
                raise
            return None
        except OSError as error:
            if self._taken_over:
                return None
            raise MachineError(
                f"metrics cannot be served on port {self._settings.metrics_port} of "
                f"{self._settings.metrics_address}: {error.strerror}"
            ) from error
