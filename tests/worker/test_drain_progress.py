"""What is left of the log for somebody who waits, and whether it will come: judged by as much of it
as the engine looks at.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.control.reports import Remaining
from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT, Ino
from acpfs.worker.drain_progress import (
    BEHIND_OPS_MIN,
    COUNTED_OPS_MAX,
    PACE_S,
    DrainPace,
    remaining,
)
from acpfs.writeback.engine_records import QUEUE_ENTRIES_MAX
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import WITHHELD, Op, OpKind
from acpfs.writeback.log.stages import Aside
from tests.rig.runtime import REAL


@pytest.fixture
def log(tmp_path: Path) -> OperationLog:
    return OperationLog(StateDatabase(tmp_path / "state.db", REAL), REAL.clock)


def fill(log: OperationLog, directory: bytes, count: int, *, held: bool) -> list[Op]:
    """So many operations; the first one is parked where they are to be held."""
    ops = [
        log.append(
            OpKind.MKDIR, Ino(log.last_seq + 10), parent=ROOT, name=b"%s/%d" % (directory, n)
        )
        for n in range(count)
    ]
    for op in ops:
        if held:
            op.put(Aside.HELD)
    if held:
        ops[0].last_error = 13
        log.park(ops[0])
    return ops


def left(log: OperationLog, *paths: bytes) -> Remaining:
    return remaining(log, log.last_seq, paths, lambda op: op.name)


@pytest.mark.clause("S24")
def test_what_comes_behind_much_that_is_parked_is_waited_for(log: OperationLog) -> None:
    fill(log, b"refused", QUEUE_ENTRIES_MAX + 10, held=True)
    assert left(log).stuck
    fill(log, b"fine", 1, held=False)
    assert left(log) == Remaining(QUEUE_ENTRIES_MAX + 11, 0, stuck=False)
    assert left(log, b"fine") == Remaining(1, 0, stuck=False)


@pytest.mark.clause("S24")
def test_what_the_engine_does_not_look_at_is_not_taken_for_persisted(log: OperationLog) -> None:
    fill(log, b"refused", COUNTED_OPS_MAX, held=True)
    assert left(log, b"fine") == Remaining(0, 0, stuck=False)
    fill(log, b"fine", 2, held=False)
    assert left(log, b"fine") == Remaining(2, 0, stuck=True), (
        "nothing comes any more, until somebody does something about it"
    )


@pytest.mark.clause("S161")
def test_what_waits_for_missing_nodes_was_refused_by_nobody(log: OperationLog) -> None:
    (pointer,) = fill(log, b"pointer", 1, held=True)
    assert (left(log).stuck, left(log).withheld) == (True, False)
    log.unpark(pointer)
    pointer.last_error = WITHHELD
    log.park(pointer)
    assert (left(log).stuck, left(log).withheld) == (True, True)


@pytest.mark.clause("S415")
@pytest.mark.parametrize(
    ("per_look", "behind"),
    [((200, 10), True), ((200, 250), False), ((20, 10), False)],
    ids=["more and more", "fewer and fewer", "few"],
)
def test_a_drain_that_does_not_keep_up_is_told(
    log: OperationLog, per_look: tuple[int, int], behind: bool
) -> None:
    came, left = per_look
    pace = DrainPace()
    fill(log, b"before", 2 * came, held=False)
    pace.look(0.0, log)
    assert not pace.report().falls_behind, "one look tells nothing"
    looks = int(PACE_S) // 2
    for number in range(looks):
        fill(log, b"%d" % number, came, held=False)
        for op in log.front(left):
            log.remove(op)
        pace.look(2.0 * (number + 1), log)
    report = pace.report()
    gone = min(left, came + 2 * came / looks)
    assert report.in_per_s == came / 2
    assert report.out_per_s == pytest.approx(gone / 2)
    assert report.falls_behind is behind
    assert behind is (len(log) >= BEHIND_OPS_MIN)
