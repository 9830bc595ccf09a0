"""Files that grow: the version before the last one stays beside, so that the next one is it and
what was appended.

A log of 2 GB that is stored every 30 s would cost 70 MB/s for ever if each version were streamed
whole. So what a version replaces under its name is kept in the staging directory, as a *spare*,
when the version was seen to begin with the same bytes. The next version is made of it: what both
lack is appended, it is flushed, and the commit renames it into place, like any staging file. So two
files take turns, each gets every byte once, and what lies under the name is always whole: there is
nothing that another crash could leave in a new state.

Nobody's word is taken for what a spare has. It has the first bytes of a version if their checksum
in RAM is the one that was noted when they were written (RAM is read whole, the storage is not), and
if it still looks as it was left: inode, size, mtime, no other name. Else it is thrown away, and the
version is streamed. A spare that lay under its name may be written to only when the rename that
replaced it is on stable storage, for until then a crash brings it back there. All this is known to
one worker only. The next one removes spares, and streams the first version whole; but what that
replaces is kept, where the checksum that is noted at the file and its mtime say what it is.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.checksum import Checksum
from acpfs.types import Ino, VersionId
from acpfs.writeback.log.ops import Version
from acpfs.writeback.parts import DrainParts

SPARE_BYTES_MIN = 1 << 20
"""Smaller files cost more for their create and fsync than for their bytes."""
REST_S = 120.0
"""So long after its last version a spare of a file is kept that nobody has open: some programs open
their log for each line.
"""
SWEEP_EVERY_S = 10.0
_PREFIX = "spare-"
_EARLIER = VersionId(-1)
"""Some version of an earlier worker's."""


class NotGrownError(Exception):
    """The version does not begin with what the spare has."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first bytes of a file: how many, and their checksum."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Spare:
    """A file on the backing directory that has the first bytes of what its node was, and perhaps
    is.
    """

    start: Start
    name: str
    """In the staging directory."""
    look: tuple[int, int, int]
    """Inode number, size and mtime (ns), as it was left."""
    after: VersionId
    """It may be used when this version, which replaced it, is persisted; 0: now."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What was put under a node's name last."""

    vid: VersionId
    start: Start
    look: tuple[int, int, int]


class Growth:
    """What a version is compared with while it is read."""

    def __init__(self, spare: Spare | None = None, shown: Start | None = None) -> None:
        """`spare`: the file that the version is appended to; `shown`: what lies under its name."""
        self.spare = spare
        self.kept_bytes = 0 if spare is None else spare.start.size
        """So many are there already."""
        self.has_grown = False
        """The version begins with what lies under its name."""
        self._shown = shown

    def until(self, position: int, size: int) -> int:
        """How far to read from a position on before `passed` is called."""
        sizes = (
            [self.kept_bytes, size]
            if self._shown is None
            else [self.kept_bytes, self._shown.size, size]
        )
        return min(one for one in sizes if one > position)

    def passed(self, position: int, hasher: Checksum) -> None:
        """The checksum of the bytes up to here is known.

        Raises:
            NotGrownError: they are not those of the spare.
        """
        if self._shown is not None and position == self._shown.size:
            self.has_grown = hasher.hexdigest() == self._shown.digest
        if (
            self.spare is not None
            and position == self.kept_bytes
            and hasher.hexdigest() != self.spare.start.digest
        ):
            raise NotGrownError


def look_of(st: LowerStat) -> tuple[int, int, int]:
    """What tells whether somebody wrote to a file.

    Not its ctime: names that it gets and loses change that.
    """
    return (st.ino, st.size, st.mtime_ns)


