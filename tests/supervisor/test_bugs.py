"""A bug in a call: the worker that has half of it in memory ends, the caller has EIO, and the mount
goes on.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from acpfs.supervisor.restarts import EARLY_DEATHS_MAX
from tests.rig.hanging_code import code_with
from tests.rig.mounts import AcpfsMount

pytestmark = [
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
    pytest.mark.clause("S412", "S413"),
    pytest.mark.mount,
]
BUG = (
    "acpfs/filesystem/names.py",
    "        self._table.set_child(parent.ino, name, node.ino)\n        meta =",
    " 1 // (name != b'bug') and",
)
"""The name is in the tree, and no operation in the log."""
MORE_THAN_EARLY = EARLY_DEATHS_MAX + 2


def names_in(path: Path) -> list[str]:
    """Of a mount that may be dead at the moment; between two mounts what lies beneath is seen, with
    `.acpfs`.
    """
    try:
        return os.listdir(path)
    except OSError:
        return []


def error_of(path: Path) -> int:
    try:
        path.mkdir()
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.transports("native")
def test_each_such_call_fails_and_the_mount_goes_on(tmp_path: Path, transport: str) -> None:
    """However often somebody tries again: what an application does ends no mount."""
    log = tmp_path / "acpfs.log"
    (tmp_path / "backing").mkdir()
    environment = {"PYTHONPATH": str(code_with(tmp_path, BUG))}
    with AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        transport,
        log_file=str(log),
        environment=environment,
    ) as mount:
        with open(mount.path / "f", "wb", buffering=0) as file:
            file.write(b"one ")
            errors = {error_of(mount.path / "bug") for _time in range(MORE_THAN_EARLY)}
            assert errors == {errno.EIO}
            assert os.listdir(mount.path) == ["f"]
            file.write(b"two")
        (mount.path / "d").mkdir()
        assert mount.status()["worker"]["last_end"] == "died"
        mount.umount()
    assert log.read_text().count("a bug in a step") == MORE_THAN_EARLY
    assert (tmp_path / "backing/f").read_bytes() == b"one two"
    assert sorted(os.listdir(tmp_path / "backing")) == [".acpfs", "d", "f"]


@pytest.mark.transports("libfuse")
def test_with_libfuse_the_mount_is_made_anew(tmp_path: Path, transport: str) -> None:
    """There is no session to take over: who uses the mount then has errors, and nothing of the call
    is there.
    """
    (tmp_path / "backing").mkdir()
    environment = {"PYTHONPATH": str(code_with(tmp_path, BUG))}
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", transport, environment=environment
    ) as mount:
        (mount.path / "f").write_bytes(b"bytes")
        assert error_of(mount.path / "bug") in (errno.EIO, errno.ENOTCONN, errno.ECONNABORTED)
        mount.wait_status(
            lambda status: status["worker"]["number"] == 2 and names_in(mount.path) == ["f"]
        )
        mount.umount()
    assert (tmp_path / "backing/f").read_bytes() == b"bytes"
