"""Random operations on files that are opened to read and write, on a real mount: written, mapped,
copied, renamed; and killed workers.

Beside each file stands what it has to hold, and what of it may be on the backing directory: what it
held when it was closed and not mapped, or when it was synced or renamed. Anything else there is a
half.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from tests.rig.mounts import AcpfsMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native-passthrough", "native-direct"),
    pytest.mark.clause("S502", "S503"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]
SIZE = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass
class File:
    """One that is open, and what is known of it."""

    name: str
    fds: list[int]
    now: bytearray = field(default_factory=lambda: bytearray(SIZE))
    mappings: list[int] = field(default_factory=list)
    whole: list[bytes] = field(default_factory=list)
    """What may be stored, the newest last; b"": nothing."""

    def complete(self) -> None:
        self.whole.append(bytes(self.now))


class Story:
    """Files, one after the other, of a few kinds."""

    def __init__(self, mount: AcpfsMount, random: Random) -> None:
        self.mount = mount
        self.random = random
        self.files: list[File] = []
        self.made = 0

    def run(self, steps: int) -> None:
        """Some operations, and the end of all files."""
        chances = {
            self.write: 8.0,
            self.map: 4.0,
            self.store: 6.0,
            self.touch: 3.0,
            self.copy: 2.0,
            self.close: 6.0,
            self.unmap: 5.0,
            self.sync: 1.0,
            self.rename: 2.0,
            self.kill: 0.4,
        }
        for _ in range(steps):
            if len(self.files) < 3:
                self.make()
            file = self.random.choice(self.files)
            self.random.choices(list(chances), list(chances.values()))[0](file)
            self.look(file)
        while self.files:
            file = self.files[0]
            if file.fds:
                self.close(file)
            else:
                self.unmap(file)

    def make(self) -> None:
        """One that nothing or something was seen to be like."""
        self.made += 1
        directory = self.mount.path / f"step-{self.made}"
        directory.mkdir()
        name = f"step-{self.made}/{self.random.choice(['state', '.tmp' + os.urandom(3).hex()])}"
        fd = os.open(self.mount.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.ftruncate(fd, SIZE)
        self.files.append(File(name, [fd], whole=[b""]))

    def piece(self) -> tuple[int, bytes]:
        """Where, and what."""
        start = self.random.randrange(SIZE)
        size = min(SIZE - start, self.random.choice([1, 4096, 100_000, SIZE]))
        return start, bytes([self.random.randrange(1, 256)]) * size

    def write(self, file: File) -> None:
        """write(2)."""
        if file.fds:
            start, data = self.piece()
            os.pwrite(self.random.choice(file.fds), data, start)
            file.now[start : start + len(data)] = data

    def map(self, file: File) -> None:
        """Shared, to write."""
        if file.fds and len(file.mappings) < 2:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            address = libc.mmap(None, SIZE, access, mmap.MAP_SHARED, file.fds[-1], 0)
            assert address not in (None, ctypes.c_void_p(-1).value)
            file.mappings.append(address)

    def store(self, file: File) -> None:
        """Through a mapping."""
        if file.mappings:
            start, data = self.piece()
            ctypes.memmove(self.random.choice(file.mappings) + start, data, len(data))
            file.now[start : start + len(data)] = data

    def touch(self, file: File) -> None:
        """Read, so that a later store leaves no trace."""
        if file.mappings:
            assert ctypes.string_at(file.mappings[0], SIZE) == file.now
        elif file.fds and not self.random.randrange(4):
            assert os.pread(file.fds[0], SIZE, 0) == file.now

    def copy(self, file: File) -> None:
        """A second descriptor."""
        if file.fds:
            file.fds.append(os.dup(file.fds[0]))

    def close(self, file: File) -> None:
        """One of them."""
        if file.fds:
            os.close(file.fds.pop(self.random.randrange(len(file.fds))))
            self.ended(file)

    def unmap(self, file: File) -> None:
        """One mapping."""
        if file.mappings:
            libc.munmap(file.mappings.pop(), SIZE)
            self.ended(file)

    def ended(self, file: File) -> None:
        """Nobody has it any more: it gets to the storage as it is."""
        if file.fds or file.mappings:
            return
        file.complete()
        self.files.remove(file)
        assert (self.mount.path / file.name).read_bytes() == file.now
        self.mount.ctl("wait", str(self.mount.path / file.name))
        assert (self.mount.backing / file.name).read_bytes() == file.now

    def sync(self, file: File) -> None:
        """Of what is mapped, what is stored is not known to the byte."""
        if file.fds and not file.mappings:
            os.fsync(file.fds[0])
            file.complete()

    def rename(self, file: File) -> None:
        """To its last name."""
        if file.fds and not file.mappings and ".tmp" in file.name:
            name = file.name.rpartition("/")[0] + "/model.safetensors"
            os.rename(self.mount.path / file.name, self.mount.path / name)
            file.name = name
            file.complete()

    def kill(self, _file: File) -> None:
        """The worker."""
        self.mount.kill_worker()

    def look(self, file: File) -> None:
        """Whether what is stored is whole."""
        try:
            found = (self.mount.backing / file.name).read_bytes()
        except FileNotFoundError:
            found = b""
        assert found in file.whole, f"{file.name} is a half"


@pytest.mark.slow
@pytest.mark.parametrize("steps", [40, pytest.param(400, marks=pytest.mark.long)])
def test_nothing_is_published_before_it_is_whole_and_nothing_is_lost(
    transport: str, tmp_path: Path, seed: int, steps: int
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    with AcpfsMount(backing, tmp_path / "mnt", transport, max_dirty_age=0) as mount:
        Story(mount, Random(seed)).run(steps)
        assert mount.status()["interrupted"] == 0
