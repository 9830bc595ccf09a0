"""Equal content is not sent twice: a file that another member has stored already, of the same name
and the same bytes.

The bytes are known to be the same by size and by the checksum that the other member noted at the
file, as long as nobody wrote to it since. Such a file gets a second name, in this node's staging
directory, and stands in for the staging file that would have been streamed: what happens to the
first name meanwhile does not touch it, and the commit renames it into place like any other, which
changes nothing if the first name is still there. Costs one lstat where there is no such file, and
nothing where there is no other member. Used in stream threads.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable
from dataclasses import dataclass

from acpfs.backing.lower import Lower, LowerPath, LowerStat
from acpfs.writeback.log.ops import Op, Version
from acpfs.writeback.parts import DrainParts

_LINKED = "linked-"
"""Staging names of such files begin with this: the commit looks at them once more."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that may be equal."""

    path: LowerPath
    st: LowerStat
    digest: str


def linked_name(name: str) -> str:
    """The staging name for a file that is there already."""
    return _LINKED + name


def is_linked(version: Version) -> bool:
    """Whether what is staged is another member's file."""
    return version.staging_name.startswith(_LINKED)


def is_as_noted(lower: Lower, path: LowerPath, digest: str, size: int) -> bool:
    """Whether a file is still what was noted at it, and that is this content."""
    fd = lower.open_read(path)
    try:
        note = lower.noted(fd)
        st = lower.stat_fd(fd)
    finally:
        lower.close(fd)
    return (
        note is not None
        and note.digest == digest
        and st.size == size
        and note.is_about(st, lower.features.time_granularity_ns)
    )


class EqualFiles:
    """Finds them."""

    def __init__(
        self, parts: DrainParts, recorded: Callable[[LowerPath], str], has_peers: Callable[[], bool]
    ) -> None:
        """`recorded`: the checksum of what this node stored at a path: its own files are not asked
        about. `has_peers`: other members.
        """
        self._lower = parts.lower
        self._tree = parts.tree
        self._lock = parts.lock
        self._recorded = recorded
        self._has_peers = has_peers

    def candidate(self, op: Op, version: Version) -> Candidate | None:
        """The file at the operation's place, if it may be equal; then the version has to be
        hashed.
        """
        features = self._lower.features
        if not (version.size and features.xattrs and features.hard_links and features.link_counts):
            return None
        if not self._has_peers():
            return None
        with self._lock:
            path = self._tree.path(op.ino) or self._tree.path_at(op.parent, op.name)
            recorded = self._recorded(path) if path is not None else ""
        if path is None:
            return None
        with contextlib.suppress(OSError):  # it is streamed, which finds out what is wrong
            return self._look(op, version, path, recorded)
        return None

    def _look(self, op: Op, version: Version, path: LowerPath, recorded: str) -> Candidate | None:
        st = self._lower.lstat(path)
        meta = op.meta
        same = (st.size, stat.S_IMODE(st.mode), st.uid, st.gid, st.nlink) == (
            version.size,
            meta.permissions,
            meta.uid,
            meta.gid,
            1,
        )
        if not (stat.S_ISREG(st.mode) and same):
            return None
        digest = self._lower.digest(path)
        if digest in ("", recorded) or not is_as_noted(self._lower, path, digest, version.size):
            return None
        further = self._lower.xattrs(path).keys() - meta.xattrs.keys()
        if any(not name.startswith(b"security.") for name in further):
            return None  # a new file would not have them
        return Candidate(path, st, digest)

    def link(self, candidate: Candidate, name: str) -> int:
        """Give the file its second name, flushed; returns its inode number, 0 where it is another
        file by now, or cannot have one.
        """
        staged = self._lower.staging_path(name)
        try:
            self._lower.link(candidate.path, staged)
            if self._lower.lstat(staged).ino != candidate.st.ino:
                return 0
            if not is_as_noted(self._lower, staged, candidate.digest, candidate.st.size):
                return 0
            self._lower.sync_entry(staged)
        except OSError:
            return 0
        return candidate.st.ino
