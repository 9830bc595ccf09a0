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

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "venv/bin"
        self._programs = directory / "programs"
        self._programs.mkdir()
        for name in PROGRAMS:
            found = shutil.which(name)
            assert found, name
            (self._programs / name).symlink_to(found)
        subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True, timeout=300)
        self.run(str(self.bin / "python"), "-m", "pip", "install", "--no-input", "--quiet", str(REPOSITORY))

    def run(self, *command: str, code: int = 0) -> str:
        """What a command says that ends with `code`."""
        environment = {"PATH": f"{self.bin}:{self._programs}", **{k: v for k, v in os.environ.items() if k not in {"PATH", "PYTHONPATH"}}}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("install"))


@pytest.mark.long  # an environment from the package registry: a minute
@pytest.mark.mount
@pytest.mark.timeout(600)
def test_mount_without_a_compiler(installed: Installed, tmp_path: Path) -> None:
    backing, mountpoint = tmp_path / "backing", tmp_path / "mount"
    backing.mkdir()
    mountpoint.mkdir()
    assert "pyfuse3" not in installed.run(str(installed.bin / "python"), "-m", "pip", "list")
    refused = installed.run("acpfs", "mount", "--transport", "libfuse", str(backing), str(mountpoint), code=ENVIRONMENT_EXIT)
    assert "pip install 'acpfs[libfuse]'" in refused
    assert "Traceback" not in refused
    installed.run("acpfs", "mount", str(backing), str(mountpoint), "--ram", "64M")
    try:
        (mountpoint / "model.bin").write_bytes(b"w" * (1 << 20))
    finally:
        installed.run("acpfs", "umount", str(mountpoint), "--timeout", "60")
    assert (backing / "model.bin").read_bytes() == b"w" * (1 << 20)
    assert "native" in installed.run("acpfs", "doctor")
