"""Copies and journals at a holder: who is chosen, what a session is, and what is left of one that
is over. Holders that hold, in this process; what goes between them may fail.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from threading import RLock

import pytest

from acpfs.exchange.exchange_records import MemberAddress, Message
from acpfs.ram.tier import HELD, Tier
from acpfs.types import VersionId
from acpfs.writeback.copies import on_disk
from acpfs.writeback.copies.held_copies import HeldCopies
from acpfs.writeback.copies.member_journals import MemberJournals
from acpfs.writeback.copies.on_member import HolderCandidate, HolderError, MemberPlace
from acpfs.writeback.copies.on_storage import StoredJournals
from tests.rig.runtime import REAL
from tests.writeback.memory_lower import MemoryLower

clause = pytest.mark.clause
MIB = 1 << 20
VOLUME = "7" * 32


class Network:
    """Members that hold, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.holdings: dict[str, HeldCopies] = {}
        self.domains: dict[str, str] = {}
        self.gone: set[str] = set()
        self.unheard: set[str] = set()
        """What they answer is lost on the way."""
        self.said: list[str] = []

    def add(self, node: str, domain: str = "", budget: int = 16 * MIB) -> HeldCopies:
        place = self._directory / node
        place.mkdir()
        tier = Tier(place, 64 * MIB, REAL)
        self.holdings[node] = HeldCopies(tier, RLock(), VOLUME, budget, REAL)
        self.domains[node] = domain or node
        return self.holdings[node]

    def hold(self, to: MemberAddress, said: Message) -> Message:
        self._reach(to)
        self.said.append(said["what"])
        answer = self.holdings[to.node].heed("origin", said)
        if to.node in self.unheard:
            raise OSError("no answer in time")
        return answer

    def put(self, to: MemberAddress, said: Message, fd: int, position: int) -> Message:
        self._reach(to)
        answer, into = self.holdings[to.node].room("origin", said)
        if into >= 0:
            os.pwrite(into, os.pread(fd, said["size"], position), said["at"])
            os.close(into)
        return answer

    def _reach(self, to: MemberAddress) -> None:
        if to.node in self.gone:
            raise OSError("no answer")

    def candidates(self) -> list[HolderCandidate]:
        return [
            HolderCandidate(MemberAddress(node, (), 1, ""), self.domains[node], holding.offered())
            for node, holding in self.holdings.items()
        ]

    def place(self, earlier: str = "") -> MemberPlace:
        own = HolderCandidate(MemberAddress("origin", (), 1, ""), "rack-a", 0)
        return MemberPlace(self, self.candidates, own, self._directory, REAL, earlier)

    def files(self, node: str) -> dict[str, bytes]:
        found = (self._directory / node / "data" / HELD).rglob("acpfs-*/*")
        return {path.name: path.read_bytes() for path in found}


@pytest.fixture
def network(tmp_path: Path) -> Network:
    return Network(tmp_path)


def copied(place: MemberPlace, data: bytes, vid: int = 1) -> str:
    name = place.new_name(VersionId(vid))
    with closing(place.new_copy(name)) as copy:
        for start in range(0, len(data), MIB):
            piece = copy.buffer(MIB)[: len(data) - start]
            piece[:] = data[start : start + MIB]
            copy.write(piece, start)
        copy.finish(len(data))
    return name


