"""Memory mappings and locks, within a process and between several."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from tests.rig.processes import Child, in_child
from tests.rig.targets import Target

clause = pytest.mark.clause
F_OFD_GETLK = 36
F_OFD_SETLK = 37
TRIES_MAX = 50


def flock64(kind: int, start: int = 0, size: int = 0) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, size, 0)


# -- mmap


@clause("S44")
def test_mapping_reads_the_file(d: Path) -> None:
    data = os.urandom(1 << 20)
    (d / "f").write_bytes(data)
    with (
        open(d / "f", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
    ):
        assert mapping[:] == data


@clause("S44")
def test_private_mapping_changes_nothing(d: Path) -> None:
    (d / "f").write_bytes(b"a" * 8192)
    with (
        open(d / "f", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping,
    ):
        mapping[0:5] = b"xxxxx"
    assert (d / "f").read_bytes() == b"a" * 8192


@clause("S44")
def test_shared_mapping_writes_the_file(d: Path) -> None:
    (d / "f").write_bytes(b"a" * 20_000)
    with open(d / "f", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[10_000:10_005] = b"xxxxx"
        mapping.flush()
        assert os.pread(file.fileno(), 7, 9_999) == b"axxxxxa"
        mapping[0] = ord("y")
    content = (d / "f").read_bytes()
    assert (content[0:2], content[9_999:10_006], len(content)) == (b"ya", b"axxxxxa", 20_000)


@clause("S44")
def test_mapping_outlives_the_descriptor(d: Path) -> None:
    fd = os.open(d / "f", os.O_CREAT | os.O_RDWR, 0o644)
    os.ftruncate(fd, 8192)
    mapping = mmap.mmap(fd, 8192)
    os.close(fd)
    mapping[4096:4100] = b"late"
    mapping.close()
    assert (d / "f").read_bytes()[4096:4100] == b"late"


@clause("S44")
def test_mapping_between_processes(d: Path) -> None:
    (d / "f").write_bytes(bytes(4096))

    def other() -> None:
        with open(d / "f", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            mapping[100:105] = b"other"
            mapping.flush()

    with open(d / "f", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        in_child(other)
        assert mapping[100:105] == b"other"


@clause("S44", "S39")
def test_replaced_file_stays_mapped(d: Path) -> None:
    (d / "f").write_bytes(b"old!" * 2048)
    (d / "g").write_bytes(b"new!" * 2048)
    with (
        open(d / "f", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
    ):
        os.rename(d / "g", d / "f")
        assert mapping[:4] == b"old!"
        assert mapping[-4:] == b"old!"
    assert (d / "f").read_bytes() == b"new!" * 2048


@clause("S44", "S34")
def test_write_and_truncate_show_in_a_mapping(d: Path) -> None:
    (d / "f").write_bytes(b"a" * 8192)
    with open(d / "f", "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as mapping:
        os.pwrite(file.fileno(), b"xyz", 4096)
        assert mapping[4096:4099] == b"xyz"
        os.ftruncate(file.fileno(), 4096)
        os.ftruncate(file.fileno(), 8192)
        assert mapping[4096:4100] == bytes(4)


# -- locks


@clause("S45")
def test_flock_between_processes(d: Path) -> None:
    (d / "f").touch()

    def try_lock(kind: int) -> int:
        with open(d / "f", "rb") as file:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except OSError as error:
                return error.errno or -1
        return 0

    with open(d / "f", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert in_child(lambda: try_lock(fcntl.LOCK_SH)) == 0
        assert in_child(lambda: try_lock(fcntl.LOCK_EX)) == errno.EWOULDBLOCK
        fcntl.flock(file, fcntl.LOCK_EX)
        assert in_child(lambda: try_lock(fcntl.LOCK_SH)) == errno.EWOULDBLOCK
    assert in_child(lambda: try_lock(fcntl.LOCK_EX)) == 0


@clause("S45")
def test_flock_waits_until_it_is_free(d: Path) -> None:
    (d / "f").touch()

    def take() -> str:
        with open(d / "f", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        return "taken"

    with open(d / "f", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        child = Child(take)
        assert child.running()
        fcntl.flock(file, fcntl.LOCK_UN)
        assert child.result() == "taken"


@clause("S45")
def test_posix_range_locks(d: Path) -> None:
    (d / "f").write_bytes(bytes(100))

    def try_range(start: int, size: int) -> int:
        with open(d / "f", "r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, size, start)
            except OSError as error:
                return error.errno or -1
        return 0

    with open(d / "f", "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 10, 20)
        assert in_child(lambda: try_range(0, 20)) == 0
        assert in_child(lambda: try_range(25, 1)) in (errno.EAGAIN, errno.EACCES)
        fcntl.lockf(file, fcntl.LOCK_UN, 5, 20)
        assert in_child(lambda: try_range(20, 5)) == 0
        assert in_child(lambda: try_range(25, 5)) in (errno.EAGAIN, errno.EACCES)


@clause("S45")
def test_posix_locks_end_with_any_close_of_the_process(d: Path) -> None:
    (d / "f").touch()

    def try_lock() -> int:
        with open(d / "f", "r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return error.errno or -1
        return 0

    with open(d / "f", "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert in_child(try_lock) != 0
        os.close(os.open(d / "f", os.O_RDONLY))
        assert in_child(try_lock) == 0


@clause("S45")
def test_ofd_locks_belong_to_the_open_file(d: Path) -> None:
    (d / "f").touch()
    with open(d / "f", "r+b") as first, open(d / "f", "r+b") as second:
        fcntl.fcntl(first, F_OFD_SETLK, flock64(fcntl.F_WRLCK, 0, 10))
        with pytest.raises(OSError) as caught:
            fcntl.fcntl(second, F_OFD_SETLK, flock64(fcntl.F_WRLCK, 5, 1))
        assert caught.value.errno in (errno.EAGAIN, errno.EACCES)
        fcntl.fcntl(second, F_OFD_SETLK, flock64(fcntl.F_WRLCK, 10, 1))
        found = struct.unpack(
            "hhqqi4x", fcntl.fcntl(second, F_OFD_GETLK, flock64(fcntl.F_WRLCK, 0, 1))
        )
        assert found[0] == fcntl.F_WRLCK


@clause("S45", "S39")
def test_locks_die_with_their_process(d: Path) -> None:
    (d / "f").touch()

    def lock_and_die() -> None:
        file = open(d / "f", "r+b")  # noqa: SIM115 — the end of the process closes it
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)

    in_child(lock_and_die)
    with open(d / "f", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@clause("S270")
def test_a_mapping_in_passthrough_is_one_of_the_tier_file(d: Path, target: Target) -> None:
    if target.mount is None or target.name != "native-passthrough":
        return
    size = (5 << 20) + 4096
    with open(d / "f", "wb", 0) as file:
        file.writelines(bytes(1 << 20) for _ in range(5))
        file.write(bytes(4096))
    files = [
        path
        for path in (target.mount.runtime_dir / "tiers").rglob("*")
        if path.is_file() and path.stat().st_size == size
    ]
    for _ in range(TRIES_MAX):
        # the kernel may take a huge page's entry away at any time, and puts it back at the next
        # touch
        mapped = _mapped_whole(d / "f")
        for path in files:
            with suppress(FileNotFoundError):  # of another file, and it left RAM meanwhile
                if _mapped_whole(path) == mapped:
                    return
    pytest.fail("the mapping is never like one of the tier file")


def _mapped_whole(path: Path) -> dict[str, int]:
    """KiB, by kind, of a private mapping of which every page was read."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as area:
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(area))
        assert sum(area[::4096]) == 0
        text = Path("/proc/self/smaps").read_text()
    lines = text[text.index(f"{address:x}-") :].splitlines()[1:23]
    return {
        line.split(":")[0]: int(line.split()[1])
        for line in lines
        if line.startswith(("Rss", "ShmemPmd", "FilePmd"))
    }
