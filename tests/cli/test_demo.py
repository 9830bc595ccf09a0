"""`acpfs demo`: all that it shows holds, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from acpfs.descriptors import readable
from tests.frameworks.conftest import interpreter
from tests.rig.mounts import mounts_below


def with_torch() -> dict[str, str]:
    """The environment of an interpreter that finds torch, beside all that it finds else."""
    asked = "import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))"
    place = subprocess.run(
        [interpreter("ACPFS_TORCH_PYTHON", "torch"), "-c", asked],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout.strip()
    return {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{place}"}


@pytest.mark.mount
@pytest.mark.clause("S531", "S570")
@pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
@pytest.mark.parametrize("saves", ["without torch", "with torch", "with a broken torch"])
def test_it_shows_what_it_says_and_leaves_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, saves: str
) -> None:
    words = ["demo", "--directory", str(tmp_path), "--size", str(8 << 20)]
    environment = dict(os.environ)
    if saves == "with torch":
        environment = with_torch()
    elif saves == "with a broken torch":
        broken = tmp_path_factory.mktemp("site")
        (broken / "torch.py").write_text("import no_such_library_of_torch\n")
        environment["PYTHONPATH"] = f"{broken}:{environment.get('PYTHONPATH', '')}"
    else:
        words.append("--no-torch")
    done = subprocess.run(
        [sys.executable, "-m", "acpfs.cli.main", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 3
    assert "was killed (-9) in the middle" in done.stdout
    assert ("by torch.save as it is" in done.stdout) is (saves == "with torch")
    assert ("cannot be imported" in done.stdout) is (saves == "with a broken torch")
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
    words = ["demo", "--directory", str(tmp_path), "--size", str(8 << 20), "--no-torch"]
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
            # or, where this process got no turn meanwhile, when it is mounted: the same must hold
            while not list(tmp_path.glob("*/storage")) and not readable(running.stdout, 0.001):
                pass
        running.send_signal(number)
        out, err = running.communicate(timeout=240)
    assert running.returncode == 128 + number, out + err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert mounts_below(tmp_path) == []
