"""Servers and clients in trouble say "no such file" of files that are there, and "done" of what
they did not do: neither is believed.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from acpfs.backing.lower import LowerPath, LowerStat
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth, MemoryLower, error
from tests.writeback.world import World

clause = pytest.mark.clause
CHANGING = {"rename", "unlink", "rmdir", "link", "setattr"}


class Forgetful:
    """As a GlusterFS client that has just changed to another graph: for some calls names below a
    directory are not found, but listed.
    """

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._troubled = False
        self.denied = 0

    def __call__(self, label: str, path: LowerPath) -> None:
        self._troubled = self._troubled or (label in CHANGING and path[:1] == (b"d",))
        if (
            self._troubled
            and label in CHANGING | {"lstat"}
            and path[:1] == (b"d",)
            and self.denied < self._calls
        ):
            self.denied += 1
            raise error(errno.ENOENT)


def _rename(world: World) -> None:
    world.rename("d/tmp", "d/final")


def _replace(world: World) -> None:
    world.rename("d/tmp", "d/tracker")


def _unlink(world: World) -> None:
    world.unlink("d/tmp")


def _rmdir(world: World) -> None:
    world.rmdir("d/empty")


def _link(world: World) -> None:
    world.link("d/tmp", "d/again")


def _set_mode(world: World) -> None:
    world.setattr("d/tmp", permissions=0o600)


@clause("S23")
@pytest.mark.parametrize("change", [_rename, _replace, _unlink, _rmdir, _link, _set_mode])
def test_what_is_not_found_but_listed_is_tried_again(
    world: World, run: Run, change: Callable[[World], None]
) -> None:
    world.mkdir("d")
    world.mkdir("d/empty")
    world.store("d/tmp", b"new")
    world.store("d/tracker", b"old")
    run(world.drain)
    change(world)
    fault = Forgetful(7)
    world.lower.fault = fault
    run(world.drain)
    assert fault.denied == 7
    assert world.lower.visible() == world.application_view()
    if change is _set_mode:
        assert world.lower.inode("d/tmp").mode & 0o777 == 0o600
    assert world.engine.statistics().counters.repairs == 0


@clause("S23")
def test_what_is_gone_with_its_directories_is_gone(world: World, run: Run) -> None:
    world.mkdir("d")
    world.mkdir("d/e")
    world.store("d/e/tmp", b"1")
    run(world.drain)
    del world.lower.root.children[b"d"]
    world.rename("d/e/tmp", "d/e/final")
    world.unlink("d/e/final")
    world.rmdir("d/e")
    run(world.drain)
    assert not world.engine.statistics().parked
    assert b"d/e/final" not in world.lower.visible()


@clause("S6", "S23")
def test_a_refusal_after_a_doubtful_attempt_leaves_the_doubt(world: World, run: Run) -> None:
    """The first attempt renames the file into place and does not learn so; the second one is
    refused before it begins.
    """
    world.mkdir("d")
    run(world.drain)
    world.store("d/tmp", b"1")
    answers = iter([errno.EIO, errno.EISDIR])

    def fault(label: str, path: LowerPath) -> None:
        if (
            label == "lstat"
            and path == (b"d", b"tmp")
            and b"tmp" in world.lower.inode("d").children
        ):
            number = next(answers, None)
            if number is not None:
                raise error(number)

    world.lower.fault = fault
    run(world.run_for, 0.3)
    assert next(answers, None) is None
    assert b"d/tmp" in world.lower.visible()
    world.unlink("d/tmp")
    world.rmdir("d")
    run(world.drain)
    assert not world.lower.visible()


@clause("S6", "S23")
def test_a_refusal_behind_the_change_itself_leaves_doubt(world: World, run: Run) -> None:
    world.mkdir("d")
    world.lower.fault = FailNth("setattr", 1, errno.EPERM)
    run(world.run_for, 0.01)
    assert world.lower.visible() == {b"d/": b""}
    world.rmdir("d")
    run(world.drain)
    assert not world.lower.visible()


class Lying(MemoryLower):
    """Says of the first renames to a name that they are done, and shows the new name from its cache
    until the old one is asked for.
    """

    def __init__(self, target: LowerPath, times: int, *, caches: bool = True) -> None:
        """`caches`: else the new name shows what it showed before."""
        super().__init__()
        self.target = target
        self.times = times
        self._caches = caches
        self._cached: LowerPath = ()

    def rename(self, source: LowerPath, target: LowerPath) -> None:
        if target == self.target and self.times:
            self.times -= 1
            self._cached = source if self._caches else ()
        else:
            super().rename(source, target)

    def lstat(self, path: LowerPath) -> LowerStat:
        if path == self.target and self._cached:
            return super().lstat(self._cached)
        self._cached = ()
        return super().lstat(path)


@clause("S6", "S23")
@pytest.mark.parametrize(
    ("where", "at_once"),
    [("d/final", False), ("d/tmp", False), ("moved", False), ("d/final", True), ("moved", True)],
)
def test_a_rename_that_was_only_said_to_be_done_is_made(
    tmp_path: Path, run: Run, where: str, at_once: bool
) -> None:
    """`at_once`: nothing ever has the temporary name there."""
    lower = Lying(tuple(where.encode().split(b"/")), times=4)
    world = World(tmp_path, lower)
    world.mkdir("d")
    world.store("d/tmp", b"1")
    if not at_once:
        run(world.drain)
    world.rename("d/tmp", "d/final")
    run(world.drain)
    world.rename("d", "moved")
    run(world.drain)
    assert lower.times == 0
    assert lower.visible() == world.application_view()
    assert not lower.list_staging()


@clause("S6", "S23")
def test_a_file_that_was_only_said_to_be_replaced_is_replaced(tmp_path: Path, run: Run) -> None:
    """The old tracker is as large as the new one, and still there."""
    lower = Lying((b"tracker",), times=0, caches=False)
    world = World(tmp_path, lower)
    world.store("tracker", b"100")
    run(world.drain)
    lower.times = 2
    world.store("tracker", b"200")
    run(world.drain)
    assert lower.times == 0
    assert lower.visible() == {b"tracker": b"200"}
    assert not lower.list_staging()


@clause("S29", "S169")
def test_a_file_that_another_node_replaced_at_once_is_not_taken_for_ours(
    tmp_path: Path, run: Run
) -> None:
    """Of the same size, between our rename and our look at it: what is in RAM here is not what lies
    there.
    """
    world = World(tmp_path)
    replaced = False

    def replace(label: str, path: LowerPath) -> None:
        nonlocal replaced
        children = world.lower.root.children
        if label == "lstat" and path == (b"tracker",) and b"tracker" in children and not replaced:
            replaced = True
            theirs = world.lower._inode(stat.S_IFREG | 0o644)
            children[b"tracker"] = theirs
            theirs.content[:] = b"300"

    world.lower.fault = replace
    world.store("tracker", b"200", mtime_ns=1_000_000)
    run(world.drain)
    assert replaced
    told = world.left[world.inos["tracker"]]
    assert told != world.lower.lstat((b"tracker",)).identity()


@clause("S23")
def test_what_another_member_has_removed_already_takes_one_listing_and_not_one_each(
    world: World, run: Run
) -> None:
    """A directory of n files that all members remove took n listings of n entries."""
    world.mkdir("d")
    for n in range(40):
        world.store(f"d/{n}", b"x")
    run(world.drain)
    for n in range(40):
        if n != 20:
            del world.lower.inode("d").children[str(n).encode()]
    world.lower.calls.clear()
    for n in range(40):
        world.unlink(f"d/{n}")
    run(world.drain)
    assert world.lower.calls["listdir"] <= 4
    assert not world.lower.inode("d").children


@clause("S23")
def test_a_name_that_was_made_since_it_was_listed_is_not_taken_for_gone(
    world: World, run: Run
) -> None:
    world.mkdir("d")
    world.store("d/gone", b"x")
    world.store("d/tmp", b"x")
    run(world.drain)
    del world.lower.inode("d").children[b"gone"]
    world.unlink("d/gone")  # asks for the listing
    world.rename("d/tmp", "d/made")
    world.unlink("d/made")
    denied: list[str] = []

    def fault(label: str, path: LowerPath) -> None:
        if label == "unlink" and path == (b"d", b"made") and len(denied) < 3:
            denied.append(label)
            raise error(errno.ENOENT)

    world.lower.fault = fault
    run(world.drain)
    assert not world.lower.inode("d").children


@clause("S522")
def test_a_directory_that_is_made_again_gets_its_mode_in_the_end(world: World, run: Run) -> None:
    """What comes into it finds it there, and asks no more. Found by the simulation (session 66)."""
    world.mkdir("d")
    run(world.drain)
    del world.lower.root.children[b"d"]
    world.store("d/file", b"1")
    failures = [errno.EIO, errno.EIO]

    def fault(label: str, path: LowerPath) -> None:
        if label == "setattr" and path == (b"d",) and failures:
            raise error(failures.pop())

    world.lower.fault = fault
    run(world.drain)
    assert not failures
    assert world.lower.inode("d").mode & 0o777 == 0o755
