"""Gets the main thread out of Python code that does not end by itself after a STOP: an asynchronous
exception, again and again.

It never comes while an update is under way: a local update is finished, not torn. A thread that
waits in C gets it when it is back; closing sockets or aborting communicators is what brings it
back, and is somebody else's (`torch.groups`). Where that does not help, the thread is *stuck*: it
uses no processor time, turn after turn. Turns are counted, not seconds: a process that stood still
had none.

Then another thread stands in for it, and yet another one where that one is stuck, too. gloo forgets
whom to tell of an error when a send is half-way (torch 2.13: `Pair::signalException` looks at `tx_`
without its unbound buffers): whoever waits for that send waits for the group's time-out, whatever
is done to its connections. And who waits to be called by a rank that is dead has no connection yet
(`Pair::waitUntilConnected`). The state does not need the thread: nothing moves in it while that one
waits, no update begins after a hold, and what it meets when it is back is `Interrupted`. No torch
here.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType

from acpfs.logger import get_logger
from acpfs.training.stacks import all_stacks

log = get_logger(__name__)
LOOK_EVERY_S = 0.05
"""A turn is at least so long."""


FORGET_TURNS = 1000


class Interrupted(BaseException):
    """A fault elsewhere: the rank goes to its protection's handler.

    No `Exception`, so that a retry loop does not swallow it.
    """


def _set_asynchronous(thread: int, exception: type[BaseException] | None) -> None:
    """What the thread raises next; None takes back what it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(exception) if exception else None
    )


class _Swallowed(BaseException):
    """Raised and caught by `forget_asynchronous`."""


