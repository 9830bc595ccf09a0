"""What waits in RAM has a checksum, and is not stored as something else."""

from __future__ import annotations

import os

import pytest
import trio
import xxhash

from acpfs.writeback.log.ops import Op, Version, VersionState
from acpfs.writeback.streams.checksums import SOON_S, WAIT_S, WaitingChecksums
from tests.writeback.conftest import Run
from tests.writeback.world import World

pytestmark = pytest.mark.clause("S197")

LARGE = os.urandom((5 << 20) + 17)


def version_of(op: Op) -> Version:
    assert op.version is not None
    return op.version


def overwrite(world: World, op: Op, at: int = 0) -> None:
    """A bit flips, or somebody writes into the RAM tier."""
    fd = world.tier.open(version_of(op).tier_id)
    old = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([old[0] ^ 4]), at)
    os.close(fd)


def wait(world: World, run: Run, seconds: float = 2 * WAIT_S) -> None:
    world.engine.hold(True)
    run(world.run_for, seconds)


def reloaded(world: World, op: Op) -> Op:
    world.restart()
    found = world.log.get(op.seq)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "data", [b"small", LARGE, bytes(3 << 20) + b"x"], ids=["small", "large", "sparse"]
)
def test_a_version_that_waits_gets_its_checksum_and_is_stored(
    world: World, run: Run, data: bytes
) -> None:
    op = world.store("f", data)
    wait(world, run, 0.8 * SOON_S)
    assert version_of(op).digest == ""
    wait(world, run)
    assert version_of(op).digest == xxhash.xxh3_128_hexdigest(data)
    assert version_of(reloaded(world, op)).digest == xxhash.xxh3_128_hexdigest(data)
    run(world.drain)
    assert world.lower.visible() == {b"f": data}


@pytest.mark.parametrize(("data", "at"), [(b"small", 0), (LARGE, 3 << 20)], ids=["small", "large"])
def test_bytes_that_changed_between_two_mounts_are_not_stored_until_somebody_says_so(
    world: World, run: Run, data: bytes, at: int
) -> None:
    op = world.store("f", data)
    world.store("g", b"other")
    wait(world, run)
    op = reloaded(world, op)
    overwrite(world, op, at)
    run(world.run_for, WAIT_S)
    assert op.parked
    assert world.lower.visible() == {b"g": b"other"}
    assert world.engine.retry() == 1
    run(world.drain)
    assert len(world.lower.visible()[b"f"]) == len(data)
    assert world.lower.visible()[b"f"] != data


def test_a_single_wrong_read_is_no_damage(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = world.store("f", b"bytes")
    wait(world, run)
    once = [1]
    copy_once = world.engine._streamer._copy_once

    def wrong_once(*arguments: object) -> str:
        digest = copy_once(*arguments)  # type: ignore[arg-type]
        return "0" * 32 if once and once.pop() else digest

    monkeypatch.setattr(world.engine._streamer, "_copy_once", wrong_once)
    assert version_of(op).digest
    world.engine.hold(False)
    run(world.drain)
    assert world.lower.visible() == {b"f": b"bytes"}
    assert not once


def test_a_file_that_is_open_may_still_change(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open = {True}
    monkeypatch.setattr(world.listener, "version_of_open_file", lambda _version: bool(is_open))
    op = world.store("f", b"bytes")
    wait(world, run)
    assert version_of(op).digest == ""
    is_open.clear()
    wait(world, run)
    assert version_of(op).digest == xxhash.xxh3_128_hexdigest(b"bytes")


@pytest.mark.clause("S236")
def test_a_checksum_is_there_after_a_second(world: World, run: Run) -> None:
    op = world.store("f", b"bytes")
    wait(world, run, 2 * SOON_S + 0.1)
    assert version_of(op).digest == xxhash.xxh3_128_hexdigest(b"bytes")


@pytest.mark.clause("S236")
def test_while_applications_want_the_processors_for_their_writing_it_waits_for_five(
    world: World, run: Run
) -> None:
    world.engine._checksums._give_way._running = lambda: 1000
    world.listener.writing = True
    op = world.store("f", b"bytes")
    wait(world, run, WAIT_S - SOON_S)
    assert version_of(op).digest == ""
    wait(world, run, 2 * WAIT_S)
    assert version_of(op).digest == xxhash.xxh3_128_hexdigest(b"bytes")


@pytest.mark.clause("S236")
def test_what_is_streamed_is_not_read_twice_in_its_first_seconds(world: World, run: Run) -> None:
    op = world.store("f", b"bytes")
    other = world.store("g", b"other")
    version_of(op).state = VersionState.STREAMING
    wait(world, run, WAIT_S - SOON_S)
    assert version_of(op).digest == ""
    assert version_of(other).digest != ""
    wait(world, run, 2 * WAIT_S)
    assert version_of(op).digest == xxhash.xxh3_128_hexdigest(b"bytes")


def test_what_has_no_bytes_wakes_nobody(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal of many files would wake a task for each."""
    for number in range(20):
        world.store(f"f{number}", b"x")
    run(world.drain)
    looks: list[float] = []
    note = WaitingChecksums._note

    def counted(self: WaitingChecksums, now: float) -> None:
        looks.append(now)
        note(self, now)

    monkeypatch.setattr(WaitingChecksums, "_note", counted)

    async def remove() -> None:
        for number in range(20):
            world.unlink(f"f{number}")
            await trio.sleep(0.1)
        await world.until(world.engine.drained)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            await remove()
            nursery.cancel_scope.cancel()

    run(main)
    assert len(looks) <= 2
    op = world.store("new", LARGE)
    wait(world, run)
    assert version_of(op).digest == xxhash.xxh3_128_hexdigest(LARGE)
