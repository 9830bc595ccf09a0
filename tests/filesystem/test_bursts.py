"""Who looks at many names of one directory, one after the other, has many of them asked about at
once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from acpfs.backing.lower import LowerPath
from acpfs.filesystem import bursts
from acpfs.filesystem.bursts import AHEAD_MAX
from acpfs.filesystem.recognition import Seen
from acpfs.types import ROOT
from tests.filesystem.world import World, run, violations

clause = pytest.mark.clause
FILES = 500
KEEPS_S = 86_400.0
"""Nothing is too old, but by `time_is_up`."""


@pytest.fixture(autouse=True)
def _no_call_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many names a call asks about goes by how long the one before took, which is for the
    machine to say.
    """
    monkeypatch.setattr(bursts, "AHEAD_S", 3600.0)


def names(count: int) -> list[bytes]:
    return [b"f%d" % number for number in range(count)]


def time_is_up(w: World) -> None:
    """What is known is older than `attr_timeout_s` allows."""
    with w.fs.lock:
        for name in w.inner.table[ROOT].dir.children.values():
            name.checked_at -= 2 * KEEPS_S
        for node in w.inner.table:
            node.checked_at -= 2 * KEEPS_S


async def made(w: World, count: int) -> None:
    for name in names(count):
        await w.write(name, b"x")
    await w.drained()
    time_is_up(w)


def questions(w: World) -> int:
    """Calls that were handed to another thread for requests."""
    return sum(w.calls.requests.statistics().calls.values())


ORDERS: list[Callable[[list[bytes]], list[bytes]]] = [list, sorted]


@clause("S260")
@pytest.mark.parametrize("order", ORDERS, ids=["as made", "by name"])
@pytest.mark.parametrize("count", [FILES, 4 * FILES])
def test_files_that_are_looked_at_in_turn_are_asked_about_together(
    tmp_path: Path, order: Callable[[list[bytes]], list[bytes]], count: int
) -> None:
    async def scenario(w: World) -> None:
        await made(w, count)
        before = questions(w)
        for name in order(names(count)):
            await w.do(w.fs.lookup(ROOT, name))
        assert questions(w) - before <= 50 + 4 * count / AHEAD_MAX

    run(tmp_path, scenario, attr_timeout_s=KEEPS_S)


@clause("S260")
@pytest.mark.parametrize("count", [FILES, 4 * FILES])
def test_removals_ask_no_more_for_each_file_where_there_are_more(
    tmp_path: Path, count: int
) -> None:
    async def scenario(w: World) -> None:
        await made(w, count)
        w.engine.hold(paused=True)
        before = questions(w)
        rows = w.state.changes
        for name in names(count):
            await w.do(w.fs.lookup(ROOT, name))
            await w.do(w.fs.unlink(ROOT, name))
        assert questions(w) - before <= 50 + 4 * count / AHEAD_MAX
        assert (w.state.changes - rows) / count < 8
        w.engine.hold(paused=False)
        await w.drained()
        assert w.state.changes - rows < 20 * count
        assert not await w.names()
        assert not violations(w)

    run(tmp_path, scenario, attr_timeout_s=KEEPS_S)


@clause("S260")
def test_who_goes_by_no_order_is_asked_for_no_more_than_that(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await made(w, FILES)
        before = w.lower.calls()["lstat"]
        wanted = random.Random(1).sample(names(FILES), FILES // 2)
        for name in wanted:
            await w.do(w.fs.lookup(ROOT, name))
        assert w.lower.calls()["lstat"] - before <= 2 * len(wanted)

    run(tmp_path, scenario, attr_timeout_s=KEEPS_S)


@clause("S28", "S260")
def test_what_others_did_to_the_next_files_is_seen(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await made(w, FILES)
        for number in range(100, FILES, 100):
            (w.backing / f"f{number}").unlink()
            (w.backing / f"f{number + 1}").write_bytes(b"of somebody else")
        for number, name in enumerate(names(FILES)):
            if number >= 100 and number % 100 == 0:
                with pytest.raises(FileNotFoundError):
                    await w.do(w.fs.lookup(ROOT, name))
            else:
                size = (await w.do(w.fs.lookup(ROOT, name))).size
                assert size == (16 if number > 100 and number % 100 == 1 else 1), name
        assert not violations(w)

    run(tmp_path, scenario, attr_timeout_s=KEEPS_S)


@clause("S260")
def test_a_slow_backing_directory_is_asked_about_fewer_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bursts, "AHEAD_S", 0.0)

    async def scenario(w: World) -> None:
        await made(w, FILES)
        asked: list[int] = []
        look = w.inner.lower_view._recognition.look_at_all

        def counted(directory: LowerPath, names: Sequence[bytes]) -> list[Seen]:
            asked.append(len(names))
            return look(directory, names)

        monkeypatch.setattr(w.inner.lower_view._recognition, "look_at_all", counted)
        for name in names(FILES):
            await w.do(w.fs.lookup(ROOT, name))
        assert max(asked) <= bursts.AHEAD_MIN
        assert max(asked[3:]) <= 2

    run(tmp_path, scenario, attr_timeout_s=KEEPS_S)
