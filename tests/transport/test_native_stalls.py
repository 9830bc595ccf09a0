"""A write in the passthrough lane whose pages do not come: nobody else notices, and when they have
come all is right.

The writer's buffer is a mapping of a file on a storage that hangs. The kernel has the RAM file's
inode lock as long as that write
is under way, and whoever wants to change the same file waits for it, but nobody else does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from acpfs.control import client, registry
from acpfs.processes import PROC, tasks_in_calls
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount, MakeMount
from tests.rig.processes import Child
from tests.rig.storage.servers import until

pytestmark = [
    pytest.mark.mount,
    pytest.mark.clause("S420"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]
MIB = 1 << 20
HEAD = b"head" * 1024
SIZE = 4 * MIB
SOURCE = os.urandom(SIZE)
PIDFD_GETFD = 438
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultFs]:
    """Where the writers' pages come from."""
    with FaultFs(tmp_path / "pages", tmp_path / "slow", page_cache=True) as faults:
        yield faults


@pytest.fixture
def mount(storage: FaultFs, make_mount: MakeMount, tmp_path: Path) -> AcpfsMount:
    return mounted(make_mount, tmp_path)


def mounted(make_mount: MakeMount, tmp_path: Path, **options: object) -> AcpfsMount:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", "native-passthrough", max_dirty_age=1, **options)
    if "passthrough" not in mount.status()["lanes"]:
        pytest.skip("this kernel has no passthrough")
    (mount.path / "step-1").mkdir()
    (mount.path / "other").write_bytes(b"x")
    return mount


class StalledWriter:
    """A process that writes `HEAD`, and then from pages that do not come;

    a descriptor of the file is ours, too.
    """

    def __init__(
        self,
        storage: FaultFs,
        mount: AcpfsMount,
        name: str = "step-1/model.pt",
        flags: int = os.O_CREAT | os.O_TRUNC,
        meanwhile: Callable[[int], None] = lambda _fd: None,
    ) -> None:
        """`meanwhile`:

        what the process does with the descriptor once it is open, before the write.
        """
        self._storage = storage
        self.path = mount.path / name
        source = storage.source / name.replace("/", "-")
        source.write_bytes(SOURCE)
        shown = storage.path / source.name
        storage.freeze(ops=["read"], glob=source.name)
        frozen = int(storage.state()["frozen"])

        def write() -> int:
            fd = os.open(self.path, os.O_WRONLY | flags)
            os.write(fd, HEAD)
            meanwhile(fd)
            with open(shown, "rb") as file:
                pages = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
            done = os.write(fd, pages)
            os.close(fd)
            return done

        self.child = Child(write)
        storage.wait_frozen(frozen + 1, timeout_s=60)

    def goes_on(self) -> int:
        """Its pages come: how much it wrote."""
        self._storage.thaw()
        return int(self.child.result())


def live_on(mount: AcpfsMount, name: str) -> None:
    """What anybody does in the mount, in a process of its own, which may hang."""

    def work() -> None:
        assert (mount.path / "other").read_bytes() == b"x"
        os.listdir(mount.path / "step-1")
        (mount.path / name).mkdir()
        (mount.path / name / "shard.pt").write_bytes(SOURCE)
        os.rename(mount.path / name / "shard.pt", mount.path / name / "model.pt")
        assert (mount.path / name / "model.pt").read_bytes() == SOURCE

    child = Child(work)
    try:
        child.result(100)
    except BaseException:
        child.kill()
        raise


def check_one_worker(mount: AcpfsMount) -> None:
    assert mount.status()["worker"]["number"] == 1


def check_stored(mount: AcpfsMount, name: str, data: bytes) -> None:
    mount.flush()
    assert (mount.path / name).read_bytes() == data
    assert (mount.backing / name).read_bytes() == data


