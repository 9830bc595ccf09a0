"""Shared mappings that go on when every descriptor is closed: what is stored through them reaches the backing directory, as one whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from tests.rig.mounts import AcpfsMount, MakeMount

clause = pytest.mark.clause
pytestmark = pytest.mark.every_lane
NAME = "step-1/model.pt"
SIZE = 1 << 20
KILLS = pytest.mark.parametrize("kills", [False, True], ids=["", "worker-killed"])
PROGRAM = """
import ctypes, mmap, os, signal, sys
path, size = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def mapped(fd):
    return libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)

def unmap(address):
    libc.munmap(address, size)

def store(address, letter):
    ctypes.memset(address, ord(letter), size)

def say(word):
    print(word, flush=True)
    sys.stdin.readline()

# a writer that the kernel serves itself, where it does that, and beside it one who maps the file
writer = os.open(path, os.O_WRONLY | os.O_CREAT)
os.write(writer, b"w" * size)
first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
one, two = mapped(first), mapped(second)
store(one, "a")
os.close(writer)
os.close(first)
os.close(second)
"""


@contextmanager
def program(mount: AcpfsMount, text: str) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-c",
        dedent(PROGRAM) + dedent(text),
        str(mount.path / NAME),
        str(SIZE),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def said(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def go_on(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()


def mounted(transport: str, make_mount: MakeMount, tmp_path: Path) -> AcpfsMount:
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport, max_dirty_age=0)
    (mount.path / NAME).parent.mkdir()
    return mount


def stored(mount: AcpfsMount) -> bytes:
    file = mount.backing / NAME
    return file.read_bytes() if file.exists() else b""


def stored_at_last(mount: AcpfsMount) -> bytes:
    """The kernel says that it was closed a moment after munmap, or the end of the process."""
    mount.ctl("wait", str(mount.path / NAME))
    return stored(mount)


@clause("S44", "S466", "S502")
@KILLS
def test_what_is_stored_through_a_mapping_after_the_last_close_is_published_when_that_is_gone(
    transport: str, make_mount: MakeMount, tmp_path: Path, kills: bool
) -> None:
    if kills and transport == "libfuse":
        pytest.skip("what is open is lost there")
    mount = mounted(transport, make_mount, tmp_path)
    text = """
        say("closed")
        store(one, "b")
        unmap(one)
        say("one is left")
        store(two, "c")
        unmap(two)
        say("none is left")
    """
    with program(mount, text) as started:
        assert said(started) == "closed"
        if kills:
            mount.kill_worker()
        mount.flush()
        assert stored(mount) == b""
        go_on(started)
        assert said(started) == "one is left"
        assert (mount.path / NAME).read_bytes() == b"b" * SIZE
        mount.flush()
        assert stored(mount) == b""
        go_on(started)
        assert said(started) == "none is left"
        assert stored_at_last(mount) == b"c" * SIZE
        assert (mount.path / NAME).read_bytes() == b"c" * SIZE


@clause("S502")
def test_so_is_what_a_process_leaves_that_ends_with_its_mappings(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = mounted(transport, make_mount, tmp_path)
    with program(mount, 'say("closed"); store(two, "d")') as started:
        assert said(started) == "closed"
        go_on(started)
        assert not started.wait()
        assert stored_at_last(mount) == b"d" * SIZE


@clause("S502")
@KILLS
def test_who_opens_such_a_file_sees_what_is_stored_through_the_mapping(
    transport: str, make_mount: MakeMount, tmp_path: Path, kills: bool
) -> None:
    if kills and transport == "libfuse":
        pytest.skip("what is open is lost there")
    mount = mounted(transport, make_mount, tmp_path)
    text = """
        unmap(one)
        say("closed")
        again = os.open(path, os.O_RDWR)
        three = mapped(again)
        store(two, "e")
        print(ctypes.string_at(three, 3), os.pread(again, 3, 0))
        ctypes.memset(three, ord("f"), 2)
        print(ctypes.string_at(two, 3), os.pread(again, 3, 0))
        os.close(again)
        unmap(three)
        say("unmapped")
    """
    with program(mount, text) as started:
        assert said(started) == "closed"
        if kills:
            mount.kill_worker()
        mount.flush()  # the next worker has another file in the kernel by now, of the same bytes
        go_on(started)
        assert said(started) == "b'eee' b'eee'"
        assert said(started) == "b'ffe' b'ffe'"
        assert said(started) == "unmapped"
        started.kill()
        started.wait()
        assert stored_at_last(mount) == b"ff" + b"e" * (SIZE - 2)
