"""Storage that spoils what it is given: caught before it counts (`verify_after_write`), found
later, mended from RAM (`repair`).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.errors import ExitCode
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import MakeMount

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount]
QUICK = {"retry_delay_min": 0.05, "retry_delay_max": 0.2}
SIZES = (1, 5000, 3_000_001)


def rot(path: Path) -> None:
    """One bit, and the times as they were: what failing storage does."""
    st = path.stat()
    with open(path, "r+b") as file:
        file.seek(st.st_size // 2)
        byte = file.read(1)
        file.seek(st.st_size // 2)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


@clause("S72")
@pytest.mark.parametrize("size", SIZES)
def test_a_stream_that_reads_back_differently_is_streamed_again(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, size: int
) -> None:
    mount = make_mount(fault_fs.path, transport, verify_after_write=True, **QUICK)
    rule = fault_fs.rule("flip", ops=["write"], glob="*staging*", times=2)
    data = os.urandom(size)
    (mount.path / "f").write_bytes(data)
    mount.flush()
    fault_fs.wait_hits(rule, 2)
    assert (fault_fs.source / "f").read_bytes() == data
    counters = mount.status()["counters"]
    assert counters["verified_files"] == 1
    assert 1 <= counters["verify_failures"] <= 2
    assert "reads back differently" in "".join(
        p.read_text() for p in (mount.runtime_dir / "logs").iterdir()
    )


@clause("S72")
def test_storage_that_spoils_everything_is_given_up_loudly(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, verify_after_write=True, **QUICK)
    rule = fault_fs.rule("flip", ops=["write"], glob="*staging*")
    (mount.path / "f").write_bytes(b"data" * 1000)
    status = mount.wait_status(lambda s: s["parked"] == 1)
    assert status["counters"]["verify_failures"] == 3
    assert not (fault_fs.source / "f").exists()
    assert (
        mount.run("acpfs-ctl", str(mount.path), "flush", check=False).returncode == ExitCode.FAILED
    )
    fault_fs.clear(rule)
    mount.run("acpfs-ctl", str(mount.path), "retry", "f")
    mount.flush()
    assert (fault_fs.source / "f").read_bytes() == b"data" * 1000


@clause("S73")
def test_repair_rewrites_what_rotted(transport: str, make_mount: MakeMount, tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport)
    (mount.path / "d").mkdir()
    contents = {f"d/f{size}": os.urandom(size) for size in SIZES}
    for name, data in contents.items():
        (mount.path / name).write_bytes(data)
        (mount.path / name).chmod(0o640)
    mount.flush()
    before = {name: (backing / name).stat() for name in contents}
    for name in contents:
        rot(backing / name)
    assert (
        mount.run("acpfs-ctl", str(mount.path), "verify", check=False).returncode == ExitCode.FAILED
    )
    rows = mount.ctl("repair", "d")
    assert sorted((row["path"], row["status"]) for row in rows) == sorted(
        (name, "repaired") for name in contents
    )
    for name, data in contents.items():
        assert (backing / name).read_bytes() == data
        st = (backing / name).stat()
        assert (st.st_mode, st.st_mtime_ns) == (before[name].st_mode, before[name].st_mtime_ns)
        assert st.st_ino != before[name].st_ino, "rewritten in place"
    assert mount.ctl("repair", "d") == []
    assert mount.run("acpfs-ctl", str(mount.path), "verify").returncode == 0


@clause("S73")
def test_repair_says_what_it_cannot_do(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport, ram="8M")
    (mount.path / "gone").write_bytes(os.urandom(3 << 20))
    mount.flush()
    for number in range(3):
        (mount.path / f"other{number}").write_bytes(os.urandom(3 << 20))
        mount.flush()
    rot(backing / "gone")
    done = mount.run("acpfs-ctl", str(mount.path), "repair", "gone", check=False)
    assert done.returncode == ExitCode.FAILED
    assert "its copy has left RAM" in done.stdout
    assert (backing / "gone").exists()
