"""Completion: the scripts parse in their shell, and the commands answer them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from acpfs.cli.completion import PROGRAMS

BIN = Path(sys.executable).parent


def complete(program: str, *words: str) -> set[str]:
    """What bash is told to offer for the last of `words`."""
    environment = {
        **os.environ,
        f"_{program.replace('-', '_').upper()}_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join([program, *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [str(BIN / program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return {line.split(",", 1)[1] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_parses_and_names_all_programs(shell: str) -> None:
    done = subprocess.run(
        [str(BIN / "acpfs"), "completion", shell],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(f" {program}" in done.stdout for program in PROGRAMS)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, text=True, check=True, timeout=60)


def test_commands_and_options_are_offered() -> None:
    assert complete("acpfs", "um") == {"umount"}
    assert complete("acpfs", "doctor", "--f") == {"--fix"}
    assert complete("acpfs-ctl", "pin", "run1/st") == {
        "run1/st"
    }  # of the type "file": the shell itself goes on
    assert "--fsync" in complete("acpfs", "mount", "--fs")
