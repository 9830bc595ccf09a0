"""Forms without a version of their own: what an older acpfs wrote is read, and what a newer one
adds is left out, or refused with a sentence (rules 3 and 5 of docs/FORMATS.md).

Forms with a version are in `test_newer.py`, and what another version left in `test_left.py`.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from acpfs.backing.attributes import DIGEST_XATTR
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.identity import Identity, claim
from acpfs.backing.leftovers import WITHDRAWN
from acpfs.backing.lower import Note
from acpfs.backing.terms import newest_claim
from acpfs.config import SpillMode
from acpfs.control import registry, runtime
from acpfs.control.registry import MountRecord
from acpfs.errors import MachineError, RefusedError
from acpfs.exchange.exchange_records import EXCHANGE_VERSION, MemberAddress, VersionName
from acpfs.exchange.member_calls import MemberCalls
from acpfs.exchange.member_links import MAGIC, MemberLink, OtherVersionError
from acpfs.links.frames import framed
from acpfs.links.tls import certificate_of
from acpfs.ram import place as places
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import HELD
from acpfs.training import drill, muster
from acpfs.worker.mirroring import recover
from acpfs.writeback.copies import journal_frames
from acpfs.writeback.copies.held_copies import ABOUT
from acpfs.writeback.copies.journal_marks import mark_path, read_mark
from acpfs.writeback.copies.on_disk import DiskPlace
from acpfs.writeback.manifest.manifest import Manifest
from tests.backing.test_terms import NODE as TERMS_OF
from tests.backing.test_terms import adopter
from tests.exchange.giving_member import (
    PATIENCE_S,
    VOLUME,
    giving,
    key_of,
    own_name,
    read_all,
    taker,
)
from tests.exchange.test_holding import COPY, SESSION, begun, made, put
from tests.filesystem.world import settings_for
from tests.rig.runtime import REAL
from tests.writeback.memory_lower import MemoryLower

NODE = "n1"
NEWS: dict[str, Any] = {"news": {"of": ["a", "newer", "acpfs"]}}
"""A field that this acpfs does not know."""
pytestmark = pytest.mark.clause("S512")
clause = pytest.mark.clause
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="a tier of its own needs root")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[BackingDirectory]:
    (tmp_path / "backing").mkdir()
    opened = BackingDirectory(tmp_path / "backing", NODE, REAL)
    yield opened
    opened.disconnect()


@pytest.fixture
def identity(tmp_path: Path, directory: BackingDirectory) -> Iterator[Identity]:
    claimed = claim(directory, tmp_path / "run")
    yield claimed
    claimed.release()


# -- in the RAM tier


@needs_root
def test_whose_tier_it_is_may_be_said_with_more_words(tmp_path: Path) -> None:
    tiers = tmp_path / "tiers"
    (tmp_path / "backing").mkdir()

    def take(node: str) -> places.Place:
        return places.take(tiers, "5" * 32, node, tmp_path / "backing", 64 << 20)

    first = take(NODE)
    places.let_go(first)
    meta = first.directory / "meta.json"
    said = json.loads(meta.read_text())
    assert said.keys() == {"volume_id", "node_id", "backing"}, "what 0.1.0 reads"
    meta.write_text(json.dumps(said | NEWS))
    again = take(NODE)
    assert again.found
    places.let_go(again)
    for damaged in ("{", json.dumps({"node": NODE} | NEWS)):
        meta.write_text(damaged)
        with pytest.raises(RefusedError, match=r"meta\.json is damaged; move .* away"):
            take(NODE)
        assert meta.read_text() == damaged
    meta.write_text(json.dumps(said))
    places.give_up(take(NODE))


def test_what_is_held_of_another_member_stays_whatever_else_is_said_of_it(tmp_path: Path) -> None:
    holding, _tier = begun(tmp_path)
    assert put(holding, COPY, 1 << 20) == ""
    about = tmp_path / "data" / HELD / NODE / SESSION / ABOUT
    for said, until in (({"clock": 7.0, "frozen": False} | NEWS, 7.0), (NEWS, 0.0), ([1], 0.0)):
        about.write_text(json.dumps(said))
        (session,) = made(tmp_path)[0].statistics()
        assert (session.files, session.bytes, session.until) == (1, 1 << 20, until)


# -- on the backing directory


def test_lines_of_a_manifest_that_have_another_form_are_left_out(tmp_path: Path) -> None:
    lower = MemoryLower()
    known = xxhash.xxh3_128_hexdigest(b"1")
    lines = [f"{known}  a", "xxh4:1234  b", f"{known} *c", "# a remark", ""]
    written = Manifest(StateDatabase(tmp_path / "one", REAL), lower, threading.RLock(), NODE)
    written.put((b"a",), known, 1)
    written.write()
    lower.write_own((b"manifest", b"n1.xxh128"), "\n".join(lines).encode())
    read = Manifest(StateDatabase(tmp_path / "two", REAL), lower, threading.RLock(), NODE)
    assert read.load() == 1
    assert [(path, digest) for path, digest, _size in read.rows()] == [(b"a", known)]


@pytest.mark.parametrize(
    ("said", "by"),
    [
        ({"by": "n7"}, "n7"),
        ({"by": "n7", "at": 12.5, **NEWS}, "n7"),
        ({"by": "n7", "at": "noon"}, "n7"),
        ({"by": {"node": "n7"}}, ""),
        (["n7"], ""),
    ],
    ids=["older", "newer", "another time", "another form", "no object"],
)
def test_a_claim_is_whose_it_says_and_else_nobodys(tmp_path: Path, said: Any, by: str) -> None:
    terms = adopter(tmp_path)
    (tmp_path / ".acpfs/claims").mkdir(parents=True, exist_ok=True)
    (tmp_path / f".acpfs/claims/{TERMS_OF}+3").write_text(json.dumps(said))
    found = newest_claim(terms._opener, TERMS_OF.encode())
    os.close(terms._opener.root_fd)
    assert found is not None
    assert (found.term, found.by) == (3, by)


MARK = {"token": "0123456789abcdef", "spill": "/nvme", "directory": "/nvme/acpfs-5-n1"}
"""As 0.1.0 writes it."""


def test_a_mark_says_which_journal_counts_and_may_say_more(directory: BackingDirectory) -> None:
    directory.write_own(mark_path(NODE), json.dumps(MARK | NEWS).encode())
    assert read_mark(directory, NODE) == MARK
    directory.write_own(mark_path(NODE), WITHDRAWN)
    assert read_mark(directory, NODE) is None


@needs_root
@pytest.mark.parametrize(
    ("mark", "error", "why"),
    [
        (b"[1, 2]", MachineError, "mirrored is damaged: no object"),
        (b'"word"', MachineError, "mirrored is damaged: no object"),
        (b'{"token": ', MachineError, "mirrored is damaged: "),
        (json.dumps(MARK | {"token": "../../etc"}).encode(), MachineError, "no token of a journal"),
        (
            json.dumps({"token": "0123456789abcdef", "cloud": "there"}).encode(),
            RefusedError,
            "a place of which this acpfs does not know: mount with the acpfs that left it",
        ),
    ],
    ids=["list", "word", "torn", "a path for a token", "another place"],
)
def test_a_mark_that_is_not_understood_refuses_the_mount(
    tmp_path: Path,
    directory: BackingDirectory,
    identity: Identity,
    mark: bytes,
    error: type[Exception],
    why: str,
) -> None:
    """With what to do, and nothing is changed: what it names may be all there is of a save."""
    directory.write_own(mark_path(identity.node_id), mark)
    settings = settings_for(tmp_path)
    place = places.take(tmp_path / "tiers", identity.volume_id, NODE, settings.backing, 64 << 20)
    with pytest.raises(error, match=why) as refused:
        recover(settings, directory, identity, place, tmp_path / "none.sqlite", REAL.chance)
    places.give_up(place)
    assert f"to give it up, remove {settings.backing}/.acpfs/mirrors/" in str(refused.value)
    assert directory.read_own(mark_path(identity.node_id)) == mark


@needs_root
@clause("S526")
def test_a_newer_journal_refuses_the_mount(
    tmp_path: Path,
    directory: BackingDirectory,
    identity: Identity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With both versions, and nothing is changed: it said that the journal could not be read."""
    settings = settings_for(tmp_path, spill=tmp_path / "spill", spill_mode=SpillMode.MIRROR)
    spill = SpillDirectory(
        tmp_path / "spill" / f"acpfs-{identity.volume_id}-{identity.node_id}", REAL.chance
    )
    spill.path.mkdir(parents=True)
    with monkeypatch.context() as later:
        later.setattr(journal_frames, "FORMAT", journal_frames.FORMAT + 1)
        DiskPlace(spill).begin(MARK["token"], sqlite3.connect(":memory:")).close()
    directory.write_own(mark_path(identity.node_id), json.dumps(MARK).encode())
    before = sorted(path.read_bytes() for path in spill.path.iterdir())
    place = places.take(tmp_path / "tiers", identity.volume_id, NODE, settings.backing, 64 << 20)
    with pytest.raises(RefusedError, match="has version 2, this acpfs knows 1: mount") as refused:
        recover(settings, directory, identity, place, tmp_path / "none.sqlite", REAL.chance)
    places.give_up(place)
    assert "what the last mount did not drain is mirrored in /nvme" in str(refused.value)
    assert sorted(path.read_bytes() for path in spill.path.iterdir()) == before


