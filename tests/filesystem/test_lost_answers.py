"""Calls of the backing directory that are carried out, and whose answer is an error: what is asked
before they are tried again.

Between the two the committed tree does not say where things lie. What is asked then must not be
answered with what became of the call: a file that lies in the directory by its new name only is not
gone.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from acpfs.filesystem.names import RENAME_EXCHANGE
from acpfs.types import ROOT, Ino
from tests.filesystem.test_overflow import BUDGET, MIB, block
from tests.filesystem.world import CALLER, World, run, world
from tests.rig.syscalls import rename2

clause = pytest.mark.clause
ALWAYS: dict[str, Any] = {"attr_timeout_s": 0.0, "patience_s": 60.0, "backing_timeout_s": 60.0}
"""Whatever is asked is asked of the backing directory, and answers that are slow are waited for."""


class LostAnswer:
    """The next call of a kind is carried out (or is not), and fails; so do those after it, which
    are not, until `over`.
    """

    def __init__(self, w: World, name: str, *, carried_out: bool = True) -> None:
        """`name`: of the call; "rename_of_name" leaves staging files alone."""
        self._spares_staging = name.endswith("_of_name")
        name = name.removesuffix("_of_name")
        self._call = getattr(w.lower, name)
        self._carried_out = carried_out
        self._lower = w.lower
        self._name = name
        setattr(w.lower, name, self._answer)

    def _answer(self, *arguments: Any) -> None:
        if self._spares_staging and arguments[0][0] == b".acpfs":
            self._call(*arguments)
            return
        if self._carried_out:
            self._carried_out = False
            self._call(*arguments)
        raise OSError(errno.EIO, "the answer was lost")

    def over(self) -> None:
        setattr(self._lower, self._name, self._call)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - a change of the log is no event
            await trio.sleep(0.001)


@asynccontextmanager
async def lost_answer(w: World, name: str, *, carried_out: bool = True) -> AsyncIterator[None]:
    """The log up to the failure; inside of it the operation waits for its next try."""
    losing = LostAnswer(w, name, carried_out=carried_out)
    w.engine.hold(False)
    await until(lambda: any(op.tries for op in w.log))
    w.engine.hold(True)
    await until(lambda: not any(op.started for op in w.log))
    yield
    losing.over()
    await w.drained()


def lay(backing: Path, name: str, content: bytes) -> None:
    """A directory with a file, a symlink and a directory."""
    (backing / name / "below").mkdir(parents=True)
    (backing / name / "file").write_bytes(content)
    os.symlink("target", backing / name / "link")
    os.setxattr(backing / name / "file", "user.tag", content)
    (backing / name / "below/x").write_bytes(b"")


async def ino_of(w: World, *names: bytes) -> Ino:
    """Look a path up as the kernel does, name after name."""
    ino = ROOT
    for name in names:
        ino = (await w.do(w.fs.lookup(ino, name))).ino
    return ino


async def seen(w: World, directory: bytes) -> tuple[Any, ...]:
    """All that can be asked about a directory that `lay` made."""
    ino = await ino_of(w, directory)
    file = await ino_of(w, directory, b"file")
    link = await ino_of(w, directory, b"link")
    below = await ino_of(w, directory, b"below")
    with pytest.raises(FileNotFoundError):
        await ino_of(w, directory, b"nothing")
    return (
        await w.names(ino),
        await w.names(below),
        (await w.do(w.fs.getattr(file))).size,
        await w.read(file),
        await w.do(w.fs.readlink(link)),
        await w.do(w.fs.getxattr(file, b"user.tag")),
    )


def expected(content: bytes) -> tuple[Any, ...]:
    return ([b"below", b"file", b"link"], [b"x"], len(content), content, b"target", content)


@clause("S251")
@pytest.mark.parametrize("carried_out", [True, False], ids=["carried_out", "not_carried_out"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_renamed_directory_has_what_it_has(
    tmp_path: Path, known: bool, carried_out: bool
) -> None:
    lay(tmp_path / "backing", "old", b"content")

    async def scenario(w: World) -> None:
        if known:
            assert await seen(w, b"old") == expected(b"content")
        await ino_of(w, b"old")
        await w.do(w.fs.rename(ROOT, b"old", ROOT, b"new", 0))
        async with lost_answer(w, "rename", carried_out=carried_out):
            assert await seen(w, b"new") == expected(b"content")
            assert await seen(w, b"new") == expected(b"content")
            with pytest.raises(FileNotFoundError):
                await ino_of(w, b"old")
            assert await w.names() == [b"new"]
            await w.do(w.fs.unlink(await ino_of(w, b"new"), b"file"))
        assert sorted(os.listdir(w.backing / "new")) == ["below", "link"]
        assert not (w.backing / "old").exists()

    run(tmp_path, scenario, **ALWAYS)


@clause("S251")
@pytest.mark.parametrize("carried_out", [True, False], ids=["carried_out", "not_carried_out"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_exchanged_directories_have_what_they_have(
    tmp_path: Path, known: bool, carried_out: bool
) -> None:
    lay(tmp_path / "backing", "a", b"of a")
    lay(tmp_path / "backing", "b", b"this is of b")

    async def scenario(w: World) -> None:
        if known:
            assert [await seen(w, b"a"), await seen(w, b"b")] == [
                expected(b"of a"),
                expected(b"this is of b"),
            ]
        await ino_of(w, b"a")
        await ino_of(w, b"b")
        await w.do(w.fs.rename(ROOT, b"a", ROOT, b"b", RENAME_EXCHANGE))
        async with lost_answer(w, "exchange", carried_out=carried_out):
            for _ in range(2):
                assert [await seen(w, b"a"), await seen(w, b"b")] == [
                    expected(b"this is of b"),
                    expected(b"of a"),
                ]
        assert [(w.backing / name / "file").read_bytes() for name in ("a", "b")] == [
            b"this is of b",
            b"of a",
        ]

    run(tmp_path, scenario, **ALWAYS)


@clause("S251")
@pytest.mark.parametrize("carried_out", [True, False], ids=["carried_out", "not_carried_out"])
def test_a_renamed_file_can_be_read(tmp_path: Path, carried_out: bool) -> None:
    lay(tmp_path / "backing", "d", b"content")

    async def scenario(w: World) -> None:
        directory = await ino_of(w, b"d")
        file = await ino_of(w, b"d", b"file")
        await w.do(w.fs.rename(directory, b"file", ROOT, b"moved", 0))
        async with lost_answer(w, "rename", carried_out=carried_out):
            assert await w.read(file) == b"content"
            assert await w.do(w.fs.getxattr(file, b"user.tag")) == b"content"
            assert await w.names(directory) == [b"below", b"link"]
            assert await w.names() == [b"d", b"moved"]
        assert (w.backing / "moved").read_bytes() == b"content"

    run(tmp_path, scenario, **ALWAYS)


async def remove_one(w: World) -> None:
    await w.do(w.fs.unlink(ROOT, b"one"))


async def rename_over_one(w: World) -> None:
    await ino_of(w, b"third")
    await w.do(w.fs.rename(ROOT, b"third", ROOT, b"one", 0))


@clause("S251")
@pytest.mark.parametrize("carried_out", [True, False], ids=["carried_out", "not_carried_out"])
@pytest.mark.parametrize(
    ("change", "call"),
    [(remove_one, "unlink"), (rename_over_one, "rename")],
    ids=["unlink", "rename"],
)
def test_a_file_that_loses_one_of_its_names_is_read_by_another(
    tmp_path: Path, change: Callable[[World], Awaitable[None]], call: str, carried_out: bool
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    (backing / "one").write_bytes(b"content")
    os.link(backing / "one", backing / "two")
    (backing / "third").write_bytes(b"another")

    async def scenario(w: World) -> None:
        file = await ino_of(w, b"one")
        assert await ino_of(w, b"two") == file
        await change(w)
        async with lost_answer(w, call, carried_out=carried_out):
            assert await ino_of(w, b"two") == file
            assert await w.read(file) == b"content"
            assert (await w.do(w.fs.getattr(file))).size == len(b"content")
        assert (backing / "two").read_bytes() == b"content"

    run(tmp_path, scenario, **ALWAYS)


@clause("S251")
def test_a_removed_directory_that_is_open_has_no_names(tmp_path: Path) -> None:
    (tmp_path / "backing/empty").mkdir(parents=True)

    async def scenario(w: World) -> None:
        directory = await ino_of(w, b"empty")
        handle = await w.do(w.fs.opendir(directory))
        await w.do(w.fs.rmdir(ROOT, b"empty"))
        async with lost_answer(w, "rmdir"):
            entries = await w.do(w.fs.readdir(handle, 0, with_attributes=False))
            assert [entry.name for entry in entries if entry.name not in (b".", b"..")] == []
            with pytest.raises(FileNotFoundError):
                await ino_of(w, b"empty")
            assert await w.names() == []
        await w.do(w.fs.releasedir(handle))

    run(tmp_path, scenario, **ALWAYS)


@clause("S251")
@pytest.mark.parametrize("kind", ["mkdir", "symlink", "link", "mknod"])
@pytest.mark.parametrize("carried_out", [True, False], ids=["carried_out", "not_carried_out"])
def test_what_was_made_is_there(tmp_path: Path, kind: str, carried_out: bool) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    (backing / "one").write_bytes(b"content")

    async def scenario(w: World) -> None:
        one = await ino_of(w, b"one")
        if kind == "mkdir":
            await w.do(w.fs.mkdir(ROOT, b"made", 0o755, CALLER))
        elif kind == "symlink":
            await w.do(w.fs.symlink(ROOT, b"made", b"target", CALLER))
        elif kind == "link":
            await w.do(w.fs.link(one, ROOT, b"made"))
        else:
            await w.do(w.fs.mknod(ROOT, b"made", 0o010644, 0, CALLER))
        made = await ino_of(w, b"made")
        async with lost_answer(w, kind, carried_out=carried_out):
            assert await ino_of(w, b"made") == made
            assert await w.names() == [b"made", b"one"]
            assert await w.read(one) == b"content"
            if kind == "mkdir":
                await w.write(b"x", b"in it", made)
                assert await w.names(made) == [b"x"]
        assert await w.names() == [b"made", b"one"]

    run(tmp_path, scenario, **ALWAYS)


@clause("S251")
@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE], ids=["rename", "exchange"])
def test_what_is_carried_out_late_is_found_then(tmp_path: Path, flags: int) -> None:
    """Not when the answer came, but before the next try: as a server does whose clients have given
    up.
    """
    for name in ("old", "new") if flags else ("old",):
        lay(tmp_path / "backing", name, b"content of " + name.encode())

    async def scenario(w: World) -> None:
        for name in (b"old", b"new") if flags else (b"old",):
            await ino_of(w, name)
        await w.do(w.fs.rename(ROOT, b"old", ROOT, b"new", flags))
        async with lost_answer(w, "exchange" if flags else "rename", carried_out=False):
            assert await seen(w, b"new") == expected(b"content of old")
            rename2(w.backing / "old", w.backing / "new", flags)
            assert await seen(w, b"new") == expected(b"content of old")
            if flags:
                assert await seen(w, b"old") == expected(b"content of new")

    run(tmp_path, scenario, **ALWAYS)


@clause("S251")
@pytest.mark.parametrize("renames", [1, 2, 3])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_an_exchange_of_several_renames_is_found_in_its_middle(
    tmp_path: Path, known: bool, renames: int
) -> None:
    """Where the backing file system has no exchange: one of the two lies aside for a while."""
    lay(tmp_path / "backing", "old", b"content of old")
    lay(tmp_path / "backing", "new", b"content of new")

    async def scenario(w: World) -> None:
        for name in (b"old", b"new"):
            if known:
                assert await seen(w, name) == expected(b"content of " + name)
            await ino_of(w, name)
        await w.do(w.fs.rename(ROOT, b"old", ROOT, b"new", RENAME_EXCHANGE))
        async with lost_answer(w, "exchange", carried_out=False):
            aside = w.lower.exchange_aside((b"old",), (b"new",))
            for source, target in [((b"old",), aside), ((b"new",), (b"old",)), (aside, (b"new",))][
                :renames
            ]:
                w.lower.rename(source, target)
            for _ in range(2):
                assert await seen(w, b"new") == expected(b"content of old")
                assert await seen(w, b"old") == expected(b"content of new")
            w.lower.adapt(replace(w.lower.features, rename_exchange=False))

    run(tmp_path, scenario, **ALWAYS)


@clause("S251")
def test_what_others_remove_meanwhile_is_gone(tmp_path: Path) -> None:
    lay(tmp_path / "backing", "old", b"content")

    async def scenario(w: World) -> None:
        assert await seen(w, b"old") == expected(b"content")
        directory = await ino_of(w, b"old")
        await w.do(w.fs.rename(ROOT, b"old", ROOT, b"new", 0))
        async with lost_answer(w, "rename"):
            os.unlink(w.backing / "new/file")
            with pytest.raises(FileNotFoundError):
                await ino_of(w, b"new", b"file")
            assert await w.names(directory) == [b"below", b"link"]
            shutil.rmtree(w.backing / "new")
            with pytest.raises(FileNotFoundError):
                await ino_of(w, b"new", b"link")

    run(tmp_path, scenario, **ALWAYS)


@clause("S251")
@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE], ids=["rename", "exchange"])
def test_the_next_worker_finds_it_too(tmp_path: Path, flags: int) -> None:
    """The worker dies before it tries again: its successor looks before it commits anything."""
    for name in ("old", "new") if flags else ("old",):
        lay(tmp_path / "backing", name, b"content of " + name.encode())

    async def scenario() -> None:
        async with world(tmp_path, **ALWAYS) as w:
            for name in (b"old", b"new") if flags else (b"old",):
                assert await seen(w, name) == expected(b"content of " + name)
            await w.do(w.fs.rename(ROOT, b"old", ROOT, b"new", flags))
            LostAnswer(w, "exchange" if flags else "rename")
            w.engine.hold(False)
            await until(lambda: any(op.tries for op in w.log))
        async with world(tmp_path, **ALWAYS) as w:
            for _ in range(2):
                assert await seen(w, b"new") == expected(b"content of old")
                if flags:
                    assert await seen(w, b"old") == expected(b"content of new")
            await w.drained()
            assert (tmp_path / "backing/new/file").read_bytes() == b"content of old"
            assert await seen(w, b"new") == expected(b"content of old")

    trio.run(scenario)


@clause("S561")
@pytest.mark.parametrize("older", [b"z", b"a"])
def test_what_was_put_under_one_of_its_names_is_found_by_the_next_worker(
    tmp_path: Path, older: bytes
) -> None:
    """Which name is the first, each worker says anew; and RAM has no room for what it has."""
    newer = b"a" if older == b"z" else b"z"
    content = block(1) * (BUDGET // MIB + 1)
    options: dict[str, Any] = {"budget_bytes": BUDGET, "when_full": "native"}

    def stored(w: World) -> set[bytes]:
        return {(w.backing / name).read_bytes() for name in ("a", "z")}

    async def main() -> None:
        async with world(tmp_path, **options) as w:
            await w.write(older, b"before")
            await w.do(w.fs.link(await ino_of(w, older), ROOT, newer))
            await w.drained()
            answer = LostAnswer(w, "link", carried_out=False)
            await w.write(older, content)
            await until(lambda: stored(w) == {b"before", content})
        answer.over()
        async with world(tmp_path, **options) as w:
            await w.drained()
            assert stored(w) == {content}

    trio.run(main)


@clause("S562")
def test_what_somebody_put_where_a_file_was_moved_to_is_not_that_file(tmp_path: Path) -> None:
    """The worker died before it knew that it had moved it."""

    async def main() -> None:
        async with world(tmp_path, **ALWAYS) as w:
            await w.write(b"pointer.tmp", b"step-1")
            await w.drained()
            answer = LostAnswer(w, "rename_of_name")
            await w.do(w.fs.rename(ROOT, b"pointer.tmp", ROOT, b"pointer", 0))
            await until((w.backing / "pointer").exists)
        answer.over()
        (tmp_path / "other").write_bytes(b"step-2")
        (tmp_path / "other").rename(w.backing / "pointer")
        async with world(tmp_path, **ALWAYS) as w:
            await w.drained()
            assert await w.read(await ino_of(w, b"pointer")) == b"step-2"
            assert await w.names() == [b"pointer"]
        assert (w.backing / "pointer").read_bytes() == b"step-2"

    trio.run(main)