class Spares:
    """Keeps them, one per node at most.

    `take`, `open` and `give_back` are for stream threads, `keep` and `shown` for the commit thread.
    """

    def __init__(
        self, parts: DrainParts, remove: Callable[[str], None], *, reuses_given_up: bool
    ) -> None:
        """`remove`: has a staging file removed, on another thread. `reuses_given_up`: whether a
        version that was given up may become a spare.
        """
        self._reuses_given_up = reuses_given_up
        self._lower = parts.lower
        self._lock = parts.lock
        self._is_open = parts.listener.version_of_open_file
        self._remove = remove
        self._clock = parts.runtime.clock.now
        self._chance = parts.runtime.chance
        self._spares: dict[Ino, Spare] = {}
        self._shown: dict[Ino, _Shown] = {}
        self._staged: dict[VersionId, tuple[Spare, VersionId]] = {}
        """Versions that are staged, as the spares that they become if they are given up, and what
        each was seen to go on from.
        """
        self._used: dict[Ino, tuple[Version, float]] = {}
        """The last version that was committed, and when."""

    # -- streams

    def recall(self, version: Version, path: LowerPath) -> None:
        """What an earlier worker put there is what the version goes on from, if its note holds, and
        if it does (`Growth`).
        """
        with self._lock:
            if version.size < SPARE_BYTES_MIN or version.ino in self._shown:
                return
        try:
            note = self._lower.note(path)
            st = self._lower.lstat(path)
        except OSError:  # nothing is lost but time
            return
        if note is None or not note.is_about(st, self._lower.features.time_granularity_ns):
            return
        if SPARE_BYTES_MIN <= st.size <= version.size:
            with self._lock:
                self._shown.setdefault(
                    version.ino, _Shown(_EARLIER, Start(st.size, note.digest), look_of(st))
                )
                self._used.setdefault(version.ino, (version, self._clock()))

    def take(self, version: Version) -> Growth:
        """What to compare the version with, and to append it to; it is the caller's from here
        on.
        """
        with self._lock:
            shown = self._shown.get(version.ino)
            spare = self._spares.get(version.ino)
            if spare is None or spare.after or spare.start.size > version.size:
                spare = None
            else:
                del self._spares[version.ino]
        return Growth(spare, None if shown is None else shown.start)

    def open(self, spare: Spare) -> int:
        """Read-write descriptor of a spare.

        Raises:
            OSError: it cannot be used.
        """
        fd = self._lower.open_staging(spare.name)
        st = self._lower.stat_fd(fd)
        if look_of(st) != spare.look or st.nlink != 1:
            self._lower.close(fd)
            raise OSError(errno.ESTALE, "somebody has changed it")
        return fd

    def staged(self, version: Version, growth: Growth, st: LowerStat) -> None:
        """The version has its staging file. Under the lock."""
        if version.size >= SPARE_BYTES_MIN:
            shown = self._shown.get(version.ino)
            before = shown.vid if shown is not None and growth.has_grown else VersionId(0)
            spare = Spare(
                Start(version.size, version.digest), version.staging_name, look_of(st), VersionId(0)
            )
            self._staged[version.vid] = spare, before

    # -- commits

    def keep(self, version: Version, path: LowerPath) -> None:
        """The version is about to be put in the place of what lies at a path: have that beside if
        the version goes on from it.
        """
        with self._lock:
            shown = self._shown.get(version.ino)
            before = self._staged[version.vid][1] if version.vid in self._staged else 0
            present = self._spares.get(version.ino)
        if shown is None or before != shown.vid:
            return
        # A spare is written to: it must be known that nothing else is a name of it.
        if not (self._lower.features.hard_links and self._lower.features.link_counts):
            return
        if version.size >= 2 * shown.start.size:
            # it is no log that has become twice as long since, and what a spare saves is less than
            # the room that it takes
            return
        if present is not None and present.start.size >= shown.start.size:
            return
        try:
            name = self._lower.stage_near(
                f"{_PREFIX}{version.vid}-{self._chance.token(6)}", path[:-1]
            )
        except OSError:
            return
        spare = Spare(shown.start, name, shown.look, version.vid)
        try:
            st = self._lower.lstat(path)
            if look_of(st) != shown.look or st.nlink != 1:
                return
            self._lower.link(path, self._lower.staging_path(spare.name))
        except OSError:
            self._remove(spare.name)  # it may have been made all the same
            return
        with self._lock:
            self._put(version.ino, spare)

    def shown(self, version: Version, st: LowerStat) -> None:
        """The version lies under its name. Under the lock."""
        self._staged.pop(version.vid, None)
        if version.size >= SPARE_BYTES_MIN:
            self._shown[version.ino] = _Shown(
                version.vid, Start(version.size, version.digest), look_of(st)
            )
            self._used[version.ino] = version, self._clock()
        else:
            self._shown.pop(version.ino, None)

    def persisted(self, version: Version) -> None:
        """And it will be there after a crash, too. Under the lock."""
        spare = self._spares.get(version.ino)
        if spare is not None and spare.after == version.vid:
            self._spares[version.ino] = replace(spare, after=VersionId(0))

    # -- ends

    def give_back(self, ino: Ino, spare: Spare) -> None:
        """The version that was to be made of it is not wanted any more: it is to be what it was.

        Raises:
            OSError: it is not.
        """
        fd = self._lower.open_staging(spare.name)
        try:
            self._lower.truncate(fd, spare.start.size)
            look = look_of(self._lower.stat_fd(fd))
        finally:
            self._lower.close(fd)
        with self._lock:
            self._put(ino, replace(spare, look=look))

    def given_up(self, version: Version | None) -> bool:
        """The version will never lie under its name.

        Whether its staging file is a spare now, as that of a log is. Under the lock.
        """
        if version is None:
            return False
        spare = self._spares.get(version.ino)
        if spare is not None and spare.after == version.vid:
            del self._spares[version.ino]  # it still lies there itself, or may come back
            self._remove(spare.name)
        staged, before = self._staged.pop(version.vid, (None, 0))
        if (
            staged is None
            or not before
            or staged.name != version.staging_name
            or version.ino not in self._shown
            or not self._reuses_given_up
        ):
            return False
        self._put(version.ino, staged)
        return True

    def _put(self, ino: Ino, spare: Spare) -> None:
        """Of two the longer one is worth more."""
        if ino not in self._used:
            self._remove(spare.name)  # let go of meanwhile
            return
        present = self._spares.get(ino)
        worse = spare if present is not None and present.start.size > spare.start.size else present
        if worse is not None:
            self._remove(worse.name)
        if worse is not spare:
            self._spares[ino] = spare

    def sweep(self) -> float:
        """Let go of what nobody goes on writing; returns in how many seconds to come again."""
        with self._lock:
            long_ago = self._clock() - REST_S
            for ino in [
                ino
                for ino, (version, used_at) in self._used.items()
                if used_at < long_ago and not self._is_open(version)
            ]:
                self._forget(ino)
            return SWEEP_EVERY_S if self._used else math.inf

    def let_go(self) -> None:
        """Of all: the room is needed, or it is the end. Under the lock."""
        for ino in list(self._used):
            self._forget(ino)

    def _forget(self, ino: Ino) -> None:
        del self._used[ino]
        self._shown.pop(ino, None)
        spare = self._spares.pop(ino, None)
        if spare is not None:
            self._remove(spare.name)

    def begin(self) -> None:
        """Another run of the engine, which removes what no operation needs. Under the lock."""
        self._spares.clear()
        self._shown.clear()
        self._staged.clear()
        self._used.clear()
