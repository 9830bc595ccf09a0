"""Records that released versions left are read as they meant them: on the storage, in the run
directory, of supervisors and jobs; and what one member has of another one is adopted.

`fixtures/VERSION` was made by that version's code: `python -m tests.formats.leave VERSION`.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from acpfs.backing.attributes import DIGEST_XATTR
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.identity import claim as claim_volume
from acpfs.backing.lower import Note
from acpfs.backing.syscalls import Opener
from acpfs.backing.terms import newest_claim
from acpfs.config import Settings
from acpfs.control import registry
from acpfs.mounting.expected import ExpectedVolume
from acpfs.ram import place as places
from acpfs.ram.kept import Kept
from acpfs.ram.state import StateDatabase
from acpfs.supervisor import fallthrough, mount_state
from acpfs.training import drill, muster
from acpfs.training.coordinator.witness import Claimant, owner_after
from acpfs.training.manifest import read_manifest
from acpfs.training.messages import Goodbye, Header, Sent, decode
from acpfs.worker.history import History
from acpfs.writeback.copies.journal_marks import read_mark
from acpfs.writeback.manifest.manifest import Manifest
from tests.formats import leave_held, leave_words
from tests.formats.fixture_files import FIXTURES, NODE, lay, shown
from tests.formats.leave import CASES, STORED, WORDS, options
from tests.rig.mounts import AcpfsMount
from tests.rig.runtime import REAL
from tests.writeback.memory_lower import MemoryLower

clause = pytest.mark.clause
needs_mount = pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
RAM_BYTES = 64 << 20
PATIENCE_S = 2.0
"""Who says nothing for so long may be lost; it says nothing at all."""


def left_by(*cases: str) -> list[Path]:
    """Fixtures of these kinds, of all versions that have them."""
    return sorted(path for path in FIXTURES.glob("*/*") if path.name in cases)


def named(left: Path) -> str:
    return f"{left.parent.name}-{left.name}"


def volume_of(backing: Path) -> str:
    return (backing / ".acpfs/volume").read_text().split()[0]


# -- what one member has of another one


@needs_mount
@pytest.mark.mount
@pytest.mark.transports("native")
@clause("S530", "S564")
@pytest.mark.parametrize("left", left_by(leave_held.HELD, leave_held.JOURNAL), ids=named)
def test_what_is_held_is_adopted(left: Path, tmp_path: Path, transport: str) -> None:
    """By a holder of today that finds the RAM tier of that version's: it drains as it was."""
    backing = tmp_path / "seen"
    lay(left / "backing", backing, tmp_path)
    settings = leave_held.options(leave_held.HOLDS) | {"node_timeout": PATIENCE_S}
    holds = AcpfsMount(backing, tmp_path / "mnt", transport, **settings)
    volume = volume_of(backing)
    place = places.take(holds.runtime_dir / "tiers", volume, leave_held.HOLDS, backing, RAM_BYTES)
    lay(left / "tier", place.directory, tmp_path)
    places.let_go(place)
    with holds:
        assert {one["node"] for one in holds.status()["held"]} == {NODE}
        holds.wait_status(lambda status: NODE in status["cluster"]["missing"])
        done = holds.run("acpfs-ctl", str(holds.path), "adopt", NODE, "--is-off")
        assert f"adopted: {NODE}" in done.stdout
        assert shown(backing) == json.loads((left / "shown.json").read_text())
        assert holds.status()["held"] == []
        assert holds.ask("doctor") == {"items": []}
        holds.umount()


@clause("S564")
@pytest.mark.parametrize("left", left_by(leave_held.HELD, leave_held.JOURNAL), ids=named)
def test_a_mark_says_where_the_journal_is(left: Path, tmp_path: Path) -> None:
    lay(left / "backing", tmp_path, tmp_path)
    directory = BackingDirectory(tmp_path, "other", REAL)
    mark = read_mark(directory, NODE)
    directory.disconnect()
    assert mark is not None
    assert mark["holder"] == leave_held.HOLDS
    assert (mark.get("journal") == "storage") == (left.name == leave_held.JOURNAL)


# -- in the RAM tier


@clause("S564")
@pytest.mark.parametrize("left", left_by(CASES[0]), ids=named)
def test_a_session_says_what_was_open(left: Path, tmp_path: Path) -> None:
    """To whoever has its token; to others, which handles there were."""
    lay(left / "tier", tmp_path / "one", tmp_path)
    directory = tmp_path / "one/session"
    facts = json.loads((directory / "facts.json").read_text())
    slots = {path.name for path in directory.glob("*.slots")}
    kept = Kept(directory, facts["session"])
    assert kept.taken_over
    assert {path.name for path in directory.glob("*.slots")} >= slots
    handles = list(kept.handles)
    kept.close()
    assert handles, "the descriptor of `save` was open"
    lay(left / "tier", tmp_path / "two", tmp_path)
    other = Kept(tmp_path / "two/session", "another")
    assert not other.taken_over
    assert len(other.former_handles) == len(handles)
    other.close()


# -- on the storage


