"""Files that another node removes or replaces: this node's client answers ESTALE for as long as it
remembers the old one.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from threading import RLock

import pytest
import xxhash

from acpfs.backing.lower import LowerPath
from acpfs.writeback.evidence.moving_names import MovingNames
from acpfs.writeback.evidence.verify import Verifier
from tests.rig.runtime import REAL
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth, error
from tests.writeback.world import World

pytestmark = pytest.mark.clause("S26")
DATA = b"content"


class Records:
    """What was recorded: one file."""

    def digest(self, path: LowerPath) -> str:
        return xxhash.xxh3_128_hexdigest(DATA)

    def rows(self, below: LowerPath = ()) -> Iterator[tuple[bytes, str, int]]:
        yield b"d/f", xxhash.xxh3_128_hexdigest(DATA), len(DATA)


@pytest.fixture
def stored(world: World, run: Run) -> World:
    world.mkdir("d")
    world.store("d/f", DATA)
    run(world.drain)
    return world


def verdict(world: World) -> str:
    (only,) = Verifier(Records(), world.lower, RLock(), REAL.threads).verify()
    return only.status


def stale(label: str, path: LowerPath) -> None:
    if label == "open" and path == (b"d", b"f"):
        raise error(errno.ESTALE)


def test_a_stale_handle_of_what_was_removed_is_a_missing_file(stored: World) -> None:
    del stored.lower.inode("d").children[b"f"]
    stored.lower.fault = stale
    assert verdict(stored) == "missing"


def test_a_stale_handle_of_what_was_replaced_is_forgotten(stored: World) -> None:
    stored.lower.fault = FailNth("open", 1, errno.ESTALE)
    assert verdict(stored) == "ok"


def test_a_handle_that_stays_stale_is_told(stored: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acpfs.writeback.evidence.verify.STALE_AGAIN_S", 0.001)
    stored.lower.fault = stale
    assert verdict(stored) == "unreadable"


@pytest.mark.clause("S218")
@pytest.mark.parametrize("taking", ["unlink", "rename", "rename its directory", "exchange"])
def test_what_is_just_deleted_or_renamed_is_not_missing(stored: World, taking: str) -> None:
    """Its name goes on the backing directory before its record does, and the operation may hang
    between the two.
    """
    if taking == "unlink":
        stored.unlink("d/f")
    elif taking == "exchange":
        stored.store("g", DATA)
        stored.exchange("g", "d/f")
    else:
        stored.rename(*(("d/f", "g") if taking == "rename" else ("d", "g")))
    del stored.lower.inode("d").children[b"f"]
    moving = MovingNames(stored.log, stored.tree)
    assert [
        found.status for found in Verifier(Records(), stored.lower, RLock(), REAL.threads).verify()
    ] == ["missing"]
    assert (
        list(Verifier(Records(), stored.lower, RLock(), REAL.threads, moving.cover).verify()) == []
    )


@pytest.mark.clause("S218")
def test_what_others_removed_is_missing_whatever_is_deleted_beside_it(stored: World) -> None:
    stored.store("d/g", DATA)
    stored.unlink("d/g")
    del stored.lower.inode("d").children[b"f"]
    moving = MovingNames(stored.log, stored.tree)
    assert [
        found.status
        for found in Verifier(Records(), stored.lower, RLock(), REAL.threads, moving.cover).verify()
    ] == ["missing"]


@pytest.mark.clause("S218")
def test_what_was_deleted_after_the_list_was_read_is_not_missing(stored: World) -> None:
    class Deleted(Records):
        def digest(self, path: LowerPath) -> str:
            return ""

    del stored.lower.inode("d").children[b"f"]
    assert list(Verifier(Deleted(), stored.lower, RLock(), REAL.threads).verify()) == []
