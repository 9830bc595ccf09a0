"""What is stored and renamed next goes straight to its last name, and nothing of it is ever under
the temporary one, where another member may have its own by then.
"""

from __future__ import annotations

import errno
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from acpfs.writeback.adopting.under_way import not_fenced
from acpfs.writeback.evidence.whereabouts import Whereabouts
from acpfs.writeback.order.order import GROUP_OPS_MAX
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth, MemoryLower, error
from tests.writeback.test_put_off import with_peers
from tests.writeback.world import World

pytestmark = pytest.mark.clause("S630")

NOW_NS = 1_700_000_000 * 10**9


def make(world: World, path: str, data: bytes, *, is_link: bool = False) -> None:
    if is_link:
        world.symlink(data, path)
    else:
        world.store(path, data, mtime_ns=NOW_NS)


def others(world: World, path: str, data: bytes, mtime_ns: int = NOW_NS + 1) -> None:
    """Another member's file takes a name."""
    lower: MemoryLower = world.lower
    inode = lower._inode(0o100644)
    inode.content[:] = data
    inode.mtime_ns = mtime_ns
    lower.root.children.pop(path.encode(), None)
    lower._place(tuple(path.encode().split(b"/")), inode)


def open_all(world: World) -> None:
    """Nobody else has anything that these wait for."""
    gate = world.engine.gate
    while waiting := gate.gated():
        for gated in waiting:
            gate.passes(gated)


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize(
    ("name", "has_peers"),
    # a pointer of a node alone is flushed under its temporary name first
    [("model.bin", False), ("model.bin", True), ("latest", True)],
)
def test_what_another_member_has_under_the_temporary_name_stays(
    world: World, run: Run, name: str, has_peers: bool, is_link: bool
) -> None:
    if has_peers:
        with_peers(world)
    make(world, "tmp", b"ours", is_link=is_link)
    world.rename("tmp", name)
    others(world, "tmp", b"theirs")
    open_all(world)
    run(world.drain)
    assert world.lower.visible() == {b"tmp": b"theirs", name.encode(): b"ours"}
    states = world.lower.visible_history
    assert all(state.get(b"tmp") in (None, b"theirs") for state in states)


def test_a_pointer_takes_its_content_along_from_before_what_lies_between(
    world: World, run: Run
) -> None:
    """Members share its temporary name, and all else is flushed before it may be there."""
    with_peers(world)
    world.store("tmp", b"ours")
    world.store("shard", b"data")
    world.rename("tmp", "latest")
    open_all(world)
    run(world.drain)
    assert [sorted(state) for state in world.lower.visible_history] == [
        [b"shard"],
        [b"latest", b"shard"],
    ]


def test_two_members_whose_contents_are_older_than_the_other_one_s_pointer_do_not_wait_for_it(
    world: World,
) -> None:
    """A content comes with its own pointer: it is none of what others' pointers wait for."""
    gate = with_peers(world)
    content = world.store("tmp", b"ours")
    assert gate.watermark(content.logged_at + 60.0) == content.logged_at
    pointer = world.rename("tmp", "latest")
    assert gate.watermark(content.logged_at + 60.0) == pointer.logged_at
    assert gate.head() == pointer.logged_at


def test_contents_before_which_no_rename_is_in_sight_go_on_their_own(
    world: World, run: Run
) -> None:
    with_peers(world)
    count = GROUP_OPS_MAX + 2
    for number in range(count):
        world.store(f"tmp-{number}", b"%d" % number)
    for number in range(count):
        world.mkdir(f"step-{number}")
        world.rename(f"tmp-{number}", f"step-{number}/latest")
    open_all(world)
    run(world.drain)
    assert world.lower.visible() == world.application_view()


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("is_known_since", ["before", "as another file"])
def test_what_this_member_has_under_the_temporary_name_leaves_it_in_one_call(
    world: World, run: Run, is_known_since: str, is_link: bool
) -> None:
    """No two calls do that at once: so both are carried out one by one."""
    make(world, "tmp", b"before", is_link=is_link)
    run(world.drain)
    if is_known_since != "before" or is_link:
        world.unlink("tmp")
    make(world, "tmp", b"ours", is_link=is_link)
    world.rename("tmp", "final")
    run(world.drain)
    assert world.lower.visible() == {b"final": b"ours"}
    for state in world.lower.visible_history:
        assert state in world.seen


class Dies(BaseException):
    """The worker ends right behind the call."""


