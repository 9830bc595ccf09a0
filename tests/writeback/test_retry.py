"""Back-off and parking."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from acpfs.runtime.chance import Chance
from acpfs.types import Ino, Seq
from acpfs.writeback.failures.retry import PERMANENT_TRIES, RetryPolicy
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.log.verdicts import Why
from acpfs.writeback.report import queue_entry
from tests.rig.runtime import REAL, clock_of
from tests.writeback.world import World


def policy() -> RetryPolicy:
    return RetryPolicy(
        0.2,
        60.0,
        replace(REAL, clock=clock_of(wall=lambda: 1000.0), chance=Chance(random.Random(1))),
    )


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def new_op(kind: OpKind = OpKind.STORE) -> Op:
    return Op(Seq(1), kind, Ino(2))


def test_delays_double_with_jitter_up_to_the_limit() -> None:
    retry = policy()
    for tries in range(1, 200):
        full = min(60.0, 0.2 * 2.0 ** min(tries - 1, 60))
        assert full / 2 <= retry.delay_s(tries) <= full


def test_transient_failures_are_retried_for_ever_and_shown() -> None:
    retry = policy()
    op = new_op()
    for tries in range(1, 100):
        delay_s = retry.failed(op, error(errno.EIO))
        assert delay_s is not None
        assert (op.tries, op.last_error, op.next_attempt_at) == (tries, errno.EIO, 1000.0 + delay_s)


@pytest.mark.clause("S23")
def test_a_failure_is_shown_in_the_words_of_the_log(tmp_path: Path) -> None:
    world = World(tmp_path)
    op = world.store("f", b"x")
    assert queue_entry(op, world.listener, Why.AGAIN, 0.0).last_detail is None
    policy().failed(op, OSError(errno.EIO, "the staging file has 3 bytes, not 7"))
    assert (
        queue_entry(op, world.listener, Why.AGAIN, 0.0).last_detail
        == "the staging file has 3 bytes, not 7"
    )
    op.last_detail = ""  # of an earlier worker
    assert queue_entry(op, world.listener, Why.AGAIN, 0.0).last_detail == os.strerror(errno.EIO)


def test_refusals_in_a_row_park() -> None:
    retry = policy()
    op = new_op()
    answers = [retry.failed(op, error(errno.EACCES)) for _ in range(PERMANENT_TRIES)]
    assert [answer is None for answer in answers] == [False, False, True]
    assert op.next_attempt_at == 0


@pytest.mark.clause("S501")
@pytest.mark.parametrize("kind", [OpKind.RENAME, OpKind.RMDIR, OpKind.EXCHANGE])
def test_a_directory_that_something_is_mounted_on_refuses_to_move(kind: OpKind) -> None:
    """It would hold up all that comes after it, until somebody unmounts."""
    retry = policy()
    op = new_op(kind)
    answers = [retry.failed(op, error(errno.EBUSY)) for _ in range(PERMANENT_TRIES)]
    assert [answer is None for answer in answers] == [False, False, True]
    assert retry.parked_delay_s(op) is not None, "it is tried again by itself"
    busy = new_op()
    assert all(retry.failed(busy, error(errno.EBUSY)) is not None for _ in range(10))


def test_a_transient_failure_in_between_starts_the_count_again() -> None:
    retry = policy()
    op = new_op()
    for number in (errno.EACCES, errno.EACCES, errno.EIO, errno.EACCES, errno.EACCES):
        assert retry.failed(op, error(number)) is not None
    assert retry.failed(op, error(errno.EACCES)) is None


def test_refusals_for_another_reason_each_time_are_an_illness() -> None:
    retry = policy()
    op = new_op()
    for number in (errno.EROFS, errno.EINVAL, errno.EISDIR, errno.EACCES, errno.EACCES):
        assert retry.failed(op, error(number)) is not None
    assert retry.failed(op, error(errno.EACCES)) is None


def test_an_error_without_number_is_an_io_error() -> None:
    op = new_op()
    assert policy().failed(op, OSError("odd")) is not None
    assert op.last_error == errno.EIO
