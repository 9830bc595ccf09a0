"""Flushes that cannot succeed: what would let them may stand behind them in the log."""

from __future__ import annotations

import errno
import os

import pytest

from acpfs.backing.lower import LowerPath
from tests.writeback.conftest import Run
from tests.writeback.world import World

clause = pytest.mark.clause


def without_privilege(world: World) -> None:
    """Below a directory that nobody may enter nothing is to be had."""

    def deny(_label: str, path: LowerPath) -> None:
        for depth in range(1, len(path)):
            above = world.lower.root
            for name in path[:depth]:
                above = above.children.get(name, world.lower.root)
            if not above.mode & 0o100:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    world.lower.fault = deny


@clause("S24")
def test_a_directory_that_was_closed_right_after_it_was_written_to_stops_nothing(world: World, run: Run) -> None:
    """All of it is one group: when its end comes the daemon, which has no privilege, may not enter any more what it has to flush."""
    without_privilege(world)
    world.mkdir("run")
    world.mkdir("run/ck")
    world.store("run/ck/model", b"1")
    world.setattr("run", mode=0o600)
    world.listener.times = {world.inos["run/ck"]: (1, 2)}
    run(world.drain)
    world.store("after", b"2")
    world.setattr("run", mode=0o700)
    run(world.drain)
    world.store("run/ck/model", b"3")
    run(world.drain)
    assert world.lower.visible() == world.application_view()


@clause("S24")
@pytest.mark.parametrize("number", [errno.ENOTDIR, errno.ELOOP])
def test_a_directory_that_others_have_put_something_else_in_the_place_of_stops_nothing(world: World, run: Run, number: int) -> None:
    """As who moves a run to another disk does, and leaves a symlink."""
    world.mkdir("run")

    def deny(label: str, path: LowerPath) -> None:
        if label == "fsync directory" and path == (b"run",):
            raise OSError(number, os.strerror(number))

    world.lower.fault = deny
    world.store("run/model", b"1")
    world.store("after", b"2")
    run(world.drain)
    assert world.lower.visible() == world.application_view()


@clause("S24")
def test_what_cannot_be_reached_is_persisted_once_its_file_system_was_flushed(world: World, run: Run) -> None:
    """The refusal may be one that passes, like that of a ticket which has expired: nothing may count as persisted without any flush."""
    flushed, failed = 0, 0

    def deny(label: str, path: LowerPath) -> None:
        nonlocal flushed, failed
        if label == "fsync directory" and path == (b"run",):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if label == "sync file system":
            failed += 1
            if failed <= 5:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            assert len(world.log) != 0
            flushed += 1

    world.mkdir("run")
    run(world.drain)
    world.lower.fault = deny
    world.store("run/model", b"1")
    run(world.drain)
    assert (failed, flushed) == (6, 1)
    assert world.lower.visible() == world.application_view()


@clause("S25")
def test_a_flush_that_a_file_system_refuses_which_has_become_read_only_is_not_left(world: World, run: Run) -> None:
    """Perhaps because it has lost what was to be flushed."""
    world.store("f", b"1")
    denied = 0

    def deny(label: str, _path: LowerPath) -> None:
        nonlocal denied
        if label == "fsync directory" and denied < 20:
            denied += 1
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    world.lower.fault = deny
    run(world.drain)
    assert denied == 20
