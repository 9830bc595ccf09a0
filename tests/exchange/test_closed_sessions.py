"""A session that is closed for an adoption: nothing that comes is told to be held any more, and who
adopts finds all that was begun.
"""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, RLock
from typing import Any

import pytest

from acpfs.backing.late_calls import NOTED_AT
from acpfs.backing.leftovers import MIRRORS, WITHDRAWN
from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.config import Adopt, Settings
from acpfs.exchange.hold_calls import HoldCalls
from acpfs.ram.tier import Tier
from acpfs.worker.adoption_watch import AdoptionWatch, are_late_calls_refused
from acpfs.writeback.adopting.under_way import not_fenced, sentence
from acpfs.writeback.copies import on_disk
from acpfs.writeback.copies.held_copies import LEFT_S, HeldCopies
from tests.exchange.giving_member import PATIENCE_S, giving, key_of, own_name
from tests.rig.runtime import REAL
from tests.writeback.memory_lower import MemoryLower

clause = pytest.mark.clause
SESSION = "0123456789abcdef"
COPY = "17-0123456789ab"
VOLUME = "7" * 32
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
    db.execute("CREATE TABLE op (seq INTEGER PRIMARY KEY, kind, name, committed)")
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
    held.unclaim("n1")
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
    state: NodeState = NodeState.LIVE

    def record(self, node: str) -> NodeRecord:
        return NodeRecord(node, state=self.state)

    def is_silent(self, _node: str) -> bool:
        return self.silent

    def answers(self, _node: str) -> bool:
        return self.replies


@dataclass
class Watched:
    """A watch, and what it looks at."""

    directory: Path
    lower: MemoryLower = field(default_factory=MemoryLower)
    known: Known = field(default_factory=Known)
    adopt: Adopt = Adopt.AUTO
    heard: bool = False
    """It has spoken a moment ago."""
    adopted: list[str] = field(default_factory=list)
    says: str = ""

    def __post_init__(self) -> None:
        self.held = holding_for(self.directory)
        self.mark(MARK)
        self.note(refused=True)

    def mark(self, said: dict[str, str]) -> None:
        self.lower.write_own((MIRRORS, b"n1"), json.dumps(said).encode())

    def note(self, *, refused: bool) -> None:
        self.lower.write_own((NOTED_AT,), json.dumps({"refused": refused}).encode())

    def look(self) -> str:
        """Once; what is told of it."""
        if not self.heard:
            self.held._sessions["n1", SESSION].heard_at -= LEFT_S
        settings: dict[str, Any] = {"backing": Path("/b"), "mountpoint": Path("/m")}
        watch = AdoptionWatch(
            Settings(**settings, adopt=self.adopt),
            "n2",
            self.held,
            self.lower,
            self.known,
            self._adopt,
            REAL,
        )
        watch.look("n1")
        return watch.told("n1")

    def _adopt(self, node: str, _stopping: Event) -> str:
        assert self.held.claimed(node) == [SESSION]
        self.adopted.append(node)
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
        (b'{"refused": true, "at": 5.0}', True),
        (b'{"refused": true, "at": 5.0, "clients": ["later"]}', True),
        (b'{"refused": 1}', False),
        (b'{"at": 5.0}', False),
        (b"[true]", False),
        (b'{"refused": tr', False),
        (b"\xff", False),
        (b"", False),
    ],
)
def test_a_note_is_read_or_nothing_is_known(note: bytes, refused: bool) -> None:
    """It may say more, to a later version."""
    lower = MemoryLower()
    lower.write_own((NOTED_AT,), note)
    assert are_late_calls_refused(lower) is refused


@clause("S613")
def test_a_silent_node_is_adopted(watched: Watched) -> None:
    assert watched.look() == "its log is being adopted"
    assert watched.adopted == ["n1"]


@clause("S613")
@pytest.mark.parametrize("what", ["it writes its record", "it answers", "it spoke", "it has left"])
def test_a_node_that_is_heard_of_is_left_alone(watched: Watched, what: str) -> None:
    watched.known = Known(
        silent=what != "it writes its record",
        replies=what == "it answers",
        state=NodeState.LEFT if what == "it has left" else NodeState.LIVE,
    )
    watched.heard = what == "it spoke"
    assert watched.look() == ""
    assert watched.adopted == watched.held.claimed("n1") == []


@clause("S613")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda it: setattr(it, "adopt", Adopt.ASKED), "adopt = asked"),
        (lambda it: it.note(refused=False), "acpfs doctor"),
        (lambda it: it.lower.remove_own((NOTED_AT,)), "acpfs doctor"),
        (lambda it: it.mark({**MARK, "holder": "n3"}), "nothing that is held"),
        (lambda it: it.mark({**MARK, "session": "f" * 16}), "nothing that is held"),
        (lambda it: it.lower.write_own((MIRRORS, b"n1"), WITHDRAWN), "nothing that is held"),
        (lambda it: it.mark({"token": SESSION, "holder": "n2", "session": SESSION}), "older"),
    ],
)
def test_what_may_come_late_or_does_not_count_waits_for_a_person(
    watched: Watched, change: Any, why: str
) -> None:
    change(watched)
    assert why in watched.look()
    assert watched.adopted == watched.held.claimed("n1") == []


@clause("S612", "S613")
def test_what_was_begun_and_no_fence_stops_leaves_the_session_open(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(monkeypatch, ("store", b"a", 1), ("unlink", b"old", 1))
    assert "unlink old" in watched.look()
    assert watched.adopted == watched.held.claimed("n1") == []


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


@clause("S613")
def test_one_that_was_claimed_is_gone_on_with_and_one_that_is_drained_let_go(
    watched: Watched,
) -> None:
    """By the next worker, whatever the last one did not live to do."""
    watched.says = "not in time"
    assert watched.look() == "not in time"
    watched.known.replies = True  # it is the adopter that does
    watched.says = ""
    watched.look()
    assert watched.adopted == ["n1", "n1"]
    watched.known.state = NodeState.LEFT
    assert watched.look() == ""
    assert watched.held.statistics() == []
    assert watched.adopted == ["n1", "n1"]
