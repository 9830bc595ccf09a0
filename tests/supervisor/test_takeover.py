"""Workers die by kill -9 under load, again and again; applications see a pause, and nothing else. The programs' own account decides."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.rig.mounts import REPOSITORY, AcpfsMount, wait_gone

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"),
]
SECONDS = float(os.environ.get("ACPFS_STORM_S", "6"))
PAUSE_S_MAX = 1.0
WATCHDOG_S = 120.0
PAIRS = [["checkpoints", "renames"], ["append_log", "small_files"], ["mapped", "deleted"], ["listings", "overwrites"]]


def run_through(mount: AcpfsMount, names: list[str], kill_every_s: tuple[float, float] = (0.1, 0.5)) -> tuple[int, float]:
    """Run programs, kill workers; (kills, longest pause in seconds)."""
    programs = {}
    for name in names:
        (mount.path / name).mkdir()
        command = [sys.executable, "-m", "tests.supervisor.storm", name, str(mount.path / name), str(SECONDS)]
        programs[name] = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    chooser, kills, pauses = random.Random(0), 0, [0.0]
    end = time.monotonic() + SECONDS - 0.5
    while time.monotonic() < end:
        threading.Event().wait(chooser.uniform(*kill_every_s))
        wait_gone(mount.kill_worker())
        kills += 1
        pauses.append(mount.status()["worker"]["pause_s"])
    failed = {}
    for name, program in programs.items():
        _out, complaint = program.communicate(timeout=60)
        if program.returncode:
            failed[name] = complaint[-1500:]
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    return kills, max(pauses)


@pytest.mark.clause("S81")
@pytest.mark.transports("native-direct", "native-passthrough")
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_programs_go_on(tmp_path: Path, transport: str, names: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACPFS_EARLY_DEATHS_MAX", "1000000")
    (tmp_path / "backing").mkdir()
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S) as mount:
        kills, pause_s = run_through(mount, names)
        mount.flush()
        for name in names:
            shown = {p.relative_to(mount.path): p.read_bytes() for p in (mount.path / name).rglob("*") if p.is_file()}
            stored = {p.relative_to(mount.backing): p.read_bytes() for p in (mount.backing / name).rglob("*") if p.is_file()}
            assert stored == shown
        status = mount.status()
        assert (status["open_files"], status["interrupted"], status["parked"], status["queue_length"]) == (0, 0, 0, 0)
        mount.umount()
        assert mount.leaks() == []
    assert kills >= 5
    assert pause_s < PAUSE_S_MAX
