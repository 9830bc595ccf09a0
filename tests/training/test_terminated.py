"""SIGTERM in a protected rank: a fault like others while somebody hears of it, and what it was
before where nobody does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from acpfs.training.guard import Guard
from acpfs.training.messages import Trouble, TroubleKind
from acpfs.training.policy import Policy
from acpfs.training.protection import Protection
from tests.training.gasp_job import until
from tests.training.scripted_coordinator import Rig

if TYPE_CHECKING:
    from acpfs.training.torch.rank import TorchRank


@pytest.fixture
def received() -> Iterator[list[int]]:
    """What the program's own handler of SIGTERM got."""
    got = list[int]()

    def own(number: int, frame: FrameType | None) -> None:
        got.append(number)

    before = signal.signal(signal.SIGTERM, own)
    yield got
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.start()
    yield made
    made.close()


def protection_of(rig: Rig, directory: Path) -> Protection:
    rank = cast("TorchRank", SimpleNamespace(guard=Guard()))
    protection = Protection(directory, rank, Policy())
    protection._member = rig.member
    protection._handle_signals()
    return protection


@pytest.mark.clause("T51", "T58")
def test_sigterm_is_told_while_there_is_a_coordinator_and_ends_the_process_when_there_is_none(
    rig: Rig, tmp_path: Path, received: list[int]
) -> None:
    hook = sys.excepthook
    protection = protection_of(rig, tmp_path)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert rig.coordinator.hears(Trouble) == Trouble(TroubleKind.ERROR, "SIGTERM")
        assert received == []
        rig.coordinator.link.close()
        until(lambda: rig.member.cut_off_since is not None)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: received)  # a handler runs between two lines of the main thread
        assert received == [signal.SIGTERM]
        assert sys.excepthook is hook
    finally:
        protection._handlers.close()
