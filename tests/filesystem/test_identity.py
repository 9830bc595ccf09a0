"""Which file an entry of the backing directory is: never that of a file which had its inode number
before it.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath, LowerStat, lstat_each
from acpfs.filesystem.names import RENAME_EXCHANGE
from acpfs.types import ROOT
from tests.filesystem.held_call import HeldCall
from tests.filesystem.reused_numbers import ReusedNumbers
from tests.filesystem.world import CALLER, World, world

NAMES = ("a", "b", "c", "d")
STEPS = 150


async def rewritten(w: World, name: str, data: bytes) -> None:
    """A program saves over a file that exists."""
    found = await w.do(w.fs.lookup(ROOT, name.encode()))
    opened = await w.do(w.fs.open(found.ino, os.O_WRONLY | os.O_TRUNC, CALLER))
    await w.do(w.fs.write(opened.handle, 0, data))
    await w.close(opened)
    w.fs.forget([(found.ino, 1)])
    await w.drained()


def contents(backing: Path) -> dict[str, bytes]:
    return {
        entry.name: Path(entry.path).read_bytes()
        for entry in os.scandir(backing)
        if entry.is_file()
    }


def numbers_of(w: World) -> ReusedNumbers:
    assert isinstance(w.lower, ReusedNumbers)
    return w.lower


@pytest.mark.clause("S190")
def test_a_file_that_got_the_inode_number_of_another_is_another(tmp_path: Path) -> None:
    """Another node rewrites F, then makes G, which gets the number of the old F.

    Who rewrites G here must not rewrite F.
    """

    async def main() -> None:
        async with world(tmp_path, hold=False, make_lower=ReusedNumbers, attr_timeout_s=0) as w:
            (w.backing / "F").write_bytes(b"F version 1")
            await w.do(w.fs.lookup(ROOT, b"F"))
            number = numbers_of(w).number("F")
            (w.backing / "new").write_bytes(b"F version 2: precious")
            os.rename(w.backing / "new", w.backing / "F")
            (w.backing / "G").write_bytes(b"G version 1")
            numbers_of(w).show("G", number)
            await rewritten(w, "G", b"G version 2")
            assert contents(w.backing) == {"F": b"F version 2: precious", "G": b"G version 2"}
            found = await w.do(w.fs.lookup(ROOT, b"F"))
            assert await w.read(found.ino) == b"F version 2: precious"

    trio.run(main)


@pytest.mark.clause("S190")
def test_hard_links_that_got_the_inode_number_of_another_are_another_file(tmp_path: Path) -> None:
    """That they have several names makes them no names of the file that had their number before."""

    async def main() -> None:
        async with world(tmp_path, hold=False, make_lower=ReusedNumbers, attr_timeout_s=0) as w:
            (w.backing / "F").write_bytes(b"F version 1")
            former = await w.do(w.fs.lookup(ROOT, b"F"))
            number = numbers_of(w).number("F")
            (w.backing / "new").write_bytes(b"F version 2: precious")
            os.rename(w.backing / "new", w.backing / "F")
            (w.backing / "G").write_bytes(b"G version 1")
            os.link(w.backing / "G", w.backing / "H")
            numbers_of(w).show("G", number)
            assert (await w.do(w.fs.lookup(ROOT, b"G"))).ino != former.ino
            await rewritten(w, "G", b"G version 2")
            assert contents(w.backing) == {
                "F": b"F version 2: precious",
                "G": b"G version 2",
                "H": b"G version 1",
            }

    trio.run(main)


@pytest.mark.clause("S190")
def test_a_directory_that_got_the_inode_number_of_another_is_another(tmp_path: Path) -> None:
    """What is saved in it must not go to where the other was."""

    async def main() -> None:
        async with world(tmp_path, hold=False, make_lower=ReusedNumbers, attr_timeout_s=0) as w:
            (w.backing / "old").mkdir()
            await w.do(w.fs.lookup(ROOT, b"old"))
            number = numbers_of(w).number("old")
            os.rmdir(w.backing / "old")
            (w.backing / "new").mkdir()
            numbers_of(w).show("new", number)
            directory = await w.do(w.fs.lookup(ROOT, b"new"))
            await w.write(b"shard", b"bytes", directory.ino)
            await w.drained()
            assert (w.backing / "new/shard").read_bytes() == b"bytes"
            assert not (w.backing / "old").exists()

    trio.run(main)


@pytest.mark.clause("S190", "S36")
def test_hard_links_on_the_backing_directory_are_one_file(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, hold=False, make_lower=ReusedNumbers, attr_timeout_s=0) as w:
            (w.backing / "a").write_bytes(b"one")
            os.link(w.backing / "a", w.backing / "b")
            first = await w.do(w.fs.lookup(ROOT, b"a"))
            second = await w.do(w.fs.lookup(ROOT, b"b"))
            assert first.ino == second.ino
            assert second.nlink == 2
            await rewritten(w, "b", b"two")
            assert contents(w.backing) == {"a": b"two", "b": b"two"}
            assert (w.backing / "a").stat().st_ino == (w.backing / "b").stat().st_ino

    trio.run(main)


class ChangedAfterLook(BackingDirectory):
    """A file changes right after each of some looks at a name of the top: its ctime is another."""

    changes = 0
    """That are left."""

    def lstat(self, path: LowerPath) -> LowerStat:
        st = super().lstat(path)
        self._change(path)
        return st

    def lstat_many(self, directory: LowerPath, names: Sequence[bytes]) -> list[LowerStat | None]:
        found = lstat_each(super().lstat, directory, names[:1])
        if names[:1] == [b"a"]:
            self._change((b"a",))
        return found + super().lstat_many(directory, names[1:])

    def _change(self, path: LowerPath) -> None:
        if self.changes and path == (b"a",):
            self.changes -= 1
            place = os.fsdecode(self.path) + "/a"
            before = os.stat(place).st_ctime_ns
            while os.stat(place).st_ctime_ns == before:  # the kernel's clock of files is coarse
                os.chmod(place, 0o600 if os.stat(place).st_mode & 0o040 else 0o640)


@pytest.mark.clause("S190", "S36")
@pytest.mark.parametrize("listed", [False, True])
def test_hard_links_are_one_file_though_it_changes_between_two_looks(
    tmp_path: Path, *, listed: bool
) -> None:
    """Also where the drain gives it one more name meanwhile, which changes its ctime."""

    async def main() -> None:
        async with world(tmp_path, hold=False, make_lower=ChangedAfterLook, attr_timeout_s=0) as w:
            assert isinstance(w.lower, ChangedAfterLook)
            (w.backing / "a").write_bytes(b"one")
            os.link(w.backing / "a", w.backing / "b")
            w.lower.changes = 1
            inos = []
            if listed:  # both names are looked at together
                handle = await w.do(w.fs.opendir(ROOT))
                entries = await w.do(w.fs.readdir(handle, 0, with_attributes=True))
                await w.do(w.fs.releasedir(handle))
                shown = [one.attributes for one in entries if one.name in (b"a", b"b")]
                inos = [one.ino for one in shown if one is not None]
            else:  # who has it open keeps its node
                first = await w.do(w.fs.lookup(ROOT, b"b"))
                await w.do(w.fs.open(first.ino, os.O_RDONLY, CALLER))
            inos += [(await w.do(w.fs.lookup(ROOT, name))).ino for name in (b"a", b"b")]
            assert not w.lower.changes
            assert len(set(inos)) == 1
            await rewritten(w, "b", b"two")
            assert contents(w.backing) == {"a": b"two", "b": b"two"}

    trio.run(main)


@pytest.mark.clause("S190", "S36")
def test_hard_links_of_one_listing_are_one_file(tmp_path: Path) -> None:
    """They are looked at together: neither was known when the other was looked at."""

    async def main() -> None:
        async with world(tmp_path, hold=False, attr_timeout_s=0) as w:
            (w.backing / "a").write_bytes(b"one")
            for name in ("b", "c"):
                os.link(w.backing / "a", w.backing / name)
            handle = await w.do(w.fs.opendir(ROOT))
            entries = await w.do(w.fs.readdir(handle, 0, with_attributes=True))
            await w.do(w.fs.releasedir(handle))
            found = [entry.attributes for entry in entries if entry.name in (b"a", b"b", b"c")]
            assert [
                (one.nlink, one.ino == found[0].ino)
                for one in found
                if one is not None and found[0] is not None
            ] == [(3, True)] * 3

    trio.run(main)


@pytest.mark.clause("S190")
def test_a_further_name_that_others_gave_to_another_file_is_not_written_to(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, hold=False, attr_timeout_s=0) as w:
            ino = await w.write(b"a", b"one")
            await w.do(w.fs.link(ino, ROOT, b"b"))
            await w.do(w.fs.link(ino, ROOT, b"c"))
            await w.drained()
            (w.backing / "new").write_bytes(b"somebody else's")
            os.rename(w.backing / "new", w.backing / "b")
            os.unlink(w.backing / "c")
            await rewritten(w, "a", b"two")
            assert contents(w.backing) == {"a": b"two", "b": b"somebody else's"}

    trio.run(main)


class Others:
    """Random changes by others, and by programs of the mount; `files` is what the backing directory
    must have in the end.
    """

    def __init__(self, w: World, seed: int) -> None:
        self._w = w
        self._random = random.Random(seed)
        self._written = 0
        self.files: dict[str, list[bytes]] = {}
        """Hard links share their list."""

    async def step(self) -> str:
        name, other = self._random.sample(NAMES, 2)
        what = self._random.choice(
            ("make", "remove", "replace", "link", "look", "rewrite", "rewrite", "rename", "unlink")
        )
        await getattr(self, "_" + what)(name, other)
        await self._w.drained()
        numbers_of(self._w).take_back()
        return f"{what} {name} {other}"

    def _content(self) -> bytes:
        """Each of its own size: a file system's clock may not tell two of them apart, and the
        number is the same.
        """
        self._written += 1
        return b"content %d" % self._written + b"." * self._written

    async def _make(self, name: str, _other: str) -> None:
        if name not in self.files:
            self.files[name] = [self._content()]
            (self._w.backing / name).write_bytes(self.files[name][0])

    async def _remove(self, name: str, _other: str) -> None:
        if self.files.pop(name, None):
            os.unlink(self._w.backing / name)

    async def _replace(self, name: str, _other: str) -> None:
        (self._w.backing / "new").write_bytes(content := self._content())
        os.rename(self._w.backing / "new", self._w.backing / name)
        self.files[name] = [content]

    async def _link(self, name: str, other: str) -> None:
        if name in self.files and other not in self.files:
            os.link(self._w.backing / name, self._w.backing / other)
            self.files[other] = self.files[name]

    async def _look(self, name: str, _other: str) -> None:
        if name in self.files:
            await self._looked_up(name)

    async def _looked_up(self, name: str) -> None:
        found = await self._w.do(self._w.fs.lookup(ROOT, name.encode()))
        assert await self._w.read(found.ino) == self.files[name][0]
        self._w.fs.forget([(found.ino, self._random.choice((0, 1)))])

    async def _rewrite(self, name: str, _other: str) -> None:
        if name in self.files:
            for link in [
                link for link, content in self.files.items() if content is self.files[name]
            ]:
                await self._looked_up(
                    link
                )  # exception X6: a name that was not seen keeps the old content
            self.files[name][0] = self._content()
            await rewritten(self._w, name, self.files[name][0])

    async def _rename(self, name: str, other: str) -> None:
        if name in self.files and self.files[name] is not self.files.get(other):
            await self._w.do(self._w.fs.rename(ROOT, name.encode(), ROOT, other.encode(), 0))
            self.files[other] = self.files.pop(name)

    async def _unlink(self, name: str, _other: str) -> None:
        if self.files.pop(name, None):
            await self._w.do(self._w.fs.unlink(ROOT, name.encode()))


@pytest.mark.clause("S190")
@pytest.mark.parametrize("seed", range(6))
def test_random_changes_by_others_where_every_inode_number_is_used_again(
    tmp_path: Path, seed: int
) -> None:
    async def main() -> None:
        async with world(
            tmp_path,
            hold=False,
            make_lower=ReusedNumbers,
            attr_timeout_s=0,
            keep_last_persisted=False,
        ) as w:
            others = Others(w, seed)
            done = list[str]()
            for _ in range(STEPS):
                done.append(await others.step())
                assert contents(w.backing) == {
                    name: content[0] for name, content in others.files.items()
                }, "; ".join(done)

    trio.run(main)


@pytest.mark.clause("S190")
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_was_given_up_is_not_what_another_node_makes_under_its_name(
    tmp_path: Path, moved: bool, kind: str
) -> None:
    """A link or a special file is never read again, so the one that was discarded was shown in the
    place of the other.
    """

    async def main() -> None:
        async with world(tmp_path) as w:
            name = b"latest.tmp" if moved else b"latest"
            if kind == "link":
                await w.do(w.fs.symlink(ROOT, name, b"step-9", CALLER))
            else:
                await w.do(w.fs.mknod(ROOT, name, stat.S_IFIFO | 0o600, 0, CALLER))
            if moved:
                await w.do(w.fs.rename(ROOT, name, ROOT, b"latest", 0))
            given_up = (await w.do(w.fs.lookup(ROOT, b"latest"))).ino
            assert w.engine.discard([op.seq for op in w.log]) == 1 + moved
            if kind == "link":
                os.symlink("step-1", w.backing / "latest")
            else:
                os.mkfifo(w.backing / "latest", 0o644)
            found = await w.do(w.fs.lookup(ROOT, b"latest"))
            assert found.ino != given_up
            if kind == "link":
                assert await w.do(w.fs.readlink(found.ino)) == b"step-1"

    trio.run(main)


class HeldLookup(BackingDirectory):
    """The question about one name stands still until the test lets it go on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held: HeldCall | None = None

    def lstat(self, path: LowerPath) -> LowerStat:
        held = self.held
        if held is not None and path[-1] == b"target":
            self.held = None
            found: LowerStat = held(path)
            return found
        return super().lstat(path)


