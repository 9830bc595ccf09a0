"""The wall clock steps, far and in both directions, while saves drain: intervals, order and
deadlines do not depend on it.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from acpfs import client
from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from tests.drill import clock, faults
from tests.drill.stand import INJECT, Stand
from tests.rig.mounts import REPOSITORY, AcpfsMount, wait_gone

pytestmark = [pytest.mark.mount]
DAY_S = 86_400.0
STEPS_S = (40 * 365 * DAY_S, -20 * 365 * DAY_S, 0.0)


@pytest.mark.clause("S120")
def test_a_clock_that_steps_stops_nothing(tmp_path: Path) -> None:
    with Stand(
        tmp_path / "s", "overwrite", "native", 1, steps_clock=True, max_dirty_age=0.1
    ) as stand:
        worker = stand.mount.pid
        for offset_s in STEPS_S:
            stand.go()
            faults.let_work(0.1)
            clock.step(stand.clock, offset_s)
            faults.let_work(0.1)
            assert faults.nothing_noticed(stand) == []
            (stand.mount.path / "one").write_bytes(b"x")
            assert (
                abs(
                    os.stat(stand.mount.path / "one").st_mtime
                    - stand.mount.status()["worker"]["started_at"]
                    - offset_s
                )
                < DAY_S / 2
            )
            status = stand.mount.status()
            assert status["worker"]["pid"] == worker
            assert status["backing_health"]["state"] == "ok"
            see_from_outside(stand)
            stand.begin()


def see_from_outside(stand: Stand) -> None:
    """What is known of the backing directory becomes old by another clock than the one that
    steps.
    """
    outside = stand.shown / "outside"
    shown = stand.mount.path / "outside"
    outside.write_bytes(b"made by others")
    wait_until(shown.exists)
    outside.unlink()
    wait_until(lambda: not shown.exists())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.02)


@pytest.mark.clause("S120")
def test_what_a_worker_wrote_before_its_clock_stepped_is_known_to_the_next(tmp_path: Path) -> None:
    """Times in the state database come from another clock than those of the tier files by now."""
    with Stand(tmp_path / "s", "overwrite", "native", 1, steps_clock=True) as stand:
        stand.go()
        faults.let_work(0.2)
        clock.step(stand.clock, -DAY_S)
        faults.let_work(0.1)
        os.kill(stand.mount.pid, signal.SIGKILL)
        stand.wait_served()
        assert faults.nothing_noticed(stand) == []
        (stand.mount.path / "saved").write_bytes(b"saved")
        stand.kill_all()
        stand.kill_application()
        stand.mount.detach()
        clock.step(stand.clock, 0.0)
        stand.mount.start()
        assert (stand.mount.path / "saved").read_bytes() == b"saved"
        assert stand.mount.status()["interrupted"] == 0
        stand.mount.flush()
        assert (stand.shown / "saved").read_bytes() == b"saved"


@pytest.mark.clause("S115", "S120")
def test_a_checkpoint_that_is_safe_is_told_whatever_the_clock_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a worker that has not seen it come to be safe."""
    file = tmp_path / "clock"
    told = queue.SimpleQueue[client.SafeCheckpoint]()
    clock.step(file, 0.0)
    (tmp_path / "backing").mkdir()
    environment = {clock.VARIABLE: str(file), "PYTHONPATH": f"{INJECT}:{REPOSITORY}"}
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", "native", environment=environment, watchdog_s=120
    ) as mount:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(mount.runtime_dir))
        with client.on_persisted(mount.path, told.put, settle_s=1.0):
            for step, offset_s in enumerate((-DAY_S, DAY_S, 0.0)):
                clock.step(file, offset_s)
                (mount.path / f"checkpoint-{step}.pt").write_bytes(b"saved")
                mount.flush()
                wait_gone(mount.kill_worker())
                assert told.get(timeout=60).step == step