@pytest.mark.parametrize(
    "value",
    [b"xxh4-00112233445566778899aabbccddeeff 5", b"0123 5", b"5", b"", b"\xff" * 32, b"{}"],
    ids=["another digest", "shorter", "a number", "empty", "no text", "an object"],
)
def test_a_note_of_another_form_is_none(
    tmp_path: Path, directory: BackingDirectory, value: bytes
) -> None:
    """Else the file would be called damaged, by a digest that it never had."""
    file = tmp_path / "backing/f"
    file.write_bytes(b"1")
    os.setxattr(file, DIGEST_XATTR, value)
    assert directory.note((b"f",)) is None
    assert directory.digest((b"f",)) == ""
    known = xxhash.xxh3_128_hexdigest(b"1")
    for older, note in ((known, Note(known)), (f"{known} 7", Note(known, 7))):
        os.setxattr(file, DIGEST_XATTR, older.encode())
        assert directory.note((b"f",)) == note


# -- in the run directory


def test_a_mount_is_found_whatever_else_its_record_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = runtime.prepare(tmp_path / "run")
    monkeypatch.setenv(runtime.ENVIRONMENT_VARIABLE, str(directory))
    one = MountRecord("/mnt/a", "/b", NODE, os.getpid(), 1, "/run/a", "0.1.0", str(directory))
    registry.write(one)
    said = json.loads(one.file.read_text())
    one.file.write_text(json.dumps(said | NEWS))
    assert registry.records([directory]) == [one]
    del said["runtime_dir"]
    one.file.write_text(json.dumps(said))
    (older,) = registry.records([directory])
    assert (older.mountpoint, older.pid, older.runtime_dir) == ("/mnt/a", os.getpid(), "")


