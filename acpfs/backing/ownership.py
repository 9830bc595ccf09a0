"""That nobody else made `.acpfs`: its owner could exchange what lies in it, and so read and replace
what other users save.

The backing directory may be one that many may write to (sticky, like /tmp). Whoever makes `.acpfs`
there first owns it, whatever acpfs makes in it afterwards. Looked at when a mount begins. May
block.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from acpfs.backing.areas import OWN, look_made
from acpfs.errors import FULL_ERRNOS, RefusedError
from acpfs.runtime.chance import Chance

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check_own(root_fd: int, path: Path, chance: Chance) -> None:
    """Refuse a `.acpfs` that is not ours. `root_fd`, `path`: the backing directory.

    Raises:
        RefusedError: another user owns it, or may write to it.
        OSError: the backing directory's.
    """
    fd = os.open(OWN, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        own = os.fstat(fd)
        if own.st_uid in (0, os.geteuid()) and not own.st_mode & _WRITABLE_BY_OTHERS:
            return
        made = look_made(fd, chance)
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            return  # what is to be drained to it is worth more than the check
        raise
    finally:
        os.close(fd)
    where = path / os.fsdecode(OWN)
    if own.st_uid not in (0, os.geteuid(), made.st_uid):
        raise RefusedError(
            f"{where} belongs to user {own.st_uid}, who could read and exchange what is stored "
            "by way of it: "
            f"look what is in it, then give it to the user that mounts (chown -R), or remove it"
        )
    if own.st_mode & ~made.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(own.st_mode)
        raise RefusedError(
            f"others may write to {where} (mode {mode:o}), and exchange what is stored by way of "
            "it: chmod go-w"
        )