@pytest.mark.clause("S190")
@pytest.mark.parametrize("call", ["rename", "exchange"])
def test_a_rename_moves_what_its_name_leads_to_when_it_has_waited(
    tmp_path: Path, call: str
) -> None:
    """Another node replaced it, and somebody looked it up, while the rename asked about the other
    name: the older one was moved.
    """

    async def main() -> None:
        async with world(
            tmp_path, hold=False, make_lower=HeldLookup, unknown_bytes=0, attr_timeout_s=0
        ) as w:
            assert isinstance(w.lower, HeldLookup)
            (w.backing / "a").write_bytes(b"first")
            await w.do(w.fs.lookup(ROOT, b"a"))
            if call == "exchange":
                (w.backing / "target").write_bytes(b"target")
                await w.do(w.fs.lookup(ROOT, b"target"))
            held = HeldCall(w.lower.lstat)
            w.lower.held = held
            flags = RENAME_EXCHANGE if call == "exchange" else 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.do, w.fs.rename(ROOT, b"a", ROOT, b"target", flags))
                while not held.began.is_set():  # noqa: ASYNC110 - a thread sets it
                    await trio.sleep(0.005)
                (w.backing / "new").write_bytes(b"second")
                os.rename(w.backing / "new", w.backing / "a")
                second = await w.do(w.fs.lookup(ROOT, b"a"))
                held.go_on.set()
            assert (await w.do(w.fs.lookup(ROOT, b"target"))).ino == second.ino
            await w.drained()
            expected = {"target": b"second"} | ({"a": b"target"} if flags else {})
            assert contents(w.backing) == expected

    trio.run(main)
