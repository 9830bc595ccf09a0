"""Real distributed file systems on this machine, as backing directories: GlusterFS (replica 3),
MooseFS (goal 2), CephFS (by hand).

Each stand runs in name spaces of its own (`servers.py`): any number side by side, and nothing of a
server outlives the process that made it. A client is a mount of the host's, so that acpfs and the
tests use it like any other.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.rig.storage.cephfs import CephFs
from tests.rig.storage.glusterfs import GlusterFs
from tests.rig.storage.moosefs import MooseFs
from tests.rig.storage.servers import Storage

KINDS: dict[str, type[Storage]] = {"glusterfs": GlusterFs, "moosefs": MooseFs, "cephfs": CephFs}
IN_EVERY_RUN = ("glusterfs", "moosefs")
"""Those that `tools/test` installs; the others are large, for tests by hand."""
PROGRAMS = {
    "glusterfs": ("glusterd", "gluster", "glusterfs"),
    "moosefs": ("mfsmaster", "mfschunkserver", "mfsmount", "mfssetgoal"),
    "cephfs": ("ceph", "ceph-fuse", "ceph-mds", "ceph-mgr", "ceph-mon", "ceph-osd", "monmaptool"),
}
UNCACHED = {
    "glusterfs": (
        *(f"--{what}-timeout=0" for what in ("attribute", "entry", "negative")),
        *(
            f"--xlator-option=*{cache}=0"
            for cache in (
                "md-cache.md-cache-timeout",
                "quick-read.cache-timeout",
                "io-cache.cache-timeout",
            )
        ),
    ),
    "moosefs": (
        "mfsattrcacheto=0",
        "mfsentrycacheto=0",
        "mfsdirentrycacheto=0",
        "mfsnegentrycacheto=0",
        "mfscachemode=NEVER",
    ),
    "cephfs": (),  # its clients' caches are coherent
}
"""Client options with which each look asks the servers."""


def why_not(kind: str) -> str | None:
    """What this machine lacks for a kind of storage, or None."""
    missing = [
        program
        for program in (*PROGRAMS[kind], "ip", "unshare", "nsenter")
        if shutil.which(program) is None
    ]
    if not missing:
        return None
    how = (
        "`tools/test --setup storage` installs them"
        if kind in IN_EVERY_RUN
        else "docs/CONFORMANCE.md names the packages"
    )
    return f"needs {', '.join(missing)}; {how}"


def open_storage(kind: str, base: Path, server_bytes: int | None = None) -> Storage:
    """A stand below `base`, not started yet: a context manager.

    `server_bytes`: keep the bytes in RAM, so much for each server.
    """
    return KINDS[kind](base, server_bytes)
