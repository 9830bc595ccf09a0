"""Changes in a directory that shuts the daemon out by then: it is opened for one operation, and
shut again whatever comes between.
"""

from __future__ import annotations

import copy
import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from acpfs.backing.lower import LowerPath
from acpfs.writeback.commits.shut_directories import CHANGE, ENTER
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import Inode, MemoryLower, error
from tests.writeback.test_store_runs import KilledError
from tests.writeback.world import World

clause = pytest.mark.clause

SHUT = 0o555
D = (b"d",)


class OwnersLower(MemoryLower):
    """All there belongs to the daemon, which has no privilege."""

    def _inode(self, mode: int) -> Inode:
        inode = super()._inode(mode)
        inode.uid = os.geteuid()
        inode.gid = os.getegid()
        return inode

    def _call(self, label: str, path: LowerPath = ()) -> None:
        super()._call(label, path)
        for depth in range(1, len(path)):
            found = self._at(path[:depth])
            if found is not None and not found.mode & ENTER:
                raise error(errno.EACCES)

    def _at(self, path: LowerPath) -> Inode | None:
        with suppress(OSError):
            return self._find(path)
        return None

    def _need(self, path: LowerPath) -> None:
        if path[:-1] and self._find(path[:-1]).mode & CHANGE != CHANGE:
            raise error(errno.EACCES)

    def mkdir(self, path: LowerPath) -> None:
        self._need(path)
        super().mkdir(path)

    def rmdir(self, path: LowerPath) -> None:
        self._need(path)
        super().rmdir(path)

    def unlink(self, path: LowerPath) -> None:
        self._need(path)
        super().unlink(path)

    def rename(self, source: LowerPath, target: LowerPath) -> None:
        self._need(source)
        self._need(target)
        moved = self._at(source)
        if moved is not None and stat.S_ISDIR(moved.mode) and source[:-1] != target[:-1]:
            self._need((*source, b"the one above"))  # which is written in it
        super().rename(source, target)

    def exchange(self, a: LowerPath, b: LowerPath) -> None:
        self._need(a)
        self._need(b)
        super().exchange(a, b)

    def link(self, source: LowerPath, target: LowerPath) -> None:
        self._need(target)
        super().link(source, target)

    def symlink(self, target: bytes, path: LowerPath) -> None:
        self._need(path)
        super().symlink(target, path)

    def mknod(self, path: LowerPath, mode: int, rdev: int) -> None:
        self._need(path)
        super().mknod(path, mode, rdev)


def made(directory: Path, run: Run) -> World:
    """With a directory that the application has made read-only, and something in it."""
    directory.mkdir(exist_ok=True)
    world = World(directory, OwnersLower())
    world.mkdir("d")
    world.mkdir("d/below")
    world.store("d/one", b"1")
    world.store("d/two", b"2")
    world.setattr("d", permissions=SHUT)
    run(world.drain)
    assert mode_of_d(world) == SHUT
    return world


def mode_of_d(world: World) -> int:
    return stat.S_IMODE(world.lower.inode("d").mode)


def left_open(world: World) -> list[object]:
    """What the next worker would shut first."""
    return list(world.state.rows("SELECT path FROM opened_directory"))


def assert_done(world: World) -> None:
    assert world.lower.visible() == world.application_view()
    assert mode_of_d(world) == SHUT
    assert left_open(world) == []
    assert not len(world.log)


CHANGES: dict[str, Callable[[World], object]] = {
    "rewritten": lambda world: world.store("d/one", b"new"),
    "made": lambda world: world.store("d/three", b"3"),
    "two made": lambda world: [world.store(f"d/new{n}", b"3") for n in range(2)],
    "removed": lambda world: world.unlink("d/one"),
    "renamed": lambda world: world.rename("d/one", "d/uno"),
    "moved out": lambda world: world.rename("d/one", "one"),
    "exchanged": lambda world: world.exchange("d/one", "d/two"),
    "linked": lambda world: world.link("d/one", "d/again"),
    "directory made": lambda world: world.mkdir("d/more"),
    "directory removed": lambda world: world.rmdir("d/below"),
    "symlink": lambda world: world.symlink(b"one", "d/link"),
    "fifo": lambda world: world.mkfifo("d/fifo"),
}


@clause("S461")
@pytest.mark.parametrize("what", CHANGES)
def test_what_was_allowed_is_carried_out_and_the_directory_is_shut_again(
    tmp_path: Path, run: Run, what: str
) -> None:
    world = made(tmp_path, run)
    CHANGES[what](world)
    run(world.drain)
    assert_done(world)
    assert world.engine.statistics().counters.retries == 0


