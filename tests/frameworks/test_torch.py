"""PyTorch and what stands on it, unmodified."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import Place, workload

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.mount]


@pytest.mark.parametrize("case", ["zip", "file-object", "legacy", "mmap", "overwrite", "rotate"])
def test_torch_save_and_load(place: Place, torch_python: str, case: str) -> None:
    workload(torch_python, "torch_files", case, place.directory)
    place.settle()


@pytest.mark.parametrize("case", ["save", "async"])
def test_distributed_checkpoint_fsyncs_without_the_backing_directory(
    faulty_place: Place, torch_python: str, case: str
) -> None:
    """Saved and loaded while every call on the backing directory hangs; loaded again from the
    backing directory after a new mount.
    """
    place = faulty_place
    assert place.faults
    assert list(place.directory.iterdir()) == []
    if place.directory != place.backing:
        place.faults.freeze()
    workload(torch_python, "checkpoint_dcp", place.directory, case, "load")
    place.faults.thaw()
    place.settle()
    place.remount()
    workload(torch_python, "checkpoint_dcp", place.directory, "load")


def test_safetensors(place: Place, torch_python: str) -> None:
    workload(torch_python, "safetensors_files", place.directory)
    place.settle()


def test_trainer_resumes_from_its_checkpoint(place: Place, torch_python: str) -> None:
    """Trained, drained, mounted anew, resumed from what the backing directory has."""
    workload(torch_python, "trainer", "train", place.directory)
    place.settle()
    place.remount()
    workload(torch_python, "trainer", "resume", place.directory)
    place.settle()


def test_megatron_layout(place: Place, torch_python: str) -> None:
    workload(torch_python, "megatron_layout", place.directory)
    place.settle()
    assert (place.backing / "latest_checkpointed_iteration.txt").read_text() == "30"
