"""A backing directory that is slow is waited for; one that hangs holds up nothing in a directory
that is known.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerEntry, LowerPath, LowerStat, lstat_each
from acpfs.filesystem import kept_listings
from acpfs.filesystem.kept_listings import KeptListings
from acpfs.filesystem.known_names import Directory
from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, is_idle, run, world
from tests.rig.runtime import REAL

SHORT: dict[str, Any] = {"patience_s": 0.05, "attr_timeout_s": 0.0, "backing_timeout_s": 15.0}
"""Knowledge is old at once, and who waits for what is not known gives up before the test does."""


@contextmanager
def hanging(w: World, *calls: str) -> Iterator[Callable[[], None]]:
    """These calls of the backing directory do not return; gives what lets them go on."""
    gate = threading.Event()
    calls = (*calls, "lstat_many") if "lstat" in calls else calls
    originals = {name: getattr(w.lower, name) for name in calls}

    def held_up(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            gate.wait(120)
            return original(*arguments)

        return call

    for name, original in originals.items():
        setattr(w.lower, name, held_up(original))
    try:
        yield gate.set
    finally:
        gate.set()
        for name, original in originals.items():
            setattr(w.lower, name, original)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - threads have no trio event to set
            await trio.sleep(0.005)


async def until_listed(w: World, directory: Ino) -> None:
    await until(lambda: w.inner.table[directory].dir.listed_at >= 0)


def save_dir(base: Path) -> None:
    (base / "backing/save").mkdir(parents=True)
    (base / "backing/save/step-1").mkdir()
    (base / "backing/save/shard").write_bytes(b"0123456789")


@pytest.mark.clause("S205")
def test_a_name_that_was_listed_and_never_looked_up_is_waited_for(tmp_path: Path) -> None:
    """To list a directory and then open what is there is how checkpoints are loaded."""
    save_dir(tmp_path)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"save"))).ino
        assert await w.names(directory) == [b"shard", b"step-1"]
        sizes: list[int] = []

        async def look() -> None:
            sizes.append((await w.do(w.fs.lookup(directory, b"shard"))).size)

        with hanging(w, "lstat") as go_on:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look)
                await trio.sleep(4 * SHORT["patience_s"])
                go_on()
        assert sizes == [10]

    run(tmp_path, scenario, **SHORT)


@pytest.mark.clause("S205")
def test_an_answer_that_comes_late_is_heard(tmp_path: Path) -> None:
    """Else what others do to a backing directory that always takes longer than patience lasts would
    never be seen.
    """
    save_dir(tmp_path)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"save"))).ino
        shard = await w.do(w.fs.lookup(directory, b"shard"))
        with pytest.raises(FileNotFoundError):
            await w.do(w.fs.lookup(directory, b"new"))
        (w.backing / "save/shard").write_bytes(b"longer than it was")
        (w.backing / "save/new").write_bytes(b"")
        with hanging(w, "lstat") as go_on:
            assert (await w.do(w.fs.getattr(shard.ino))).size == 10
            with pytest.raises(FileNotFoundError):
                await w.do(w.fs.lookup(directory, b"new"))
            go_on()
            await until(lambda: w.inner.table[shard.ino].size == len(b"longer than it was"))
            await until(lambda: bool(w.inner.table[directory].dir.children[b"new"].ino))

    run(tmp_path, scenario, **SHORT)


@pytest.mark.clause("S3", "S206")
def test_a_directory_in_which_names_were_made_is_known(tmp_path: Path) -> None:
    save_dir(tmp_path)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"save"))).ino
        await w.do(w.fs.mkdir(directory, b"step-2", 0o755, CALLER))
        await until_listed(w, directory)
        await until_listed(w, ROOT)
        with hanging(w, "lstat", "listdir"):
            step = await w.do(w.fs.mkdir(directory, b"step-3", 0o755, CALLER))
            ino = await w.write(b"shard", b"x", step.ino)
            await w.write(b"tmp", b"3", directory)
            await w.do(w.fs.rename(directory, b"tmp", directory, b"latest", 0))
            assert await w.names(directory) == [
                b"latest",
                b"shard",
                b"step-1",
                b"step-2",
                b"step-3",
            ]
            assert await w.names() == [b"save"]
            await w.write(b"top", b"y")
            assert await w.read(ino) == b"x"
        await w.drained()
        assert (w.backing / "save/step-3/shard").read_bytes() == b"x"

    run(tmp_path, scenario, **SHORT)


@pytest.mark.clause("S206")
def test_a_directory_is_known_to_the_next_worker_too(tmp_path: Path) -> None:
    save_dir(tmp_path)

    async def main() -> None:
        async with world(tmp_path, **SHORT) as w:
            directory = (await w.do(w.fs.lookup(ROOT, b"save"))).ino
            await w.write(b"latest", b"1", directory)
            await w.drained()
        async with world(tmp_path, **SHORT) as w:
            await until_listed(w, directory)
            with hanging(w, "lstat", "listdir"):
                await w.do(w.fs.mkdir(directory, b"step-2", 0o755, CALLER))
                assert await w.names(directory) == [b"latest", b"shard", b"step-1", b"step-2"]

    trio.run(main)


@pytest.mark.clause("S240")
@pytest.mark.parametrize("listed_by", ["a name that was made", "ls"])
def test_a_directory_is_known_to_a_worker_that_begins_while_the_backing_directory_hangs(
    tmp_path: Path, listed_by: str
) -> None:
    """What was there before, what was made since and is only on the backing directory, and what was
    removed since.
    """
    save_dir(tmp_path)
    (tmp_path / "backing/save/old").write_bytes(b"")
    words: dict[str, Any] = {**SHORT, "session": "s"}

    async def main() -> None:
        async with world(tmp_path, **words) as w:
            directory = (await w.do(w.fs.lookup(ROOT, b"save"))).ino
            if listed_by == "ls":
                await w.names(directory)
            await w.write(b"made", b"1", directory)
            await until_listed(w, directory)
            await w.do(w.fs.mkdir(directory, b"step-2", 0o755, CALLER))
            await w.do(w.fs.rename(directory, b"old", directory, b"renamed", 0))
            await w.do(w.fs.unlink(directory, b"shard"))
            await w.drained()
            made = (await w.do(w.fs.lookup(directory, b"made"))).ino
            with w.fs.lock:
                w.inner.contents.drop(w.inner.table[made])
                w.inner.lower_view.reap(w.inner.table[made])
            kept = await w.names(directory)
            await w.do(w.fs.opendir(directory))  # somebody stands in it
            space = w.inner.space.known
        hung = threading.Event()

        class Hung(BackingDirectory):
            """Answers nothing from the beginning."""

            def lstat(self, path: LowerPath) -> LowerStat:
                hung.wait(120)
                return super().lstat(path)

            def lstat_many(
                self, directory: LowerPath, names: Sequence[bytes]
            ) -> list[LowerStat | None]:
                return lstat_each(self.lstat, directory, names)

            def listdir(self, path: LowerPath) -> list[LowerEntry]:
                hung.wait(120)
                return super().listdir(path)

        try:
            async with world(tmp_path, make_lower=Hung, space=space, **words) as w:
                w.inner.table[directory].lookups += 1
                assert (
                    await w.names(directory) == kept == [b"made", b"renamed", b"step-1", b"step-2"]
                )
                for name in (b"step-3", b"shard", b"old"):
                    await w.do(w.fs.mkdir(directory, name, 0o755, CALLER))
                await w.write(b"new", b"x", (await w.do(w.fs.lookup(directory, b"step-3"))).ino)
                hung.set()
                await w.drained()
        finally:
            hung.set()
        assert sorted(os.listdir(tmp_path / "backing/save")) == [
            b.decode() for b in sorted([*kept, b"step-3", b"shard", b"old"])
        ]

    trio.run(main)


@pytest.mark.clause("S240")
def test_what_is_kept_of_listings_is_bounded(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state.db", REAL)
    kept = KeptListings(state)

    def listing(count: int, size: int) -> dict[bytes, LowerEntry]:
        return {
            name: LowerEntry(name, 1, 0)
            for name in (b"%0*d" % (size, number) for number in range(count))
        }

    def keep(directory: int, count: int, size: int) -> None:
        names = listing(count, size)
        kept.keep(Ino(directory), names, names.get)

    for number in range(1, 400):
        keep(number, 100, 200)
    keep(1000, 10_000, 20)
    keep(1001, 2_000, 200)
    for number in range(1000):
        kept.name(Ino(399), b"more-%d" % number, LowerEntry(b"", 1, 0))
    again = KeptListings(state)
    left = again.load()
    assert again._bytes == kept._bytes <= 2 << 20
    assert Ino(399) in left
    assert Ino(1) not in left
    assert not {Ino(1000), Ino(1001)} & left.keys()
    assert len(left[Ino(399)].read()) == 1100
    keep(399, 1, 3)
    assert list(KeptListings(state).load()[Ino(399)].read()) == [b"000"]
    kept.drop(Ino(399))
    assert Ino(399) not in KeptListings(state).load()
    assert state.rows("SELECT count(*) FROM listing_change WHERE parent = 399") == [(0,)]


@pytest.mark.clause("S240")
@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_of_listings_follows_each_change(tmp_path: Path, seed: int) -> None:
    """Names that come and go, listings that are made anew: after each, a next worker has exactly
    the names that there are.
    """
    state = StateDatabase(tmp_path / "state.db", REAL)
    rng = random.Random(seed)
    there = dict[bytes, LowerEntry]()
    kept = KeptListings(state)
    directory = Ino(7)
    kept.keep(directory, (), there.get)
    for step in range(400):
        name = b"%d" % rng.randrange(60)
        if rng.randrange(20) == 0:
            there = {
                b"%d" % n: LowerEntry(b"%d" % n, n - (1 << 63), 0o100000)
                for n in rng.sample(range(60), rng.randrange(60))
            }
            kept.keep(directory, there.keys(), there.get)
        elif rng.randrange(2):
            there[name] = LowerEntry(name, step, 0o040000)
            kept.name(directory, name, there[name])
        else:
            there.pop(name, None)
            kept.name(directory, name, None)
        again = KeptListings(state)
        assert again.load()[directory].read().keys() == there.keys()
        assert again._bytes == kept._bytes
        if (
            rng.randrange(4) == 0
        ):  # a next worker goes on, before it has taken apart what the last one left
            kept = again
    kept.drop(directory)
    assert KeptListings(state).load() == {}


@pytest.mark.clause("S240")
def test_a_listing_is_packed_and_taken_apart_only_where_it_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(name: str) -> None:
        real = getattr(kept_listings, name)

        def call(what: Any) -> Any:
            calls.append(name)
            return real(what)

        monkeypatch.setattr(kept_listings, name, call)

    counted("_pack")
    counted("_unpack")
    state = StateDatabase(tmp_path / "state.db", REAL)
    there = {b"%d" % n: LowerEntry(b"%d" % n, n, 0) for n in range(100)}
    kept = KeptListings(state)
    kept.keep(Ino(7), there.keys(), there.get)
    assert calls == ["_pack"]
    left = KeptListings(state).load()
    directory = Directory()
    directory.was_listed(left[Ino(7)])
    assert calls == ["_pack"]
    assert directory.knows(b"100")
    assert directory.listing.keys() == there.keys()
    assert directory.listing is directory.listing
    assert calls == ["_pack", "_unpack"]
    del there[b"7"]
    kept.keep(Ino(7), there.keys(), there.get)
    kept.keep(Ino(7), there.keys(), there.get)
    assert calls == ["_pack", "_unpack", "_unpack"]
    assert KeptListings(state).load()[Ino(7)].read().keys() == there.keys()


@pytest.mark.clause("S28", "S206")
def test_a_listing_that_nobody_asked_for_hides_nothing(tmp_path: Path) -> None:
    save_dir(tmp_path)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"save"))).ino
        await w.do(w.fs.mkdir(directory, b"step-2", 0o755, CALLER))
        await until_listed(w, directory)
        (w.backing / "save/new").write_bytes(b"by another")
        assert (await w.do(w.fs.lookup(directory, b"new"))).size == len(b"by another")
        assert b"new" in await w.names(directory)

    run(
        tmp_path, scenario, attr_timeout_s=3600.0, patience_s=15.0
    )  # an answer that is slow on a crowded machine is one


@pytest.mark.clause("S206")
def test_names_are_listed_without_their_attributes_when_those_do_not_come(tmp_path: Path) -> None:
    save_dir(tmp_path)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"save"))).ino
        assert await w.names(directory) == [b"shard", b"step-1"]
        with hanging(w, "lstat", "listdir"):
            handle = await w.do(w.fs.opendir(directory))
            entries = await w.do(w.fs.readdir(handle, 0, with_attributes=True))
            assert [(entry.name, entry.attributes) for entry in entries[2:]] == [
                (b"shard", None),
                (b"step-1", None),
            ]
            await w.do(w.fs.releasedir(handle))
        handle = await w.do(w.fs.opendir(directory))
        await until(
            lambda: b"shard" in w.inner.table[directory].dir.children
        )  # the answer that came late
        entries = await w.do(w.fs.readdir(handle, 0, with_attributes=True))
        assert [
            entry.attributes.size
            for entry in entries
            if entry.name == b"shard" and entry.attributes is not None
        ] == [10]

    run(tmp_path, scenario, **SHORT)


@pytest.mark.clause("S205")
def test_what_was_made_and_forgotten_since_is_not_lost_by_a_late_answer(tmp_path: Path) -> None:
    save_dir(tmp_path)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"save"))).ino
        await w.names(directory)
        with hanging(w, "lstat") as go_on:
            with pytest.raises(FileNotFoundError):
                await w.do(w.fs.lookup(directory, b"new"))  # by the listing; the question is out
            late = w.lower.lstat
            w.lower.lstat = type(w.lower).lstat.__get__(w.lower)  # type: ignore[method-assign]
            ino = await w.write(b"new", b"made since", directory)
            await w.drained()
            w.lower.lstat = late  # type: ignore[method-assign]
            os.unlink(w.backing / "save/new")  # what the late answer will say
            go_on()
            await until(lambda: is_idle(w.calls.requests))
            assert w.inner.table[directory].dir.children[b"new"].ino == ino

    run(tmp_path, scenario, **SHORT)


@pytest.mark.clause("S206")
def test_directories_that_cannot_be_listed_now_are_none_to_wait_for(tmp_path: Path) -> None:
    """However many: a call that is refused is told at once, in the middle of the next one."""
    for number in range(2000):
        (tmp_path / f"backing/{number}").mkdir(parents=True)

    async def scenario(w: World) -> None:
        for number in range(2000):
            ino = (await w.do(w.fs.lookup(ROOT, b"%d" % number))).ino
            w.inner.table[ino].dir.listed_at = -1.0
        w.calls.requests.close()
        with w.fs.lock:
            w.inner.lower_view.ahead._wanted = {
                node.ino: None for node in w.inner.table if node.is_dir and node.ino != ROOT
            }
            w.inner.lower_view.ahead._begin()
            assert not w.inner.lower_view.ahead._wanted

    run(tmp_path, scenario)


@pytest.mark.clause("S206")
def test_a_transport_that_needs_attributes_waits_for_them(tmp_path: Path) -> None:
    save_dir(tmp_path)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"save"))).ino
        await w.names(directory)
        handle = await w.do(w.fs.opendir(directory))
        found: list[bytes] = []

        async def read() -> None:
            entries = await w.do(w.fs.readdir(handle, 0, with_attributes=True, without_fails=True))
            found.extend(entry.name for entry in entries if entry.attributes is not None)

        with hanging(w, "lstat") as go_on:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.sleep(4 * SHORT["patience_s"])
                go_on()
        assert found == [b"shard", b"step-1"]

    run(tmp_path, scenario, **SHORT)


@pytest.mark.clause("S500")
def test_an_open_directory_that_others_removed_is_listed_without_names(tmp_path: Path) -> None:
    """One transport cannot tell a name without attributes: such an entry was the end of the
    worker.
    """
    save_dir(tmp_path)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"save"))).ino
        await w.names(directory)
        handle = await w.do(w.fs.opendir(directory))
        shutil.rmtree(w.backing / "save")
        with pytest.raises(FileNotFoundError):
            await w.do(w.fs.lookup(ROOT, b"save"))
        for whole in (True, False):
            entries = await w.do(w.fs.readdir(handle, 0, with_attributes=True, without_fails=whole))
            assert [entry.name for entry in entries if entry.next_offset > 2] == []

    run(tmp_path, scenario, **SHORT)
