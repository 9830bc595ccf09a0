"""The engine over a backing directory in memory, on virtual time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import xxhash

from acpfs.backing.lower import LowerPath
from acpfs.writeback.failures.failures import TRIED_AT_ONCE
from acpfs.writeback.failures.retry import PARKED_DELAY_MAX_S, PARKED_DELAY_MIN_S, PERMANENT_TRIES
from acpfs.writeback.log.ops import OpKind
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth, Inode, MemoryLower
from tests.writeback.world import World, verified


def some_work(world: World) -> None:
    world.mkdir("run")
    world.mkdir("run/ck1")
    for i in range(5):
        world.store(f"run/ck1/shard{i}", b"%d" % i * 1000)
    world.store("run/latest", b"ck1")
    world.symlink(b"ck1", "run/link")
    world.mkfifo("run/fifo")
    world.link("run/ck1/shard0", "run/ck1/again")
    world.rename("run/ck1", "run/ck2")
    world.store("run/latest", b"ck2")
    world.store("run/ck2/shard1", b"newer")
    world.unlink("run/ck2/shard2")
    world.exchange("run/ck2/shard3", "run/ck2/shard4")
    world.store("run/ck2/again", b"both names")
    world.mkdir("run/empty")
    world.rmdir("run/empty")


def assert_history(world: World, lower: MemoryLower) -> None:
    """Every visible state is one that the application had, in the order in which it had them."""
    at = 0
    for state in lower.visible_history:
        while at < len(world.seen) and world.seen[at] != state:
            at += 1
        assert at < len(world.seen), f"never seen by the application: {state}"


def test_everything_arrives_in_order(world: World, run: Run) -> None:
    some_work(world)
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert [op.seq for op, _stat in world.listener.persisted_ops] == sorted(
        op.seq for op, _stat in world.listener.persisted_ops
    )
    assert not world.lower.list_staging()
    assert not world.lower.descriptors
    assert not world.tier.ids()
    statistics = world.engine.statistics()
    assert statistics.dirty_bytes == statistics.staged_bytes == statistics.queued_ops == 0


def test_operations_one_at_a_time_show_only_states_of_the_application(
    world: World, run: Run
) -> None:
    async def step_by_step() -> None:
        actions: tuple[Callable[[], object], ...] = (
            lambda: world.mkdir("d"),
            lambda: world.store("d/a", b"1"),
            lambda: world.store("d/latest", b"a"),
            lambda: world.rename("d/a", "d/b"),
            lambda: world.store("d/latest", b"b"),
            lambda: world.exchange("d/b", "d/latest"),
            lambda: world.unlink("d/b"),
            lambda: world.rename("d", "e"),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            for action in actions:
                action()
                await trio.sleep(1)
            nursery.cancel_scope.cancel()

    run(step_by_step)
    assert_history(world, world.lower)
    assert world.lower.visible() == world.application_view()


def test_manifest_and_xattr_carry_the_checksum(world: World, run: Run) -> None:
    some_work(world)
    run(world.drain)
    lines = dict(
        reversed(line.split(b"  ", 1))
        for line in world.lower.own_files()[b"manifest/node.xxh128"].splitlines()
    )
    files = {
        path: data for path, data in world.contents.items() if path not in ("run/link", "run/fifo")
    }
    assert lines == {
        path.encode(): xxhash.xxh3_128_hexdigest(data).encode() for path, data in files.items()
    }
    assert (
        world.lower.inode("run/latest").xattrs[b"user.acpfs.xxh3"].split()[0]
        == lines[b"run/latest"]
    )
    assert all(record.status == "ok" for record in verified(world.manifest))
    assert len(verified(world.manifest, [(b"run",)])) == len(files)


def test_verification_finds_what_changed_and_what_is_gone(world: World, run: Run) -> None:
    world.mkdir("d")
    for name in ("good", "bad", "gone"):
        world.store(f"d/{name}", name.encode())
    run(world.drain)
    world.lower.inode("d/bad").content[0] ^= 1
    world.lower.unlink((b"d", b"gone"))
    world.lower.close(world.lower.create_staging("x"))
    world.lower.rename(world.lower.staging_path("x"), (b"d", b"foreign"))
    found = {str(record.path): record.status for record in verified(world.manifest, [(b"d",)])}
    assert found == {
        "d/good": "ok",
        "d/bad": "mismatch",
        "d/gone": "missing",
        "d/foreign": "unknown",
    }


def test_a_lost_table_is_filled_from_the_written_manifest(world: World, run: Run) -> None:
    world.store("a", b"1")
    world.store("b\\c", b"2")
    run(world.drain)
    world.state.change("DELETE FROM checksum")
    world.state.change("DELETE FROM checksum_origin")
    world.state.commit()
    world.restart()
    assert world.manifest.load() == 1
    assert world.manifest.digest((b"a",)) == xxhash.xxh3_128_hexdigest(b"1")


def test_create_and_delete_costs_the_backing_directory_nothing(world: World, run: Run) -> None:
    world.mkdir("d")
    for i in range(10):
        world.store(f"d/{i}", b"x")
    for i in range(10):
        world.unlink(f"d/{i}")
    world.rmdir("d")
    run(world.drain)
    assert not world.lower.visible_history
    assert world.lower.calls["create"] == 0
    assert len(world.listener.dropped_ops) == 22
    assert not world.tier.ids()


def test_of_a_file_rewritten_before_the_drain_only_the_last_version_is_stored(
    world: World, run: Run
) -> None:
    for i in range(10):
        world.store("f", b"%d" % i)
    run(world.drain)
    assert world.lower.calls["create"] == 1
    assert world.lower.visible() == {b"f": b"9"}


def test_everything_before_a_pointer_file_is_flushed_first(world: World, run: Run) -> None:
    world.mkdir("ck")
    world.store("ck/shard", b"1")
    world.store("latest", b"ck")
    run(world.drain)
    calls = world.lower.log
    assert calls.index(("fsync directory", (b"ck",))) < calls.index(("rename", (b"latest",)))


def test_directory_times_are_set_after_its_last_operation(world: World, run: Run) -> None:
    directory = world.mkdir("d").ino
    world.listener.times[directory] = (111, 222)
    world.store("d/a", b"1")
    world.store("d/b", b"1")
    run(world.drain)
    assert world.lower.inode("d").mtime_ns == 222


def test_directory_times_are_set_also_when_its_last_operations_are_left_out(
    world: World, run: Run
) -> None:
    directory = world.mkdir("d").ino
    world.listener.times[directory] = (111, 222)
    world.store("d/a", b"1")

    def create_and_delete(label: str, path: tuple[bytes, ...]) -> None:
        if (label, path) == ("rename", (b"d", b"a")):
            world.store("d/tmp", b"1")
            world.unlink("d/tmp")

    world.lower.fault = create_and_delete
    run(world.drain)
    assert world.lower.inode("d").mtime_ns == 222


@pytest.mark.parametrize("name", ["latest", "sub/.metadata", "x.index.json"])
@pytest.mark.parametrize("how", ["store", "rename", "symlink", "link"])
def test_whatever_makes_a_pointer_visible_begins_a_group(
    world: World, run: Run, name: str, how: str
) -> None:
    world.mkdir("sub")
    world.store("shard", b"1")
    if how == "rename":
        world.store("tmp", b"1")
        world.rename("tmp", name)
    elif how == "link":
        world.link("shard", name)
    elif how == "symlink":
        world.symlink(b"shard", name)
    else:
        world.store(name, b"1")
    run(world.drain)
    path = tuple(name.encode().split(b"/"))
    shown = next(
        i
        for i, (label, where) in enumerate(world.lower.log)
        if label in ("rename", "link", "symlink") and where == path
    )
    assert ("fsync directory", ()) in world.lower.log[:shown]


@pytest.mark.parametrize(
    "label",
    [
        "create",
        "write",
        "setattr",
        "fsync",
        "close",
        "rename",
        "mkdir",
        "fsync directory",
        "lstat",
        "exchange",
        "unlink",
        "link",
    ],
)
@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ENOSPC, errno.EACCES]
)
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_passing_failure_is_retried(
    world: World, run: Run, label: str, number: int, nth: int
) -> None:
    world.lower.fault = FailNth(label, nth, number, times=2)
    some_work(world)
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert not world.engine.statistics().parked
    assert not world.lower.list_staging()
    assert not world.lower.descriptors


def test_after_a_failed_fsync_the_copy_starts_with_a_new_file(world: World, run: Run) -> None:
    world.lower.fault = FailNth("fsync", 1, errno.EIO)
    world.store("f", b"data")
    run(world.drain)
    created = [path for label, path in world.lower.log if label == "create"]
    assert len(created) == len(set(created)) == 2


def test_retries_back_off_and_are_visible(world: World, run: Run) -> None:
    world.lower.fault = FailNth("create", 1, errno.ENOSPC, times=0)
    world.store("f", b"data")
    run(world.run_for, 1000.0)
    (entry,) = world.engine.statistics().queue
    assert entry.last_error == "ENOSPC"
    assert entry.state != "parked"
    assert 15 < entry.tries < 60
    assert (entry.next_attempt or 0) > 0
    world.lower.fault = lambda _label, _path: None
    run(world.drain)
    assert world.lower.visible() == {b"f": b"data"}


class TestParking:
    def refuse(self, world: World, name: bytes) -> None:
        def fault(label: str, path: tuple[bytes, ...]) -> None:
            if label in ("rename", "mkdir") and path and path[-1] == name:
                raise PermissionError(errno.EACCES, "refused")

        world.lower.fault = fault

    def test_a_refusal_is_parked_after_three_tries_and_others_go_on(
        self, world: World, run: Run
    ) -> None:
        self.refuse(world, b"bad")
        bad = world.store("bad", b"1")
        waiting = world.engine.persisted(bad.seq)
        world.store("good", b"2")
        run(world.run_for, 100.0)
        assert world.lower.visible() == {b"good": b"2"}
        (entry,) = world.engine.statistics().parked
        assert (entry.name, entry.tries, entry.last_error, entry.state) == (
            "bad",
            3,
            "EACCES",
            "parked",
        )
        error = waiting.exception(0)
        assert isinstance(error, OSError)
        assert error.errno == errno.EACCES

    def test_what_depends_on_it_and_deletions_and_pointers_wait(
        self, world: World, run: Run
    ) -> None:
        world.store("old", b"0")
        run(world.drain)
        self.refuse(world, b"bad")
        world.mkdir("bad")
        world.store("bad/below", b"1")
        world.unlink("old")
        world.store("latest", b"bad")
        world.store("other", b"2")
        run(world.run_for, 100.0)
        assert world.lower.visible() == {b"old": b"0", b"other": b"2"}
        assert [entry.state for entry in world.engine.statistics().queue] == [
            "parked",
            "held",
            "held",
            "held",
        ]
        world.lower.fault = lambda _label, _path: None
        assert world.engine.retry() == 1
        run(world.drain)
        assert world.lower.visible() == world.application_view()

    def test_discarding_gives_up_what_lies_below(self, world: World, run: Run) -> None:
        self.refuse(world, b"bad")
        bad = world.mkdir("bad")
        world.store("bad/below", b"1")
        world.store("good", b"2")
        run(world.run_for, 100.0)
        assert world.engine.discard([bad.seq]) == 2
        run(world.drain)
        assert world.lower.visible() == {b"good": b"2"}
        assert not world.lower.list_staging()

    def test_deleting_what_cannot_be_stored_ends_the_matter(self, world: World, run: Run) -> None:
        self.refuse(world, b"bad")
        world.store("bad", b"1")
        run(world.run_for, 100.0)
        world.unlink("bad")
        run(world.drain)
        assert not world.lower.visible()
        assert not world.engine.statistics().parked

    def test_a_waiter_for_another_file_is_not_bothered(self, world: World, run: Run) -> None:
        self.refuse(world, b"bad")
        world.store("bad", b"1")
        good = world.store("good", b"2")
        run(world.run_for, 100.0)
        world.engine.persisted(good.seq, good.ino).result(0)
        with pytest.raises(PermissionError):
            world.engine.persisted(good.seq).result(0)

    def test_parked_operations_survive_a_restart(self, world: World, run: Run) -> None:
        self.refuse(world, b"bad")
        world.store("bad", b"1")
        run(world.run_for, 100.0)
        world.restart()
        assert [entry.last_error for entry in world.engine.statistics().parked] == ["EACCES"]
        world.lower.fault = lambda _label, _path: None
        world.engine.retry()
        run(world.drain)
        assert world.lower.visible() == {b"bad": b"1"}

    @pytest.mark.clause("S24")
    def test_it_is_tried_again_by_itself(self, world: World, run: Run) -> None:
        self.refuse(world, b"bad")
        world.store("bad", b"1")
        run(world.run_for, 2 * PARKED_DELAY_MIN_S)
        (entry,) = world.engine.statistics().parked
        assert entry.tries == PERMANENT_TRIES + 1  # for the same reason: once is enough
        world.restart()
        world.lower.fault = lambda _label, _path: None
        run(world.drain)
        assert world.lower.visible() == {b"bad": b"1"}

    @pytest.mark.clause("S24")
    def test_when_one_is_done_the_others_follow_at_once(self, world: World, run: Run) -> None:
        """A file system that was read-only is writable again."""

        def read_only(label: str, _path: tuple[bytes, ...]) -> None:
            if label == "create":
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        world.lower.fault = read_only
        for number in range(3 * TRIED_AT_ONCE):
            world.store(f"f{number}", b"x")
        run(world.run_for, 0.9 * PARKED_DELAY_MIN_S)
        assert len(world.engine.statistics().parked) == 3 * TRIED_AT_ONCE
        world.lower.fault = lambda _label, _path: None
        run(world.drain, 1.3 * PARKED_DELAY_MIN_S)
        assert world.lower.visible() == world.application_view()

    def test_what_nobody_can_end_is_not_tried_again_by_itself(self, world: World, run: Run) -> None:
        def too_large(label: str, _path: tuple[bytes, ...]) -> None:
            if label == "write":
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

        world.lower.fault = too_large
        world.store("large", b"1")
        run(world.run_for, 2 * PARKED_DELAY_MAX_S)
        (entry,) = world.engine.statistics().parked
        assert entry.tries == PERMANENT_TRIES

    @pytest.mark.clause("S208")
    def test_a_removal_that_is_refused_holds_up_only_what_touches_it(
        self, world: World, run: Run
    ) -> None:
        """What an NFS client leaves for a file that is open, or another node's file: ENOTEMPTY held
        every tracker and deletion.
        """
        world.mkdir("scratch")
        world.store("old", b"0")
        run(world.drain)
        world.lower.symlink(b"x", (b"scratch", b".nfs1"))
        world.rmdir("scratch")
        world.unlink("old")
        world.store("shard", b"1")
        world.store("latest", b"shard")
        world.store("scratch", b"a file now")
        run(world.run_for, 100.0)
        assert world.lower.visible() == {
            b"scratch/": b"",
            b"scratch/.nfs1": b"x",
            b"shard": b"1",
            b"latest": b"shard",
        }
        assert [entry.state for entry in world.engine.statistics().queue] == ["parked", "held"]
        world.lower.unlink((b"scratch", b".nfs1"))
        run(world.drain)
        assert world.lower.visible() == world.application_view()

    @pytest.mark.clause("S208")
    def test_attributes_that_are_refused_hold_up_nothing_else(self, world: World, run: Run) -> None:
        """A directory of somebody else in a project that many share: what is saved in it, deletions
        and pointers go on.
        """
        world.mkdir("theirs")
        world.store("theirs/old", b"0")
        run(world.drain)

        def refuse(label: str, path: tuple[bytes, ...]) -> None:
            if label == "setattr" and path == (b"theirs",):
                raise PermissionError(errno.EACCES, "refused")

        world.lower.fault = refuse
        world.setattr("theirs", permissions=0o755)
        world.store("theirs/shard", b"1")
        world.unlink("theirs/old")
        world.store("theirs/latest", b"shard")
        run(world.run_for, 100.0)
        assert world.lower.visible() == {
            b"theirs/": b"",
            b"theirs/shard": b"1",
            b"theirs/latest": b"shard",
        }
        assert [entry.state for entry in world.engine.statistics().queue] == ["parked"]

    def test_the_removal_of_a_pointer_that_is_refused_holds_up_deletions(
        self, world: World, run: Run
    ) -> None:
        world.store("shard", b"1")
        world.store("latest", b"shard")
        run(world.drain)

        def refuse(label: str, path: tuple[bytes, ...]) -> None:
            if label == "unlink" and path[-1] == b"latest":
                raise PermissionError(errno.EACCES, "refused")

        world.lower.fault = refuse
        world.unlink("latest")
        world.unlink("shard")
        run(world.run_for, 100.0)
        assert world.lower.visible() == {b"shard": b"1", b"latest": b"shard"}

    @pytest.mark.clause("S208")
    def test_pointers_of_other_directories_do_not_wait(self, world: World, run: Run) -> None:
        for project in ("ours", "theirs"):
            world.mkdir(project)
            world.mkdir(project + "/step")
            world.store(project + "/latest", b"0")
            world.store(project + "/old", b"0")
        run(world.drain)
        self.refuse(world, b"bad")
        for project, name in (("theirs", "bad"), ("ours", "shard")):
            world.store(f"{project}/step/{name}", b"1")
            world.store(project + "/latest.tmp", b"step")
            world.rename(project + "/latest.tmp", project + "/latest")
        world.unlink("ours/old")
        world.store("latest", b"theirs/step")
        run(world.run_for, 100.0)
        seen = world.lower.visible()
        assert (seen[b"ours/step/shard"], seen[b"ours/latest"], seen[b"theirs/latest"]) == (
            b"1",
            b"step",
            b"0",
        )
        assert (
            b"ours/old" in seen
        )  # a deletion waits, wherever it is: what could not be stored may be what replaces it
        assert b"latest" not in seen
        world.lower.fault = lambda _label, _path: None
        run(world.drain)
        assert world.lower.visible() == world.application_view()


class TestOutside:
    @pytest.mark.clause("S208")
    @pytest.mark.parametrize("what", ["store", "mkdir", "symlink", "mkfifo", "link", "rename"])
    def test_removed_parents_are_made_again(self, world: World, run: Run, what: str) -> None:
        world.mkdir("a")
        world.mkdir("a/b")
        world.store("x", b"0")
        run(world.drain)
        world.lower.rmdir((b"a", b"b"))
        world.lower.rmdir((b"a",))
        arguments: dict[str, tuple[Any, ...]] = {
            "store": ("a/b/f", b"1"),
            "symlink": (b"x", "a/b/f"),
            "link": ("x", "a/b/f"),
            "rename": ("x", "a/b/f"),
        }
        getattr(world, what)(*arguments.get(what, ("a/b/f",)))
        run(world.drain)
        assert world.lower.visible() == world.application_view()
        assert world.engine.statistics().counters.repairs == 1

    @pytest.mark.clause("S522")
    @pytest.mark.parametrize("fails", ["", "rename", "fsync directory"])
    def test_the_names_of_what_is_made_again_are_flushed(
        self, world: World, run: Run, fails: str
    ) -> None:
        """Also where the operation, or the flush, fails afterwards: then nothing is made any
        more.
        """
        world.mkdir("a")
        world.mkdir("a/b")
        run(world.drain)
        world.lower.rmdir((b"a", b"b"))
        world.lower.rmdir((b"a",))
        fault = FailNth(fails, 2 if fails == "rename" else 1, errno.EIO)
        flushed: list[LowerPath] = []

        def note(label: str, path: LowerPath) -> None:
            fault(label, path)
            if label == "fsync directory":
                flushed.append(path)

        world.lower.fault = note
        world.store("a/b/f", b"1")
        run(world.drain)
        assert world.lower.visible() == world.application_view()
        assert {(), (b"a",), (b"a", b"b")} <= set(flushed)

    @pytest.mark.clause("S522")
    @pytest.mark.parametrize("given_up", ["discard", "unlink"])
    def test_what_is_made_again_for_an_operation_that_is_given_up_is_flushed_all_the_same(
        self, world: World, run: Run, given_up: str
    ) -> None:
        """By the next group that persists anything; for the names stay, and others rely on them."""
        world.mkdir("a")
        world.mkdir("a/b")
        world.mkdir("c")
        run(world.drain)
        world.lower.rmdir((b"a", b"b"))
        world.lower.rmdir((b"a",))
        flushed: list[LowerPath] = []
        failing = [True]
        tries = [0]

        def note(label: str, path: LowerPath) -> None:
            if label == "rename" and failing[0]:
                tries[0] += 1
                if tries[0] > 1:
                    raise OSError(errno.EIO, "x")
            if label == "fsync directory":
                flushed.append(path)

        world.lower.fault = note
        world.store("a/b/f", b"1")

        async def first() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(world.engine.run)
                with trio.fail_after(30):
                    await world.until(lambda: tries[0] >= 3)
                nursery.cancel_scope.cancel()
            failing[0] = False
            if given_up == "discard":
                world.engine.discard([op.seq for op in world.log])
            else:
                world.unlink("a/b/f")
            await world.drain()

        run(first)
        world.store("c/y", b"2")
        run(world.drain)
        world.store("a/b/g", b"3")
        run(world.drain)
        assert {(), (b"a",), (b"a", b"b")} <= set(flushed)

    @pytest.mark.clause("S208")
    @pytest.mark.parametrize("is_moved", [False, True], ids=["removed first", "moved first"])
    def test_a_directory_that_is_moved_and_removed_is_made_again_under_its_new_name(
        self, world: World, run: Run, is_moved: bool
    ) -> None:
        """`moved first`: the rename was carried out, its answer was lost, and others removed it."""
        world.mkdir("a")
        run(world.drain)
        if is_moved:

            def move_and_lose(label: str, path: LowerPath) -> None:
                if label == "rename":
                    world.lower.fault = lambda _label, _path: None
                    world.lower.rename((b"a",), (b"b",))
                    world.lower.rmdir((b"b",))
                    raise OSError(errno.EIO, "the answer was lost")

            world.lower.fault = move_and_lose
        else:
            world.lower.rmdir((b"a",))
        world.rename("a", "b")
        world.store("b/f", b"1")
        run(world.drain)
        assert world.lower.visible() == world.application_view()

    @pytest.mark.clause("S208")
    @pytest.mark.parametrize("removed", ["one", "other", "both"])
    @pytest.mark.parametrize("is_done", [False, True], ids=["removed first", "exchanged first"])
    def test_of_two_that_are_exchanged_one_may_have_been_removed(
        self, world: World, run: Run, removed: str, is_done: bool
    ) -> None:
        """`exchanged first`: that was carried out, its answer was lost, and others removed it."""
        world.mkdir("one")
        world.mkdir("other")
        run(world.drain)
        now_at = {"one": b"one", "other": b"other"}

        def remove() -> None:
            for name, where in now_at.items():
                if removed in (name, "both"):
                    world.lower.rmdir((where,))

        if is_done:

            def exchange_and_lose(label: str, path: LowerPath) -> None:
                if label == "exchange":
                    world.lower.fault = lambda _label, _path: None
                    world.lower.exchange((b"one",), (b"other",))
                    now_at.update({"one": b"other", "other": b"one"})
                    remove()
                    raise OSError(errno.EIO, "the answer was lost")

            world.lower.fault = exchange_and_lose
        else:
            remove()
        world.exchange("one", "other")
        world.store("one/f", b"was the other")
        world.store("other/f", b"was the one")
        run(world.drain)
        assert world.lower.visible() == world.application_view()

    @pytest.mark.clause("S208")
    def test_what_never_came_is_not_exchanged_and_the_other_one_moves(
        self, world: World, run: Run
    ) -> None:
        world.mkdir("one")
        run(world.drain)
        half = world.store("other", b"2")
        other = world.inos["other"]
        world.exchange("one", "other")
        world.log.withdraw(half)  # nobody will close it
        run(world.drain)
        assert world.lower.visible() == {b"other/": b""}
        assert world.tree.places(other) == []

    def test_a_removed_staging_file_is_written_again(self, world: World, run: Run) -> None:
        world.lower.fault = FailNth("rename", 1, errno.EIO)
        world.store("f", b"1")
        run(world.run_for, 0.01)
        world.lower.inode(".acpfs/staging/node").children.clear()
        run(world.drain)
        assert world.lower.visible() == {b"f": b"1"}

    @pytest.mark.clause("S190")
    def test_an_older_file_with_the_number_of_a_removed_staging_file_is_no_version(
        self, world: World, run: Run
    ) -> None:
        world.store("f", b"1")
        run(world.drain)
        world.lower.fault = FailNth("rename", 1, errno.EIO)
        world.store("f", b"2")
        run(world.run_for, 0.01)
        staging = world.lower.inode(".acpfs/staging/node").children
        (staged,) = staging.values()
        world.lower.inode("f").ino = staged.ino
        staging.clear()
        run(world.drain)
        assert world.lower.visible() == {b"f": b"2"}

    def test_names_taken_from_outside_are_replaced(self, world: World, run: Run) -> None:
        world.lower.symlink(b"elsewhere", (b"link",))
        world.lower.symlink(b"elsewhere", (b"again",))
        world.store("f", b"1")
        world.symlink(b"f", "link")
        world.link("f", "again")
        run(world.drain)
        assert world.lower.visible() == world.application_view()

    def test_a_directory_with_foreign_files_is_not_removed(self, world: World, run: Run) -> None:
        world.mkdir("d")
        run(world.drain)
        world.lower.symlink(b"x", (b"d", b"foreign"))
        world.rmdir("d")
        run(world.run_for, 100.0)
        assert world.engine.statistics().parked[0].last_error == "ENOTEMPTY"


def test_xattrs_of_a_replaced_version_are_kept(world: World, run: Run) -> None:
    world.store("f", b"1", xattrs={b"user.a": b"1", b"user.b": b"1"})
    run(world.drain)
    world.store("f", b"2", xattrs={b"user.b": None})
    run(world.drain)
    assert {n: v for n, v in world.lower.inode("f").xattrs.items() if n != b"user.acpfs.xxh3"} == {
        b"user.a": b"1"
    }


def test_attributes_changed_after_staging_are_stored(world: World, run: Run) -> None:
    world.lower.fault = FailNth("rename", 1, errno.EIO)
    world.store("f", b"1")
    run(world.run_for, 0.01)
    assert world.engine.statistics().queue[0].state == "staged"
    op = world.log.front(1)[0]
    op.meta.permissions = 0o600
    run(world.drain)
    assert world.lower.inode("f").mode & 0o777 == 0o600


def test_stale_staging_files_are_removed_at_the_start(world: World, run: Run) -> None:
    world.lower.close(world.lower.create_staging("left-over"))
    run(world.drain)
    assert not world.lower.list_staging()


def test_held_engine_starts_nothing(world: World, run: Run) -> None:
    world.engine.hold(True)
    world.store("f", b"1")
    run(world.run_for, 100.0)
    assert not world.lower.visible()
    assert world.engine.statistics().held
    world.engine.hold(False)
    run(world.drain)
    assert world.lower.visible() == {b"f": b"1"}


def test_verify_after_write_finds_a_torn_write(tmp_path: Path, run: Run) -> None:
    world = World(tmp_path, verify_after_write=True)
    torn: list[Inode] = []

    def tear(label: str, _path: tuple[bytes, ...]) -> None:
        if label == "close" and not torn:
            staged = world.lower.inode(".acpfs/staging/node").children.values()
            torn.extend(staged)
            torn[0].content[2] ^= 1

    world.lower.fault = tear
    world.store("f", b"data")
    run(world.drain)
    assert world.lower.visible() == {b"f": b"data"}
    statistics = world.engine.statistics()
    assert (statistics.counters.verify_failures, statistics.counters.verified_files) == (1, 1)


def test_kinds_are_all_covered(world: World) -> None:
    assert set(world.engine._committer._kinds) == set(OpKind)


@pytest.mark.clause("S160")
@pytest.mark.parametrize(
    ("a", "b", "publishes"),
    [("d", "e", True), ("f", "d", True), ("d", "f", True), ("f", "g", False)],
)
def test_what_gives_a_directory_another_name_is_a_pointer(
    world: World, a: str, b: str, publishes: bool
) -> None:
    """A framework writes a directory aside and swaps it with the one that counts: that publishes
    all that is in it, like a rename.
    """
    for directory in ("d", "e"):
        world.mkdir(directory)
    for file in ("f", "g"):
        world.store(file, b"bytes")
    assert world.engine._order._pointers.makes(world.exchange(a, b)) is publishes
    assert world.engine._order._pointers.makes(world.rename(a, "other")) is (b in ("d", "e"))
