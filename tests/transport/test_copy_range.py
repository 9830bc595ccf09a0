"""copy_file_range(2) over the native transport: between lanes, beyond 4 GiB, and where it has to
fall back.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from acpfs.transport.native.protocol import InitFlag, Opcode
from tests.transport.mounted import NativeMount
from tests.transport.test_native_mount import lanes_program

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]

GIB = 1 << 30
ALL = (1 << 64) - 1
libc = ctypes.CDLL(None, use_errno=True)


def copy_all(source: int, target: int, size: int, start: int = 0) -> list[int]:
    """Copy by copy_file_range until nothing is left; returns how much each call did."""
    done: list[int] = []
    while sum(done) < size:
        at = start + sum(done)
        count = os.copy_file_range(source, target, size - sum(done), at, at)
        if not count:
            break
        done.append(count)
    return done


@pytest.mark.parametrize(
    "mask", [ALL, ALL & ~int(InitFlag.PASSTHROUGH)], ids=["passthrough", "direct"]
)
@pytest.mark.parametrize(
    "flags", [os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_DIRECT], ids=["wronly", "rdwr", "o-direct"]
)
@pytest.mark.clause("S50")
def test_bytes_are_copied_by_the_daemon_in_every_lane(
    tmp_path: Path, mask: int, flags: int
) -> None:
    data = os.urandom((9 << 20) + 77)
    with NativeMount(tmp_path, "--mask", str(mask), "--count") as mounted:
        (mounted.path / "source").write_bytes(data)
        (mounted.path / "target").write_bytes(b"old" * 100)
        source = os.open(mounted.path / "source", os.O_RDONLY)
        target = os.open(mounted.path / "target", flags)
        assert sum(copy_all(source, target, len(data))) == len(data)
        assert os.fstat(target).st_size == len(data)
        assert (
            os.copy_file_range(source, target, 100, len(data) - 7, 3) == 7
        )  # shortened at the source's end
        os.close(source)
        os.close(target)
        expected = data[:3] + data[-7:] + data[10:]
        assert (mounted.path / "target").read_bytes() == expected
    assert any(
        f"opcode {int(code)} " in mounted.log()
        for code in (Opcode.COPY_FILE_RANGE, Opcode.COPY_FILE_RANGE_64)
    )


def test_beyond_four_gib(tmp_path: Path) -> None:
    """A sparse file, of which pieces around the 4 GiB line are copied; one call for all of it goes
    as far as one request may.
    """
    line = 4 * GIB
    with NativeMount(tmp_path) as mounted:
        source = os.open(mounted.path / "source", os.O_RDWR | os.O_CREAT)
        os.ftruncate(source, line + (64 << 20))
        os.pwrite(source, b"a" * 8192, line - 4096)
        target = os.open(mounted.path / "target", os.O_RDWR | os.O_CREAT)
        assert sum(copy_all(source, target, 16 << 20, line - (8 << 20))) == 16 << 20
        assert os.pread(target, 8194, line - 4097) == b"\0" + b"a" * 8192 + b"\0"
        count = os.copy_file_range(source, target, line + (64 << 20), 0, 0)
        assert 0 < count <= 128 << 20
        os.close(source)
        os.close(target)


@pytest.mark.parametrize(
    "mask", [ALL, ALL & ~int(InitFlag.PASSTHROUGH)], ids=["passthrough", "direct"]
)
def test_from_a_file_that_is_not_in_ram(tmp_path: Path, mask: int) -> None:
    data = os.urandom(3 << 20)
    with NativeMount(tmp_path, "--mask", str(mask)) as mounted:
        (mounted.backing / "source").write_bytes(data)
        with (
            (mounted.path / "source").open("rb") as source,
            (mounted.path / "target").open("wb") as target,
        ):
            assert sum(copy_all(source.fileno(), target.fileno(), len(data))) == len(data)
        assert (mounted.path / "target").read_bytes() == data


def test_within_one_file(tmp_path: Path) -> None:
    text = (
        "f = os.open(p, os.O_RDWR); os.pwrite(f, b'xyz', 0); assert os.copy_file_range(f, f, 3, "
        "0, 5000) == 3; "
        "print(os.pread(f, 3, 5000)); os.close(f)"
    )
    with NativeMount(tmp_path) as mounted:
        assert lanes_program(mounted, text) == "b'xyz'\n"


def test_a_user_who_copies_into_a_set_uid_file_takes_the_bit_away(tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    text = (
        "t = p + '.suid'; open(t, 'wb').write(b'x'); os.chmod(t, 0o4777); os.chmod(p, 0o644); "
        "os.setgid(1000); os.setuid(1000); s = os.open(p, os.O_RDONLY); f = os.open(t, "
        "os.O_WRONLY); "
        "assert os.copy_file_range(s, f, 5, 0, 0) == 5; print(oct(os.stat(t).st_mode))"
    )
    with NativeMount(tmp_path) as mounted:
        assert lanes_program(mounted, text) == "0o100777\n"
