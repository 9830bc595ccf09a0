"""How an entry gets to its place in a directory that others change.

Missing directories above it are made again, what took its name meanwhile is replaced at one
instant, and a storage that answered wrongly is found out. Knows neither the order of operations nor
what is recorded of them, but for the staging file of a version. Each method calls the backing
directory, in the commit thread or in one for flushes while no commit is under way, and may be
repeated after a crash.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.writeback.commits.given_back import end_directories, make_directories
from acpfs.writeback.evidence import absence
from acpfs.writeback.log.ops import Op, OpKind, Version
from acpfs.writeback.parts import DrainParts
from acpfs.writeback.streams.equal import is_as_noted


class StagingLostError(Exception):
    """The staging file is gone and was not renamed into place: the version must be streamed
    again.
    """


class Placing:
    """See above."""

    def __init__(self, parts: DrainParts) -> None:
        self._parts = parts
        self._lower = parts.lower
        self._log = parts.log
        self._state = parts.state
        self._lock = parts.lock
        self.has_made_parents = False
        """Directories were made again whose own names no group has flushed since."""
        self._begun: set[LowerPath] = set()

    def repaired(self) -> None:
        """Something that others did was put right."""
        with self._lock:
            self._parts.counters.repairs += 1

    # -- directories above it

    def with_parents(self, target: LowerPath, action: Callable[[], None]) -> None:
        """Do something that makes `target`; make its directories again if they are gone."""
        try:
            action()
        except FileNotFoundError:
            if not self.make_parents(target):
                raise
            action()

    def end_parents(self) -> None:
        """Those that did not get their mode as they were made: what comes into them finds them
        there, and asks no more.

        Raises:
            OSError: the backing directory refuses.
        """
        end_directories(self._lower, self._begun)

    def make_parents(self, path: LowerPath) -> bool:
        """Make what is missing above `path`; False when nothing was."""
        made = make_directories(self._lower, path[:-1], self._begun)
        if made:
            self.has_made_parents = True
            self.repaired()
        return bool(made)

    # -- what is made without a staging file

    def make(self, op: Op, path: LowerPath) -> None:
        """The directory, symlink or special file that the operation makes."""
        if op.kind is OpKind.MKDIR:
            self._lower.mkdir(path)
        elif op.kind is OpKind.SYMLINK:
            self._lower.symlink(op.payload, path)
        else:
            # without a type mknod(2) makes a regular file
            assert op.meta.file_type, op
            # group and others have to wait for owner and ACL, which come next
            mode = op.meta.file_type | (op.meta.permissions or 0) & 0o700
            self._lower.mknod(path, mode, op.meta.rdev)

    def is_made(self, op: Op, path: LowerPath) -> bool:
        """Whether what lies there is that."""
        present = self._lower.lstat(path)
        if op.kind is OpKind.MKDIR:
            return stat.S_ISDIR(present.mode)
        if op.kind is OpKind.SYMLINK:
            return stat.S_ISLNK(present.mode) and self._lower.readlink(path) == op.payload
        return stat.S_IFMT(present.mode) == op.meta.file_type and present.rdev == op.meta.rdev

    def put_in_place(self, op: Op, target: LowerPath) -> None:
        """Make an entry under a name that another has taken from outside: beside it first, then
        over it.
        """
        self.put_over(f"entry-{op.seq}", target, lambda path: self.make(op, path))
        self.repaired()

    def put_over(self, name: str, target: LowerPath, make: Callable[[LowerPath], None]) -> None:
        """Make something under a name of the staging directory, and rename it into place."""
        path = self._lower.staging_path(staging := self._lower.stage_near(name, target[:-1]))
        self._lower.remove_staging(staging)
        make(path)
        self.with_parents(target, lambda: self._lower.rename(path, target))

    # -- files

    def put_version(self, version: Version, target: LowerPath) -> LowerPath:
        """Rename the staging file into place; returns where it was staged.

        Raises:
            StagingLostError: it is gone.
        """
        staging = self._lower.staging_path(version.staging_name)
        try:
            return self._rename_staged(version, target)
        except FileNotFoundError:
            self._put_again(version, staging, target)
            return staging

    def shorten_staged(self, version: Version, staging: LowerPath) -> bool:
        """Cut off what was staged behind the version's end; whether there was anything.

        It was read again before it was staged, and got what was written behind a later one (X11);
        that half was discarded since, and the version shortened. RAM may have been lost since: then
        this is all that there is of it.
        """
        if version.digest:  # nobody wrote to it
            return False
        st = self._parts.look(staging)
        if st is None or st.size <= version.size:
            return False
        fd = self._lower.open_staging(version.staging_name)
        try:
            self._lower.truncate(fd, version.size)
            self._lower.sync(fd)
        finally:
            self._lower.close(fd)
        return True

    def _rename_staged(self, version: Version, target: LowerPath) -> LowerPath:
        """See `put_version`.

        What did not fit into RAM is staged before it has a place, and directories move: then it
        lies on another file system, and is copied. The copy is what the version is staged as before
        it is renamed: who comes after a crash knows it by its number. What it was made of is
        removed last, for it may be all that there is of the file.
        """
        before = version.staging_name
        staging = self._lower.staging_path(before)
        try:
            self._lower.rename(staging, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        else:
            return staging
        self._stage_as(version, self._lower.bring_near(before, target))
        staging = self._rename_staged(version, target)
        self._lower.remove_staging(before)
        return staging

    def _stage_as(self, version: Version, name: str) -> None:
        number = self._lower.lstat(self._lower.staging_path(name)).ino
        with self._lock:
            before = version.staging_name
            version.staging_name = name
            version.staging_ino = number
            self._parts.listener.restaged(version, before)
            self._log.save_version(version)
            # before the earlier staging file goes: a next worker would look for that one
            self._state.must_commit()

    def check_linked(self, version: Version, staging: LowerPath) -> None:
        """That nobody has written into the staging file since; acpfs never does, a native writer
        might.
        """
        with suppress(FileNotFoundError):  # committed before
            if not is_as_noted(self._lower, staging, version.digest, version.size):
                self._lower.remove_staging(version.staging_name)
                raise StagingLostError

    def _put_again(self, version: Version, staging: LowerPath, target: LowerPath) -> None:
        """The rename found nothing: done already, or the directory or the staging file was removed
        from outside.
        """
        if self._parts.look(staging) is not None:
            self.make_parents(target)
            self._lower.rename(staging, target)
            return
        st = self._parts.look(target)
        if st is None or not self.is_version(version, target, st):
            absence.make_sure(self._lower, staging)
            raise StagingLostError

    def is_version(self, version: Version, path: LowerPath, st: LowerStat) -> bool:
        """Whether that is what was staged as the version: number and size, and the checksum that
        was noted at it.

        The number alone may be that of an older one: file systems give that of a removed staging
        file to the next new file (S190).
        """
        if st.ino != version.staging_ino or st.size != version.size:
            return False
        if not version.digest or not self._lower.features.xattrs:
            return True
        note = self._lower.note(path)
        return note is not None and note.digest == version.digest

    def name_of(self, version: Version, names: Iterable[LowerPath]) -> LowerPath:
        """The one of these names at which the version lies.

        Raises:
            StagingLostError: none.
        """
        for name in names:
            st = self._parts.look(name)
            if st is not None and self.is_version(version, name, st):
                return name
        raise StagingLostError

    def add_name(self, op: Op, source: LowerPath, target: LowerPath, ino: int) -> bool:
        """Make `target` a further name of the file at `source`, over whatever it is now; False when
        it is one already.
        """
        present = self._parts.look(target)
        if present is not None and present.ino == ino:
            return False
        self.put_over(f"link-{op.seq}", target, lambda path: self._lower.link(source, path))
        return True

    # -- names

    def move(self, source: LowerPath, target: LowerPath) -> bool:
        """Rename what has a name; False: others have removed it, and there is nothing to move.

        `arrived` says what came of it.
        """
        try:
            self._lower.rename(source, target)
        except FileNotFoundError:
            if self._parts.look(source) is not None:
                self.make_parents(target)
                self._lower.rename(source, target)
            else:
                absence.make_sure(self._lower, source)
                if self._parts.look(target) is None:
                    absence.make_sure(self._lower, target)
                    self.repaired()  # removed from outside: there is nothing to move
                    return False
        return True

    def arrived(self, source: LowerPath, target: LowerPath) -> LowerStat:
        """What lies at the new name.

        Raises:
            OSError: it may have been moved or not.
        """
        st = self._lower.lstat(target)
        self.has_left(source, st)
        return st

    def has_left(self, source: LowerPath, st: LowerStat, moved: int = 0) -> bool:
        """Whether a rename was carried out: the new name may be shown by a cache that believed the
        answer, the old one is looked up anew.

        A GlusterFS client that is changing to another graph answers 0 to renames that it could not
        begin. `moved`: inode number, if known.

        Raises:
            OSError: ESTALE, a passing failure: it was not.
        """
        still = self._parts.look(source)
        if still is None:
            return False
        is_same = still.ino == st.ino  # else the new name shows what it showed before
        has_one_name = stat.S_ISDIR(st.mode) or (
            still.nlink == 1 and self._lower.features.link_counts
        )
        if (is_same and has_one_name) or (not is_same and still.ino == moved):
            raise OSError(errno.ESTALE, "said to be renamed, and still under its old name")
        return is_same
