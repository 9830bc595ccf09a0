"""Flushes that cannot succeed: what would let them may stand behind them in the log."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter

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
def test_a_directory_that_was_closed_right_after_it_was_written_to_stops_nothing(
    world: World, run: Run
) -> None:
    """All of it is one group: when its end comes the daemon, which has no privilege, may not enter
    any more what it has to flush.
    """
    without_privilege(world)
    world.mkdir("run")
    world.mkdir("run/ck")
    world.store("run/ck/model", b"1")
    world.setattr("run", permissions=0o600)
    world.listener.times = {world.inos["run/ck"]: (1, 2)}
    run(world.drain)
    world.store("after", b"2")
    world.setattr("run", permissions=0o700)
    run(world.drain)
    world.store("run/ck/model", b"3")
    run(world.drain)
    assert world.lower.visible() == world.application_view()


@clause("S24")
@pytest.mark.parametrize("number", [errno.ENOTDIR, errno.ELOOP])
def test_a_directory_that_others_have_put_something_else_in_the_place_of_stops_nothing(
    world: World, run: Run, number: int
) -> None:
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
def test_what_cannot_be_reached_is_persisted_once_its_file_system_was_flushed(
    world: World, run: Run
) -> None:
    """The refusal may be one that passes, like that of a ticket which has expired: nothing may
    count as persisted without any flush.
    """
    flushed = 0
    failed = 0

    def deny(label: str, path: LowerPath) -> None:
        nonlocal flushed, failed
        if label == "fsync directory" and path == (b"run",):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if label == "sync file systems":
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


@clause("S24")
def test_one_flush_of_file_systems_stands_for_all_that_cannot_be_reached(
    world: World, run: Run
) -> None:
    """It may take as long as the storage likes, and says only once what could not be written: not
    to be spent on one of them.
    """

    def deny(label: str, path: LowerPath) -> None:
        if label == "fsync directory" and path:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    for name in "abc":
        world.mkdir(name)
    run(world.drain)
    world.lower.fault = deny
    for name in "abc":
        # not a file: each is committed as soon as its own stream has ended, maybe in a group before
        # the others
        world.mkdir(f"{name}/step")
    run(world.drain)
    assert world.lower.calls["sync file systems"] == world.engine._counters.commit_groups - 1 == 1
    assert world.lower.visible() == world.application_view()


@clause("S24")
def test_a_directory_with_new_attributes_and_new_names_has_three_tries_too(
    world: World, run: Run
) -> None:
    """It is flushed for both, and each has refusals of its own."""
    tries = 0

    def deny(label: str, path: LowerPath) -> None:
        nonlocal tries
        if label in ("fsync directory", "fsync entry") and path == (b"run",):
            tries += label == "fsync directory"
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    world.mkdir("run")
    run(world.drain)
    world.lower.fault = deny
    world.store("run/model", b"1")
    world.setattr("run", permissions=0o700)
    run(world.drain)
    assert tries == 3


@clause("S24")
def test_refusals_count_in_a_row(world: World, run: Run) -> None:
    """What was flushed between two of them was within reach."""
    answers: dict[LowerPath, list[int]] = {
        (b"run",): [errno.EACCES, errno.EACCES, 0, errno.EACCES],
        (b"other",): [errno.EIO] * 4,
    }

    def deny(label: str, path: LowerPath) -> None:
        if label == "fsync directory" and (left := answers.get(path)) and (number := left.pop(0)):
            raise OSError(number, os.strerror(number))

    for name in ("run", "other"):
        world.mkdir(name)
    run(world.drain)
    world.lower.fault = deny
    # something was made again: all is flushed anew
    world.engine._flusher._recheck = lambda group: setattr(group, "made_again", True)
    for name in ("run", "other"):
        world.mkdir(f"{name}/step")  # not a file, as above: they are to be one group
    run(world.drain)
    assert not any(answers.values())
    assert world.lower.calls["sync file systems"] == 0


@clause("S24")
def test_a_directory_that_can_be_reached_again_gets_its_times(world: World, run: Run) -> None:
    """With the next group, whatever that has to do with."""
    world.mkdir("run")
    run(world.drain)
    denied = 0

    def deny(label: str, path: LowerPath) -> None:
        nonlocal denied
        if label in ("utimens", "fsync directory") and path == (b"run",):
            denied += 1
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    world.lower.fault = deny
    world.store("run/model", b"1")
    world.listener.times = {world.inos["run"]: (1, 2)}
    world.listener.settled.clear()
    run(world.drain)
    assert denied == 3
    for data in (b"2", b"3"):
        world.store("after", data)
        run(world.drain)
    flushes = world.lower.calls["sync file systems"]
    assert denied in (4, 5), "one look per group"
    world.lower.fault = lambda _label, _path: None
    for data in (b"4", b"5"):
        world.store("after", data)
        run(world.drain)
    assert (world.lower.inode("run").atime_ns, world.lower.inode("run").mtime_ns) == (1, 2)
    assert world.inos["run"] not in dict(world.listener.settled), (
        "others may have changed it meanwhile, and the mount has to look"
    )
    assert world.lower.calls["sync file systems"] == flushes == 1, "only its times were to come"


@clause("S25")
def test_a_flush_that_a_file_system_refuses_which_has_become_read_only_is_not_left(
    world: World, run: Run
) -> None:
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


@clause("S24")
def test_what_a_look_made_again_without_an_answer_is_flushed_again(world: World, run: Run) -> None:
    """Its directory was flushed before, and the next look finds it there."""
    flushed: list[LowerPath] = []
    faults = ["flush", "mkdir"]
    for name in "pq":
        world.mkdir(name)
    run(world.drain)

    def fail(label: str, path: LowerPath) -> None:
        if label == "fsync directory":
            flushed.append(path)
        if (label, path) == ("fsync directory", (b"q",)) and "flush" in faults:
            faults.remove("flush")
            del world.lower.inode("p").children[b"new"]  # others take away what is empty
        elif (label, path) == ("mkdir", (b"p", b"new")) and faults == ["mkdir"]:
            faults.remove("mkdir")
            world.lower._place(path, world.lower._inode(stat.S_IFDIR | 0o700))
            flushed.clear()
        else:
            return
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    world.lower.fault = fail
    for name in "pq":
        world.mkdir(f"{name}/new")
    run(world.drain)
    assert not faults
    assert world.lower.visible() == world.application_view()
    assert (b"p",) in flushed


@clause("S24")
def test_what_a_look_made_again_before_it_failed_is_flushed_again(world: World, run: Run) -> None:
    """The flush of its directory may have reached a server that had forgotten it."""
    flushed: list[LowerPath] = []
    faults = ["flush", "look"]
    for name in "pq":
        world.mkdir(name)
        world.symlink(b"target", f"{name}/old")
    run(world.drain)
    names = world.lower.inode("p").children

    def forget(label: str, path: LowerPath) -> None:
        if label == "fsync directory":
            flushed.append(path)
        if (label, path) == ("fsync directory", (b"q",)) and "flush" in faults:
            faults.remove("flush")
            names[b"old"] = names.pop(b"new")
        elif (label, path) == ("lstat", (b"q", b"new")) and faults == ["look"]:
            faults.remove("look")
            assert b"new" in names, "moved again"
            flushed.clear()
        else:
            return
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    world.lower.fault = forget
    for name in "pq":
        world.rename(f"{name}/old", f"{name}/new")
    run(world.drain)
    assert not faults
    assert world.lower.visible() == world.application_view()
    assert (b"p",) in flushed


@clause("S24")
def test_what_was_flushed_and_found_is_not_flushed_again(world: World, run: Run) -> None:
    """Else a group ends only when the flush of all that it touches comes through at once."""
    names = [str(number) for number in range(4)]
    calls: Counter[LowerPath] = Counter()
    for name in names:
        world.mkdir(name)
    run(world.drain)

    def fail(label: str, path: LowerPath) -> None:
        """Each of them comes through at another time, and only then."""
        if label == "fsync directory":
            calls[path] += 1
            assert calls[path] <= len(names), "flushed, found, and flushed again"
            if calls[path] != 1 + int(path[0]):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    world.lower.fault = fail
    for name in names:
        world.mkdir(f"{name}/new")
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert [calls[name.encode(),] for name in names] == [1, 2, 3, 4]
