"""The manual pages say what the commands say, and groff reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/man"


def texts(directory: Path) -> dict[str, str]:
    """Both sections."""
    places = (*directory.glob("*.1"), *directory.with_name("man8").glob("*.8"))
    return {path.name: path.read_text(encoding="utf-8") for path in places}


def test_pages_are_those_of_the_commands(tmp_path: Path) -> None:
    """If not: `python tools/write_man.py`."""
    subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tools/write_man.py"), str(tmp_path / "man")],
        check=True,
        timeout=120,
    )
    assert texts(PAGES) == texts(tmp_path / "man")


@pytest.mark.clause("S568")
def test_every_program_of_the_package_has_a_page() -> None:
    """`mount.acpfs` had none, and mount(8) sends people to it."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    scripts = text.partition("[project.scripts]\n")[2].partition("\n[")[0]
    programs = re.findall(r'^"?([\w.-]+)"? = ', scripts, re.MULTILINE)
    assert len(programs) > 5
    assert (
        sorted(name for name in programs if not {f"{name}.1", f"{name}.8"} & texts(PAGES).keys())
        == []
    )


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff here to read them")
@pytest.mark.parametrize(
    "name",
    [
        "acpfs.1",
        "acpfs-mount.1",
        "acpfs-completion.1",
        "acpfs-ctl-wait.1",
        "acpfs-run.1",
        "mount.acpfs.8",
        "umount.fuse.acpfs.8",
    ],
)
def test_groff_reads_a_page(name: str) -> None:
    place = PAGES / name if name.endswith(".1") else PAGES.with_name("man8") / name
    command = ["groff", "-K", "utf8", "-man", "-Tutf8", "-ww", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