def forget_asynchronous() -> None:
    """Have the interpreter forget that an exception was on its way to some thread.

    Up to Python 3.12 `PyThreadState_SetAsyncExc` sets a flag of the whole interpreter, also when it
    takes an exception back, and only a thread that raises one clears it (`_PyEval_SignalAsyncExc`
    and `_Py_HandlePending` in ceval.c, ceval_gil.c). Until then every call in every thread goes the
    slow way, and with a profiler or a debugger on (`sys.setprofile`, `sys.settrace`) Python 3.11
    never leaves the beginning of the next function. So a thread raises one.

    Not the caller: of a thread that could not be started Python keeps a state with the number of
    who was to start it, and finds that one first.
    """
    thread = threading.Thread(target=_raise_and_swallow, name="acpfs-forget", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be had: only slow
        return
    thread.join()


def _raise_and_swallow() -> None:
    try:
        _set_asynchronous(threading.get_ident(), _Swallowed)
        for _ in range(FORGET_TURNS):  # it comes at the end of the first
            pass
        _set_asynchronous(threading.get_ident(), None)
    except _Swallowed:
        pass


def importing(thread: int, below: CodeType) -> bool:
    """Whether this thread is in an import that began inside of the function with this code.

    One that is broken off leaves modules that are half there, and every further try fails:
    `Interrupted` has to wait for its end.
    """
    # there is no other way to see another thread's
    frame = sys._current_frames().get(thread)  # noqa: SLF001
    while frame is not None and frame.f_code is not below:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Interrupter:
    """Of one thread. `tick` belongs to another one."""

    def __init__(
        self,
        thread: int,
        updating: Callable[[], bool],
        after_s: float,
        every_s: float,
        stuck_s: float = 2.0,
        *,
        spins: Callable[[], bool] = lambda: False,
    ) -> None:
        """`thread`: its identifier.

        `updating`: whether it is to be left alone; once false it stays false until `disarm`.

        `stuck_s`: turns that take so long or longer, without processor time for the thread, make it
        stuck. `spins`: whether a thread that waits uses processor time, for a device: then one that
        is at the same instruction of Python all the while is stuck.
        """
        self._spins = spins
        self._thread = thread
        self._updating = updating
        self._after_s = after_s
        self._every_s = every_s
        self._stuck_turns = max(1, round(stuck_s / LOOK_EVERY_S))
        self._used: object = None
        self._still = 0
        self._look_at = 0.0
        """How far it is, and for how many turns it has been there; when the next turn ends."""
        self._sending = threading.Lock()
        self._due: float | None = None
        """When the next one is sent; None: not armed."""

    def arm(self) -> None:
        """From now on. Does nothing where it is armed already."""
        with self._sending:
            if self._due is None:
                self._due = time.monotonic() + self._after_s
                self._still = 0

    def tick(self) -> bool:
        """Send one if it is time; whether one was sent."""
        with self._sending:
            if self._due is None or self._updating():
                return False
            self._look()
            if time.monotonic() < self._due:
                return False
            self._due = time.monotonic() + self._every_s
            _set_asynchronous(self._thread, Interrupted)
            return True

    def _look(self) -> None:
        """Whether the thread has done anything in this turn."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        used = self._clock()
        self._still = self._still + 1 if used == self._used else 0
        self._used = used

    def _clock(self) -> object:
        """What differs when the thread has done anything: its processor time, or where it is."""
        if not self._spins():
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread))
        # there is no other way to see another thread's
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001
        return None if frame is None else (id(frame), frame.f_lasti)

    @property
    def stuck(self) -> bool:
        """Whether the thread waits in C, and nothing has brought it back."""
        return self._due is not None and self._still >= self._stuck_turns

    def hand_over(self, start: Callable[[], int]) -> bool:
        """If the thread is stuck even now, another one stands in for it; whether one does.

        `start`: starts that one, and returns its identifier. The stuck one gets its `Interrupted`
        when it is back.
        """
        with self._sending:
            if not self.stuck or self._clock() != self._used:
                return False
            stuck = self._thread
            self._thread = start()
            self._due = None
            self._still = 0
            _set_asynchronous(stuck, Interrupted)
            return True

    def disarm(self) -> None:
        """In the thread itself: nothing comes after this returns, and what was on its way is
        swallowed.

        Raises:
            Interrupted: another thread stands in for this one.
        """
        while True:
            try:
                with self._sending:
                    if self._thread != threading.get_ident():
                        break
                    self._due = None
                    _set_asynchronous(self._thread, None)
                    forget_asynchronous()
                return
            except Interrupted:
                continue
        raise Interrupted


class Charge:
    """One thread has it, from the first that takes it to the end of the process, or until it is
    stuck.
    """

    def __init__(self, interrupter: Interrupter, run: Callable[[], None]) -> None:
        """`run`: what handles the fault; it takes the charge first."""
        self._interrupter = interrupter
        self._run = run
        self._taking = threading.Lock()
        self._owner: threading.Thread | None = None
        self._given_up = threading.Event()

    def take(self) -> bool:
        """Whether it is this thread's.

        Where it is another's, this waits until that one gives up; the process ends before, as a
        rule.
        """
        if self._take():
            return True
        while not self._given_up.is_set():
            try:
                self._given_up.wait(1.0)
            except Interrupted:  # what was on its way when the other one took over
                continue
        return False

    def _take(self) -> bool:
        with self._taking:
            if self._owner is None:
                self._owner = threading.current_thread()
            return self._owner is threading.current_thread()

    def give_up(self) -> None:
        """Nobody says what to do: a main thread that waits for this one goes on with its
        exception.
        """
        self._given_up.set()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._owner is threading.current_thread()

    def stand_in(self) -> None:
        """The thread that has it, or is to take it, is stuck: unless it has come back, a new one
        has it from now on.
        """
        with self._taking:
            self._interrupter.hand_over(self._start)

    def _start(self) -> int:
        thread = threading.Thread(target=self._in_its_place, name="acpfs-stand-in", daemon=True)
        thread.start()
        assert thread.ident is not None
        # last: one that could not be started has no charge; one that was waits for `_taking` before
        # it asks
        self._owner = thread
        return thread.ident

    def _in_its_place(self) -> None:
        log.warning("a thread is stuck: another one does what is to be done", stacks=all_stacks())
        try:
            self._run()
        except Exception:
            log.exception("the thread that stood in for another one failed")
            if self.is_mine:
                self.give_up()
        while True:
            # given up: the interrupter looks at this thread's clock as long as the process lives,
            # so it must not end
            with contextlib.suppress(Interrupted):
                threading.Event().wait()
