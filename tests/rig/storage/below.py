"""`--backing KIND`: suites that know nothing of it get a distributed file system as their backing directory.

A directory of the file system is bound over each backing directory before acpfs is first mounted on it; what lies there is taken along.
All binds go at the end of the session.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from acpfs.ram.mounts import mount_of
from tests.rig import lifeline
from tests.rig.storage import open_storage, why_not


class Below:
    """One file system for a session; a context manager."""

    def __init__(self, kind: str) -> None:
        reason = why_not(kind)
        if reason is not None:
            raise RuntimeError(reason)
        self._base = tempfile.TemporaryDirectory(prefix="acpfs-below-", ignore_cleanup_errors=True)
        self._storage = open_storage(kind, Path(self._base.name) / "storage")
        self._laid: list[Path] = []

    def __enter__(self) -> Below:
        lifeline.arm(Path(self._base.name))
        self._storage.__enter__()
        self._client = self._storage.client("client")
        self._client.chmod(0o755)
        return self

    def __exit__(self, *error: object) -> None:
        for path in reversed(self._laid):
            subprocess.run(["umount", "-l", str(path)], check=False, timeout=120)
        self._storage.__exit__()
        lifeline.disarm(Path(self._base.name))
        self._base.cleanup()

    def lay(self, backing: Path) -> None:
        """Nothing for a directory that lies on a file system of a test's own, or that was done already."""
        entry = mount_of(str(backing.resolve()))
        if entry is None or entry.kind.startswith("fuse.") or entry.path == str(backing):
            return
        fresh = self._client / f"backing{len(self._laid)}"
        subprocess.run(["cp", "-a", f"{backing}/.", str(fresh)], check=True)
        subprocess.run(["mount", "--bind", str(fresh), str(backing)], check=True)
        self._laid.append(backing)
