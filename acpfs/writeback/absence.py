"""Whether what the backing directory does not find is missing.

Servers in trouble, and clients that have just been told of new servers, say for a moment that a name does not exist, and list it all the
same (GlusterFS after a change of its graph). Who believed that would take a rename, or a removal, for done that never was. So an operation
that finds its object missing asks the directory's listing first. Called in the commit thread, and by `verify`; decides nothing about what
comes of it.
"""

from __future__ import annotations

import errno
import os

from acpfs.backing.lower import Lower, LowerPath


def make_sure(lower: Lower, path: LowerPath) -> None:
    """Return when nothing lies at `path`, by the listing of the nearest directory above it that there is.

    Raises:
        OSError: ESTALE, a passing failure, when it is listed; whatever else keeps the backing directory from listing.
    """
    for depth in range(len(path) - 1, -1, -1):
        try:
            entries = lower.listdir(path[:depth])
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            return
        if any(entry.name == path[depth] for entry in entries):
            raise OSError(errno.ESTALE, "not found, but listed by its directory")
        return
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # not even the top can be listed