BELOW: dict[str, Callable[[World], object]] = {
    "rewritten": lambda world: world.store("d/e/one", b"new"),
    "removed": lambda world: world.unlink("d/e/one"),
    "renamed": lambda world: world.rename("d/e/one", "d/e/uno"),
    "moved out": lambda world: world.rename("d/e/one", "one"),
    "linked from there": lambda world: world.link("d/e/one", "again"),
    "directory made": lambda world: world.mkdir("d/e/more"),
    "attributes": lambda world: world.setattr("d/e/one", permissions=0o600),
}


@clause("S486", "S461")
@pytest.mark.parametrize("shut_too", [False, True], ids=["", "read-only below"])
@pytest.mark.parametrize("what", BELOW)
def test_what_lies_further_below_what_may_not_be_entered_any_more_is_carried_out(
    tmp_path: Path, run: Run, what: str, shut_too: bool
) -> None:
    """Who works in a directory, or has a file open there, needs no right to those above it."""
    world = World(tmp_path, OwnersLower())
    world.mkdir("d")
    world.mkdir("d/e")
    world.store("d/e/one", b"1")
    if shut_too:
        world.setattr("d/e", permissions=SHUT)
    world.setattr("d", permissions=0o600)
    run(world.drain)
    BELOW[what](world)
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert mode_of_d(world) == 0o600
    assert stat.S_IMODE(world.lower.inode("d/e").mode) == (SHUT if shut_too else 0o755)
    assert left_open(world) == []
    if what == "attributes":
        assert stat.S_IMODE(world.lower.inode("d/e/one").mode) == 0o600


@clause("S486", "S461", "S483")
@pytest.mark.parametrize("what", [one for one in BELOW if one != "removed"])
def test_so_is_what_a_server_forgets_of_that_before_it_was_flushed(
    tmp_path: Path, run: Run, what: str
) -> None:
    world = World(tmp_path, OwnersLower())
    world.mkdir("d")
    world.mkdir("d/e")
    world.store("d/e/one", b"1")
    world.setattr("d", permissions=0o600)
    run(world.drain)
    flushed = copy.deepcopy(world.lower.root)
    forgot = list[bool]()

    def forget(label: str, _path: LowerPath) -> None:
        if label.startswith("fsync ") and not forgot:
            forgot.append(True)
            world.lower.root = flushed
            raise error(errno.EIO)

    world.lower.fault = forget
    BELOW[what](world)
    run(world.drain)
    assert forgot
    assert world.lower.visible() == world.application_view()
    assert mode_of_d(world) == 0o600
    assert left_open(world) == []
    if what == "attributes":
        assert stat.S_IMODE(world.lower.inode("d/e/one").mode) == 0o600


@clause("S462", "S24")
def test_what_others_have_shut_further_above_stays_shut(tmp_path: Path, run: Run) -> None:
    world = World(tmp_path, OwnersLower())
    world.mkdir("d")
    world.mkdir("d/e")
    world.store("d/e/one", b"1")
    run(world.drain)
    world.lower.inode("d").mode = stat.S_IFDIR | 0o600
    world.store("d/e/one", b"new")
    assert refused(world, run) == [errno.EACCES]
    assert mode_of_d(world) == 0o600


@clause("S486", "S461")
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_read_only_directory_gets_another_one_above_it(
    tmp_path: Path, run: Run, exchanged: bool
) -> None:
    """As the guard moves a checkpoint away; whatever is killed in between, it has its mode in the
    end.
    """
    for number in range(100):
        world = made(tmp_path / str(number), run)
        world.mkdir("x")
        world.mkdir("x/d")
        run(world.drain)
        if exchanged:
            world.exchange("d", "x/d")
        else:
            world.rmdir("x/d")
            world.rename("d", "x/d")
        was_killed = drained_until_call(world, run, number)
        if was_killed:
            world.restart()
            run(world.drain)
        assert world.lower.visible()[b"x/d/one"] == b"1"
        assert stat.S_IMODE(world.lower.inode("x/d").mode) == SHUT
        assert left_open(world) == []
        if not was_killed:
            return
    pytest.fail("a drain of two operations makes fewer calls")


@clause("S461")
def test_what_it_may_do_later_does_not_count(tmp_path: Path, run: Run) -> None:
    """The mount shows another mode already than the one that the operation meets."""
    world = made(tmp_path, run)
    world.store("d/one", b"new")
    world.setattr("d", permissions=0o755)
    world.store("d/two", b"new")
    world.setattr("d", permissions=SHUT)
    run(world.drain)
    assert_done(world)
    assert world.engine.statistics().counters.retries == 0


