"""Random operations for the reference-model test, and what each does on one side.

The generator knows nothing of results: the operations of a seed are the same wherever they run.
Names are few, so that operations meet. Explicit mtimes lie in a range of their own (2001), so that
a comparison can tell them from "now".
"""

from __future__ import annotations

import mmap
import os
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rig.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, rename2

FILES = ("f0", "f1", "f2", "f3", "f4")
DIRECTORIES = ("d0", "d1", "d2")
STRANGE_SHARE = 0.12
"""How often a file's name is asked for where a directory's is expected and the other way round: the
errors must agree too.
"""
SLOTS = 8
SIZE_MAX = 200_000
EXPLICIT_NS = range(10**18, 10**18 + 10**17)
XATTRS = ("user.a", "user.b")


@dataclass(frozen=True)
class Operation:
    """A name and arguments; `Side` has a method of that name."""

    name: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        shown = (
            f"<{len(argument)} bytes>" if isinstance(argument, bytes) else repr(argument)
            for argument in self.args
        )
        return f"{self.name}({', '.join(shown)})"


class Generator:
    """Endless operations of one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = list(WEIGHTS)
        self._weights = list(WEIGHTS.values())

    def __iter__(self) -> Iterator[Operation]:
        while True:
            name = self._random.choices(self._names, self._weights)[0]
            yield Operation(
                name.removesuffix("_directory"),
                tuple(self._argument(kind) for kind in ARGUMENTS[name]),
            )

    def _argument(self, kind: str) -> Any:
        value: Any = getattr(self, "_" + kind)()
        return value

    def _path(self) -> str:
        return self._joined(FILES, DIRECTORIES)

    def _directory(self) -> str:
        return self._joined(DIRECTORIES, FILES)

    def _joined(self, usual: tuple[str, ...], strange: tuple[str, ...]) -> str:
        above = self._random.choices(DIRECTORIES, k=self._random.choices((0, 1, 2), (5, 4, 2))[0])
        last = self._random.choice(strange if self._random.random() < STRANGE_SHARE else usual)
        return "/".join([*above, last])

    def _slot(self) -> int:
        return self._random.randrange(SLOTS)

    def _flags(self) -> int:
        flags = self._random.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR))
        if self._random.random() < 0.7:
            flags |= os.O_CREAT
        if flags & os.O_ACCMODE != os.O_RDONLY and self._random.random() < 0.3:
            flags |= os.O_TRUNC
        if self._random.random() < 0.15:
            flags |= os.O_APPEND
        if self._random.random() < 0.1:
            flags |= os.O_EXCL | os.O_CREAT
        return flags

    def _mode(self) -> int:
        return self._random.choice((0o644, 0o600, 0o755, 0o4711, 0o666))

    def _offset(self) -> int:
        return self._random.choice(
            (0, self._random.randrange(100), self._random.randrange(SIZE_MAX))
        )

    def _data(self) -> bytes:
        return self._random.randbytes(
            self._random.choice((1, 10, 4096, self._random.randrange(1, 60_000)))
        )

    def _rename_flags(self) -> int:
        return self._random.choices((0, RENAME_NOREPLACE, RENAME_EXCHANGE), (8, 1, 1))[0]

    def _target(self) -> str:
        return self._random.choice((self._path(), "nowhere", "d0/f1", "f2", "d1"))

    def _ns(self) -> int:
        return self._random.randrange(EXPLICIT_NS.start, EXPLICIT_NS.stop)

    def _xattr(self) -> str:
        return self._random.choice(XATTRS)

    def _value(self) -> bytes:
        return self._random.randbytes(self._random.randrange(40))

    def _id(self) -> int:
        return self._random.choice((-1, 0, 1000, 2000))


WEIGHTS = {
    "open": 18,
    "close": 8,
    "write": 12,
    "pwrite": 10,
    "read": 5,
    "pread": 6,
    "seek": 2,
    "dup": 2,
    "ftruncate": 3,
    "fsync": 2,
    "fstat": 3,
    "map_write": 2,
    "truncate": 3,
    "save": 8,
    "load": 8,
    "rename": 9,
    "rename_directory": 5,
    "link": 4,
    "unlink": 7,
    "mkdir": 8,
    "rmdir": 4,
    "symlink": 3,
    "readlink": 2,
    "chmod": 3,
    "chown": 2,
    "utimens": 3,
    "setxattr": 3,
    "getxattr": 2,
    "removexattr": 1,
    "listxattr": 1,
    "stat": 8,
    "listdir": 6,
    "fchmod": 1,
    "futimens": 1,
}
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "open": ("slot", "path", "flags", "mode"),
    "close": ("slot",),
    "write": ("slot", "data"),
    "pwrite": ("slot", "data", "offset"),
    "read": ("slot", "offset"),
    "pread": ("slot", "offset", "offset"),
    "seek": ("slot", "offset"),
    "dup": ("slot", "slot"),
    "ftruncate": ("slot", "offset"),
    "fsync": ("slot",),
    "fstat": ("slot",),
    "map_write": ("slot", "offset", "data", "ns"),
    "truncate": ("path", "offset"),
    "save": ("path", "data"),
    "load": ("path",),
    "rename": ("path", "path", "rename_flags"),
    "rename_directory": ("directory", "directory", "rename_flags"),
    "link": ("path", "path"),
    "unlink": ("path",),
    "mkdir": ("directory", "mode"),
    "rmdir": ("directory",),
    "symlink": ("target", "path"),
    "readlink": ("path",),
    "chmod": ("path", "mode"),
    "chown": ("path", "id", "id"),
    "utimens": ("path", "ns"),
    "setxattr": ("path", "xattr", "value"),
    "getxattr": ("path", "xattr"),
    "removexattr": ("path", "xattr"),
    "listxattr": ("path",),
    "stat": ("path",),
    "listdir": ("directory",),
    "fchmod": ("slot", "mode"),
    "futimens": ("slot", "ns"),
}


def comparable(st: os.stat_result) -> tuple[Any, ...]:
    """What two file systems must agree on: not numbers of inodes, nor sizes and link counts of
    directories, nor when "now" was.
    """
    is_dir = st.st_mode & 0o170000 == 0o040000
    mtime = st.st_mtime_ns if st.st_mtime_ns in EXPLICIT_NS else "now"
    return (
        oct(st.st_mode),
        0 if is_dir else st.st_nlink,
        st.st_uid,
        st.st_gid,
        0 if is_dir else st.st_size,
        mtime,
    )


class Side:
    """One of the two file systems: its root, its open files.

    Every method returns what must be equal on both sides.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._fds: dict[int, int] = {}

    def do(self, operation: Operation) -> tuple[str, Any]:
        """Carry out an operation: ("ok", result) or ("error", errno)."""
        try:
            return ("ok", getattr(self, operation.name)(*operation.args))
        except OSError as error:
            return ("error", error.errno)

    def close_all(self) -> None:
        """Close every file."""
        for slot in list(self._fds):
            self.close(slot)

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _fd(self, slot: int) -> int:
        if slot not in self._fds:
            raise OSError(9, "empty slot")
        return self._fds[slot]

    # -- descriptors

    def open(self, slot: int, path: str, flags: int, mode: int) -> str:
        fd = os.open(self._at(path), flags, mode)
        if slot in self._fds:
            os.close(self._fds[slot])
        self._fds[slot] = fd
        return "opened"

    def close(self, slot: int) -> None:
        os.close(self._fd(slot))
        del self._fds[slot]

    def write(self, slot: int, data: bytes) -> int:
        return os.write(self._fd(slot), data)

    def pwrite(self, slot: int, data: bytes, offset: int) -> int:
        return os.pwrite(self._fd(slot), data, offset)

    def read(self, slot: int, size: int) -> bytes:
        return os.read(self._fd(slot), size)

    def pread(self, slot: int, size: int, offset: int) -> bytes:
        return os.pread(self._fd(slot), size, offset)

    def seek(self, slot: int, offset: int) -> int:
        return os.lseek(self._fd(slot), offset, os.SEEK_SET)

    def dup(self, slot: int, to: int) -> None:
        fd = os.dup(self._fd(slot))
        if to in self._fds:
            os.close(self._fds[to])
        self._fds[to] = fd

    def ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self._fd(slot), size)

    def fsync(self, slot: int) -> None:
        os.fsync(self._fd(slot))

    def fstat(self, slot: int) -> tuple[Any, ...]:
        return comparable(os.fstat(self._fd(slot)))

    def fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self._fd(slot), mode)

    def futimens(self, slot: int, ns: int) -> None:
        os.utime(self._fd(slot), ns=(ns, ns))

    def map_write(self, slot: int, offset: int, data: bytes, ns: int) -> str:
        """Write through a shared mapping; the mtime is set afterwards, because when a mapping
        changes it is up to the file system.
        """
        fd = self._fd(slot)
        st = os.fstat(fd)
        size = st.st_size
        if size == 0 or stat.S_ISDIR(st.st_mode):
            return "nothing to map"
        with mmap.mmap(fd, size) as mapping:
            start = offset % size
            end = min(size, start + len(data))
            mapping[start:end] = data[: end - start]
            mapping.flush()
        os.utime(fd, ns=(ns, ns))
        return "mapped"

    # -- paths

    def truncate(self, path: str, size: int) -> None:
        os.truncate(self._at(path), size)

    def save(self, path: str, data: bytes) -> None:
        with open(self._at(path), "wb") as file:
            file.write(data)

    def load(self, path: str) -> bytes:
        with open(self._at(path), "rb") as file:
            return file.read()

    def rename(self, old: str, new: str, flags: int) -> None:
        rename2(Path(self._at(old)), Path(self._at(new)), flags)

    def link(self, old: str, new: str) -> None:
        os.link(self._at(old), self._at(new), follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode | 0o700)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, self._at(path))

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.chown(self._at(path), uid, gid, follow_symlinks=False)

    def utimens(self, path: str, ns: int) -> None:
        os.utime(self._at(path), ns=(ns, ns))

    def setxattr(self, path: str, name: str, value: bytes) -> None:
        os.setxattr(self._at(path), name, value)

    def getxattr(self, path: str, name: str) -> bytes:
        return os.getxattr(self._at(path), name)

    def removexattr(self, path: str, name: str) -> None:
        os.removexattr(self._at(path), name)

    def listxattr(self, path: str) -> list[str]:
        return own_xattrs(self._at(path))

    def stat(self, path: str) -> tuple[Any, ...]:
        return comparable(os.lstat(self._at(path)))

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(self._at(path)))


def own_xattrs(path: str, *, follow: bool = True) -> list[str]:
    """Names of the xattrs that a test may have set; not acpfs' own in a backing directory."""
    return sorted(
        n
        for n in os.listxattr(path, follow_symlinks=follow)
        if n.startswith("user.") and not n.startswith("user.acpfs.")
    )
