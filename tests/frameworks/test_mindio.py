"""Scripts that import the product's modules, unchanged, over a mount: with torch, and MindSpore by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.compatible.places import SITE
from tests.frameworks.conftest import Place, workload

clause = pytest.mark.clause
pytestmark = [pytest.mark.frameworks, pytest.mark.mount, pytest.mark.timeout(300), pytest.mark.transports("native")]


@pytest.fixture
def switched_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mount's directory, with PYTHONPATH as `acpfs mindio-path` has it."""
    monkeypatch.setenv("PYTHONPATH", str(SITE))
    monkeypatch.setenv("ACPFS_RUNTIME_DIR", str(place.runtime_dir))
    return place.directory


@clause("T98", "T100")
def test_torch_saves_and_loads_through_mindio_acp(switched_on: Path, place: Place, torch_python: str) -> None:
    workload(torch_python, "mindio_torch", switched_on)
    place.settle()


@clause("T101")
def test_mindspore_saves_and_loads_through_mindio_acp(switched_on: Path, mindspore_python: str) -> None:
    workload(mindspore_python, "mindio_mindspore", "save", switched_on)


@clause("T101")
@pytest.mark.long
def test_mindspore_loads_from_the_storage_what_went_through_mindio_acp(switched_on: Path, place: Place, mindspore_python: str) -> None:
    workload(mindspore_python, "mindio_mindspore", "save", switched_on)
    place.settle()
    place.remount()
    workload(mindspore_python, "mindio_mindspore", "load", switched_on)