class DyingLower(MemoryLower):
    """The worker dies when something has come to a name, before it knows."""

    target = b""
    failure: BaseException = Dies()
    """Or the answer to that alone is lost."""

    def rename(self, source: tuple[bytes, ...], target: tuple[bytes, ...]) -> None:
        super().rename(source, target)
        self._dies(target)

    def symlink(self, content: bytes, path: tuple[bytes, ...]) -> None:
        super().symlink(content, path)
        self._dies(path)

    def _dies(self, came_to: tuple[bytes, ...]) -> None:
        if came_to == (self.target,):
            self.target = b""
            raise self.failure


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("has_peers", [False, True])
@pytest.mark.parametrize("since", ["nothing", "a later one", "an earlier one"])
def test_a_worker_that_dies_before_it_has_recorded_both(
    tmp_path: Path, run: Run, since: str, has_peers: bool, is_link: bool
) -> None:
    """What another member has put there since stays, if it is later."""
    lower = DyingLower()
    world = World(tmp_path, lower)
    if has_peers:
        with_peers(world)
    make(world, "tmp", b"ours", is_link=is_link)
    world.rename("tmp", "latest" if has_peers else "final")
    name = b"latest" if has_peers else b"final"
    open_all(world)
    lower.target = name
    with pytest.raises(BaseException) as ended:
        run(world.drain)
    assert "Dies()" in repr(ended.value)
    assert lower.visible() == {name: b"ours"}
    world.restart()
    if has_peers:
        with_peers(world)
        open_all(world)
    if since != "nothing":
        others(world, name.decode(), b"theirs", NOW_NS + (1 if since == "a later one" else -1))
    run(world.drain)
    is_theirs = since == "a later one" and not is_link  # a link is not given a time
    assert lower.visible() == {name: b"theirs" if is_theirs else b"ours"}
    assert not lower.list_staging()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_worker_that_dies_behind_a_content_that_was_put_alone_knows_it_for_its_own(
    tmp_path: Path, run: Run, is_link: bool
) -> None:
    """Its last name was refused: what lies under the temporary one is no other member's."""
    lower = DyingLower()
    world = World(tmp_path, lower)
    world.mkdir("shut")
    run(world.drain)
    refusing = Refusing()
    lower.fault = refusing
    make(world, "tmp", b"ours", is_link=is_link)
    world.rename("tmp", "shut/final")
    lower.target = b"tmp"
    with pytest.raises(BaseException) as ended:
        run(world.run_for, 5.0)
    assert "Dies()" in repr(ended.value)
    assert lower.visible() == {b"shut/": b"", b"tmp": b"ours"}
    refusing.is_over = True
    world.restart()
    run(world.drain)
    assert lower.visible() == {b"shut/": b"", b"shut/final": b"ours"}


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("is_carried_out", [False, True])
def test_what_a_pair_in_doubt_replaces_is_not_taken_for_it(
    tmp_path: Path, run: Run, is_carried_out: bool, is_link: bool
) -> None:
    """Whoever reads the file that was there finds that, or nothing."""
    lower = DyingLower()
    world = World(tmp_path, lower)
    make(world, "final", b"before", is_link=is_link)
    run(world.drain)
    make(world, "tmp", b"ours", is_link=is_link)
    move = world.rename("tmp", "final")
    if is_carried_out:
        lower.failure = error(errno.EIO)
        lower.target = b"final"
    else:
        lower.fault = FailNth("rename", 1, errno.EIO)
    run(world.run_for, 0.01)
    assert move.last_error == errno.EIO or move.begun
    assert lower.visible() == {b"final": b"ours" if is_carried_out else b"before"}
    there = Whereabouts(lower, world.tree, world.log, world.lock, world.listener.left_as)
    if is_carried_out:
        with pytest.raises(FileNotFoundError):
            there.find((b"final",))
    else:
        assert there.find((b"final",)) == (b"final",)


@pytest.mark.clause("S612")
@pytest.mark.parametrize("is_apart", [False, True])
def test_the_fence_stops_a_rename_that_is_one_call_with_its_content(
    world: World, is_apart: bool
) -> None:
    """Which comes late, from a node that was lost, through its staging directory."""
    content = world.store("tmp", b"ours")
    move = world.rename("tmp", "final")
    with world.lock:
        world.log.mark_begun_together(content, move)
        if is_apart:
            world.log.mark_apart(content, move)
        world.state.commit()
    with closing(sqlite3.connect(world.directory / "state.db")) as db:
        assert not_fenced(db) == (["rename tmp"] if is_apart else [])


