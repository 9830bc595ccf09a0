"""The processes that workers are forked from: of the code in use, of newer code while it loads, of
the older until the newer serves.

Owns which is which; what becomes of workers when one ends is the supervisor's affair. Standard
library only, no thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from acpfs.supervisor import channel


class Template:
    """One of them, as its supervisor sees it."""

    def __init__(self, end: socket.socket, pid: int) -> None:
        self.end = end
        self.spawned_at = time.monotonic()
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.pidfd = -1  # it has crashed by now

    @classmethod
    def spawned(cls) -> Template:
        """A new one, of the installed code."""
        ours, theirs = channel.pair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            arguments = [sys.executable, "-m", "acpfs.worker.template", str(theirs.fileno())]
            return cls(ours, os.posix_spawn(sys.executable, arguments, os.environ, setpgroup=0))

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, and all that it said was heard."""
        return self.end.fileno() < 0

    def kill(self) -> None:
        """One that hangs; it is in no call of the backing directory."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class Templates:
    """The supervisor's."""

    def __init__(
        self,
        watch: Callable[[socket.socket, Callable[[], None]], None],
        forget: Callable[[socket.socket | int], None],
        heard: Callable[[Template], None],
    ) -> None:
        """`heard`: one says something, or has ended."""
        self._watch = watch
        self._forget = forget
        self._heard = heard
        self.current: Template | None = None
        self.next: Template | None = None
        """Of new code, while it loads."""
        self._old: Template | None = None
        """Of the old code, until a worker of the new one serves."""

    @property
    def are_changing(self) -> bool:
        """Whether a reload is under way."""
        return self.next is not None or self._old is not None

    def have(self) -> Template:
        """The one in use; a new one where there is none."""
        if self.current is None:
            self.current = self.spawn()
        return self.current

    def spawn(self) -> Template:
        """Start one.

        Raises:
            OSError: the machine has no process or descriptor left.
        """
        template = Template.spawned()
        self._watch(template.end, lambda: self._heard(template))
        return template

    def load_next(self) -> None:
        """Have the installed code load, unless it does already."""
        if self.next is None:
            self.next = self.spawn()

    def end_late(self, now: float, start_s: float) -> None:
        """New code that takes too long to load; its end is told like that of one that cannot be
        loaded.
        """
        if self.next is not None and now - self.next.spawned_at >= start_s:
            self.next.kill()

    def kill(self) -> None:
        """The one in use."""
        if self.current is not None:
            self.current.kill()

    def ended(self, template: Template) -> None:
        """Forget one that has ended."""
        self._let_go(template)
        if template is self.next:
            self.next = None
        elif template is self._old:
            self._old = None
        elif template is self.current:
            self.current = None

    def go_forward(self) -> bool:
        """Workers are of the new code from now on, if that has loaded."""
        if self.next is None:
            return False
        self._old = self.current
        self.current = self.next
        self.next = None
        return True

    def go_back(self) -> bool:
        """To the old code, if no worker of the new one has served."""
        if self._old is None:
            return False
        if self.current is not None:
            self._let_go(self.current)
        self.current = self._old
        self._old = None
        return True

    def served(self) -> None:
        """A worker of the code in use serves: the old code is not needed any more."""
        if self._old is not None:
            self._let_go(self._old)
            self._old = None

    def end(self) -> None:
        """No worker is to be forked any more, also by one that hangs and has an order."""
        for template in (self.current, self.next, self._old):
            if template is not None:
                template.kill()
                self._let_go(template)
        self.current = None
        self.next = None
        self._old = None

    def _let_go(self, template: Template) -> None:
        """It ends with its channel."""
        self._forget(template.end)
        self._forget(template.pidfd)
