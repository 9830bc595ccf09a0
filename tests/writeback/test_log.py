"""What may be left out of the log, what is folded, who is told when operations are done."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT, Ino, Seq, TierId
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import WITHHELD, Metadata, Op, OpKind, VersionState
from acpfs.writeback.log.stages import Step
from tests.rig.runtime import REAL

A = Ino(10)
B = Ino(11)
DIRECTORY = Ino(12)


@pytest.fixture
def log(tmp_path: Path) -> OperationLog:
    return OperationLog(StateDatabase(tmp_path / "state.db", REAL), REAL.clock)


def store(
    log: OperationLog, ino: Ino, name: bytes, *, creates: bool = False, parent: Ino = ROOT
) -> Op:
    return log.append(
        OpKind.STORE,
        ino,
        creates=creates,
        parent=parent,
        name=name,
        version=log.new_version(ino, TierId(ino), 1),
    )


def unlink(log: OperationLog, ino: Ino, name: bytes, parent: Ino = ROOT) -> Op:
    return log.append(OpKind.UNLINK, ino, parent=parent, name=name)


def left_out(log: OperationLog, start: Op) -> list[int]:
    return [op.seq for op in log.window_to_elide(start)]


def test_create_and_delete_are_left_out(log: OperationLog) -> None:
    first = store(log, A, b"a", creates=True)
    second = unlink(log, A, b"a")
    assert left_out(log, first) == [first.seq, second.seq]


def test_many_created_and_then_all_deleted_are_left_out(log: OperationLog) -> None:
    stores = [store(log, Ino(100 + i), b"%d" % i, creates=True) for i in range(50)]
    unlinks = [unlink(log, Ino(100 + i), b"%d" % i) for i in range(50)]
    assert left_out(log, stores[0]) == [op.seq for op in stores + unlinks]


def test_a_directory_tree_made_and_removed_is_left_out(log: OperationLog) -> None:
    first = log.append(OpKind.MKDIR, DIRECTORY, creates=True, parent=ROOT, name=b"d")
    store(log, A, b"a", creates=True, parent=DIRECTORY)
    unlink(log, A, b"a", parent=DIRECTORY)
    log.append(OpKind.RMDIR, DIRECTORY, parent=ROOT, name=b"d")
    assert len(left_out(log, first)) == 4


def test_one_other_operation_in_between_may_stay(log: OperationLog) -> None:
    first = store(log, A, b"a", creates=True)
    store(log, B, b"b", creates=True)
    last = unlink(log, A, b"a")
    assert left_out(log, first) == [
        first.seq,
        last.seq,
    ]  # nothing, then b: both are states that the application had


def test_who_waits_for_what_is_left_out_waits_for_what_stays_in_between(log: OperationLog) -> None:
    """Until then the storage shows a moment before the one that he waits for."""
    first = store(log, A, b"a", creates=True)
    wait = log.when_done(first.seq)
    stays = store(log, B, b"b", creates=True)
    unlink(log, A, b"a")
    behind = store(log, Ino(13), b"c")
    log.leave_out(log.window_to_elide(first))
    log.answer_waiters()()
    assert not wait.done()
    log.remove(stays)
    log.answer_waiters()()
    assert wait.done()
    assert behind in list(log)


def test_nothing_is_left_out_around_what_its_waiter_may_have_to_close(log: OperationLog) -> None:
    first = store(log, A, b"a", creates=True)
    stays = store(log, B, b"b", creates=True)
    stays.take(Step.OUTGROWN)
    last = unlink(log, A, b"a")
    assert left_out(log, first) == [first.seq, last.seq]
    wait = log.when_done(first.seq)
    assert left_out(log, first) == []
    stays.take(Step.SEALED)
    assert left_out(log, first) == [first.seq, last.seq]
    assert not wait.done()


def test_a_shard_that_a_tracker_pointed_at_is_not_left_out(log: OperationLog) -> None:
    shard = store(log, A, b"shard", creates=True)
    store(log, B, b"tracker")
    store(log, Ino(13), b"next shard", creates=True)
    unlink(log, A, b"shard")
    assert left_out(log, shard) == []


@pytest.mark.clause("S6", "S14")
@pytest.mark.parametrize(
    "steps",
    [(Step.CLOSED, Step.CONFIRMED), (Step.OUTGROWN, Step.SEALED)],
    ids=["tentative", "unsealed"],
)
def test_a_close_is_not_left_out_for_one_that_may_come_to_nothing(
    log: OperationLog, steps: tuple[Step, Step]
) -> None:
    """Withdrawn (its descriptor has a copy that was written to), the tracker behind both would be
    visible without either.
    """
    first = store(log, A, b"shard")
    second = store(log, A, b"shard")
    second.take(steps[0])
    store(log, B, b"tracker")
    assert left_out(log, first) == []
    second.take(steps[1])
    assert left_out(log, first) == [first.seq]


@pytest.mark.clause("S160")
def test_what_a_salvaged_log_has_not_got_holds_up_no_other_node(log: OperationLog) -> None:
    first = store(log, A, b"a")
    heir = store(log, A, b"a")
    log.leave_out([first])
    assert list(log.replaced_since()) == [first.logged_at]
    log._state.change(
        "DELETE FROM op WHERE seq >= ?", (heir.seq,)
    )  # as `filesystem.salvage` cuts it
    log._state.commit()
    assert list(OperationLog(log._state, REAL.clock).replaced_since()) == []


def test_deleting_what_the_backing_directory_has_is_never_left_out(log: OperationLog) -> None:
    again = store(log, A, b"a")  # the node was there before
    unlink(log, A, b"a")
    assert left_out(log, again) == []


def test_superseded_store_is_left_out(log: OperationLog) -> None:
    first = store(log, A, b"a", creates=True)
    store(log, A, b"a")
    assert left_out(log, first) == [first.seq]


def test_superseded_store_stays_when_two_things_happened_in_between(log: OperationLog) -> None:
    first = store(log, A, b"a", creates=True)
    store(log, B, b"tracker")
    store(log, A, b"a")
    assert left_out(log, first) == []


def test_store_that_replaced_something_is_not_left_out(log: OperationLog) -> None:
    first = store(log, A, b"tmp", creates=True)
    log.append(
        OpKind.RENAME, A, parent=ROOT, name=b"tmp", new_parent=ROOT, new_name=b"final", victim=B
    )
    unlink(log, A, b"final")
    assert left_out(log, first) == []  # the old "final" must still go


def test_second_link_keeps_the_file(log: OperationLog) -> None:
    first = store(log, A, b"a", creates=True)
    log.append(OpKind.LINK, A, parent=ROOT, name=b"b")
    unlink(log, A, b"a")
    assert left_out(log, first) == []


def test_what_the_engine_has_begun_is_not_left_out(log: OperationLog) -> None:
    first = store(log, A, b"a", creates=True)
    unlink(log, A, b"a")
    log.mark_begun(first)
    assert left_out(log, first) == []


def test_what_is_recorded_is_not_in_doubt(log: OperationLog) -> None:
    """Not even when it is handed over again, to be flushed by the next worker."""
    op = unlink(log, A, b"a")
    log.mark_begun(op)
    assert log.in_doubt() == [op]
    log.mark_committed(op)
    log.mark_begun(op)
    assert log.in_doubt() == []


def test_attributes_fold_into_the_store_until_it_is_committed(log: OperationLog) -> None:
    op = store(log, A, b"a", creates=True)
    assert log.fold(A, Metadata(permissions=0o600))
    assert op.meta.permissions == 0o600
    log.mark_begun(op)
    assert not log.fold(A, Metadata(permissions=0o644))


def test_what_overwrites_a_file_keeps_the_rights_that_the_file_had(log: OperationLog) -> None:
    """The mirror's end may be before it: salvage takes the older content's rights from it."""
    op = store(log, A, b"a", creates=False)
    op.meta.permissions = 0o600
    assert not log.fold(A, Metadata(permissions=0o644))
    assert log.fold(A, Metadata(permissions=0o600, mtime_ns=7))
    assert (op.meta.permissions, op.meta.mtime_ns) == (0o600, 7)


@pytest.mark.clause("S595")
@pytest.mark.parametrize(
    ("earlier", "change", "left"),
    [
        (Metadata(0o640), Metadata(0o604), Metadata(0o600)),
        (Metadata(0o640), Metadata(uid=7), Metadata(0o000, uid=7)),
        (Metadata(), Metadata(), Metadata()),
        (Metadata(), Metadata(0o644), Metadata(0o600)),
        (Metadata(), Metadata(uid=7), Metadata(0o000, uid=7)),
        (Metadata(), Metadata(0o644, gid=7), Metadata(0o000, gid=7)),
        (Metadata(uid=7), Metadata(0o644, uid=7), Metadata(0o600, uid=7)),
    ],
)
def test_rights_of_which_nobody_knows_are_left_to_who_could_give_them(
    earlier: Metadata, change: Metadata, left: Metadata
) -> None:
    assert change.narrowed_from(earlier) == left


def test_a_restart_finds_the_log_as_it_was(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state.db", REAL)
    log = OperationLog(state, REAL.clock)
    op = store(log, A, b"\xff name", creates=True)
    assert op.version is not None
    op.version.state = VersionState.STREAMING
    log.save_version(op.version)
    op.meta = Metadata(permissions=0o640, xattrs={b"user.x": b"\x00\xff", b"user.gone": None})
    log.save(op)
    state.close()
    again = OperationLog(StateDatabase(tmp_path / "state.db", REAL), REAL.clock)
    (found,) = list(again)
    assert (found.name, found.meta, found.kind, again.last_seq) == (
        op.name,
        op.meta,
        op.kind,
        op.seq,
    )
    assert found.version is not None
    assert found.version.state is VersionState.COMPLETE  # what was streaming starts again
    assert left_out(again, found) == []
    unlink(again, A, b"\xff name")
    assert len(left_out(again, found)) == 2  # "created in this log" survived


def test_waiters_are_told_in_order(log: OperationLog) -> None:
    first = store(log, A, b"a")
    second = store(log, B, b"b")
    waiting = log.when_done(second.seq)
    log.remove(second)
    log.answer_waiters()()
    assert not waiting.done()
    log.remove(first)
    log.answer_waiters()()
    assert waiting.done()
    assert log.when_done(log.last_seq).done()


@pytest.mark.clause("S16", "S160")
def test_who_waits_for_a_node_does_not_wait_for_a_removal_that_others_hold_up(
    log: OperationLog,
) -> None:
    """It may take as long as another member is missing, and the order has gone on behind it."""
    removal = unlink(log, A, b"a", parent=DIRECTORY)
    stored = store(log, B, b"b")
    log.put_off(removal, True)
    of_node, of_removed, of_directory, of_all = (
        log.when_done(stored.seq, node) for node in (B, A, DIRECTORY, None)
    )
    log.answer_waiters()()
    assert not of_node.done()
    log.remove(stored)
    log.answer_waiters()()
    assert of_node.done()
    assert not any(waiting.done() for waiting in (of_removed, of_directory, of_all))
    log.remove(removal)
    log.answer_waiters()()
    assert all(waiting.done() for waiting in (of_removed, of_directory, of_all))


@pytest.mark.clause("S16", "S161", "S140")
@pytest.mark.parametrize("aside", ["withheld", "guarded"])
def test_who_waits_for_a_directory_does_not_wait_for_what_may_stay_away_for_days(
    log: OperationLog, aside: str
) -> None:
    """What is withheld as a member is missing, or held back by the guard, in that very directory;
    other names in it are waited for.
    """
    removal = unlink(log, A, b"a", parent=DIRECTORY)
    stored = store(log, B, b"b", parent=DIRECTORY)
    if aside == "withheld":
        removal.last_error = WITHHELD
        log.park(removal)
        with pytest.raises(OSError, match=os.strerror(errno.EHOSTDOWN)):
            log.when_done(log.last_seq, A).result(0)
    else:
        log.set_aside(removal)
    of_directory = log.when_done(log.last_seq, DIRECTORY)
    log.answer_waiters()()
    assert not of_directory.done()
    log.remove(stored)
    log.answer_waiters()()
    assert of_directory.result(0) is None
    assert log.pending_in(DIRECTORY) == 1


def test_looking_for_what_may_be_left_out_takes_a_few_steps_per_operation(
    log: OperationLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were all rewritten before the drain began: walking each one's window would take
    n²/2 steps.
    """
    count = 1000
    ops = [store(log, Ino(100 + i % count), b"%d" % i, creates=i < count) for i in range(2 * count)]
    steps = 0
    cancelled_until = OperationLog._cancelled_until

    def counted(self: OperationLog, op: Op, window_start: Seq) -> Seq | None:
        nonlocal steps
        steps += 1
        return cancelled_until(self, op, window_start)

    monkeypatch.setattr(OperationLog, "_cancelled_until", counted)
    assert [left_out(log, op) for op in ops[:-1]] == [[] for _ in ops[:-2]] + [[]]
    assert steps < 10 * len(ops)


