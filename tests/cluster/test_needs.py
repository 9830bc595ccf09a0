"""`user.acpfs.needs`: a pointer that waits for the nodes that it names, and for no other.

Real mounts over one directory.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from acpfs.errors import ExitCode
from tests.cluster.stand import SOON_MISSING_S, Stand
from tests.cluster.test_order import read, until, withheld, write
from tests.rig.mounts import AcpfsMount
from tests.rig.processes import Child

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
NEEDS = "user.acpfs.needs"
SHARD = "shard" * 1000


def dies_with_pending_bytes(node: AcpfsMount, name: str) -> None:
    node.ask("set", key="bandwidth", value="1")
    write(node, name, SHARD)
    node.kill()


def rename_over(node: AcpfsMount, name: str, needs: str) -> None:
    """As a careful program writes a tracker."""
    write(node, f"{name}.tmp", "new")
    os.setxattr(node.path / f"{name}.tmp", NEEDS, needs.encode())
    os.rename(node.path / f"{name}.tmp", node.path / name)


def names_withheld(node: AcpfsMount) -> set[str]:
    return {one["path"] for one in withheld(node)}


@clause("S282", "S161")
@pytest.mark.transports("native", "libfuse")
def test_a_pointer_that_names_the_living_passes_and_one_that_does_not_is_withheld(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    with Stand(tmp_path, [shared] * 3, transport, node_timeout=SOON_MISSING_S) as stand:
        first, _second, third = stand.nodes
        dies_with_pending_bytes(third, "shard2")
        write(first, "latest_plain", "old tracker")
        rename_over(first, "latest", "node0,node1")
        with open(first.path / "latest_in_place", "w", encoding="ascii") as file:
            file.write("new")
            os.setxattr(file.fileno(), NEEDS, b"node1, node0")
        (first.path / "step.tmp").mkdir()
        write(first, "step.tmp/state", SHARD)
        os.setxattr(first.path / "step.tmp", NEEDS, b"node1")
        os.rename(first.path / "step.tmp", first.path / "step")
        os.link(first.path / "step" / "state", first.path / "linked")
        os.setxattr(first.path / "linked", NEEDS, b"node1")
        os.link(first.path / "linked", first.path / "latest_link")
        passed = {
            "latest": "new",
            "latest_in_place": "new",
            "step/state": SHARD,
            "latest_link": SHARD,
        }
        until(lambda: {name: read(shared, name) for name in passed} == passed, first)
        until(lambda: names_withheld(first) == {"latest_plain"}, first)
        assert not (shared / "latest_plain").exists()
        with pytest.raises(OSError) as gone:
            os.getxattr(first.path / "latest", NEEDS)
        assert gone.value.errno == errno.ENODATA, "it was for one pointer"
        assert [
            NEEDS in os.listxattr(path)
            for path in (shared / "latest", shared / "latest_in_place", shared / "step")
        ] == [False] * 3
        with open(first.path / "latest_plain", "w", encoding="ascii") as file:
            file.write("newer")
            os.setxattr(file.fileno(), NEEDS, b"node1")
        until(lambda: read(shared, "latest_plain") == "newer", first)
        write(first, "latest", "rewritten in place")
        until(lambda: names_withheld(first) == {"latest"}, first)
        assert read(shared, "latest") == "new"
        third.start(bandwidth=0)
        for node in stand.nodes:
            node.flush()
        assert (read(shared, "latest_plain"), read(shared, "latest"), read(shared, "shard2")) == (
            "newer",
            "rewritten in place",
            SHARD,
        )


@clause("S283", "S282")
def test_a_pointer_waits_for_the_nodes_that_it_names(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    with Stand(tmp_path, [shared] * 2, transport, node_timeout=SOON_MISSING_S) as stand:
        first, second = stand.nodes
        second.ask("set", key="bandwidth", value="1")
        write(second, "shard1", SHARD)
        rename_over(first, "latest", "node0,node1")
        (waits,) = first.wait_status(
            lambda status: [one for one in status["cluster"]["waiting"] if one["waits_for"]]
        )["cluster"]["waiting"]
        assert (waits["waits_for"], waits["needs"], waits["withheld"]) == (
            {"node1": "waits"},
            ["node0", "node1"],
            False,
        )
        second.kill()
        until(lambda: names_withheld(first) == {"latest"}, first)
        assert (
            "since node node1 is MISSING (it needs only node0, node1)"
            in first.run("acpfs-ctl", str(first.path), "status").stdout
        )
        assert not (shared / "latest").exists()
        second.start(bandwidth=0)
        first.flush()
        assert (read(shared, "shard1"), read(shared, "latest")) == (SHARD, "new")


@clause("S283", "S162")
def test_a_node_that_nobody_knows_withholds_until_it_is_forgotten(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    with Stand(tmp_path, [shared] * 2, transport) as stand:
        first = stand.nodes[0]
        rename_over(first, "latest", "node1,nodeX")
        until(lambda: names_withheld(first) == {"latest"}, first)
        assert (
            "since node nodeX is UNKNOWN here (it needs only node1, nodeX)"
            in first.run("acpfs-ctl", str(first.path), "status").stdout
        )
        first.kill_worker()
        until(lambda: names_withheld(first) == {"latest"}, first)
        assert not (shared / "latest").exists()
        done = first.run("acpfs-ctl", str(first.path), "nodes", "forget", "nodeY", check=False)
        assert done.returncode == ExitCode.REFUSED
        first.run("acpfs-ctl", str(first.path), "nodes", "forget", "nodeX")
        first.flush()
        assert read(shared, "latest") == "new"


@clause("S282", "S22", "S81")
def test_what_was_said_outlives_the_worker_and_the_mount(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    with Stand(tmp_path, [shared] * 3, transport, node_timeout=SOON_MISSING_S) as stand:
        first, second, third = stand.nodes
        dies_with_pending_bytes(third, "shard2")
        write(first, "later.tmp", "later")
        os.setxattr(first.path / "later.tmp", NEEDS, b"node1")
        second.ask("set", key="bandwidth", value="1")
        write(second, "shard1", SHARD)
        rename_over(first, "latest", "node1")
        first.kill_worker()
        until(
            lambda: [one["needs"] for one in first.status()["cluster"]["waiting"]] == [["node1"]],
            first,
        )
        assert os.getxattr(first.path / "later.tmp", NEEDS) == b"node1"
        first.kill()
        first.start()
        os.rename(first.path / "later.tmp", first.path / "latest_later")
        until(
            lambda: (
                {tuple(one["needs"]) for one in first.status()["cluster"]["waiting"]}
                == {("node1",)}
            ),
            first,
        )
        assert (read(shared, "latest"), read(shared, "latest_later")) == (None, None)
        second.ask("set", key="bandwidth", value="0")
        until(
            lambda: (read(shared, "latest"), read(shared, "latest_later")) == ("new", "later"),
            first,
        )


@clause("S284")
@pytest.mark.transports("native", "libfuse")
def test_only_good_values_of_the_owner_are_taken_and_nothing_is_copied(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent != Path("/tmp"):
            parent.chmod(0o755)
    with Stand(tmp_path, [shared], transport) as stand:
        node = stand.nodes[0]
        write(node, "file", "x")
        (node.path / "file").chmod(0o666)
        for bad in (b"", b",", b"node0,", b"node0 node1", b"a/b", b".x", b"\xff", b"n" * 64):
            with pytest.raises(OSError) as refused:
                os.setxattr(node.path / "file", NEEDS, bad)
            assert refused.value.errno == errno.EINVAL
        os.setxattr(node.path / "file", NEEDS, b" node1 ,node0,node1")
        assert os.getxattr(node.path / "file", NEEDS) == b"node1,node0"
        assert os.listxattr(node.path / "file") == []
        shutil.copy2(node.path / "file", node.path / "copy")
        with pytest.raises(OSError):
            os.getxattr(node.path / "copy", NEEDS)

        def stranger() -> list[int]:
            os.setxattr(node.path / "file", "user.other", b"1")  # who may write may do that
            found = []
            for value in (b"node2", None):
                try:
                    os.removexattr(node.path / "file", NEEDS) if value is None else os.setxattr(
                        node.path / "file", NEEDS, value
                    )
                except OSError as error:
                    found.append(error.errno or 0)
            return found

        assert Child(stranger, uid=54321, gid=54321).result() == [errno.EPERM] * 2
        node.flush()
        assert NEEDS not in os.listxattr(shared / "file")
        os.removexattr(node.path / "file", NEEDS)
        with pytest.raises(OSError):
            os.removexattr(node.path / "file", NEEDS)
