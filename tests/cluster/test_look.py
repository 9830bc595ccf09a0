"""What the observer keeps of what it saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.look import without_places


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("iter_1: shard1.bin is missing", "iter_1: shard1.bin is missing"),
        (
            "iter_1: no such file: '/tmp/stand/seen/iter_1/__0_0.distcp'",
            "iter_1: no such file: 'iter_1/__0_0.distcp'",
        ),
        ('iter_1: File "/opt/venv/lib/torch/load.py", line 3', 'iter_1: File "…/load.py", line 3'),
        ("iter_1: 5/6 of mp_rank_00/model.pt", "iter_1: 5/6 of mp_rank_00/model.pt"),
    ],
)
def test_results_name_no_directories_of_the_machine(said: str, kept: str) -> None:
    assert without_places(said, Path("/tmp/stand/seen")) == kept
