"""What an application was allowed to do in its order drains in that order, for a daemon with no
more rights than it.

Double: a backing directory that refuses what its modes forbid to its owner, as it does where the
daemon is not root, or root is squashed.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.filesystem.records import AttributeChange
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run

clause = pytest.mark.clause

ENTER = stat.S_IXUSR
CHANGE = stat.S_IXUSR | stat.S_IWUSR


class OwnersBacking(BackingDirectory):
    """All there belongs to the daemon, which has no privilege."""

    def _need(self, path: LowerPath, mode: int) -> None:
        """Whether the directory that holds an entry has these bits, and those above it can be
        entered.
        """
        for depth in range(1, len(path)):
            wanted = mode if depth == len(path) - 1 else ENTER
            below = os.path.join(os.fsencode(self.path), *path[:depth])
            if os.path.lexists(below) and os.lstat(below).st_mode & wanted != wanted:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def mkdir(self, path: LowerPath) -> None:
        self._need(path, CHANGE)
        super().mkdir(path)

    def rmdir(self, path: LowerPath) -> None:
        self._need(path, CHANGE)
        super().rmdir(path)

    def unlink(self, path: LowerPath) -> None:
        self._need(path, CHANGE)
        super().unlink(path)

    def rename(self, source: LowerPath, target: LowerPath) -> None:
        self._need(source, CHANGE)
        self._need(target, CHANGE)
        super().rename(source, target)

    def exchange(self, a: LowerPath, b: LowerPath) -> None:
        self._need(a, CHANGE)
        self._need(b, CHANGE)
        super().exchange(a, b)

    def link(self, source: LowerPath, target: LowerPath) -> None:
        self._need(source, ENTER)
        self._need(target, CHANGE)
        super().link(source, target)

    def symlink(self, target: bytes, path: LowerPath) -> None:
        self._need(path, CHANGE)
        super().symlink(target, path)

    def mknod(self, path: LowerPath, mode: int, rdev: int) -> None:
        self._need(path, CHANGE)
        super().mknod(path, mode, rdev)


async def chmod(w: World, ino: Ino, mode: int) -> None:
    await w.do(w.fs.setattr(ino, AttributeChange(mode=mode), None, CALLER))


async def make_directory(w: World, name: bytes, parent: Ino = ROOT, mode: int = 0o755) -> Ino:
    return (await w.do(w.fs.mkdir(parent, name, mode, CALLER))).ino


async def drained(w: World) -> None:
    """All of it, and the backing directory shows what the mount shows."""
    await w.drained()
    with w.fs.lock:
        assert len(w.log) == 0


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


async def a_write(w: World, directory: Ino) -> None:
    await w.write(b"two", b"2", directory)


async def a_rename(w: World, directory: Ino) -> None:
    await w.do(w.fs.rename(directory, b"one", directory, b"two", 0))


async def a_directory(w: World, directory: Ino) -> None:
    await make_directory(w, b"two", directory)


async def a_link(w: World, directory: Ino) -> None:
    one = await w.do(w.fs.lookup(directory, b"one"))
    await w.do(w.fs.link(one.ino, directory, b"two"))


async def a_symlink(w: World, directory: Ino) -> None:
    await w.do(w.fs.symlink(directory, b"two", b"one", CALLER))


@clause("S450")
@pytest.mark.parametrize("what", [a_write, a_rename, a_directory, a_link, a_symlink])
@pytest.mark.parametrize("between", ["at once", "drained", "made read-only before"])
def test_a_directory_that_is_made_writable_and_read_only_again(
    tmp_path: Path, what: Callable[[World, Ino], Awaitable[None]], between: str
) -> None:
    async def scenario(w: World) -> None:
        directory = await make_directory(w, b"d")
        await w.write(b"one", b"1", directory)
        if between != "at once":
            await chmod(w, directory, 0o555)
        if between == "drained":
            await drained(w)
            w.engine.hold(True)
        await chmod(w, directory, 0o755)
        await what(w, directory)
        await chmod(w, directory, 0o555)
        await drained(w)
        assert (w.backing / "d/two").lstat()
        assert mode_of(w.backing / "d") == 0o555

    run(tmp_path, scenario, make_lower=OwnersBacking)


@clause("S461")
@pytest.mark.parametrize("again", [False, True])
def test_a_file_in_a_directory_that_is_read_only_by_then(tmp_path: Path, again: bool) -> None:
    """Who has a file open, or may write to it, needs no right to the directory."""

    async def scenario(w: World) -> None:
        directory = await make_directory(w, b"d")
        await w.write(b"one", b"1", directory)
        opened, _ = await w.create(b"two", directory)
        await w.do(w.fs.write(opened.handle, 0, b"2"))
        await chmod(w, directory, 0o555)
        if again:
            await drained(w)
            w.engine.hold(True)
        await w.close(opened)
        await w.write(b"one", b"new", directory)
        await drained(w)
        assert (w.backing / "d/one").read_bytes() == b"new"
        assert (w.backing / "d/two").read_bytes() == b"2"
        assert mode_of(w.backing / "d") == 0o555
        assert (await w.do(w.fs.getattr(directory))).mode & 0o777 == 0o555

    run(tmp_path, scenario, make_lower=OwnersBacking)


@clause("S461")
def test_a_file_in_a_directory_that_was_read_only_before(tmp_path: Path) -> None:
    """By another worker, or another program: the mount has found it so."""
    there = tmp_path / "backing" / "d"
    there.mkdir(parents=True)
    (there / "one").write_bytes(b"1")
    there.chmod(0o555)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"d"))).ino
        await w.do(w.fs.lookup(directory, b"one"))
        await w.write(b"one", b"new", directory)
        await chmod(w, directory, 0o755)
        await w.write(b"two", b"2", directory)
        await chmod(w, directory, 0o555)
        await drained(w)
        assert (there / "one").read_bytes() == b"new"
        assert (there / "two").read_bytes() == b"2"
        assert mode_of(there) == 0o555

    run(tmp_path, scenario, make_lower=OwnersBacking)


@clause("S450")
def test_rights_of_a_file_do_not_widen_before_what_was_closed_around_it(tmp_path: Path) -> None:
    """What was shut off first, and shown to others then, is not shown to others before it is shut
    off.
    """

    async def scenario(w: World) -> None:
        directory = await make_directory(w, b"d")
        opened, attributes = await w.do(w.fs.create(directory, b"f", 0o600, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(opened.handle, 0, b"secret"))
        await w.close(opened)
        await chmod(w, directory, 0o700)
        await chmod(w, attributes.ino, 0o644)
        with w.fs.lock:
            modes = [op.meta.permissions for op in w.log]
        assert modes == [0o755, 0o600, 0o700, 0o644]
        await drained(w)
        assert mode_of(w.backing / "d/f") == 0o644

    run(tmp_path, scenario, make_lower=OwnersBacking)


@clause("S450")
def test_attributes_right_after_the_file_are_no_operation_of_their_own(tmp_path: Path) -> None:
    """`cp -p` and `tar -x`: one operation per file, and one per directory beside it."""

    async def scenario(w: World) -> None:
        directory = await make_directory(w, b"d", mode=0o700)
        for name in (b"a", b"b"):
            ino = await w.write(name, name, directory)
            await w.do(w.fs.setattr(ino, AttributeChange(atime_ns=1, mtime_ns=2), None, CALLER))
            await chmod(w, ino, 0o444)
        await w.do(w.fs.setattr(directory, AttributeChange(atime_ns=1, mtime_ns=2), None, CALLER))
        await chmod(w, directory, 0o555)
        with w.fs.lock:
            assert len(w.log) == 4
        await drained(w)

    run(tmp_path, scenario, make_lower=OwnersBacking)


class Tree:
    """What an application without privilege does in a small tree: it asks the mount's modes first,
    as the kernel does for it.
    """

    def __init__(self, w: World, rng: random.Random) -> None:
        self.w = w
        self.rng = rng
        self.directories: list[Ino] = []
        self.next_name = 0

    async def mode(self, ino: Ino) -> int:
        return (await self.w.do(self.w.fs.getattr(ino))).mode

    async def may_change(self, at: int) -> bool:
        """Directory number n lies in number n - 1."""
        for above in self.directories[:at]:
            if not await self.mode(above) & ENTER:
                return False
        return await self.mode(self.directories[at]) & CHANGE == CHANGE

    async def names(self, at: int) -> list[bytes]:
        return [name for name in await self.w.names(self.directories[at]) if name.startswith(b"f")]

    def new_name(self) -> bytes:
        self.next_name += 1
        return b"f%d" % self.next_name

    async def change(self, at: int) -> None:
        """Make, replace, remove or move a file there."""
        directory = self.directories[at]
        names = await self.names(at)
        kind = self.rng.randrange(5) if names else 0
        name = self.rng.choice(names) if names else self.new_name()
        if kind == 0:
            await self.w.write(self.new_name(), b"new", directory)
        elif kind == 1:
            await self.w.write(name, b"again", directory)
        elif kind == 2:
            await self.w.do(self.w.fs.unlink(directory, name))
        else:
            to = self.rng.randrange(len(self.directories)) if kind == 3 else at
            if await self.may_change(to):
                target = self.directories[to]
                await self.w.do(self.w.fs.rename(directory, name, target, self.new_name(), 0))

    async def step(self) -> None:
        at = self.rng.randrange(len(self.directories))
        if self.rng.random() < 0.4:
            mode = self.rng.choice((0o755, 0o700, 0o555, 0o500, 0o600, 0o000, 0o755))
            if all([await self.mode(above) & ENTER for above in self.directories[:at]]):
                await chmod(self.w, self.directories[at], mode)
        elif await self.may_change(at):
            await self.change(at)
        elif all([await self.mode(above) & ENTER for above in self.directories[: at + 1]]):
            for name in (await self.names(at))[:1]:
                await self.w.write(name, b"in a directory that is read-only", self.directories[at])

    async def open_up(self) -> None:
        for directory in self.directories:
            await chmod(self.w, directory, 0o755)


@clause("S450")
def test_whatever_the_application_may_do_drains(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    async def scenario(w: World) -> None:
        tree = Tree(w, rng)
        for depth in range(3):
            parent = tree.directories[-1] if depth else ROOT
            tree.directories.append(await make_directory(w, b"d%d" % depth, parent))
        for _round in range(20):
            w.engine.hold(True)
            for _step in range(20):
                await tree.step()
                w.engine.hold(rng.random() < 0.7)
            if rng.random() < 0.5:
                await drained(w)
        await drained(w)
        await tree.open_up()
        await drained(w)
        for at in range(3):
            path = w.backing.joinpath(*(f"d{depth}" for depth in range(at + 1)))
            found = sorted(os.fsencode(one.name) for one in path.iterdir() if one.name[0] == "f")
            assert found == sorted(await tree.names(at))

    run(tmp_path, scenario, make_lower=OwnersBacking)
