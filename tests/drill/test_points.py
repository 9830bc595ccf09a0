"""Single deaths that the drill found to matter, at the fault point where they did."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.drill import points
from tests.drill.stand import Stand

pytestmark = [pytest.mark.mount, pytest.mark.timeout(120)]
BEFORE_COMMIT = next(n for n in range(len(points.POINTS)) if points.label(n).endswith("before state: commit"))


def write(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, b"y" * 700)


@pytest.mark.clause("S1")
def test_a_write_that_its_daemon_did_not_live_to_note_leaves_no_difference(tmp_path: Path):
    with Stand(tmp_path / "s", "overwrite", "native-direct", 1) as stand:
        file = stand.mount.path / "f"
        file.write_bytes(b"x" * 5000)
        stand.mount.flush()
        fd = os.open(file, os.O_WRONLY | os.O_APPEND)
        worker = stand.mount.pid
        for pid in stand.processes():
            if pid != worker:
                os.kill(pid, signal.SIGSTOP)  # nobody brings the worker back
        stand.charge(BEFORE_COMMIT, 1)
        writer = threading.Thread(target=write, args=(fd,), daemon=True)
        writer.start()
        stand.wait_fired()
        stand.kill_all()
        writer.join(20)
        with contextlib.suppress(OSError):
            os.close(fd)
        stand.mount._detach()
        stand.mount.start()
        stand.mount.ask("retry", paths=[""])
        stand.mount.flush()
        assert file.read_bytes() == (stand.shown / "f").read_bytes()
        assert file.stat().st_size == len(file.read_bytes())
