"""When the backing directory fails: passing errors, refusals for good, torn writes, wrong bytes,
missing features.
"""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from tests.rig.faultfs import FaultFs
from tests.rig.mounts import MakeMount
from tests.rig.syscalls import RENAME_EXCHANGE, rename2

clause = pytest.mark.clause
every_lane = pytest.mark.every_lane
pytestmark = [pytest.mark.mount]
QUICK = {"retry_delay_min": 0.05, "retry_delay_max": 0.5, "attr_timeout": 0.1}


@clause("S23")
def test_a_passing_error_is_waited_out(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    """Each of the others is a row of `tests/faults/test_backing.py`."""
    mount = make_mount(fault_fs.path, transport, **QUICK)
    rule = fault_fs.fail("EIO", ["write"])
    (mount.path / "d").mkdir()
    (mount.path / "d" / "f").write_bytes(b"content")
    fault_fs.wait_hits(rule, 3)
    entry = mount.wait_status(lambda s: any(q["tries"] > 1 for q in s["queue"]))["queue"]
    failing = next(q for q in entry if q["tries"])
    assert failing["name"].endswith("f")
    assert failing["last_error"] == "EIO"
    assert failing["next_attempt"]
    assert (mount.path / "d" / "f").read_bytes() == b"content"
    (mount.path / "after").write_bytes(b"the application does not notice")
    fault_fs.clear(rule)
    mount.flush()
    assert (fault_fs.source / "d" / "f").read_bytes() == b"content"
    status = mount.status()
    assert (status["queue_length"], status["ram"]["dirty_bytes"], status["parked"]) == (0, 0, 0)


@clause("S23")
def test_a_full_backing_directory(transport: str, make_mount: MakeMount, fault_fs: FaultFs) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    fault_fs.set(space_left=100_000)
    contents = {f"f{number}": os.urandom(50_000) for number in range(6)}
    for name, data in contents.items():
        (mount.path / name).write_bytes(data)
    mount.wait_status(lambda s: any(q["last_error"] == "ENOSPC" for q in s["queue"]))
    assert all((mount.path / name).read_bytes() == data for name, data in contents.items())
    fault_fs.set(space_left=None)
    mount.flush()
    assert all((fault_fs.source / name).read_bytes() == data for name, data in contents.items())


@clause("S23")
@pytest.mark.parametrize(
    "op", ["create", "fsync", "rename", "mkdir", "unlink", "rmdir", "symlink", "link", "setattr"]
)
def test_every_kind_of_call_is_tried_again(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, op: str
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    for name in ("old", "moved", "linked"):
        (mount.path / name).write_bytes(name.encode())
    (mount.path / "olddir").mkdir()
    mount.flush()
    rule = fault_fs.fail("EIO", [op], times=4)
    (mount.path / "d").mkdir()
    (mount.path / "d" / "f").write_bytes(b"x")
    os.symlink("f", mount.path / "d" / "s")
    os.unlink(mount.path / "old")
    os.rmdir(mount.path / "olddir")
    os.rename(mount.path / "moved", mount.path / "d" / "moved")
    os.link(mount.path / "linked", mount.path / "d" / "linked")
    os.chmod(mount.path / "linked", 0o600)
    mount.flush()
    assert fault_fs.state()["rules"][0]["id"] == rule
    assert fault_fs.state()["rules"][0]["hits"] >= 1
    assert sorted(os.listdir(fault_fs.source)) == [".acpfs", "d", "linked"]
    assert sorted(os.listdir(fault_fs.source / "d")) == ["f", "linked", "moved", "s"]
    assert (fault_fs.source / "linked").stat().st_mode & 0o777 == 0o600


@clause("S24")
def test_a_refusal_for_good_is_parked_told_and_retried(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    (mount.path / "before").write_bytes(b"b")
    mount.flush()
    rule = fault_fs.fail("EACCES", ["rename"], glob="refused")
    (mount.path / "refused").write_bytes(b"kept")
    status = mount.wait_status(lambda s: s["parked"] == 1)
    assert any(
        q["name"].endswith("refused") and q["last_error"] == "EACCES" for q in status["queue"]
    )
    done = mount.run("acpfs-ctl", str(mount.path), "flush", "--timeout", "20", check=False)
    assert done.returncode == 1
    assert "refused" in done.stdout + done.stderr
    assert (mount.path / "refused").read_bytes() == b"kept"
    fd = os.open(mount.path / "refused", os.O_RDONLY)
    with pytest.raises(OSError) as caught:
        os.fsync(fd)
    os.close(fd)
    assert caught.value.errno == errno.EACCES
    fault_fs.clear(rule)
    mount.run("acpfs-ctl", str(mount.path), "retry", "refused")
    mount.flush()
    assert (fault_fs.source / "refused").read_bytes() == b"kept"


@clause("S24")
def test_a_refusal_for_good_can_be_discarded(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    fault_fs.fail("EPERM", ["rename"], glob="refused")
    (mount.path / "refused").write_bytes(b"unwanted")
    mount.wait_status(lambda s: s["parked"] == 1)
    mount.run("acpfs-ctl", str(mount.path), "discard", "refused")
    (mount.path / "next").write_bytes(b"n")
    mount.flush()
    assert sorted(os.listdir(fault_fs.source)) == [".acpfs", "next"]


@clause("S24")
def test_read_only_backing_directory_keeps_everything(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    (mount.path / "d").mkdir()
    mount.flush()
    fault_fs.set(read_only=True)
    contents = {f"f{number}": os.urandom(10_000) for number in range(5)}
    for name, data in contents.items():
        (mount.path / "d" / name).write_bytes(data)
    mount.wait_status(lambda s: s["parked"] >= 1)
    assert all((mount.path / "d" / name).read_bytes() == data for name, data in contents.items())
    fault_fs.set(read_only=False)
    for name in contents:
        mount.run("acpfs-ctl", str(mount.path), "retry", f"d/{name}", check=False)
    mount.flush()
    assert {p.name: p.read_bytes() for p in (fault_fs.source / "d").iterdir()} == contents


@clause("S25", "S7")
@pytest.mark.parametrize("fault", ["tear", "short"])
@every_lane
def test_torn_writes_are_never_published(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, fault: str
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    fault_fs.rule(fault, ops=["write"], probability=0.5, times=30, seed=1)
    contents = {f"f{number}": os.urandom(100_000 * number + 1) for number in range(10)}
    for name, data in contents.items():
        (mount.path / name).write_bytes(data)
    mount.flush()
    assert all((fault_fs.source / name).read_bytes() == data for name, data in contents.items())
    shown = [r for r in fault_fs.journal() if r["op"] == "content"]
    assert shown == [], "no visible file was written in place"


@clause("S26")
def test_wrong_bytes_are_found(transport: str, make_mount: MakeMount, fault_fs: FaultFs) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    (mount.path / "good").write_bytes(os.urandom(200_000))
    mount.flush()
    rule = fault_fs.rule("flip", ops=["write"], glob="*staging*")
    (mount.path / "bad").write_bytes(os.urandom(200_000))
    mount.flush()
    fault_fs.clear(rule)
    done = mount.run("acpfs-ctl", str(mount.path), "verify", check=False)
    assert done.returncode == 1
    assert "bad" in done.stdout + done.stderr
    assert mount.run("acpfs-ctl", str(mount.path), "verify", "good").returncode == 0


@clause("S26")
def test_bytes_that_rot_later_are_found(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    (mount.path / "f").write_bytes(os.urandom(200_000))
    mount.flush()
    mount.run("acpfs-ctl", str(mount.path), "verify")
    st = (fault_fs.source / "f").stat()
    with open(fault_fs.source / "f", "r+b") as file:
        file.seek(100_000)
        byte = file.read(1)
        file.seek(100_000)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(fault_fs.source / "f", ns=(st.st_atime_ns, st.st_mtime_ns))
    assert mount.run("acpfs-ctl", str(mount.path), "verify", check=False).returncode == 1


@clause("S26")
def test_manifest_is_checked_by_xxh128sum(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport)
    (mount.path / "d").mkdir()
    for name in ("d/plain", "with space", "d/größe", "d/back\\slash"):
        (mount.path / name).write_bytes(os.urandom(50_000))
    mount.flush()
    mount.umount()
    manifests = manifests_of(backing)
    assert manifests
    try:
        for manifest in manifests:
            done = subprocess.run(
                ["xxh128sum", "-c", str(manifest)],
                cwd=backing,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done
    except FileNotFoundError:
        pytest.skip("needs xxh128sum (package xxhash)")
    assert len(os.getxattr(backing / "d" / "plain", "user.acpfs.xxh3").split()[0]) == 32


def manifests_of(backing: Path) -> list[Path]:
    return [
        p
        for p in (backing / ".acpfs").rglob("*")
        if p.is_file() and "manifest" in str(p.relative_to(backing))
    ]


MISSING = [
    "xattrs",
    "hard_links",
    "link_counts",
    "rename_flags",
    "fsync_directory",
    "fine_times",
    "chown",
]


@clause("S27", "S410")
@pytest.mark.parametrize("missing", [*MISSING, "all"])
def test_a_poor_backing_file_system_changes_nothing_above(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, missing: str
) -> None:
    fault_fs.set(**dict.fromkeys(MISSING if missing == "all" else [missing], False))
    (fault_fs.source / "run" / "sub").mkdir(parents=True)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    run = mount.path / "run"
    (run / "sub").rmdir()
    (run / "a").write_bytes(b"A")
    (run / "b").write_bytes(b"B")
    rename2(run / "a", run / "b", RENAME_EXCHANGE)
    os.utime(run / "a", ns=(1_234_567_891, 1_234_567_891))
    assert (run / "a").stat().st_mtime_ns == 1_234_567_891
    os.chown(run / "b", 1000, 1000)
    fd = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)
    (run / "b").write_bytes(b"rewritten")
    mount.flush()
    assert (fault_fs.source / "run" / "a").read_bytes() == b"B"
    assert (fault_fs.source / "run" / "b").read_bytes() == b"rewritten"
    assert mount.status()["parked"] == 0
    if missing in ("xattrs", "all"):
        with pytest.raises(OSError) as caught:
            os.setxattr(run / "a", "user.x", b"")
        assert caught.value.errno == errno.EOPNOTSUPP
