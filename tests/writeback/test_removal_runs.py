"""Removals are begun, and recorded, in runs, and carried out one by one."""

from __future__ import annotations

import errno

import pytest

from acpfs.backing.lower import LowerPath
from acpfs.writeback.commits.group import GroupOutcome
from acpfs.writeback.commits.removal_runs import begin_removals
from acpfs.writeback.commits.store_runs import RUN_OPS_MAX
from acpfs.writeback.log.ops import Op
from acpfs.writeback.log.stages import Step
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth, error
from tests.writeback.test_engine import assert_history
from tests.writeback.test_store_runs import KilledError, files
from tests.writeback.world import World


def removed(world: World, run: Run, count: int) -> list[str]:
    """So many files that are persisted, and removed since."""
    names = files(world, count)
    run(world.drain)
    world.lower.log.clear()
    for name in names:
        world.unlink(name)
    return names


def carried_out(world: World) -> list[str]:
    return [b"/".join(path).decode() for label, path in world.lower.log if label == "unlink"]


def told(world: World) -> list[list[Op]]:
    """What is said ahead of operations from here on."""
    runs: list[list[Op]] = []
    world.engine._committer._before = lambda ops: runs.append(list(ops))
    return runs


def test_a_run_takes_one_word_ahead_and_one_transaction_to_begin_and_to_record(
    world: World, run: Run
) -> None:
    names = removed(world, run, 2 * RUN_OPS_MAX)
    runs = told(world)
    begun: list[int] = []
    plain = world.state.must_commit
    steps: list[int] = []
    end = world.state.end_step

    def must_commit() -> None:
        begun.append(sum(op.begun for op in world.log))
        plain()

    def end_step(error: BaseException | None) -> None:
        steps.append(1)
        end(error)

    world.state.must_commit = must_commit  # type: ignore[method-assign]
    world.state.end_step = end_step  # type: ignore[method-assign]
    run(world.drain)
    assert [len(ops) for ops in runs] == [RUN_OPS_MAX, RUN_OPS_MAX]
    assert len(begun) == 2
    assert len(steps) < RUN_OPS_MAX
    assert carried_out(world) == names
    assert world.lower.visible() == world.application_view()
    assert_history(world, world.lower)


@pytest.mark.parametrize("nth", [1, 2, 7, RUN_OPS_MAX, RUN_OPS_MAX + 1])
def test_a_worker_that_dies_inside_a_run_leaves_it_to_the_next(
    world: World, run: Run, nth: int
) -> None:
    names = removed(world, run, RUN_OPS_MAX + 5)

    def fault(label: str, _path: LowerPath) -> None:
        if label == "unlink" and len(carried_out(world)) == nth:
            world.die()
            raise KilledError

    world.lower.fault = fault
    with pytest.raises(BaseException):  # noqa: B017 - in a group of trio's
        run(world.drain)
    world.lower.fault = lambda _label, _path: None
    world.restart()
    run(world.drain)
    assert sorted(set(carried_out(world))) == names
    assert world.lower.visible() == world.application_view()
    assert_history(world, world.lower)


@pytest.mark.clause("S71")
def test_what_others_put_under_a_name_in_doubt_stays(world: World, run: Run) -> None:
    names = removed(world, run, 5)

    def fault(label: str, _path: LowerPath) -> None:
        if label == "unlink" and len(carried_out(world)) == 4:
            world.die()
            raise KilledError

    world.lower.fault = fault
    with pytest.raises(BaseException):  # noqa: B017 - in a group of trio's
        run(world.drain)
    world.lower.fault = lambda _label, _path: None
    theirs = tuple(names[1].encode().split(b"/"))
    world.lower.symlink(b"theirs", theirs)
    world.restart()
    run(world.drain)
    assert world.lower.visible() == {b"d/": b"", names[1].encode(): b"theirs"}


@pytest.mark.clause("S71")
def test_what_others_put_where_the_answer_was_lost_stays(world: World, run: Run) -> None:
    names = removed(world, run, 1)
    theirs = tuple(names[0].encode().split(b"/"))
    plain = world.lower.unlink

    def unlink(path: LowerPath) -> None:
        world.lower.unlink = plain
        plain(path)
        world.lower.symlink(b"theirs", theirs)
        raise error(errno.EIO)

    world.lower.unlink = unlink
    run(world.drain)
    assert world.lower.visible() == {b"d/": b"", names[0].encode(): b"theirs"}
    assert world.engine.statistics().conflicts_total == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_run_ends_at_the_first_that_fails(world: World, run: Run, number: int) -> None:
    names = removed(world, run, RUN_OPS_MAX)
    left: list[list[bool]] = []

    def fault(label: str, path: LowerPath) -> None:
        if label == "unlink" and path[-1] == b"f007" and not left:
            left.append([])
            raise error(number)
        if label == "fsync directory" and left == [[]]:
            left[0].extend(op.begun for op in world.log)

    world.lower.fault = fault
    run(world.drain)
    # seven are there, the one that failed is in doubt or not, and those behind it are not
    is_doubtful = number == errno.EIO
    assert left == [[*[True] * 7, is_doubtful, *[False] * (RUN_OPS_MAX - 8)]]
    order = carried_out(world)
    assert order[:8] == names[:8]
    assert order[8] == names[7]  # and no other before it was tried again
    assert world.lower.visible() == world.application_view()
    assert_history(world, world.lower)


def test_what_was_not_tried_is_not_in_doubt(world: World, run: Run) -> None:
    names = removed(world, run, 10)
    world.lower.fault = FailNth("unlink", 3, errno.EIO, times=1 << 30)
    run(world.run_for, 50.0)
    assert [op.name for op in world.log if op.begun] == [b"f002"]
    assert set(carried_out(world)) == set(names[:3])
    world.lower.fault = lambda _label, _path: None
    run(world.drain)
    assert world.lower.visible() == world.application_view()


def test_where_no_word_can_be_said_ahead_none_of_a_run_is_carried_out(
    world: World, run: Run
) -> None:
    removed(world, run, 10)

    def before(_ops: object) -> None:
        raise error(errno.EIO)

    world.engine._committer._before = before
    run(world.run_for, 50.0)
    assert not carried_out(world)
    assert [op.name for op in world.log if op.begun] == [b"f000"]


def test_two_names_of_one_file_are_not_of_one_run(world: World, run: Run) -> None:
    names = files(world, 4)
    world.link(names[1], "d/linked")
    run(world.drain)
    runs = told(world)
    for name in (*names[:2], "d/linked", *names[2:]):
        world.unlink(name)
    run(world.drain)
    assert [[op.name for op in ops] for ops in runs] == [
        [b"f000", b"f001"],
        [b"linked", b"f002", b"f003"],
    ]
    assert world.lower.visible() == world.application_view()


def test_a_removal_behind_a_move_in_doubt_is_begun_alone(world: World, run: Run) -> None:
    names = files(world, 4)
    run(world.drain)
    world.rename(names[0], "d/moved")
    for name in names[1:]:
        world.unlink(name)
    world.log.mark_begun(first := next(iter(world.log)))
    first.take(Step.FAILED)
    assert not begin_removals(
        world.engine._parts, list(world.log)[1:], lambda _ops: None, GroupOutcome()
    )
    world.log.mark_committed(first)
    assert begin_removals(
        world.engine._parts, list(world.log)[1:], lambda _ops: None, GroupOutcome()
    )
