"""A half (its writer was lost) is not published by what is done to its names, and what it replaces
stays until it is.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from itertools import product
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.names import RENAME_EXCHANGE
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world

pytestmark = pytest.mark.clause("S182")
OLD = b"complete"
OLDER = b"another complete one"
HALF = b"h" * (65 << 10)
Act = Callable[[World], Awaitable[object]]


async def ino_of(w: World, name: bytes) -> Ino:
    return (await w.do(w.fs.lookup(ROOT, name))).ino


async def move(w: World, name: bytes, new: bytes, flags: int = 0) -> None:
    await w.do(w.fs.rename(ROOT, name, ROOT, new, flags))


async def link(w: World, name: bytes, new: bytes) -> None:
    await w.do(w.fs.link(await ino_of(w, name), ROOT, new))


async def rename(w: World) -> None:
    await move(w, b"half", b"new name")


async def replace(w: World) -> None:
    await move(w, b"half", b"old")


async def exchange(w: World) -> None:
    await move(w, b"half", b"old", RENAME_EXCHANGE)


async def exchange_the_other_way(w: World) -> None:
    await move(w, b"old", b"half", RENAME_EXCHANGE)


async def exchange_two_halves(w: World) -> None:
    await move(w, b"other half", b"half", RENAME_EXCHANGE)


async def replace_another_half(w: World) -> None:
    await replace(w)
    await move(w, b"other half", b"old")


async def give_another_name(w: World) -> None:
    await link(w, b"half", b"second")


async def give_another_name_that_replaces(w: World) -> None:
    await link(w, b"half", b"second")
    await move(w, b"second", b"old")


async def give_another_name_and_take_the_first(w: World) -> None:
    await link(w, b"half", b"second")
    await w.do(w.fs.unlink(ROOT, b"half"))


async def replace_and_remove(w: World) -> None:
    await replace(w)
    await w.do(w.fs.unlink(ROOT, b"old"))


async def replace_and_move_on(w: World) -> None:
    await replace(w)
    await move(w, b"old", b"elsewhere")


async def replace_and_be_replaced(w: World) -> None:
    await replace(w)
    await w.write(b"tmp", OLDER)
    await move(w, b"tmp", b"old")


async def replace_and_exchange(w: World) -> None:
    await replace(w)
    await w.write(b"tmp", OLDER)
    await move(w, b"tmp", b"old", RENAME_EXCHANGE)


async def replace_what_is_on_its_way(w: World) -> None:
    w.engine.hold(True)
    await w.write(b"old", OLDER)
    await replace(w)


async def remove(w: World) -> None:
    await w.do(w.fs.unlink(ROOT, b"half"))


async def make_room_and_write_anew(w: World) -> None:
    """What a job does that starts again: the names of halves must not hold up its own."""
    await move(w, b"half", b"half.bak")
    await w.write(b"half", OLDER)


ACTS: list[Act] = [
    rename,
    replace,
    exchange,
    exchange_the_other_way,
    exchange_two_halves,
    replace_another_half,
    give_another_name,
    give_another_name_that_replaces,
    give_another_name_and_take_the_first,
    replace_and_remove,
    replace_and_move_on,
    replace_and_be_replaced,
    replace_and_exchange,
    replace_what_is_on_its_way,
    remove,
    make_room_and_write_anew,
]
REPLACING = [
    replace_and_remove,
    replace_and_move_on,
    replace_and_be_replaced,
    replace_and_exchange,
    replace_what_is_on_its_way,
]
"""After these the complete file is replaced, or removed, by something that is no half."""


def below(w: World) -> dict[bytes, bytes]:
    return {os.fsencode(p.name): p.read_bytes() for p in w.backing.iterdir() if p.name != ".acpfs"}


async def above(w: World) -> dict[bytes, bytes]:
    return {name: await w.read(await ino_of(w, name)) for name in await w.names()}


async def lose_writers(w: World, *, rewritten: bool) -> None:
    for name in (b"old", b"half", b"other half") if rewritten else (b"old",):
        await w.write(name, OLD)
    await w.drained()
    for name in (b"half", b"other half"):
        if rewritten:
            opened = await w.do(w.fs.open(await ino_of(w, name), os.O_WRONLY | os.O_TRUNC, CALLER))
        else:
            opened, _attributes = await w.create(name)
        await w.do(w.fs.write(opened.handle, 0, HALF))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    ("end", "rewritten", "again"),
    [*product(("retry", "discard"), (False,), (False, True)), ("retry", True, False)],
)
def test_names_of_halves(
    tmp_path: Path, act: Act, end: str, *, rewritten: bool, again: bool
) -> None:
    """`again`: what was done to the names is found by another worker, before it is decided."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await lose_writers(w, rewritten=rewritten)
        async with world(tmp_path) as w:
            assert w.fs.statistics().interrupted_files == 2
            await act(w)
            if not again:
                await decide(w)
        if again:
            async with world(tmp_path) as w:
                await decide(w)

    async def decide(w: World) -> None:
        shown = await above(w)
        await w.drained()
        assert HALF not in below(w).values(), "published"
        assert OLD in below(w).values() or act in REPLACING
        with w.fs.lock:
            if end == "retry":
                w.inner.interrupted.store(b"")
            else:
                w.inner.interrupted.discard(b"")
        await w.drained()
        assert below(w) == await above(w)
        assert w.fs.statistics().interrupted_files == 0
        if end == "retry":
            assert below(w) == shown
        else:
            assert HALF not in below(w).values()
        for name in await above(w):
            assert (await w.do(w.fs.getattr(await ino_of(w, name)))).nlink == (
                w.backing / os.fsdecode(name)
            ).stat().st_nlink

    trio.run(main)


