"""Passthrough writers held by the real kernel: the budget, who gets in between, and what ends a
hold.

The drain is slowed or stopped by `bandwidth`, so that RAM fills, and a hold lasts until the test
ends it. Writers run in threads or processes of their own; this thread looks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import (
    TimeoutError as FutureTimeoutError,
)  # the built-in one from Python 3.11 on
from pathlib import Path

import pytest

from tests.rig.mounts import AcpfsMount, began, wait_gone
from tests.rig.processes import Child, stop_processes

pytestmark = [
    pytest.mark.mount,
    pytest.mark.clause("S60"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]

MIB = 1 << 20
BUDGET = 128 * MIB
SLACK = 256 * MIB
BLOCK = os.urandom(MIB) * 4
WATCHDOG_S = 600.0
FCHOWNAT = ("260", "54")
"""Its number on x86-64, and on arm64."""
PACE_S = 0.03
"""Between two blocks of a writer (133 MB/s): a machine that stops the daemon for half a second has
it look before RAM is far over.
"""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[AcpfsMount]:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        "native-passthrough",
        ram=f"{BUDGET}",
        bandwidth="80M",
        watchdog_s=WATCHDOG_S,
    ) as mounted:
        yield mounted


def paced(steps: range) -> Iterator[int]:
    """One block may be written at each step."""
    pause = threading.Event()
    for step in steps:
        pause.wait(PACE_S)
        yield step


def write(path: Path, size: int, *, before_last: Callable[[], object] = bool) -> str:
    """Write a new file, a block at a time; returns the checksum of what it should be.

    `before_last`: what the last block waits for.
    """
    digest = hashlib.sha256()
    view = memoryview(BLOCK)
    with open(path, "wb", buffering=0) as file:
        for done in paced(range(0, size, len(BLOCK))):
            if done + len(BLOCK) >= size:
                before_last()
            piece = view[: min(len(BLOCK), size - done)]
            while piece:
                count = file.write(piece)
                assert count
                digest.update(piece[:count])
                piece = piece[count:]
    return digest.hexdigest()


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else hashlib.sha256(file.read()).hexdigest()
        )


def fill(mount: AcpfsMount) -> None:
    """Make RAM nearly full of what drains slowly."""
    write(mount.path / "before", 72 * MIB)


def held_writer(mount: AcpfsMount, name: str = "held") -> Child:
    """A process that writes 96 MiB, and is held in the middle until `written`."""
    mount.ask("set", key="bandwidth", value="1")
    fill(mount)
    path = mount.path / name
    child = Child(lambda: write(path, 96 * MIB))
    mount.wait_status(lambda status: any(h["path"] == name for h in status["held_files"]))
    return child


def written(mount: AcpfsMount, child: Child) -> str:
    """Let a held writer go on; the checksum of what it wrote."""
    mount.ask("set", key="bandwidth", value="0")
    digest: str = child.result()
    return digest


class Peak(threading.Thread):
    """The most that the RAM tier has held."""

    def __init__(self, mount: AcpfsMount) -> None:
        super().__init__(daemon=True)
        self._data = Path(mount.status()["ram"]["directory"]) / "data"
        self._ended = threading.Event()
        self.bytes = 0

    def run(self) -> None:
        while not self._ended.wait(0.002):
            try:
                info = os.statvfs(self._data)
            except (
                FileNotFoundError
            ):  # the test has failed, and its mount is gone: that is to be told, not this
                return
            self.bytes = max(self.bytes, (info.f_blocks - info.f_bfree) * info.f_frsize)

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.bytes


def test_files_that_do_not_fit_together_wait_for_the_drain(mount: AcpfsMount) -> None:
    peak = Peak(mount)
    peak.start()
    # all open at the same time
    files = [open(mount.path / f"file{n}", "wb", buffering=0) for n in range(4)]  # noqa: SIM115
    for file in files:
        for _ in paced(range(15)):
            assert file.write(BLOCK) == len(BLOCK)
        file.close()
    assert peak.end() <= BUDGET + 64 * MIB
    assert mount.status()["lane_choices"] == {"passthrough": 4}
    mount.flush()
    assert {checksum(mount.backing / f"file{n}") for n in range(4)} == {
        hashlib.sha256(BLOCK * 15).hexdigest()
    }


def test_a_held_file_can_be_looked_at_renamed_and_deleted(mount: AcpfsMount) -> None:
    child = held_writer(mount)
    os.stat(mount.path / "held")
    os.rename(mount.path / "held", mount.path / "renamed")
    (
        mount.path / "beside"
    ).touch()  # empty: a byte may have to wait for room, where the writer was held late
    assert child.running(0), "held all the while"
    os.unlink(mount.path / "renamed")
    written(mount, child)
    mount.flush()
    assert sorted(os.listdir(mount.path)) == ["before", "beside"]


def test_whoever_takes_the_lock_is_replaced_when_it_dies(mount: AcpfsMount) -> None:
    child = held_writer(mount)
    process = lock_taker(mount)
    os.kill(process, signal.SIGKILL)
    digest = written(mount, child)
    mount.flush()
    assert checksum(mount.backing / "held") == digest
    another = held_writer(
        mount, "another"
    )  # the first may have slipped through before there was a new process
    assert lock_taker(mount) != process
    written(mount, another)


@pytest.mark.clause("S213")
def test_a_writer_is_held_on_by_the_next_worker(mount: AcpfsMount) -> None:
    child = held_writer(mount)
    process = lock_taker(mount)
    wait_gone(mount.kill_worker())
    mount.wait_status(lambda status: any(h["path"] == "held" for h in status["held_files"]))
    assert lock_taker(mount) == process
    digest = written(mount, child)
    mount.flush()
    assert checksum(mount.backing / "held") == digest


@pytest.mark.clause("S247", "S213")
@pytest.mark.parametrize("killed", [False, True], ids=["", "worker killed"])
def test_many_writers_of_unknown_size_at_once_complete_in_little_ram(
    tmp_path: Path, *, killed: bool
) -> None:
    (tmp_path / "backing").mkdir()
    names = [f"model-{letter}.pt" for letter in "abcdefghijklmnop"]
    with (
        AcpfsMount(
            tmp_path / "backing",
            tmp_path / "mnt",
            "native",
            ram=f"{BUDGET}",
            bandwidth="1",
            watchdog_s=WATCHDOG_S,
        ) as mount,
        ThreadPoolExecutor(len(names)) as pool,
    ):
        written = {name: pool.submit(write, mount.path / name, 24 * MIB) for name in names}
        mount.wait_status(
            lambda status: bool(status["held_files"])
        )  # together three times what RAM takes
        if killed:
            wait_gone(mount.kill_worker())
            mount.wait_status(lambda status: bool(status["held_files"]))
        mount.ask("set", key="bandwidth", value="0")
        digests = {name: done.result() for name, done in written.items()}
        mount.flush()
        assert {name: checksum(mount.backing / name) for name in written} == digests
        assert killed or mount.status()["lane_choices"]["passthrough"] > 1


@pytest.mark.clause("S213")
def test_writers_that_no_worker_looks_after_are_stopped(mount: AcpfsMount) -> None:
    """Nobody told the process to: the worker stands still before it could."""
    with open(mount.path / "unseen", "wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        file.write(BLOCK)
        wait_until(lambda: watched_files(lock_taker(mount)) == 1)
        worker = mount.pid
        stop_processes([worker])
        try:
            wait_until(lambda: holds_a_lock(lock_taker(mount)))
            more = pool.submit(
                lambda: [file.write(BLOCK) for _ in range(4)]
            )  # one may slip through
            with pytest.raises(FutureTimeoutError):
                more.result(0.2)
        finally:
            with contextlib.suppress(
                ProcessLookupError
            ):  # taken for one that hangs, on a machine that stood still
                os.kill(worker, signal.SIGCONT)
        assert more.result() == [len(BLOCK)] * 4
    mount.ask("set", key="bandwidth", value="0")
    mount.flush()
    assert checksum(mount.backing / "unseen") == hashlib.sha256(BLOCK * 5).hexdigest()


def test_nothing_of_it_is_left_after_the_end(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        "native-passthrough",
        ram="128M",
        watchdog_s=WATCHDOG_S,
    ) as mount:
        write(mount.path / "a", 16 * MIB)
        process = lock_taker(mount)
        mount.umount()
        wait_gone(process)
        assert mount.leaks() == []


def test_a_budget_that_is_lowered_holds_writers(mount: AcpfsMount) -> None:
    mount.ask("set", key="ram", value=str(1 << 30))
    mount.ask("set", key="bandwidth", value="1")
    fill(mount)
    with open(mount.path / "lowered", "wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        file.writelines(BLOCK for _ in range(10))
        mount.ask("set", key="ram", value=str(100 * MIB))
        wait_until(lambda: holds_a_lock(lock_taker(mount)))
        more = pool.submit(lambda: [file.write(BLOCK) for _ in range(3)])  # one may slip through
        with pytest.raises(FutureTimeoutError):
            more.result(0.2)
        mount.ask("set", key="bandwidth", value="0")
        assert more.result() == [len(BLOCK)] * 3
    mount.flush()
    assert checksum(mount.backing / "lowered") == hashlib.sha256(BLOCK * 13).hexdigest()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WATCHDOG_S / 2
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def holds_a_lock(process: int) -> bool:
    """Whether one of its threads is in the call with which it takes a lock; nobody else has it when
    no writer writes.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if (task / "syscall").read_text().split()[0] in FCHOWNAT:
                    return True
    return False


