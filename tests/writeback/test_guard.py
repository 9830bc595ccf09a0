"""The guard over a backing directory in memory: what is held, what overtakes it, and what lets it
go.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.backing.lower import LowerStat
from acpfs.drain_records import GuardedReport
from acpfs.writeback.guard import guard as guard_module
from acpfs.writeback.guard.guarded import SPACE_PATIENCE_S
from acpfs.writeback.log.ops import Op
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import KEPT, MemoryLower, error
from tests.writeback.world import World

FILES = (
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "optimizer.pt",
)
SHARD = b"x" * 1000
_clock = itertools.count(1 << 40)
"""Files have the times of their writing, whatever the order in which they are streamed."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return guarded_world(tmp_path)


def guarded_world(directory: Path, **settings: Any) -> World:
    world = World(directory, keep_last_persisted=True, **settings)
    world.mkdir("run")
    return world


def save(world: World, path: str, files: tuple[str, ...] = FILES) -> None:
    world.mkdir(path)
    fill(world, path, files)


def fill(world: World, path: str, files: tuple[str, ...] = FILES) -> None:
    for name in files:
        world.store(f"{path}/{name}", SHARD + path.encode(), mtime_ns=next(_clock))


def remove(world: World, path: str, files: tuple[str, ...] = FILES) -> None:
    """As shutil.rmtree does."""
    for name in files:
        world.unlink(f"{path}/{name}")
    world.rmdir(path)


def whole(state: dict[bytes, bytes], path: str, files: tuple[str, ...] = FILES) -> bool:
    return all(f"{path}/{name}".encode() in state for name in files)


def held(world: World) -> list[bytes]:
    return [told.path.encode() for told in world.engine.statistics().guard.checkpoints]


def released(world: World) -> dict[str, int]:
    return world.engine.statistics().guard.released


def told(world: World) -> GuardedReport:
    return world.engine.statistics().guard.checkpoints[0]


def test_deleted_before_the_next_is_written_it_stays_until_that_is_whole(
    world: World, run: Run
) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    world.mkdir("run/checkpoint-2")
    for name in FILES:
        run(world.drain)
        assert whole(world.lower.visible(), "run/checkpoint-1")
        assert held(world) == [b"run/checkpoint-1"]
        assert told(world).operations == len(FILES) + 1
        world.store(f"run/checkpoint-2/{name}", SHARD * 2, mtime_ns=next(_clock))
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert released(world) == {"newer": 1}
    assert len(world.log.all_aside()) == 0


@pytest.mark.parametrize("on", [True, False])
def test_at_every_instant_one_whole_checkpoint_is_there(tmp_path: Path, run: Run, on: bool) -> None:
    """And without the guard there is an instant without one, so this would notice."""
    world = World(tmp_path, keep_last_persisted=on)
    world.mkdir("run")
    save(world, "run/checkpoint-1")
    run(world.drain)
    begin = len(world.lower.visible_history)
    for step in range(2, 6):
        remove(world, f"run/checkpoint-{step - 1}")
        if step % 2:
            run(world.drain)
        save(world, f"run/checkpoint-{step}")
        if step > 3:
            run(world.drain)
    run(world.drain)
    states = world.lower.visible_history[begin:]
    assert (
        all(any(whole(state, f"run/checkpoint-{step}") for step in range(1, 6)) for state in states)
        is on
    )
    assert world.lower.visible() == world.application_view()


def test_nobody_waits_for_held_deletions_and_pointers_overtake_them(world: World, run: Run) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    world.store("run/latest", b"none")
    world.store("other", b"1")
    world.unlink("other")
    world.mkdir("run/checkpoint-2")

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            future = world.engine.persisted(world.log.last_seq)
            with trio.fail_after(60):
                await world.until(future.done)
            nursery.cancel_scope.cancel()

    run(scenario)
    run(world.drain)
    assert world.lower.visible()[b"run/latest"] == b"none"
    assert b"run/checkpoint-2/" in world.lower.visible()
    assert held(world) == [b"run/checkpoint-1"]


@pytest.mark.parametrize("settle", [True, False])
def test_right_after_the_next_it_goes_when_that_is_persisted(
    world: World, run: Run, settle: bool
) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    save(world, "run/checkpoint-2")
    if settle:
        run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert released(world) == {"newer": 1}


def test_an_older_one_beside_it_does_not_count_and_goes_at_once(world: World, run: Run) -> None:
    for step in (1, 2, 3):
        save(world, f"run/checkpoint-{step}")
        run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    assert not whole(world.lower.visible(), "run/checkpoint-1")
    remove(world, "run/checkpoint-3")
    run(world.drain)
    assert whole(world.lower.visible(), "run/checkpoint-3")
    assert held(world) == [b"run/checkpoint-3"]


