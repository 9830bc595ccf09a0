"""The kernel takes away what is mounted on a directory entry that has become invalid; acpfs' mount
must not lie on such a one.

Over a network that takes one look-up that fails, by whoever makes it. The backing directory of
these tests is a subdirectory there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.supervisor import fallthrough
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import CommandError, MakeMount, kinds_at

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount]
QUICK = {"retry_delay_min": 0.05, "retry_delay_max": 0.5, "attr_timeout": 0.1}


@pytest.fixture
def backing(fault_fs: FaultFs) -> Path:
    path = fault_fs.path / "checkpoints"
    path.mkdir()
    return path


def invalidate(fault_fs: FaultFs, backing: Path) -> None:
    """As when the servers are gone for a moment while somebody looks."""
    rule = fault_fs.fail("ENOTCONN", ["lookup"])
    with pytest.raises(OSError, match="not connected"):
        os.stat(backing)
    fault_fs.clear(rule)


@clause("S75", "S23")
def test_the_mount_stays(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, backing: Path
) -> None:
    mount = make_mount(backing, transport, **QUICK)
    (mount.path / "before").write_bytes(b"b")
    mount.flush()
    invalidate(fault_fs, backing)
    assert "fuse.acpfs" in kinds_at(mount.path)
    (mount.path / "after").write_bytes(b"a")
    mount.flush()
    assert (backing / "after").read_bytes() == b"a"
    mount.umount()
    assert mount.leaks() == []
    assert os.listdir(mount.path) == []


@clause("S75", "S70")
@pytest.mark.parametrize("how", ["bypass", "given up"])
def test_it_falls_through_all_the_same(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, backing: Path, how: str
) -> None:
    mount = make_mount(backing, transport, **QUICK)
    (mount.path / "before").write_bytes(b"b")
    mount.flush()
    invalidate(fault_fs, backing)
    if how == "bypass":
        mount.ctl("bypass", "--reason", "a test")
    else:
        mount.kill_processes()
        assert fallthrough.fall(mount.runtime_dir, str(mount.path), "the worker does not come back")
    assert kinds_at(mount.path) == ["fuse.faultfs"]
    (mount.path / "native").write_bytes(b"n")
    assert (backing / "native").read_bytes() == b"n"
    assert not list((mount.runtime_dir / "beneath").glob("*.aside"))
    if how == "bypass":
        mount.run("acpfs", "umount", str(mount.path))
    else:
        mount.start()
        assert (mount.path / "native").read_bytes() == b"n"
        mount.umount()
    assert mount.leaks() == []


@clause("S75", "S70")
@pytest.mark.parametrize("how", ["bypass", "given up"])
def test_it_does_not_fall_to_the_bare_directory(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, backing: Path, how: str
) -> None:
    """The servers are still gone: what applications would write beneath the mount would be in the
    way of it, and on no other node.
    """
    mount = make_mount(backing, transport, **QUICK)
    (mount.path / "before").write_bytes(b"b")
    mount.flush()
    invalidate(fault_fs, backing)
    rule = fault_fs.fail("ENOTCONN", ["lookup"])
    if how == "bypass":
        with pytest.raises(CommandError, match="not connected"):
            mount.ctl("bypass", "--reason", "a test")
        assert mount.status()["state"] == "serving"
    else:
        mount.kill_processes()
        with pytest.raises(OSError, match="not connected"):
            fallthrough.fall(mount.runtime_dir, str(mount.path), "the worker does not come back")
    assert kinds_at(mount.path) == ["fuse.acpfs"]
    fault_fs.clear(rule)
    if how == "bypass":
        mount.ctl("bypass", "--reason", "a test")
        assert kinds_at(mount.path) == ["fuse.faultfs"]
        mount.run("acpfs", "umount", str(mount.path))
    else:
        mount.kill()
        mount.start()
        assert (mount.path / "before").read_bytes() == b"b"
        mount.umount()
    assert mount.leaks() == []


@clause("S75", "S22")
def test_after_the_death_of_everything(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, backing: Path
) -> None:
    """What lies aside is found by the next mount, and made anew: the file system may be another
    mount by then.
    """
    mount = make_mount(backing, transport, **QUICK)
    (mount.path / "before").write_bytes(b"b")
    mount.flush()
    mount.kill()
    mount.start()
    assert mount.status()["on_failure"] == "native"
    assert (mount.path / "before").read_bytes() == b"b"
    mount.umount()
    assert mount.leaks() == []
