"""A small run of nodes that are lost with their RAM while they save; large ones:
`tools/cluster-drill --losses 100 --partitions 20`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.losses import run

pytestmark = [pytest.mark.mount, pytest.mark.long, pytest.mark.timeout(1200)]
clause = pytest.mark.clause


@clause("S587", "S588", "S589", "S601", "S613")
@pytest.mark.parametrize("alone", [False, True], ids=["asked", "by itself"])
def test_what_was_told_to_be_copied_is_there_whoever_is_lost(
    tmp_path: Path, seed: int, alone: bool
) -> None:
    found = run(tmp_path, seed, losses=2, partitions=2, tell=print, alone=alone)
    assert [one.violations for one in found] == [[]] * len(found)
    assert [one.found for one in found] == [one.told for one in found]
    assert sum(one.times for one in found) == 4