def test_a_newer_one_that_is_being_written_does_not_count(world: World, run: Run) -> None:
    save(world, "run/checkpoint-1")
    save(world, "run/checkpoint-2")
    run(world.drain)
    world.listener.being_written = {"run/checkpoint-2"}
    remove(world, "run/checkpoint-1")
    run(world.drain)
    assert held(world) == [b"run/checkpoint-1"]
    assert "being written" in told(world).why
    world.listener.being_written = set()
    run(world.run_for, 2 * guard_module.POLL_S)
    assert held(world) == []


def test_one_of_other_names_counts_when_it_is_as_large_and_has_been_quiet(
    world: World, run: Run
) -> None:
    save(world, "run/checkpoint-1", (*FILES, "notes.txt"))
    run(world.drain)
    remove(world, "run/checkpoint-1", (*FILES, "notes.txt"))
    save(world, "run/checkpoint-2", (*FILES[:-1], "optimizer_of_another_kind.pt", "more.pt"))
    run(world.run_for, guard_module.QUIET_S / 2)
    assert held(world) == [b"run/checkpoint-1"]
    assert "notes.txt" in told(world).why
    run(world.run_for, 2 * guard_module.QUIET_S)
    assert held(world) == []


def test_a_smaller_one_never_counts(world: World, run: Run) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    world.mkdir("run/checkpoint-2")
    for name in FILES:
        world.store(f"run/checkpoint-2/{name}", b"small", mtime_ns=next(_clock))
    run(world.run_for, 10 * guard_module.QUIET_S)
    assert held(world) == [b"run/checkpoint-1"]


@pytest.mark.parametrize(("size", "counts"), [(880, False), (920, True)])
def test_one_of_the_same_names_counts_from_nine_tenths_of_the_bytes_on(
    world: World, run: Run, size: int, counts: bool
) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    world.mkdir("run/checkpoint-2")
    for name in FILES:
        world.store(f"run/checkpoint-2/{name}", b"x" * size, mtime_ns=next(_clock))
    run(world.run_for, 10 * guard_module.QUIET_S)
    assert (held(world) == []) is counts


def test_other_nodes_may_complete_the_newer_one(world: World, run: Run) -> None:
    shards = ("random_states_0.pkl", "random_states_1.pkl")
    save(world, "run/checkpoint-1", shards)
    run(world.drain)
    remove(world, "run/checkpoint-1", shards)
    save(world, "run/checkpoint-2", shards[:1])
    run(world.drain)
    assert held(world) == [b"run/checkpoint-1"]
    fd = world.lower.create_staging("theirs")
    world.lower.write(fd, memoryview(SHARD * 2), 0)
    world.lower.close(fd)
    world.lower.rename(
        world.lower.staging_path("theirs"), (b"run", b"checkpoint-2", shards[1].encode())
    )
    run(world.run_for, 2 * guard_module.POLL_S)
    assert held(world) == []


@pytest.mark.clause("S405")
def test_what_others_have_removed_is_not_held_back(world: World, run: Run) -> None:
    """Found by attack: two nodes that rotate both delete, and one told for 30 minutes of what it
    kept, which was gone.
    """
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    assert held(world) == [b"run/checkpoint-1"]
    for name in FILES:
        world.lower.unlink((b"run", b"checkpoint-1", name.encode()))
    world.lower.rmdir((b"run", b"checkpoint-1"))
    run(world.run_for, 2 * guard_module.POLL_S)
    assert (held(world), len(world.log), world.log.all_aside()) == ([], 0, [])
    assert released(world) == {"gone": 1}


