"""What one node withholds counts on all others: `latest` never goes back, and names what is there.

Real mounts over one directory.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.stand import SOON_MISSING_S, Stand
from tests.cluster.test_needs import NEEDS, dies_with_pending_bytes, rename_over
from tests.cluster.test_order import BEYOND_S, drained, read, until, withheld, write
from tests.rig.mounts import AcpfsMount

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]


class By(enum.Enum):
    """How a job writes its pointer."""

    IN_PLACE = "in place"
    RENAME = "rename"
    LATE_RENAME = "late rename"
    """The storage has it under its temporary name by then, as after an fsync, where that does not
    have to wait for what is withheld.
    """


def save(node: AcpfsMount, step: int, by: By) -> None:
    (node.path / "run" / f"step_{step}").mkdir(parents=True)
    write(node, f"run/step_{step}/model.pt", "x" * 1000)
    name = "run/latest" if by is By.IN_PLACE else "run/latest.tmp"
    write(node, name, str(step))
    if by is By.LATE_RENAME:
        until(lambda: read(node.backing, name) == str(step), node)
    if by is not By.IN_PLACE:
        (node.path / name).rename(node.path / "run" / "latest")


@clause("S160", "S170", "S400", "S401")
@pytest.mark.parametrize("by", By, ids=lambda by: by.value)
@pytest.mark.transports("native", "libfuse")
def test_the_newest_save_is_named_in_the_end_whichever_node_withheld_its_own(
    transport: str, tmp_path: Path, shared: Path, by: By
) -> None:
    """Found by attack: a job that went on from another node had its `latest` undone, and what that
    named then was removed. So it was once more where the job had paused before its rename.
    """
    with Stand(
        tmp_path,
        [shared] * 3,
        transport,
        node_timeout=SOON_MISSING_S,
        no_keep_last_persisted=True,
    ) as stand:
        first, second, third = stand.nodes
        save(first, 0, by)
        drained(stand)
        dies_with_pending_bytes(third, "shard")
        save(first, 1, by)
        # its temporary file waits behind the rename of the last one
        save(first, 2, By.RENAME if by is By.LATE_RENAME else by)
        until(lambda: withheld(first), first)
        save(second, 3, by)
        for step in (1, 2):
            shutil.rmtree(second.path / "run" / f"step_{step}", ignore_errors=True)
        until(lambda: withheld(second), second)
        assert read(shared, "run/latest") == "0"
        third.start(bandwidth=0)
        for node in stand.nodes:
            node.flush()
        assert read(shared, "run/latest") == "3"
        assert read(shared, "run/step_3/model.pt") == "x" * 1000


def point_in_place(node: AcpfsMount, target: str) -> None:
    write(node, "run/latest", target)


def point_by_rename(node: AcpfsMount, target: str) -> None:
    write(node, "run/latest.tmp", target)
    (node.path / "run/latest.tmp").rename(node.path / "run/latest")


def point_by_late_rename(node: AcpfsMount, target: str) -> None:
    """The storage has it under the temporary name by then."""
    write(node, "run/latest.tmp", target)
    until(lambda: read(node.backing, "run/latest.tmp") == target, node)
    (node.path / "run/latest.tmp").rename(node.path / "run/latest")


def point_by_link(node: AcpfsMount, target: str) -> None:
    """Some time lies between the two, so the storage has the link under its first name."""
    temporary = f"run/latest.{target}"
    (node.path / temporary).symlink_to(target)
    until(lambda: (node.backing / temporary).is_symlink(), node)
    (node.path / temporary).rename(node.path / "run/latest")


def point_by_links(node: AcpfsMount, target: str) -> None:
    """Twice, and none waits for what is withheld."""
    for text in (f"{target}_first", target):
        temporary = node.path / f"run/latest.{text}"
        temporary.symlink_to(text)
        temporary.rename(node.path / "run/latest")


def pointed(directory: Path) -> str | None:
    path = directory / "run/latest"
    if path.is_symlink():
        return os.readlink(path)
    return path.read_text(encoding="ascii") if path.exists() else None


@clause("S484", "S162")
@pytest.mark.parametrize(
    ("point", "is_first"),
    [(point_in_place, False), (point_by_link, True)],
    ids=["changes", "first"],
)
def test_a_pointer_that_another_node_has_replaced_meanwhile_is_not_brought_back(
    transport: str,
    tmp_path: Path,
    shared: Path,
    point: Callable[[AcpfsMount, str], None],
    is_first: bool,
) -> None:
    """A node that was forgotten came back with its `latest`, and put it over the one of who had
    gone on.
    """
    with Stand(
        tmp_path,
        [shared] * 3,
        transport,
        node_timeout=SOON_MISSING_S,
        no_keep_last_persisted=True,
    ) as stand:
        first, second, third = stand.nodes
        (first.path / "run").mkdir()
        if not is_first:
            point(first, "step_0")
        drained(stand)
        dies_with_pending_bytes(third, "shard")
        point(first, "step_1")
        until(lambda: withheld(first), first)
        first.kill()
        until(lambda: missing(second) == {"node0", "node2"}, second)
        for node in ("node0", "node2"):
            second.run("acpfs-ctl", str(second.path), "nodes", "forget", node)
        point(second, "step_2")
        second.flush()
        assert pointed(shared) == "step_2"
        first.start()
        third.start(bandwidth=0)
        until(lambda: not withheld(first), first)
        drained(stand)
        assert pointed(shared) == "step_2"
        assert sorted(os.listdir(shared / "run")) == ["latest"]
        until(lambda: pointed(first.path) == "step_2", first)
        point(first, "step_3")
        drained(stand)
        assert pointed(shared) == "step_3"
        assert sorted(os.listdir(first.path / "run")) == ["latest"]


def missing(node: AcpfsMount) -> set[str]:
    return {row["node"] for row in node.ctl("nodes") if row["state"] == "missing"}


@clause("S484", "S164")
@pytest.mark.parametrize(
    "point", [point_by_rename, point_by_late_rename, point_by_link, point_by_links]
)
def test_what_is_withheld_for_a_loss_ends_with_a_later_pointer_on_another_node(
    transport: str, tmp_path: Path, shared: Path, point: Callable[[AcpfsMount, str], None]
) -> None:
    """It was shown as withheld for ever; and when the loss was forgotten, `latest` went back. Of
    several links its own mount showed the last one, which never came.
    """
    with Stand(tmp_path, [shared] * 2, transport, no_keep_last_persisted=True) as stand:
        first, second = stand.nodes
        (first.path / "run").mkdir()
        point(first, "step_0")
        drained(stand)
        second.ask("set", key="bandwidth", value="1")
        write(second, "shard", "x" * 1000)
        point(first, "step_1")
        second.abort()
        second.start()
        until(lambda: withheld(first), first)
        first_record, second_record = (
            shared / ".acpfs" / "nodes" / name for name in ("node0", "node1")
        )
        lost_until = json.loads(second_record.read_bytes())["lost"][1]
        until(lambda: json.loads(first_record.read_bytes())["clock"] > lost_until + BEYOND_S, first)
        point(second, "step_2")
        second.flush()
        assert pointed(shared) == "step_2"
        second.run("acpfs-ctl", str(second.path), "nodes", "forget", "node1")
        until(lambda: not withheld(first), first)
        drained(stand)
        assert pointed(shared) == "step_2"
        assert sorted(os.listdir(shared / "run")) == ["latest"]
        until(lambda: pointed(first.path) == "step_2", first)


RUNS = ("moved", "made anew")
"""What the other node does with the checkpoint that the pointer there names."""


@clause("S463")
def test_what_a_withheld_pointer_of_another_node_still_names_keeps_its_name(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    """`latest` on the storage named a checkpoint that another node had moved away, or removed to
    make it anew.
    """
    with Stand(tmp_path, [shared] * 2, transport, no_keep_last_persisted=True) as stand:
        first, second = stand.nodes
        for run in RUNS:
            (first.path / run / "step_0").mkdir(parents=True)
            write(first, f"{run}/step_0/model.pt", "x")
            write(first, f"{run}/latest", "0")
        drained(stand)
        for run in RUNS:
            rename_over(first, f"{run}/latest", "node0,nobody")
        until(lambda: len(withheld(first)) == 2, first)
        record = shared / ".acpfs" / "nodes" / "node0"
        closed = json.loads(record.read_bytes())["clock"]
        until(lambda: json.loads(record.read_bytes())["clock"] > closed + BEYOND_S, first)
        moved = second.path / "moved/step_0"
        anew = second.path / "made anew/step_0"
        shutil.rmtree(anew)
        anew.mkdir()
        until(lambda: kept(second), second)  # before the other, for which all deletions here wait
        os.setxattr(moved, NEEDS, b"node1")  # nobody that others wait for
        moved.rename(moved.with_name("before"))
        until(lambda: {path.partition("/")[0] for path in kept(second)} == set(RUNS), second)
        for run in RUNS:
            assert read(shared, f"{run}/latest") == "0"
            assert read(shared, f"{run}/step_0/model.pt") == "x"
        first.run("acpfs-ctl", str(first.path), "nodes", "forget", "nobody")
        drained(stand)
        for run in RUNS:
            assert read(shared, f"{run}/latest") == "new"
            assert read(shared, f"{run}/step_0/model.pt") is None


def kept(node: AcpfsMount) -> list[str]:
    """What waits because a pointer that the other node is to change names it."""
    return [one["path"] for one in withheld(node) if one["waits_for"] == {"node0": "named"}]
