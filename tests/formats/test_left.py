"""What released versions left when all of their processes were killed is gone on with, and drains.

`fixtures/VERSION` was made by that version's code: `python -m tests.formats.leave VERSION`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from acpfs.filesystem.salvage import salvage
from acpfs.ram import place as places
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.writeback.copies.on_disk import DiskPlace, read_into
from tests.formats.fixture_files import FIRST, FIXTURES, HELD_BYTES, NODE, lay, shown
from tests.formats.leave import CASES, options
from tests.rig.mounts import AcpfsMount
from tests.rig.runtime import REAL

LEFT = sorted(path for path in FIXTURES.glob("*/*") if path.name in CASES)


def named(left: Path) -> str:
    return f"{left.parent.name}-{left.name}"


def lay_tier(left: Path, mount: AcpfsMount, volume: str) -> None:
    """Where that mount looks for it, on a tmpfs of its own."""
    place = places.take(mount.runtime_dir / "tiers", volume, NODE, mount.backing, 64 << 20)
    lay(left / "tier", place.directory, mount.backing.parent)
    places.let_go(place)


@pytest.mark.mount
@pytest.mark.transports("native")
@pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
@pytest.mark.clause("S530")
@pytest.mark.parametrize("left", LEFT, ids=named)
def test_it_is_shown_as_it_was_and_drains(left: Path, tmp_path: Path, transport: str) -> None:
    backing = tmp_path / "backing"
    lay(left / "backing", backing, tmp_path)
    volume = (backing / ".acpfs/volume").read_text().split()[0]
    spill = tmp_path / "spill"
    spill.mkdir()
    mount = AcpfsMount(backing, tmp_path / "mnt", transport, **options(left.name, spill))
    if left.name == "tier":
        lay_tier(left, mount, volume)
    else:
        lay(left / "spill", spill / f"acpfs-{volume}-{NODE}", tmp_path)
    wanted = json.loads((left / "shown.json").read_text())
    with mount:
        assert shown(mount.path) == wanted
        assert (mount.path / FIRST).stat().st_size == HELD_BYTES
        mount.flush()
        assert mount.ask("doctor") == {"items": []}
        mount.umount()
        assert shown(backing) == wanted
        assert mount.leaks() == []


@pytest.mark.clause("S152", "S530")
@pytest.mark.parametrize("left", [one for one in LEFT if one.name == "mirror"], ids=named)
def test_a_journal_gives_each_file_the_time_that_it_had(left: Path, tmp_path: Path) -> None:
    """Also one that was set behind its last close: before that drains, too."""
    lay(left / "spill", tmp_path / "spill", tmp_path)
    (token,) = DiskPlace(SpillDirectory(tmp_path / "spill", REAL.chance)).tokens()
    read = partial(read_into, tmp_path / "spill", token)
    copies = {path.name: path.stat().st_size for path in (tmp_path / "spill").iterdir()}
    state = tmp_path / "state.sqlite"
    found = salvage(read, tmp_path / "spill", state, lambda name: copies.get(name, -1))
    wanted = json.loads((left / "shown.json").read_text())
    with contextlib.closing(sqlite3.connect(tmp_path / "state.sqlite")) as db:
        rows = db.execute(
            "SELECT name, mtime_ns, size FROM child JOIN node USING (ino) "
            "WHERE mode & 61440 = 32768"
        ).fetchall()
    assert found.lost == 0
    assert {(bytes(name).decode(), mtime_ns, size) for name, mtime_ns, size in rows} == {
        (Path(path).name, one["mtime_ns"], one["size"])
        for path, one in wanted.items()
        if "content" in one
    }
