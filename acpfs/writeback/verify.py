"""Verification: hash files on the backing directory and compare with what was recorded when they were stored.

Blocks on the backing directory; run it on a thread. Takes the file system's lock only to look into the manifest.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from threading import RLock
from typing import Protocol

import xxhash

from acpfs.backing.lower import Lower, LowerPath
from acpfs.writeback.records import Verification

BUFFER_BYTES = 4 << 20
_GONE = (errno.ENOENT, errno.ENOTDIR)


class Recorded(Protocol):
    """What was recorded; the manifest is that."""

    def digest(self, path: LowerPath) -> str: ...
    def rows(self, below: LowerPath = ()) -> Iterator[tuple[bytes, str, int]]: ...


class Verifier:
    """Compares the backing directory with what was recorded."""

    def __init__(self, manifest: Recorded, lower: Lower, lock: RLock) -> None:
        self._manifest, self._lower, self._lock = manifest, lower, lock

    def verify(self, paths: Iterable[LowerPath] = ()) -> Iterator[Verification]:
        """Files one by one; a directory stands for what was recorded below it and what lies there; none: for everything recorded."""
        chosen = list(paths)
        if not chosen:
            for key, _digest, _size in self._manifest.rows():
                yield self._file(_path(key))
        for path in chosen:
            yield from self._below(path)

    def _below(self, path: LowerPath) -> Iterator[Verification]:
        recorded = {key for key, _digest, _size in self._manifest.rows(path)}
        for found in self._walk(path):
            recorded.discard(b"/".join(found))
            yield self._file(found)
        for key in sorted(recorded):
            yield self._file(_path(key))

    def _walk(self, path: LowerPath) -> Iterator[LowerPath]:
        try:
            mode = self._lower.lstat(path).mode
            entries = self._lower.listdir(path) if stat.S_ISDIR(mode) else []
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return
        if stat.S_ISREG(mode):
            yield path
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.mode in (0, stat.S_IFDIR):
                yield from self._walk((*path, entry.name))
            elif entry.mode == stat.S_IFREG:
                yield (*path, entry.name)

    def _file(self, path: LowerPath) -> Verification:
        """A commit may replace the file while it is read: then what was expected has changed too, and it is read again."""
        while True:
            expected = self._recorded(path)
            outcome = self._compare(path, expected)
            if outcome.status in ("ok", "unknown") or self._recorded(path) == expected:
                return outcome

    def _recorded(self, path: LowerPath) -> str:
        with self._lock:
            return self._manifest.digest(path)

    def _compare(self, path: LowerPath, expected: str) -> Verification:
        name = PurePosixPath(os.fsdecode(b"/".join(path)))
        try:
            found, size = self._hash(path)
            noted = "" if found == expected else self._lower.digest(path)
        except OSError as error:
            status = "missing" if error.errno in _GONE else "unreadable"
            return Verification(name, expected or None, None, status, 0, error.strerror)
        if found == expected or (noted and found == noted):
            return Verification(name, found, found, "ok", size)  # the file's own note is newer where another node stored it later
        expected = expected or noted
        return Verification(name, expected or None, found, "mismatch" if expected else "unknown", size)

    def _hash(self, path: LowerPath) -> tuple[str, int]:
        fd = self._lower.open_read(path)
        try:
            self._lower.forget_pages(fd)
            hasher, buffer, position = xxhash.xxh3_128(), memoryview(bytearray(BUFFER_BYTES)), 0
            while count := self._lower.read(fd, buffer, position):
                hasher.update(buffer[:count])
                position += count
        finally:
            self._lower.close(fd)
        return hasher.hexdigest(), position


def _path(key: bytes) -> LowerPath:
    return tuple(key.split(b"/"))
