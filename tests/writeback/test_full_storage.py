"""A backing directory that is full empties itself: removals pass what there is no room for."""

from __future__ import annotations

import errno
import os

import pytest

from acpfs.writeback.guard.guarded import SPACE_PATIENCE_S
from acpfs.writeback.order import order
from acpfs.writeback.order.want_of_room import WantOfRoom
from tests.writeback.conftest import Run
from tests.writeback.world import World

ROOM = 100
"""For so many bytes in all; removing gives room back."""


@pytest.fixture
def full(world: World, run: Run) -> World:
    for name in ("old-1", "old-2", "old-3", "shard"):
        world.store(name, b"x" * 25)
    world.store("latest", b"")
    run(world.drain)

    def no_room(label: str, _path: tuple[bytes, ...]) -> None:
        taken = sum(len(data) for data in world.lower.visible().values())
        if label == "write" and taken > ROOM - 25:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.lower.fault = no_room
    return world


@pytest.mark.clause("S209")
def test_it_empties_itself(full: World, run: Run) -> None:
    full.store("new", b"y" * 25)
    full.store("latest", b"new")
    full.unlink("old-1")
    full.unlink("old-2")
    run(full.drain)
    assert full.lower.visible() == full.application_view()


def test_not_before_it_has_been_full_for_a_while(full: World, run: Run) -> None:
    full.store("new", b"y" * 25)
    full.unlink("old-1")
    run(full.run_for, SPACE_PATIENCE_S * 0.9)
    assert b"old-1" in full.lower.visible()


def test_each_time_that_it_is_full_counts_anew(world: World) -> None:
    room = WantOfRoom(world.log)
    first = world.store("first", b"1")
    second = world.store("second", b"2")
    for op in (first, second):
        op.last_error = errno.ENOSPC
    room.failed(first, errno.ENOSPC, 0.0)
    assert not room.is_wanted_by(first, SPACE_PATIENCE_S - 1.0)
    assert room.is_wanted_by(first, SPACE_PATIENCE_S)
    world.log.remove(first)
    later = 1000.0
    room.failed(second, errno.ENOSPC, later)
    assert not room.is_wanted_by(second, later + SPACE_PATIENCE_S - 1.0)
    assert room.due(later) == later + SPACE_PATIENCE_S
    assert room.is_wanted_by(second, later + SPACE_PATIENCE_S)


def test_no_more_goes_than_is_needed(
    full: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "PASSING_OPS_MAX", 1)
    full.store("new", b"y" * 25)
    full.unlink("old-1")
    full.unlink("old-2")
    full.lower.visible_history.clear()
    run(full.drain)
    there = [
        sum(name.startswith(b"old") for name in seen)
        for seen in full.lower.visible_history
        if b"new" in seen
    ]
    assert (
        there[0] == 2
    )  # one had gone, and with its room the file was stored before the other one went


@pytest.mark.clause("S209")
def test_what_a_pointer_may_name_and_what_has_to_do_with_others_stays(
    full: World, run: Run
) -> None:
    full.store("new", b"y" * 25)
    full.unlink("latest")  # a pointer: what it names could go after it
    full.rename("old-1", "kept")
    full.unlink("kept")
    full.mkdir("d")
    full.rename("old-2", "d/moved")
    full.unlink("d/moved")
    full.store("old-3", b"z" * 30)
    full.unlink("old-3")
    run(full.run_for, 3 * SPACE_PATIENCE_S)
    assert {b"latest", b"old-1", b"old-2", b"shard"} <= set(full.lower.visible())


@pytest.mark.clause("S407")
@pytest.mark.parametrize("text", [b"old-1", b"1", b"/mnt/acp/old-1\n"])
def test_what_a_pointer_names_that_is_about_to_be_changed_stays(
    world: World, run: Run, text: bytes
) -> None:
    """Found by driving the order with all small histories: `latest` named what made room for its
    successor.
    """
    for name in ("old-1", "old-2", "old-3"):
        world.store(name, b"x" * 25)
    world.store("latest", text)
    run(world.drain)

    def no_room(label: str, _path: tuple[bytes, ...]) -> None:
        if label == "write" and b"old-3" in world.lower.visible():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.lower.fault = no_room
    world.store("new", b"y" * 25)
    world.store("latest", b"new")
    world.unlink("old-1")
    world.unlink("old-2")
    run(world.run_for, 3 * SPACE_PATIENCE_S)
    assert set(world.lower.visible()) == {b"old-1", b"old-3", b"latest"}
    world.unlink("old-3")
    run(world.drain)
    assert world.lower.visible() == world.application_view()
    named = [
        b"old-1" in seen for seen in world.lower.visible_history if seen.get(b"latest") == text
    ]
    assert all(named)


@pytest.mark.clause("S407")
@pytest.mark.parametrize("text", [b"old-10", b"/mnt/acp/old-10\n", b"old-1000"])
def test_a_name_whose_number_goes_on_is_another_one(world: World, run: Run, text: bytes) -> None:
    """A storage that was full stayed so: `latest` said step-100, and step-1 was removed."""
    for name in ("old-1", "old-3"):
        world.store(name, b"x" * 25)
    world.store("latest", text)
    run(world.drain)

    def no_room(label: str, _path: tuple[bytes, ...]) -> None:
        if label == "write" and b"old-3" in world.lower.visible():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.lower.fault = no_room
    world.store("new", b"y" * 25)
    world.store("latest", b"new")
    world.unlink("old-1")
    run(world.run_for, 3 * SPACE_PATIENCE_S)
    assert set(world.lower.visible()) == {b"old-3", b"latest"}


@pytest.mark.clause("S407")
def test_what_a_pointer_that_cannot_be_read_may_name_stays(world: World, run: Run) -> None:
    world.store("old", b"x" * 25)
    world.store("latest", b"")
    run(world.drain)

    def fault(label: str, path: tuple[bytes, ...]) -> None:
        if label == "open" and path == (b"latest",):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if label == "write" and b"old" in world.lower.visible():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world.lower.fault = fault
    world.store("new", b"y" * 25)
    world.store("latest", b"new")
    world.unlink("old")
    run(world.run_for, 3 * SPACE_PATIENCE_S)
    assert set(world.lower.visible()) == {b"old", b"latest"}