def close_a_copy(writer: StalledWriter) -> Child:
    """As the exec of any subprocess does with descriptors that it inherits."""

    def close() -> None:
        pidfd = os.pidfd_open(writer.child.pid)
        copy = LIBC.syscall(PIDFD_GETFD, pidfd, the_descriptor(writer), 0)
        assert copy >= 0
        os.close(copy)

    return Child(close)


def the_descriptor(writer: StalledWriter) -> int:
    directory = f"/proc/{writer.child.pid}/fd"
    return next(
        int(fd)
        for fd in os.listdir(directory)
        if os.readlink(f"{directory}/{fd}") == str(writer.path)
    )


def read_and_close(writer: StalledWriter) -> Child:
    def read() -> None:
        with open(writer.path, "rb") as file:
            assert file.read(len(HEAD)) == HEAD

    return Child(read)


def write_beside(writer: StalledWriter) -> Child:
    """Through the daemon."""

    def write() -> None:
        fd = os.open(writer.path, os.O_RDWR)
        assert os.pread(fd, len(HEAD), 0) == HEAD
        os.close(fd)

    return Child(write)


@pytest.mark.parametrize(
    ("disturb", "direct"),
    [(close_a_copy, 0), (read_and_close, 0), (write_beside, 0), (write_beside, os.O_DIRECT)],
)
def test_others_go_on_whatever_is_done_to_the_file_meanwhile(
    storage: FaultFs, mount: AcpfsMount, disturb: Callable[[StalledWriter], Child], direct: int
) -> None:
    writer = StalledWriter(storage, mount, flags=os.O_CREAT | os.O_TRUNC | direct)
    live_on(mount, "before")
    disturber = disturb(writer)
    live_on(mount, "meanwhile")
    assert writer.goes_on() == SIZE
    disturber.result()
    live_on(mount, "after")
    check_stored(mount, "step-1/model.pt", HEAD + SOURCE)
    check_one_worker(mount)


def test_who_only_reads_does_not_wait_for_the_write(storage: FaultFs, mount: AcpfsMount) -> None:
    writer = StalledWriter(storage, mount)
    read_and_close(writer).result()
    assert writer.goes_on() == SIZE
    check_stored(mount, "step-1/model.pt", HEAD + SOURCE)


def test_who_truncates_the_file_waits_alone(storage: FaultFs, mount: AcpfsMount) -> None:
    writer = StalledWriter(storage, mount)

    def truncate() -> None:
        os.close(os.open(writer.path, os.O_WRONLY | os.O_TRUNC))

    truncating = Child(truncate)
    live_on(mount, "meanwhile")
    assert truncating.running()
    assert writer.goes_on() == SIZE
    truncating.result()
    check_stored(mount, "step-1/model.pt", b"")
    check_one_worker(mount)


def test_a_log_that_stands_still_does_not_keep_others_from_being_stored(
    storage: FaultFs, mount: AcpfsMount
) -> None:
    """Both are open, and stored because of their age (S12)."""
    (mount.path / "step-1" / "model.pt").write_bytes(SOURCE)  # so that logs of that size are known
    writer = StalledWriter(storage, mount, "step-1/model-1.pt", os.O_CREAT | os.O_APPEND)
    with open(mount.path / "log", "ab", buffering=0) as log:
        log.write(b"line")
        mount.wait_status(lambda _status: (mount.backing / "log").exists())
    assert writer.goes_on() == SIZE
    check_stored(mount, "step-1/model-1.pt", HEAD + SOURCE)
    check_one_worker(mount)


