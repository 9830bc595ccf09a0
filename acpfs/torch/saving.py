"""`save`: what `torch.save` does, with several threads and a faster checksum.

torch pickles and lays the archive out (`skeleton`); storages are copied from where they are,
window by window, and hashed on the way. The directory of the archive comes last: until then no
reader takes the file for whole, as with torch's own. The file has torch's name, flags and mode from
the beginning; nothing is renamed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import stat
from collections.abc import Iterator
from typing import Any

from acpfs.torch.archive import Archive
from acpfs.torch.mounted_paths import lies_in_mount
from acpfs.torch.originals import has_skeletons, is_ordinary, original_save, skips_data
from acpfs.torch.side_by_side import side_by_side, usable_threads
from acpfs.torch.skeleton import skeleton
from acpfs.torch.storage_bytes import Bringer, StorageBytes
from acpfs.torch.windows import ArchiveWindows

WINDOW_BYTES = 2 << 20
"""What is hashed is written while it is in the processor's cache; also a huge page."""
DEVICE_WINDOW_BYTES = 16 << 20
"""Smaller copies from a device pay more for their beginning than for their bytes."""
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
    return lies_plainly_in_mount(path)


def lies_plainly_in_mount(path: str) -> bool:
    """Whether a mount has it, and it is a plain file or nothing yet."""
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
        window = window_bytes(storages)
        self._windows = ArchiveWindows(archive, window)
        count = min(threads or usable_threads(), max(1, len(self._windows.begins) // 2))
        self._bringers = [storages.bringer(window) for _ in range(count)]

    def write(self, fd: int, path: str) -> None:
        """Everything, and close `fd`.

        Raises:
            ArchiveWriteError: it could not be.
        """
        with emptied_where_it_fails(fd, path):
            workers = [functools.partial(self._put, fd, bringer) for bringer in self._bringers]
            side_by_side(workers, self._windows.begins)
            self._finish(fd)

    def _put(self, fd: int, bringer: Bringer, begin: int) -> None:
        self._windows.put(fd, bringer, begin)

    def _finish(self, fd: int) -> None:
        self._windows.finish(fd)


@contextlib.contextmanager
def emptied_where_it_fails(fd: int, path: str) -> Iterator[None]:
    """Close `fd` behind the block.

    Raises:
        ArchiveWriteError: an OSError of the block's, or of closing.
    """
    try:
        try:
            yield
        except BaseException:
            # windows are not written in order: an empty file is what every reader refuses
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise ArchiveWriteError(error.errno, error.strerror, path) from error


def window_bytes(storages: StorageBytes) -> int:
    """What is brought, hashed and written at a time."""
    return WINDOW_BYTES if storages.are_here else DEVICE_WINDOW_BYTES
