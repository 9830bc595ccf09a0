"""MindSpore, unmodified, in an environment of its own."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import Place, workload

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.mount,
    pytest.mark.transports("native"),
]


def test_mindspore_save_and_load_checkpoint(place: Place, mindspore_python: str) -> None:
    """Saved, loaded from RAM, drained, and loaded again from the backing directory after a new
    mount.
    """
    workload(mindspore_python, "mindspore_checkpoint", "save", place.directory)
    workload(mindspore_python, "mindspore_checkpoint", "load", place.directory)
    place.settle()
    place.remount()
    workload(mindspore_python, "mindspore_checkpoint", "load", place.directory)
