"""The guard, and another node that writes into a checkpoint that is deleted here and made again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.writeback.conftest import Run
from tests.writeback.test_guard import FILES, SHARD, guarded_world, kept, remove, save
from tests.writeback.world import World

THEIRS = "run/checkpoint-1/rank-7.pt"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return guarded_world(tmp_path)


def write_as_others(world: World, path: str) -> None:
    """Another node makes a file, or replaces one."""
    fd = world.lower.create_staging("theirs")
    world.lower.write(fd, memoryview(b"theirs"), 0)
    world.lower.close(fd)
    world.lower.rename(world.lower.staging_path("theirs"), tuple(path.encode().split(b"/")))


def fail_once_after(world: World, label: str) -> None:
    """The worker is killed when such a call was made in the middle of the move."""
    state = {"armed": False}

    def fault(called: str, path: tuple[bytes, ...]) -> None:
        if state["armed"]:
            raise OSError(errno.EIO, "killed")
        if called == label and any(b"checkpoint-1" in name for name in path[-1:]):
            state["armed"] = True

    world.lower.fault = fault
    restart = world.restart

    def heal() -> None:
        world.lower.fault = lambda _label, _path: None
        restart()

    world.restart = heal  # type: ignore[method-assign]


@pytest.mark.clause("S144")
@pytest.mark.parametrize("how", ["mkdir", "rename"])
@pytest.mark.parametrize("broken_off", ["", "rename", "fsync directory"])
def test_what_another_node_has_written_into_the_old_one_is_in_the_new_one(
    world: World, run: Run, how: str, broken_off: str
) -> None:
    """Found by reading: rank 0 deletes a checkpoint and makes it again, another rank writes its
    part before that is persisted.
    """
    save(world, "run/checkpoint-1")
    world.mkdir("run/checkpoint-1/sub")
    world.store("run/checkpoint-1/sub/old", SHARD)
    run(world.drain)
    world.unlink("run/checkpoint-1/sub/old")
    world.rmdir("run/checkpoint-1/sub")
    remove(world, "run/checkpoint-1")
    run(world.drain)
    write_as_others(world, f"run/checkpoint-1/{FILES[0]}")
    write_as_others(world, "run/checkpoint-1/sub/new")
    if broken_off:
        fail_once_after(world, broken_off)
    if how == "mkdir":
        world.mkdir("run/checkpoint-1", 0o750)
    else:
        world.mkdir("run/tmp", 0o750)
        world.rename("run/tmp", "run/checkpoint-1")
    if broken_off:
        run(world.run_for, 0.001)
        world.restart()
    run(world.drain)
    assert {
        path: data for path, data in world.lower.visible().items() if b"checkpoint-1/" in path
    } == {
        b"run/checkpoint-1/": b"",
        b"run/checkpoint-1/%s" % FILES[0].encode(): b"theirs",
        b"run/checkpoint-1/sub/": b"",
        b"run/checkpoint-1/sub/new": b"theirs",
    }
    assert world.lower.inode("run/checkpoint-1").mode & 0o777 == 0o750
    aside = {path.split("/", 1)[1] for path in kept(world) if not path.endswith("/")}
    assert aside == {*FILES[1:], "sub/old"}


@pytest.fixture
def written_by_others(world: World, run: Run) -> World:
    """A checkpoint that was deleted, and is held; another node has written its part of the new one
    already.
    """
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    write_as_others(world, THEIRS)
    return world


@pytest.mark.clause("S144")
def test_nothing_that_comes_at_this_very_moment_is_replaced(
    written_by_others: World, run: Run
) -> None:
    lower = written_by_others.lower

    def fault(label: str, path: tuple[bytes, ...]) -> None:
        if label == "link" and path[-1] == b"rank-7.pt" and b"run/checkpoint-1/" in lower.visible():
            write_as_others(written_by_others, THEIRS)
            lower.inode(THEIRS).content[:] = b"newer"

    lower.fault = fault
    save(written_by_others, "run/checkpoint-1")
    run(written_by_others.drain)
    assert lower.visible()[THEIRS.encode()] == b"newer"


@pytest.mark.clause("S144")
def test_cut_off_between_link_and_unlink_it_is_there_once(
    written_by_others: World, run: Run
) -> None:
    cut_off: list[tuple[bytes, ...]] = []

    def fault(label: str, path: tuple[bytes, ...]) -> None:
        if label == "unlink" and path[-1] == b"rank-7.pt" and not cut_off:
            cut_off.append(path)
            raise OSError(errno.EIO, "cut off")

    written_by_others.lower.fault = fault
    save(written_by_others, "run/checkpoint-1")
    run(written_by_others.drain)
    assert cut_off
    assert written_by_others.lower.visible()[THEIRS.encode()] == b"theirs"
    assert not [path for path in kept(written_by_others) if path.endswith("rank-7.pt")]


@pytest.mark.clause("S144")
@pytest.mark.parametrize("refused", [errno.EPERM, errno.EOPNOTSUPP])
def test_where_it_may_not_be_linked_it_is_renamed(
    written_by_others: World, run: Run, refused: int
) -> None:
    """Linux lets a user link only what is his (`fs.protected_hardlinks`)."""

    def fault(label: str, path: tuple[bytes, ...]) -> None:
        if label == "link" and path[-1] == b"rank-7.pt":
            raise OSError(refused, "no link")

    written_by_others.lower.fault = fault
    save(written_by_others, "run/checkpoint-1")
    run(written_by_others.drain)
    assert written_by_others.lower.visible()[THEIRS.encode()] == b"theirs"
    assert written_by_others.engine.statistics().parked == ()


@pytest.mark.clause("S144")
def test_a_directory_whose_name_is_taken_stays_aside(world: World, run: Run) -> None:
    """Also an empty one: it is another node's, and may have been made a moment ago."""
    save(world, "run/checkpoint-1")
    run(world.drain)
    remove(world, "run/checkpoint-1")
    run(world.drain)
    world.lower.mkdir((b"run", b"checkpoint-1", b"rank-7"))
    write_as_others(world, "run/checkpoint-1/rank-7/old")

    def fault(label: str, path: tuple[bytes, ...]) -> None:
        if (
            label == "lstat"
            and path == (b"run", b"checkpoint-1", b"rank-7")
            and b"run/checkpoint-1/" in world.lower.visible()
        ):
            world.lower.fault = lambda _label, _path: None
            world.lower.mkdir(path)

    world.lower.fault = fault
    save(world, "run/checkpoint-1")
    run(world.drain)
    assert b"run/checkpoint-1/rank-7/" in world.lower.visible()
    assert b"run/checkpoint-1/rank-7/old" not in world.lower.visible()
    assert any(path.endswith("rank-7/old") for path in kept(world))
