"""`--backing KIND`: suites that know nothing of it get another file system as their backing
directory.

A directory of the file system is bound over each backing directory before acpfs is first mounted on
it; what lies there is taken along. All binds go at the end of the session.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from acpfs.ram.mounts import mount_of
from tests.rig import lifeline
from tests.rig.mounts import mounts_below
from tests.rig.storage import open_storage, why_not
from tests.rig.storage.local_disk import MAKERS, LocalDisk
from tests.rig.storage.servers import Storage


def _lacking(kind: str) -> str | None:
    """What this machine lacks for it, or None."""
    if kind not in MAKERS:
        return why_not(kind)
    program = MAKERS[kind][0]
    return None if shutil.which(program) else f"needs {program}"


def _open(kind: str, base: Path) -> Storage | LocalDisk:
    return LocalDisk(kind, base) if kind in MAKERS else open_storage(kind, base)


class Below:
    """One file system for a session; a context manager."""

    def __init__(self, kind: str) -> None:
        reason = _lacking(kind)
        if reason is not None:
            raise RuntimeError(reason)
        self._base = tempfile.TemporaryDirectory(prefix="acpfs-below-", ignore_cleanup_errors=True)
        self._storage = _open(kind, Path(self._base.name) / "storage")
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
        """Nothing for a directory that lies on a file system of a test's own, or that was done
        already.
        """
        entry = mount_of(str(backing.resolve()))
        if entry is None or entry.kind.startswith("fuse.") or entry.path == str(backing):
            return
        if mounts_below(backing):
            return
        fresh = self._client / f"backing{len(self._laid)}"
        subprocess.run(["cp", "-a", f"{backing}/.", str(fresh)], check=True)
        subprocess.run(["mount", "--bind", str(fresh), str(backing)], check=True)
        self._laid.append(backing)
