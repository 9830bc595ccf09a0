"""A session that is closed for an adoption: nothing that comes is told to be held any more, and who
adopts finds all that was begun.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, RLock
from typing import Any

import pytest

from acpfs.backing.late_calls import NOTED_AT, Storage, is_refusal_noted
from acpfs.backing.leftovers import MIRRORS, WITHDRAWN
from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.backing.terms import TermClaim
from acpfs.config import Adopt, Settings
from acpfs.exchange.hold_calls import HoldCalls
from acpfs.ram.tier import Tier
from acpfs.runtime.file_locks import locked
from acpfs.worker import adoption_watch
from acpfs.worker.adoption_watch import (
    AGAIN_MAX_S,
    AGAIN_S,
    UNDER_WAY,
    AdoptionStorage,
    AdoptionWatch,
    NodesSeen,
)
from acpfs.writeback.adopting.under_way import not_fenced, sentence
from acpfs.writeback.copies import on_disk
from acpfs.writeback.copies.held_copies import LEFT_S, HeldCopies, claiming
from tests.exchange.giving_member import PATIENCE_S, giving, key_of, own_name
from tests.rig.runtime import REAL
from tests.writeback.memory_lower import MemoryLower

clause = pytest.mark.clause
SESSION = "0123456789abcdef"
COPY = "17-0123456789ab"
VOLUME = "7" * 32
WROTE = {"what": "wrote", "session": SESSION}
STORAGE = Storage("ext4", 7, 12)
MARK = {"token": SESSION, "holder": "n2", "session": SESSION, "fenced": "1"}


def holding_for(tmp_path: Path) -> HeldCopies:
    held = HeldCopies(Tier(tmp_path, 64 << 20, REAL), RLock(), VOLUME, "50%", REAL)
    assert held.heed("n1", {"what": "begin", "session": SESSION})["ok"]
    return held


def journal(*ops: tuple[str, bytes, int]) -> sqlite3.Connection:
    """The state of one, as far as it is looked at: kind, name, committed."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    fill(db, ops)
    return db


def fill(db: sqlite3.Connection, ops: tuple[tuple[str, bytes, int], ...]) -> None:
    db.execute("CREATE TABLE op (seq INTEGER PRIMARY KEY, kind, name, payload, committed)")
    db.executemany("INSERT INTO op (kind, name, committed) VALUES (?, ?, ?)", ops)


@clause("S612")
def test_bytes_for_which_there_was_room_before_the_claim_are_not_told_to_be_held(
    tmp_path: Path,
) -> None:
    held = holding_for(tmp_path)
    said = {"session": SESSION, "name": COPY, "at": 0, "size": 5}
    wrote = {"what": "wrote", "session": SESSION}
    answer, fd = held.room("n1", said)
    assert answer == {"ok": True}
    assert held.heed("n1", wrote) == {"ok": True}
    held.claim("n1", SESSION)
    os.pwrite(fd, b"bytes", 0)
    os.close(fd)
    assert "was claimed" in held.heed("n1", wrote)["refused"]
    assert not held.unclaim("n1", lambda: True)
    assert "was claimed" in held.heed("n1", wrote)["refused"]
    assert held.unclaim("n1", lambda: False)
    assert held.heed("n1", wrote) == {"ok": True}
    assert held.claimed("n1") == []


@clause("S612")
@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_member_asks_once_more_when_bytes_are_there(tmp_path: Path, is_claimed: bool) -> None:
    with giving(tmp_path, b"") as member:
        own = own_name(tmp_path, "n2")
        member.keys["n2"] = key_of(own)
        member.is_claimed = is_claimed
        (tmp_path / "from").write_bytes(b"bytes")
        fd = os.open(tmp_path / "from", os.O_RDONLY)
        said = {"session": SESSION, "name": COPY, "at": 0, "size": 5}
        calls = HoldCalls(own)
        member.takers.append(calls._calls)
        answer = calls.put(member.address, said, (fd, 0), PATIENCE_S)
        os.close(fd)
        assert member.path.read_bytes() == b"bytes"
        assert answer == ({"refused": "claimed"} if is_claimed else {"ok": True})
        assert member.asked == ["knows", "room", "hold"]


@clause("S612")
def test_what_was_begun_and_no_fence_stops_is_found() -> None:
    stores = [("store", b"a", 1), ("store", b"b", 2), ("unlink", b"c", 0), ("rename", b"d", 0)]
    assert not_fenced(journal(*stores)) == []
    found = not_fenced(journal(*stores, ("unlink", b"e", 1), ("setattr", b"", 2)))
    assert found == ["unlink e", "setattr"]
    assert "unlink e, setattr" in sentence(found)


