"""Programs that work on a mount while its workers are killed: python -m tests.supervisor.storm NAME
DIRECTORY STOP.

Each goes on until the file STOP is there. It keeps its own account of what it did, outside the
mount, and compares at every turn: an error, or a byte that is not as it was written, ends it with a
traceback. Not an acpfs module is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

BLOCK = 256 << 10


def rounds(stop: Path) -> Iterator[int]:
    return itertools.takewhile(lambda _n: not stop.exists(), itertools.count())


def pattern(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def checkpoints(top: Path, stop: Path) -> None:
    """Large files in blocks, closed, read back; then a tracker; old ones deleted."""
    for n in rounds(stop):
        with open(top / f"step-{n}", "wb", buffering=0) as file:
            for block in range(12):
                assert file.write(pattern(n * 100 + block, BLOCK)) == BLOCK
        (top / "latest").write_text(str(n))
        with open(top / f"step-{n}", "rb") as file:
            for block in range(12):
                assert file.read(BLOCK) == pattern(n * 100 + block, BLOCK), (n, block)
        if n >= 3:
            os.unlink(top / f"step-{n - 3}")
        assert sorted(os.listdir(top)) == sorted(
            ["latest", *(f"step-{m}" for m in range(max(0, n - 2), n + 1))]
        )


def append_log(top: Path, stop: Path) -> None:
    """Lines appended through one descriptor that is never closed, flock held."""
    lines = 0
    with open(top / "log", "ab", buffering=0) as file, open(top / "log", "rb") as again:
        fcntl.flock(file, fcntl.LOCK_EX)
        for n in rounds(stop):
            assert file.write(b"line %09d\n" % n) == 15
            lines = n + 1
            assert os.fstat(file.fileno()).st_size == 15 * lines
            if n % 50 == 0:
                again.seek(0)
                assert again.read() == b"".join(b"line %09d\n" % m for m in range(lines))
    assert (top / "log").read_bytes() == b"".join(b"line %09d\n" % m for m in range(lines))


def small_files(top: Path, stop: Path) -> None:
    """Directories of small files: made exclusively, listed, removed."""
    for n in rounds(stop):
        os.mkdir(top / f"d{n}")
        for m in range(20):
            fd = os.open(top / f"d{n}/{m:02}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, b"%d" % (n * m))
            os.close(fd)
            os.link(top / f"d{n}/{m:02}", top / f"d{n}/l{m:02}")
            os.symlink("x", top / f"d{n}/s{m:02}")
        assert sorted(os.listdir(top / f"d{n}")) == sorted(
            f"{kind}{m:02}" for m in range(20) for kind in ("", "l", "s")
        )
        for m in range(20):
            assert (top / f"d{n}/{m:02}").read_bytes() == b"%d" % (n * m)
            assert os.stat(top / f"d{n}/{m:02}").st_nlink == 2
            for kind in ("", "l", "s"):
                os.unlink(top / f"d{n}/{kind}{m:02}")
        os.rmdir(top / f"d{n}")


def renames(top: Path, stop: Path) -> None:
    """Write to a temporary name, rename into place, exchange, xattrs that may be made only once."""
    (top / "a").write_text("a")
    (top / "b").write_text("b")
    for n in rounds(stop):
        (top / ".new").write_bytes(b"%d" % n)
        os.setxattr(top / ".new", b"user.n", b"%d" % n, os.XATTR_CREATE)
        os.rename(top / ".new", top / "current")
        assert (top / "current").read_bytes() == b"%d" % n
        assert os.getxattr(top / "current", b"user.n") == b"%d" % n
        os.removexattr(top / "current", b"user.n")
        exchange(top / "a", top / "b")
        assert (top / "a").read_text() + (top / "b").read_text() == ("ba" if n % 2 == 0 else "ab")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(top / "missing")
            raise AssertionError


def exchange(one: Path, other: Path) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mapped(top: Path, stop: Path) -> None:
    """A shared mapping, written and read; another process' view by read()."""
    with open(top / "map", "w+b") as file:
        file.truncate(1 << 20)
        with mmap.mmap(file.fileno(), 1 << 20) as view:
            for n in rounds(stop):
                start = (n * 4096) % (1 << 20)
                view[start : start + 4096] = pattern(n, 4096)
                view.flush()
                assert os.pread(file.fileno(), 4096, start) == pattern(n, 4096)


def deleted(top: Path, stop: Path) -> None:
    """Files that are deleted while open, and files that never had a name."""
    for n in rounds(stop):
        with open(top / "gone", "w+b", buffering=0) as file:
            os.unlink(top / "gone")
            file.writelines(pattern(n + m, 8192) for m in range(8))
            for m in range(8):
                assert os.pread(file.fileno(), 8192, m * 8192) == pattern(n + m, 8192)
        fd = os.open(top, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.write(fd, pattern(n, 8192))
        assert os.pread(fd, 8192, 0) == pattern(n, 8192)
        os.link(f"/proc/self/fd/{fd}", top / "named", src_dir_fd=0)
        os.close(fd)
        assert (top / "named").read_bytes() == pattern(n, 8192)
        os.unlink(top / "named")


def listings(top: Path, stop: Path) -> None:
    """A directory of 1,000, read by pieces while names come and go: none twice, none of those that
    stay missing.
    """
    stay = {f"stay{n:04}" for n in range(1000)}
    for name in stay:
        (top / name).touch()
    for n in rounds(stop):
        seen = []
        with os.scandir(top) as entries:
            for number, entry in enumerate(entries):
                seen.append(entry.name)
                if number % 100 == 50:
                    (top / f"new{n}-{number}").touch()
        assert len(seen) == len(set(seen))
        assert stay <= set(seen)
        for name in seen:
            if name not in stay:
                os.unlink(top / name)


def overwrites(top: Path, stop: Path) -> None:
    """One file, rewritten in place at random offsets, truncated and grown, against a copy in
    memory.
    """
    chooser = random.Random(1)
    memory = bytearray(1 << 20)
    with open(top / "over", "w+b", buffering=0) as file:
        file.write(memory)
        for n in rounds(stop):
            start = chooser.randrange(len(memory))
            data = pattern(n, chooser.randrange(1, 70000))
            os.pwrite(file.fileno(), data, start)
            memory[start : start + len(data)] = data
            if n % 10 == 9:
                size = chooser.randrange(1 << 19, 1 << 21)
                os.ftruncate(file.fileno(), size)
                memory = memory[:size] + bytes(max(0, size - len(memory)))
            if n % 5 == 0:
                assert os.pread(file.fileno(), 1 << 22, 0) == memory
                with contextlib.suppress(OSError):
                    os.open(top / "over", os.O_CREAT | os.O_EXCL)
                    raise AssertionError
    assert (top / "over").read_bytes() == memory


PROGRAMS: dict[str, Callable[[Path, Path], None]] = {
    program.__name__: program
    for program in (
        checkpoints,
        append_log,
        small_files,
        renames,
        mapped,
        deleted,
        listings,
        overwrites,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