# -- between members


@clause("S526", "S545", "S563")
@pytest.mark.parametrize(
    ("said", "is_answered"),
    [
        ({"version": EXCHANGE_VERSION + 1}, False),
        ({"version": EXCHANGE_VERSION + 1, **NEWS}, False),
        ({"version": None}, False),
        ({"version": True}, False),
        (NEWS, True),
    ],
    ids=["newer", "newer with more", "no version", "no number", "more"],
)
def test_a_member_of_another_exchange_is_told_ours_and_no_more(
    tmp_path: Path, said: dict[str, Any], is_answered: bool
) -> None:
    """It reads the storage, and this one says what it spoke. What a member says that is not known
    is left out.
    """
    with giving(tmp_path, b"1" * 10) as member:
        own = own_name(tmp_path, "n2")
        member.keys["n2"] = key_of(own)
        words = {"version": EXCHANGE_VERSION, "volume": VOLUME, "node": "n2"} | said
        link = MemberLink(socket.create_connection(("127.0.0.1", member.port), PATIENCE_S))
        link.limit(PATIENCE_S)
        link._stream.socket.sendall(
            MAGIC
            + framed(json.dumps(words).encode(), 1 << 16)
            + framed(certificate_of(own.directory), 1 << 16)
        )
        try:
            if is_answered:
                _said, certificate = link._introduced()
                link._secure(own, certificate, server=False)
                link.send({"plain": False})
                assert link._received() == {"plain": False}
            else:
                ours, _certificate = link._introduced()
                assert ours["version"] == EXCHANGE_VERSION
                assert member.strange.get(timeout=PATIENCE_S) == ("n2", said["version"])
                with pytest.raises((OSError, EOFError)):
                    link._received()
        finally:
            link.close()
        assert member.asked == ["knows"]
        calls = taker(member, tmp_path)
        assert read_all(calls.get(member.address, member.file, 0, 10, PATIENCE_S)) == b"1" * 10


