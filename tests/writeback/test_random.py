"""Random histories: what becomes visible is always a state that the application had, whatever fails
and wherever the worker dies.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio
import xxhash
from trio.testing import MockClock

from acpfs.backing.calls import CallPools
from tests.rig.runtime import REAL
from tests.writeback.memory_lower import MemoryLower, error
from tests.writeback.world import World

TRANSIENT = (errno.EIO, errno.ENOSPC, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES)
CHANGING = frozenset(
    {
        "mkdir",
        "rmdir",
        "unlink",
        "rename",
        "exchange",
        "link",
        "symlink",
        "apply",
        "create_staging",
        "write",
        "sync",
        "sync_directory",
    }
)


class KilledError(BaseException):
    """kill -9 of the worker, as the code under it sees it."""


class Mortal:
    """A backing directory that outlives the worker: the N-th changing call from now kills it,
    before or after the call takes effect.
    """

    def __init__(self, lower: MemoryLower) -> None:
        self.lower = lower
        self.on_death: Callable[[], None] = lambda: None
        self._calls_left = -1
        self._is_dead = False
        self.after = False

    @property
    def calls_left(self) -> int:
        return self._calls_left

    @calls_left.setter
    def calls_left(self, calls: int) -> None:
        """For the next life."""
        self._calls_left = calls
        self._is_dead = False

    def _die(self) -> NoReturn:
        self._is_dead = True
        self.on_death()
        raise KilledError

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.lower, name)
        if name not in CHANGING:
            return attribute

        def call(*arguments: Any) -> Any:
            if self._is_dead:
                raise KilledError  # a dead process calls nothing, however it is unwound here
            self._calls_left -= 1
            if self._calls_left == 0 and not self.after:
                self._die()
            result = attribute(*arguments)
            if self._calls_left == 0:
                self._die()
            return result

        return call


class Application:
    """Does something that its own history allows."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self._number = 0

    def _directories(self) -> list[str]:
        return [path for path in self.world.inos if path not in self.world.contents]

    def _files(self) -> list[str]:
        return list(self.world.contents)

    def _new_path(self) -> str:
        self._number += 1
        directory = self.rng.choice(self._directories())
        return f"{directory}/{self._number}" if directory else str(self._number)

    def _empty(self, path: str) -> bool:
        return not any(other.startswith(path + "/") for other in self.world.inos)

    def act(self) -> None:
        """One random operation, or none where the chosen one is not possible."""
        self._number += 1
        kinds = (
            "store",
            "store",
            "rewrite",
            "mkdir",
            "unlink",
            "rmdir",
            "rename",
            "replace",
            "move",
            "exchange",
            "symlink",
            "chmod",
        )
        kind = self.rng.choice(kinds)
        if (
            kind in ("rewrite", "unlink", "rename", "replace", "exchange", "chmod")
            and len(self.world.contents) < 2
        ):
            kind = "store"
        getattr(self, kind)()

    def store(self) -> None:
        path = self._new_path()
        if self.rng.random() < 0.2:
            path = (path.rpartition("/")[0] + "/latest").lstrip("/")
        if path not in self.world.inos:
            self.world.store(path, self._data())

    def _data(self) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 1, 100, 70_000)))

    def mkdir(self) -> None:
        self.world.mkdir(self._new_path())

    def unlink(self) -> None:
        self.world.unlink(self.rng.choice(self._files()))

    def symlink(self) -> None:
        self.world.symlink(b"to%d" % self._number, self._new_path())

    def chmod(self) -> None:
        self.world.setattr(
            self.rng.choice(self._files()), permissions=self.rng.choice((0o600, 0o640))
        )

    def rename(self) -> None:
        self.world.rename(self.rng.choice(self._files()), self._new_path())

    def replace(self) -> None:
        self.world.rename(*self.rng.sample(self._files(), 2))

    def exchange(self) -> None:
        self.world.exchange(*self.rng.sample(self._files(), 2))

    def move(self) -> None:
        directories = [path for path in self._directories() if path]
        target = self._new_path()
        if directories:
            source = self.rng.choice(directories)
            if not target.startswith(source + "/"):
                self.world.rename(source, target)

    def rewrite(self) -> None:
        path = self.rng.choice(self._files())
        if path not in self.world.symlinks:
            self.world.store(path, self._data())

    def rmdir(self) -> None:
        empty = [path for path in self._directories() if path and self._empty(path)]
        if empty:
            self.world.rmdir(self.rng.choice(empty))


