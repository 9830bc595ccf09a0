"""What other members have written into a directory that is moved aside: it belongs to the one that
takes its place.

The guard leaves a checkpoint that was deleted here where it is, and moves it aside when it is made
again under the same name. Another node may have written its part of the new one by then, into the
old directory, since that is what lies there. So after the move, what is there and was not deleted
here goes on to the new directory: moved first and looked at then, so that nothing is written there
in between. Called in the commit thread; may be done again at any point.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from acpfs.backing.lower import Lower, LowerPath, LowerStat
from acpfs.logger import get_logger, shown
from acpfs.types import Ino
from acpfs.writeback.commits.conflicts import Conflicts
from acpfs.writeback.log.ops import Metadata
from acpfs.writeback.parts import DrainParts

MODE = 0o755
"""Of a directory that is made ahead of its MKDIR, which gives it its own, or again after others
removed it: what it had is not known.
"""
BARE_MODE = 0o700
"""Of one that has only just been made (`Lower.mkdir`)."""

_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})
_NO_LINK = frozenset(
    {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
)
_log = get_logger(__name__)


class GivenBack:
    """Moves what is foreign."""

    def __init__(self, parts: DrainParts, conflicts: Conflicts) -> None:
        self._parts = parts
        self._lower = parts.lower
        self._conflicts = conflicts
        self._begun: set[LowerPath] = set()

    def give(self, directory: Ino, kept: LowerPath, to: LowerPath) -> None:
        """`directory` lies at `kept` now; what is not its own goes to `to`, but for names that are
        taken there.

        Raises:
            OSError: the backing directory refuses; what was moved stays moved.
        """
        todo = [(directory, kept, to)]
        while todo:
            directory, kept, to = todo.pop()
            moved = False
            for entry in self._lower.listdir(kept):
                source = (*kept, entry.name)
                target = (*to, entry.name)
                place = (directory, entry.name)
                st = self._lower.lstat(source)
                if self._conflicts.is_foreign(place, st):
                    moved = self._move(source, target, st) or moved
                elif stat.S_ISDIR(st.mode):
                    below = self._parts.node_at(place)
                    assert below is not None
                    todo.append((below, source, target))
            if moved:
                self._lower.sync_directory(to)
                self._lower.sync_directory(kept)

    def _move(self, source: LowerPath, target: LowerPath, st: LowerStat) -> bool:
        try:
            try:
                self._put(source, target, st)
            except FileNotFoundError:
                end_directories(self._lower, self._begun)
                for made in make_directories(self._lower, target[:-1], self._begun):
                    self._lower.sync_directory(made[:-1])
                self._put(source, target, st)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            _log.warning(
                "another node wrote this into a checkpoint that was deleted here: its name is "
                "taken",
                path=shown(source),
            )
            return False
        _log.info(
            "another node wrote this into a checkpoint that was deleted here: it goes to the new "
            "one",
            path=shown(target),
        )
        return True

    def _put(self, source: LowerPath, target: LowerPath, st: LowerStat) -> None:
        """Never over what another member puts there at this moment: a link replaces nothing.

        Where there are none, a look has to do.
        """
        if stat.S_ISDIR(st.mode) or not self._link(source, target, st):
            self._expect_nothing_at(target)
            self._lower.rename(source, target)
        else:
            self._lower.unlink(source)

    def _link(self, source: LowerPath, target: LowerPath, st: LowerStat) -> bool:
        """Whether both names are the file's now; False where it may not be linked (another user's,
        without privilege; no hard links).
        """
        if not self._lower.features.hard_links:
            return False
        try:
            self._lower.link(source, target)
        except FileExistsError:
            if (
                self._lower.lstat(target).ino != st.ino
            ):  # linked before an earlier attempt was cut off
                raise
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            return False
        return True

    def _expect_nothing_at(self, path: LowerPath) -> None:
        if self._parts.look(path) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def make_directories(lower: Lower, path: LowerPath, begun: set[LowerPath]) -> list[LowerPath]:
    """Make what is missing of a path; returns what was made.

    `begun`: what is there, or may be, and has not got its mode: `end_directories` gives it, as a
    later call finds it there.
    """
    made = []
    for depth in range(1, len(path) + 1):
        place = path[:depth]
        is_begun = place in begun
        begun.add(place)
        try:
            lower.mkdir(place)
        except FileExistsError:
            if not is_begun:
                begun.discard(place)
            continue
        lower.apply(place, Metadata(permissions=MODE))
        begun.discard(place)
        made.append(place)
    return made


def end_directories(lower: Lower, begun: set[LowerPath]) -> None:
    """Give their mode to those that did not get it as they were made.

    Raises:
        OSError: the backing directory refuses; the next call tries again.
    """
    for place in sorted(begun):
        with contextlib.suppress(FileNotFoundError):
            # whoever else has made it meanwhile has given it a mode
            if stat.S_IMODE(lower.lstat(place).mode) == BARE_MODE:
                lower.apply(place, Metadata(permissions=MODE))
        begun.discard(place)
