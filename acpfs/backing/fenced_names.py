"""Changes of names that a fence stops: each system call has this term's staging directory at one
end, so it fails when a later term has removed that, however late it comes (`backing.terms`).

For logs that another member may take over; nothing uses it yet. What is removed goes to the staging
directory first, under a name that the caller chooses and finds again after a crash: one operation
has one. There it is looked at, and put back if it is somebody else's. Every method may be called
again after it was cut off anywhere. Keeps nothing; every method may block.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath, LowerStat

IsOurs = Callable[[LowerStat], bool]


class FencedNames:
    """Over one backing directory."""

    def __init__(self, directory: BackingDirectory) -> None:
        self._directory = directory

    def remove(self, path: LowerPath, aside: str, is_ours: IsOurs) -> str:
        """Take a name away, of anything but a directory; returns the staging name of what it was
        of, which the caller has removed when it likes.

        Raises:
            OSError: ENOENT; ESTALE where it is somebody else's by now: it is back in its place.
        """
        moved = self._set_aside(path, aside)
        found = self._directory.lstat(moved)
        if stat.S_ISDIR(found.mode):
            self._put_back(moved, path, found)
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not is_ours(found):
            self._put_back(moved, path, found)
            raise OSError(errno.ESTALE, "somebody has put something else there")
        return self._name_of(path, aside)

    def remove_directory(self, path: LowerPath, aside: str) -> None:
        """Take an empty directory away. It is looked whether it is empty when it has no place any
        more where somebody could make something in it by its path.

        Raises:
            OSError: ENOENT; ENOTEMPTY, ENOTDIR: it is back in its place.
        """
        moved = self._set_aside(path, aside)
        found = self._directory.lstat(moved)
        try:
            self._directory.rmdir(moved)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                self._put_back(moved, path, found)
            raise

    def rename(self, source: LowerPath, target: LowerPath, aside: str) -> str:
        """Move a file or a directory, over what is at `target`, which is no name of the same file.
        A file has both names in between; a directory has neither for a moment.

        Returns the staging name of a file's old name, which the caller has removed; "": none.
        """
        staged = self._path(target, aside + "-to")
        if not self._is_one(source, target):  # else it was cut off after the second step
            if not self._is_aside(target, aside + "-to"):
                self._begin(source, staged)
            self._directory.rename(staged, target)
        if self._is_one(source, target):
            self._set_aside(source, aside)
        return self._name_of(source, aside) if self._is_aside(source, aside) else ""

    def _begin(self, source: LowerPath, staged: LowerPath) -> None:
        found = self._directory.lstat(source)
        if stat.S_ISDIR(found.mode) or not self._directory.features.hard_links:
            self._directory.rename(source, staged)
        else:
            self._directory.link(source, staged)

    def exchange(self, a: LowerPath, b: LowerPath, aside: str) -> None:
        """Swap two names, in four renames; goes on where it was cut off, which it knows by what
        lies aside.
        """
        of_a = self._path(a, aside + "-a")
        of_b = self._path(b, aside + "-b")
        has_a = self._is_aside(a, aside + "-a")
        has_b = self._is_aside(b, aside + "-b")
        if not has_a and not has_b:
            self._directory.rename(a, of_a)
        if not has_b and not self._is_there(a):
            self._directory.rename(b, of_b)
            has_b = True
        if has_b:
            self._directory.rename(of_b, a)
        self._directory.rename(of_a, b)

    # -- the staging directory's end

    def _name_of(self, path: LowerPath, aside: str) -> str:
        return self._directory.stage_near(aside, path[:-1])

    def _path(self, path: LowerPath, aside: str) -> LowerPath:
        return self._directory.staging_path(self._name_of(path, aside))

    def _is_aside(self, path: LowerPath, aside: str) -> bool:
        return self._directory.is_staged(self._name_of(path, aside))

    def _is_there(self, path: LowerPath) -> bool:
        try:
            self._directory.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _is_one(self, a: LowerPath, b: LowerPath) -> bool:
        try:
            return self._directory.lstat(a).ino == self._directory.lstat(b).ino
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _set_aside(self, path: LowerPath, aside: str) -> LowerPath:
        """What lies aside was moved there before this was cut off."""
        moved = self._path(path, aside)
        if not self._is_aside(path, aside):
            self._directory.rename(path, moved)
        return moved

    def _put_back(self, moved: LowerPath, path: LowerPath, found: LowerStat) -> None:
        """Where the name is somebody's again, what was moved stays aside: nothing is replaced."""
        if self._is_there(path):
            raise OSError(errno.EEXIST, "moved aside, and its name was taken meanwhile")
        if stat.S_ISDIR(found.mode) or not self._directory.features.hard_links:
            self._directory.rename(moved, path)
            return
        self._directory.link(moved, path)
        self._directory.unlink(moved)
