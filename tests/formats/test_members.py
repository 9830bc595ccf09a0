"""Nodes of two versions on one backing directory: each reads the other's record.

`fixtures/VERSION/members` was made by that version's code (`tests/formats/leave.py`). What an older
acpfs makes of today's records is held by rule 3 of docs/FORMATS.md: each field that it wrote is
there still, and of the same kind.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import xxhash

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.member_records import DIRECTORY, NodeRecord, NodeState
from acpfs.ram.state import STATE_VERSION
from tests.cluster.stand import QUICK
from tests.formats.fixture_files import FIXTURES, NODE
from tests.formats.leave import ENDS, MEMBERS
from tests.rig.history import installation_before_state_version
from tests.rig.mounts import AcpfsMount
from tests.rig.runtime import REAL

VERSIONS = sorted(path.parent.name for path in FIXTURES.glob(f"*/{MEMBERS}"))
clause = pytest.mark.clause
needs_mount = pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
SHOWN = {"live": "missing", "away": "away"}
"""By `acpfs-ctl nodes`."""
BEYOND_S = 0.3
"""More than the clock bound."""
TIMES = ("clock", "watermark", "pointers", "gated", "started_at")
Said = dict[str, Any]


def left_by(version: str) -> dict[str, Said]:
    """State of the mount → what its record said."""
    found: dict[str, Said] = json.loads((FIXTURES / version / MEMBERS / "records.json").read_text())
    return found


def written(said: Said) -> bytes:
    """As it lies there: both versions put a checksum in front."""
    rest = json.dumps(said, separators=(",", ":")).encode()[1:]
    return b'{"sum":"%s",' % xxhash.xxh3_64_hexdigest(rest).encode() + rest + b"\n"


def kind(value: object) -> object:
    """Of JSON. A number may have a fraction or not, and null is for what there is not."""
    return "number" if isinstance(value, int | float) else type(value)


def test_there_are_records_of_two_versions() -> None:
    assert len(VERSIONS) >= 2
    assert left_by(VERSIONS[0]).keys() == set(ENDS)


@clause("S530")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_an_older_node_says_is_read(version: str, end: str) -> None:
    said = left_by(version)[end]
    record = NodeRecord.from_bytes(written(said))
    assert (record.node, record.state) == (NODE, NodeState(end))
    assert {name: getattr(record, name) for name in ("beat", "clock", "watermark")} == {
        name: said[name] for name in ("beat", "clock", "watermark")
    }
    for field in fields(NodeRecord):
        if field.name not in said:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            assert getattr(record, field.name) == default, field.name


@clause("S529")
@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_node_finds_in_todays_record_what_it_knows(version: str) -> None:
    today = json.loads(NodeRecord("here", beat=1, clock=1.0, watermark=1.0).to_bytes())
    for said in left_by(version).values():
        gone = said.keys() - today.keys()
        assert gone == set()
        assert {
            name: (value, today[name])
            for name, value in said.items()
            if value is not None and today[name] is not None and kind(value) != kind(today[name])
        } == {}


def withheld(mount: AcpfsMount) -> list[Said]:
    return [one for one in mount.status()["cluster"]["waiting"] if one["withheld"]]


def says_time(mount: AcpfsMount) -> float:
    """Of its latest record."""
    content = (mount.backing / ".acpfs/nodes" / str(mount.options["node_id"])).read_bytes()
    said: float = json.loads(content)["clock"]
    return said


def a_minute_ago(said: Said) -> Said:
    """Its times, as if it had ended then: a clock that is years away is another subject."""
    ahead_s = time.time() - 60.0 - said["clock"]
    moved = {name: said[name] + ahead_s for name in TIMES if said.get(name) is not None}
    return said | moved


@needs_mount
@pytest.mark.mount
@pytest.mark.transports("native")
@clause("S161", "S162", "S530")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_pointer_waits_for_an_older_node_that_is_missing(
    version: str, end: str, tmp_path: Path, transport: str
) -> None:
    """Killed, or unmounted with something in RAM; and for one that left in order it does not."""
    backing = tmp_path / "backing"
    backing.mkdir()
    settings: Said = {**QUICK, "node_timeout": 1.0, "node_id": "here"}
    mount = AcpfsMount(backing, tmp_path / "mnt", transport, **settings)
    lying = BackingDirectory(backing, NODE, REAL)
    lying.write_own((DIRECTORY, NODE.encode()), written(a_minute_ago(left_by(version)[end])))
    lying.disconnect()
    with mount:
        (mount.path / "model").write_text("1")
        (mount.path / "latest").write_text("1")
        if end != "left":
            mount.wait_status(lambda _status: withheld(mount))
            assert not (backing / "latest").exists()
            states = {row["node"]: row["state"] for row in mount.ctl("nodes")}
            assert states == {"here": "this", NODE: SHOWN[end]}
            mount.run("acpfs-ctl", str(mount.path), "nodes", "forget", NODE)
        mount.flush()
        assert (backing / "latest").read_text() == "1"


@needs_mount
@pytest.mark.mount
@pytest.mark.transports("native")
@pytest.mark.long
@clause("S160", "S400")
@pytest.mark.parametrize("writer", ["older", "newer"])
def test_two_versions_wait_for_each_other(writer: str, tmp_path: Path, transport: str) -> None:
    """Both live, the older one by the last code before this version of the state: one has a file
    that is slow, the pointer that the other one closes comes behind it.
    """
    code = installation_before_state_version(STATE_VERSION, tmp_path / "code")
    backing = tmp_path / "backing"
    backing.mkdir()
    codes = {"older": {"PYTHONPATH": str(code)}, "newer": {}}
    pair = []
    for name, environment in codes.items():
        settings: Said = {**QUICK, "node_id": name}
        mount = AcpfsMount(backing, tmp_path / name, transport, environment=environment, **settings)
        pair.append(mount)
    with pair[0], pair[1]:
        slow, pointing = pair if writer == "newer" else pair[::-1]
        slow.ask("set", key="bandwidth", value="30K")
        for step in range(3):
            (slow.path / f"shard-{step}").write_bytes(bytes(100_000))
            beyond = time.time() + BEYOND_S
            slow.wait_status(lambda _status, beyond=beyond: says_time(slow) > beyond)
            (pointing.path / "latest").write_text(str(step))
            pointing.flush()
            assert (backing / f"shard-{step}").stat().st_size == 100_000, "it came first"
            assert (backing / "latest").read_text() == str(step)
