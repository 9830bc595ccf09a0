"""What the suites that take a directory run on: a plain directory, a tmpfs, an acpfs mount, or any
directory that is named.

A target knows what its file system cannot do, so that a test asks `target.can("tmpfile")` instead
of knowing transports.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rig.mounts import ENVIRONMENTS, AcpfsMount

TRANSPORTS = tuple(ENVIRONMENTS)
CANNOT = {
    "faultfs": frozenset({"tmpfile", "fallocate", "seek_hole", "dots", "devices", "acl"}),
    "libfuse": frozenset(
        {
            "tmpfile",
            "fallocate",
            "seek_hole",
            "whiteout",
            "chattr",
            "labels",
            "dots",
            "devices",
        }
    ),
    **{
        name: frozenset({"whiteout", "chattr", "labels", "devices"})
        for name in ENVIRONMENTS
        if name.startswith("native")
    },
}
"""Exceptions X1… of docs/SEMANTICS.md."""


@dataclass(frozen=True)
class Target:
    """A directory to test in."""

    name: str
    root: Path
    mount: AcpfsMount | None = None

    @property
    def backing(self) -> Path | None:
        """Where the files end up, for acpfs."""
        return self.mount.backing if self.mount else None

    def can(self, what: str) -> bool:
        """Whether the file system has a feature that some do not have."""
        return what not in CANNOT.get(self.name, frozenset())


@contextlib.contextmanager
def open_target(name: str, base: Path) -> Iterator[Target]:
    """Make a target usable, below `base` where it needs room of its own."""
    if name == "plain":
        root = base / "plain"
        root.mkdir()
        yield Target(name, root)
        shutil.rmtree(root, ignore_errors=True)
    elif name == "tmpfs":
        yield from _tmpfs(base / "tmpfs")
    elif name in TRANSPORTS:
        backing = base / "backing"
        backing.mkdir()
        # A suite, not a single test, runs on this mount: its watchdog is the suite's.
        with AcpfsMount(backing, base / "mnt", name, ram="2G", watchdog_s=7200.0) as mount:
            yield Target(name, mount.path, mount)
    else:
        root = Path(tempfile.mkdtemp(dir=name, prefix="suite-"))
        root.chmod(0o755)
        yield Target("faultfs" if _type_of(name) == "fuse.faultfs" else name, root)
        shutil.rmtree(root, ignore_errors=True)


def _type_of(path: str) -> str:
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return next((line[2] for line in reversed(lines) if line[1] == path), "")


def _tmpfs(root: Path) -> Iterator[Target]:
    if os.geteuid() != 0:
        root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        yield Target("tmpfs", root)
        shutil.rmtree(root, ignore_errors=True)
        return
    root.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4G,mode=755", "tmpfs", str(root)], check=True
    )
    try:
        yield Target("tmpfs", root)
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)
