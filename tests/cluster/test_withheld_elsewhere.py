"""What one node withholds counts on all others: `latest` never goes back, and names what is there. Real mounts over one directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster.stand import SOON_MISSING_S, Stand
from tests.cluster.test_needs import dies_with_pending_bytes
from tests.cluster.test_order import drained, read, until, withheld, write
from tests.rig.mounts import AcpfsMount

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]


def save(node: AcpfsMount, step: int, *, renames: bool) -> None:
    (node.path / "run" / f"step_{step}").mkdir(parents=True)
    write(node, f"run/step_{step}/model.pt", "x" * 1000)
    name = "run/latest.tmp" if renames else "run/latest"
    write(node, name, str(step))
    if renames:
        (node.path / name).rename(node.path / "run" / "latest")


@clause("S160", "S170", "S400", "S401")
@pytest.mark.parametrize("renames", [False, True], ids=["in place", "by rename"])
@pytest.mark.transports("native", "libfuse")
def test_the_newest_save_is_named_in_the_end_whichever_node_withheld_its_own(
    transport: str, tmp_path: Path, shared: Path, renames: bool
) -> None:
    """Found by attack: a job that went on from another node had its `latest` undone, and what that named then was removed."""
    with Stand(
        tmp_path,
        [shared] * 3,
        transport,
        node_timeout=SOON_MISSING_S,
        no_keep_last_persisted=True,
    ) as stand:
        first, second, third = stand.nodes
        save(first, 0, renames=renames)
        drained(stand)
        dies_with_pending_bytes(third, "shard")
        for step in (1, 2):
            save(first, step, renames=renames)
        until(lambda: withheld(first), first)
        save(second, 3, renames=renames)
        for step in (1, 2):
            shutil.rmtree(second.path / "run" / f"step_{step}", ignore_errors=True)
        until(lambda: withheld(second), second)
        assert read(shared, "run/latest") == "0"
        third.start(bandwidth=0)
        for node in stand.nodes:
            node.flush()
        assert read(shared, "run/latest") == "3"
        assert read(shared, "run/step_3/model.pt") == "x" * 1000
