"""`acpfs demo`: all that it shows holds, and nothing stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
