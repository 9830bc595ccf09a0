"""A mount whose staging directory is gone: a person removed it, or somebody took its log over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from acpfs.backing.syscalls import Opener
from acpfs.backing.terms import NodeTerms
from acpfs.errors import ExitCode
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import CommandError, MakeMount, staging_files
from tests.rig.runtime import REAL

pytestmark = pytest.mark.mount
clause = pytest.mark.clause
NODE = "n1"
QUICK = {"node_id": NODE, "retry_delay_min": 0.05, "retry_delay_max": 0.2, "heartbeat": 0.25}


def save(top: Path) -> dict[str, bytes]:
    found = {}
    for number in range(6):
        found[f"f{number}"] = os.urandom(200_000)
        (top / f"f{number}").write_bytes(found[f"f{number}"])
    (top / "d").mkdir()
    os.symlink("f1", top / "d/link")
    return found


@pytest.mark.parametrize("what", [".acpfs", ".acpfs/staging"])
@clause("S554")
def test_a_person_removes_it_while_files_wait_there(
    make_mount: MakeMount, fault_fs: FaultFs, what: str
) -> None:
    mount = make_mount(fault_fs.path, "native", **QUICK)
    stopped = fault_fs.rule("freeze", ops=["fsync"], glob=".acpfs/staging/*")
    saved = save(mount.path)
    fault_fs.wait_hits(stopped)
    assert staging_files(fault_fs.source)
    shutil.rmtree(fault_fs.source / what)
    fault_fs.thaw()
    fault_fs.clear()
    mount.flush()
    for name, content in saved.items():
        assert (fault_fs.source / name).read_bytes() == content
    assert os.readlink(fault_fs.source / "d/link") == "f1"
    made = [path.name for path in (fault_fs.source / ".acpfs/staging").iterdir() if path.is_dir()]
    assert made == [f"{NODE}+1"]
    mount.kill_worker()
    (mount.path / "after").write_bytes(b"later")
    mount.umount()
    assert (fault_fs.source / "after").read_bytes() == b"later"
    if what != ".acpfs":  # that had the volume's id, without which no next mount begins
        mount.start()
        (mount.path / "again").write_bytes(b"again")
        mount.umount()
        assert (fault_fs.source / "again").read_bytes() == b"again"


@clause("S553")
def test_a_mount_whose_log_is_taken_over_commits_nothing_and_keeps_what_it_has(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport, **QUICK)
    (mount.path / "before").write_bytes(b"1")
    mount.flush()
    fd = os.open(backing, os.O_RDONLY | os.O_DIRECTORY)
    try:
        NodeTerms(Opener(fd), NODE, REAL, "n7").take()
    finally:
        os.close(fd)
    (mount.path / "f").write_bytes(b"2")
    mount.wait_status(lambda status: "n7 has taken over" in str(status["queue"]))
    assert not (backing / "f").exists()
    assert (mount.path / "f").read_bytes() == b"2"
    mount.run("acpfs", "umount", "--leave", "--timeout", "0", str(mount.path))
    with pytest.raises(CommandError) as refused:
        mount.start()
    assert refused.value.code == ExitCode.REFUSED
    assert "n7 has taken over the log of node n1" in str(refused.value)
    assert not (backing / "f").exists()
