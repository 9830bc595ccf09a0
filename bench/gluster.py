"""A GlusterFS volume on this machine, replica 3, as a backing file system that is really distributed.

Needs root and Debian's glusterfs-server. Everything lies below one directory but GlusterFS's own /var/run/gluster and /var/log/glusterfs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 60.0
BRICKS = 3


def _order(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["gluster", "--mode=script", *words], check=check, capture_output=True, text=True, timeout=START_TIMEOUT_S)


def _until_it_answers(daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while _order("volume", "list", check=False).returncode != 0:
        if daemon.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("glusterd does not start; see its log")
        time.sleep(0.1)


def name() -> str:
    """Of this process' volume."""
    return f"bench{os.getpid()}"


def restart_bricks() -> None:
    """Start those brick processes that are gone."""
    _order("volume", "start", name(), "force")


def _configuration(base: Path) -> Path:
    work = base / "glusterd"
    work.mkdir(parents=True)
    text = Path("/etc/glusterfs/glusterd.vol").read_text().replace("/var/lib/glusterd", str(work))
    (base / "glusterd.vol").write_text(text)
    return base / "glusterd.vol"


@contextlib.contextmanager
def volume(base: Path) -> Iterator[Path]:
    """A mounted volume below `base`; stopped and removed at the end."""
    host = socket.gethostname()
    mounted = base / "volume"
    mounted.mkdir(parents=True)
    log = str(base / "glusterd.log")
    daemon = subprocess.Popen(["glusterd", "-N", "-f", str(_configuration(base)), "-p", str(base / "glusterd.pid"), "-l", log])
    try:
        _until_it_answers(daemon)
        bricks = [f"{host}:{base}/brick{n}" for n in range(BRICKS)]
        _order("volume", "create", name(), "replica", str(BRICKS), *bricks, "force")
        _order("volume", "start", name())
        mount = ["glusterfs", f"--volfile-server={host}", f"--volfile-id={name()}", f"--log-file={base / 'mount.log'}", str(mounted)]
        subprocess.run(mount, check=True, timeout=START_TIMEOUT_S)
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=False)
        _order("volume", "stop", name(), check=False)
        _stop_helpers(base)
        daemon.terminate()
        daemon.wait(20)


def _stop_helpers(base: Path) -> None:
    """End the self-heal daemon and whatever else glusterd started below `base`; it leaves some behind."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[0].startswith(b"/usr/sbin/gluster") and any(str(base).encode() in word for word in words[1:]):
                os.kill(int(process.name), 15)
