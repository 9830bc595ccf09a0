"""Memory that is made ready, given back, and never taken from those who need it.

The files are real, the machine's memory is a double.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from acpfs.ram import prefault as prefault_module
from acpfs.ram.prefault import (
    CLOSED_S,
    FLOOR_BYTES,
    PIECE_BYTES,
    QUIET_S,
    STEP_BYTES,
    WORTH_BYTES,
    MemoryNow,
    Prefault,
)
from tests.rig.runtime import runtime_of

STEPS = 4
WANTED = STEPS * STEP_BYTES


class Machine:
    """What `Prefault` asks, settable."""

    def __init__(self) -> None:
        self.wanted = WANTED
        self.budget = 100 * STEP_BYTES
        self.used = 0
        self.other_bytes = 0
        self.now = 0.0
        self.total = FLOOR_BYTES + 50 * STEP_BYTES
        self.writers = 1
        """A log stays open."""
        self.files: list[int] = []
        self.refuse = False
        self.prefault = Prefault(
            self.make,
            lambda: self.wanted,
            MemoryNow(
                lambda: self.budget,
                lambda: self.used,
                lambda: self.total - self.other_bytes - self.allocated(),
                self.total,
            ),
            runtime_of(lambda: self.now),
            writers=lambda: self.writers,
        )

    def make(self, _size: int) -> int | None:
        if self.refuse:
            return None
        self.files.append(os.memfd_create("prefault"))
        return self.files[-1]

    def allocated(self) -> int:
        """What the kernel says."""
        fd = self.prefault._fd
        return os.fstat(fd).st_blocks * 512 if fd >= 0 else 0

    def look(self, times: int = 3 * STEPS) -> int:
        for _ in range(times):
            self.prefault.look()
        assert self.allocated() == self.prefault.ready_bytes
        return self.prefault.ready_bytes


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.prefault.close()


def test_memory_is_made_ready_step_by_step(machine: Machine) -> None:
    assert machine.look(1) == STEP_BYTES
    assert machine.look() == WANTED


def test_a_writer_gets_it_back_and_it_comes_again_after_a_quiet_time(machine: Machine) -> None:
    machine.look()
    machine.prefault.give_back()
    assert machine.look() == 0
    machine.used += 2 * WORTH_BYTES
    machine.look()
    machine.now += QUIET_S / 2
    assert machine.look() == 0
    machine.now += QUIET_S / 2
    assert machine.look() == WANTED


@pytest.mark.clause("S250")
def test_a_save_gets_it_a_little_ahead_and_leaves_the_rest_ready(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault_module, "LEAD_BYTES", STEP_BYTES)
    machine.look()
    machine.prefault.give_back()
    assert machine.look() == WANTED - STEP_BYTES
    assert machine.prefault.look() == prefault_module.FOLLOW_S
    machine.used += STEP_BYTES
    assert machine.look() == WANTED - 2 * STEP_BYTES  # of this file
    machine.prefault.give_back()
    machine.now += QUIET_S / 2
    assert machine.look() == WANTED - 2 * STEP_BYTES  # and what is left is there for the next one
    machine.used += STEP_BYTES // 2
    assert machine.look() == WANTED - 3 * STEP_BYTES
    machine.used -= (
        STEP_BYTES  # something left RAM: what is ready does not come again during a save
    )
    assert machine.look() == WANTED - 3 * STEP_BYTES
    assert machine.prefault.look() == prefault_module.FOLLOW_S
    machine.now += QUIET_S
    assert machine.look() == WANTED
    assert machine.prefault.look() == prefault_module.LOOK_S


@pytest.mark.clause("S250")
def test_what_is_left_ready_during_a_save_goes_when_others_need_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault_module, "LEAD_BYTES", STEP_BYTES)
    machine.look()
    machine.prefault.give_back()
    assert machine.look() == WANTED - STEP_BYTES
    machine.other_bytes = machine.total - FLOOR_BYTES - 2 * STEP_BYTES
    assert machine.look() == 2 * STEP_BYTES
    machine.used = machine.budget - STEP_BYTES
    assert machine.look() <= STEP_BYTES
    machine.used = machine.budget
    assert machine.look() == 0


@pytest.mark.clause("S271")
def test_after_the_last_close_it_is_made_ready_again_at_once(machine: Machine) -> None:
    machine.look()
    machine.prefault.give_back()
    machine.used += 2 * WORTH_BYTES
    assert machine.look() == 0
    machine.writers = 0
    assert machine.look() == 0, "the next file of the save may follow"
    machine.now += CLOSED_S
    assert machine.look() == WANTED


@pytest.mark.clause("S271")
def test_what_leaves_ram_is_made_ready_while_it_is_warm(machine: Machine) -> None:
    machine.writers = 0
    machine.used = machine.budget
    assert machine.look() == 0
    machine.now += CLOSED_S
    machine.used -= 2 * STEP_BYTES
    assert machine.look() == 2 * STEP_BYTES


def test_while_a_save_may_be_over_soon_it_is_looked_often(machine: Machine) -> None:
    machine.look()
    machine.prefault.give_back()
    machine.used += 2 * WORTH_BYTES
    machine.look()
    assert machine.prefault.look() == prefault_module.SOON_S
    machine.now += QUIET_S
    assert machine.look() == WANTED
    machine.now += QUIET_S
    assert machine.prefault.look() == prefault_module.LOOK_S


def test_who_waits_long_between_open_and_write_is_followed_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault_module, "LEAD_BYTES", STEP_BYTES)
    machine.look()
    machine.now += 100 * QUIET_S
    machine.used += STEP_BYTES + 1
    assert machine.look() == WANTED - STEP_BYTES
    machine.used += STEP_BYTES
    assert machine.look() == WANTED - 2 * STEP_BYTES


def test_a_step_under_way_ends_when_somebody_is_about_to_write(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev

    def opened(fd: int, pieces: list[memoryview], at: int) -> int:
        if at == STEP_BYTES + PIECE_BYTES:
            machine.prefault.give_back()
        return write(fd, pieces, at)

    monkeypatch.setattr(os, "pwritev", opened)
    assert machine.look(1) == STEP_BYTES
    assert machine.look(1) == STEP_BYTES + 2 * PIECE_BYTES
    assert machine.look(1) == 0, "all of it is given back: it is less than comes free ahead"


@pytest.mark.clause("S272")
def test_who_takes_all_pages_at_once_finds_them_free(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault_module, "LEAD_BYTES", STEP_BYTES)
    machine.look()
    machine.prefault.give_back()
    machine.prefault.hand_over(STEP_BYTES, False)
    assert machine.allocated() == WANTED - 2 * STEP_BYTES, (
        "what it takes, and what comes free ahead"
    )
    machine.used += STEP_BYTES
    assert machine.look() == WANTED - 2 * STEP_BYTES, "the same bytes do not come free twice"
    machine.prefault.hand_over(STEP_BYTES, True)
    assert machine.allocated() == WANTED - 3 * STEP_BYTES
    machine.used += STEP_BYTES
    machine.used += STEP_BYTES  # written elsewhere
    assert machine.look() == 0


@pytest.mark.clause("S272")
def test_who_must_not_wait_does_not_wait_for_a_step(machine: Machine) -> None:
    machine.look()
    with machine.prefault._pages:
        machine.prefault.hand_over(STEP_BYTES, False)
    assert machine.prefault.ready_bytes == WANTED
    assert machine.look() == 0, "it comes free behind"


def test_what_the_kernel_writes_unseen_is_no_quiet_time(machine: Machine) -> None:
    machine.look()
    machine.prefault.give_back()
    for _ in range(4):
        machine.now += QUIET_S * 0.6
        machine.used += 2 * STEP_BYTES
        assert machine.look() == 0


def test_where_it_was_given_back_for_nothing_the_next_time_comes_later(machine: Machine) -> None:
    machine.look()
    for quiet_s in (QUIET_S, 2 * QUIET_S, 4 * QUIET_S):
        machine.prefault.give_back()
        assert machine.look() == 0
        machine.now += quiet_s - 1
        assert machine.look() == 0
        machine.now += 1
        assert machine.look() == WANTED


def test_used_and_ready_together_stay_within_the_budget(machine: Machine) -> None:
    machine.look()
    machine.used = machine.budget - 2 * STEP_BYTES + 1
    assert machine.look() == 0, "who writes so much needs it"
    machine.now += QUIET_S
    assert machine.look() == STEP_BYTES
    machine.used = machine.budget
    assert machine.look() == 0


def test_the_rest_of_the_machine_keeps_its_share(machine: Machine) -> None:
    machine.other_bytes = machine.total - FLOOR_BYTES - 2 * STEP_BYTES
    assert machine.look() == 2 * STEP_BYTES
    machine.other_bytes += 1  # somebody else takes a little: only so much goes back
    assert machine.look() == STEP_BYTES
    machine.other_bytes = machine.total
    assert machine.look() == 0


@pytest.mark.parametrize("how", ["no file", "no pages"])
def test_where_the_kernel_refuses_nothing_is_ready(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "no file":
        machine.refuse = True
    else:
        monkeypatch.setattr(os, "pwritev", lambda *_: 4096)
    assert machine.look(1) == 0
    assert machine.prefault.look() == prefault_module.LONG_REST_S


def test_the_thread_gives_back_at_once_and_ends(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = threading.Event()
    shrink = Prefault._shrink

    def shrunk(self: Prefault, target: int) -> None:
        shrink(self, target)
        if target == 0:
            seen.set()

    monkeypatch.setattr(Prefault, "_shrink", shrunk)
    grown = threading.Event()
    grow = Prefault._grow

    def tell(self: Prefault, target: int) -> float:
        rest_s = grow(self, target)
        if self.ready_bytes == WANTED:
            grown.set()
            return 3600.0
        return rest_s

    monkeypatch.setattr(Prefault, "_grow", tell)
    machine.prefault.start()
    assert grown.wait(120)
    machine.prefault.give_back()
    assert seen.wait(120), "not only at its next look"
    machine.prefault.close()
    assert machine.prefault._thread is not None
    assert not machine.prefault._thread.is_alive()


def test_nothing_wanted_no_thread(machine: Machine) -> None:
    machine.wanted = 0
    machine.prefault.start()
    assert machine.prefault._thread is None
