"""Who has the charge of a fault: the first that takes it, and whoever stands in for a thread that
is stuck.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from acpfs.training.interrupt import Charge, Interrupted, Interrupter
from acpfs.training.messages import (
    Ask,
    Running,
    Save,
    SavedFile,
    Stop,
    Stopped,
    Trouble,
    TroubleKind,
)
from acpfs.training.park import Park, ParkCalls, ReplacedError
from tests.training.scripted_coordinator import FakeRank, Rig


class Handling:
    """A main thread that waits until it is let go, and a handler that does the same, in each thread
    that stands in.
    """

    def __init__(self) -> None:
        self.back = [threading.Event(), threading.Event(), threading.Event()]
        self.handled: list[str] = []
        self.took: list[bool] = []
        self.error: Exception | None = None
        """What a handler ends with."""
        self.waits = threading.Semaphore(0)
        self.main = threading.Thread(target=self._main, name="main")
        self.main.start()
        self.waits.acquire()
        assert self.main.ident is not None
        self.interrupter = Interrupter(self.main.ident, lambda: False, 3600.0, 3600.0, stuck_s=0.1)
        self.charge = Charge(self.interrupter, self._handle)

    def _main(self) -> None:
        self._wait(0)
        self.took.append(self.charge.take())

    def _handle(self) -> None:
        assert self.charge.take()
        number = len(self.handled) + 1
        self.handled.append(threading.current_thread().name)
        self._wait(number)
        if self.error is not None:
            raise self.error
        self.took.append(self.charge.is_mine)

    def _wait(self, number: int) -> None:
        with contextlib.suppress(Interrupted):  # it may come behind the next line
            self.waits.release()
            self.back[number].wait()

    def let_one_stand_in(self) -> None:
        self.interrupter.arm()
        while not self.waits.acquire(timeout=0.01):
            self.interrupter.tick()
            if self.interrupter.stuck:
                self.charge.stand_in()  # not for one that was only slow on its way


def test_a_main_thread_that_came_is_not_replaced() -> None:
    handled: list[str] = []
    charge = Charge(
        Interrupter(threading.get_ident(), lambda: False, 3600.0, 3600.0),
        lambda: handled.append("somebody else"),
    )
    assert charge.take()
    charge.stand_in()
    assert charge.take()  # may be asked again
    assert not handled


@pytest.mark.clause("T24")
def test_a_main_thread_that_comes_late_waits_and_goes_on_when_nobody_commands() -> None:
    handling = Handling()
    handling.let_one_stand_in()
    assert handling.handled == ["acpfs-stand-in"]
    handling.back[0].set()
    handling.back[1].set()
    while not handling.took:
        pass
    assert handling.took == [True]
    handling.charge.give_up()
    handling.main.join()
    assert handling.took == [True, False]


@pytest.mark.clause("T24", "T160")
def test_one_that_stands_in_and_is_stuck_is_replaced_too() -> None:
    handling = Handling()
    handling.let_one_stand_in()
    handling.let_one_stand_in()
    assert handling.handled == ["acpfs-stand-in"] * 2
    for back in handling.back:
        back.set()
    while len(handling.took) < 2:
        pass
    handling.charge.give_up()
    handling.main.join()
    assert sorted(handling.took) == [False, False, True]


@pytest.mark.clause("T24")
@pytest.mark.parametrize("error", [None, MemoryError("of what it does")])
def test_one_that_stood_in_does_not_end_before_its_process(error: Exception | None) -> None:
    """Its clock is looked at in every turn, and the memory of a thread that ended may be
    another's.
    """
    handling = Handling()
    handling.error = error
    handling.let_one_stand_in()
    handling.back[1].set()
    if error is None:
        while not handling.took:
            pass
        handling.charge.give_up()
    handling.back[0].set()
    handling.main.join()
    assert handling.took[-1] is False
    handling.interrupter.arm()
    while not handling.interrupter.stuck:  # it waits, and is looked at
        handling.interrupter.tick()


class Failing(FakeRank):
    """A saver that fails when what it waits for comes."""

    def save(self, order: Save, directory: Path, ask: Ask) -> tuple[SavedFile, ...]:
        super().save(order, directory, ask)
        raise MemoryError("of what it waited for")


@pytest.mark.clause("T160")
def test_who_was_replaced_in_a_save_says_nothing_of_it(tmp_path: Path) -> None:
    rig = Rig()
    replaced = threading.Event()
    rig.start()
    rank = Failing(rig.marks)
    rank.goes_on.clear()
    park = Park(
        rig.member,
        rig.interrupter,
        rig.marks,
        rank,
        0,
        tmp_path,
        rig.policy,
        ParkCalls(is_mine=lambda: not replaced.is_set()),
    )

    def coordinate() -> None:
        rig.coordinator.hears(Trouble)
        rig.coordinator.generation = 1
        rig.coordinator.say(Stop((1,)))
        rig.coordinator.hears(Stopped)
        rig.coordinator.say(Save(1, {"ranks-0-1": 0}, (0,), "step-1.gasp-1.tmp", "step-1", (1,)))
        rank.during_save.wait()
        replaced.set()
        rank.goes_on.set()

    coordinator = threading.Thread(target=coordinate)
    coordinator.start()
    with pytest.raises(ReplacedError):
        park.run(Trouble(TroubleKind.COLLECTIVE, "connection closed"))
    coordinator.join()
    rig.member.tell(Running())
    rig.coordinator.hears(Running)  # the next word, and no Trouble before it
    rig.close()
