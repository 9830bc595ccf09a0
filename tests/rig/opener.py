"""A process that does the same to two directories and says what came of it: python -m
tests.rig.opener DIRECTORY REFERENCE.

Reads one JSON list per line, `[operation, arguments…]`, answers with `[of the directory, of the
reference]`: values or names of errnos. Holds open files and mappings in numbered slots.
Deterministic: whoever talks to several such processes decides the order.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)


def filled(seed: int, size: int) -> bytes:
    """Bytes that tell who wrote them."""
    return bytes((seed * 131 + n // 7) % 251 + 1 for n in range(min(size, 251 * 7))).ljust(
        size, bytes([seed % 250 + 1])
    )


def said(data: bytes | bytearray) -> list[int]:
    """Short for bytes: how many, and their checksum."""
    return [len(data), zlib.crc32(data)]


class Side:
    """Open files and mappings below one directory."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.files: dict[int, int] = {}
        self.maps: dict[int, mmap.mmap] = {}

    def open(self, slot: int, name: str, flags: int) -> None:
        if slot in self.files:
            os.close(self.files.pop(slot))
        self.files[slot] = os.open(self.top / name, flags, 0o644)

    def close(self, slot: int) -> None:
        os.close(self.files.pop(slot))

    def duplicate(self, slot: int, other: int) -> None:
        """What dup2 does: the other slot's file is closed, and shares an offset with this one from
        now on.
        """
        if slot != other:
            if other in self.files:
                os.close(self.files.pop(other))
            self.files[other] = os.dup(self.files[slot])

    def write(self, slot: int, seed: int, size: int) -> int:
        return os.write(self.files[slot], filled(seed, size))

    def pwrite(self, slot: int, seed: int, size: int, offset: int) -> int:
        return os.pwrite(self.files[slot], filled(seed, size), offset)

    def read(self, slot: int, size: int) -> list[int]:
        return said(os.read(self.files[slot], size))

    def pread(self, slot: int, size: int, offset: int) -> list[int]:
        return said(os.pread(self.files[slot], size, offset))

    def seek(self, slot: int, offset: int, whence: int) -> int:
        return os.lseek(self.files[slot], offset, whence)

    def ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self.files[slot], size)

    def truncate(self, name: str, size: int) -> None:
        os.truncate(self.top / name, size)

    def fstat(self, slot: int) -> list[int]:
        st = os.fstat(self.files[slot])
        return [st.st_size, st.st_nlink, st.st_mode]

    def stat(self, name: str) -> list[int]:
        st = os.stat(self.top / name)
        return [st.st_size, st.st_nlink, st.st_mode]

    def fsync(self, slot: int) -> None:
        os.fsync(self.files[slot])

    def fallocate(self, slot: int, mode: int, offset: int, size: int) -> None:
        if (
            _libc.fallocate(self.files[slot], mode, ctypes.c_int64(offset), ctypes.c_int64(size))
            != 0
        ):
            raise OSError(ctypes.get_errno(), "fallocate")

    def copy(self, slot: int, offset: int, other: int, target: int, size: int) -> int:
        """copy_file_range, as often as it takes: how much one call copies is the file system's
        business.
        """
        done = 0
        while done < size:
            count = os.copy_file_range(
                self.files[slot], self.files[other], size - done, offset + done, target + done
            )
            if not count:
                break
            done += count
        return done

    def map(self, slot: int, into: int, size: int, shared: bool, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        made = mmap.mmap(
            self.files[slot], size, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE, protection
        )
        if into in self.maps:
            self.maps.pop(into).close()
        self.maps[into] = made

    def unmap(self, slot: int) -> None:
        self.maps.pop(slot).close()

    def store(self, slot: int, seed: int, size: int, offset: int) -> None:
        self.maps[slot][offset : offset + size] = filled(seed, size)

    def load(self, slot: int, size: int, offset: int) -> list[int]:
        return said(self.maps[slot][offset : offset + size])

    def unlink(self, name: str) -> None:
        os.unlink(self.top / name)

    def rename(self, name: str, other: str) -> None:
        os.rename(self.top / name, self.top / other)

    def link(self, name: str, other: str) -> None:
        os.link(self.top / name, self.top / other)


def outcome(call: Callable[..., Any], arguments: list[Any]) -> Any:
    """What a call returned, or the name of its errno; KeyError, of a slot that holds nothing, is
    the same on both sides.
    """
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except (KeyError, TypeError, ValueError) as error:
        return type(error).__name__


def main() -> None:
    sides = [Side(Path(word)) for word in sys.argv[1:3]]
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps([outcome(getattr(side, name), arguments) for side in sides]), flush=True)


if __name__ == "__main__":
    main()
