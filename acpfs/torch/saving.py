"""`save`: what `torch.save` does, with several threads and a faster checksum.

torch pickles and lays the archive out (`skeleton`); storages are copied from where they are,
window by window, and hashed on the way. The directory of the archive comes last: until then no
reader takes the file for whole, as with torch's own. The file has torch's name, flags and mode from
the beginning; nothing is renamed.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import pickle
import stat
import struct
from collections.abc import Iterator
from typing import Any

import torch

from acpfs.torch.archive import CRC_BYTES, Archive
from acpfs.torch.crc import crc32, joined
from acpfs.torch.mounted_paths import lies_in_mount
from acpfs.torch.originals import has_skeletons, is_ordinary, original_save, skips_data
from acpfs.torch.side_by_side import side_by_side, usable_threads
from acpfs.torch.skeleton import skeleton
from acpfs.torch.storage_bytes import Bringer, StorageBytes

WINDOW_BYTES = 2 << 20
"""What is hashed is written while it is in the processor's cache; also a huge page."""
DEVICE_WINDOW_BYTES = 16 << 20
"""Smaller copies from a device pay more for their beginning than for their bytes."""
PIECES_MAX = 16
"""Of one pwritev(2): many small ones cost more there than to be put together first."""
POSITIONAL = ("pickle_module", "pickle_protocol", "_use_new_zipfile_serialization")


class ArchiveWriteError(OSError, RuntimeError):
    """The file could not be written; torch's own error is a RuntimeError, and has no number."""


def save(obj: object, f: Any, *arguments: Any, **options: Any) -> None:
    """Save `obj` to the path `f`, with the bytes that `torch.save` would have written there.

    Takes all that `torch.save` takes; what is not a path in a mount of acpfs, the zip format and
    Python's own pickle is handed on to it before anything was written.

    Raises:
        ArchiveWriteError: the file could not be written. It is empty then; torch leaves a part.
    """
    if not (_is_usual(arguments, options) and _is_ours(f)):
        original_save(obj, f, *arguments, **options)
        return
    given = dict(zip(POSITIONAL, arguments, strict=False)) | options
    try:
        with skeleton(obj, os.path.basename(f), given) as (archive, storages):
            plan = ArchiveWriting(archive, StorageBytes(storages))
            fd = os.open(f, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    except Exception:  # noqa: BLE001 - torch says what is wrong, if anything is
        original_save(obj, f, *arguments, **options)
    else:
        plan.write(fd, os.fspath(f))


def _is_usual(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    given = dict(zip(POSITIONAL, arguments, strict=False)) | options
    return (
        len(arguments) <= len(POSITIONAL)
        and given.get("pickle_module", pickle) is pickle
        and given.get("_use_new_zipfile_serialization", True) is True
        and not given.get("_disable_byteorder_record", False)
        and has_skeletons()
        and not skips_data()
        and is_ordinary()
    )


def _is_ours(f: Any) -> bool:
    """Whether it is a path in a mount, of what is a plain file or nothing yet."""
    path = os.fspath(f) if isinstance(f, str | os.PathLike) else None
    # torch writes other names of archives where a path is not ASCII
    if not isinstance(path, str) or not path.isascii() or not os.path.basename(path):
        return False
    try:
        return lies_in_mount(path) and _is_plain(path)
    except Exception:  # noqa: BLE001 - a symlink in a circle: torch's own error
        return False


def _is_plain(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return True


class ArchiveWriting:
    """One archive on its way into a file."""

    def __init__(
        self, archive: Archive, storages: StorageBytes, threads: int | None = None
    ) -> None:
        """Raises: NoWayError: a device has no way to here."""
        self._archive = archive
        self._window = WINDOW_BYTES if storages.are_here else DEVICE_WINDOW_BYTES
        self._windows = range(0, archive.tail_at, self._window)
        count = min(threads or usable_threads(), max(1, len(self._windows) // 2))
        self._bringers = [storages.bringer(self._window) for _ in range(count)]
        self._ends = [part.end for part in archive.parts]
        self._sums: dict[str, list[tuple[int, int, int]]] = {}
        """Of each storage (begin, CRC32, bytes) of its pieces."""
        self._places = archive.crc_places()
        """Of checksums that are not in the file yet."""
        self._has_sums = _torch_makes_sums()
        for key in self._places:
            self._sums[key] = []

    def write(self, fd: int, path: str) -> None:
        """Everything, and close `fd`.

        Raises:
            ArchiveWriteError: it could not be.
        """
        try:
            try:
                workers = [functools.partial(self._put, fd, bringer) for bringer in self._bringers]
                side_by_side(workers, self._windows)
                self._finish(fd)
            except BaseException:
                # windows are not written in order: an empty file is what every reader refuses
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)
                raise
            finally:
                os.close(fd)
        except OSError as error:
            raise ArchiveWriteError(error.errno, error.strerror, path) from error

    def _put(self, fd: int, bringer: Bringer, begin: int) -> None:
        """Bring, hash and write a window."""
        end = min(begin + self._window, self._archive.tail_at)
        pieces = list(self._pieces(bringer, begin, end))
        bringer.wait()
        if self._has_sums:
            for number, start, view in pieces:
                if self._archive.parts[number].key:
                    self._hash(number, start, view, end)
        _write_all(fd, [view for _, _, view in pieces], begin)

    def _pieces(
        self, bringer: Bringer, begin: int, end: int
    ) -> Iterator[tuple[int, int, memoryview]]:
        """(number of the part, where in it, bytes) of a window, in order."""
        for number in range(bisect.bisect_right(self._ends, begin), len(self._ends)):
            part = self._archive.parts[number]
            if part.begin >= end:
                break
            first = max(part.begin, begin)
            start = first - part.begin
            length = min(part.end, end) - first
            if part.key:
                yield number, start, bringer.bring(part.key, start, length, first - begin)
            else:
                yield number, start, memoryview(part.text)[start : start + length]

    def _hash(self, number: int, start: int, view: memoryview, end: int) -> None:
        """Of a piece of a storage; where it is all of it, its checksum goes into this window."""
        part = self._archive.parts[number]
        crc = crc32(view)
        self._sums[part.key].append((start, crc, len(view)))
        place = self._places[part.key]
        # what is behind a storage is the skeleton's, and no other window has this piece of it
        if len(view) == part.end - part.begin and place + CRC_BYTES <= end:
            text = self._archive.parts[number + 1]
            struct.pack_into("<I", text.text, place - text.begin, crc)
            del self._places[part.key]

    def _finish(self, fd: int) -> None:
        """Checksums where they belong, and the directory."""
        if self._has_sums:
            totals = {}
            for key, pieces in self._sums.items():
                totals[key] = joined((crc, length) for _, crc, length in sorted(pieces))
            for key, place in self._places.items():
                _write_all(fd, [memoryview(struct.pack("<I", totals[key]))], place)
            self._archive.finish(totals)
        _write_all(fd, [memoryview(self._archive.tail)], self._archive.tail_at)


def _torch_makes_sums() -> bool:
    """Unless somebody has told it not to (`torch.serialization.set_crc32_options`)."""
    asked = getattr(torch.serialization, "get_crc32_options", None)
    return asked is None or bool(asked())


def _write_all(fd: int, views: list[memoryview], at: int) -> None:
    """pwritev(2) until nothing is left."""
    left = views if len(views) <= PIECES_MAX else [memoryview(b"".join(views))]
    while left:
        count = os.pwritev(fd, left, at)
        at += count
        while left and count >= len(left[0]):
            count -= len(left[0])
            left = left[1:]
        if count:
            left = [left[0][count:], *left[1:]]
