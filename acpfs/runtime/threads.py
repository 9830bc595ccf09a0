"""Threads of the daemon, all of which are started here: where the machine has none left, what they
are to do waits until it has.

A full control group (pids.max), a user's limit or kernel.threads-max is a state of the machine that
passes, like a full disk. Python raises RuntimeError for it, in the middle of whatever was being
done: eight workers in a row died of that within a second, and the mount with them. In a process
that has said `be_ready`, `start` never fails: one thread, which was there before, tries again for
all that lack one. In any other process it fails with an OSError, as a process that cannot be
started does.

Knows nothing of what the threads do. Thread-safe; its lock is the last one that anybody takes, so
`start` may be called under any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from acpfs.errors import NoThreadError, is_no_thread
from acpfs.logger import get_logger

T = TypeVar("T")

AGAIN_S = 0.2
"""Between two tries to start what lacks a thread."""
NAMED_MAX = 5
"""Of those that lack one, in a message."""
Event = threading.Event
"""As `Threads.event` makes them."""
LACK = "the machine has no thread left for acpfs"
ADVICE = "pids.max of the control group, ulimit -u, kernel.threads-max"

log = get_logger(__name__)


class Running:
    """Something that a thread does, or will do when it has one."""

    def __init__(
        self,
        name: str,
        function: Callable[..., object],
        arguments: tuple[Any, ...],
        withdrawn: Callable[[Running], bool],
    ) -> None:
        """`withdrawn`: take it off the list of those that lack a thread; whether it was on it."""
        self.name = name
        self._todo: tuple[Callable[..., object], tuple[Any, ...]] | None = (function, arguments)
        self._withdrawn = withdrawn
        self._ended = threading.Event()

    def begin(self) -> bool:
        """Start the thread; False where the machine has none.

        A new object each time: Python says nothing of starting one twice.
        """
        try:
            threading.Thread(target=self._run, name=self.name, daemon=True).start()
        except RuntimeError as error:
            if not is_no_thread(error):
                raise
            return False
        return True

    def _run(self) -> None:
        assert self._todo is not None
        function, arguments = self._todo
        self._todo = None  # nothing is kept alive beyond its use
        try:
            function(*arguments)
        finally:
            self._ended.set()

    def withdraw(self) -> bool:
        """It need not be done any more; whether it had no thread yet, and never will."""
        if not self._withdrawn(self):
            return False
        self._todo = None
        self._ended.set()
        return True

    def is_alive(self) -> bool:
        """Whether it is under way, or waits for a thread."""
        return not self._ended.is_set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it was done; whether it was, or was withdrawn."""
        return self._ended.wait(timeout_s)

    def end(self, timeout_s: float | None = None) -> bool:
        """`join` for what was told to end.

        What has no thread yet is withdrawn: nobody knows when it would come.
        """
        return self.withdraw() or self.join(timeout_s)


@dataclass(frozen=True, slots=True)
class Lack:
    """What has no thread."""

    names: tuple[str, ...]
    since_s: float
    """For how long the first of them has waited."""

    def __str__(self) -> str:
        names = ", ".join(self.names[:NAMED_MAX])
        if len(self.names) > NAMED_MAX:
            names += f" and {len(self.names) - NAMED_MAX} more"
        return f"{LACK} ({ADVICE}); for {self.since_s:.0f} s this waits: {names}"


