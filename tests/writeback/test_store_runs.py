"""New small files are committed in runs, and streamed only so far ahead of commits."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from acpfs.backing.calls import CallPools
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.writeback.commits import store_runs
from acpfs.writeback.commits.store_runs import RUN_OPS_MAX
from acpfs.writeback.log.stages import Step
from acpfs.writeback.streams import staged
from tests.rig.runtime import REAL
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth, error
from tests.writeback.test_engine import assert_history
from tests.writeback.world import World, verified


class KilledError(BaseException):
    """The worker ends here; no handler of the engine takes it for an answer of the backing
    directory.
    """


def files(world: World, count: int, directory: str = "d") -> list[str]:
    if directory not in world.inos:
        world.mkdir(directory)
    names = [f"{directory}/f{number:03}" for number in range(count)]
    for name in names:
        world.store(name, name.encode())
    return names


def renamed(world: World) -> list[str]:
    return [b"/".join(path).decode() for label, path in world.lower.log if label == "rename"]


def test_a_run_takes_one_transaction_to_begin_and_one_to_record(world: World, run: Run) -> None:
    names = files(world, 2 * RUN_OPS_MAX)
    begun: list[int] = []
    plain = world.state.must_commit

    def must_commit() -> None:
        begun.append(sum(op.begun for op in world.log))
        plain()

    world.state.must_commit = must_commit  # type: ignore[method-assign]
    run(world.drain)
    assert len(begun) <= 2 * 2 + 1  # the directory, and with each run what is left of a group
    assert max(begun) >= RUN_OPS_MAX
    assert renamed(world) == names
    assert world.lower.visible() == world.application_view()


class CountingLock:
    """The file system's lock, and how often it was taken."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.taken = 0

    def acquire(self) -> bool:
        self.taken += 1
        return self.lock.acquire()

    def release(self) -> None:
        self.lock.release()

    __enter__ = acquire

    def __exit__(self, *_raised: object) -> None:
        self.release()


def test_how_often_a_small_file_takes_the_lock(world: World, run: Run) -> None:
    """Each time its thread stands in line with all others.

    It was 13 times when a stream ended in a section of its own.
    """
    lock = CountingLock()
    world.lock = lock  # type: ignore[assignment]
    world.restart()
    files(world, 128)
    lock.taken = 0
    run(world.drain)
    assert lock.taken <= 11 * 128
    assert world.lower.visible() == world.application_view()


@pytest.mark.clause("S6")
def test_what_a_run_makes_visible_is_in_the_order_of_the_log(world: World, run: Run) -> None:
    names = files(world, 3 * RUN_OPS_MAX)
    run(world.drain)
    assert renamed(world) == names
    assert_history(world, world.lower)
    assert [op.seq for op, _stat in world.listener.persisted_ops] == sorted(
        op.seq for op, _stat in world.listener.persisted_ops
    )


@pytest.mark.clause("S6")
@pytest.mark.parametrize("label", ["rename", "lstat", "fsync directory"])
@pytest.mark.parametrize("nth", [1, 2, 7, RUN_OPS_MAX, RUN_OPS_MAX + 1])
def test_a_worker_that_dies_inside_a_run_leaves_it_to_the_next(
    world: World, run: Run, label: str, nth: int
) -> None:
    names = files(world, RUN_OPS_MAX + 5)
    calls = 0

    def fault(called: str, path: LowerPath) -> None:
        nonlocal calls
        calls += called == label and path[:1] == (b"d",)
        if calls == nth:
            raise KilledError

    world.lower.fault = fault
    try:
        run(world.drain)
    except (
        BaseException
    ):  # in a group of trio's; how often a directory is flushed depends on how commits meet
        if calls < nth:
            raise
    else:
        assert calls < nth
        assert label == "fsync directory"
    world.lower.fault = lambda _label, _path: None
    world.restart()
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert_history(world, world.lower)
    assert sorted(set(renamed(world))) == sorted(names)
    assert not world.lower.list_staging()
    assert len(verified(world.manifest)) == len(names)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ENOENT])
def test_a_run_ends_at_the_first_that_fails(world: World, run: Run, number: int) -> None:
    names = files(world, RUN_OPS_MAX)
    failed: list[int] = []

    def fault(label: str, path: LowerPath) -> None:
        if label == "rename" and path[-1] == b"f007" and not failed:
            failed.append(sum(op.begun for op in world.log))
            raise error(number)

    world.lower.fault = fault
    run(world.drain)
    order = renamed(world)
    assert order[:8] == names[:8]  # and no other before it was tried again
    assert order[8] == names[7]
    assert world.lower.visible() == world.application_view()
    assert_history(world, world.lower)