@dataclass
class Known:
    """What is known of the node; see `Silence`."""

    silent: bool = True
    replies: bool = False
    looks: int = 0

    def seen(self) -> NodesSeen:
        self.looks += 1
        return NodesSeen({"n1": NodeRecord("n1")}, frozenset({"n1"} if self.silent else ()))

    def answers(self, _record: NodeRecord) -> bool:
        return self.replies


@dataclass
class Watched:
    """A watch, what it looks at, and the command that it gives."""

    directory: Path
    lower: MemoryLower = field(default_factory=MemoryLower)
    known: Known = field(default_factory=Known)
    record: NodeRecord | None = field(default_factory=lambda: NodeRecord("n1"))
    claimer: str = ""
    adopted: list[str] = field(default_factory=list)
    says: str = ""
    does: Callable[[], object] = lambda: None
    """What the command does, before it says that."""
    is_locked: bool = False
    """Somebody else has it adopted."""

    def __post_init__(self) -> None:
        self.held = holding_for(self.directory)
        self.mark(MARK)
        self.note(refused=True)
        self.watch = self.made()
        self.is_quiet()

    def made(self, adopt: Adopt = Adopt.AUTO) -> AdoptionWatch:
        settings: dict[str, Any] = {"backing": Path("/b"), "mountpoint": Path("/m")}
        storage = AdoptionStorage(
            self.lower,
            lambda _node: TermClaim(1, self.claimer) if self.claimer else None,
            lambda _node: self.record,
            lambda: STORAGE,
        )
        return AdoptionWatch(
            Settings(**settings, adopt=adopt), "n2", self.held, storage, self.known, self, REAL
        )

    def is_quiet(self) -> None:
        """It has not spoken for long."""
        self.held._sessions["n1", SESSION].heard_at -= LEFT_S

    def mark(self, said: dict[str, str]) -> None:
        self.lower.write_own((MIRRORS, b"n1"), json.dumps(said).encode())

    def note(self, *, refused: bool, storage: Storage = STORAGE) -> None:
        said = {"refused": refused, "storage": list(storage)}
        self.lower.write_own((NOTED_AT,), json.dumps(said).encode())

    def look(self) -> str:
        """Once; what is told of it."""
        for node in self.watch.look():
            self.watch.attempt(node)
        return self.watch.told("n1")

    @contextlib.contextmanager
    def locked(self, _node: str) -> Iterator[bool]:
        """See `Command`."""
        yield not self.is_locked

    def drain(self, node: str, _stopping: Event) -> str:
        """See `Command`: as `acpfs-ctl adopt` does, it claims what is held first."""
        assert self.claimer or self.held._sessions["n1", SESSION].is_shut
        self.held.claim(node, SESSION)
        self.adopted.append(node)
        self.does()
        return self.says


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Of a node that may be adopted; its journal has one file."""
    made = Watched(tmp_path)
    begun(monkeypatch, ("store", b"a", 1))
    return made


def begun(monkeypatch: pytest.MonkeyPatch, *ops: tuple[str, bytes, int]) -> None:
    monkeypatch.setattr(on_disk, "read_into", lambda _place, _token, db: fill(db, ops))


@clause("S614")
@pytest.mark.parametrize(
    ("note", "refused"),
    [
        (b'{"refused": true, "at": 5.0, "storage": ["ext4", 7, 12]}', True),
        (b'{"refused": true, "storage": ["ext4", 7, 12], "clients": ["later"]}', True),
        (b'{"refused": true, "at": 5.0}', False),
        (b'{"refused": true, "storage": ["nfs4", 7, 12]}', False),
        (b'{"refused": true, "storage": ["ext4", 8, 12]}', False),
        (b'{"refused": true, "storage": ["ext4", 7, 13]}', False),
        (b'{"refused": 1, "storage": ["ext4", 7, 12]}', False),
        (b'{"storage": ["ext4", 7, 12]}', False),
        (b"[true]", False),
        (b'{"refused": tr', False),
        (b"\xff", False),
        (b"", False),
    ],
)
def test_a_note_is_read_or_nothing_is_known(note: bytes, refused: bool) -> None:
    """It may say more, to a later version. What an ext4 does says nothing of its clients, nor what
    one storage does of a copy of it.
    """
    assert is_refusal_noted(note, STORAGE) is refused


@clause("S613")
def test_a_silent_node_is_adopted(watched: Watched) -> None:
    assert watched.look() == ""
    assert watched.adopted == ["n1"]


@clause("S613")
@pytest.mark.parametrize("what", ["it writes its record", "it answers", "it spoke"])
def test_a_node_that_is_heard_of_is_left_alone(watched: Watched, what: str) -> None:
    watched.known = Known(silent=what != "it writes its record", replies=what == "it answers")
    watched.watch._silence = watched.known
    if what == "it spoke":
        watched.held._sessions["n1", SESSION].heard_at += LEFT_S
    assert watched.look() == ""
    assert watched.adopted == watched.held.claimed("n1") == []
    assert watched.held.heed("n1", WROTE) == {"ok": True}


@clause("S613")
@pytest.mark.parametrize("state", [*NodeState, None])
def test_only_who_said_last_that_it_lives_is_lost(
    watched: Watched, state: NodeState | None
) -> None:
    """One that was unmounted comes back, with what its RAM has; the watch may know an older
    record.
    """
    watched.record = None if state is None else NodeRecord("n1", state=state)
    assert watched.look() == ""
    assert watched.adopted == (["n1"] if state is NodeState.LIVE else [])


@clause("S613")
@pytest.mark.parametrize("withheld", [0, 1])
def test_what_was_drained_goes_and_not_with_a_pointer_that_is_withheld(
    watched: Watched, withheld: int
) -> None:
    """Whoever drained it died before it said so."""
    watched.held.claim("n1", SESSION)
    watched.claimer = "n2"
    watched.record = NodeRecord("n1", state=NodeState.LEFT, withheld=withheld)
    watched.look()
    assert [one.origin for one in watched.held.statistics()] == ["n1"] * withheld
    assert watched.adopted == ["n1"] * withheld  # it goes on


@clause("S613")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda it: setattr(it, "watch", it.made(Adopt.ASKED)), "adopt = asked"),
        (lambda it: it.note(refused=False), "acpfs doctor"),
        (lambda it: it.note(refused=True, storage=Storage("nfs4", 7, 12)), "acpfs doctor"),
        (lambda it: it.lower.remove_own((NOTED_AT,)), "acpfs doctor"),
        (lambda it: it.mark({**MARK, "holder": "n3"}), "nothing that is held"),
        (lambda it: it.mark({**MARK, "session": "f" * 16}), "nothing that is held"),
        (lambda it: it.lower.write_own((MIRRORS, b"n1"), WITHDRAWN), "nothing that is held"),
        (lambda it: it.lower.write_own((MIRRORS, b"n1"), b"{damaged"), "is damaged"),
        (lambda it: it.mark({"token": SESSION, "holder": "n2", "session": SESSION}), "older"),
    ],
)
def test_what_may_come_late_or_does_not_count_waits_for_a_person(
    watched: Watched, change: Any, why: str
) -> None:
    change(watched)
    assert why in watched.look()
    assert watched.adopted == watched.held.claimed("n1") == []
    assert watched.held.heed("n1", WROTE) == {"ok": True}


@clause("S613")
def test_an_adoption_that_fails_before_the_claim_opens_the_session_again(watched: Watched) -> None:
    """The node may live, and has its holder then."""
    watched.says = "saves is alive"
    assert watched.look() == "saves is alive"
    assert watched.adopted == ["n1"]
    assert watched.held.heed("n1", WROTE) == {"ok": True}
    again = HeldCopies(watched.held._tier, RLock(), VOLUME, "50%", REAL)
    assert again.heed("n1", WROTE) == {"ok": True}  # for the next worker, too


@clause("S613")
def test_an_adoption_that_fails_after_the_claim_is_gone_on_with_and_asks_for_no_silence(
    watched: Watched,
) -> None:
    """The node was shut out, and is heard of: it may live, and commits nothing."""
    watched.says = "the storage is full"
    watched.does = lambda: setattr(watched, "claimer", "n2")
    assert watched.look() == "the storage is full"
    assert watched.held.claimed("n1") == [SESSION]
    watched.watch = watched.made()  # another worker
    watched.known.silent = False
    watched.says = ""
    assert watched.look() == ""
    assert watched.adopted == ["n1", "n1"]


@clause("S613")
@pytest.mark.parametrize(
    "change",
    [
        lambda it: setattr(it.known, "silent", False),
        lambda it: setattr(it.known, "replies", True),
        lambda it: setattr(it, "record", NodeRecord("n1", state=NodeState.AWAY)),
        lambda it: it.mark({**MARK, "holder": "n3"}),
        lambda it: it.lower.write_own((MIRRORS, b"n1"), WITHDRAWN),
        lambda it: it.note(refused=False),
    ],
)
def test_a_session_that_was_closed_before_a_claim_skips_no_check(
    watched: Watched, change: Any
) -> None:
    """Its worker died between; the node lives, or has another holder by now."""
    watched.held.claim("n1", SESSION)
    change(watched)
    for _again in range(3):
        watched.look()
    assert watched.adopted == watched.held.claimed("n1") == []


@clause("S613", "S615")
def test_what_a_person_has_adopted_is_left_to_them(watched: Watched) -> None:
    """From when the command has closed the session, until it has drained the log."""
    watched.held.claim("n1", SESSION)
    watched.is_locked = True
    for claimer in ("", "n2"):
        watched.claimer = claimer
        watched.watch = watched.made()
        assert watched.look() == UNDER_WAY
        assert watched.held.claimed("n1") == [SESSION]
        assert watched.adopted == []
    watched.watch = watched.made(Adopt.ASKED)
    assert watched.look() == ""  # and is told nothing of what they are doing


@clause("S615")
def test_a_mount_that_claims_finds_the_session_closed_until_it_has(watched: Watched) -> None:
    held = watched.held
    with locked(claiming(held.claim("n1", SESSION)), may_wait=False) as is_had:
        assert is_had
        assert not held.unclaim("n1", lambda: False)
    assert held.claimed("n1") == [SESSION]


@clause("S613")
def test_an_error_is_told_and_the_watch_goes_on(watched: Watched) -> None:
    def hangs() -> None:
        raise OSError(errno.EIO, "Input/output error")

    watched.does = hangs
    assert "Input/output error" in watched.look()
    assert watched.held.claimed("n1") == [SESSION]  # for the next attempt to look at
    watched.watch._rests.clear()
    watched.does = lambda: None
    watched.look()
    watched.look()
    assert watched.adopted == ["n1", "n1"]


@clause("S613")
def test_what_is_in_the_way_is_said_once_and_looked_at_more_and_more_seldom(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look reads the journal."""
    now = [1000.0]
    said: list[str] = []
    read: list[float] = []

    def read_into(_place: Path, _token: str, db: sqlite3.Connection) -> None:
        read.append(now[0])
        fill(db, (("unlink", b"old", 1),))

    monkeypatch.setattr(on_disk, "read_into", read_into)
    monkeypatch.setattr(adoption_watch.log, "warning", lambda text, **_what: said.append(text))
    watched.watch._now = lambda: now[0]
    for _second in range(4000):
        now[0] += 1.0
        assert "unlink old" in watched.look()
    assert said == ["a node that is silent is not adopted"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(read)]
    assert gaps[0] <= AGAIN_S
    assert all(
        later == min(2 * earlier, AGAIN_MAX_S) for earlier, later in itertools.pairwise(gaps)
    )
    assert gaps[-1] == AGAIN_MAX_S


