"""`acpfs.torch`: the tests below `saves` need torch, and run in the interpreter that has it, in a
mount that is made here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.conftest import Place
from tests.training.test_ranks import LIBRARIES, REPOSITORY

clause = pytest.mark.clause
SAVES = Path(__file__).parent / "saves"
TIMEOUT_S = 900

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.mount]


@pytest.mark.timeout(TIMEOUT_S)
def test_with_torch(place: Place, torch_python: str, tmp_path: Path) -> None:
    words = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["--basetemp", str(tmp_path / "plain"), str(SAVES)]
    done = subprocess.run(
        [torch_python, "-m", "tests.training.ranks", str(LIBRARIES), *words],
        cwd=REPOSITORY,
        timeout=TIMEOUT_S,
        env={**os.environ, "ACPFS_SAVES": str(place.directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-4000:]}"
    place.settle()


SCRIPT = """
import sys
import importlib.util
import os
assert "torch" not in sys.modules or "spares" in sys.argv
assert importlib.util.find_spec("torch").origin.endswith("__init__.py")  # asks, and takes nothing
import torch
assert __name__ == "__main__" and sys.argv[0].endswith("train.py"), sys.argv
assert torch.__spec__.loader is torch.__loader__
saved = os.path.join(sys.argv[1], f"model-{os.environ['RANK']}.pt")
torch.save({"weight": torch.arange(5_000_000)}, saved)
assert torch.load(saved)["weight"][-1] == 4_999_999
print(torch.save.__module__, torch.load.__module__)
"""


@clause("T223")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--fast-saves", "acpfs.torch.saving acpfs.torch.loading"),
        ("--fast-saves --spares 1", "acpfs.torch.saving acpfs.torch.loading"),
        ("", "torch.serialization torch.serialization"),
    ],
)
def test_a_script_that_nobody_may_touch(
    options: str, expected: str, place: Place, torch_python: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    words = [sys.executable, "-m", "acpfs.cli.run", *options.split(), str(tmp_path / "train.py")]
    words += [str(place.directory), *options.removeprefix("--fast-saves --").split()]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHON_EXEC": torch_python},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr
    place.settle()


BEHIND_THE_LAST_LINE = """
import os, sys, threading
import torch

class Record:
    number = 7

def late():
    threading.main_thread().join()
    saved = os.path.join(sys.argv[1], "model.pt")
    torch.save({"record": Record(), "weight": torch.arange(5_000_000)}, saved)
    assert torch.load(saved, weights_only=False)["record"].number == 7
    print(torch.save.__module__)

threading.Thread(target=late).start()
"""


@clause("T223")
@pytest.mark.parametrize("options", ["--fast-saves", "--fast-saves --spares 1", "--spares 1"])
def test_a_thread_that_saves_behind_the_last_line(
    options: str, place: Place, torch_python: str, tmp_path: Path
) -> None:
    """As under the interpreter: the program's own classes are there until its threads end."""
    (tmp_path / "train.py").write_text(BEHIND_THE_LAST_LINE, encoding="utf-8")
    words = [sys.executable, "-m", "acpfs.cli.run", *options.split(), str(tmp_path / "train.py")]
    done = subprocess.run(
        [*words, str(place.directory)],
        cwd=tmp_path,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHON_EXEC": torch_python},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = "acpfs.torch.saving" if "fast" in options else "torch.serialization"
    assert done.stdout.strip() == expected, done.stderr
    place.settle()
