"""What the walk of `alone` has found, in the product: a claim of who holds nothing that counts, and
a session that was closed by a worker that died.
"""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event, RLock
from typing import Any

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.late_calls import NOTED_AT
from acpfs.backing.leftovers import MIRRORS
from acpfs.backing.member_records import NodeRecord
from acpfs.config import Settings
from acpfs.errors import RefusedError
from acpfs.ram.tier import Tier
from acpfs.worker.adoption_watch import AdoptionWatch
from acpfs.worker.assembly import shut_out
from acpfs.writeback.copies.held_copies import HeldCopies
from tests.rig.runtime import REAL
from tests.writeback.memory_lower import MemoryLower

clause = pytest.mark.clause
SESSION = "0123456789abcdef"
WROTE = {"what": "wrote", "session": SESSION}
MARK = {"token": SESSION, "holder": "n3", "session": SESSION, "fenced": "1"}


def held_at(tmp_path: Path) -> HeldCopies:
    return HeldCopies(Tier(tmp_path, 64 << 20, REAL), RLock(), "7" * 32, "50%", REAL)


class Unheard:
    """Of a node of which nothing is heard."""

    def record(self, node: str) -> NodeRecord:
        return NodeRecord(node)

    def is_silent(self, _node: str) -> bool:
        return True

    def answers(self, _node: str) -> bool:
        return False


@clause("S613")
def test_whom_the_mark_names_goes_on_past_the_claim_of_another_holder(tmp_path: Path) -> None:
    """That one has fenced, has found that the mark names somebody else, and drains nothing."""
    origin = BackingDirectory(tmp_path, "n1", REAL)
    origin.write_own((MIRRORS, b"n1"), json.dumps(MARK).encode())
    origin.disconnect()
    for me, term in (("n2", 1), ("n4", 1), ("n3", 2), ("n2", 2)):
        adopter = BackingDirectory(tmp_path, "n1", REAL, by=me)
        if (me, term) in (("n4", 1), ("n2", 2)):  # the mark names neither
            with pytest.raises(RefusedError, match="has taken over"):
                shut_out(adopter, "n1", me)
        else:
            shut_out(adopter, "n1", me)
        claim = adopter.newest_claim(b"n1")
        assert claim is not None
        assert claim.term == term
        adopter.disconnect()
    with pytest.raises(RefusedError, match="n3 has taken over"):
        BackingDirectory(tmp_path, "n1", REAL)


@clause("S613")
def test_a_session_that_was_only_shut_is_open_for_the_next_worker(tmp_path: Path) -> None:
    """Who died while it looked has claimed nothing; the node may live, and be heard of again."""
    held = held_at(tmp_path)
    held.heed("n1", {"what": "begin", "session": SESSION})
    held.shut("n1", SESSION)
    assert "was claimed" in held.heed("n1", WROTE)["refused"]
    assert held_at(tmp_path).heed("n1", WROTE) == {"ok": True}
    held.claim("n1", SESSION)
    assert "was claimed" in held_at(tmp_path).heed("n1", WROTE)["refused"]


@clause("S613")
@pytest.mark.parametrize("holder", ["n2", "n3"])
def test_who_has_claimed_what_another_one_holds_leaves_it_to_that_one(
    tmp_path: Path, holder: str
) -> None:
    held = held_at(tmp_path)
    held.heed("n1", {"what": "begin", "session": SESSION})
    held.claim("n1", SESSION)
    lower = MemoryLower()
    lower.write_own((NOTED_AT,), b'{"refused": true}')
    lower.write_own((MIRRORS, b"n1"), json.dumps({**MARK, "holder": holder}).encode())
    adopted: list[str] = []

    def adopt(node: str, _stopping: Event) -> str:
        adopted.append(node)
        return ""

    settings: dict[str, Any] = {"backing": Path("/b"), "mountpoint": Path("/m")}
    watch = AdoptionWatch(Settings(**settings), "n2", held, lower, Unheard(), adopt, REAL)
    held._sessions["n1", SESSION].heard_at -= 60.0
    watch.look("n1")
    assert adopted == (["n1"] if holder == "n2" else [])
    assert ("nothing that is held" in watch.told("n1")) is (holder == "n3")
