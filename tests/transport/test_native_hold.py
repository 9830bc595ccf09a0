"""Passthrough writers held by the real kernel: the budget, who gets in between, and what ends a hold.

The drain is slowed or stopped by `bandwidth`, so that RAM fills, and a hold lasts until the test ends it. Writers run in threads or
processes of their own; this thread looks.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # the built-in one from Python 3.11 on
from pathlib import Path

import pytest

from tests.rig.mounts import AcpfsMount, wait_gone
from tests.rig.processes import Child

pytestmark = [
    pytest.mark.mount,
    pytest.mark.clause("S60"),
    pytest.mark.skipif(os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"),
]

MIB = 1 << 20
BUDGET = 128 * MIB
SLACK = 256 * MIB
BLOCK = os.urandom(MIB) * 4
WATCHDOG_S = 120.0
PACE_S = 0.03
"""Between two blocks of a writer (133 MB/s): a machine that stops the daemon for half a second has it look before RAM is far over."""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[AcpfsMount]:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", "native-passthrough", ram=f"{BUDGET}", bandwidth="80M", watchdog_s=WATCHDOG_S
    ) as mounted:
        yield mounted


def paced(steps: range) -> Iterator[int]:
    """One block may be written at each step."""
    pause = threading.Event()
    for step in steps:
        pause.wait(PACE_S)
        yield step


def write(path: Path, size: int) -> str:
    """Write a new file, a block at a time; returns the checksum of what it should be."""
    digest, view = hashlib.sha256(), memoryview(BLOCK)
    with open(path, "wb", buffering=0) as file:
        for done in paced(range(0, size, len(BLOCK))):
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
            hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read()).hexdigest()
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
            info = os.statvfs(self._data)
            self.bytes = max(self.bytes, (info.f_blocks - info.f_bfree) * info.f_frsize)

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.bytes


def test_files_that_do_not_fit_together_wait_for_the_drain(mount: AcpfsMount) -> None:
    peak = Peak(mount)
    peak.start()
    files = [open(mount.path / f"file{n}", "wb", buffering=0) for n in range(4)]  # noqa: SIM115 - all open at the same time
    for file in files:
        for _ in paced(range(15)):
            assert file.write(BLOCK) == len(BLOCK)
        file.close()
    assert peak.end() <= BUDGET + 64 * MIB
    assert mount.status()["lane_choices"] == {"passthrough": 4}
    mount.flush()
    assert {checksum(mount.backing / f"file{n}") for n in range(4)} == {hashlib.sha256(BLOCK * 15).hexdigest()}


def test_a_held_file_can_be_looked_at_renamed_and_deleted(mount: AcpfsMount) -> None:
    child = held_writer(mount)
    os.stat(mount.path / "held")
    os.rename(mount.path / "held", mount.path / "renamed")
    (mount.path / "beside").touch()  # empty: a byte may have to wait for room, where the writer was held late
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
    another = held_writer(mount, "another")  # the first may have slipped through before there was a new process
    assert lock_taker(mount) != process
    written(mount, another)


def test_a_hold_ends_with_the_worker_and_the_writer_goes_on_with_the_next(mount: AcpfsMount) -> None:
    child = held_writer(mount)
    process = lock_taker(mount)
    mount.kill_worker()
    wait_gone(process)
    digest = written(mount, child)
    mount.flush()
    assert checksum(mount.backing / "held") == digest


def test_nothing_of_it_is_left_after_the_end(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "native-passthrough", ram="128M", watchdog_s=WATCHDOG_S) as mount:
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
        mount.wait_status(lambda status: status["held_files"])
        more = pool.submit(lambda: [file.write(BLOCK) for _ in range(3)])  # one may slip through
        with pytest.raises(FutureTimeoutError):
            more.result(0.2)
        mount.ask("set", key="bandwidth", value="0")
        assert more.result() == [len(BLOCK)] * 3
    mount.flush()
    assert checksum(mount.backing / "lowered") == hashlib.sha256(BLOCK * 13).hexdigest()


def lock_taker(mount: AcpfsMount) -> int:
    """The process that takes inode locks: the daemon's only child."""
    children = Path(f"/proc/{mount.pid}/task").glob("*/children")
    (found,) = {int(pid) for file in children for pid in file.read_text().split()}
    return found
