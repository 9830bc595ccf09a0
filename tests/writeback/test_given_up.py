"""An operation that is given up at the very moment at which it fails."""

from __future__ import annotations

import errno
import os

import pytest

from acpfs.backing.lower import LowerPath
from tests.writeback.conftest import Run
from tests.writeback.world import World

clause = pytest.mark.clause


@clause("S24")
def test_what_was_discarded_before_it_was_begun_does_not_come_back(world: World, run: Run) -> None:
    """It failed on a look at a parked move that may have been carried out, and its row was written
    anew, without its version.
    """
    world.mkdir("d")
    world.mkdir("e")
    world.store("d/f", b"1")
    world.link("d/f", "e/f")
    run(world.drain)
    denied = [errno.EIO, errno.EACCES, errno.EACCES, errno.EACCES]

    def refuse(label: str, path: LowerPath) -> None:
        if label == "rename" and path == (b"moved",):
            number = denied.pop(0) if len(denied) > 1 else denied[0]
            raise OSError(number, os.strerror(number))

    world.lower.fault = refuse
    move = world.rename("d", "moved")
    run(world.run_for, 60)
    assert move.parked
    assert move.begun
    op = world.store("e/f", b"2")

    def discard(label: str, path: LowerPath) -> None:
        refuse(label, path)
        if (
            label == "lstat"
            and path == (b"d",)
            and world.log.get(op.seq) is op
            and op.version is not None
            and op.version.is_staged
        ):
            world.engine.discard([op.seq])
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    world.lower.fault = discard
    run(world.run_for, 5)
    assert world.log.get(op.seq) is None
    world.restart()
    assert world.log.get(op.seq) is None