@pytest.mark.parametrize("act", [rename, replace, give_another_name])
def test_a_half_that_is_written_anew_is_published_under_the_name_that_it_has(
    tmp_path: Path, act: Act
) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            await lose_writers(w, rewritten=False)
        async with world(tmp_path, hold=False) as w:
            ino = await ino_of(w, b"half")
            await act(w)
            opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
            await w.do(w.fs.write(opened.handle, 0, OLDER))
            await w.close(opened)
            await w.drained()
            shown = await above(w)
            assert (
                list(shown.values()).count(OLDER) == 2
                if act is give_another_name
                else OLDER in shown.values()
            )
            del shown[b"other half"]
            assert below(w) == shown

    trio.run(main)


@pytest.mark.clause("S392")
@pytest.mark.parametrize("end", ["retry", "discard"])
@pytest.mark.parametrize("asked", [b"half", b"kept", b"kept/second"])
def test_a_half_is_found_by_each_of_its_names(tmp_path: Path, asked: bytes, end: str) -> None:
    """And by the directory that any of them lies in: what is said of one is said of the file."""

    async def main() -> None:
        async with world(tmp_path) as w:
            await lose_writers(w, rewritten=False)
        async with world(tmp_path) as w:
            kept = (await w.do(w.fs.mkdir(ROOT, b"kept", 0o755, CALLER))).ino
            half = await ino_of(w, b"half")
            await w.do(w.fs.link(half, kept, b"second"))
            with w.fs.lock:
                reports = w.inner.reports
                assert [node.ino for node in reports.interrupted(asked)] == [half]
                assert reports.interrupted(b"kept/sec") == reports.interrupted(b"other") == []
                if end == "retry":
                    assert w.inner.interrupted.store(asked) == 1
                else:
                    assert w.inner.interrupted.discard(asked) == (1, [])
            assert w.fs.statistics().interrupted_files == 1
            await w.drained()
            for name in ("half", "kept/second"):
                assert (w.backing / name).exists() is (end == "retry")

    trio.run(main)
