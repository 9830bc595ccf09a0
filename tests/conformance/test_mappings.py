"""Shared mappings, and files that may have some: what is stored reaches the backing directory, as
one whole, also after the last close.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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
"""
BESIDE = """
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
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


@contextmanager
def program(mount: AcpfsMount, text: str, name: str = "") -> Iterator[subprocess.Popen[str]]:
    """Statements over the path `name`, of which nothing is there; "": over `NAME`, which has two
    mappings, and is closed.
    """
    text = dedent(PROGRAM) + ("" if name else dedent(BESIDE)) + dedent(text)
    command = [sys.executable, "-c", text, str(mount.path / (name or NAME)), str(SIZE)]
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


def stored(mount: AcpfsMount, name: str = NAME) -> bytes:
    file = mount.backing / name
    return file.read_bytes() if file.exists() else b""


def stored_at_last(mount: AcpfsMount, name: str = NAME) -> bytes:
    """The kernel says that it was closed a moment after munmap, or the end of the process."""
    mount.ctl("wait", str(mount.path / name))
    return stored(mount, name)


def taught(transport: str, make_mount: MakeMount, tmp_path: Path) -> AcpfsMount:
    """A mount that has seen one file `step-#/state`, opened to read and write, and only written."""
    mount = mounted(transport, make_mount, tmp_path)
    (mount.path / "step-2").mkdir()
    path = mount.path / "step-1/state"
    fd = os.open(path, NEW)
    assert os.write(fd, b"s" * SIZE) == SIZE
    os.close(fd)
    mount.ctl("wait", str(path))
    return mount


def in_passthrough(mount: AcpfsMount) -> int:
    """How many opens had the lane so far."""
    choices: dict[str, int] = mount.status()["lane_choices"]
    return choices.get("passthrough", 0)


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
    text = """
        writer = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(writer, b"w" * size)
        fd = os.open(path, os.O_RDWR | os.O_NOATIME)  # which keeps the kernel from noting a mapping
        one = mapped(fd)
        os.close(writer)
        os.close(fd)
        say("closed")
        store(one, "d")
    """
    with program(mount, text, NAME) as started:
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


# -- files that are opened to read and write, and are only written until one of them is mapped


@clause("S503")
def test_a_file_that_is_opened_to_read_and_write_has_passthrough_when_one_like_it_was_only_written(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = mounted(transport, make_mount, tmp_path)
    for step in range(1, 4):
        directory = mount.path / f"step-{step}"
        directory.mkdir(exist_ok=True)
        # as safetensors: a name at random, its length before its bytes, a rename before the close
        fd, name = tempfile.mkstemp(prefix=".tmp", dir=directory)
        os.ftruncate(fd, SIZE)
        os.write(fd, bytes([step]) * SIZE)
        os.rename(name, directory / "model.safetensors")
        os.close(fd)
        assert stored_at_last(mount, f"step-{step}/model.safetensors") == bytes([step]) * SIZE
        in_kernel = (step - 1) * (transport == "native-passthrough")
        assert in_passthrough(mount) == in_kernel
        assert (mount.path / f"step-{step}/model.safetensors").stat().st_size == SIZE
    assert mount.status()["interrupted"] == 0


@clause("S503", "S502", "S466")
@pytest.mark.parametrize(
    "kills", [pytest.param(False, marks=pytest.mark.long), True], ids=["", "worker-killed"]
)
def test_where_it_is_mapped_all_the_same_nothing_is_published_before_the_mapping_is_gone(
    transport: str, make_mount: MakeMount, tmp_path: Path, kills: bool
) -> None:
    if kills and transport == "libfuse":
        pytest.skip("what is open is lost there")
    mount = taught(transport, make_mount, tmp_path)
    text = """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.ftruncate(fd, size)
        one = mapped(fd)
        ctypes.string_at(one, size)  # a store to a page that was read leaves no trace at all
        os.close(fd)
        say("closed")
        store(one, "a")
        say("stored")
        store(one, "b")
        unmap(one)
        say("unmapped")
    """
    with program(mount, text, "step-2/state") as started:
        assert said(started) == "closed"
        if kills:
            mount.kill_worker()
        elif transport == "native-passthrough":
            assert in_passthrough(mount) == 1
        mount.flush()
        assert stored(mount, "step-2/state") == b""
        go_on(started)
        assert said(started) == "stored"
        if kills:
            mount.kill_worker()
        assert (mount.path / "step-2/state").read_bytes() == b"a" * SIZE
        mount.flush()
        assert stored(mount, "step-2/state") == b""
        go_on(started)
        assert said(started) == "unmapped"
        assert stored_at_last(mount, "step-2/state") == b"b" * SIZE
    assert mount.status()["interrupted"] == 0


@clause("S503")
def test_a_store_that_leaves_no_trace_is_found_when_the_last_copy_is_closed(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = taught(transport, make_mount, tmp_path)
    text = """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.write(fd, b"a" * size)
        copy = os.dup(fd)
        os.close(fd)
        one = mapped(copy)
        ctypes.string_at(one, size)
        store(one, "b")
        unmap(one)
        os.close(copy)
        say("closed")
    """
    with program(mount, text, "step-2/state") as started:
        assert said(started) == "closed"
        assert stored_at_last(mount, "step-2/state") == b"b" * SIZE
        (mount.path / "step-3").mkdir()
        os.close(os.open(mount.path / "step-3/state", NEW))
        assert in_passthrough(mount) == 2 * (transport == "native-passthrough"), "all at once"


@clause("S533")
@KILLS
def test_a_file_that_is_mapped_and_closed_has_passthrough_the_next_time(
    transport: str, make_mount: MakeMount, tmp_path: Path, kills: bool
) -> None:
    """As numpy.memmap: its length, stores through a mapping, msync at the end."""
    if kills and transport == "libfuse":
        pytest.skip("what is open is lost there")
    mount = mounted(transport, make_mount, tmp_path)
    text = """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.ftruncate(fd, size)
        one = mapped(fd)
        store(one, "a")
        say("stored")
        store(one, "b")
        os.fsync(fd)
        unmap(one)
        os.close(fd)
        say("closed")
    """
    for step in range(1, 4):
        (mount.path / f"step-{step}").mkdir(exist_ok=True)
        name = f"step-{step}/mapped"
        with program(mount, text, name) as started:
            assert said(started) == "stored"
            if kills:
                mount.kill_worker()
            assert (mount.path / name).read_bytes() == b"a" * SIZE
            mount.flush()
            assert stored(mount, name) == b"", "a half"
            go_on(started)
            assert said(started) == "closed"
            assert stored_at_last(mount, name) == b"b" * SIZE
        if not kills:
            in_kernel = (step - 1) * (transport == "native-passthrough")
            # and the reader of the half
            assert in_passthrough(mount) == 2 * in_kernel
    assert mount.status()["interrupted"] == 0


@clause("S503", "S181")
def test_a_writer_that_is_killed_with_its_mapping_leaves_a_half(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = taught(transport, make_mount, tmp_path)
    text = """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.write(fd, b"a" * size)
        one = mapped(fd)
        store(one, "b")
        say("stored")
    """
    with program(mount, text, "step-2/state") as started:
        assert said(started) == "stored"
        started.kill()
        started.wait()
        mount.wait_status(lambda status: status["interrupted"] == 1)
        mount.flush()
        assert stored(mount, "step-2/state") == b""
        assert (mount.path / "step-2/state").read_bytes() == b"b" * SIZE
        mount.ctl("retry", str(mount.path))
        assert stored_at_last(mount, "step-2/state") == b"b" * SIZE


@clause("S533", "S475", "S508")
@pytest.mark.transports("native-passthrough")
def test_what_a_file_is_used_for_is_known_to_the_next_worker_too(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    """A database is synced with one worker, and written and synced on with the next one."""
    mount = mounted(transport, make_mount, tmp_path)

    def write(step: int, *, goes_on: bool) -> None:
        (mount.path / f"step-{step}").mkdir(exist_ok=True)
        path = mount.path / f"step-{step}/state"
        fd = os.open(path, NEW)
        assert os.write(fd, b"s" * SIZE) == SIZE
        assert os.pread(fd, 1, 0) == b"s"
        if goes_on:
            os.fsync(fd)
            mount.kill_worker()
            os.pwrite(fd, b"t" * SIZE, 0)
            os.fsync(fd)
        os.close(fd)
        mount.ctl("wait", str(path))

    write(1, goes_on=False)  # in the daemon's lane, and at once
    write(2, goes_on=False)
    assert in_passthrough(mount) == 1, "as the first one was written at once"
    write(3, goes_on=True)
    before = in_passthrough(mount)
    write(4, goes_on=False)
    assert in_passthrough(mount) == before, "where each sync is a version of its own"


@clause("S503", "S475")
def test_such_a_file_is_being_written_also_beside_a_reader_that_the_daemon_serves(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = taught(transport, make_mount, tmp_path)
    text = """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.write(fd, b"a" * size)
        os.fsync(fd)
        one = mapped(fd)
        ctypes.string_at(one, size)
        say("mapped")
        store(one, "b")
        say("stored")
        unmap(one)
        os.close(fd)
        say("closed")
    """
    path = mount.path / "step-2/state"
    with program(mount, text, "step-2/state") as started:
        assert said(started) == "mapped"
        reader = os.open(path, os.O_RDONLY | os.O_SYNC)  # which has no passthrough
        go_on(started)
        assert said(started) == "stored"
        done = mount.run("acpfs-ctl", "wait", str(path), "--timeout", "2", check=False)
        assert done.returncode == 4, done.stdout + done.stderr
        go_on(started)
        assert said(started) == "closed"
        assert stored_at_last(mount, "step-2/state") == b"b" * SIZE
        os.close(reader)