def test_the_content_of_a_pair_that_is_taken_apart_waits_until_copies_of_the_log_say_so(
    world: World,
) -> None:
    """Else whoever adopts it takes both for one call, and leaves it under the temporary name."""
    content = world.store("tmp", b"ours")
    move = world.rename("tmp", "final")
    with world.lock:
        world.log.mark_begun_together(content, move)
        world.state.commit()
        known = world.state.changes
        world.log.mark_apart(content, move)
        assert world.log.changed(content) > known
        world.state.commit()


def test_what_is_refused_at_its_last_name_is_told_by_that(world: World, run: Run) -> None:
    world.mkdir("shut")
    run(world.drain)
    refusing = Refusing()
    world.lower.fault = refusing
    world.store("tmp", b"ours")
    rename = world.rename("tmp", "shut/final")
    run(world.run_for, 5.0)
    assert [op.seq for op in world.log.parked()] == [rename.seq]
    assert world.lower.visible() == {b"shut/": b"", b"tmp": b"ours"}
    refusing.is_over = True
    world.engine.retry()
    run(world.drain)
    assert world.lower.visible() == world.application_view()


class Refusing:
    """Nothing comes to a directory."""

    is_over = False

    def __call__(self, label: str, path: tuple[bytes, ...]) -> None:
        if label == "rename" and path[:1] == (b"shut",) and not self.is_over:
            raise error(errno.EPERM)


class RefusingWhatIsThere:
    """The first look at, or attribute of, what has come to a name."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.is_over = False

    def __call__(self, label: str, path: tuple[bytes, ...]) -> None:
        if label == self._label and path == (b"final",) and not self.is_over:
            self.is_over = True
            raise error(errno.EPERM)


@pytest.mark.parametrize(("is_link", "label"), [(False, "lstat"), (True, "setattr")])
def test_what_is_there_and_was_refused_something_does_not_come_under_the_temporary_name(
    world: World, run: Run, label: str, is_link: bool
) -> None:
    refusing = RefusingWhatIsThere(label)
    world.lower.fault = refusing
    make(world, "tmp", b"ours", is_link=is_link)
    world.rename("tmp", "final")
    run(world.run_for, 5.0)
    assert refusing.is_over
    world.engine.retry()
    run(world.drain)
    assert world.lower.visible() == {b"final": b"ours"}
    assert all(b"tmp" not in state for state in world.lower.visible_history)


@pytest.mark.parametrize("has_peers", [False, True])
def test_both_are_tried_again_where_nobody_knows_whether_that_was_done(
    world: World, run: Run, has_peers: bool
) -> None:
    if has_peers:
        with_peers(world)
    world.lower.fault = FailNth("rename", 1, errno.EIO)
    world.store("tmp", b"ours")
    world.rename("tmp", "latest")
    others(world, "tmp", b"theirs")
    open_all(world)
    run(world.drain)
    assert world.lower.visible()[b"latest"] == b"ours"
    if has_peers:
        assert world.lower.visible()[b"tmp"] == b"theirs"


class DyingAtFlush(MemoryLower):
    """The worker dies when it has recorded what it did, and before it has heard that it stays."""

    is_dying = False

    def sync_directory(self, path: tuple[bytes, ...]) -> None:
        if self.is_dying:
            self.is_dying = False
            raise Dies
        super().sync_directory(path)


@pytest.mark.parametrize("was_persisted", [False, True])
@pytest.mark.parametrize("is_renamed", [False, True])
def test_what_another_member_has_put_there_since_is_not_taken_for_what_a_dead_worker_did(
    tmp_path: Path, run: Run, is_renamed: bool, was_persisted: bool
) -> None:
    """Else the mount would show its own older content under that name for ever."""
    lower = DyingAtFlush()
    world = World(tmp_path, lower)
    make(world, "tmp" if is_renamed else "final", b"ours")
    if was_persisted:
        run(world.drain)
    if is_renamed:
        world.rename("tmp", "final")
    elif was_persisted:
        make(world, "final", b"newer")
    lower.is_dying = True
    with pytest.raises(BaseException) as ended:
        run(world.drain)
    assert "Dies()" in repr(ended.value)
    world.restart()
    others(world, "final", b"theirs")
    run(world.drain)
    assert lower.visible() == {b"final": b"theirs"}
    theirs = lower.lstat((b"final",)).ino
    taken = [stat.ino for _op, stat in world.listener.persisted_ops if stat is not None]
    assert theirs not in taken
