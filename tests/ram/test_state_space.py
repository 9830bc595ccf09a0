"""Room for the state database: it grows, has a reserve, and gives that up when it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.ram.mapped_records import Slots
from acpfs.ram.state_space import START_BYTES, StateSpace

pytestmark = pytest.mark.clause("S203")
RESERVE = 4 << 20


class Disk:
    """A tmpfs of which so much is free, and that can grow so often."""

    def __init__(self, free: int, growths: int = 0) -> None:
        self.free = free
        self.growths = growths

    def grow(self) -> bool:
        if not self.growths:
            return False
        self.growths -= 1
        self.free += 2 * RESERVE
        return True

    def space(self, ballast: Path | None = None) -> StateSpace:
        return StateSpace(lambda: self.free, self.grow, ballast, RESERVE)


def test_it_grows_before_anything_is_refused() -> None:
    disk = Disk(RESERVE - 1, growths=1)
    space = disk.space()
    assert not space.is_short()
    assert (disk.growths, space.warnings()) == (0, [])
    disk.free = RESERVE - 1
    assert space.is_short()
    assert space.warnings()


def test_it_grows_in_time_when_nobody_asks() -> None:
    disk = Disk(2 * RESERVE - 1, growths=1)
    disk.space().look()
    assert disk.growths == 0


def test_where_others_write_the_reserve_is_a_file_that_is_given_up_once_and_made_again(
    tmp_path: Path,
) -> None:
    disk = Disk(3 * RESERVE)
    ballast = tmp_path / "reserve"
    space = disk.space(ballast)
    space.look()
    assert ballast.stat().st_blocks * 512 >= RESERVE
    disk.free = 0  # others
    assert space.give_way()
    assert not ballast.exists()
    assert not space.give_way(), "there is no more"
    disk.free = START_BYTES
    space.look()
    assert not ballast.exists(), "what is free is not taken from what waits for it"
    disk.free = 2 * RESERVE
    space.look()
    assert ballast.exists()


def test_a_worker_that_starts_with_nothing_free_takes_the_reserve(tmp_path: Path) -> None:
    disk = Disk(3 * RESERVE)
    ballast = tmp_path / "reserve"
    disk.space(ballast).look()
    disk.free = 0
    disk.space(ballast).look()
    assert not ballast.exists()


def test_records_in_a_mapping_have_their_pages(tmp_path: Path) -> None:
    """Where the page of a mapping cannot be had, the worker ends by SIGBUS."""
    slots = Slots(tmp_path / "slots", 3)
    for n in range(1000):
        slots.add(n, n, n)
    st = (tmp_path / "slots").stat()
    assert st.st_blocks * 512 >= st.st_size
    slots.close()
    holes = tmp_path / "holes"
    holes.touch()
    Slots(holes, 3).close()
    assert holes.stat().st_blocks * 512 >= holes.stat().st_size > 0
