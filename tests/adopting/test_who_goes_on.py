"""What the walk of `alone` has found, in the product: a claim of who holds nothing that counts, and
a session that was closed by a worker that died.
"""

from __future__ import annotations

import json
from pathlib import Path
from threading import RLock

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.leftovers import MIRRORS
from acpfs.errors import RefusedError
from acpfs.ram.tier import Tier
from acpfs.worker.assembly import shut_out
from acpfs.writeback.copies.held_copies import HeldCopies
from tests.rig.runtime import REAL

clause = pytest.mark.clause
SESSION = "0123456789abcdef"
WROTE = {"what": "wrote", "session": SESSION}
MARK = {"token": SESSION, "holder": "n3", "session": SESSION, "fenced": "1"}


def held_at(tmp_path: Path) -> HeldCopies:
    return HeldCopies(Tier(tmp_path, 64 << 20, REAL), RLock(), "7" * 32, "50%", REAL)


def session_at(tmp_path: Path) -> Path:
    """What is held of n1, closed; below a directory of its own."""
    (tmp_path / "ram").mkdir()
    held = held_at(tmp_path / "ram")
    held.heed("n1", {"what": "begin", "session": SESSION})
    return held.claim("n1", SESSION)


def origin_of(tmp_path: Path, mark: dict[str, str] | None) -> Path:
    """A storage, with what n1 wrote there last."""
    backing = tmp_path / "backing"
    backing.mkdir()
    origin = BackingDirectory(backing, "n1", REAL)
    if mark is not None:
        origin.write_own((MIRRORS, b"n1"), json.dumps(mark).encode())
    origin.disconnect()
    return backing


@clause("S613")
@pytest.mark.parametrize("alone", [False, True])
def test_whom_the_mark_names_goes_on_past_the_claim_of_another_holder(
    tmp_path: Path, *, alone: bool
) -> None:
    """That one has fenced, has found that the mark names somebody else, and drains nothing."""
    session = session_at(tmp_path)
    backing = origin_of(tmp_path, MARK)
    for me, term in (("n2", 1), ("n4", 1), ("n3", 2), ("n3", 2), ("n2", 2)):
        adopter = BackingDirectory(backing, "n1", REAL, by=me)
        if (me, term) in (("n4", 1), ("n2", 2)):  # the mark names neither
            with pytest.raises(RefusedError, match="has taken over"):
                shut_out(adopter, "n1", me, session, alone=alone)
        else:
            # the first one by a person, or before the mark named another one
            shut_out(adopter, "n1", me, session, alone=alone and me == "n3")
        claim = adopter.newest_claim(b"n1")
        assert claim is not None
        assert claim.term == term
        adopter.disconnect()
    with pytest.raises(RefusedError, match="n3 has taken over"):
        BackingDirectory(backing, "n1", REAL)


@clause("S613")
@pytest.mark.parametrize(
    "mark", [None, {**MARK, "holder": "n4"}, {**MARK, "session": "f" * 16}, {"token": SESSION}]
)
def test_nobody_shuts_a_node_out_by_a_copy_that_does_not_count(
    tmp_path: Path, mark: dict[str, str] | None
) -> None:
    """It may live, and go on with another holder, or none."""
    session = session_at(tmp_path)
    backing = origin_of(tmp_path, mark)
    adopter = BackingDirectory(backing, "n1", REAL, by="n3")
    with pytest.raises(RefusedError, match="here counts any more"):
        shut_out(adopter, "n1", "n3", session, alone=True)
    assert adopter.newest_claim(b"n1") is None
    adopter.disconnect()
    BackingDirectory(backing, "n1", REAL).disconnect()


@clause("S613", "S615")
@pytest.mark.parametrize("alone", [False, True])
def test_nobody_claims_for_a_session_that_is_open_again(tmp_path: Path, *, alone: bool) -> None:
    """The holder's worker died, and its next one opened it: what comes there is told to be held."""
    session = session_at(tmp_path)
    held_at(tmp_path / "ram").unclaim("n1", lambda: False)
    backing = origin_of(tmp_path, MARK)
    adopter = BackingDirectory(backing, "n1", REAL, by="n3")
    with pytest.raises(RefusedError, match="is not claimed any more"):
        shut_out(adopter, "n1", "n3", session, alone=alone)
    assert adopter.newest_claim(b"n1") is None
    adopter.disconnect()


@clause("S613")
def test_nobody_claims_for_a_directory_in_which_nothing_is_held(tmp_path: Path) -> None:
    """Nor is anything made there, such as a lock's file."""
    other = tmp_path / "other"
    other.mkdir()
    adopter = BackingDirectory(origin_of(tmp_path, MARK), "n1", REAL, by="n3")
    with pytest.raises(RefusedError, match="is not claimed any more"):
        shut_out(adopter, "n1", "n3", other, alone=False)
    assert list(other.iterdir()) == []
    assert adopter.newest_claim(b"n1") is None
    adopter.disconnect()


@clause("S613")
def test_a_session_that_was_only_shut_is_open_for_the_next_worker(tmp_path: Path) -> None:
    """Who died while it looked has claimed nothing; the node may live, and be heard of again."""
    held = held_at(tmp_path)
    held.heed("n1", {"what": "begin", "session": SESSION})
    held.shut("n1", SESSION)
    assert "was claimed" in held.heed("n1", WROTE)["refused"]
    assert held_at(tmp_path).heed("n1", WROTE) == {"ok": True}
    held.claim("n1", SESSION)
    held.unshut("n1")
    for one in (held, held_at(tmp_path)):
        assert "was claimed" in one.heed("n1", WROTE)["refused"]
