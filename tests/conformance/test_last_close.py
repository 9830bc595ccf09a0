"""Programs that start others while they save: what closes a file is its writer, and nothing that
closes an inherited descriptor.
"""

from __future__ import annotations

import os
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
SIZE = 1 << 20
OLD = b"o" * 2 * SIZE
NEW = b"n" * 2 * SIZE
PROGRAM = """
import ctypes, mmap, os, socket, subprocess, sys, threading
os.chdir(sys.argv[1])
HALF = b"n" * (1 << 20)

def half(name, flags=os.O_TRUNC | os.O_RDWR):
    fd = os.open(name, flags)
    os.pwrite(fd, HALF, 0)
    return fd

def rest(fd):
    os.pwrite(fd, HALF, len(HALF))
    os.close(fd)

def say(word):
    print(word, flush=True)
    sys.stdin.readline()

# several subprocesses while a file is being written
truncated, in_place = half("truncated"), half("in-place", os.O_RDWR)
for _ in range(3):
    subprocess.run(["/bin/true"], check=True)

# one that closes the inherited descriptor, and forks without exec: not any file's close
if not (child := os.fork()):
    os.close(truncated)
    os._exit(0)
os.waitpid(child, 0)

# a second descriptor of the same process
first = half("duplicated")
second = os.dup(first)
os.close(first)

# a whole file, whose descriptor a process that loads data has inherited and keeps
whole = half("inherited")
os.pwrite(whole, HALF, len(HALF))
read_end, write_end = os.pipe()
if not (loader := os.fork()):
    for fd in (truncated, in_place, second, write_end):
        os.close(fd)
    os.read(read_end, 1)
    os._exit(0)
os.close(whole)

# a program that writes on where its parent has closed
handed = os.open("handed-on", os.O_WRONLY | os.O_TRUNC)
script = ("import os, sys; half = b'n' * (1 << 20); os.write(1, half); os.write(2, b'x'); "
          "os.read(0, 1); os.write(1, half)")
worker = subprocess.Popen(
    [sys.executable, "-S", "-c", script],
    stdin=subprocess.PIPE, stdout=handed, stderr=subprocess.PIPE
)
worker.stderr.read(1)
os.close(handed)

# a descriptor that is on its way to another process
sent = half("sent", os.O_TRUNC | os.O_WRONLY)
here, there = socket.socketpair()
socket.send_fds(here, [b"x"], [sent])
os.close(sent)

# a mapping that is written to when no descriptor is left
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
mapped = half("mapped", os.O_RDWR)
address = libc.mmap(None, 2 << 20, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, mapped, 0)
os.close(mapped)

# a thread with descriptors of its own (unshare(CLONE_FILES))
begun, end = threading.Event(), threading.Event()
def thread():
    assert not libc.unshare(0x400)
    fd = half("threads-own", os.O_TRUNC | os.O_WRONLY)
    subprocess.run(["/bin/true"], check=True)
    begun.set()
    end.wait()
    rest(fd)
writer = threading.Thread(target=thread)
writer.start()
begun.wait()

say("half")
rest(socket.recv_fds(there, 1, 1)[1][0])
ctypes.memset(address + (1 << 20), ord("n"), 1 << 20)
libc.munmap(address, 2 << 20)
end.set()
writer.join()
for fd in (truncated, in_place, second):
    rest(fd)
worker.communicate(b"x")
os.write(write_end, b"x")
os.waitpid(loader, 0)
say("whole")
"""
UNSEEN = ("sent", "mapped", "threads-own")
"""What is open in a way that no table of descriptors shows (S466)."""
UNFINISHED = ("truncated", "in-place", "duplicated", "handed-on", *UNSEEN)
NAMES = (*UNFINISHED, "inherited")


@contextmanager
def program(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """One that has half written its files."""
    command = [sys.executable, "-c", dedent(PROGRAM), str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            assert said(started) == "half"
            yield started
        finally:
            started.kill()


def said(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def go_on(started: subprocess.Popen[str]) -> str:
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()
    return said(started)


def mounted(transport: str, make_mount: MakeMount, tmp_path: Path) -> AcpfsMount:
    backing = tmp_path / "backing"
    backing.mkdir()
    for name in NAMES:
        (backing / name).write_bytes(OLD)
    return make_mount(backing, transport, max_dirty_age=0)


def stored(mount: AcpfsMount, content: bytes) -> set[str]:
    return {name for name in NAMES if (mount.backing / name).read_bytes() == content}


@clause("S14", "S180", "S390", "S391", "S466")
def test_a_subprocess_that_closes_what_it_inherited_publishes_no_half_of_a_save(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = mounted(transport, make_mount, tmp_path)
    with program(mount.path) as started:
        mount.flush()  # waits until it is known of each close whether it counts
        assert stored(mount, OLD) == set(UNFINISHED)
        assert stored(mount, NEW) == {"inherited"}, "its writer has closed it"
        assert go_on(started) == "whole"
        mount.flush()
        assert stored(mount, NEW) == set(NAMES)
    assert mount.status()["interrupted"] == 0


@clause("S14", "S81", "S390")
def test_nor_after_a_change_of_workers(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    if transport == "libfuse":
        pytest.skip("what is open is lost there")
    mount = mounted(transport, make_mount, tmp_path)
    with program(mount.path) as started:
        mount.kill_worker()
        (mount.path / "inherited").read_bytes()
        mount.flush()
        assert stored(mount, OLD) == set(UNFINISHED)
        assert stored(mount, NEW) == {"inherited"}
        assert go_on(started) == "whole"
        mount.flush()
        assert stored(mount, NEW) == set(NAMES)


@clause("S82", "S390")
def test_nor_where_all_of_acpfs_is_killed_and_mounted_anew(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = mounted(transport, make_mount, tmp_path)
    with program(mount.path):
        mount.kill()
        mount.start()
        mount.flush()
        assert stored(mount, NEW) <= {"inherited"}
        known = set(UNFINISHED) - set(UNSEEN)
        assert stored(mount, OLD) >= known
        assert mount.status()["interrupted"] >= len(known)
        mount.run("acpfs-ctl", "retry", str(mount.path))


@clause("S537", "S477")
def test_whatever_a_backing_directory_is_called_its_descriptors_are_seen(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    """They are told from others' by its path in the mount table."""
    backing = tmp_path / "schön, a\\b"
    backing.mkdir()
    (backing / "f").write_bytes(b"old")
    mount = make_mount(backing, transport, max_dirty_age=0)
    fd = os.open(mount.path / "f", os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(fd, b"ne")
        subprocess.run(["true"], check=True)
        subprocess.run(["mv", mount.path / "f", mount.path / "g"], check=True)
        mount.flush()
        assert (backing / "g").read_bytes() == b"old"
        os.write(fd, b"w")
    finally:
        os.close(fd)
    mount.flush()
    assert (backing / "g").read_bytes() == b"new"