class Threads:
    """One per process; others in tests."""

    def __init__(self) -> None:
        self._lacking: dict[object, tuple[str, Running | None, float]] = {}
        """In the order in which they came: name, what is to be started, since when.

        None: another than this starts it.
        """
        self._changed = threading.Condition()
        self._is_ready = False
        self._while_lacking: Callable[[float], None] = _nothing

    def be_ready(self, patience_s: float) -> None:
        """Have the thread that tries again for the others.

        Raises:
            NoThreadError: there was none for so long.
        """
        if self._is_ready:
            return
        until = time.monotonic() + patience_s
        starter = Running("starter", self._try_again, (), lambda _running: False)
        while not starter.begin():
            if time.monotonic() >= until:
                raise NoThreadError("starter")
            threading.Event().wait(AGAIN_S)
        self._is_ready = True

    def follow(self, while_lacking: Callable[[float], None]) -> None:
        """Have this called at each try in vain, with the seconds for which the first of them has
        waited; None of it before.
        """
        self._while_lacking = while_lacking

    def start(
        self, name: str, function: Callable[..., object], *arguments: Any, patience_s: float = 0.0
    ) -> Running:
        """Do it in a daemon thread: at once, or as soon as the machine has one.

        Raises:
            NoThreadError: there was none within `patience_s`, in a process in which nobody tries
                again.
        """
        running = Running(name, function, arguments, self._withdraw)
        until = time.monotonic() + patience_s
        while not running.begin():
            if self._is_ready:
                self._lacks(running, name, running)
                break
            if time.monotonic() >= until:
                raise NoThreadError(name)
            threading.Event().wait(AGAIN_S)
        return running

    async def run_sync(
        self, function: Callable[..., T], *arguments: Any, abandon_on_cancel: bool = False
    ) -> T:
        """`trio.to_thread.run_sync`, for which it waits where the machine has no thread; cancelled
        as that, and while it waits.
        """
        import trio  # the supervisor has none

        began = False

        def run() -> T:
            nonlocal began
            began = True
            return function(*arguments)

        waits = object()
        try:
            while True:
                try:
                    return await trio.to_thread.run_sync(run, abandon_on_cancel=abandon_on_cancel)
                except RuntimeError as error:
                    if began or not is_no_thread(error):
                        raise
                self._lacks(waits, getattr(function, "__name__", "call"), None)
                await trio.sleep(AGAIN_S)
        finally:
            self._has(waits)

    def event(self) -> threading.Event:
        """For threads that wait for each other; a history of `tests/sim` has others."""
        return threading.Event()

    def condition(self, lock: threading.Lock | None = None) -> threading.Condition:
        """The same."""
        return threading.Condition(lock)

    def lock(self) -> threading.Lock:
        """The same, for one that is kept while its thread waits for something."""
        return threading.Lock()

    def lack(self) -> Lack | None:
        """What has no thread now; None: nothing."""
        with self._changed:
            if not self._lacking:
                return None
            waiting = list(self._lacking.values())
        return Lack(tuple(name for name, _, _ in waiting), time.monotonic() - waiting[0][2])

    # -- the list

    def _lacks(self, key: object, name: str, running: Running | None) -> None:
        with self._changed:
            self._lacking.setdefault(key, (name, running, time.monotonic()))
            self._changed.notify()

    def _has(self, key: object) -> bool:
        with self._changed:
            return self._lacking.pop(key, None) is not None

    def _withdraw(self, running: Running) -> bool:
        return self._has(running)

    # -- the thread

    def _try_again(self) -> None:
        while True:
            with self._changed:
                while not self._lacking:
                    self._changed.wait()
            log.warning("the machine has no thread left: what needs one waits", advice=ADVICE)
            began = time.monotonic()
            while (lack := self.lack()) is not None:
                self._while_lacking(lack.since_s)
                threading.Event().wait(AGAIN_S)
                self._begin_lacking()
            log.warning(
                "the machine has threads again", waited_s=round(time.monotonic() - began, 3)
            )

    def _begin_lacking(self) -> None:
        """Under the lock, so that whoever withdraws one finds it on the list or begun.

        The new thread needs none to come that far.
        """
        with self._changed:
            for key, (_name, running, _since) in list(self._lacking.items()):
                if running is not None:
                    if not running.begin():
                        return
                    del self._lacking[key]


def _nothing(_waited_s: float) -> None:
    pass


THREADS = Threads()
"""Of this process."""
