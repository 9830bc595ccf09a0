"""Verification: hash files on the backing directory and compare with what was recorded when they
were stored.

Blocks on the backing directory; run it on a thread. Takes the file system's lock only to look into
the manifest.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import RLock
from typing import Protocol

from acpfs.backing.lower import Lower, LowerPath
from acpfs.checksum import of_reads
from acpfs.drain_records import Verification
from acpfs.runtime.threads import Threads
from acpfs.writeback.evidence import absence

BUFFER_BYTES = 4 << 20
STALE_LOOKS_MAX = 6
STALE_AGAIN_S = 0.4
"""Clients of distributed file systems remember names for a second, and answer ESTALE where another
member has put another file.
"""
_GONE = (errno.ENOENT, errno.ENOTDIR)


class Recorded(Protocol):
    """What was recorded; the manifest is that."""

    def digest(self, path: LowerPath) -> str: ...
    def rows(self, below: LowerPath = ()) -> Iterator[tuple[bytes, str, int]]: ...


class MisreadError(OSError):
    """What was written reads back differently."""


class OnlyCopyError(OSError):
    """Bytes that are nowhere else are not there, or fsync of them failed: Linux forgets such pages,
    and says it once.

    https://lwn.net/Articles/752063/
    """


def digest_of(
    lower: Lower, path: LowerPath, progress: Callable[[], None] = lambda: None
) -> tuple[str, int]:
    """xxh3-128 and size of what the backing file system has, not of what is cached of it."""
    fd = lower.open_uncached(path)
    try:
        pages = lower.stat_fd(fd).size // mmap.PAGESIZE + 1
        with (
            mmap.mmap(-1, min(BUFFER_BYTES, pages * mmap.PAGESIZE)) as memory,
            memoryview(memory) as buffer,
        ):
            return of_reads(partial(lower.read, fd), buffer, passed=lambda _count: progress())
    finally:
        lower.close(fd)


class Verifier:
    """Compares the backing directory with what was recorded."""

    def __init__(
        self,
        manifest: Recorded,
        lower: Lower,
        lock: RLock,
        threads: Threads,
        is_moving: Callable[[LowerPath], bool] = lambda _path: False,
    ) -> None:
        """`is_moving`: whether an operation under way takes a path from where it lies; called under
        the lock.
        """
        self._manifest = manifest
        self._lower = lower
        self._lock = lock
        self._is_moving = is_moving
        self._pause = threads.event()

    def verify(self, paths: Iterable[LowerPath] = ()) -> Iterator[Verification]:
        """Files one by one; a directory stands for what was recorded below it and what lies there;
        none: for everything recorded.
        """
        chosen = list(paths)
        if not chosen:
            for key, _digest, _size in self._manifest.rows():
                yield from self._file(_path(key))
        for path in chosen:
            yield from self._below(path)

    def _below(self, path: LowerPath) -> Iterator[Verification]:
        recorded = {key for key, _digest, _size in self._manifest.rows(path)}
        for found in self._walk(path):
            recorded.discard(b"/".join(found))
            yield from self._file(found)
        for key in sorted(recorded):
            yield from self._file(_path(key))

    def _walk(self, path: LowerPath) -> Iterator[LowerPath]:
        todo = [(path, 0)]
        while todo:
            path, kind = todo.pop()
            try:
                mode = kind or self._lower.lstat(path).mode
                entries = self._lower.listdir(path) if stat.S_ISDIR(mode) else []
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                continue
            if stat.S_ISREG(mode):
                yield path
            # what is no directory needs no look of its own
            found = [
                ((*path, e.name), e.mode & stat.S_IFREG)
                for e in entries
                if e.mode in (0, stat.S_IFDIR, stat.S_IFREG)
            ]
            todo += sorted(found, reverse=True)

    def _file(self, path: LowerPath) -> Iterator[Verification]:
        """One verdict, or none about what was deleted or renamed meanwhile.

        A commit may replace the file while it is read: then what was expected has changed too, and
        it is read again. A commit that takes it away does so a moment before its record goes. What
        differs is read once more: a path to the storage can give wrong bytes once.
        """
        is_second = False
        while True:
            with self._lock:
                expected = self._manifest.digest(path)
            outcome = self._compare(path, expected)
            if outcome.status in ("ok", "unknown"):
                break
            with self._lock:
                if self._manifest.digest(path) != expected:
                    continue
                if outcome.status == "missing" and (not expected or self._is_moving(path)):
                    return
            if outcome.status != "mismatch" or is_second:
                break
            is_second = True
        yield outcome

    def _compare(self, path: LowerPath, expected: str) -> Verification:
        name = os.fsdecode(b"/".join(path))
        try:
            found, size = self._digest(path)
            noted = "" if found == expected else self._lower.digest(path)
        except OSError as error:
            status = "missing" if error.errno in _GONE else "unreadable"
            return Verification(name, status, 0, expected or None, None, error.strerror)
        if found == expected or (noted and found == noted):
            return Verification(
                name, "ok", size, found, found
            )  # the file's own note is newer where another member stored it later
        expected = expected or noted
        return Verification(
            name, "mismatch" if expected else "unknown", size, expected or None, found
        )

    def _digest(self, path: LowerPath) -> tuple[str, int]:
        """As `digest_of`; a handle that is stale is none to complain of: the file is gone, or
        another one by now.
        """
        looks = 0
        while True:
            try:
                return digest_of(self._lower, path)
            except OSError as error:
                looks += 1
                if error.errno != errno.ESTALE or looks == STALE_LOOKS_MAX:
                    raise
            if self._is_gone(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._pause.wait(STALE_AGAIN_S)

    def _is_gone(self, path: LowerPath) -> bool:
        try:
            absence.make_sure(self._lower, path)
        except OSError:
            return False
        return True


def _path(key: bytes) -> LowerPath:
    return tuple(key.split(b"/"))
