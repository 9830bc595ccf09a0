"""Directories of the daemon's own that shut it out when a change in them is carried out.

A program may write to a file in a directory that it may not change, and finishes there what it
began before the directory was made read-only. Content gets to its place by a rename, which that
directory's mode forbids then to a daemon without privilege. So the directory is opened to its owner
for the one operation that was refused, and shut again; and so are those further above that may not
be entered any more, and a directory itself that moves to another. Which ones are open is in the
state database before they are: the next worker shuts them before it carries out anything else.

Not opened is what was shut by others than this mount, and what belongs to somebody else. What
others change while it is open stays. Called in the commit thread, and by the look after a flush
that failed (`recheck`), while no commit is under way.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.logger import get_logger, shown
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.ops import Metadata
from acpfs.writeback.parts import DrainParts

DDL = """
CREATE TABLE IF NOT EXISTS opened_directory (
  path BLOB PRIMARY KEY, number INTEGER NOT NULL, mode INTEGER NOT NULL, opened INTEGER NOT NULL)
  WITHOUT ROWID;
"""
CHANGE = stat.S_IWUSR | stat.S_IXUSR
"""What the owner of a directory needs to change names in it."""

ENTER = stat.S_IXUSR
"""What the owner of a directory needs to reach what lies in it."""

_log = get_logger(__name__)
T = TypeVar("T")


class _Opened(NamedTuple):
    number: int
    """Of its inode."""
    mode: int
    """The permission bits that it had, and gets back."""
    opened: int
    """Those that it has meanwhile."""


class Wanted(NamedTuple):
    """A directory that an operation needs."""

    ino: Ino
    bits: int
    """Of `CHANGE`."""
    becomes: LowerPath | None = None
    """Where it lies afterwards, if the operation moves it."""


class ShutDirectories:
    """Opens them, and shuts them again."""

    def __init__(self, parts: DrainParts) -> None:
        """Loads what an earlier worker has left open."""
        self._parts = parts
        self._lower = parts.lower
        self._state = parts.state
        self._lock = parts.lock
        self._state.create(DDL)
        self._opened: dict[LowerPath, _Opened] = {
            tuple(path.split(b"/")) if path else (): _Opened(*numbers)
            for path, *numbers in self._state.rows(
                "SELECT path, number, mode, opened FROM opened_directory"
            )
        }

    def carry_out(self, action: Callable[[], T], directories: Callable[[], Iterable[Wanted]]) -> T:
        """Do it, and where it is refused once more with the directories open.

        `directories`: those in which it changes names, or reaches them; not those above these.

        Raises:
            OSError: what `action` raised last.
        """
        try:
            return action()
        except PermissionError as error:
            try:
                if error.errno != errno.EACCES or not self._open(directories()):
                    raise
                return action()
            finally:
                self.shut()

    # -- opening

    def _open(self, directories: Iterable[Wanted]) -> bool:
        """Whether one was opened."""
        bits: dict[Ino, int] = {}
        becomes: dict[Ino, LowerPath] = {}
        for wanted in directories:
            for above in self._above(wanted.ino):
                bits[above] = bits.get(above, 0) | ENTER
            bits[wanted.ino] = bits.get(wanted.ino, 0) | wanted.bits
            if wanted.becomes is not None:
                becomes[wanted.ino] = wanted.becomes
        # all are tried, each may be what refused; those at the top first, else none below is
        # reached
        order = sorted(bits, key=lambda ino: len(self._above(ino)))
        found = [self._open_one(ino, bits[ino], becomes.get(ino)) for ino in order]
        return any(found)

    def _above(self, directory: Ino) -> list[Ino]:
        """Those that it lies in, but for the top."""
        found: list[Ino] = []
        with self._lock:
            while places := self._parts.tree.places(directory):
                directory = places[0][0]
                if directory == ROOT:
                    break
                found.append(directory)
        return found

    def _open_one(self, directory: Ino, bits: int, becomes: LowerPath | None) -> bool:
        with self._lock:
            path = self._parts.tree.path(directory)
            ours = self._own_mode(directory)
        if path is None or ours is None:
            return False
        try:
            st = self._lower.lstat(path)
        except PermissionError:
            return False  # one above it stays shut
        mode = stat.S_IMODE(st.mode)
        if mode & bits == bits or not _may_be_opened(st) or (mode ^ ours) & stat.S_IRWXU:
            return False
        opened = mode | bits
        with self._lock:
            # where it will lie, too: who shuts it does not know whether it was moved
            for at in {path, path if becomes is None else becomes}:
                self._opened[at] = _Opened(st.ino, mode, opened)
                self._state.change(
                    "INSERT OR REPLACE INTO opened_directory VALUES (?, ?, ?, ?)",
                    (b"/".join(at), st.ino, mode, opened),
                )
            self._state.must_commit()  # before it is open: else nobody would know how it was
        self._lower.apply(path, Metadata(permissions=opened))
        return stat.S_IMODE(self._lower.lstat(path).mode) == opened

    def _own_mode(self, directory: Ino) -> int | None:
        """The permission bits that it has there as far as this mount knows; None: not known.

        Others' changes are not taken over while something is pending in a directory: so one that
        was shut from outside since the application's call shows other bits.
        """
        for op in self._parts.log.pending_of(directory):
            if op.sets_rights and not op.committed:
                return op.former_permissions
        return self._parts.listener.permissions_of(directory)

    # -- shutting

    def shut(self) -> None:
        """Give back what was taken; where that fails, it is tried again before the next
        operation.
        """
        # those below first: once one above is shut they are not reached any more
        for path, opened in sorted(self._opened.items(), key=lambda one: -len(one[0])):
            try:
                self._shut_one(path, opened)
            except OSError as error:
                _log.warning(
                    "a directory that was opened for an operation could not be shut again; will "
                    "be retried",
                    path=shown(b"/".join(path)),
                    permissions=f"{opened.mode:o}",
                    error=error.strerror,
                )
            else:
                self.forget(path)

    def _shut_one(self, path: LowerPath, opened: _Opened) -> None:
        st = self._parts.look(path)
        if st is None or st.ino != opened.number or stat.S_IMODE(st.mode) != opened.opened:
            return  # others have changed it since
        self._lower.apply(path, Metadata(permissions=opened.mode))
        if stat.S_IMODE(self._lower.lstat(path).mode) == opened.opened:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    def forget(self, path: LowerPath) -> None:
        """It is not to get back what it had: it has it, or something newer."""
        if path in self._opened:
            with self._lock, self._state.step():
                del self._opened[path]
                self._state.change(
                    "DELETE FROM opened_directory WHERE path = ?", (b"/".join(path),)
                )


def _may_be_opened(st: LowerStat) -> bool:
    """Whether this process can give it other permission bits, and the same ones again."""
    if not stat.S_ISDIR(st.mode) or st.uid != os.geteuid():
        return False
    # who is not in the group loses set-gid with any change of the mode, for good
    return not st.mode & stat.S_ISGID or st.gid in {os.getegid(), *os.getgroups()}
