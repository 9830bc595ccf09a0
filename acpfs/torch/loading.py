"""`load`: what `torch.load` does, with storages read by several threads into huge pages.

torch reads the file as ever, from an object that is the one it would have opened itself; only large
reads are divided. So what is loaded, and every error, are torch's.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import stat
from typing import Any

from acpfs.torch.mounted_paths import lies_in_mount
from acpfs.torch.originals import is_ordinary, original_load, skips_data
from acpfs.torch.side_by_side import side_by_side, usable_threads

LARGE_BYTES = 4 << 20
"""Of a read; below that dividing it costs more than it brings."""
PIECE_BYTES = 4 << 20
HUGE_BYTES = 2 << 20
MADV_HUGEPAGE = 14
LOCAL_HEADER = b"PK\3\4"
"""What an archive of torch begins with."""


def load(f: Any, *arguments: Any, **options: Any) -> Any:
    """Load what `torch.load` would load from the path `f`, and takes all that it takes.

    What is not an archive in a mount of acpfs, or is to be mapped, is torch's own call.
    """
    if not _is_usual(f, options):
        return original_load(f, *arguments, **options)
    try:
        file = DividedFile(f)
    except OSError:  # torch says it
        return original_load(f, *arguments, **options)
    with file:
        if not file.is_archive:
            return original_load(f, *arguments, **options)
        return original_load(file, *arguments, **options)


def _is_usual(f: Any, options: dict[str, Any]) -> bool:
    path = os.fspath(f) if isinstance(f, str | os.PathLike) else None
    if not isinstance(path, str) or path.endswith(".safetensors") or _is_mapped(options):
        return False
    if skips_data() or not is_ordinary():
        return False
    try:
        return lies_in_mount(path) and stat.S_ISREG(os.stat(path).st_mode)
    except Exception:  # noqa: BLE001 - whatever it is, torch says it
        return False


def _is_mapped(options: dict[str, Any]) -> bool:
    asked = options.get("mmap")
    if asked is None:
        try:
            from torch.utils.serialization import config  # older ones have none
        except ImportError:
            return False
        asked = config.load.mmap
    return bool(asked)


class DividedFile(io.BufferedReader):
    """A file as `open(path, "rb")` gives it, whose large reads are made by several threads."""

    def __init__(self, path: Any) -> None:
        """Raises: OSError: it cannot be opened."""
        super().__init__(io.FileIO(path))
        self._threads = usable_threads()

    @property
    def is_archive(self) -> bool:
        """Whether it is in the zip format."""
        return os.pread(self.fileno(), len(LOCAL_HEADER), 0) == LOCAL_HEADER

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        if len(target) < LARGE_BYTES or target.readonly:
            return super().readinto(target)
        begin = self.tell()
        size = min(len(target), max(0, os.fstat(self.fileno()).st_size - begin))
        _ask_for_huge_pages(target[:size])
        worker = functools.partial(_read_piece, self.fileno(), target[:size], begin)
        side_by_side([worker] * self._threads, range(0, size, PIECE_BYTES))
        self.seek(begin + size)
        return size


def _read_piece(fd: int, target: memoryview, begin: int, start: int) -> None:
    """Read a piece.

    Raises:
        OSError: the file has become shorter, or cannot be read.
    """
    end = min(start + PIECE_BYTES, len(target))
    while start < end:
        count = os.preadv(fd, [target[start:end]], begin + start)
        if not count:
            raise OSError("the file has become shorter while it was read")
        start += count


def _ask_for_huge_pages(target: memoryview) -> None:
    """New memory costs a fault for each of its pages, which is half of a load's processor time."""
    if len(target) < HUGE_BYTES:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    begin = -(-address // HUGE_BYTES) * HUGE_BYTES
    end = (address + len(target)) // HUGE_BYTES * HUGE_BYTES
    if end > begin:  # where the kernel has none, it says so, and nothing is lost
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE)


_libc = ctypes.CDLL(None)
