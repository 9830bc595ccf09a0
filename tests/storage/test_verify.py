"""What goes wrong on the servers is found by `verify`, past all caches of the client, and mended
from RAM by `repair`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.errors import ExitCode
from tests.faults.test_verify_and_repair import rot
from tests.rig.mounts import MakeMount
from tests.rig.storage.servers import until
from tests.storage.conftest import QUICK, Site

pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
SIZES = (1, 5000, 3_000_001)
BELOW = "checkpoint"


def verdicts(rows: list[dict[str, str]]) -> dict[str, str]:
    return {row["path"]: row["status"] for row in rows}


@pytest.mark.clause("S26", "S72", "S73")
def test_damage_is_found_and_mended(
    transport: str, make_mount: MakeMount, site: Site, tmp_path: Path
) -> None:
    """Another node rots, cuts and deletes files that this node's client has just read."""
    below, seen = site.fresh(tmp_path.name)
    mount = make_mount(below, transport, verify_after_write=True, **QUICK)
    (mount.path / BELOW).mkdir()
    contents = {
        f"{BELOW}/{what}{size}": os.urandom(size)
        for what in ("rotten", "cut", "gone", "whole")
        for size in SIZES
    }
    for name, data in contents.items():
        (mount.path / name).write_bytes(data)
    mount.flush()
    counters = mount.status()["counters"]
    assert (counters["verified_files"], counters["verify_failures"]) == (len(contents), 0)
    for name, data in contents.items():
        assert (below / name).read_bytes() == data
        if "rotten" in name:
            rot(seen / name)
        elif "cut" in name:
            os.truncate(seen / name, len(data) // 2)
        elif "gone" in name:
            (seen / name).unlink()
    expected = {
        name: "ok" if "whole" in name else "missing" if "gone" in name else "mismatch"
        for name in contents
    }
    # GlusterFS's client answers for a second from what it got with a lookup, O_DIRECT or not: that
    # second is not acpfs'
    until(
        lambda: verdicts(mount.ctl("verify", BELOW, check=False)) == expected, "all damage is found"
    )
    assert (
        mount.run("acpfs-ctl", str(mount.path), "verify", BELOW, check=False).returncode
        == ExitCode.FAILED
    )
    assert verdicts(mount.ctl("repair", BELOW)) == {
        name: "repaired" for name in contents if "whole" not in name
    }
    assert {name: (seen / name).read_bytes() for name in contents} == contents
    assert set(verdicts(mount.ctl("verify", BELOW)).values()) == {"ok"}
    mount.umount()
