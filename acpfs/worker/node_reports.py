"""What control tells of the nodes: turns the cluster's records into the contracts of
`acpfs.control.reports`. Used under the lock.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.control.reports import (
    ClusterReport,
    CopiesReport,
    ExchangeReport,
    HeldCopyReport,
    NodeReport,
    WaitingPointerReport,
)
from acpfs.exchange.beside import ExchangeCounts
from acpfs.filesystem.filesystem import FileSystemStatistics
from acpfs.worker.assembly import Parts
from acpfs.writeback.copies.on_member import MemberPlace
from acpfs.writeback.engine_records import ClusterStatistics, PeerReport, WaitingPointer
from acpfs.writeback.log.ops import Op
from acpfs.writeback.members.far_clocks import TOLD_S

WAITING_TOLD_MAX = 20


def cluster_report(parts: Parts, display_path: Callable[[Op], bytes]) -> ClusterReport:
    """For `status`."""
    cluster = parts.cluster.statistics()
    missing = [peer.node for peer in cluster.peers if peer.missing and not peer.forgotten]
    return ClusterReport(
        order=parts.settings.cluster_order.value,
        nodes=len(cluster.peers),
        live=sum(_state(peer) == NodeState.LIVE.value for peer in cluster.peers),
        missing=missing,
        waiting=[_waiting(one, display_path) for one in cluster.waiting if one.missing][
            :WAITING_TOLD_MAX
        ],
        withheld=sum(one.withheld for one in cluster.waiting),
        clock_bound_s=cluster.clock_bound_s,
        drift_s=cluster.drift_s,
        record_age_s=cluster.published_age_s,
        awaited=[os.fsdecode(path) for path in cluster.awaited][:WAITING_TOLD_MAX],
        last_error=cluster.error or None,
        clock_problem=clock_problem(cluster) or None,
    )


def clock_problem(cluster: ClusterStatistics) -> str:
    """Which clock holds pointers up, by how much, and what helps; "" for none."""
    live = (peer for peer in cluster.peers if _state(peer) == NodeState.LIVE.value)
    worst = max(live, key=lambda peer: peer.clock_wait_s, default=None)
    if worst is None or worst.clock_wait_s < TOLD_S:
        return ""
    theirs = worst.record.drift_s if worst.record is not None else 0.0
    set_by = [
        f"that of {node} was set by {by:+.1f} s"
        for node, by in (("this node", cluster.drift_s), (worst.node, theirs))
        if by
    ]
    why = " and ".join(set_by) or f"that of {worst.node} differs from this node's"
    helps = (
        "set it right again, or wait twice as long as it was set by until it is worked off"
        if set_by
        else "set them by NTP or PTP"
    )
    return (
        f"each pointer file waits up to {worst.clock_wait_s:.0f} s longer because of wall "
        f"clocks: {why}; {helps}"
    )


def cluster_counters(cluster: ClusterStatistics) -> dict[str, int]:
    """For `status` and the metrics."""
    return {
        "node_records_written": cluster.published,
        "pointers_passed": cluster.passed,
        "pointers_withheld": cluster.withheld_total,
        "name_waits": cluster.name_waits,
        "name_waits_in_vain": cluster.name_waits_in_vain,
    }


def exchange_report(parts: Parts) -> ExchangeReport | None:
    """For `status`."""
    if parts.exchange is None:
        return None
    counts = parts.exchange.counts
    own = parts.cluster.record()
    return ExchangeReport(
        listens=[
            f"[{one}]:{own.port}" if ":" in one else f"{one}:{own.port}" for one in own.addresses
        ],
        encrypted=parts.settings.peer_encryption,
        got_bytes=sum(counts.got.values()),
        given_bytes=sum(counts.given.values()),
        failures=counts.failures,
        process=parts.exchange.pid,
        ways=parts.exchange.ways(),
        strange=parts.exchange.strange(),
    )


def copies_report(parts: Parts, fs: FileSystemStatistics) -> CopiesReport | None:
    """For `status`, under the lock."""
    if not parts.settings.copies:
        return None
    spill = fs.spill
    if spill is None or spill.mirror is None or fs.unmirrored is None or parts.inner.spill is None:
        why = "no member can be reached"
        taken_over = parts.directory.taken_over_by or None
        return CopiesReport("off", why, None, 0, taken_over, 0, 0, 0, 0, 0, 0, 0, 0)
    behind = fs.unmirrored
    place = parts.inner.spill.directory
    why = spill.mirror.why
    if place.is_broken and isinstance(place, MemberPlace):
        why = place.why
    holder = place.where
    if spill.mirror.state == "away" or place.is_broken:
        holder = spill.mirror.counts_at
    return CopiesReport(
        spill.mirror.state,
        why or None,
        holder or None,
        behind.until,
        parts.directory.taken_over_by or None,
        behind.files,
        behind.bytes,
        spill.mirror.pending_transactions,
        spill.files,
        spill.used_bytes,
        spill.copied_files,
        spill.copied_bytes,
        spill.failures,
    )


def held_reports(parts: Parts) -> list[HeldCopyReport]:
    """For `status`."""
    return [
        HeldCopyReport(
            one.origin,
            one.files,
            one.bytes,
            one.until,
            one.silent_s,
            one.is_frozen,
            parts.adopting.told(one.origin) or None,
        )
        for one in parts.holding.statistics()
    ]


def exchange_counters(parts: Parts) -> dict[str, int]:
    """For `status` and the metrics; 0 where nothing is exchanged."""
    counts = ExchangeCounts() if parts.exchange is None else parts.exchange.counts
    return {
        "exchange_got_bytes": sum(counts.got.values()),
        "exchange_given_bytes": sum(counts.given.values()),
        "exchange_failures": counts.failures,
    }


def node_reports(parts: Parts) -> list[NodeReport]:
    """This node first."""
    cluster = parts.cluster.statistics()
    spill = parts.inner.spill
    holder = "" if spill is None or spill.mirror is None else spill.mirror.statistics().counts_at
    held: Counter[str] = Counter()
    for one in parts.holding.statistics():
        held[one.origin] += one.bytes
    found = [_own(parts, cluster), *(_exchanged(parts, _peer(peer)) for peer in cluster.peers)]
    return [
        replace(one, held_bytes=held[one.node], is_holder=bool(holder) and one.node == holder)
        for one in found
    ]


def _exchanged(parts: Parts, report: NodeReport) -> NodeReport:
    if parts.exchange is None:
        return report
    counts = parts.exchange.counts
    why = parts.exchange.strange().get(report.node, "")
    return replace(
        report,
        got_bytes=counts.got[report.node],
        given_bytes=counts.given[report.node],
        errors=[*report.errors, *([why] if why else [])],
    )


def _own(parts: Parts, cluster: ClusterStatistics) -> NodeReport:
    record = parts.cluster.record()
    return _report("this", record, 0.0, (0.0, 0.0), parts.settings.clock_bound_s, cluster.error)


def _peer(peer: PeerReport) -> NodeReport:
    record = peer.record or NodeRecord(peer.node)
    ahead = (_finite(peer.ahead_s_min), _finite(peer.ahead_s_max))
    return _report(_state(peer), record, peer.silent_s, ahead, peer.clock_bound_s, peer.error)


def _report(
    state: str,
    record: NodeRecord,
    silent_s: float,
    ahead: tuple[float | None, float | None],
    bound_s: float,
    error: str,
) -> NodeReport:
    return NodeReport(
        node=record.node,
        state=state,
        host=record.host,
        mount=record.mountpoint,
        version=record.version,
        silent_s=silent_s,
        lag_s=max(0.0, record.clock - record.watermark) if record.clock else None,
        operations=record.operations,
        dirty_bytes=record.dirty_bytes,
        withheld=record.withheld,
        clock_ahead_s=ahead,
        clock_bound_s=bound_s,
        drift_s=record.drift_s,
        lost=record.lost,
        errors=[*record.errors, *([error] if error else [])],
    )


def _state(peer: PeerReport) -> str:
    if peer.forgotten:
        return "forgotten"
    if peer.record is not None and peer.record.state is not NodeState.LIVE:
        return str(peer.record.state.value)
    if peer.missing:
        return "missing"
    return NodeState.LIVE.value if peer.record is not None else "unreadable"


def _waiting(one: WaitingPointer, display_path: Callable[[Op], bytes]) -> WaitingPointerReport:
    """By the name under which it is to be seen."""
    op = (
        one.op
        if one.op.new_parent <= 0
        else replace(one.op, parent=one.op.new_parent, name=one.op.new_name)
    )
    needs = None if one.needs is None else list(one.needs)
    return WaitingPointerReport(
        os.fsdecode(display_path(op)), op.logged_at, one.missing, one.withheld, needs
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
