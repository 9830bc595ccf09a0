"""The kernel's session ends without an unmount: an abort, `umount -f` of a mount in use, the
kernel's request time-out.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from acpfs.errors import AcpfsError, ExitCode
from acpfs.ram.mounts import unmount
from tests.rig.mounts import (
    ENVIRONMENTS,
    LOOK_AGAIN_S,
    REPOSITORY,
    AcpfsMount,
    is_mounted,
    kinds_at,
)

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("libfuse", "native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
PATIENCE_S = 240.0


@contextlib.contextmanager
def in_foreground(
    mount: AcpfsMount, *words: str, code: Path = REPOSITORY, ready: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    """The mount, served by a process whose exit code can be seen, of that code; `ready`: after it
    has begun to serve.
    """
    for path in (mount.path, mount.backing):
        path.mkdir()
    mount.watch()
    command = [
        sys.executable,
        "-m",
        "acpfs.cli.main",
        "mount",
        str(mount.backing),
        str(mount.path),
        "--foreground",
        "--ram",
        "64M",
        *words,
    ]
    env = {
        **os.environ,
        **ENVIRONMENTS[mount.transport],
        "ACPFS_RUNTIME_DIR": str(mount.runtime_dir),
        "PYTHONPATH": str(code),
    }
    with open(mount.log, "wb") as log:
        daemon = subprocess.Popen(
            [*command, "--transport", mount.transport.partition("-")[0]], env=env, stderr=log
        )
    try:
        wait_until(
            lambda: not ready or serves(mount),
            lambda: daemon.poll() is not None and mount.log.read_text(),
        )
        yield daemon
    finally:
        mount.abort()
        daemon.kill()
        daemon.wait()


def wait_until(holds: Callable[[], bool], failed: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert not failed(), failed()
        assert time.monotonic() < deadline
        threading.Event().wait(LOOK_AGAIN_S)


def serves(mount: AcpfsMount) -> bool:
    with contextlib.suppress(AcpfsError):
        return bool(mount.status()["state"] == "serving")
    return False


def end_session(mount: AcpfsMount) -> None:
    """What `umount -f` does to a mount in use: the session is aborted, and the mount stays."""
    with pytest.raises(OSError, match="busy"):
        unmount(mount.path, abort=True)


@pytest.mark.clause("S210")
def test_an_aborted_mount_falls_through_is_drained_and_is_no_success(
    transport: str, tmp_path: Path
) -> None:
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport)
    with in_foreground(mount) as daemon:
        (mount.path / "torn").write_bytes(b"good")
        mount.flush()
        mount.ctl("set", "bandwidth=1")
        content = os.urandom(1 << 20)
        (mount.path / "closed").write_bytes(content)
        torn = os.open(mount.path / "torn", os.O_WRONLY)
        os.write(torn, b"ha")
        end_session(mount)
        wait_until(lambda: kinds_at(mount.path)[-1:] != ["fuse.acpfs"])
        assert sorted(os.listdir(mount.path)) == sorted(os.listdir(mount.backing))
        (mount.path / "native").write_bytes(b"n")
        assert "without an unmount" in mount.status()["bypass_reason"]
        mount.ctl("set", "bandwidth=0")
        assert daemon.wait(PATIENCE_S) == ExitCode.FAILED
        with contextlib.suppress(OSError):
            os.close(torn)
        assert (mount.backing / "closed").read_bytes() == content
        assert (mount.backing / "torn").read_bytes() == b"good"
        assert (mount.backing / "native").read_bytes() == b"n"


@pytest.mark.clause("S210")
def test_with_stop_an_aborted_mount_stays_dead_and_is_no_success(
    transport: str, tmp_path: Path
) -> None:
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport)
    with in_foreground(mount, "--on-failure", "stop") as daemon:
        (mount.path / "closed").write_bytes(b"c")
        user = os.open(mount.path / "closed", os.O_RDONLY)
        end_session(mount)
        assert daemon.wait(PATIENCE_S) == ExitCode.FAILED
        with contextlib.suppress(OSError):
            os.close(user)
        assert kinds_at(mount.path) == ["fuse.acpfs"]
        assert (mount.backing / "closed").read_bytes() == b"c"
        mount.run("acpfs", "umount", str(mount.path), check=False)
        assert not is_mounted(mount.path)
