"""The budget's arithmetic: who gets room and in which order, and what a tier file counts until the
last reader has let go of it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from acpfs.ram.ladder import Rung
from acpfs.ram.tier import FALLOC_KEEP_SIZE, Tier, fallocate
from acpfs.ram.waiting import Applicant, Purpose
from acpfs.types import Ino, TierId
from tests.rig.runtime import REAL

MIB = 1 << 20


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    made = Tier(tmp_path, 10 * MIB, REAL)
    yield made
    made.close()


def written(tier: Tier, size: int) -> TierId:
    tier_id, fd = tier.create_open()
    os.write(fd, bytes(size))
    os.close(fd)
    tier.settle(tier_id)
    return tier_id


@pytest.mark.clause("S53")
def test_room_is_given_in_the_order_in_which_it_was_asked_for(tier: Tier) -> None:
    """A small one that would fit does not overtake: the large one at the front would never get its
    turn.
    """
    taken = [written(tier, 4 * MIB), written(tier, 4 * MIB)]
    first = tier.reserve(6 * MIB)
    second = tier.reserve(MIB)
    third = tier.reserve(2 * MIB)
    assert (first.done(), second.done(), third.done()) == (False, False, False)
    assert not tier.reserve_nowait(1)
    tier.remove(taken[0])
    assert (first.done(), second.done(), third.done()) == (True, False, False)
    tier.release(6 * MIB)
    assert second.done()
    assert third.done()
    assert tier.reserved_bytes == 3 * MIB


def test_who_gives_up_at_the_front_lets_the_others_pass(tier: Tier) -> None:
    written(tier, 8 * MIB)
    first = tier.reserve(6 * MIB)
    second = tier.reserve(MIB)
    first.cancel()
    tier.room_changed()
    assert second.done()
    assert tier.queue() == []
    assert tier.reserved_bytes == MIB


def test_the_queue_tells_who_waits(tier: Tier) -> None:
    written(tier, 8 * MIB)
    applicant = Applicant(Ino(7), Purpose.WRITE, 4711)
    tier.reserve(6 * MIB, applicant)
    (waiting,) = tier.queue()
    assert (waiting.applicant, waiting.size) == (applicant, 6 * MIB)


def test_no_room_will_come(tier: Tier) -> None:
    written(tier, 8 * MIB)
    room = tier.reserve(6 * MIB)
    tier.fail_waiting(errno.ENOSPC, tier.queue())
    assert isinstance(room.exception(), OSError)
    assert (tier.waiting(), tier.reserved_bytes) == (0, 0)


@pytest.mark.clause("S131")
def test_a_removed_file_counts_until_its_last_reader_is_done(tier: Tier) -> None:
    """A stream that hangs on the backing directory keeps the pages of a version that nobody needs
    any more.
    """
    tier_id = written(tier, 8 * MIB)
    fds = [tier.read_long(tier_id), tier.read_long(tier_id)]
    room = tier.reserve(6 * MIB)
    tier.remove(tier_id)
    assert tier.statistics().leaving_bytes == tier.used_bytes == 8 * MIB
    tier.read_done(tier_id, fds[0])
    assert not room.done()
    tier.read_done(tier_id, fds[1])
    assert room.done()
    assert (tier.used_bytes, tier.statistics().leaving_bytes, tier.statistics().peak_bytes) == (
        0,
        0,
        8 * MIB,
    )


@pytest.mark.clause("S130")
def test_a_smaller_budget_makes_room_at_once_and_a_larger_one_serves_who_waits(tier: Tier) -> None:
    clean = [written(tier, 4 * MIB), written(tier, 4 * MIB)]

    def evict(wanted: int) -> int:
        freed = 0
        while clean and freed < wanted:
            freed += tier.allocated_bytes(clean[0])
            tier.remove(clean.pop(0))
        return freed

    tier.ladder.gives(Rung.CLEAN, evict)
    tier.change_budget(5 * MIB)
    assert tier.used_bytes == 4 * MIB
    clean.clear()
    room = tier.reserve(2 * MIB)
    assert not room.done()
    tier.change_budget(6 * MIB)
    assert room.done()


@pytest.mark.clause("S502")
def test_a_mapping_counts_as_somebody_who_has_the_file_open_to_write_until_it_is_gone(
    tier: Tier,
) -> None:
    tier_id = written(tier, MIB)
    assert not tier.has_writers(tier_id)
    reader = tier.open_to_read(tier_id)
    writer = tier.open(tier_id)
    assert tier.has_writers(tier_id)
    mapped = mmap.mmap(writer, MIB)
    os.close(writer)
    assert tier.has_writers(tier_id)
    mapped.close()
    assert not tier.has_writers(tier_id), "who only reads does not count"
    os.close(reader)
    os.close(tier.open(tier_id))
    assert not tier.has_writers(tier_id), "and the lease was given back"


@pytest.mark.clause("S503")
def test_it_is_tried_whether_mappings_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Tier(tmp_path, 10 * MIB, REAL)
    before = os.listdir(tmp_path / "data")
    assert told.tells_of_mappings()
    assert os.listdir(tmp_path / "data") == before
    assert told.used_bytes == 0
    with monkeypatch.context() as patched:
        patched.setattr(Tier, "has_writers", lambda _tier, _tier_id: False)
        assert told.tells_of_mappings(), "once"
        (tmp_path / "other").mkdir()
        untold = Tier(tmp_path / "other", 10 * MIB, REAL)
        assert not untold.tells_of_mappings(), "no leases"
    told.close()
    untold.close()


@pytest.mark.clause("S503")
def test_where_leases_are_turned_off_who_had_them_takes_any_file_for_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Tier(tmp_path, 10 * MIB, REAL)
    tier_id = told.create()
    (tmp_path / "other").mkdir()
    untold = Tier(tmp_path / "other", 10 * MIB, REAL)
    other_id = untold.create()
    assert told.tells_of_mappings()
    assert not told.has_writers(tier_id)

    def refused(_fd: int, command: int, _value: int) -> None:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refused)
    assert told.has_writers(tier_id)
    assert not untold.has_writers(other_id)
    assert not untold.tells_of_mappings()
    told.close()
    untold.close()


@pytest.mark.clause("S503")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_a_file_system_that_is_mounted_anew_without_access_times_tells_nothing(
    tmp_path: Path,
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    tier = Tier(tmp_path, 10 * MIB, REAL)
    try:
        assert tier.tells_of_mappings()
        subprocess.run(["mount", "-o", "remount,noatime", str(tmp_path)], check=True)
        assert not tier.tells_of_mappings()
    finally:
        tier.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.clause("S506")
def test_a_copy_is_as_long_as_its_file_was_at_that_moment(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer appends, and says at its start how much there is: both are in the copy."""
    source = written(tier, MIB)
    target = tier.create()
    copy = tier.copy

    def grown(first: TierId, second: TierId, size: int) -> None:
        copy(first, second, size)
        fd = tier.open(source)
        os.pwrite(fd, b"record", MIB)
        os.pwrite(fd, b"1", 0)
        os.close(fd)

    monkeypatch.setattr(tier, "copy", grown)
    assert tier.copy_steady(source, target) == MIB + 6
    fd = tier.open_to_read(target)
    assert os.pread(fd, 2 * MIB, 0) == b"1" + bytes(MIB - 1) + b"record"
    os.close(fd)


def test_the_end_of_pages_behind_a_files_end_is_found_wherever_they_lie(seed: int) -> None:
    chance = Random(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tier = Tier(Path(directory), 10 * MIB, REAL)
        for _ in range(100):
            tier_id, fd = tier.create_open()
            size = chance.randrange(40 * mmap.PAGESIZE)
            os.ftruncate(fd, size)
            ends = [0]
            for _ in range(chance.randrange(3)):
                offset = chance.randrange(300) * mmap.PAGESIZE
                length = chance.randrange(1, 50 * mmap.PAGESIZE)
                fallocate(fd, FALLOC_KEEP_SIZE, offset, length)
                end = -(-(offset + length) // mmap.PAGESIZE) * mmap.PAGESIZE
                if end > -(-size // mmap.PAGESIZE) * mmap.PAGESIZE:
                    ends.append(end)
            os.close(fd)
            assert tier.end_of_pages(tier_id) == max(ends)
            tier.discard(tier_id)
        tier.close()
