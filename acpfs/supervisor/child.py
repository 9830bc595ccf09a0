"""A worker as its supervisor sees it: what it said last, and whether it is well.

Owns the limits of its silence: while it starts, each step has a limit of its own, told by name;
while it serves, it gives signs of life. Says what is wrong and does nothing about it. Standard
library only, no thread; one per worker, the supervisor's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from acpfs.errors import ExitCode
from acpfs.supervisor import channel, stuck_processes
from acpfs.supervisor.stopping import Readiness, Stop
from acpfs.supervisor.templates import Template

HANG_VARIABLE = "ACPFS_HANG_TIMEOUT_S"
HANG_TIMEOUT_S = 30.0
"""Without a sign of life, or with one request in a thread: far beyond what a step takes, and any
stall of a machine in heavy use.
"""
START_VARIABLE = "ACPFS_START_TIMEOUT_S"
START_TIMEOUT_S = 120.0
"""For one step of a worker's start. Those that wait for the backing directory end by themselves
after 30 s; to load the rows of a large RAM tier takes seconds.
"""
OVERSLEPT_S = 2.0
"""What a supervisor may be late without looking at its worker with other eyes."""
DUMP_WAIT_S = 1.0
"""Between asking a hung worker for its stacks and killing it."""
UNSENT_AGAIN_S = 0.1
"""Until what found no room is tried again, or its process is to be watched where there was no
descriptor for that.
"""
FIRST_STEP = "loading the program"


class Limits:
    """From the environment of the process, for tests and odd machines."""

    def __init__(self) -> None:
        self.hang_s = float(os.environ.get(HANG_VARIABLE, HANG_TIMEOUT_S))
        self.start_s = float(os.environ.get(START_VARIABLE, START_TIMEOUT_S))
        self.shortest_s = min(self.hang_s, self.start_s)


class Attention:
    """How long this process did not do what it should have: it was stopped, or got no processor."""

    def __init__(self) -> None:
        self._awake_at = time.monotonic()

    def overslept_s(self, patience_s: float | None) -> float:
        """Since the last call, beyond the time that it meant to sleep; what is as short as a busy
        machine's pauses does not count.
        """
        now = time.monotonic()
        since = self._awake_at
        self._awake_at = now
        late_s = 0.0 if patience_s is None else now - since - patience_s
        return late_s if late_s > OVERSLEPT_S else 0.0


class Child:
    """One worker, from the order to start it."""

    def __init__(
        self, end: socket.socket, template: Template | None = None, *, told: Stop = Stop.NOT_TOLD
    ) -> None:
        """`template`: has the order to fork it; None: it lives already.

        `told`: to end, by an earlier supervisor.
        """
        self.end = end
        self._template = template
        self.pid = 0
        """The process, by its template's word, which comes in the order of the orders; 0: nothing
        was said yet.
        """
        self.own_pid = 0
        """The same by its own word."""
        self.pidfd = -1
        self.main_end = -1
        self.stuck_at = 0.0
        """Since when nothing is left of it but a call that does not return; 0: it lives."""
        self.step = FIRST_STEP
        self.step_at = time.monotonic()
        """What its start is at, and since when."""
        self.serving_at = 0.0
        """Monotonic time, seconds; 0: not yet."""
        self.beat_at = 0.0
        self.busy_s = 0.0
        self.dumped_at = 0.0
        """When it was asked for its stacks before it is killed; 0: it is not hung."""
        self.exit_code: int | None = None
        """It ended on purpose, with this code for whoever asked."""
        self.error: dict[str, Any] | None = None
        self.wanted = ""
        """The resource of the machine for want of which it ended, or was not forked; "": it was
        another reason.
        """
        self.gave_up_a_call = False
        """It ended by a bug in a call of an application, which the next one answers and does not
        try again.
        """
        self.leaving = False
        self._has_old_log = False
        self._told = told
        self._unsent: deque[tuple[channel.Message, list[int]]] = deque()
        """With copies of the descriptors: what they are copies of may be gone when there is
        room.
        """
        self._signals: list[int] = []
        """That came while its process could not be watched."""

    @property
    def readiness(self) -> Readiness:
        """How far it is."""
        if not self.pid:
            return Readiness.ORDERED
        return Readiness.SERVING if self.serving_at else Readiness.STARTING

    @property
    def is_orphan(self) -> bool:
        """Whether its template is gone and has not said that it has forked it."""
        return not self.pid and self._template is not None and self._template.is_gone

    def heard(self, message: dict[str, Any]) -> None:
        """What it says of itself."""
        now = time.monotonic()
        self.own_pid = message.get("pid", self.own_pid)
        if "step" in message:
            self.step = message["step"]
            self.step_at = now
        if "beat" in message:
            self.beat_at = now
            self.busy_s = message["beat"]
        if "serving" in message:
            self.serving_at = now
            self.beat_at = now
            if self._has_old_log:
                self.kill(signal.SIGHUP)
        if "error" in message:
            self.error = message["error"]
            self.wanted = message["error"].get("wanted", "")
        if "given_up" in message:
            self.gave_up_a_call = message["given_up"]
        if "ended" in message:
            self.exit_code = message["ended"]

    def kill(self, number: int) -> None:
        """Send it a signal; one that has ended does not matter.

        SIGHUP not before it serves: until then it would die of it.
        """
        if number == signal.SIGHUP and not self.serving_at:
            self._has_old_log = True  # perhaps: it may have opened that already
            return
        if self.pidfd < 0:
            self._signals.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def not_forked(self, why: str) -> None:
        """Its template could not."""
        self.wanted = "processes"
        self.error = {
            "exit_code": int(ExitCode.ENVIRONMENT),
            "message": f"the machine has no process left for acpfs: {why}",
        }

    def let_go(self) -> None:
        """It has ended: it hears nothing more."""
        while self._unsent:
            self._drop_first()

    def watched(self, pidfd: int) -> None:
        """Its process can be told apart from one that gets its number later: what it was to be sent
        is sent.
        """
        self.pidfd = pidfd
        signals = self._signals
        self._signals = []
        for number in signals:
            self.kill(number)

    def send(self, message: channel.Message, fds: Sequence[int] = ()) -> None:
        """Say something on its channel: now, or when there is room.

        One that is stopped, or busy, must not stop its supervisor.
        """
        self._unsent.append((message, [os.dup(fd) for fd in fds]))
        self.send_waiting()

    def send_waiting(self) -> None:
        """What found no room, in order."""
        while self._unsent and self.end.fileno() >= 0:
            try:
                channel.send(self.end, *self._unsent[0], wait=False)
            except BlockingIOError:
                return
            self._drop_first()
        while self._unsent:
            self._drop_first()  # it has closed its end: it ends

    def _drop_first(self) -> None:
        for fd in self._unsent.popleft()[1]:
            os.close(fd)

    def tell(self, stop: Stop) -> None:
        """To end, each once: it drains at a signal, and leaves what is dirty when it hears that
        here, for signals come from others, too.

        A worker of older code counts signals. Two of one number may come as one.
        """
        if stop is self._told:
            return
        self._told = stop
        if stop is Stop.NOW:
            self.send({"hurry": True})
        self.kill(signal.SIGINT if stop is Stop.NOW else signal.SIGTERM)

    def is_left_behind(self, now: float, *, allowed: bool) -> bool:
        """Whether nothing is left of it but a call that does not return, and that for a while."""
        if not allowed or not stuck_processes.is_stuck(self.pid):
            if self.main_end >= 0:
                self.stuck_at = 0.0
            return False
        self.stuck_at = self.stuck_at or now
        return now - self.stuck_at >= stuck_processes.STUCK_S

    def look_again_s(self, limits: Limits) -> float:
        """When it is to be looked at next."""
        if self.stuck_at:
            return stuck_processes.LOOK_AGAIN_S
        if self._unsent or (self.pid and self.pidfd < 0):
            return UNSENT_AGAIN_S
        return DUMP_WAIT_S / 2 if self.dumped_at else min(1.0, limits.shortest_s / 4)

    def excuse(self, seconds: float) -> None:
        """Nobody listened for so long: that was no silence of the worker."""
        now = time.monotonic()
        self.step_at = min(now, self.step_at + seconds)
        self.beat_at = min(now, self.beat_at + seconds)
        self.dumped_at = 0.0

    def is_well(self, now: float, limits: Limits) -> bool:
        """Whether it goes on; its error says where its start did not."""
        if self.serving_at:
            return now - self.beat_at < limits.hang_s and self.busy_s < limits.hang_s
        if now - self.step_at < limits.start_s:
            return True
        text = (
            f"the start did not get past this step within {limits.start_s:g} s: {self.step}; the "
            "stacks are in the log"
        )
        self.error = self.error or {"exit_code": int(ExitCode.ENVIRONMENT), "message": text}
        return False
