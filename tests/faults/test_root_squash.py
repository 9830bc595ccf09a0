"""A backing file system that squashes root: owners cannot be given away there, and other users'
directories cannot be written to.

Double: `faultfs` without `chown` answers EPERM as an NFS export with root_squash does; everything
there then belongs to one user.
"""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest

from tests.rig.faultfs import FaultFs
from tests.rig.mounts import MakeMount
from tests.rig.processes import SOMEBODY, errno_as, in_child

clause = pytest.mark.clause
pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else"),
]
QUICK = {"retry_delay_min": 0.05, "retry_delay_max": 0.3, "attr_timeout": 0.1}


def put(path: Path, mode: int) -> None:
    path.write_bytes(b"weights")
    path.chmod(mode)


@clause("S88")
def test_owners_that_cannot_be_set_are_told_and_hold_nothing_up(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, tmp_path: Path
) -> None:
    for directory in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        directory.chmod(0o755)
    fault_fs.set(chown=False)
    mount = make_mount(fault_fs.path, transport, allow_other=True, **QUICK)
    mount.path.chmod(0o777)
    in_child(lambda: (mount.path / "d").mkdir(), SOMEBODY, SOMEBODY)
    for name, mode in (("d/private", 0o600), ("d/shared", 0o644)):
        in_child(partial(put, mount.path / name, mode), SOMEBODY, SOMEBODY)
    os.chown(mount.path / "d" / "shared", 4711, 4711)
    mount.flush()
    status = mount.status()
    assert (status["queue_length"], status["parked"]) == (0, 0)
    assert status["counters"]["refused_owner"] >= 3
    assert any("owners cannot be set" in note for note in status["warnings"])
    below = {name: (fault_fs.source / name).stat() for name in ("d", "d/private", "d/shared")}
    assert {(st.st_uid, st.st_gid) for st in below.values()} == {(0, 0)}
    assert [st.st_mode & 0o777 for st in below.values()] == [0o755, 0o600, 0o644]
    mount.umount()
    mount.start()
    assert (
        mount.path / "d" / "shared"
    ).stat().st_uid == 0  # what is there is what the next mount shows
    assert errno_as(SOMEBODY, (mount.path / "d" / "private").read_bytes) == errno.EACCES
    assert in_child((mount.path / "d" / "shared").read_bytes, SOMEBODY, SOMEBODY) == b"weights"


@clause("S24", "S88")
def test_a_directory_that_squashed_root_may_not_write_to_parks_and_says_so(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    (mount.path / "theirs").mkdir()
    mount.flush()
    rule = fault_fs.rule("fail", ops=["rename"], glob="theirs/*", errno="EACCES")
    (mount.path / "theirs" / "f").write_bytes(b"weights")
    (mount.path / "ours").write_bytes(b"goes on")
    status = mount.wait_status(lambda s: s["parked"] and (fault_fs.source / "ours").exists())
    assert [q["last_error"] for q in status["queue"] if q["state"] == "parked"] == ["EACCES"]
    assert (mount.path / "theirs" / "f").read_bytes() == b"weights"
    fault_fs.clear(rule)  # the export was mended
    mount.ctl("retry", "theirs/f")
    mount.flush()
    assert (fault_fs.source / "theirs" / "f").read_bytes() == b"weights"
