"""What other nodes have closed: a job can wait for it, and finds it at open. Real mounts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from acpfs.client import wait_for_nodes
from tests.cluster.stand import SOON_MISSING_S, Stand
from tests.cluster.training import Job, looks_right
from tests.rig.mounts import AcpfsMount

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
SHARD = b"shard" * 1000


def set_bandwidth(stand: Stand, bandwidth: str) -> None:
    for node in stand.nodes:
        node.ask("set", key="bandwidth", value=bandwidth)


def stuck(node: AcpfsMount) -> Path:
    """A shard in a directory of both nodes that the node has closed, and cannot persist; returns
    its path below the mount point.
    """
    node.ask("set", key="bandwidth", value="1")
    shard = Path("iter_0000001", "shard1.bin")
    (node.path / shard).write_bytes(SHARD)
    return shard


def made(stand: Stand) -> None:
    """The directory of the shard, on all nodes."""
    for node in stand.nodes:
        (node.path / "iter_0000001").mkdir(exist_ok=True)
        node.flush()


@clause("S168")
def test_every_node_loads_what_the_others_still_drained(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    """As after a barrier: each asks once, and then opens what all have written, some of which it
    has looked for in vain.
    """
    with Stand(tmp_path, [shared] * 2, transport, attr_timeout=60) as stand:
        job = Job(stand.paths(), 1, shard_bytes=(1 << 17, 1 << 18))

        def rank(node: AcpfsMount) -> str:
            node.ask("wait_nodes", timeout_s=None)
            return looks_right(node.path, job.name)

        for _ in range(2):
            set_bandwidth(stand, "1")
            job.save()
            assert looks_right(stand.nodes[1].path, job.name) == f"{job.name}: no .metadata"
            set_bandwidth(stand, "200K")
            with ThreadPoolExecutor(2) as ranks:
                assert list(ranks.map(rank, stand.nodes)) == ["", ""]


@clause("S168")
def test_who_waits_is_told_who_drains_and_holds_up_nobody(
    transport: str, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Stand(tmp_path, [shared] * 2, transport) as stand:
        first, second = stand.nodes
        monkeypatch.setenv("ACPFS_RUNTIME_DIR", str(first.runtime_dir))
        made(stand)
        shard = stuck(second)
        asks = ("acpfs-ctl", str(first.path), "nodes", "wait", "--timeout")
        late = first.run(*asks, "1", check=False)
        if "still draining" not in late.stderr:  # the machine stood still for so long
            late = first.run(*asks, "60", check=False)
        assert (late.returncode, "still draining: node1" in late.stderr) == (4, True)
        first.kill_worker()
        with ThreadPoolExecutor(1) as waiting:
            waits = waiting.submit(wait_for_nodes, first.path / shard)
            beside = (first.path / shard).with_name("shard0.bin")
            beside.write_bytes(b"x")
            beside.unlink()
            assert not waits.done(), "it waits"
            second.ask("set", key="bandwidth", value="0")
            waits.result()
        assert (first.path / shard).read_bytes() == SHARD


@clause("S168")
def test_what_no_live_node_has_is_not_waited_for(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    """All is persisted; what is closed later; a node that is dead, with something in its RAM
    tier.
    """
    with Stand(tmp_path, [shared] * 2, transport, node_timeout=SOON_MISSING_S) as stand:
        first, second = stand.nodes
        made(stand)
        first.ask("wait_nodes", timeout_s=None)
        stuck(second)
        second.kill()
        first.ask("wait_nodes", timeout_s=None)
        second.start()
        second.ask("set", key="bandwidth", value="0")
        first.ask("wait_nodes", timeout_s=None)
        assert (first.path / "iter_0000001" / "shard1.bin").read_bytes() == SHARD


@clause("S169")
@pytest.mark.parametrize("missed", [1, 40])
def test_what_another_node_committed_is_found_at_the_next_open(
    transport: str, tmp_path: Path, shared: Path, missed: int
) -> None:
    """With `attr_timeout` 0: neither the kernel nor the mount keeps "not there", whether it was
    learnt by name or from a listing.
    """
    with Stand(tmp_path, [shared] * 2, transport, attr_timeout=0) as stand:
        first, second = stand.nodes
        made(stand)
        directory = Path("iter_0000001")
        for number in range(missed):
            assert not (first.path / directory / f"file{number}").exists()
        for number in range(0, missed, 13):
            (second.path / directory / f"file{number}").write_bytes(b"%d" % number)
            second.flush()
            assert (first.path / directory / f"file{number}").read_bytes() == b"%d" % number


@clause("S169")
def test_all_nodes_make_one_tree_at_the_same_time(
    transport: str, tmp_path: Path, shared: Path
) -> None:
    nodes = 3
    saves = 4
    with Stand(tmp_path, [shared] * nodes, transport) as stand, ThreadPoolExecutor(nodes) as ranks:
        for save in range(saves):

            def rank(number: int, save: int = save) -> None:
                directory = stand.nodes[number].path / "run" / f"iter_{save}" / "a" / "b"
                directory.mkdir(parents=True, exist_ok=True)
                (directory / f"shard{number}").write_bytes(b"%d" % number)

            list(ranks.map(rank, range(nodes)))
        for node in stand.nodes:
            node.flush()
            status = node.status()
            assert (status["parked"], status["conflicts"], status["counters"]["repairs"]) == (
                0,
                [],
                0,
            )
        found = sorted(str(path.relative_to(shared)) for path in shared.glob("run/**/shard*"))
        assert found == [
            f"run/iter_{save}/a/b/shard{number}" for save in range(saves) for number in range(nodes)
        ]
        for node in stand.nodes:
            node.wait_status(
                lambda _status, node=node: (
                    len(list(node.path.glob("run/**/shard*"))) == nodes * saves
                )
            )
