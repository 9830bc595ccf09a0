"""Marks, and the exception that gets a main thread out: one of the two sees the other, whatever the
order.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from acpfs.training.interrupt import Interrupted, Interrupter
from acpfs.training.marks import Mark, Marks
from acpfs.training.messages import Phase
from tests.rig.processes import sleeps


def test_marks_go_through_an_update() -> None:
    marks = Marks(begun=7)
    assert marks.now == Mark(7, 7, Phase.COMPUTING)
    assert marks.ready() == 8
    assert marks.now == Mark(7, 8, Phase.READY)
    marks.begin()
    assert marks.updating
    assert marks.now == Mark(7, 8, Phase.UPDATING)
    marks.end()
    assert marks.now == Mark(8, 8, Phase.COMPUTING)


def test_ready_is_said_again_where_the_gate_had_failed() -> None:
    marks = Marks()
    assert marks.ready() == marks.ready() == 1


def test_no_update_begins_after_a_hold() -> None:
    marks = Marks()
    marks.ready()
    marks.hold()
    with pytest.raises(Interrupted):
        marks.begin()
    assert marks.now == Mark(0, 1, Phase.READY)
    marks.begin(settling=True)
    with pytest.raises(Interrupted):
        marks.begin()  # a main thread that comes back while another one stands in for it
    assert marks.updating
    marks.end()
    assert marks.now == Mark(1, 1, Phase.COMPUTING)


def test_an_update_that_was_under_way_ends() -> None:
    marks = Marks()
    marks.ready()
    marks.begin()
    marks.hold()
    assert marks.updating
    marks.end()
    assert marks.now.done == 1


class Loop:
    """A thread that does something again and again until `Interrupted` gets it out; then it
    disarms.
    """

    def __init__(self, step: Callable[[], None], swallowed: int = 0) -> None:
        self._step = step
        self._swallowed = swallowed
        self.caught = 0
        self.begun = threading.Event()
        self.out = threading.Event()
        self.interrupter: Interrupter | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.begun.wait()

    def _run(self) -> None:
        self.begun.set()  # not below: who is interrupted inside of `set` leaves its lock taken
        is_armed = True
        while is_armed:
            try:
                while self.caught <= self._swallowed:
                    self._loop()
                assert self.interrupter is not None
                self.interrupter.disarm()
                is_armed = False
            except Interrupted:  # between two lines
                continue
        self.out.set()

    def _loop(self) -> None:
        try:
            while True:
                self._step()
        except Interrupted:
            self.caught += 1


def ticking(loop: Loop, updating: Callable[[], bool]) -> Interrupter:
    assert loop.thread.ident is not None
    loop.interrupter = Interrupter(loop.thread.ident, updating, 0.001, 0.001)
    return loop.interrupter


@pytest.mark.parametrize("swallowed", [0, 1, 5])
def test_a_thread_gets_out_even_if_it_swallows_some(swallowed: int) -> None:
    loop = Loop(lambda: None, swallowed)
    interrupter = ticking(loop, lambda: False)
    interrupter.arm()
    while not loop.out.wait(0.001):
        interrupter.tick()
    loop.thread.join()
    assert loop.caught == swallowed + 1
    assert not interrupter.tick()  # disarmed


def test_it_is_not_armed_by_itself() -> None:
    interrupter = Interrupter(threading.get_ident(), lambda: False, 0.0, 0.0)
    assert not interrupter.tick()


def test_an_update_is_never_interrupted() -> None:
    updating = True
    interrupter = Interrupter(threading.get_ident(), lambda: updating, 0.0, 3600.0)
    interrupter.arm()
    assert not interrupter.tick()
    updating = False
    with pytest.raises(Interrupted):
        _tick_until_it_comes(interrupter)
    interrupter.disarm()


def _tick_until_it_comes(interrupter: Interrupter) -> None:
    for _ in range(1000):
        interrupter.tick()


@pytest.mark.clause("T24")
def test_a_thread_that_waits_in_c_is_stuck_until_another_is_in_charge() -> None:
    begun = threading.Event()
    goes_on = threading.Event()
    interrupted = list[bool]()

    def waits() -> None:
        try:
            begun.set()
            goes_on.wait()  # what comes meanwhile comes behind it
        except Interrupted:
            interrupted.append(goes_on.is_set())

    thread = threading.Thread(target=waits)
    thread.start()
    begun.wait()
    assert thread.ident is not None
    interrupter = Interrupter(thread.ident, lambda: False, 3600.0, 3600.0, stuck_s=0.1)
    seen = [interrupter.stuck]
    interrupter.arm()
    while not (interrupter.stuck and sleeps(thread)):
        interrupter.tick()
    assert interrupter.hand_over(threading.get_ident)
    assert not interrupter.hand_over(threading.get_ident)
    assert [*seen, interrupter.stuck] == [False, False]
    goes_on.set()
    thread.join()
    assert interrupted == [True]
    interrupter.arm()
    interrupter.disarm()


@pytest.mark.clause("T24")
def test_a_thread_that_came_back_just_now_is_not_replaced() -> None:
    begun, goes_on, worked, ends = (threading.Event() for _ in range(4))

    def waits() -> None:
        begun.set()
        goes_on.wait()
        worked.set()
        ends.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    begun.wait()
    assert thread.ident is not None
    interrupter = Interrupter(thread.ident, lambda: False, 3600.0, 3600.0, stuck_s=0.1)
    interrupter.arm()
    while not interrupter.stuck:
        interrupter.tick()
    goes_on.set()
    worked.wait()
    assert interrupter.stuck  # as of the last look
    assert not interrupter.hand_over(threading.get_ident)
    ends.set()
    thread.join()


PROFILED = """
import sys, threading
from acpfs.training.interrupt import Interrupted, Interrupter

interrupter = Interrupter(threading.get_ident(), lambda: False, 0.0, 10.0)
interrupter.arm()
try:
    interrupter.tick()
    while True:
        pass
except Interrupted:
    pass
interrupter.disarm()
sys.setprofile(lambda *_: None)
str.join("", (str(number) for number in range(3)))
"""


@pytest.mark.clause("T24")
def test_a_program_that_was_interrupted_can_be_profiled() -> None:
    """Python 3.11 would not come out of its next function."""
    subprocess.run([sys.executable, "-c", PROFILED], check=True, timeout=120)


@pytest.mark.clause("T24")
def test_who_was_replaced_does_not_disarm_for_the_other() -> None:
    interrupter = Interrupter(threading.main_thread().ident or 0, lambda: False, 3600.0, 3600.0)
    caught = list[BaseException]()

    def replaced() -> None:
        try:
            interrupter.disarm()
        except Interrupted as error:
            caught.append(error)

    thread = threading.Thread(target=replaced)
    thread.start()
    thread.join()
    assert len(caught) == 1


@pytest.mark.clause("T24")
def test_a_thread_that_computes_is_not_stuck() -> None:
    interrupter = Interrupter(threading.get_ident(), lambda: False, 3600.0, 3600.0, stuck_s=0.001)
    interrupter.arm()
    enough = time.thread_time() + 0.2
    while time.thread_time() < enough:
        interrupter.tick()
        assert not interrupter.stuck
    interrupter.disarm()


def test_disarm_swallows_what_is_on_its_way() -> None:
    interrupter = Interrupter(threading.get_ident(), lambda: False, 0.0, 0.0)
    for _ in range(100):
        interrupter.arm()
        try:
            interrupter.tick()
            interrupter.disarm()
        except Interrupted:  # it came before disarm was called
            interrupter.disarm()
        sum(range(1000))  # nothing comes here
