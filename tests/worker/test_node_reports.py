"""What status says of the nodes."""

from __future__ import annotations

import math

import pytest

from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.worker.node_reports import clock_problem
from acpfs.writeback.engine_records import ClusterStatistics, PeerReport


def cluster(drift_s: float, *peers: PeerReport) -> ClusterStatistics:
    return ClusterStatistics(
        "here", peers, (), 0, None, 0, 0, 0.0, 0.0, drift_s, None, (), 0, 0, ""
    )


def peer(
    node: str, wait_s: float, drift_s: float = 0.0, state: NodeState = NodeState.LIVE
) -> PeerReport:
    record = NodeRecord(node, beat=1, state=state, drift_s=drift_s)
    return PeerReport(node, record, 0.0, False, False, -math.inf, math.inf, 7300.0, wait_s, "")


@pytest.mark.clause("S166")
def test_a_clock_that_holds_pointers_up_is_named() -> None:
    assert clock_problem(cluster(0.0)) == ""
    assert clock_problem(cluster(0.0, peer("a", 0.5), peer("b", 4.9))) == ""
    assert clock_problem(cluster(0.0, peer("gone", 7200.0, state=NodeState.LEFT))) == ""
    worked_off = "set it right again, or wait twice as long as it was set by until it is worked off"
    assert clock_problem(cluster(0.0, peer("a", 0.5), peer("b", 68.0, 7200.0))) == (
        "each pointer file waits up to 68 s longer because of wall clocks: that of b was set by "
        f"+7200.0 s; {worked_off}"
    )
    assert clock_problem(cluster(-60.0, peer("a", 60.5))) == (
        "each pointer file waits up to 60 s longer because of wall clocks: that of this node "
        f"was set by -60.0 s; {worked_off}"
    )
    assert clock_problem(cluster(0.0, peer("a", 30.0))) == (
        "each pointer file waits up to 30 s longer because of wall clocks: that of a differs "
        "from this node's; set them by NTP or PTP"
    )
