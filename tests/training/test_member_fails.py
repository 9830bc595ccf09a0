"""A member whose thread has ended, what it cannot say, and what is asked of a coordinator that is
gone: nobody waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.training.interrupt import Charge, Interrupter
from acpfs.training.member import GenerationOverError
from acpfs.training.messages import (
    Active,
    Goodbye,
    Running,
    StoreAnswer,
    StoreAsk,
    StoreVerb,
    Trouble,
    TroubleKind,
)
from acpfs.training.park import CutOffError, Park
from acpfs.training.records import MalformedError
from acpfs.training.wire import FRAME_BYTES_MAX
from tests.rig.processes import sleeps
from tests.training.gasp_job import until
from tests.training.scripted_coordinator import FakeRank, Rig

TROUBLE = Trouble(TroubleKind.COLLECTIVE, "connection closed")


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def fails() -> None:
    raise ZeroDivisionError("a bug")


@pytest.mark.clause("T25")
def test_a_member_that_fails_says_goodbye_and_everybody_who_waits_is_told(rig: Rig) -> None:
    rig.start()

    def part() -> None:
        rig.coordinator.hears(StoreAsk)
        rig.member._beat = fails  # type: ignore[method-assign]

    script = threading.Thread(target=part)
    script.start()
    with pytest.raises(GenerationOverError):
        rig.member.ask(StoreVerb.GET, ("never",), "", "", 3600.0)
    script.join()
    rig.coordinator.hears(Goodbye)  # training goes on: this rank is not lost
    assert rig.member.cut_off_since is not None
    assert not rig.marks.held


@pytest.mark.clause("T25", "T58")
def test_a_thread_that_parks_when_its_member_has_failed_goes_on_with_its_error(
    rig: Rig, tmp_path: Path
) -> None:
    """The connection to the coordinator stands, and nobody here listens."""
    rig.start()
    rig.member._beat = fails  # type: ignore[method-assign]
    until(lambda: rig.member.cut_off_since is not None)
    assert not rig.member.commanded
    with pytest.raises(CutOffError):
        Park(
            rig.member, rig.interrupter, rig.marks, FakeRank(rig.marks), 0, tmp_path, rig.policy
        ).run(TROUBLE)


@pytest.mark.clause("T25")
def test_what_is_too_long_for_the_store_is_told_to_who_asked_and_to_nobody_else(rig: Rig) -> None:
    rig.start()
    with pytest.raises(MalformedError, match="bytes"):
        rig.member.ask(StoreVerb.SET, ("k",), "0" * FRAME_BYTES_MAX, "", 120.0)

    def part() -> None:
        asked = rig.coordinator.hears(StoreAsk)
        rig.coordinator.say(StoreAnswer(asked.request, "5"))

    script = threading.Thread(target=part)
    script.start()
    assert rig.member.ask(StoreVerb.GET, ("k",), "", "", 120.0).value == "5"
    script.join()
    rig.member.tell(Running())
    rig.coordinator.hears(Running)


@pytest.mark.clause("T155")
def test_who_asked_the_store_of_a_coordinator_does_not_wait_for_the_next_one() -> None:
    """It takes over before this rank has seen that nobody commands, and where all run it says
    nothing that would end the wait.
    """
    rig = Rig(coordinators=2)
    rig.start()
    first, second = rig.coordinators

    def part() -> None:
        first.hears(StoreAsk)
        second.say(Active(2, 1), term=2)

    script = threading.Thread(target=part)
    script.start()
    with pytest.raises(GenerationOverError):
        rig.member.ask(StoreVerb.GET, ("never",), "", "", 3600.0)
    script.join()
    assert rig.member.commanded
    rig.close()


@pytest.mark.clause("T24")
def test_a_thread_that_cannot_be_started_takes_no_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one that is stuck would wait, when it comes back, for one that there never was."""
    back = threading.Event()
    stuck = threading.Thread(target=back.wait, daemon=True)
    stuck.start()
    assert stuck.ident is not None
    interrupter = Interrupter(stuck.ident, lambda: False, 3600.0, 3600.0, stuck_s=0.1)
    charge = Charge(interrupter, lambda: None)
    interrupter.arm()
    until(lambda: not interrupter.tick() and interrupter.stuck and sleeps(stuck))

    def no_room(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        with pytest.raises(RuntimeError):
            charge.stand_in()
    assert charge.take()
    back.set()
    stuck.join()