def test_the_last_window_becomes_one_that_may_be_left_out(log: OperationLog) -> None:
    first = store(log, A, b"a", creates=True)
    other = store(log, B, b"b", creates=True)
    store(log, A, b"a")
    assert left_out(log, first) == []
    unlink(log, B, b"b")
    assert left_out(log, first) == [first.seq, other.seq, other.seq + 2]


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state.db", REAL)
    log = OperationLog(state, REAL.clock)
    first = store(log, A, b"a", creates=True)
    second = store(log, B, b"b", creates=True)
    state.commit()
    assert OperationLog(state, REAL.clock).last_seq == second.seq
    for op in (first, second):
        log.remove(op)
    state.commit()
    again = OperationLog(state, REAL.clock)
    assert again.last_seq == second.seq
    assert second.version is not None
    assert again.new_version(A, TierId(1), 1).vid == second.version.vid + 1


def test_what_has_begun_is_not_left_out_for_what_replaces_it(log: OperationLog) -> None:
    """Its rename may have been done: were it forgotten, and what replaces it deleted before it is
    stored, its file would stay for good.
    """
    first = store(log, A, b"a", creates=True)
    log.mark_begun(first)
    first.take(Step.FAILED)
    store(log, A, b"a")
    assert left_out(log, first) == []
