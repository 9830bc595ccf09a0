"""Names in node records: when they are told, and whose records are read while somebody waits.

Records in memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from acpfs.backing.member_records import NodeRecord
from acpfs.backing.name_filter import NameFilter
from acpfs.writeback.members.cluster import HEARD_MAX
from acpfs.writeback.members.peer_names import Pending
from tests.writeback.test_cluster import Node, Records

clause = pytest.mark.clause
SHARD = Pending([b"iter/shard"], of_directories=False)


class Counted(Records):
    """Notes what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_names: list[str] = []

    def read(self, node: str) -> NodeRecord | None:
        self.read_names.append(node)
        return super().read(node)


def tells(node: Node) -> bool:
    names = NameFilter.from_text(node.records["a"].pending)
    return names is not None and names.may_have(b"iter", b"shard")


@clause("S172")
def test_names_are_told_from_the_first_record_on_but_for_a_node_that_is_alone(
    tmp_path: Path,
) -> None:
    """The first record of a new worker, too: who waits for a name would take it for one that nobody
    has any more.
    """
    node = Node(tmp_path)
    node.cluster._pending = lambda: SHARD

    async def scenario() -> None:
        node.other()
        await node.cluster.publish()
        assert tells(node)
        await node.cluster.join()
        await node.cluster.publish()
        assert tells(node)
        del node.records["b"]
        for _ in range(2):
            await node.cluster._list()
            await node.cluster._read(["b"])
        await node.cluster.publish()
        assert node.records["a"].pending == ""

    trio.run(scenario)


@clause("S172")
def test_each_record_hashes_under_a_seed_of_its_own(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.cluster._pending = lambda: SHARD

    async def scenario() -> set[str]:
        told = set()
        for _ in range(5):
            await node.cluster.publish()
            assert tells(node)
            told.add(node.records["a"].pending)
        return told

    assert len(trio.run(scenario)) == 5


@clause("S172")
def test_with_many_nodes_what_is_waited_for_is_read_each_time_and_all_in_turn(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, wait_for_peers_s=60.0)
    count = 3 * HEARD_MAX
    records = Counted()
    node.records = records
    node.cluster._records = records

    async def scenario() -> None:
        for number in range(count):
            record = node.other()
            del records["b"]
            records.publish(
                replace(
                    record, node=f"n{number:02}", pending=SHARD.to_text(5) if number == 7 else ""
                )
            )
        await node.cluster.join()
        await node.cluster.look()
        await node.cluster._read_names()
        node.cluster._names.begin((b"iter", b"shard"))
        seen: set[str] = set()
        for _ in range(4):
            node.now += 0.25
            records.read_names.clear()
            await node.cluster._read_names()
            assert "n07" in records.read_names
            assert len(records.read_names) <= HEARD_MAX + 1
            seen.update(records.read_names)
        assert len(seen) == count

    trio.run(scenario)
