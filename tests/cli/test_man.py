"""The manual pages say what the commands say, and groff reads them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/man"


def texts(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.1")}


def test_pages_are_those_of_the_commands(tmp_path: Path) -> None:
    """If not: `python tools/write_man.py`."""
    subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tools/write_man.py"), str(tmp_path)],
        check=True,
        timeout=120,
    )
    assert texts(PAGES) == texts(tmp_path)


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff here to read them")
@pytest.mark.parametrize(
    "name", ["acpfs.1", "acpfs-mount.1", "acpfs-completion.1", "acpfs-ctl-wait.1", "acpfs-run.1"]
)
def test_groff_reads_a_page(name: str) -> None:
    command = ["groff", "-K", "utf8", "-man", "-Tutf8", "-ww", str(PAGES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
