"""`idmap = true`: idmapped mounts of the mount, as a pod with `hostUsers: false` gets one."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest

from acpfs.transport.native.callers import NOBODY, NOT_SAID, user_of
from acpfs.transport.native.serve import MASK_VARIABLE
from tests.rig.idmapped import FIRST, idmapped
from tests.rig.mounts import AcpfsMount, CommandError
from tests.rig.processes import errno_as, in_child

clause = pytest.mark.clause
natively = pytest.mark.transports("native")
ALLOW_IDMAP = 1 << 40
SET_IDS = stat.S_ISUID | stat.S_ISGID


def save(directory: Path) -> None:
    """As a job does: a directory, a file, a link."""
    os.umask(0o022)
    directory.mkdir()
    (directory / "f").write_text("1\n")
    (directory / "f").chmod(0o600)
    (directory / "link").symlink_to("f")


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@clause("S538")
@pytest.mark.mount
@natively
def test_a_pod_with_users_of_its_own(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    with AcpfsMount(backing, tmp_path / "mnt", "native", idmap=True) as mount:
        mount.path.chmod(0o777)
        tmp_path.chmod(0o755)
        with idmapped(mount.path, tmp_path / "pod") as pod:
            of_pod = FIRST + 1000
            in_child(lambda: save(pod / "d"), of_pod, of_pod)
            for name in ("d", "d/f", "d/link"):
                assert (pod / name).lstat().st_uid == of_pod
                assert (mount.path / name).lstat().st_uid == 1000
            assert in_child((pod / "d" / "f").read_text, of_pod, of_pod) == "1\n"
            assert errno_as(of_pod + 1, (pod / "d" / "f").read_text) == errno.EACCES
            mount.kill_worker()
            in_child(lambda: append(pod / "d" / "f", "2\n"), of_pod, of_pod)
            os.chown(pod / "d" / "f", FIRST + 7, FIRST + 8)
            # the pod has no such user, whose files would belong to nobody
            (pod / "d").chmod(0o777)
            assert errno_as(1000, lambda: append(pod / "d" / "g", "3\n")) == errno.EOVERFLOW
            mount.flush()
            st = (backing / "d" / "f").stat()
            assert (st.st_uid, st.st_gid) == (7, 8)
            assert (backing / "d").stat().st_uid == 1000
            assert (backing / "d" / "f").read_text() == "1\n2\n"
            assert not (backing / "d" / "g").exists()


@clause("S538")
@pytest.mark.mount
@natively
def test_a_directory_of_the_mount_as_a_volume(tmp_path: Path) -> None:
    """As a pod has it by `subPath`."""
    backing = tmp_path / "backing"
    backing.mkdir()
    with AcpfsMount(backing, tmp_path / "mnt", "native", idmap=True) as mount:
        run = mount.path / "run1"
        run.mkdir()
        tmp_path.chmod(0o755)
        os.chown(run, 1000, 1000)
        with idmapped(run, tmp_path / "pod") as pod:
            of_pod = FIRST + 1000
            in_child(lambda: save(pod / "d"), of_pod, of_pod)
            assert in_child((pod / "d" / "f").read_text, of_pod, of_pod) == "1\n"
            mount.flush()
        assert (backing / "run1" / "d" / "f").stat().st_uid == 1000


@clause("S538", "S42", "S487")
@pytest.mark.mount
@natively
def test_who_calls_is_known_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    with AcpfsMount(backing, tmp_path / "mnt", "native", idmap=True) as mount:
        tmp_path.chmod(0o755)
        path = mount.path / "f"
        path.write_bytes(b"1")
        os.setxattr(path, "trusted.t", b"1")
        path.chmod(0o6777)
        assert "trusted.t" in os.listxattr(path)
        assert in_child(lambda: os.listxattr(path), 5, 5) == []
        path.open("wb").close()  # by root, who may keep them
        assert path.stat().st_mode & SET_IDS == SET_IDS
        in_child(lambda: path.open("wb").close(), 5, 5)
        assert path.stat().st_mode & SET_IDS == 0


@clause("S538")
@pytest.mark.mount
@natively
def test_a_mount_that_does_not_allow_it_is_not_idmapped(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    with (
        AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "native") as mount,
        pytest.raises(OSError, match="Invalid argument"),
        idmapped(mount.path, tmp_path / "pod"),
    ):
        pass


@clause("S538")
@pytest.mark.mount
@natively
def test_a_kernel_that_cannot_is_told_of_at_mount(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    older = {MASK_VARIABLE: hex(~ALLOW_IDMAP & (1 << 64) - 1)}
    mount = AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", "native", environment=older, idmap=True
    )
    with pytest.raises(CommandError, match=r"idmap = true needs .* Linux 6\.12"), mount:
        pass


@clause("S538")
def test_a_caller_that_cannot_be_told_has_no_privilege(tmp_path: Path) -> None:
    assert user_of(3, 4, os.getpid()) == (3, 4)
    assert user_of(NOT_SAID, NOT_SAID, os.getpid()) == (os.geteuid(), os.getegid())
    assert user_of(NOT_SAID, NOT_SAID, 0) == (NOBODY, NOBODY)
    assert user_of(NOT_SAID, NOT_SAID, os.getpid(), tmp_path) == (NOBODY, NOBODY)
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert user_of(NOT_SAID, NOT_SAID, gone.pid) == (NOBODY, NOBODY)
