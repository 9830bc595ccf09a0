"""An exchange that is three renames on the backing directory, and is refused in their midst."""

from __future__ import annotations

import errno
import os

import pytest

from acpfs.backing.lower import LowerPath
from acpfs.writeback.evidence.whereabouts import Whereabouts
from tests.writeback.conftest import Run
from tests.writeback.world import World

clause = pytest.mark.clause


@clause("S251")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_an_exchange_that_is_refused_in_its_middle_hides_nothing(
    world: World, run: Run, number: int
) -> None:
    world.store("a", b"of a")
    world.store("b", b"of b")
    run(world.drain)
    lower = world.lower
    aside = lower.exchange_aside((b"a",), (b"b",))

    def refuse(label: str, path: LowerPath) -> None:
        if label == "exchange":
            if lower.root.children.get(b"a") is not None:
                lower.rename(path, aside)
            raise OSError(number, os.strerror(number))

    lower.fault = refuse
    op = world.exchange("a", "b")
    run(world.run_for, 0.01)
    assert op.last_error == number
    there = Whereabouts(lower, world.tree, world.log, world.lock, world.listener.left_as)
    assert there.find((b"a",)) == aside
