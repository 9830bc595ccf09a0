"""Scripts that import the product's modules, unchanged, over a mount: with torch, and MindSpore by
itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from acpfs.compatible.places import SITE
from tests.frameworks.conftest import WORKLOADS, Place, workload
from tests.rig.ports import free_port

clause = pytest.mark.clause
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.mount,
    pytest.mark.transports("native"),
]


@pytest.fixture
def switched_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mount's directory, with PYTHONPATH as `acpfs mindio-path` has it."""
    monkeypatch.setenv("PYTHONPATH", str(SITE))
    monkeypatch.setenv("ACPFS_RUNTIME_DIR", str(place.runtime_dir))
    return place.directory


@clause("T98", "T100")
def test_torch_saves_and_loads_through_mindio_acp(
    switched_on: Path, place: Place, torch_python: str
) -> None:
    workload(torch_python, "mindio_torch", switched_on)
    place.settle()


@clause("T101")
def test_mindspore_saves_and_loads_through_mindio_acp(
    switched_on: Path, mindspore_python: str
) -> None:
    workload(mindspore_python, "mindio_mindspore", "save", switched_on)


@clause("T101")
@pytest.mark.long
def test_mindspore_loads_from_the_storage_what_went_through_mindio_acp(
    switched_on: Path, place: Place, mindspore_python: str
) -> None:
    workload(mindspore_python, "mindio_mindspore", "save", switched_on)
    place.settle()
    place.remount()
    workload(mindspore_python, "mindio_mindspore", "load", switched_on)


@clause("T107")
@pytest.mark.long
def test_mindspores_fault_tolerance_saves_when_a_rank_dies(
    switched_on: Path, place: Place, tmp_path: Path, mindspore_python: str
) -> None:
    """Its own callback code, over a double of the device; the checkpoint goes through `mindio_acp`
    into the mount.
    """
    port = free_port()
    environment = {
        **os.environ,
        "TTP_LOG_PATH": str(tmp_path / "logs"),
        "ACPFS_TRAIN_COORDINATOR_PYTHON": sys.executable,
    }
    environment |= {
        "MS_ENABLE_TFT": "{TTP:1}",
        "MS_TFT_IP": "127.0.0.1",
        "MS_TFT_PORT": str(port),
        "MS_WORKER_NUM": "2",
    }
    program = [
        mindspore_python,
        str(WORKLOADS / "mindio_fault_tolerance.py"),
        "rank",
        str(switched_on),
    ]
    ranks = [
        subprocess.Popen(program, env={**environment, "MS_NODE_ID": str(rank)}, cwd=tmp_path)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [1, -signal.SIGKILL], (
            "the exit callback of MindSpore ends with 1"
        )
    finally:
        for rank in ranks:
            rank.kill()
    workload(mindspore_python, "mindio_fault_tolerance", "check", switched_on)
    place.settle()
