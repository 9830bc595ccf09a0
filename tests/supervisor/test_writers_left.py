"""All of acpfs is killed, and who has a file in the passthrough lane lives on: what that one writes
later is no matter of the next mount, which has no session with him.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rig.mounts import AcpfsMount, MakeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native-passthrough"),
    pytest.mark.clause("S506"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]
MIB = 1 << 20
SIZE = 20 * MIB
"""Beyond what is copied when it is fixed (`COPY_AT_FREEZE_BYTES_MAX`)."""
WAYS = pytest.mark.parametrize("way", ["descriptor", "mapping"])
WRITER = """
import mmap, os, sys

path, way, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
access = os.O_RDWR if way == "mapping" else os.O_WRONLY
fd = os.open(path, access | os.O_CREAT | os.O_EXCL)
for start in range(0, size, 1 << 20):
    os.pwrite(fd, b"1" * (1 << 20), start)
mapped = mmap.mmap(fd, size) if way == "mapping" else None
print("ready", flush=True)
for line in sys.stdin:
    word, where = line.split()
    try:
        if word == "sync":
            os.fsync(fd)
        elif word == "close":
            os.close(fd)
        elif mapped is not None:
            mapped[int(where) : int(where) + 8192] = word.encode() * 8192
        else:
            os.pwrite(fd, word.encode() * 8192, int(where))
        print("done", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


LOOPER = """
import mmap, os, struct, sys, threading

path, way, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
for start in range(0, size, 1 << 20):
    os.pwrite(fd, b"1" * (1 << 20), start)
mapped = mmap.mmap(fd, size) if way == "mapping" else None
numbers = None if mapped is None else memoryview(mapped).cast("Q")
goes = threading.Event()
stands = threading.Event()
rounds = 0

def put(number, where):
    if mapped is not None:
        numbers[where // 8] = number  # in one store: pack_into writes zeros first
    else:
        os.pwrite(fd, struct.pack("<Q", number), where)

def loop():
    global rounds
    while True:
        if not goes.is_set():
            stands.set()
            goes.wait()
            stands.clear()
        rounds += 1
        put(rounds, size - 8)
        put(rounds, 0)

put(0, size - 8)
put(0, 0)
threading.Thread(target=loop, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    word = line.split()[0]
    if word == "sync":
        os.fsync(fd)
    elif word == "loop":
        goes.set()
        begun = rounds
        while rounds < begun + 100:
            pass
    else:
        goes.clear()
        stands.wait()
    print("done", flush=True)
"""
"""Goes on writing a number to the last bytes and then to the first ones, as long as it is to: at
each moment the last one is the first one, or one more.
"""


class Writer:
    """A process that has the file open, or maps it, and does what it is told."""

    def __init__(self, path: Path, way: str, program: str) -> None:
        command = [sys.executable, "-c", program, str(path), way, str(SIZE)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._said() == "ready"

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, word: str, where: int = 0) -> str:
        """What came of it: "done", or an errno."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word} {where}\n")
        self.process.stdin.flush()
        return self._said()

    def end(self) -> None:
        """With whatever it has open."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def writing(mount: AcpfsMount, way: str, program: str = WRITER) -> Iterator[tuple[Path, Writer]]:
    """A file that is being written in passthrough."""
    if (
        way == "mapping" or program is LOOPER
    ):  # who reads and writes has that lane where one like it was only written
        (mount.path / "step-1").mkdir()
        fd = os.open(mount.path / "step-1" / "state", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"1" * SIZE)
        os.close(fd)
        mount.wait_drained()
    (mount.path / "step-2").mkdir()
    writer = Writer(mount.path / "step-2" / "state", way, program)
    try:
        assert mount.status()["lanes"]["passthrough"] == 1
        yield mount.path / "step-2" / "state", writer
    finally:
        writer.end()


def laid(make_mount: MakeMount, tmp_path: Path, transport: str, ram: str = "128M") -> AcpfsMount:
    (tmp_path / "backing").mkdir()
    return make_mount(tmp_path / "backing", transport, ram=ram)


def state(mount: AcpfsMount, path: Path) -> str:
    (found,) = mount.ctl("ls", str(path))
    return str(found["state"])


def stored(mount: AcpfsMount) -> bytes:
    return (mount.backing / "step-2" / "state").read_bytes()


@WAYS
def test_what_was_persisted_is_not_changed_in_the_mount_alone(
    transport: str, make_mount: MakeMount, tmp_path: Path, way: str
) -> None:
    mount = laid(make_mount, tmp_path, transport)
    with writing(mount, way) as (path, writer):
        assert writer.tell("sync") == "done"
        mount.wait_drained()
        mount.kill()
        mount.start()
        assert path.read_bytes() == stored(mount)
        assert writer.tell("2") == "done"
        assert path.read_bytes() == stored(mount)
        mount.flush()
        assert int(writer.tell("sync")), "who writes is told that there is no mount"
        if way == "mapping":  # it may have been stored to, without a trace
            assert state(mount, path) == "interrupted"
            mount.ctl("discard", str(path))
        assert path.read_bytes() == stored(mount) == b"1" * SIZE
        assert state(mount, path) == "clean"
    mount.umount()
    assert mount.leaks() == []


@WAYS
def test_a_half_is_what_it_was_when_the_mount_began(
    transport: str, make_mount: MakeMount, tmp_path: Path, way: str
) -> None:
    mount = laid(make_mount, tmp_path, transport)
    with writing(mount, way) as (path, writer):
        assert writer.tell("2") == "done"
        mount.kill()
        assert writer.tell("3", SIZE // 2) == "done"
        mount.start()
        half = path.read_bytes()
        assert (half[:1], half[SIZE // 2 : SIZE // 2 + 1], len(half)) == (b"2", b"3", SIZE)
        assert writer.tell("4") == "done"
        assert path.read_bytes() == half
        assert state(mount, path) == "interrupted"
        assert not (mount.backing / "step-2" / "state").exists()
        mount.ctl("retry", str(path))
        assert writer.tell("5") == "done"
        mount.wait_drained()
        assert writer.tell("6") == "done"
        assert path.read_bytes() == half == stored(mount)


@pytest.mark.parametrize("kills", [False, True])
def test_what_was_synced_is_stored_as_it_was_when_the_mount_began(
    transport: str, make_mount: MakeMount, tmp_path: Path, kills: bool
) -> None:
    mount = laid(make_mount, tmp_path, transport)
    mount.ctl("set", "bandwidth=1")
    with writing(mount, "descriptor") as (path, writer):
        assert writer.tell("sync") == "done"
        mount.kill()
        mount.start(bandwidth=1)
        assert writer.tell("2") == "done"
        if kills:
            mount.kill_worker()
        with open(path, "r+b") as again:  # somebody goes on with it, in place
            again.seek(SIZE - 1)
            again.write(b"9")
        assert writer.tell("3") == "done"
        mount.ctl("set", "bandwidth=0")
        mount.wait_drained()
        assert path.read_bytes() == stored(mount) == b"1" * (SIZE - 1) + b"9"


@pytest.mark.parametrize("kills", [False, True])
def test_without_room_for_a_copy_the_file_is_kept_back_until_nobody_writes_it(
    transport: str, make_mount: MakeMount, tmp_path: Path, kills: bool
) -> None:
    mount = laid(make_mount, tmp_path, transport, ram="32M")
    with writing(mount, "descriptor") as (path, writer):
        mount.kill()
        mount.start()
        if kills:
            mount.kill_worker()
        assert "kept back" in str(mount.status()["warnings"])
        assert writer.tell("2") == "done"
        assert state(mount, path) == "interrupted"
        mount.ctl("retry", str(path), check=False)
        with pytest.raises(OSError, match="busy"), open(path, "r+b", buffering=0) as again:
            again.write(b"9")
        assert state(mount, path) == "interrupted"
        assert not (mount.backing / "step-2" / "state").exists()
    mount.wait_status(lambda status: "kept back" not in str(status["warnings"]))
    mount.ctl("retry", str(path))
    mount.wait_drained()
    assert stored(mount) == path.read_bytes() == b"2" * 8192 + b"1" * (SIZE - 8192)


def is_of_one_moment(data: bytes) -> bool:
    """Of a file that `LOOPER` writes."""
    (first,) = struct.unpack("<Q", data[:8])
    (last,) = struct.unpack("<Q", data[-8:])
    return len(data) == SIZE and last - first in (0, 1)


@pytest.mark.parametrize("ends", ["pauses", "is killed"])
@pytest.mark.parametrize("synced", [False, True], ids=["half", "synced"])
@WAYS
def test_what_is_taken_of_a_file_that_is_written_all_the_time_is_of_one_moment(
    transport: str, make_mount: MakeMount, tmp_path: Path, way: str, *, synced: bool, ends: str
) -> None:
    """Mixtures of several moments were stored, also of what was synced before."""
    mount = laid(make_mount, tmp_path, transport)
    with writing(mount, way, LOOPER) as (path, writer):
        mount.ctl("set", "bandwidth=1")
        if synced:
            writer.tell("sync")
        writer.tell("loop")
        mount.kill()
        mount.start(bandwidth=0)
        mount.ctl("retry", str(path), check=False)
        if ends == "pauses":
            writer.tell("pause")
            mount.wait_status(lambda status: "kept back" not in str(status["warnings"]))
            writer.tell("loop")
        else:
            writer.end()
            mount.wait_status(lambda status: "kept back" not in str(status["warnings"]))
        mount.ctl("retry", str(path), check=False)
        mount.wait_drained()
        assert is_of_one_moment(stored(mount))
        assert path.read_bytes() == stored(mount)


def test_a_file_that_is_kept_back_can_be_written_anew(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = laid(make_mount, tmp_path, transport, ram="32M")
    with writing(mount, "descriptor") as (path, writer):
        mount.kill()
        mount.start()
        path.write_bytes(b"anew" * 1000)
        assert writer.tell("2") == "done"
        mount.wait_drained()
        assert path.read_bytes() == stored(mount) == b"anew" * 1000
        mount.kill()
        mount.start()
        assert writer.tell("3") == "done"
        assert path.read_bytes() == b"anew" * 1000
        assert "interrupted" not in str(mount.ctl("ls"))
        assert "kept back" not in str(mount.status()["warnings"])


def test_a_version_that_is_kept_back_is_stored_when_nobody_can_write_it(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = laid(make_mount, tmp_path, transport, ram="32M")
    mount.ctl("set", "bandwidth=1")
    with writing(mount, "descriptor") as (path, writer):
        assert writer.tell("sync") == "done"
        mount.kill()
        mount.start()
        status = mount.wait_status(lambda status: status["queue"] and status["queue"][0]["tries"])
        assert "earlier mount" in str(status["queue"])
        assert writer.tell("2") == "done"
        assert not (mount.backing / "step-2" / "state").exists()
    mount.wait_drained()
    assert stored(mount) == path.read_bytes() == b"2" * 8192 + b"1" * (SIZE - 8192)


@contextmanager
def held_up(mount: AcpfsMount) -> Iterator[None]:
    """Nothing comes to the backing directory."""
    mount.ctl("set", "bandwidth=1")
    try:
        yield
    finally:
        mount.ctl("set", "bandwidth=0")


def shown(path: Path) -> tuple[int, bytes]:
    """Its length, and its bytes, also those behind its length."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.fstat(fd).st_size, os.pread(fd, 2 * SIZE, 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("way", ["synced", "discarded"])
def test_what_grows_behind_a_version_that_is_kept_back_is_in_no_file(
    transport: str, make_mount: MakeMount, tmp_path: Path, way: str
) -> None:
    """Its length is that of what was synced, in the mount, on the backing directory and for who
    appends to it later.
    """
    mount = laid(make_mount, tmp_path, transport, ram="32M")
    with held_up(mount), writing(mount, "descriptor") as (path, writer):
        assert writer.tell("sync") == "done"
        if way == "discarded":
            assert writer.tell("1") == "done"
        mount.kill()
        mount.start(bandwidth=1)
        if way == "discarded":
            mount.ctl("discard", str(path))
        assert state(mount, path) != "interrupted"
        assert writer.tell("2", SIZE) == "done"
        assert shown(path) == (SIZE, b"1" * SIZE)
        writer.end()
        mount.wait_status(lambda status: "kept back" not in str(status["warnings"]))
        assert shown(path) == (SIZE, b"1" * SIZE)
    mount.wait_drained()
    assert shown(path) == (SIZE, stored(mount))
    with open(path, "ab") as again:
        again.write(b"3")
    mount.wait_drained()
    assert shown(path) == (SIZE + 1, stored(mount))
    assert stored(mount) == b"1" * SIZE + b"3"


def test_a_copy_of_a_version_that_was_kept_back_has_its_length(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    """There is room for one later, and who had it open goes on behind its end."""
    mount = laid(make_mount, tmp_path, transport, ram="32M")
    with held_up(mount), writing(mount, "descriptor") as (path, writer):
        assert writer.tell("sync") == "done"
        mount.kill()
        mount.start(bandwidth=1)
        assert writer.tell("2", SIZE) == "done"
        mount.ctl("set", "ram=128M")
        mount.wait_status(lambda status: "kept back" not in str(status["warnings"]))
        assert writer.tell("3", SIZE + 8192) == "done"
        assert shown(path) == (SIZE, b"1" * SIZE)
    mount.wait_drained()
    assert shown(path) == (SIZE, stored(mount))


@pytest.mark.parametrize("ends", ["room", "nobody"])
def test_a_half_that_is_kept_back_is_shown_as_long_as_it_says(
    transport: str, make_mount: MakeMount, tmp_path: Path, ends: str
) -> None:
    """As it was when the mount began, and then as long as it is when nobody writes it any more, or
    at the moment of its copy.
    """
    mount = laid(make_mount, tmp_path, transport, ram="32M")
    with writing(mount, "descriptor") as (path, writer):
        mount.kill()
        mount.start()
        assert shown(path)[0] == SIZE
        assert writer.tell("2", SIZE) == "done"
        length, data = shown(path)
        assert length == len(data)
        if ends == "room":
            mount.ctl("set", "ram=128M")
            mount.wait_status(lambda status: "kept back" not in str(status["warnings"]))
            assert writer.tell("3", SIZE + 8192) == "done"
    mount.wait_status(lambda status: "kept back" not in str(status["warnings"]))
    half = b"1" * SIZE + b"2" * 8192
    assert shown(path) == (len(half), half)
    assert state(mount, path) == "interrupted"
    mount.ctl("retry", str(path))
    mount.wait_drained()
    assert shown(path) == (len(half), stored(mount))