def test_pages_that_are_taken_ahead_wait_for_the_writer_alone(
    storage: FaultFs, mount: AcpfsMount
) -> None:
    """All but the first 64 MiB of an expected file are allocated while it is written."""
    large = 96 * MIB
    with open(mount.path / "model-1.pt", "wb", buffering=0) as file:
        file.writelines(SOURCE for _ in range(large // SIZE))
    mount.flush()
    (mount.path / "model-1.pt").unlink()
    mount.wait_status(lambda status: status["ram"]["used_bytes"] < SIZE)
    writer = StalledWriter(storage, mount, "model-2.pt")
    live_on(mount, "meanwhile")
    assert writer.goes_on() == SIZE
    check_stored(mount, "model-2.pt", HEAD + SOURCE)
    check_one_worker(mount)


def test_holes_are_stored_while_the_writer_stands_still(
    storage: FaultFs, mount: AcpfsMount
) -> None:
    """A version of it is streamed meanwhile, and looks for holes."""
    hole = 8 * MIB

    def leave_a_hole(fd: int) -> None:
        os.lseek(fd, hole, os.SEEK_SET)
        os.write(fd, HEAD)
        os.fsync(fd)

    mount.ask("set", key="bandwidth", value=str(MIB))
    writer = StalledWriter(storage, mount, meanwhile=leave_a_hole)
    mount.ask("set", key="bandwidth", value="0")
    live_on(mount, "meanwhile")
    mount.wait_status(lambda _status: (mount.backing / "meanwhile" / "model.pt").exists())
    assert writer.goes_on() == SIZE
    data = HEAD.ljust(hole, b"\0") + HEAD + SOURCE
    check_stored(mount, "step-1/model.pt", data)
    check_one_worker(mount)


def close_for_writing(writer: StalledWriter) -> Child:
    """Waits for the write, and so does the thread of the daemon that makes the call for it."""
    return Child(lambda: os.close(os.open(writer.path, os.O_RDWR)))


def wait_for_a_stuck_thread(pid: int) -> None:
    """Seen twice: one that waits for the disk is in a call for a moment only."""
    seen = set[Path]()
    while not seen & (stuck := set(tasks_in_calls(PROC / str(pid)))):
        seen = stuck
        threading.Event().wait(0.02)


@pytest.mark.clause("S423")
@pytest.mark.parametrize("how", ["kill", "reload"])
def test_what_a_worker_leaves_behind_holds_up_the_same_file_and_no_other(
    storage: FaultFs, make_mount: MakeMount, tmp_path: Path, how: str
) -> None:
    """Its thread is in a call for a close, and stays there until the write is done."""
    mount = mounted(make_mount, tmp_path, log_file=str(tmp_path / "acpfs.log"))
    writer = StalledWriter(storage, mount)
    closing = close_for_writing(writer)
    old = mount.pid
    wait_for_a_stuck_thread(old)
    if how == "kill":
        mount.kill_worker()
    else:
        mount.ctl("reload")
    mount.wait_status(lambda status: status["worker"]["number"] == 2)
    live_on(mount, "meanwhile")
    mount.flush("meanwhile")
    assert (mount.backing / "meanwhile" / "model.pt").read_bytes() == SOURCE
    assert Path(f"/proc/{old}").exists(), "nothing was left behind: the test proves nothing"
    lines = (tmp_path / "acpfs.log").read_text().splitlines()
    said = [line for line in lines if "waits for a write of an application" in line]
    assert len(said) == 1
    assert "step-1/model.pt" in said[0]
    assert str(writer.child.pid) in said[0]
    assert not [line for line in lines if "call on the backing directory" in line]
    assert writer.goes_on() == SIZE
    closing.result()
    check_stored(mount, "step-1/model.pt", HEAD + SOURCE)
    check_stored(mount, "other", b"x")


@pytest.mark.clause("S620")
@pytest.mark.parametrize("how", ["kill", "reload"])
def test_what_was_asked_of_a_worker_that_cannot_end_the_next_one_answers(
    storage: FaultFs, mount: AcpfsMount, how: str
) -> None:
    """Its thread is in a call, and all its connections stay open as long."""
    mount.ask("set", key="bandwidth", value="1000")
    (mount.path / "meanwhile").write_bytes(SOURCE)
    writer = StalledWriter(storage, mount)
    closing = close_for_writing(writer)
    old = mount.pid
    wait_for_a_stuck_thread(old)
    heard: list[Any] = []
    record = registry.find(str(mount.path), registry.records([mount.runtime_dir]))
    question = {"paths": ["meanwhile"]}
    with ThreadPoolExecutor() as pool:
        flushed = pool.submit(client.request, record, "flush", question, heard.append)
        until(lambda: bool(heard), "the flush is under way")
        try:
            if how == "kill":
                mount.kill_worker()
            else:
                mount.ask("reload")  # it answers this before it makes room
            mount.wait_status(lambda status: status["worker"]["number"] == 2)
            before = len(heard)  # what the old one said last may be on its way
            until(lambda: len(heard) > before + 2 or flushed.done(), "the next one answers")
            assert not flushed.done(), flushed.exception()
            assert Path(f"/proc/{old}").exists(), "nothing was left behind: it proves nothing"
        finally:  # the pool waits for the flush
            mount.ask("set", key="bandwidth", value="0")
        flushed.result()
    assert (mount.backing / "meanwhile").read_bytes() == SOURCE
    assert writer.goes_on() == SIZE
    closing.result()
    check_stored(mount, "step-1/model.pt", HEAD + SOURCE)


@pytest.mark.clause("S423")
def test_a_truncation_that_two_killed_workers_were_asked_for_is_carried_out_once(
    storage: FaultFs, mount: AcpfsMount
) -> None:
    """What the first one has left in the kernel must not cut off what is written after the open."""
    writer = StalledWriter(storage, mount)
    new = b"new" * 1000

    def begin_anew() -> None:
        with open(writer.path, "wb", buffering=0) as file:
            file.write(new)

    beginning = Child(begin_anew)
    wait_for_a_stuck_thread(mount.pid)
    for name in ("first", "second"):
        mount.kill_worker()
        live_on(mount, name)
        mount.flush(name)
    assert writer.goes_on() == SIZE
    beginning.result()
    check_stored(mount, "step-1/model.pt", new)


def test_the_writer_can_be_killed_and_who_closes_a_copy_too(
    storage: FaultFs, mount: AcpfsMount
) -> None:
    writer = StalledWriter(storage, mount)
    closer = close_a_copy(writer)
    live_on(mount, "meanwhile")
    closer.kill()
    writer.child.kill()
    live_on(mount, "after")
    storage.thaw()
    mount.wait_status(lambda status: status["interrupted"] == 1)
    assert (mount.path / "step-1" / "model.pt").read_bytes().startswith(HEAD)
    check_one_worker(mount)
    mount.ctl("discard", str(writer.path))


def test_a_save_from_a_mapping_of_the_same_mount_ends(mount: AcpfsMount) -> None:
    """Its pages come from the mount itself, while a subprocess of the same program closes what it
    inherited."""
    (mount.path / "old.bin").write_bytes(SOURCE * 4)
    mount.flush()
    script = """
import mmap, os, subprocess, sys, threading
source = open(sys.argv[1], "r+b")
pages = mmap.mmap(source.fileno(), 0)
pages.madvise(mmap.MADV_RANDOM)
file = open(sys.argv[2], "wb", buffering=0)
file.write(b"h" * 4096)
running = True
def spawn():
    while running:
        subprocess.run(["/bin/true"], close_fds=False)
thread = threading.Thread(target=spawn)
os.set_inheritable(file.fileno(), True)
thread.start()
assert file.write(memoryview(pages)) == len(pages)
running = False
thread.join()
file.close()
"""
    command = [sys.executable, "-c", script]
    command += [str(mount.path / "old.bin"), str(mount.path / "step-1" / "model.pt")]
    subprocess.run(command, check=True, timeout=200)
    check_stored(mount, "step-1/model.pt", b"h" * 4096 + SOURCE * 4)
    check_one_worker(mount)
