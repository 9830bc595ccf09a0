"""`acpfs demo`: all that it shows holds, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from acpfs.descriptors import readable
from tests.rig.mounts import mounts_below


@pytest.mark.mount
@pytest.mark.clause("S531")
@pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
def test_it_shows_what_it_says_and_leaves_nothing(tmp_path: Path) -> None:
    words = ["demo", "--directory", str(tmp_path), "--size", str(8 << 20)]
    done = subprocess.run(
        [sys.executable, "-m", "acpfs.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 3
    assert "was killed (-9) in the middle" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert mounts_below(tmp_path) == []


@pytest.mark.mount
@pytest.mark.clause("S531")
@pytest.mark.parametrize("when", ["while it is mounted", "while it mounts"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
def test_who_ends_it_by_a_signal_finds_nothing_left(
    tmp_path: Path, number: signal.Signals, when: str
) -> None:
    words = ["demo", "--directory", str(tmp_path), "--size", str(8 << 20)]
    with subprocess.Popen(
        [sys.executable, "-m", "acpfs.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        if when == "while it is mounted":
            assert "mounted" in running.stdout.readline()
        else:
            while not list(tmp_path.glob("*/storage")):
                assert not readable(running.stdout, 0.001), running.stdout.readline()
        running.send_signal(number)
        out, err = running.communicate(timeout=240)
    assert running.returncode == 128 + number, out + err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert mounts_below(tmp_path) == []
