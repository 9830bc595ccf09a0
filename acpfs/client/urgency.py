"""What must not wait when RAM is full: the reserve, for files below a directory, from inside a
training process.

Paths are matched by name and never looked at here, so that a call cannot hang on the mount itself.
"""

from __future__ import annotations

import os

from acpfs.control import client, registry

StrPath = str | os.PathLike[str]
URGENT_S_MAX = 3600.0


def declare_urgent(path: StrPath, seconds: float = URGENT_S_MAX) -> None:
    """Let a file, or those below a directory, take the part of RAM that the setting `reserve`
    keeps, for so long (one hour at most).

    For its owner and root. Without a reserve such files only go before others that wait.

    Raises:
        acpfs.errors.NotMountedError: the path lies in no acpfs mount: then nothing there waits for
            RAM, and there is nothing to declare.
        acpfs.errors.RefusedError: it is no directory and no file, for too long, or too many paths
            are urgent.
        acpfs.errors.AcpfsError: there is nothing, or it is somebody else's.
    """
    record, below = registry.locate(os.fspath(path))
    client.request(record, "urgent", {"paths": [below], "for_s": float(seconds)})


def withdraw_urgent(path: StrPath) -> bool:
    """It is not urgent any more; False: it was not.

    Raises:
        acpfs.errors.NotMountedError: the path lies in no acpfs mount.
        acpfs.errors.AcpfsError: as `declare_urgent`.
    """
    record, below = registry.locate(os.fspath(path))
    return bool(client.request(record, "urgent", {"paths": [below], "off": True})["changed"])
