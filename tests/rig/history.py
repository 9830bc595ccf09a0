"""Older code of this checkout, for tests of what one version leaves to the next; they are skipped
where the history is not there.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from acpfs import __version__
from tests.rig.mounts import REPOSITORY


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def before(text: str, path: str) -> str:
    """The commit before the one that brought this text to a file."""
    found = _git("log", "--format=%H", f"-S{text}", "--", path).splitlines()
    if not found or not (
        parent := _git("rev-parse", "--verify", "--quiet", f"{found[-1]}~1^{{commit}}")
    ):
        pytest.skip(f"this checkout's history does not go back to before {text!r}")
    return parent


def before_state_version(version: int) -> str:
    """The commit before the one that brought this format of the state."""
    return before(f"STATE_VERSION = {version}", "acpfs/ram/state.py")


def released() -> str:
    """The version that was cut last: its tag, else the commit that wrote it."""
    tag = _git("rev-parse", "--verify", "--quiet", f"v{__version__}^{{commit}}")
    if tag:
        return tag
    found = _git("log", "--format=%H", f'-S"{__version__}"', "--", "acpfs/__init__.py")
    if not found:
        pytest.skip(f"this checkout's history does not go back to {__version__}")
    return found.splitlines()[-1]


def commit_before() -> str:
    """The last commit but one."""
    if not (found := _git("rev-parse", "--verify", "--quiet", "HEAD~1^{commit}")):
        pytest.skip("this checkout has no history")
    return found


def checkout(commit: str, directory: Path, *paths: str) -> Path:
    """These paths as they were then, in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        ["git", "-C", str(REPOSITORY), "archive", commit, "--", *paths], stdout=subprocess.PIPE
    ) as packed:
        subprocess.run(
            ["tar", "-xf", "-", "-C", str(directory)], stdin=packed.stdout, check=True, timeout=300
        )
    assert packed.returncode == 0
    return directory


def installation_before_state_version(version: int, directory: Path) -> Path:
    """A directory with that package, for PYTHONPATH."""
    return checkout(before_state_version(version), directory, "acpfs")
