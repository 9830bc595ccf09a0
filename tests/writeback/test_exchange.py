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


@clause("S6")
def test_no_exchange_whose_answer_was_lost_is_taken_back_when_a_flush_fails(
    world: World, run: Run
) -> None:
    """After it the one before looks as if the server had forgotten it."""
    world.mkdir("d")
    world.store("d/a", b"of a")
    world.store("d/b", b"of b")
    run(world.drain)
    lower = world.lower
    shown: list[bytes] = []
    has_failed = False

    def fault(label: str, path: LowerPath) -> None:
        nonlocal has_failed
        if label == "exchange":
            shown.append(bytes(lower.inode("d/a").content))
            if len(shown) == 2:
                lower.fault = lambda *_call: None
                lower.exchange(path, (b"d", b"b"))
                lower.fault = fault
                raise OSError(errno.EIO, "the answer was lost")
        if label == "fsync directory" and len(shown) == 2 and not has_failed:
            has_failed = True
            raise OSError(errno.EIO, "not now")

    lower.fault = fault
    world.exchange("d/a", "d/b")
    world.exchange("d/a", "d/b")
    run(world.drain)
    assert has_failed
    assert shown == [b"of a", b"of b"]
    assert lower.visible() == world.application_view()