def assert_prefixes(world: World, visible_history: list[dict[bytes, bytes]]) -> None:
    at = 0
    for number, state in enumerate(visible_history):
        while at < len(world.seen) and world.seen[at] != state:
            at += 1
        assert at < len(world.seen), f"visible state {number} was never the application's"


def assert_arrived(world: World, lower: MemoryLower) -> None:
    assert lower.visible() == world.application_view()
    assert not lower.list_staging()
    assert not world.tier.ids()
    assert len(world.tree._nodes) == len(world.inos) - 1
    recorded = {path: digest for path, digest, _size in world.manifest.rows()}
    files = {
        path.encode(): data for path, data in world.contents.items() if path not in world.symlinks
    }
    assert recorded == {path: xxhash.xxh3_128_hexdigest(data) for path, data in files.items()}
    assert world.manifest.entries == len(files)


def live_until_killed(world: World, rng: random.Random) -> bool:
    try:
        trio.run(
            world.run_for, rng.choice((0.001, 0.3, 5.0)), clock=MockClock(autojump_threshold=0)
        )
    except BaseException as error:  # a group of a group, by the depth of nurseries
        if "KilledError" not in repr(error):
            raise
        return False
    return True


def live_and_die(
    application: Application, mortal: Mortal, lower: MemoryLower, *, rounds: int, calls_max: int
) -> None:
    """Some calls, then a death at any call of the drain, or none; and again."""
    world = application.world
    rng = application.rng
    for _round in range(rounds):
        for _ in range(rng.randrange(1, calls_max)):
            application.act()
        mortal.calls_left = rng.randrange(1, 60)
        mortal.after = rng.random() < 0.5
        if not live_until_killed(world, rng) or rng.random() < 0.3:
            lower.descriptors.clear()
            world.restart()
    mortal.calls_left = -1


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 60))]
)
def test_killed_at_any_call(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lower = MemoryLower()
    mortal = Mortal(lower)
    world = World(tmp_path, mortal)
    live_and_die(Application(world, rng), mortal, lower, rounds=12, calls_max=25)
    world.restart()
    trio.run(world.drain, clock=MockClock(autojump_threshold=0))
    assert_prefixes(world, lower.visible_history)
    assert_arrived(world, lower)


def faults(rng: random.Random, rate: float, slow_s: float) -> Iterator[Any]:
    lock = threading.Lock()
    never = threading.Event()

    def fault(label: str, _path: tuple[bytes, ...]) -> None:
        with lock:
            fails = rng.random() < rate
            delay_s = rng.random() * slow_s
            number = rng.choice(TRANSIENT)
        if delay_s:
            never.wait(delay_s)  # the backing directory is slow
        if fails and label not in ("lstat", "readlink"):
            raise error(number)

    yield fault


@pytest.mark.parametrize("seed", range(12))
def test_failures_everywhere_on_virtual_time(tmp_path: Path, seed: int) -> None:
    rng = random.Random(1000 + seed)
    lower = MemoryLower()
    (lower.fault,) = faults(rng, 0.1, 0.0)
    world = World(tmp_path, lower)
    application = Application(world, rng)
    for _ in range(150):
        application.act()
    for _ in range(50):  # chance parks an operation now and then
        trio.run(world.run_for, 500.0, clock=MockClock(autojump_threshold=0))
        world.engine.retry()
        if not len(world.log):
            break
    lower.fault = lambda _label, _path: None
    trio.run(world.drain, clock=MockClock(autojump_threshold=0))
    assert_arrived(world, lower)


@pytest.mark.parametrize("seed", range(6))
def test_threads_delays_and_failures(tmp_path: Path, seed: int) -> None:
    rng = random.Random(2000 + seed)
    lower = MemoryLower()
    (lower.fault,) = faults(random.Random(seed), 0.02, 0.002)
    calls = CallPools.make(REAL)
    world = World(tmp_path, lower, calls, retry_delay_min_s=0.001, retry_delay_max_s=0.01)
    application = Application(world, rng)
    parked: list[int] = []
    """With something parked, what has nothing to do with it goes on: then order is not promised."""

    async def live() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            for _ in range(150):
                application.act()
                if rng.random() < 0.2:
                    await trio.sleep(rng.random() * 0.01)
            with trio.fail_after(60):
                while not world.engine.drained():
                    if world.engine.statistics().parked:
                        parked.append(world.engine.retry())
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    trio.run(live)
    calls.close()
    lower.fault = lambda _label, _path: (
        None
    )  # what follows looks, and is no part of the test's storage
    if not parked:
        assert_prefixes(world, lower.visible_history)
    assert_arrived(world, lower)