def drained_until_call(world: World, run: Run, number: int) -> bool:
    """Drain; whether the worker was killed before so many calls were made."""
    left = number

    def fault(_label: str, _path: LowerPath) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            world.die()
            raise KilledError

    world.lower.fault = fault
    with suppress(BaseException):  # trio has it in a group
        run(world.drain)
    world.lower.fault = lambda _label, _path: None
    return left < 0


def change(world: World) -> None:
    world.store("d/one", b"new")
    world.unlink("d/two")


@clause("S461")
def test_a_worker_that_is_killed_leaves_no_directory_open(tmp_path: Path, run: Run) -> None:
    """Before each call on the backing directory, so between any two of these steps."""
    seen_open = 0
    for number in range(200):
        world = made(tmp_path / str(number), run)
        change(world)
        if not drained_until_call(world, run, number):
            assert_done(world)
            break
        seen_open += mode_of_d(world) != SHUT
        world.restart()
        modes: list[int] = []
        # nothing is changed before what was left open is shut
        world.lower.fault = lambda label, _path, world=world, modes=modes: (
            modes.append(mode_of_d(world)) if label in ("rename", "unlink") else None
        )
        run(world.drain)
        assert_done(world)
    else:
        pytest.fail("a drain of two operations makes fewer calls")
    assert seen_open > 4


def refused(world: World, run: Run) -> list[int | None]:
    run(world.run_for, 30.0)
    assert left_open(world) == []
    return [op.last_error for op in world.log.parked()]


@clause("S462", "S24")
@pytest.mark.parametrize("pending", [False, True])
def test_what_others_have_shut_stays_shut(tmp_path: Path, run: Run, pending: bool) -> None:
    """The mount knows of no such mode: the storage refuses, and is not overruled."""
    world = World(tmp_path, OwnersLower())
    world.mkdir("d")
    world.store("d/one", b"1")
    run(world.drain)
    world.lower.inode("d").mode = stat.S_IFDIR | SHUT
    world.store("d/one", b"new")
    if pending:
        world.setattr("d", permissions=SHUT)
    assert refused(world, run) == [errno.EACCES]
    assert world.lower.inode("d/one").content == b"1"


@clause("S462", "S24")
@pytest.mark.parametrize("why", ["of another user", "set-gid would be lost"])
def test_what_cannot_be_shut_again_is_not_opened(tmp_path: Path, run: Run, why: str) -> None:
    world = made(tmp_path, run)
    inode = world.lower.inode("d")
    if why == "of another user":
        inode.uid = os.geteuid() + 1
    else:
        inode.mode |= stat.S_ISGID
        inode.gid = max(os.getegid(), *os.getgroups(), 0) + 1
    before = inode.mode
    world.store("d/one", b"new")
    assert refused(world, run) == [errno.EACCES]
    assert inode.mode == before


@clause("S462")
def test_what_others_change_while_it_is_open_stays(tmp_path: Path, run: Run) -> None:
    world = made(tmp_path, run)

    def fault(label: str, path: LowerPath) -> None:
        if label == "unlink" and path[:1] == D:
            world.lower.inode("d").mode = stat.S_IFDIR | 0o700

    world.lower.fault = fault
    world.unlink("d/one")
    run(world.drain)
    assert mode_of_d(world) == 0o700
    assert left_open(world) == []


def failing(world: World, *which: int) -> None:
    """These changes of the directory's attributes fail; the first one opens it."""
    changes = 0

    def fault(label: str, path: LowerPath) -> None:
        nonlocal changes
        if label == "setattr" and path == D:
            changes += 1
            if changes in which:
                raise error(errno.EIO)

    world.lower.fault = fault


@clause("S461")
@pytest.mark.parametrize("killed", [False, True])
def test_one_that_could_not_be_shut_is_shut_later(tmp_path: Path, run: Run, killed: bool) -> None:
    world = made(tmp_path, run)
    failing(world, 2)
    world.unlink("d/one")
    run(world.drain)
    assert mode_of_d(world) == SHUT | stat.S_IWUSR
    if killed:
        world.restart()
    else:
        world.store("f", b"elsewhere")
    run(world.drain)
    assert_done(world)


@clause("S461")
def test_what_the_application_has_made_of_it_since_stays(tmp_path: Path, run: Run) -> None:
    world = made(tmp_path, run)
    opened = SHUT | stat.S_IWUSR
    # it is tried again when the drain begins, and before the group that has the newer mode
    failing(world, 2, 3, 4)
    world.unlink("d/one")
    run(world.drain)
    world.setattr("d", permissions=opened)
    run(world.drain)
    assert mode_of_d(world) == opened
    world.store("f", b"elsewhere")
    run(world.drain)
    assert mode_of_d(world) == opened
    assert left_open(world) == []
