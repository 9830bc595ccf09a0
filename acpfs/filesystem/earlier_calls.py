"""Calls of killed workers that have not returned: what they write to the backing directory may
still arrive.

A worker that is killed while the backing directory hangs leaves its call in the kernel
(`supervisor.stuck_processes`). The next worker serves at once, and the same file may be written to
through it. Whoever is about to change a file that an earlier worker wrote straight to the backing
directory waits for `over` first, for what arrives late would lie over newer bytes.
"""

from __future__ import annotations

from concurrent.futures import Future

from acpfs.filesystem.steps import broken_off, shared


class EarlierCalls:
    """Of the workers before this one."""

    def __init__(self) -> None:
        self.over = shared()
        """Done when none of them can have an effect any more. Any number of calls may wait for
        it.
        """
        self.over.set_result(None)

    def begin_after(self, ended: Future[None]) -> None:
        """There are such calls; `ended` is done when they have returned. Before anything is
        served.
        """
        over = shared()
        self.over = over
        ended.add_done_callback(lambda ended: _tell(ended, over))


def _tell(ended: Future[None], over: Future[None]) -> None:
    error = broken_off() if ended.cancelled() else ended.exception()
    if error is None:
        over.set_result(None)
    else:
        over.set_exception(error)
