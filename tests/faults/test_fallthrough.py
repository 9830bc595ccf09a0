"""The mount point falls through to the backing directory, and what was kept in RAM is drained
without overwriting native changes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from acpfs.errors import ExitCode
from acpfs.supervisor import fallthrough
from tests.rig.mounts import AcpfsMount, CommandError, MakeMount, is_mounted, kinds_at

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount]
QUICK = {"retry_delay_min": 0.05, "retry_delay_max": 0.5, "attr_timeout": 0.1}


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    path = tmp_path / "backing"
    path.mkdir()
    return path


def undrained(mount: AcpfsMount) -> None:
    """End the daemon with what it has left, as a crash does, and fall through, as its supervisor
    would.
    """
    mount.kill_processes()
    (tier,) = (p for p in (mount.runtime_dir / "tiers").iterdir() if p.is_dir())
    assert fallthrough.fall(
        mount.runtime_dir, str(mount.path), "the worker does not come back", tier=tier
    )


@clause("S70")
def test_bypass_makes_new_opens_native_and_serves_what_is_open(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    with open(mount.path / "open", "wb") as file:
        file.write(b"before ")
        file.flush()
        mount.run("acpfs-ctl", str(mount.path), "bypass", "--reason", "a test")
        (mount.path / "native").write_bytes(b"n")
        assert (backing / "native").read_bytes() == b"n"
        status = mount.status()
        assert (status["state"], status["bypass_reason"]) == ("bypassed", "a test")
        assert status["bypassed_since"] > 0
        assert 'acpfs_bypassed{mount="' in mount.run("acpfs-ctl", str(mount.path), "metrics").stdout
        file.write(b"after")
        pid = mount.pid
    mount.wait_ended(pid)
    assert (mount.path / "open").read_bytes() == b"before after"
    assert (
        json.loads(mount.run("acpfs-ctl", str(mount.path), "status", "--json").stdout)["state"]
        == "bypassed"
    )
    assert "BYPASSED" in mount.run("acpfs-ctl", "status").stdout
    mount.run("acpfs", "umount", str(mount.path))
    assert os.listdir(mount.path) == []
    assert mount.leaks() == []


@clause("S70")
def test_what_a_dead_daemon_left_is_drained_by_the_next_mount(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport, bandwidth="64K")
    data = os.urandom(1 << 20)
    (mount.path / "kept").write_bytes(data)
    undrained(mount)
    assert not (mount.path / "kept").exists()
    (mount.path / "native").write_bytes(b"n")
    told = json.loads(mount.run("acpfs-ctl", str(mount.path), "status", "--json").stdout)
    assert (told["state"], told["kept_operations"], told["kept_bytes"]) == ("bypassed", 1, 1 << 20)
    mount.start(bandwidth=0)
    assert (mount.path / "kept").read_bytes() == data
    assert (mount.path / "native").read_bytes() == b"n"
    mount.flush()
    status = mount.status()
    assert (status["state"], status["bypassed_since"], status["conflicts_total"]) == (
        "serving",
        None,
        0,
    )
    assert (backing / "kept").read_bytes() == data


@clause("S70")
def test_umount_takes_both_layers_away(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport)
    assert len(kinds_at(mount.path)) == 2
    mount.umount()
    assert not is_mounted(mount.path)
    mount.start()
    subprocess.run(["umount", str(mount.path)], check=True, timeout=120)
    mount.wait_unmounted()
    mount.start()
    mount.terminate()
    assert not is_mounted(mount.path)


@clause("S70")
def test_with_stop_nothing_lies_beneath(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport, on_failure="stop")
    assert kinds_at(mount.path) == ["fuse.acpfs"]
    with pytest.raises(CommandError) as refused:
        mount.run("acpfs-ctl", str(mount.path), "bypass")
    assert refused.value.code == ExitCode.REFUSED
    assert mount.status()["on_failure"] == "stop"
    mount.kill()


@clause("S70")
def test_the_mount_does_not_appear_over_the_backing_directory_where_mounts_are_shared(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    (shared / "backing").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(shared)], check=True)
    try:
        subprocess.run(["mount", "--make-shared", str(shared)], check=True)
        (shared / "backing").mkdir()
        mount = make_mount(shared / "backing", transport, name="shared/mnt")
        assert kinds_at(shared / "backing") == []
        assert len(kinds_at(mount.path)) == 2
        (mount.path / "f").write_bytes(b"x")
        mount.flush()
        assert (shared / "backing" / "f").read_bytes() == b"x"
        mount.umount()
        mount.abort()
    finally:
        subprocess.run(["umount", "-lR", str(shared)], check=False)


@clause("S71")
def test_nothing_native_is_overwritten_by_what_was_kept(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport, **QUICK)
    for name in (
        "rewritten",
        "deleted",
        "renamed",
        "target",
        "untouched",
        "replaced_by_dir",
        "linked",
    ):
        (mount.path / name).write_bytes(b"old " + name.encode())
    for name in ("dir", "emptied"):
        (mount.path / name).mkdir()
    mount.flush()
    mount.ctl("set", "bandwidth=1")
    (mount.path / "gate").write_bytes(os.urandom(1 << 20))  # holds everything behind it up
    (mount.path / "rewritten").write_bytes(b"mount")
    (mount.path / "untouched").write_bytes(b"mount")
    (mount.path / "new").write_bytes(b"mount")
    (mount.path / "deleted").unlink()
    (mount.path / "renamed").rename(mount.path / "elsewhere")
    (mount.path / "tmp").write_bytes(b"mount's target")
    (mount.path / "tmp").rename(mount.path / "target")
    (mount.path / "emptied").rmdir()
    os.symlink("mount", mount.path / "link")
    (mount.path / "made").mkdir()
    (mount.path / "made" / "inside").write_bytes(b"mount")
    (mount.path / "linked").chmod(0o600)
    undrained(mount)
    for name in ("rewritten", "new", "deleted", "renamed", "target", "link", "linked"):
        (mount.path / name).write_bytes(b"NATIVE " + name.encode())
    (mount.path / "made").write_bytes(b"NATIVE made")
    (mount.path / "emptied" / "again").write_bytes(b"NATIVE")
    mount.start(bandwidth=0)
    mount.flush()
    status = mount.status()
    mount.umount()
    shown = {
        str(p.relative_to(backing)): p.read_bytes()
        for p in backing.rglob("*")
        if p.is_file() and ".acpfs" not in p.parts
    }
    for name in ("rewritten", "new", "deleted", "renamed", "target", "link", "made", "linked"):
        assert shown[name] == b"NATIVE " + name.encode(), name
    assert shown["emptied/again"] == b"NATIVE"
    assert shown["untouched"] == b"mount"
    for name, content in (
        ("rewritten", b"mount"),
        ("new", b"mount"),
        ("target", b"mount's target"),
    ):
        assert shown[f"{name}.acpfs-conflict-1"] == content
    assert os.readlink(backing / "link.acpfs-conflict-1") == "mount"
    assert shown["made.acpfs-conflict-1/inside"] == b"mount"
    assert "tmp" not in shown
    assert (backing / "linked").stat().st_mode & 0o777 == 0o644
    kept = {c["path"]: c["kept_as"] for c in status["conflicts"]}
    assert kept["rewritten"] == "rewritten.acpfs-conflict-1"
    assert (kept["deleted"], kept["renamed"], kept["emptied"]) == (None, None, None)
    assert status["conflicts_total"] == len(status["conflicts"]) == 9
    assert "conflict: changed natively" in mount.log.read_text() or any(
        "conflict" in p.read_text() for p in (mount.runtime_dir / "logs").glob("*.log")
    )


@clause("S71")
def test_after_a_conflict_the_name_is_the_native_file(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport, **QUICK, bandwidth=1)
    (mount.path / "f").write_bytes(os.urandom(1 << 20))
    undrained(mount)
    (mount.path / "f").write_bytes(b"NATIVE")
    mount.start(bandwidth=0)
    mount.flush()
    status = mount.wait_status(lambda s: s["conflicts_total"] == 1)
    assert status["conflicts"][0]["path"] == "f"
    mount.wait_status(lambda _s: (mount.path / "f").read_bytes() == b"NATIVE")
    assert len((mount.path / "f.acpfs-conflict-1").read_bytes()) == 1 << 20
    (mount.path / "f").write_bytes(b"written through the mount")
    mount.flush()
    assert (backing / "f").read_bytes() == b"written through the mount"
    assert [row["status"] for row in mount.ctl("verify")] == ["ok", "ok"]


@clause("S71")
def test_what_a_bypassed_mount_still_writes_does_not_overwrite_native_changes(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport, **QUICK)
    (mount.path / "log").write_bytes(b"1")
    mount.flush()
    with open(mount.path / "log", "ab") as file:
        mount.run("acpfs-ctl", str(mount.path), "bypass")
        (mount.path / "log").write_bytes(b"NATIVE")
        file.write(b"2")
        pid = mount.pid
    mount.wait_ended(pid)
    assert (mount.path / "log").read_bytes() == b"NATIVE"
    assert (mount.path / "log.acpfs-conflict-1").read_bytes() == b"12"
    mount.run("acpfs", "umount", str(mount.path))


@clause("S71")
def test_a_crash_in_the_middle_of_the_drain_makes_no_conflict_with_itself(
    transport: str, make_mount: MakeMount, backing: Path
) -> None:
    mount = make_mount(backing, transport, **QUICK)
    for round_ in range(3):
        for number in range(60):
            (mount.path / f"f{number}").write_bytes(b"%d %d" % (round_, number) * 100)
            if number % 3 == 0:
                (mount.path / f"f{number}").rename(mount.path / f"g{number}")
        mount.kill()
        mount.start()
    mount.flush()
    assert mount.status()["conflicts"] == []
    assert (backing / "g0").read_bytes() == b"2 0" * 100
