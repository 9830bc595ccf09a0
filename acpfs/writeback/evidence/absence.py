"""Whether what the backing directory does not find is missing.

Servers in trouble, and clients that have just been told of new servers, say for a moment that a
name does not exist, and list it all the same (GlusterFS after a change of its graph). Who believed
that would take a rename, or a removal, for done that never was. So an operation that finds its
object missing asks the directory's listing first. Called in the commit thread, and by `verify`;
decides nothing about what comes of it.
"""

from __future__ import annotations

import errno
import os

from acpfs.backing.lower import Lower, LowerPath


class Listings:
    """Listings that were asked for during a run of removals; each of n files that another member
    has removed would take one of its own.

    One that is older than the answer "not found" says as much, as long as nothing was made here
    since: what was not listed then did not come back by itself. `forget` is called before anything
    else than a removal is carried out.
    """

    def __init__(self, lower: Lower) -> None:
        self._lower = lower
        self._names: dict[LowerPath, frozenset[bytes]] = {}

    def forget(self) -> None:
        """Names may have been made."""
        self._names.clear()

    def make_sure(self, path: LowerPath) -> None:
        """As the function of that name."""
        names = self._names.get(path[:-1])
        if names is None or path[-1] in names:  # listed then: it may have gone since
            make_sure(self._lower, path, self._names)


def make_sure(
    lower: Lower, path: LowerPath, found: dict[LowerPath, frozenset[bytes]] | None = None
) -> None:
    """Return when nothing lies at `path`, by the listing of the nearest directory above it that
    there is. `found`: takes it.

    Raises:
        OSError: ESTALE, a passing failure, when it is listed; whatever else keeps the backing
            directory from listing.
    """
    for depth in range(len(path) - 1, -1, -1):
        try:
            entries = lower.listdir(path[:depth])
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            return
        names = frozenset(entry.name for entry in entries)
        if found is not None:
            found[path[:depth]] = names
        if path[depth] in names:
            raise OSError(errno.ESTALE, "not found, but listed by its directory")
        return
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # not even the top can be listed
