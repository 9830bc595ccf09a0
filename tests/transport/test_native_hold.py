"""Passthrough writers held by the real kernel: the budget, who gets in between, and what ends a hold.

The drain is slowed by `bandwidth`, so that RAM fills. Writers run in threads or processes of their own; this thread looks.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
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


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[AcpfsMount]:
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", "native-passthrough", ram=f"{BUDGET}", bandwidth="80M", watchdog_s=WATCHDOG_S
    ) as mounted:
        yield mounted


def write(path: Path, size: int, *, chunk: int = len(BLOCK)) -> str:
    """Write a new file; returns the checksum of what it should be."""
    digest, view = hashlib.sha256(), memoryview(BLOCK)
    with open(path, "wb", buffering=0) as file:
        for done in range(0, size, chunk):
            piece = view[: min(chunk, size - done)]
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
    """A process that writes 96 MiB, and is held in the middle."""
    fill(mount)
    path = mount.path / name
    child = Child(lambda: write(path, 96 * MIB))
    mount.wait_status(lambda status: any(h["path"] == name for h in status["held_files"]))
    return child


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
        for _ in range(15):
            assert file.write(BLOCK) == len(BLOCK)
        file.close()
    assert peak.end() <= BUDGET + 64 * MIB
    assert mount.status()["lane_choices"] == {"passthrough": 4}
    mount.flush()
    assert {checksum(mount.backing / f"file{n}") for n in range(4)} == {hashlib.sha256(BLOCK * 15).hexdigest()}


def test_a_held_file_can_be_looked_at_renamed_and_deleted(mount: AcpfsMount) -> None:
    child = held_writer(mount)
    started = time.monotonic()
    os.stat(mount.path / "held")
    os.rename(mount.path / "held", mount.path / "renamed")
    (mount.path / "beside").write_bytes(b"x")
    os.unlink(mount.path / "renamed")
    assert time.monotonic() - started < 2.0
    child.result()
    mount.flush()
    assert sorted(os.listdir(mount.path)) == ["before", "beside"]


def test_whoever_takes_the_lock_is_replaced_when_it_dies(mount: AcpfsMount) -> None:
    child = held_writer(mount)
    process = lock_taker(mount)
    os.kill(process, signal.SIGKILL)
    digest = child.result()
    mount.flush()
    assert checksum(mount.backing / "held") == digest
    assert lock_taker(mount) != process


def test_a_hold_ends_with_the_worker_and_the_writer_goes_on_with_the_next(mount: AcpfsMount) -> None:
    child = held_writer(mount)
    process = lock_taker(mount)
    mount.kill_worker()
    wait_gone(process)
    digest = child.result()
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
    fill(mount)
    with open(mount.path / "lowered", "wb", buffering=0) as file:
        file.writelines(BLOCK for _ in range(10))
        mount.ask("set", key="ram", value=str(100 * MIB))
        mount.wait_status(lambda status: status["held_files"])
        started = time.monotonic()
        file.write(BLOCK)
        file.write(BLOCK)  # one may slip through
        file.write(BLOCK)
        assert time.monotonic() - started > 0.2
    mount.flush()
    assert checksum(mount.backing / "lowered") == hashlib.sha256(BLOCK * 13).hexdigest()


def lock_taker(mount: AcpfsMount) -> int:
    """The process that takes inode locks: the daemon's only child."""
    children = Path(f"/proc/{mount.pid}/task").glob("*/children")
    (found,) = {int(pid) for file in children for pid in file.read_text().split()}
    return found