def watched_files(process: int) -> int:
    """How many files a process has open that nobody can read or write through it: that is all it
    has of the kind.
    """
    found = -1  # one is the mount
    for file in Path(f"/proc/{process}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed between the list and the look
            found += (
                int(re.findall(r"^flags:\s*(\d+)", file.read_text(), re.MULTILINE)[0], 8)
                & os.O_PATH
                != 0
            )
    return found


def lock_takers(mount: AcpfsMount) -> list[int]:
    """The processes that take inode locks, the one that does first; the other one is there once
    there was something to hold.
    """
    found = []
    for pid in mount.living():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if b"hold_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(
                    (int(began(pid) or 0), pid)
                )  # not by number alone: small ones come again
    return [pid for _began, pid in sorted(found)]


def lock_taker(mount: AcpfsMount) -> int:
    """The one that takes inode locks; it may be about to start."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = lock_takers(mount)
        return bool(found)

    wait_until(is_there)
    return found[0]


def wait_lock_taker(mount: AcpfsMount) -> int:
    """It is there soon after the mount, also where nobody writes, and waits for messages once it is
    a real-time task.
    """
    wait_until(
        lambda: any(os.sched_getscheduler(pid) == os.SCHED_FIFO for pid in lock_takers(mount))
    )
    return lock_taker(mount)


@pytest.mark.clause("S60")
def test_who_holds_writers_is_there_before_the_first_one(mount: AcpfsMount) -> None:
    assert wait_lock_taker(mount) in mount.living()


@pytest.mark.clause("S228")
@pytest.mark.parametrize("worker_dies", [False, True])
def test_what_the_tmpfs_refused_is_not_published(mount: AcpfsMount, worker_dies: bool) -> None:
    """Whoever is to hold writers came too late: here, since something else fills the tmpfs."""
    path = mount.path / "file"
    path.write_bytes(b"old")
    mount.flush()
    data = Path(mount.status()["ram"]["directory"]) / "data"
    with contextlib.ExitStack() as stack:
        writer = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(writer, BLOCK)
        filler = os.open(data, os.O_TMPFILE | os.O_WRONLY)
        stack.callback(os.close, filler)
        info = os.fstatvfs(filler)
        os.posix_fallocate(filler, 0, info.f_bavail * info.f_frsize)
        with contextlib.suppress(OSError):
            while os.write(writer, BLOCK):
                pass
        if worker_dies:
            pid = mount.status()["worker"]["pid"]
            os.kill(pid, signal.SIGKILL)
            mount.wait_status(lambda status: status["worker"]["pid"] not in (None, pid))
        with pytest.raises(OSError, match="No space"):
            os.close(writer)
    mount.wait_status(lambda status: status["interrupted"] == 1)
    mount.flush()
    assert (mount.backing / "file").read_bytes() == b"old"
    mount.ask("discard", paths=["file"])


@pytest.mark.clause("S228")
def test_one_write_that_is_larger_than_ram_and_slack_waits_and_is_no_failure(
    mount: AcpfsMount,
) -> None:
    wait_lock_taker(mount)
    data = os.urandom(MIB) * ((BUDGET + SLACK) // MIB + 100)
    with open(mount.path / "large", "wb", buffering=0) as file:
        piece = memoryview(data)
        while piece:
            piece = piece[file.write(piece) or 0 :]
    mount.flush()
    assert (mount.backing / "large").read_bytes() == data