@clause("S580")
def test_two_threads_that_begin_have_one_session(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal's and that of the copies."""
    network.add("holder")
    place = network.place()
    failed: list[Exception] = []
    is_over = threading.Event()
    hold = network.hold

    def begin() -> None:
        try:
            place.begin()
        except Exception as error:  # noqa: BLE001 - the test tells
            failed.append(error)
        is_over.set()

    other = threading.Thread(target=begin, daemon=True)

    def held(to: MemberAddress, said: Message) -> Message:
        if not other.ident:
            other.start()
            is_over.wait(0.5)  # where it does not wait for this one, it is done
        return hold(to, said)

    monkeypatch.setattr(network, "hold", held)
    place.begin()
    other.join()
    assert (failed, place.sessions, network.said) == ([], 1, ["begin"])


@clause("S581")
def test_the_ring_begins_behind_our_own_id_and_leaves_our_own_domain_out(network: Network) -> None:
    network.add("near", "rack-a")
    network.add("a", "rack-b")
    network.add("z", "rack-c")
    place = network.place()
    assert place.is_broken
    place.begin()
    assert (place.where, place.is_broken, place.why) == ("z", False, "")
    network.gone.add("z")
    with pytest.raises(OSError, match="no answer"):
        place.names()
    assert place.is_broken
    assert "no answer" in place.why
    place.begin()
    assert place.where == "a"
    network.gone.add("a")
    with pytest.raises(OSError, match="no answer"):
        place.names()
    with pytest.raises(HolderError):
        place.begin()
    assert place.is_broken


@clause("S581")
def test_only_members_of_our_own_domain_are_no_holders(network: Network) -> None:
    network.add("near", "rack-a")
    place = network.place()
    with pytest.raises(HolderError, match="no member in another failure domain"):
        place.begin()
    assert "failure domain" in place.why


@clause("S580")
@pytest.mark.parametrize("size", [0, 1, 5 * MIB + 3])
def test_a_copy_is_what_was_written(network: Network, size: int) -> None:
    network.add("h")
    place = network.place()
    place.begin()
    data = os.urandom(size)
    name = copied(place, data)
    assert network.files("h") == {name: data}
    assert place.names() == [name]
    place.remove([name])
    assert network.files("h") == {}


@clause("S580")
def test_a_copy_that_begins_anew_has_nothing_of_before(network: Network) -> None:
    network.add("h")
    place = network.place()
    place.begin()
    name = place.new_name(VersionId(3))
    with closing(place.new_copy(name)) as copy:
        copy.buffer(5)[:] = b"first"
        copy.write(copy.buffer(5), 0)
        copy.clear()
        copy.buffer(3)[:] = b"new"
        copy.write(copy.buffer(3), 0)
        copy.finish(10)  # with a hole at its end
    assert network.files("h") == {name: b"new".ljust(10, b"\0")}


@clause("S581")
def test_who_began_in_a_session_that_is_over_writes_into_no_other(network: Network) -> None:
    """Else half a copy would count at the new holder."""
    network.add("z")
    network.add("p")
    place = network.place()
    place.begin()
    first = place.where
    old = place.new_copy("1-0123456789ab")
    old.buffer(5)[:] = b"first"
    old.write(old.buffer(5), 0)
    network.gone.add(first)
    with pytest.raises(OSError, match="no answer"):
        old.write(old.buffer(5), 5)
    place.begin()
    assert place.where not in ("", first)
    with pytest.raises(HolderError, match="over"):
        old.write(old.buffer(5), 5)
    with pytest.raises(HolderError, match="over"):
        old.finish(20)
    old.close()
    assert network.files(place.where) == {}
    assert place.names() == []


@clause("S586")
def test_a_connection_that_was_lost_costs_no_copy(network: Network) -> None:
    """Also where there is another worker by then: it knows from the state where they are."""
    network.add("p")
    network.add("z")
    place = network.place()
    place.begin()
    name = copied(place, b"kept")
    network.gone.add(place.where)
    with pytest.raises(OSError, match="no answer"):
        place.names()
    network.gone.clear()
    place.begin()
    assert place.names() == [name]
    assert place.sessions == 1
    again = network.place(place.recorded)
    assert again.is_broken
    again.begin()
    assert again.recorded == place.recorded
    assert again.names() == [name]
    assert again.sessions == 0


@clause("S581")
def test_a_holder_whose_answer_is_lost_is_asked_for_the_same_session_again(
    network: Network,
) -> None:
    """Else it would have one more that nobody uses."""
    holding = network.add("h")
    place = network.place()
    network.unheard.add("h")
    for _time in range(3):
        with pytest.raises(HolderError, match="no answer in time"):
            place.begin()
    network.unheard.clear()
    place.begin()
    (session,) = holding.statistics()
    assert place.recorded == f"member:h:{session.session}"
    name = copied(place, b"kept")
    assert network.files("h") == {name: b"kept"}


@clause("S583")
def test_a_holder_that_is_full_is_left_for_one_with_room(network: Network) -> None:
    network.add("p", budget=2 * MIB)
    place = network.place()
    place.begin()
    seen = []
    for node, budget in (("", 0), ("q", 4 * MIB), ("r", 9 * MIB)):
        if node:
            network.add(node, budget=budget)
        place.is_too_small(8 * MIB)
        seen.append(place.is_broken)
    assert seen == [False, False, True]
    place.begin()
    assert place.where == "r"


@clause("S583")
def test_what_finds_no_room_is_said_and_nothing_counts(network: Network) -> None:
    network.add("p", budget=2 * MIB)
    place = network.place()
    place.begin()
    with pytest.raises(HolderError, match="full"):
        copied(place, bytes(3 * MIB))
    assert place.is_broken
    assert "what it gives to others is full" in place.why


@clause("S580")
def test_a_journal_at_a_holder_is_the_one_that_a_disk_would_have(
    network: Network, tmp_path: Path
) -> None:
    network.add("h")
    place = network.place()
    place.begin()
    place.settled()
    stored = StoredJournals(MemoryLower(), "origin", tmp_path)
    journals = MemberJournals(place, stored, REAL)
    assert journals.site is not None
    token = "0123456789abcdef"
    state = sqlite3.connect(":memory:", check_same_thread=False)
    state.execute("CREATE TABLE one (n INTEGER, b BLOB)")
    state.execute("INSERT INTO one VALUES (1, x'00ff')")
    state.commit()
    journal = journals.site.begin(token, state)
    insert = "INSERT INTO one VALUES (?, ?)"
    journal.append([[(insert, (2, b"x"), False)], [(insert, [(3, b"y"), (4, None)], True)]])
    journal.append([[("DELETE FROM one WHERE n = ?", (1,), False)]])
    journal.close()
    assert journals.tokens() == [token]
    told = {"holder": "h", "session": place.recorded[-16:], "fenced": "1"}
    assert journals.described(token) == told
    directory = next((tmp_path / "h" / "data" / HELD).rglob("acpfs-*"))
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        on_disk.read_into(directory, token, db)
        assert db.execute("SELECT n, b FROM one ORDER BY n").fetchall() == [
            (2, b"x"),
            (3, b"y"),
            (4, None),
        ]
    assert list(tmp_path.glob("seed-*")) == []


@clause("S625")
def test_a_journal_that_is_begun_while_names_are_listed_is_known_and_can_be_removed(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a connection was lost, and the same session goes on."""
    network.add("h")
    place = network.place()
    place.begin()
    put = network.put

    def put_late(to: MemberAddress, said: Message, fd: int, position: int) -> Message:
        assert place.names() == []
        monkeypatch.undo()
        return put(to, said, fd, position)

    monkeypatch.setattr(network, "put", put_late)
    state = sqlite3.connect(":memory:", check_same_thread=False)
    state.execute("CREATE TABLE one (n INTEGER, b BLOB)")
    place.begin_journal("0123456789abcdef", state).close()
    assert place.tokens() == ["0123456789abcdef"]


@clause("S586", "S601")
def test_no_second_session_where_the_first_may_be(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder that is known again, and answers late, has all that was copied there."""
    network.add("h")
    place = network.place()
    place.begin()
    session = place.recorded
    network.gone.add("h")
    place.tell_clock(1.0)
    network.gone.clear()
    hold = network.hold

    def late(to: MemberAddress, said: Message) -> Message:
        if said.get("resume"):
            raise OSError("no answer")
        return hold(to, said)

    monkeypatch.setattr(network, "hold", late)
    with pytest.raises(HolderError):
        place.begin()
    monkeypatch.undo()
    place.begin()
    assert (place.recorded, place.sessions, place.begins) == (session, 1, 2)


@clause("S583")
def test_many_removals_go_together(network: Network) -> None:
    network.add("h")
    place = network.place()
    place.begin()
    names = [copied(place, b"x", number) for number in range(1, 6)]
    network.said.clear()
    place.remove(names)
    assert network.said == ["remove"]
    assert network.files("h") == {}


@clause("S580")
def test_a_copy_that_is_begun_anew_has_nothing_of_what_was_written(network: Network) -> None:
    network.add("holder")
    place = network.place()
    place.begin()
    with closing(place.new_copy("1-0123456789ab")) as copy:
        copy.write(copy.buffer(5), 0)
        copy.clear()
        assert network.files("holder") == {"1-0123456789ab": b""}
        copy.buffer(2)[:] = b"ab"
        copy.write(copy.buffer(2), 0)
        copy.finish(2)
    place.remove(["2-0123456789ab"])
    assert network.files("holder") == {"1-0123456789ab": b"ab"}


@clause("S580")
@pytest.mark.parametrize(
    ("said", "taken"), [(None, 4 * MIB), (True, 4 * MIB), (6 * MIB, 6 * MIB), (1 << 40, 8 * MIB)]
)
def test_a_holder_gets_pieces_no_larger_than_it_takes(
    network: Network, monkeypatch: pytest.MonkeyPatch, said: object, taken: int
) -> None:
    """One of an acpfs that does not say so takes 4 MiB."""
    holder = network.add("holder")
    heed = holder.heed

    def answers(origin: str, what: object) -> Message:
        return {**heed(origin, what), "piece": said}

    monkeypatch.setattr(holder, "heed", answers)
    place = network.place()
    place.begin()
    assert place.piece_bytes == taken


@clause("S580")
def test_what_may_still_be_sent_from_is_not_used_again(network: Network) -> None:
    network.add("holder")
    place = network.place()
    place.begin()
    network.gone.add("holder")
    with closing(place.new_copy("1-0123456789ab")) as copy, pytest.raises(OSError, match="answer"):
        copy.write(copy.buffer(5), 0)
    assert not place.buffers._idle
