"""Link counts come from the two trees, never from a stat alone; and what has no name and is not
open leaves RAM.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath, LowerStat, lstat_each
from acpfs.runtime.given import Runtime
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world

NAMES = tuple(b"n%d" % number for number in range(6))
STEPS = 120
ANSWER_S = 120.0


class SlowAnswer(BackingDirectory):
    """One answer about a name can be kept back: it tells what was true when it was asked."""

    def __init__(self, path: Path, node_id: str, runtime: Runtime) -> None:
        super().__init__(path, node_id, runtime)
        self._slow: LowerPath | None = None
        self.asked = threading.Event()
        self.answered = threading.Event()

    def keep_back(self, name: bytes) -> None:
        """The next answer about a name of the top comes when `answered` is set."""
        self._slow = (name,)
        self.asked.clear()
        self.answered.clear()

    def lstat(self, path: LowerPath) -> LowerStat:
        st = super().lstat(path)
        if path == self._slow:
            self._slow = None
            self.asked.set()
            assert self.answered.wait(ANSWER_S)
        return st

    def lstat_many(self, directory: LowerPath, names: Sequence[bytes]) -> list[LowerStat | None]:
        return lstat_each(self.lstat, directory, names)


def slow(w: World) -> SlowAnswer:
    assert isinstance(w.lower, SlowAnswer)
    return w.lower


def check(w: World) -> None:
    """What must hold at any moment at which no call is under way."""
    with w.fs.lock:
        names = Counter(
            child.ino
            for node in w.inner.table
            if node.is_dir
            for child in node.dir.children.values()
            if child.ino
        )
        for node in w.inner.table:
            assert len(node.names) == names[node.ino]
            assert node.names or node.handles or node.ino == ROOT or node.body.is_only_backing, node
            assert node.is_dir or node.shown_links >= len(node.names), node


@contextlib.contextmanager
def overtaken_answer(
    w: World, nursery: trio.Nursery, ino: Ino, *, by_name: bool = False
) -> Iterator[None]:
    """While the body runs, a question for a file's attributes is under way that was answered
    before.
    """
    slow(w).keep_back(b"f")
    nursery.start_soon(w.do, w.fs.lookup(ROOT, b"f") if by_name else w.fs.getattr(ino))
    try:
        yield
    finally:
        slow(w).answered.set()


async def rewrite(w: World, ino: Ino, data: bytes) -> None:
    """Without a look at the name."""
    opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER))
    await w.do(w.fs.write(opened.handle, 0, data))
    await w.close(opened)


async def asked(w: World) -> None:
    assert await trio.to_thread.run_sync(slow(w).asked.wait, ANSWER_S)


@pytest.mark.clause("S191", "S36")
@pytest.mark.parametrize(
    "removes", [True, False], ids=["a name was removed meanwhile", "a link was made meanwhile"]
)
def test_an_answer_that_own_commits_have_overtaken_does_not_count(
    tmp_path: Path, removes: bool
) -> None:
    """Else a count that is too high keeps the bytes of a deleted file for ever, and one that is too
    low drops those of a living one.
    """

    async def main() -> None:
        async with world(
            tmp_path, hold=False, make_lower=SlowAnswer, attr_timeout_s=0, patience_s=ANSWER_S
        ) as w:
            ino = await w.write(b"f", b"bytes")
            if removes:
                await w.do(w.fs.link(ino, ROOT, b"g"))
            await w.drained()
            async with trio.open_nursery() as nursery:
                with overtaken_answer(w, nursery, ino):
                    await asked(w)
                    if removes:
                        await w.do(w.fs.unlink(ROOT, b"g"))
                    else:
                        await w.do(w.fs.link(ino, ROOT, b"g"))
                    await w.drained()
            node = w.inner.table[ino]
            assert node.shown_links == len(node.names) == (1 if removes else 2)
            await w.do(w.fs.unlink(ROOT, b"f"))
            check(w)

    trio.run(main)


@pytest.mark.clause("S191")
@pytest.mark.parametrize("by_name", [False, True])
def test_an_old_answer_does_not_bring_back_an_old_size(tmp_path: Path, by_name: bool) -> None:
    async def main() -> None:
        async with world(
            tmp_path, hold=False, make_lower=SlowAnswer, attr_timeout_s=0, patience_s=ANSWER_S
        ) as w:
            ino = await w.write(b"f", b"old")
            await w.drained()
            async with trio.open_nursery() as nursery:
                with overtaken_answer(w, nursery, ino, by_name=by_name):
                    await asked(w)
                    await rewrite(w, ino, b"new and longer")
                    await w.drained()
            with w.fs.lock:
                node = w.inner.table[ino]
                assert (node.ino, node.size) == (ino, len(b"new and longer"))
                assert not node.body.is_cold

    trio.run(main)


@pytest.mark.clause("S191")
def test_a_deleted_file_leaves_ram_where_a_name_was_never_seen(tmp_path: Path) -> None:
    """Its bytes cannot be reached through this node any more, whatever the backing directory
    counts.
    """

    async def main() -> None:
        async with world(tmp_path, hold=False, attr_timeout_s=0) as w:
            ino = await w.write(b"f", b"bytes")
            await w.drained()
            os.link(w.backing / "f", w.backing / "unseen")
            assert (await w.do(w.fs.getattr(ino))).nlink == 2
            await w.write(b"f", b"newer")
            os.link(w.backing / "f", w.backing / "again")
            await w.do(w.fs.unlink(ROOT, b"f"))
            check(w)
            await w.drained()
            assert w.tier.statistics().files == 0

    trio.run(main)


@pytest.mark.clause("S191", "S36")
def test_link_counts_survive_the_end_of_the_daemon(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing/f").write_bytes(b"bytes")
    os.link(tmp_path / "backing/f", tmp_path / "backing/unseen")

    async def main() -> None:
        async with world(tmp_path) as w:
            found = await w.do(w.fs.lookup(ROOT, b"f"))
            await w.do(w.fs.link(found.ino, ROOT, b"g"))
        async with world(tmp_path) as w:
            assert (await w.do(w.fs.lookup(ROOT, b"g"))).nlink == 3
            check(w)

    trio.run(main)


class Uncounted(BackingDirectory):
    """Directories have one link, whatever is in them: as on btrfs."""

    def lstat(self, path: LowerPath) -> LowerStat:
        return uncounted(super().lstat(path))

    def lstat_many(self, directory: LowerPath, names: Sequence[bytes]) -> list[LowerStat | None]:
        found = super().lstat_many(directory, names)
        return [None if st is None else uncounted(st) for st in found]


def uncounted(st: LowerStat) -> LowerStat:
    return st._replace(nlink=1) if stat.S_ISDIR(st.mode) else st


async def rmdir_of(w: World, run: Ino) -> None:
    await w.do(w.fs.rmdir(run, b"old"))


async def move_of(w: World, run: Ino) -> None:
    await w.do(w.fs.rename(run, b"old", ROOT, b"elsewhere", 0))


async def replacement_of(w: World, run: Ino) -> None:
    await w.do(w.fs.mkdir(ROOT, b"new", 0o755, CALLER))
    await w.do(w.fs.rename(ROOT, b"new", run, b"old", 0))
    await w.do(w.fs.rmdir(run, b"old"))


@pytest.mark.clause("S410")
@pytest.mark.parametrize("loses", [rmdir_of, move_of, replacement_of])
@pytest.mark.parametrize(
    ("make_lower", "counts"), [(Uncounted, (1, 1, 1)), (BackingDirectory, (3, 2, 3))]
)
def test_a_directory_that_loses_its_last_subdirectory_goes_on(
    tmp_path: Path,
    loses: Callable[[World, Ino], Awaitable[None]],
    make_lower: type[BackingDirectory],
    counts: tuple[int, int, int],
) -> None:
    """Its link count is what the storage makes of it, and is shown as that."""
    (tmp_path / "backing/run/old").mkdir(parents=True)

    async def links(w: World, ino: Ino) -> int:
        return (await w.do(w.fs.getattr(ino))).nlink

    async def main() -> None:
        async with world(
            tmp_path, make_lower=make_lower, hold=False, keep_last_persisted=False
        ) as w:
            run = (await w.do(w.fs.lookup(ROOT, b"run"))).ino
            await w.do(w.fs.lookup(run, b"old"))
            before = await links(w, run)
            await loses(w, run)
            empty = await links(w, run)
            await w.write(b"f", b"bytes", parent=run)
            made = await w.do(w.fs.mkdir(run, b"d", 0o755, CALLER))
            assert made.nlink == min(2, before)
            assert (before, empty, await links(w, run)) == counts
            await w.drained()
            assert await links(w, run) == counts[-1]
            await w.do(w.fs.rmdir(run, b"d"))
            await w.do(w.fs.unlink(run, b"f"))
            await w.do(w.fs.rmdir(ROOT, b"run"))
            assert await links(w, run) == 0
            with pytest.raises(FileNotFoundError):
                await w.write(b"f", b"bytes", parent=run)
            await w.drained()
        assert not (tmp_path / "backing/run").exists()

    trio.run(main)


async def step(w: World, chooser: random.Random) -> None:
    """One call of a program; that it may fail belongs to it."""
    name, other = chooser.sample(NAMES, 2)
    what = chooser.choice(
        ("save", "save", "link", "link", "unlink", "unlink", "rename", "look", "list", "forget")
    )
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        if what == "save":
            await w.write(name, name * chooser.randrange(1, 50))
        elif what == "link":
            found = await w.do(w.fs.lookup(ROOT, name))
            await w.do(w.fs.link(found.ino, ROOT, other))
        elif what == "unlink":
            await w.do(w.fs.unlink(ROOT, name))
        elif what == "rename":
            await w.do(w.fs.rename(ROOT, name, ROOT, other, 0))
        elif what == "look":
            await w.do(w.fs.getattr((await w.do(w.fs.lookup(ROOT, name))).ino))
        elif what == "list":
            await w.names()
        else:
            w.fs.forget([(node.ino, node.lookups) for node in w.inner.table if node.is_file])


@pytest.mark.clause("S191", "S36")
@pytest.mark.parametrize("seed", range(4))
def test_counts_and_contents_while_links_come_and_go_and_are_drained(
    tmp_path: Path, seed: int
) -> None:
    async def main() -> None:
        async with world(tmp_path, hold=False, attr_timeout_s=0, keep_last_persisted=False) as w:
            chooser = random.Random(seed)
            for number in range(STEPS):
                await step(w, chooser)
                check(w)
                if number % 20 == 19:
                    await w.drained()
                    for entry in os.scandir(w.backing):
                        if entry.is_file():
                            found = await w.do(w.fs.lookup(ROOT, os.fsencode(entry.name)))
                            assert found.nlink == os.lstat(entry.path).st_nlink, (
                                number,
                                entry.name,
                            )
            for name in await w.names():
                await w.do(w.fs.unlink(ROOT, name))
            await w.drained()
            check(w)
            assert w.tier.statistics().files == 0

    trio.run(main)


@pytest.mark.clause("S36")
def test_a_directory_is_let_go_of_with_a_file_that_has_two_names_in_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            directory = (await w.do(w.fs.mkdir(ROOT, b"d", 0o755, CALLER))).ino
            ino = await w.write(b"f", b"content", directory)
            await w.do(w.fs.link(ino, directory, b"g"))
            await w.drained()
            with w.fs.lock:
                w.inner.contents.drop(w.inner.table[ino])  # as where RAM is short
            w.fs.forget([(directory, 9), (ino, 9)])
            assert not {ino, directory} & {node.ino for node in w.inner.table}
            assert (w.backing / "d/g").read_bytes() == b"content"

    trio.run(main)
