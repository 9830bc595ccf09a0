"""Where a journal of what is copied to a member is: there, or on the storage. Holders that hold, in
this process; and a storage in memory.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from acpfs.backing.leftovers import JOURNALS, forget_journals
from acpfs.writeback.copies.journal_frames import DamagedFrameError
from acpfs.writeback.copies.journal_marks import mark_path
from acpfs.writeback.copies.journal_place import Journal, JournalSite
from acpfs.writeback.copies.member_journals import HolderSite, MemberJournals, StorageSite
from acpfs.writeback.copies.on_member import MemberPlace
from acpfs.writeback.copies.on_storage import PIECE_BYTES, StoredJournals
from acpfs.writeback.copies.on_storage import read_into as read_stored
from tests.exchange.test_on_member import Network
from tests.rig.runtime import REAL
from tests.writeback.memory_lower import MemoryLower

pytestmark = pytest.mark.clause("S601")
FIRST = "1" * 16
SECOND = "2" * 16
THIRD = "3" * 16
INSERT = "INSERT INTO one VALUES (?, ?)"


def state() -> sqlite3.Connection:
    """Of more than one piece."""
    made = sqlite3.connect(":memory:", check_same_thread=False)
    made.execute("CREATE TABLE one (n INTEGER, b BLOB)")
    made.execute(INSERT, (1, bytes(PIECE_BYTES + 5)))
    made.commit()
    return made


def read(lower: MemoryLower, token: str, tmp_path: Path) -> list[tuple[int, bytes]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        read_stored(lower, "origin", token, db, tmp_path)
        return db.execute("SELECT n, b FROM one ORDER BY n").fetchall()


@pytest.fixture
def lower() -> MemoryLower:
    return MemoryLower()


@pytest.fixture
def stored(lower: MemoryLower, tmp_path: Path) -> StoredJournals:
    return StoredJournals(lower, "origin", tmp_path)


def test_a_journal_on_the_storage_reads_back_piece_by_piece(
    lower: MemoryLower, stored: StoredJournals, tmp_path: Path
) -> None:
    journal = stored.begin("t1", state())
    assert read(lower, "t1", tmp_path) == [(1, bytes(PIECE_BYTES + 5))]
    journal.append([[(INSERT, (2, b"x"), False)], [("DELETE FROM one WHERE n = ?", (1,), False)]])
    journal.append([[(INSERT, [(3, b"y"), (4, None)], True)]])
    assert read(lower, "t1", tmp_path) == [(2, b"x"), (3, b"y"), (4, None)]
    assert list(tmp_path.glob("seed-*")) == []
    stored.begin("t2", state())
    StoredJournals(lower, "origin-2", tmp_path).begin("t3", state())
    assert stored.tokens() == ["t1", "t2"]
    stored.remove("t1")
    assert stored.tokens() == ["t2"]
    forget_journals(lower, b"origin")
    assert [name.split(b".")[0] for name in lower.list_own((JOURNALS,))] == [b"origin-2+t3"] * 3


@pytest.mark.parametrize("gone", ["seed.0", "seed.1", "log.0", "changed"])
def test_one_that_is_not_what_was_written_is_refused(
    lower: MemoryLower, stored: StoredJournals, tmp_path: Path, gone: str
) -> None:
    stored.begin("t1", state())
    if gone == "changed":
        lower.write_own((JOURNALS, b"origin+t1.seed.1"), b"\0" * 5)
    else:
        lower.remove_own((JOURNALS, f"origin+t1.{gone}".encode()))
    with pytest.raises(DamagedFrameError):
        read(lower, "t1", tmp_path)


class Origin:
    """What a mirror does with its place."""

    def __init__(self, network: Network, lower: MemoryLower, stored: StoredJournals) -> None:
        self.place: MemberPlace = network.place()
        self.journals = MemberJournals(self.place, stored, REAL)
        self._lower = lower

    def settle(self) -> None:
        """As `spill` does."""
        self.place.begin()
        self.place.settled()

    def mark(self, token: str) -> Journal:
        """Begin a journal where one is to be, and have the mark name it."""
        site = self.journals.site
        assert site is not None
        journal = site.begin(token, state())
        words = "".join(f'"{key}": "{value}", ' for key, value in self.told(token).items())
        text = f'{{{words}"token": "{token}"}}'
        self._lower.write_own(mark_path("origin"), text.encode())
        self.journals.marked(token)
        return journal

    def site(self) -> JournalSite | None:
        return self.journals.site

    def told(self, token: str) -> dict[str, str]:
        return self.journals.described(token)


@pytest.fixture
def network(tmp_path: Path) -> Network:
    return Network(tmp_path)


@pytest.fixture
def origin(network: Network, lower: MemoryLower, stored: StoredJournals) -> Origin:
    lower.write_own(mark_path("origin"), b"{}\n")
    return Origin(network, lower, stored)


def test_it_goes_on_at_the_storage_and_back(network: Network, origin: Origin) -> None:
    network.add("h")
    assert origin.site() is None
    assert not origin.journals.goes_elsewhere(None)  # nothing counts
    origin.settle()
    origin.mark(FIRST)
    told = origin.told(FIRST)
    assert told["holder"] == origin.journals.counts_at == "h"
    at_holder = origin.site()
    network.gone.add("h")
    origin.place.tell_clock(1.0)
    assert origin.site() is None
    assert origin.journals.goes_elsewhere(at_holder)
    on_storage = origin.site()
    assert isinstance(on_storage, StorageSite)
    origin.mark(SECOND)
    assert origin.told(SECOND) == {**told, "journal": "storage"}
    assert not origin.journals.goes_elsewhere(on_storage)  # it took none
    network.gone.clear()
    origin.place.begin()  # the same session, which was known before
    assert origin.site() is at_holder
    origin.mark(THIRD)
    assert origin.told(THIRD) == told
    assert set(origin.journals.tokens()) == {FIRST, SECOND, THIRD}


def test_another_holder_gets_the_journal_when_it_lacks_nothing(
    network: Network, origin: Origin
) -> None:
    network.add("h")
    origin.settle()
    origin.mark(FIRST)
    network.add("i")
    network.gone.add("h")
    origin.place.tell_clock(1.0)
    origin.place.lacks = True
    origin.settle()
    assert origin.place.where == "i"
    assert origin.site() is None
    assert origin.journals.goes_elsewhere(None)
    origin.mark(SECOND)
    assert origin.told(SECOND)["holder"] == "h"
    origin.place.lacks = False
    site = origin.site()
    assert isinstance(site, HolderSite)
    origin.mark(THIRD)
    assert origin.told(THIRD)["holder"] == origin.journals.counts_at == "i"


def test_a_new_worker_learns_from_the_mark_what_counts(
    network: Network, origin: Origin, lower: MemoryLower, stored: StoredJournals
) -> None:
    """Whatever it is, it is not given up for a session that lacks something."""
    network.add("h")
    origin.settle()
    origin.mark(FIRST)
    network.gone.add("h")
    network.add("i")
    again = Origin(network, lower, stored)
    again.place.lacks = True
    again.settle()
    site = again.site()  # it does not know yet
    assert isinstance(site, HolderSite)
    with pytest.raises(OSError, match="not all yet"):
        site.begin(SECOND, state())
    assert again.site() is None
    assert again.journals.learn()
    assert again.journals.goes_elsewhere(None)
    again.mark(THIRD)
    assert again.told(THIRD)["holder"] == "h"
    third = Origin(network, lower, stored)
    assert third.journals.learn()
    assert third.journals.counts_at == "h"
    assert THIRD in third.journals.tokens()
