"""What a newer acpfs has written or says is refused with one sentence, and stays as it is."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from acpfs.backing import leftovers
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.identity import VOLUME_VERSION, claim
from acpfs.backing.member_records import RECORD_VERSION, NodeRecord, NodeRecords
from acpfs.errors import ExitCode, RefusedError
from acpfs.filesystem.salvage import salvage
from acpfs.mounting import tier_salvage
from acpfs.ram.kept import KEPT_VERSION, Kept
from acpfs.ram.place import DATA, STATE_FILE
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.ram.state import HELD_VERSION, StateDatabase
from acpfs.supervisor import mount_state
from acpfs.supervisor.fallthrough import BypassedMount, _read
from acpfs.supervisor.mount_state import MountState
from acpfs.training.manifest import NewerGaspError, read_manifest, write_manifest
from acpfs.training.messages import (
    GASP_VERSION,
    WIRE_VERSION,
    Goodbye,
    Header,
    Manifest,
    Sent,
    decode,
    encode,
)
from acpfs.training.records import NewerError
from acpfs.writeback.copies import journal_frames
from acpfs.writeback.copies.journal_frames import NewerJournalError
from acpfs.writeback.copies.on_disk import DiskPlace, read_into
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S526")


NONE: tuple[object, ...] = (True, False, 0, -1, 1.0, "1", None)
"""As JSON may have them, and no version: what has one is not taken for today's. (In Python `true`
is 1.)
"""


def refuses(what: str, found: object, version: int) -> str:
    """The sentence, of which a version is `found`."""
    said = found if type(found) is int else ascii(found)
    return re.escape(f"{what} has version {said}, this acpfs knows {version}: ")


def says(version: int) -> str:
    """The sentence."""
    return f"has version {version + 1}, this acpfs knows {version}: "


def content(state: Path) -> list[str]:
    """All that a state database says."""
    with contextlib.closing(sqlite3.connect(state)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return [f"version {version}", *db.iterdump()]


def of_next_version(state: Path) -> list[str]:
    """Make a state database as the next version may leave it; what it says."""
    with contextlib.closing(sqlite3.connect(state)) as db:
        db.execute("CREATE TABLE op (seq INTEGER PRIMARY KEY, other TEXT)")
        db.execute("INSERT INTO op VALUES (1, 'news')")
        db.execute(f"PRAGMA user_version={HELD_VERSION + 1}")
        db.commit()
    return content(state)


def test_a_state_is_not_opened(tmp_path: Path) -> None:
    before = of_next_version(tmp_path / STATE_FILE)
    with pytest.raises(RefusedError, match=says(HELD_VERSION)):
        StateDatabase(tmp_path / STATE_FILE, REAL)
    assert content(tmp_path / STATE_FILE) == before


def test_a_tier_is_not_salvaged_by_half(tmp_path: Path) -> None:
    """Files without the names that they have would look like all there is."""
    tier = tmp_path / "tier"
    (tier / DATA).mkdir(parents=True)
    (tier / DATA / "1").write_bytes(b"bytes")
    before = of_next_version(tier / STATE_FILE)
    with pytest.raises(RefusedError, match=says(HELD_VERSION)):
        tier_salvage.salvage(tier, tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []
    assert content(tier / STATE_FILE) == before


def test_a_mirrors_journal_does_not_become_a_state(tmp_path: Path) -> None:
    place = DiskPlace(SpillDirectory(tmp_path / "spill", REAL.chance))
    (tmp_path / "spill").mkdir()
    of_next_version(tmp_path / "newer.sqlite")
    journal = place.begin("token", sqlite3.connect(tmp_path / "newer.sqlite"))
    journal.append([[("DELETE FROM op", (), False)]])
    journal.close()
    files = list((tmp_path / "spill").iterdir())
    before = [path.read_bytes() for path in files]
    read = partial(read_into, tmp_path / "spill", "token")
    with pytest.raises(RefusedError, match=says(HELD_VERSION)):
        salvage(read, tmp_path / "spill", tmp_path / STATE_FILE, lambda _name: -1)
    assert not (tmp_path / STATE_FILE).exists()
    assert [path.read_bytes() for path in files] == before


def test_a_session_is_not_taken_over(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "session", "token")
    kept.record("something", 1)
    kept.record("version", KEPT_VERSION + 1)
    kept.close()
    before = (tmp_path / "session/facts.json").read_bytes()
    with pytest.raises(RefusedError, match=says(KEPT_VERSION)):
        Kept(tmp_path / "session", "token")
    assert (tmp_path / "session/facts.json").read_bytes() == before


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[BackingDirectory]:
    (tmp_path / "backing").mkdir()
    made = BackingDirectory(tmp_path / "backing", "n1", REAL)
    yield made
    made.disconnect()


def test_a_volume_is_not_mounted(tmp_path: Path, directory: BackingDirectory) -> None:
    identity = claim(directory, tmp_path / "run")
    identity.release()
    file = tmp_path / "backing/.acpfs/volume"
    assert file.read_text() == f"{identity.volume_id}\n", "version 1 has no second line"
    file.write_text(f"{identity.volume_id}\nversion {VOLUME_VERSION + 1}\n")
    with pytest.raises(RefusedError, match=says(VOLUME_VERSION)):
        claim(directory, tmp_path / "run")
    file.write_text(f"{identity.volume_id}\nsomething else\n")
    with pytest.raises(RefusedError, match="does not hold a volume id"):
        claim(directory, tmp_path / "run")
    file.write_text(f"{identity.volume_id}\nversion {VOLUME_VERSION}\n")
    claimed = claim(directory, tmp_path / "run")
    claimed.release()
    assert claimed.volume_id == identity.volume_id


def test_a_members_record_is_told_of_and_counts_as_none(directory: BackingDirectory) -> None:
    record = NodeRecord("n2", beat=1, clock=1.0, watermark=1.0)
    records = NodeRecords(directory)
    records.publish(replace(record, record_version=RECORD_VERSION + 1))
    with pytest.raises(ValueError, match=says(RECORD_VERSION)):
        records.read("n2")
    said = json.loads(record.to_bytes()) | {"new": [1]}
    del said["sum"]
    assert NodeRecord.from_bytes(json.dumps(said).encode()) == record, "a new field is no matter"


GASP = Manifest("job", 1, 7, (2,), {}, (), {}, ("node",))


def test_a_gasp_is_not_taken_for_none(tmp_path: Path) -> None:
    write_manifest(tmp_path, GASP)
    text = (tmp_path / "gasp.json").read_text()
    assert "version" not in json.loads(text), "the first version has none"
    newer = json.loads(text) | {"version": GASP_VERSION + 1, "news": {}}
    (tmp_path / "gasp.json").write_text(json.dumps(newer))
    with pytest.raises(NewerGaspError, match=says(GASP_VERSION)) as refused:
        read_manifest(tmp_path)
    assert refused.value.exit_code is ExitCode.REFUSED


def test_a_message_names_who_has_another_acpfs() -> None:
    sent = Sent(Header("job", 1, 1, "rank 3"), Goodbye())
    data = json.loads(encode(sent))
    assert data["version"] == WIRE_VERSION
    assert decode(json.dumps(data | {"version": WIRE_VERSION}).encode()) == sent
    newer = data | {"version": WIRE_VERSION + 1, "kind": "NEWS", "body": {"a": 1}}
    with pytest.raises(NewerError, match=f"what rank 3 sends {says(WIRE_VERSION)}"):
        decode(json.dumps(newer).encode())


def test_what_a_supervisor_left_is_not_gone_on_with() -> None:
    known = mount_state.RECORD_VERSION
    record = MountState({"mountpoint": "/mnt/a"}).record()
    assert mount_state.unknown(record) == ""
    assert mount_state.unknown({}) == "", "an older one says no version"
    assert says(known) in mount_state.unknown(record | {"version": known + 1})


def test_a_bypassed_mount_is_found_whatever_else_is_said_of_it(tmp_path: Path) -> None:
    """It would lie there, and `acpfs umount` would know nothing of it."""
    one = BypassedMount("/mnt/none", "/shared/none", 1, since=1.0, reason="test")
    words = {
        name: getattr(one, name) for name in ("mountpoint", "backing", "number", "since", "reason")
    }
    (tmp_path / "mount.json").write_text(json.dumps(words | {"news": 1}))
    assert _read(tmp_path / "mount.json") == one


@pytest.mark.parametrize("found", NONE)
def test_what_is_no_version_is_not_taken_for_one(
    tmp_path: Path, directory: BackingDirectory, found: object
) -> None:
    """Each reader asks the same function."""
    Kept(tmp_path / "session", "token").close()
    facts = tmp_path / "session/facts.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"version": found}))
    with pytest.raises(RefusedError, match=refuses("", found, KEPT_VERSION)):
        Kept(tmp_path / "session", "token")
    assert Kept(tmp_path / "session", "another").former_handles == []

    said = json.loads(NodeRecord("n2", beat=1, clock=1.0, watermark=1.0).to_bytes())
    del said["sum"]
    content = json.dumps(said | {"record_version": found}).encode()
    with pytest.raises(ValueError, match=refuses("its record", found, RECORD_VERSION)):
        NodeRecord.from_bytes(content)
    (tmp_path / "backing/.acpfs/nodes").mkdir(parents=True, exist_ok=True)
    (tmp_path / "backing/.acpfs/nodes/n2").write_bytes(content)
    assert leftovers._record(directory, b"n2") == {}, "nothing of it is cleared away"

    record = MountState({"mountpoint": "/mnt/a"}).record()
    assert re.match(
        refuses("what its supervisor left", found, mount_state.RECORD_VERSION),
        mount_state.unknown(record | {"version": found}),
    )

    (tmp_path / "gasp.json").write_text(json.dumps({"version": found}))
    with pytest.raises(NewerGaspError, match=refuses("gasp.json", found, GASP_VERSION)):
        read_manifest(tmp_path)
    sent = json.loads(encode(Sent(Header("job", 1, 1, "rank 3"), Goodbye())))
    with pytest.raises(NewerError, match=refuses("what rank 3 sends", found, WIRE_VERSION)):
        decode(json.dumps(sent | {"version": found}).encode())


@pytest.mark.parametrize("found", [one for one in NONE if one is not None])
def test_a_journal_of_no_version_is_not_read(
    monkeypatch: pytest.MonkeyPatch, found: object
) -> None:
    with monkeypatch.context() as other:
        other.setattr(journal_frames, "FORMAT", found)
        data = journal_frames.header({})
    known = journal_frames.FORMAT
    with pytest.raises(NewerJournalError, match=refuses("its journal", found, known)):
        journal_frames.read(data)


def test_a_state_of_no_version_is_not_opened(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / STATE_FILE)) as db:
        db.execute("PRAGMA user_version=-1")
    with pytest.raises(RefusedError, match=refuses("", -1, HELD_VERSION)):
        StateDatabase(tmp_path / STATE_FILE, REAL)
