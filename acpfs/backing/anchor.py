"""The anchor: that the backing directory's descriptor still leads to what lies at its path, and to
the right volume.

A backing file system can be unmounted underneath, its server can die and come back as another
mount, and the bare directory that it was mounted on can show. Only a directory whose
`.acpfs/volume` is ours is ever taken; until then calls fail (and are repeated) or go on through the
old descriptor, which never leads to the bare directory. `look` blocks on the backing directory; one
thread at a time.
"""

from __future__ import annotations

import contextlib
import os

from acpfs.backing.areas import OWN
from acpfs.backing.directory import BackingDirectory
from acpfs.logger import get_logger

VOLUME_BYTES_MAX = 64

log = get_logger(__name__)


class Anchor:
    """See above."""

    def __init__(self, directory: BackingDirectory, volume_id: str) -> None:
        self._directory = directory
        self._volume_id = volume_id
        self.problem = ""
        """What is wrong with what lies at the path, in words; "" for nothing."""
        self.reopened = 0
        """How often another mount of the same volume was taken."""

    def look(self) -> bool:
        """Look, and take a new mount of the same volume; True when that was so.

        Raises:
            OSError: the backing directory's, when neither descriptor nor path can be used.
        """
        held = self._held()
        try:
            fd = os.open(self._directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._found(f"{self._directory.path} cannot be opened ({error.strerror})")
            if held is None:
                raise
            return False
        try:
            if held == _identity(fd):
                self._found("")
                return False
            found = volume_at(fd)
            if found != self._volume_id:
                what = "a directory that acpfs has never used" if not found else "another volume"
                where = (
                    "nothing is drained to it"
                    if held is None
                    else "draining goes on to where it was opened"
                )
                self._found(
                    f"{self._directory.path} shows {what}: is its file system unmounted? {where}"
                )
                return False
            self._directory.reopened(fd)
        finally:
            os.close(fd)
        self._found("")
        self.reopened += 1
        log.warning(
            "the backing directory was mounted anew: its descriptor was opened again",
            backing=os.fspath(self._directory.path),
        )
        return True

    def confirmed(self) -> str:
        """The problem, if there still is one: the last `look` may be seconds old.

        Blocks as that does, and changes nothing.
        """
        if not self.problem:
            return ""
        with contextlib.suppress(OSError):
            fd = os.open(self._directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if self._held() == _identity(fd) or volume_at(fd) == self._volume_id:
                    return ""
            finally:
                os.close(fd)
        return self.problem

    def _held(self) -> tuple[int, int] | None:
        """What the descriptor leads to; None when it leads nowhere any more (server gone, stale
        handle).
        """
        with contextlib.suppress(OSError):
            return _identity(self._directory.descriptor)
        return None

    def _found(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.error("backing directory", problem=problem)
        self.problem = problem


def volume_at(dir_fd: int) -> str:
    """Volume id of a backing directory; "" when it is none."""
    try:
        own = os.open(OWN, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    try:
        fd = os.open(
            "volume", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=own
        )
    except FileNotFoundError:
        return ""
    finally:
        os.close(own)
    try:
        return volume_of(os.read(fd, VOLUME_BYTES_MAX))[0]
    finally:
        os.close(fd)


def volume_of(text: bytes) -> tuple[str, int]:
    """(volume id, version of all that lies below `.acpfs`) as the file `volume` has them: the id,
    and from version 2 on a second line with the version.

    The id is "" where there is none, and the version 0 where the second line is none.
    """
    lines = text.decode("ascii", "replace").split("\n")
    version = lines[1].removeprefix("version ") if any(lines[1:]) else "1"
    return lines[0].strip(), int(version) if version.isdecimal() else 0


def _identity(fd: int) -> tuple[int, int]:
    st = os.fstat(fd)
    return st.st_dev, st.st_ino