@clause("S564")
@pytest.mark.parametrize("left", left_by(STORED), ids=named)
def test_what_lies_at_stored_files_is_understood(left: Path, tmp_path: Path) -> None:
    lay(left / "backing", tmp_path / "backing", tmp_path)
    directory = BackingDirectory(tmp_path / "backing", NODE, REAL)
    identity = claim_volume(directory, tmp_path / "run")
    assert identity.volume_id == volume_of(tmp_path / "backing")
    identity.release()
    lower = MemoryLower()
    lower.write_own(
        (b"manifest", b"left.xxh128"),
        (tmp_path / f"backing/.acpfs/manifest/{NODE}.xxh128").read_bytes(),
    )
    manifest = Manifest(StateDatabase(tmp_path / "state", REAL), lower, threading.RLock(), NODE)
    assert manifest.load() == 2
    for path, digest, _size in manifest.rows():
        file = tmp_path / "backing" / os.fsdecode(path)
        note = directory.note(tuple(path.split(b"/")))
        assert note == Note(digest, file.stat().st_mtime_ns)
        assert os.getxattr(file, DIGEST_XATTR).decode().startswith(digest)
    directory.disconnect()
    opener = Opener(os.open(tmp_path / "backing", os.O_RDONLY | os.O_DIRECTORY))
    found = newest_claim(opener, NODE.encode())
    os.close(opener.root_fd)
    assert found is not None
    assert (found.term, found.by) == (1, NODE)


@needs_mount
@pytest.mark.mount
@pytest.mark.transports("native")
@clause("S530", "S564")
@pytest.mark.parametrize("left", left_by(STORED), ids=named)
def test_a_mount_goes_on_where_one_ended_in_order(
    left: Path, tmp_path: Path, transport: str
) -> None:
    """In its term, with the modes of its directories and the checksums of its files."""
    backing = tmp_path / "backing"
    lay(left / "backing", backing, tmp_path)
    before = shown(backing)
    with AcpfsMount(backing, tmp_path / "mnt", transport, **options("tier", tmp_path)) as mount:
        assert shown(mount.path).keys() == before.keys()
        assert (mount.path / "run/first.pt").read_bytes() == b"first"
        assert os.getxattr(mount.path / "run", "user.acpfs.fsync") == b"durable"
        (mount.path / "run/third.pt").write_bytes(b"third")
        mount.flush()
        mount.umount()
    assert (backing / "run/third.pt").read_bytes() == b"third"
    assert (backing / f".acpfs/claims/{NODE}+1").exists(), "its term is gone on with"


# -- in the run directory


@clause("S564")
@pytest.mark.parametrize("left", left_by(STORED), ids=named)
def test_what_a_run_directory_says(left: Path, tmp_path: Path) -> None:
    lay(left / "run", tmp_path, tmp_path)
    (file,) = (tmp_path / "mounts").iterdir()
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"pid": os.getpid(), "pid_started": 0}))
    own = registry.process_started(os.getpid())
    file.write_text(json.dumps(said | {"pid": os.getpid(), "pid_started": own}))
    (record,) = registry.records([tmp_path])
    wanted = {"pid": os.getpid(), "pid_started": own}
    assert asdict(record) | wanted == said | wanted
    # a remembered file is called by the backing directory's path
    name = hashlib.sha256(os.fsencode(tmp_path / "backing")).hexdigest()[:16]
    for kind in ("history", "volumes"):
        (one,) = (tmp_path / "remembered" / kind).iterdir()
        one.rename(one.with_name(f"{name}.json"))
    settings = Settings(backing=tmp_path / "backing", mountpoint=tmp_path / "mnt")
    history = History(StateDatabase(tmp_path / "state", REAL))
    history.recall(settings, tmp_path)
    (entry,) = history.entries()
    assert (entry.kind, f"acpfs {left.parent.name} serves" in entry.text) == ("mount", True)
    volume, kind_of_storage = ExpectedVolume(settings, tmp_path)._expected()
    assert (len(volume), kind_of_storage) == (32, "ext4")


# -- of processes, and of a job


@clause("S564")
@pytest.mark.parametrize("left", left_by(WORDS), ids=named)
def test_what_processes_left_is_understood(left: Path, tmp_path: Path) -> None:
    lay(left, tmp_path, tmp_path)
    record = json.loads((tmp_path / "supervisor.json").read_text())
    assert mount_state.unknown(record) == ""
    assert record["settings"] == leave_words.SETTINGS
    assert (record["facts"], record["workers"]) == ({"lanes": ["direct"]}, 2)
    (file,) = (tmp_path / "beneath").iterdir()
    assert fallthrough._read(file) == leave_words.BYPASSED
    assert read_manifest(tmp_path / "gasp") == leave_words.GASP
    sent = decode((tmp_path / "message.json").read_bytes())
    assert sent == Sent(Header(leave_words.JOB, 1, 2, "rank 3"), Goodbye())
    job = tmp_path / ".acpfs-job" / leave_words.JOB
    assert muster._told(job, 0).startswith("127.0.0.1:")
    assert owner_after(job, 1, Claimant(1, 1, majority=False)) == leave_words.CLAIMANT
    (fault,) = drill.lines(job / "faults.jsonl")
    assert (fault["lost"], fault["step"]) == ({"3": "node-a"}, 7)
