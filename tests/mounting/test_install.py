"""A machine without a compiler and libfuse's headers: `pip install .` and a mount."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT_EXIT = 6
PROGRAMS = ("fusermount3", "openssl", "umount", "mount", "cat", "sh")
"""What PATH has of the machine; nothing that compiles."""


class Installed:
    """An environment with acpfs and nothing else, on a PATH without a compiler."""

    def __init__(self, directory: Path, *, made: bool = False) -> None:
        """`made`: the environment is there."""
        self.bin = directory / "venv/bin"
        self._programs = directory / "programs"
        self._programs.mkdir()
        for name in PROGRAMS:
            found = shutil.which(name)
            assert found, name
            (self._programs / name).symlink_to(found)
        if made:
            return
        subprocess.run(
            [sys.executable, "-m", "venv", str(directory / "venv")], check=True, timeout=300
        )
        self.run(
            str(self.bin / "python"),
            "-m",
            "pip",
            "install",
            "--no-input",
            "--quiet",
            str(REPOSITORY),
        )

    def run(self, *command: str, code: int = 0) -> str:
        """What a command says that ends with `code`."""
        environment = {
            "PATH": f"{self.bin}:{self._programs}",
            **{k: v for k, v in os.environ.items() if k not in {"PATH", "PYTHONPATH"}},
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("install"))


def save(installed: Installed, top: Path) -> None:
    """Mount, write, unmount; the bytes are on the storage."""
    backing = top / "backing"
    mountpoint = top / "mount"
    backing.mkdir()
    mountpoint.mkdir()
    installed.run("acpfs", "mount", str(backing), str(mountpoint), "--ram", "64M")
    try:
        (mountpoint / "model.bin").write_bytes(b"w" * (1 << 20))
    finally:
        installed.run("acpfs", "umount", str(mountpoint), "--timeout", "60")
    assert (backing / "model.bin").read_bytes() == b"w" * (1 << 20)


@pytest.mark.long  # an environment from the package registry: a minute
@pytest.mark.mount
@pytest.mark.timeout(1800)
def test_mount_without_a_compiler(installed: Installed, tmp_path: Path) -> None:
    assert "pyfuse3" not in installed.run(str(installed.bin / "python"), "-m", "pip", "list")
    for name in ("storage", "unused"):
        (tmp_path / name).mkdir()
    words = ("--transport", "libfuse", str(tmp_path / "storage"), str(tmp_path / "unused"))
    refused = installed.run("acpfs", "mount", *words, code=ENVIRONMENT_EXIT)
    assert "pip install 'acpfs[libfuse]'" in refused
    assert "Traceback" not in refused
    save(installed, tmp_path)
    assert "native" in installed.run("acpfs", "doctor")


@pytest.mark.long  # all wheels from the package registry: a minute
@pytest.mark.mount
@pytest.mark.timeout(1800)
def test_one_file_installs_where_there_is_no_network(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    bundle = tmp_path / "acpfs.run"
    directory = tmp_path / "venv"
    environment = {**os.environ, "ACPFS_BUNDLE_PYTHONS": version}
    subprocess.run(
        ["bash", str(REPOSITORY / "tools/bundle"), str(bundle)],
        env=environment,
        timeout=300,
        check=True,
        capture_output=True,
    )
    alone = [
        "unshare",
        "--net",
        "env",
        f"PYTHON={sys.executable}",
        "sh",
        str(bundle),
        str(directory),
    ]
    subprocess.run(alone, timeout=300, check=True, capture_output=True)
    again = subprocess.run(alone, timeout=300, check=False, capture_output=True, text=True)
    assert (again.returncode, "has acpfs already" in again.stderr) == (5, True)
    save(Installed(tmp_path, made=True), tmp_path)
