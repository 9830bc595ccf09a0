"""Files that are brought to RAM by name: by an operator, and at mount the newest checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.errors import ExitCode
from tests.faults.test_warm_reads import BOTH, MIB, QUICK, noted_reads, where, whole
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import MakeMount

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount]


@BOTH
@clause("S105")
def test_preload_brings_and_compares(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    """Written through a mount whose RAM tier is gone then; one file is damaged, one was never
    stored here, one does not fit.
    """
    mount = make_mount(fault_fs.path, transport, **QUICK)
    contents = {f"run/iter_{n:07}/model.pt": os.urandom(5 * MIB + n) for n in (1, 2)} | {
        "run/small": b"small"
    }
    for name, data in contents.items():
        (mount.path / name).parent.mkdir(parents=True, exist_ok=True)
        (mount.path / name).write_bytes(data)
    mount.flush()
    mount.umount()
    (fault_fs.source / "run/native").write_bytes(b"native")
    (fault_fs.source / "run/huge").write_bytes(b"h" * (70 * MIB))
    (fault_fs.source / "run/link").symlink_to("small")
    mount.start(ram="64M")
    rule = fault_fs.rule("flip", ops=["read"], glob="*iter_0000002/model.pt")
    done = mount.run(
        "acpfs-ctl", str(mount.path), "preload", "run", "--wait", "--json", check=False
    )
    assert done.returncode == ExitCode.FAILED
    rows = {
        row["path"]: row["status"] for row in mount.ctl("preload", "run", "--wait", check=False)
    }
    assert rows == {
        "run/iter_0000001/model.pt": "in RAM",
        "run/iter_0000002/model.pt": "mismatch",
        "run/small": "in RAM",
        "run/native": "in RAM",
        "run/huge": "no room",
    }
    assert '"verified"' in done.stdout
    assert '"unknown"' in done.stdout
    fault_fs.clear(rule)
    read = noted_reads(fault_fs, "run/*")
    for name in ("run/iter_0000001/model.pt", "run/small"):
        assert whole(mount.path / name) == contents[name]
    assert fault_fs.hits(read) == 0
    missing = mount.run("acpfs-ctl", str(mount.path), "preload", "nothing", "--wait", check=False)
    assert (missing.returncode, "nothing" in missing.stderr) == (ExitCode.FAILED, True)


def checkpoints(backing: Path, layout: str) -> str:
    """Three of them; returns the one that is the latest."""
    for step in (100, 200, 300):
        directory = (
            backing / "run" / {"tracker": f"iter_{step:07}", "newest": f"checkpoint-{step}"}[layout]
        )
        directory.mkdir(parents=True)
        (directory / "model.pt").write_bytes(os.urandom(3 * MIB))
        if step < 300:
            (directory / "optim.pt").write_bytes(os.urandom(2 * MIB))  # the last one is not whole
    if layout == "tracker":
        (backing / "run/latest_checkpointed_iteration.txt").write_text("200")
        return "run/iter_0000200"
    return "run/checkpoint-200"


@BOTH
@clause("S105")
@pytest.mark.parametrize("layout", ["tracker", "newest"])
def test_the_latest_checkpoint_comes_behind_the_mount(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, layout: str
) -> None:
    latest = checkpoints(fault_fs.source, layout)
    rule = fault_fs.freeze(ops=["read"], glob="*.pt")
    mount = make_mount(fault_fs.path, transport, preload="latest", **QUICK)
    fault_fs.wait_hits(rule)  # mounted, and nothing has come
    (mount.path / "new").write_bytes(b"new")
    assert (mount.path / "new").read_bytes() == b"new"
    fault_fs.thaw()
    mount.wait_status(
        lambda status: status["counters"]["warmed_files"] >= 2 + (layout == "tracker")
    )
    brought = {path for path in where(mount) if path.startswith("run/")}
    assert brought == {f"{latest}/model.pt", f"{latest}/optim.pt"} | (
        {"run/latest_checkpointed_iteration.txt"} if layout == "tracker" else set()
    )
