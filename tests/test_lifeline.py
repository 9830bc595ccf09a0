"""The rig itself: whatever way a test's process ends, nothing of what it mounted stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig import lifeline
from tests.rig.mounts import AcpfsMount, mounts_below, take_down, wait_gone
from tests.rig.watcher import Armed, Watcher

REPOSITORY = Path(__file__).parents[1]
_HOLDS_A_MOUNT = """
import os, sys, time
from pathlib import Path
from tests.rig import lifeline
from tests.rig.mounts import AcpfsMount
base = Path(sys.argv[1])
lifeline.arm(base)
with AcpfsMount(base / "backing", base / "mnt", sys.argv[2], ram="64M") as mount:
    print(mount.supervisor, mount.pid, flush=True)
    lifeline.arm(mount.path, mount.runtime_dir, float(sys.argv[3]))
    if os.fork() == 0:  # a child that lives on has all pipes of its parent
        time.sleep(60)
    time.sleep(60)
"""


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "backing").mkdir()
    yield tmp_path
    take_down(tmp_path / "mnt", tmp_path / "mnt.run")


def _holder(
    base: Path, transport: str, watchdog_s: float
) -> tuple[subprocess.Popen[str], list[int]]:
    words = [sys.executable, "-c", _HOLDS_A_MOUNT, str(base), transport, str(watchdog_s)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True
    )
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


def _watcher_of(pid: int) -> int:
    """The child that outlives it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(
        int(child)
        for child in children
        if b"tests.rig.watcher" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


def _end_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_mount_goes_with_the_process_that_made_it(base: Path, transport: str) -> None:
    process, (supervisor, worker) = _holder(base, transport, 300)
    try:
        watcher = _watcher_of(process.pid)
        assert mounts_below(base)
        process.kill()
        for pid in (supervisor, worker, watcher):
            wait_gone(pid, 60)
        assert mounts_below(base) == []
        assert not (base / "mnt.run").exists()
    finally:
        _end_group(process)


def test_a_mount_goes_at_its_deadline(base: Path) -> None:
    process, (supervisor, worker) = _holder(base, "libfuse", 1)
    try:
        watcher = _watcher_of(process.pid)
        for pid in (supervisor, worker):
            wait_gone(pid, 60)
        process.kill()
        wait_gone(watcher, 60)
        assert mounts_below(base) == []
    finally:
        _end_group(process)


def test_what_was_taken_down_is_watched_no_more(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, object]] = []
    monkeypatch.setattr(lifeline, "_tell", lambda **words: said.append(words))
    with AcpfsMount(base / "backing", base / "mnt", "libfuse", ram="64M"):
        pass
    watcher = Watcher(-1)
    for order in said:
        watcher._obey(order)
    assert said
    assert watcher.armed == {}


def test_arming_again_moves_the_deadline() -> None:
    watcher = Watcher(-1)
    for deadline_s in (0.0, 1000.0):
        watcher._obey({"arm": "/nowhere", "runtime_dir": None, "deadline_s": deadline_s})
    assert isinstance(watcher.armed["/nowhere"], Armed)
    left_ms = watcher._left_ms()
    assert left_ms is not None
    assert left_ms > 900_000


def test_a_process_that_has_the_number_of_one_that_has_ended_is_left_alone(tmp_path: Path) -> None:
    """Numbers come again while a test runs: there are 32,768 on a small machine, and each thread
    takes one.
    """
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "mnt")
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            mount._pids.add((other.pid, "1"))  # a worker that began when the machine did
            assert mount.living() == []
            mount.abort()
            assert other.poll() is None
        finally:
            other.kill()
