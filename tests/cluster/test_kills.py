"""Small runs of kills on four nodes, by `tools/test cluster`; large ones: `tools/cluster-drill
--kills 200`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import ranks
from tests.cluster.kills import Ground, run

pytestmark = [pytest.mark.mount, pytest.mark.long, pytest.mark.timeout(400)]
KILLS = 20
FRAMEWORK_KILLS = 2
NODES = 4
KEEP = 3
"""Checkpoints: older ones are deleted all the time."""
clause = pytest.mark.clause


@clause("S160", "S81", "S22")
def test_no_pointer_is_seen_too_early_whoever_dies(tmp_path: Path, shared: Path, seed: int) -> None:
    outcome = run(tmp_path, Ground([shared] * NODES, shared), seed, KILLS, print, keep=KEEP)
    assert (outcome.violations, outcome.end) == ([], "")
    assert outcome.saves > KILLS / 4
    assert outcome.looks > outcome.saves


@clause("S160", "S81")
@pytest.mark.frameworks
@pytest.mark.skipif(
    ranks.torch_python() is None,
    reason=f"{ranks.PYTHON_VARIABLE} names no interpreter that has torch; tools/test sets it",
)
@pytest.mark.parametrize("workload", ranks.WORKLOADS)
def test_frameworks_of_several_processes(
    tmp_path: Path, shared: Path, seed: int, workload: str
) -> None:
    """One process per node, each on its own mount: torch.distributed.checkpoint, and Megatron's
    layout with torch.save.
    """
    outcome = run(
        tmp_path, Ground([shared] * NODES, shared), seed, FRAMEWORK_KILLS, print, workload=workload
    )
    assert (outcome.violations, outcome.end) == ([], ""), (tmp_path / "ranks.log").read_text()[
        -2000:
    ]
    assert outcome.saves > 0
    assert outcome.looks > 0