@pytest.mark.clause("S405")
def test_what_only_seems_to_be_gone_stays(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server in trouble does not find what its directory lists: the deletion would be carried out
    when it does again.
    """
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    lstat = world.lower.lstat

    def finds_nothing(path: tuple[bytes, ...]) -> LowerStat:
        if b"checkpoint-1" in path:
            raise error(errno.ENOENT)
        found: LowerStat = lstat(path)
        return found

    monkeypatch.setattr(world.lower, "lstat", finds_nothing)
    run(world.run_for, 2 * guard_module.POLL_S)
    assert held(world) == [b"run/checkpoint-1"]
    assert "does not say" in told(world).why


def test_it_is_held_again_after_a_restart_and_goes_by_the_same_rule(world: World, run: Run) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    world.restart()
    assert len(world.log) == len(FILES) + 1
    run(world.drain)
    assert held(world) == [b"run/checkpoint-1"]
    assert whole(world.lower.visible(), "run/checkpoint-1")
    world.restart()
    save(world, "run/checkpoint-2")
    run(world.drain)
    assert world.lower.visible() == world.application_view()


def test_time(world: World, run: Run) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    for op in world.log.all_aside():
        op.logged_at -= world.settings.guard_time_s - 5
        world.log.save(op)
    world.state.commit()
    world.restart()
    run(world.drain)
    assert told(world).until - told(world).since == pytest.approx(
        world.settings.guard_time_s, abs=1
    )
    assert held(world)
    for op in world.log.all_aside():
        op.logged_at -= 10
        world.log.save(op)
    world.state.commit()
    world.restart()
    run(world.drain)
    assert released(world) == {"time": 1}
    assert world.lower.visible() == world.application_view()


@pytest.mark.clause("S141")
def test_a_rename_elsewhere_has_nobody_wait_for_a_look_at_what_is_held(
    world: World, run: Run
) -> None:
    """Found by reading: flush and umount waited for 5 s for a look that nobody had asked for."""
    save(world, "run/checkpoint-1")
    world.store("log.tmp", b"line")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    asked: list[bool] = []
    world.rename("log.tmp", "log")

    def persisted(op: Op, stat: LowerStat | None) -> None:
        asked.append(world.engine.guard.is_settled)

    world.listener.persisted = persisted  # type: ignore[method-assign]
    run(world.run_for, 1.0)
    assert asked == [True]


@pytest.mark.clause("S120", "S143")
@pytest.mark.parametrize("step_s", [1e6, -1e6])
def test_a_wall_clock_that_is_set_neither_ends_the_time_nor_puts_it_off(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    run(world.run_for, 1.0)
    assert (held(world), released(world)) == ([b"run/checkpoint-1"], {})
    for op in world.log.all_aside():
        op.logged_at -= world.settings.guard_time_s
        world.log.save(op)
    world.log.clock.keep()  # as each heartbeat does
    world.state.commit()
    world.restart()
    run(world.drain)
    assert released(world) == {"time": 1}


@pytest.mark.clause("S141")
def test_what_another_node_has_written_under_the_name_meanwhile_is_not_deleted(
    world: World, run: Run
) -> None:
    """Found by reading: the job goes on on another node from an earlier step, and makes the
    checkpoint again that is deleted here.
    """
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    theirs = world.lower.inode("run/checkpoint-1/optimizer.pt")
    theirs.content = bytearray(b"theirs")
    theirs.mtime_ns = next(_clock)
    save(world, "run/checkpoint-2")
    run(world.drain)
    assert released(world) == {"newer": 1}
    left = {path for path in world.lower.visible() if b"checkpoint-1" in path}
    assert left == {b"run/checkpoint-1/", b"run/checkpoint-1/optimizer.pt"}
    assert [conflict.path for conflict in world.engine.statistics().conflicts] == [
        "run/checkpoint-1/optimizer.pt",
        "run/checkpoint-1",
    ]
    assert world.engine.statistics().parked == ()


def test_an_operator_lets_go_and_a_restart_in_between_changes_nothing(
    world: World, run: Run
) -> None:
    for directory in ("run/a", "run/b"):
        world.mkdir(directory)
        save(world, f"{directory}/checkpoint-1")
    run(world.drain)
    remove(world, "run/a/checkpoint-1")
    remove(world, "run/b/checkpoint-1")
    run(world.drain)
    assert held(world) == [b"run/a/checkpoint-1", b"run/b/checkpoint-1"]
    assert world.engine.guard.release((b"run", b"a")) == 1
    assert world.engine.guard.release((b"run", b"nothing")) == 0
    world.restart()
    run(world.drain)
    assert held(world) == [b"run/b/checkpoint-1"]
    assert not whole(world.lower.visible(), "run/a/checkpoint-1")
    assert world.engine.guard.release(()) == 1
    run(world.drain)
    assert world.lower.visible() == world.application_view()


class Full:
    """Lets files be written only when `full` does not say otherwise."""

    def __init__(self, full: Callable[[], bool], number: int = errno.ENOSPC) -> None:
        self._full = full
        self._number = number

    def __call__(self, label: str, _path: tuple[bytes, ...]) -> None:
        if label == "write" and self._full():
            raise error(self._number)


def test_a_full_backing_directory_gets_the_held_one_s_space_after_a_while(
    tmp_path: Path, run: Run
) -> None:
    lower = MemoryLower()
    world = World(tmp_path, lower, keep_last_persisted=True, retry_delay_max_s=1.0)
    world.mkdir("run")
    save(world, "run/checkpoint-1")
    run(world.drain)
    lower.fault = Full(lambda: whole(lower.visible(), "run/checkpoint-1"))
    remove(world, "run/checkpoint-1")
    save(world, "run/checkpoint-2")
    run(world.run_for, 0.9 * SPACE_PATIENCE_S)
    assert whole(lower.visible(), "run/checkpoint-1")
    run(world.drain)
    assert released(world) == {"space": 1}
    assert lower.visible() == world.application_view()


def test_of_several_the_one_that_was_deleted_first_goes_and_the_next_after_another_while(
    tmp_path: Path, run: Run
) -> None:
    """By a quota, which is as full as a disk; the names are against the order of time."""
    lower = MemoryLower()
    world = World(tmp_path, lower, keep_last_persisted=True, retry_delay_max_s=1.0)
    for directory in ("c", "b", "a"):
        world.mkdir(directory)
        save(world, f"{directory}/checkpoint-1")
    run(world.drain)
    for number, directory in enumerate(("c", "b", "a")):
        remove(world, f"{directory}/checkpoint-1")
        for op in list(world.log)[-len(FILES) - 1 :]:
            op.logged_at -= 100 - number
    lower.fault = Full(lambda: True, errno.EDQUOT)
    world.store("new", SHARD)

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            await trio.sleep(0.9 * SPACE_PATIENCE_S)
            for left in (["c", "b", "a"], ["b", "a"], ["a"], []):
                assert held(world) == [f"{directory}/checkpoint-1".encode() for directory in left]
                await trio.sleep(SPACE_PATIENCE_S)
            nursery.cancel_scope.cancel()

    run(scenario)
    assert released(world) == {"space": 3}


def kept(world: World) -> set[str]:
    """What lies in `.acpfs/kept`, with what is in it."""
    found: dict[bytes, bytes] = {}
    world.lower._collect(world.lower._find(KEPT), b"", found)
    return {path.decode() for path in found}


@pytest.mark.parametrize("restart", [True, False])
def test_made_again_under_its_name_the_old_one_is_kept_aside(
    world: World, run: Run, restart: bool
) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    world.mkdir("run/checkpoint-1")
    for name in FILES:
        run(world.drain)
        aside = {path.split("/", 1)[1] for path in kept(world) if not path.endswith("/")}
        assert aside == set(FILES)
        assert [
            (told.path, told.files) for told in world.engine.statistics().guard.checkpoints
        ] == [("run/checkpoint-1", len(FILES))]
        assert (told(world).kept_as or "").endswith("-checkpoint-1")
        if restart:
            world.restart()
        world.store(f"run/checkpoint-1/{name}", SHARD * 2, mtime_ns=next(_clock))
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert not kept(world)
    assert released(world) == {"newer": 1}


def test_a_file_made_again_under_its_name_replaces_the_held_one_in_one_step(
    world: World, run: Run
) -> None:
    world.store("run/model_1.pt", SHARD, mtime_ns=next(_clock))
    run(world.drain)
    begin = len(world.lower.visible_history)
    world.unlink("run/model_1.pt")
    run(world.drain)
    assert held(world) == [b"run/*_1.pt"]
    world.store("run/model_1.pt.tmp", SHARD * 2, mtime_ns=next(_clock))
    run(world.drain)
    world.rename("run/model_1.pt.tmp", "run/model_1.pt")
    run(world.drain)
    assert held(world) == []
    assert world.lower.visible() == world.application_view()
    assert all(b"run/model_1.pt" in state for state in world.lower.visible_history[begin:])
    assert len(world.log.all_aside()) == 0


def test_a_file_whose_name_comes_back_is_not_deleted_later(world: World, run: Run) -> None:
    world.store("run/model_1.pt", SHARD, mtime_ns=next(_clock))
    world.link("run/model_1.pt", "run/copy")
    run(world.drain)
    world.unlink("run/model_1.pt")
    run(world.drain)
    world.link("run/copy", "run/model_1.pt")
    run(world.drain)
    world.engine.guard.release(())
    run(world.drain)
    assert world.lower.visible() == world.application_view()


def test_another_name_of_a_held_file_is_rewritten_without_the_held_one(
    world: World, run: Run
) -> None:
    world.store("run/model_1.pt", SHARD, mtime_ns=next(_clock))
    world.link("run/model_1.pt", "run/copy")
    run(world.drain)
    world.unlink("run/model_1.pt")
    run(world.drain)
    world.store("run/copy", b"new")
    run(world.drain)
    assert world.lower.visible()[b"run/model_1.pt"] == SHARD
    assert world.lower.visible()[b"run/copy"] == b"new"
    world.engine.guard.release(())
    run(world.drain)
    assert world.lower.visible() == world.application_view()


@pytest.mark.parametrize("restart", [True, False])
def test_renamed_out_of_the_way_it_is_still_that_checkpoint(
    world: World, run: Run, restart: bool
) -> None:
    world.mkdir("trash")
    save(world, "run/checkpoint-1")
    run(world.drain)
    world.rename("run/checkpoint-1", "trash/x")
    run(world.drain)
    if restart:
        world.restart()
    remove(world, "trash/x")
    run(world.drain)
    assert whole(world.lower.visible(), "trash/x")
    assert [(told.path, told.kept_as) for told in world.engine.statistics().guard.checkpoints] == [
        ("run/checkpoint-1", "trash/x")
    ]
    save(world, "run/checkpoint-2")
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert world.state.rows("SELECT * FROM former_path") == []


def test_a_directory_that_becomes_a_checkpoint_and_back_is_remembered_once(
    world: World, run: Run
) -> None:
    save(world, "run/work")
    world.rename("run/work", "run/checkpoint-1")
    world.rename("run/checkpoint-1", "run/old")
    world.rename("run/old", "run/checkpoint-1")
    run(world.drain)
    assert world.state.rows("SELECT * FROM former_path") == []


def test_a_save_dir_that_goes_wholly_and_comes_back(world: World, run: Run) -> None:
    save(world, "run/checkpoint-1")
    save(world, "run/checkpoint-2")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    remove(world, "run/checkpoint-2")
    world.rmdir("run")
    run(world.drain)
    assert held(world) == [b"run/checkpoint-2"]
    assert not whole(world.lower.visible(), "run/checkpoint-1")
    assert len(world.log.all_aside()) == len(FILES) + 2
    world.mkdir("run")
    save(world, "run/checkpoint-1")
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    assert not kept(world)


def test_a_renamed_save_dir_takes_what_is_held_along(world: World, run: Run) -> None:
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    world.rename("run", "done")
    run(world.drain)
    assert held(world) == [b"done/checkpoint-1"]
    assert whole(world.lower.visible(), "done/checkpoint-1")
    save(world, "done/checkpoint-2")
    run(world.drain)
    assert world.lower.visible() == world.application_view()


def test_what_was_never_committed_is_still_left_out(world: World, run: Run) -> None:
    save(world, "run/checkpoint-1")
    remove(world, "run/checkpoint-1")
    run(world.drain)
    assert held(world) == []
    assert all(b"run/checkpoint-1/" not in state for state in world.lower.visible_history)


def test_small_directories_called_by_a_number_and_empty_ones_are_no_checkpoints(
    world: World, run: Run
) -> None:
    save(world, "run/4711")
    world.mkdir("run/checkpoint-1")
    run(world.drain)
    remove(world, "run/4711")
    world.rmdir("run/checkpoint-1")
    run(world.drain)
    assert held(world) == []
    assert world.lower.visible() == world.application_view()


def test_other_names_are_not_guarded(world: World, run: Run) -> None:
    save(world, "run/final")
    run(world.drain)
    remove(world, "run/final")
    run(world.drain)
    assert held(world) == []
    assert world.lower.visible() == world.application_view()


def test_several_files_that_are_one_checkpoint(world: World, run: Run) -> None:
    for name in ("model_1.pt", "optimizer_1.pt"):
        world.store(f"run/{name}", SHARD, mtime_ns=next(_clock))
    run(world.drain)
    world.unlink("run/optimizer_1.pt")
    world.unlink("run/model_1.pt")
    world.store("run/model_2.pt", SHARD, mtime_ns=next(_clock))
    run(world.drain)
    assert held(world) == [b"run/*_1.pt"]
    assert told(world).files == 2
    world.store("run/optimizer_2.pt", SHARD, mtime_ns=next(_clock))
    run(world.drain)
    assert world.lower.visible() == world.application_view()


def test_saved_and_deleted_before_anything_was_committed(world: World, run: Run) -> None:
    """What lies between keeps the window from being left out; save and deletion would then be one
    commit group.
    """
    save(world, "run/checkpoint-1")
    world.store("run/a.log", b"checkpoint-1")
    world.store("run/b.log", b"checkpoint-1")
    remove(world, "run/checkpoint-1")
    world.mkdir("run/checkpoint-2")
    run(world.drain)
    assert whole(world.lower.visible(), "run/checkpoint-1")
    assert held(world) == [b"run/checkpoint-1"]
