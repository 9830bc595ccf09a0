"""Brings a device out of the collectives of its process groups, each by a thread of its own: an
abort may take long, or never return, and another group's must not wait for it.

`begin` may be called from any thread, at any time, again and again. The hold comes before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from acpfs.logger import get_logger
from acpfs.training.stacks import all_stacks
from acpfs.training.torch.device import Device

log = get_logger(__name__)
LOOK_S = 0.001


class _Abort:
    """Of one group, in a thread of its own.

    A signal's handler may raise in the main thread within `Thread.start`: then nobody knows whether
    the thread runs. So that says itself that it does, and whoever begins again starts another one
    where none has said so; of several the first one does it.
    """

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end
        self._mine = threading.Lock()
        self.has_begun = False
        self.over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="acpfs-abort", daemon=True).start()

    def _run(self) -> None:
        self.has_begun = True
        if self._mine.acquire(blocking=False):
            try:
                self._end()
            finally:
                self.over.set()


class Aborts:
    """Of one rank."""

    def __init__(
        self,
        device: Device,
        groups: Callable[[], Iterable[Any]],
        may_end_everything: Callable[[], bool] = lambda: True,
        update_s: float = 30.0,
    ) -> None:
        """`groups`: those whose collectives the device does, and that there are right now.

        `may_end_everything`: no update is under way; waited for, `update_s` at most, where the
        device knows no other way than to end all that runs on it.
        """
        self.device = device
        self._groups = groups
        self._may_end_everything = may_end_everything
        self._update_s = update_s
        self._aborts: dict[int, _Abort] = {}
        """By group."""
        self._kept: list[Any] = []
        """Groups that were ended: no other one gets their number."""
        self._beginning = threading.Lock()
        self._is_stopped = False
        """Whether the device was, and was not started again."""

    def begin(self) -> int:
        """End them, unless that has begun; how many were begun by this call."""
        begun = 0
        with self._beginning:
            for group in self._groups():
                number = 0 if self.device.ends_everything else id(group)
                abort = self._aborts.get(number)
                if abort is None:
                    abort = _Abort(partial(self._end, group))
                    self._aborts[number] = abort
                    self._kept.append(group)
                    begun += 1
                if not abort.has_begun:
                    abort.start()
        return begun

    def _end(self, group: Any) -> None:
        try:
            self.device.enter_thread()
            if self.device.ends_everything:
                until = time.monotonic() + self._update_s
                while not self._may_end_everything() and time.monotonic() < until:
                    time.sleep(LOOK_S)
                self._is_stopped = True
            self.device.end_collectives(group)
        except Exception:
            log.exception("collectives could not be aborted", group=_name(group))

    def over(self, within_s: float) -> bool:
        """Whether all that were begun are; waits for them. Not in a thread that aborts."""
        until = time.monotonic() + within_s
        late = [
            abort
            for abort in list(self._aborts.values())
            if not abort.over.wait(max(0.0, until - time.monotonic()))
        ]
        if late:
            log.error("an abort does not end", aborts=len(late), stacks=all_stacks())
        elif self._is_stopped:
            self._is_stopped = False
            self.device.restart()
        return not late


def _name(group: Any) -> str:
    return str(getattr(group, "group_name", group))
