"""The runtime directory: where registry, sockets and RAM tiers of one user lie, and where to look
for others' mounts.

/run/acpfs for root (world-searchable, so that everybody can find a socket that a group may use; the
sockets themselves and the tiers are private), $XDG_RUNTIME_DIR/acpfs for everybody else.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from acpfs.errors import RefusedError

ROOT_RUNTIME_DIR = Path("/run/acpfs")
ENVIRONMENT_VARIABLE = "ACPFS_RUNTIME_DIR"
ROOT_MEMORY_DIR = Path("/var/lib/acpfs")
MEMORY_VARIABLE = "ACPFS_MEMORY_DIR"


def runtime_dir() -> Path:
    """Where this user's daemons keep their things unless told otherwise."""
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(named)
    if os.getuid() == 0:
        return ROOT_RUNTIME_DIR
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "acpfs"
    by_login = Path(f"/run/user/{os.getuid()}")
    # owner and mode are checked below
    return by_login / "acpfs" if by_login.is_dir() else Path(f"/tmp/acpfs-{os.getuid()}")  # noqa: S108


def memory_dir(runtime: Path) -> Path:
    """Where is kept what a reboot must not take.

    Whoever chooses a runtime directory has it there, unless told otherwise.
    """
    if named := os.environ.get(MEMORY_VARIABLE):
        return Path(named)
    if os.environ.get(ENVIRONMENT_VARIABLE) or runtime != runtime_dir():
        return runtime / "remembered"
    if os.getuid() == 0:
        return ROOT_MEMORY_DIR
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "acpfs"


def places_to_look() -> list[Path]:
    """Runtime directories in which a control command looks for mounts: this user's, then root's.

    One that somebody else could have made or may write to (anybody can make a name in /tmp) would
    send a client to whatever socket they like, which then says that all is verified. It is passed
    over, unless it was named.
    """
    mine = runtime_dir()
    if os.environ.get(ENVIRONMENT_VARIABLE):
        return [mine]
    return [
        directory for directory in dict.fromkeys((mine, ROOT_RUNTIME_DIR)) if is_trusted(directory)
    ]


def is_trusted(directory: Path) -> bool:
    """Whether it is a directory of this user or root that only they can write to."""
    try:
        st = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(st.st_mode) and st.st_uid in (os.getuid(), 0) and not st.st_mode & 0o022


def prepare(directory: Path) -> Path:
    """Make the runtime directory; one that others may write to is refused.

    Raises:
        RefusedError: it is a symlink, belongs to somebody else, or others may write to it.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o755 if os.getuid() == 0 else 0o700, parents=True)
    if not is_trusted(directory):
        raise RefusedError(
            f"the runtime directory {directory} is not a directory of this user that only they "
            "can write to"
        )
    for name, mode in (("mounts", 0o755), ("sockets", 0o755), ("tiers", 0o700)):
        with contextlib.suppress(FileExistsError):
            (directory / name).mkdir(mode=mode)
    return directory
