"""What fails while a rank parks: it has parked all the same, and what failed is told when it is
asked for something.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from acpfs.training.interrupt import Interrupted
from acpfs.training.marks import Marks
from acpfs.training.messages import (
    Leave,
    Phase,
    Settle,
    Settled,
    Stop,
    Stopped,
    Trouble,
    TroubleKind,
)
from acpfs.training.park import Park, ParkCalls
from tests.training.scripted_coordinator import FakeRank, Rig, ScriptedCoordinator

TROUBLE = Trouble(TroubleKind.COLLECTIVE, "connection closed")


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.start()
    yield made
    made.close()


class BetweenTwo(FakeRank):
    """Was left between two optimizers, and the second one's update fails."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(marks)
        marks.ready()
        marks.begin()

    def finish_begun(self) -> None:
        self.done.append("rest")
        raise MemoryError("of the device")


def stopped(coordinator: ScriptedCoordinator, generation: int) -> Stopped:
    coordinator.generation = generation
    coordinator.say(Stop((1,)))
    return coordinator.hears(Stopped)


def parked(
    rig: Rig,
    rank: FakeRank,
    directory: Path,
    part: Callable[[ScriptedCoordinator], None],
    **words: Callable[[], None],
) -> Leave:
    """The main thread parks; `part` is the coordinator's."""
    calls = ParkCalls(**words)  # type: ignore[arg-type]  # by name
    park = Park(rig.member, rig.interrupter, rig.marks, rank, 0, directory, rig.policy, calls)
    errors = list[BaseException]()

    def coordinate() -> None:
        try:
            rig.coordinator.hears(Trouble)
            part(rig.coordinator)
        except BaseException as error:  # noqa: BLE001  # raised again in the test
            errors.append(error)
            rig.coordinator.link.close()

    coordinator = threading.Thread(target=coordinate)
    coordinator.start()
    try:
        return park.run(TROUBLE)
    finally:
        coordinator.join()
        if errors:
            raise errors[0]


@pytest.mark.clause("T49", "T110")
def test_the_rest_of_an_update_that_fails_makes_it_a_torn_one(rig: Rig, tmp_path: Path) -> None:
    """The coordinator takes no trouble from who has not parked: it would have waited until this
    rank counts as lost.
    """
    rank = BetweenTwo(rig.marks)

    def part(coordinator: ScriptedCoordinator) -> None:
        assert stopped(coordinator, 1) == Stopped(0, 1, Phase.UPDATING)
        coordinator.say(Leave(76, "nobody could save"))

    assert parked(rig, rank, tmp_path, part).status == 76
    assert rank.done == ["rest"]


@pytest.mark.clause("T29", "T49")
def test_what_on_stopped_raises_is_told_before_anything_is_settled(
    rig: Rig, tmp_path: Path
) -> None:
    rig.marks.ready()
    rank = FakeRank(rig.marks)
    calls = list[int]()

    def on_stopped() -> None:
        calls.append(rig.coordinator.generation)
        if len(calls) == 1:
            raise ValueError("a bug of the program")

    def part(coordinator: ScriptedCoordinator) -> None:
        assert stopped(coordinator, 1) == Stopped(0, 1, Phase.READY)
        coordinator.say(Settle(1))
        assert coordinator.hears(Trouble) == Trouble(
            TroubleKind.SAVE, "ValueError: a bug of the program"
        )
        assert rank.done == []
        assert stopped(coordinator, 2) == Stopped(0, 1, Phase.READY)  # and it may be called again
        coordinator.say(Settle(1))
        coordinator.hears(Settled)
        coordinator.say(Leave(75, "saved"))

    assert parked(rig, rank, tmp_path, part, on_stopped=on_stopped).status == 75
    assert calls == [1, 2]
    assert rank.done == ["finish"]


@pytest.mark.clause("T48")
def test_on_stopped_that_is_interrupted_begins_again(rig: Rig, tmp_path: Path) -> None:
    """By another STOP: that is nothing that failed."""
    calls = list[int]()

    def on_stopped() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise Interrupted

    def part(coordinator: ScriptedCoordinator) -> None:
        stopped(coordinator, 1)
        coordinator.say(Settle(0))
        coordinator.hears(Settled)
        coordinator.say(Leave(75, "saved"))

    assert parked(rig, FakeRank(rig.marks), tmp_path, part, on_stopped=on_stopped).status == 75
    assert len(calls) == 2
