"""Files of the coordinator that cannot be written: nobody waits for them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from acpfs.training.messages import ExitStatus
from tests.training.gasp_job import GaspJob, until


@pytest.mark.clause("T55")
def test_a_log_that_cannot_be_written_holds_up_nobody_and_is_written_later(tmp_path: Path) -> None:
    """As in a mount whose RAM is full: here it is a pipe that nobody reads."""
    logs = tmp_path / "run" / ".acpfs-job" / "job" / "logs"
    logs.mkdir(parents=True)
    os.mkfifo(logs / "coordinator-0.log")
    pipe = os.open(logs / "coordinator-0.log", os.O_RDWR | os.O_NONBLOCK)
    try:
        with GaspJob(tmp_path / "run", 2, {"all": (0, 1)}) as job:
            job.wait("Protected", 0, 1)
            for size in (65536, 4096, 1):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        os.write(pipe, b"x" * size)
            job.kill(0)
            assert job.left(1)["status"] == ExitStatus.SAVED
            assert not job.faults(), "it is written after the lines before it"
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.read(pipe, 65536)
            until(job.faults)
            assert job.coordinators[0].wait(60) == 0
    finally:
        os.close(pipe)