@clause("S613")
def test_nobody_looks_at_all_nodes_while_all_speak(watched: Watched) -> None:
    watched.held._sessions["n1", SESSION].heard_at += LEFT_S
    assert watched.look() == ""
    assert watched.known.looks == 0


@clause("S613")
def test_a_node_whose_adoption_hangs_holds_up_no_other_one(watched: Watched) -> None:
    watched.watch._busy.add("n1")  # it has a thread
    held = watched.held
    held.heed("n4", {"what": "begin", "session": "f" * 16})
    held.claim("n4", "f" * 16)
    assert list(watched.watch.look()) == ["n4"]


@clause("S612", "S613")
def test_what_was_begun_and_no_fence_stops_leaves_the_session_open(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(monkeypatch, ("store", b"a", 1), ("unlink", b"old", 1))
    assert "unlink old" in watched.look()
    assert watched.adopted == watched.held.claimed("n1") == []
    assert watched.held.heed("n1", WROTE) == {"ok": True}


@clause("S613")
def test_a_mark_that_changes_while_the_session_is_closed_is_a_sign_of_life(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_into(_place: Path, _token: str, db: sqlite3.Connection) -> None:
        fill(db, ())
        watched.mark({**MARK, "token": "f" * 16})

    monkeypatch.setattr(on_disk, "read_into", read_into)
    assert "it lives" in watched.look()
    assert watched.adopted == watched.held.claimed("n1") == []