def test_what_was_not_tried_may_still_be_left_out(world: World, run: Run) -> None:
    names = files(world, 10)
    world.lower.fault = FailNth("rename", 3, errno.EIO, times=1 << 30)
    run(world.run_for, 50.0)
    world.unlink(names[8])
    world.lower.fault = lambda _label, _path: None
    run(world.drain)
    assert names[8] not in renamed(world)
    assert world.lower.visible() == world.application_view()


def made_by_others(world: World, path: str, kind: str) -> None:
    names = tuple(path.encode().split(b"/"))
    if kind == "directory":
        world.lower.mkdir(names)
    else:
        world.lower.symlink(b"theirs", names)


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_what_others_made_under_a_name_of_a_run_ends_as_for_a_file_alone(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ends = []
    for together in (RUN_OPS_MAX, 1):
        monkeypatch.setattr(store_runs, "RUN_OPS_MAX", together)
        (tmp_path / str(together)).mkdir()
        world = World(tmp_path / str(together))
        names = files(world, 8)
        made: list[bool] = []

        def meanwhile(
            label: str,
            path: LowerPath,
            world: World = world,
            made: list[bool] = made,
            last: str = names[7],
        ) -> None:
            if not made and label == "rename" and len(renamed(world)) == 4:
                made.append(True)
                made_by_others(world, last, kind)

        world.lower.fault = meanwhile
        run(world.run_for, 50.0)
        assert made
        ends.append(
            (
                world.lower.visible(),
                [op.name for op in world.log],
                [op.parked for op in world.log],
                len(world.lower.own_files()),
            )
        )
    assert ends[0] == ends[1]
    assert ends[0][0].keys() >= {b"d/f%03d" % number for number in range(7)}


def test_files_that_went_with_a_directory_that_others_moved_are_stored_again(
    world: World, run: Run
) -> None:
    names = files(world, 5)
    moved: list[bool] = []
    before: set[bytes] = set()
    """What was committed alone, or in a run before: that others moved, which is their business."""
    carried: set[bytes] = set()
    """What was there when they did: all that was staged until then."""

    @contextlib.contextmanager
    def keeping() -> Iterator[None]:
        if not moved:
            before.update(world.lower.visible())
        yield
        if not moved:
            moved.append(True)
            carried.update(world.lower.visible())
            world.lower.rename((b"d",), (b"theirs",))
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    world.lower.keeping_directories = keeping
    run(world.drain)
    visible = world.lower.visible()
    assert {name.encode() for name in names} - before <= visible.keys()
    assert carried - before
    assert {
        b"theirs/" + name.removeprefix(b"d/") for name in carried if name.startswith(b"d/")
    } <= visible.keys()


def test_a_directory_that_lies_elsewhere_at_the_end_is_told(tmp_path: Path) -> None:
    lower = BackingDirectory(tmp_path, "node", REAL)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_bytes(b"")
    try:
        with lower.keeping_directories():
            lower.rename((b"a", b"file"), (b"a", b"other"))
            assert lower.lstat((b"a", b"other")).size == 0
        with pytest.raises(OSError) as raised, lower.keeping_directories():  # noqa: PT012
            # it is the end that raises
            lower.lstat((b"a", b"other"))
            (tmp_path / "a").rename(tmp_path / "b")
            (tmp_path / "a").mkdir()
            lower.rename((b"a", b"other"), (b"a", b"file"))
        assert raised.value.errno == errno.ESTALE
        with pytest.raises(FileNotFoundError):
            lower.lstat((b"a", b"file"))  # opened anew from here on
    finally:
        lower.disconnect()


@pytest.mark.clause("S265")
def test_small_files_are_streamed_so_far_ahead_of_commits_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "FILES_MAX", 40)
    world = World(tmp_path, calls=CallPools.make(REAL))
    files(world, 200)
    go_on = threading.Event()

    def fault(label: str, _path: LowerPath) -> None:
        if label == "mkdir":
            assert go_on.wait(60)

    world.lower.fault = fault

    async def stalled() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            with trio.fail_after(120):
                await world.until(lambda: len(staged_files(world)) == 40)
            assert world.lower.calls["create"] == 40
            assert not world.engine.statistics().streaming
            go_on.set()
            with trio.fail_after(120):
                await world.until(world.engine.drained)
            nursery.cancel_scope.cancel()

    trio.run(stalled)
    assert world.lower.calls["create"] == 200
    assert world.lower.visible() == world.application_view()


def staged_files(world: World) -> list[str]:
    with world.lock:
        return [
            op.version.staging_name
            for op in world.log
            if op.version is not None and op.version.is_staged
        ]


@pytest.mark.clause("S265")
def test_nothing_holds_streams_up_where_commits_wait_for_something_else(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "FILES_MAX", 40)
    world.mkdir("d")
    run(world.drain)
    world.store("d/open", b"1").take(Step.CLOSED)
    files(world, 100)
    run(world.run_for, 1.0)
    assert len(staged_files(world)) == 100