@clause("S526", "S563")
def test_a_stranger_of_another_exchange_learns_nothing(tmp_path: Path) -> None:
    """Nor is anything said of it: anybody could have as many logged as he likes."""
    with giving(tmp_path, b"1") as member:
        own = own_name(tmp_path, "n3")
        words = {"version": EXCHANGE_VERSION + 1, "volume": VOLUME, "node": "n3"}
        link = MemberLink(socket.create_connection(("127.0.0.1", member.port), PATIENCE_S))
        link.limit(PATIENCE_S)
        link._stream.socket.sendall(
            MAGIC
            + framed(json.dumps(words).encode(), 1 << 16)
            + framed(certificate_of(own.directory), 1 << 16)
        )
        with pytest.raises((OSError, EOFError)):
            link._introduced()
        link.close()
        assert member.asked == ["knows"]
        assert member.strange.empty()


@clause("S526", "S563")
def test_who_asks_a_member_of_another_exchange_is_told_which(tmp_path: Path) -> None:
    theirs = own_name(tmp_path, "n1")
    to = MemberAddress("n1", ("127.0.0.1",), 0, key_of(theirs))
    words = {"version": EXCHANGE_VERSION + 1, "volume": VOLUME, "node": "n1", **NEWS}
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _address = listener.accept()
            with connection:
                MemberLink(connection)._introduced()
                connection.sendall(
                    MAGIC
                    + framed(json.dumps(words).encode(), 1 << 16)
                    + framed(certificate_of(theirs.directory), 1 << 16)
                )

        answering = threading.Thread(target=answer)
        answering.start()
        calls = MemberCalls(own_name(tmp_path, "n2"))
        to = replace(to, port=int(listener.getsockname()[1]))
        with pytest.raises(OtherVersionError, match="n1: what it speaks has version 2, ") as said:
            calls.has(to, VersionName(b"model", 5, 1, 6, 7), PATIENCE_S)
        answering.join()
    assert (said.value.node, said.value.version) == ("n1", EXCHANGE_VERSION + 1)


# -- training


def test_where_a_coordinator_is_may_be_said_with_more_words(tmp_path: Path) -> None:
    (tmp_path / "coordinator-0").write_text(json.dumps({"address": "h:1", "pid": 7} | NEWS))
    assert muster._told(tmp_path, 0) == "h:1"
    for other in ("[1]", '"word"', "{", json.dumps({"at": "h:1"})):
        (tmp_path / "coordinator-0").write_text(other)
        assert muster._told(tmp_path, 0) == ""


def test_lines_of_faults_that_have_another_form_are_left_out(tmp_path: Path) -> None:
    """As one that was cut off by a loss of power, in the middle of the file."""
    known = {"at": 1.0, "step": 7}
    lines = [json.dumps(known | NEWS), '{"at": 2', "a word", "[1]", json.dumps(known)]
    (tmp_path / "faults.jsonl").write_text("\n".join(lines) + '\n{"at": 3}')
    assert drill.lines(tmp_path / "faults.jsonl") == [known | NEWS, known]
