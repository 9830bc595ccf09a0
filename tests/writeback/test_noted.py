"""The checksum that is noted at a file holds on when its times are set, and never begins to hold
for bytes of others.
"""

from __future__ import annotations

import errno

import pytest
import xxhash

from acpfs.backing.lower import Note
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth
from tests.writeback.world import World

BYTES = b"1" * 100
PATH = (b"f",)
STORED_NS = 1_000_000_000
SET_NS = 2_000_000_000


def stored(world: World, run: Run) -> None:
    world.store("f", BYTES, mtime_ns=STORED_NS)
    run(world.drain)
    assert holds(world)


def holds(world: World) -> bool:
    """Whether the file would be compared, and found good if it has its bytes."""
    note = world.lower.note(PATH)
    st = world.lower.lstat(PATH)
    return note is not None and note.is_about(st, 1)


@pytest.mark.clause("S192", "S104")
def test_the_note_follows_when_times_are_set(world: World, run: Run) -> None:
    stored(world, run)
    world.setattr("f", mtime_ns=SET_NS)
    run(world.drain)
    assert world.lower.lstat(PATH).mtime_ns == SET_NS
    assert world.lower.note(PATH) == Note(xxhash.xxh3_128_hexdigest(BYTES), SET_NS)


@pytest.mark.clause("S192")
def test_the_note_follows_when_the_first_attempt_failed_half_way(world: World, run: Run) -> None:
    """The note was given, the time was not."""
    stored(world, run)
    world.lower.inode("f").xattrs[b"user.acpfs.xxh3"] = Note(
        xxhash.xxh3_128_hexdigest(BYTES), SET_NS
    ).encode()
    world.lower.fault = FailNth("setattr", 1, errno.EIO)
    world.setattr("f", mtime_ns=SET_NS)
    op = world.log.front(1)[0]
    world.log.mark_begun(op)
    run(world.drain)
    assert holds(world)


@pytest.mark.clause("S192")
@pytest.mark.parametrize("set_ns", [SET_NS, STORED_NS])
def test_a_file_that_others_wrote_to_stays_without_a_note_that_holds(
    world: World, run: Run, set_ns: int
) -> None:
    stored(world, run)
    inode = world.lower.inode("f")
    inode.content[:] = b"2" * 100
    inode.mtime_ns = STORED_NS + 5
    world.setattr("f", mtime_ns=set_ns)
    run(world.drain)
    assert world.lower.lstat(PATH).mtime_ns == set_ns
    assert not holds(world)
    assert world.lower.digest(PATH) == xxhash.xxh3_128_hexdigest(BYTES)
