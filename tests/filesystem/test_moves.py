"""A directory that is being renamed on the backing directory, while requests ask for what lies
below it.

Between the rename and its record the committed tree leads nowhere. What is asked then must wait for
the record, and must never be answered with what the move made of it: ENOENT from readdir, say,
which the C library takes for the end of the listing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from acpfs.filesystem.names import RENAME_EXCHANGE
from acpfs.filesystem.steps import settled
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run


class SlowMove:
    """Renames of the backing directory that are carried out, and whose answer comes late."""

    def __init__(self, w: World, *, carried_out: bool = True) -> None:
        self._rename = w.lower.rename
        self._carried_out = carried_out
        self.moved = threading.Event()
        self._answer = threading.Event()
        w.lower.rename = self.rename  # type: ignore[method-assign]

    def rename(self, source: Any, target: Any) -> None:
        if self._carried_out:
            self._rename(source, target)
        self.moved.set()
        self._answer.wait(60)
        if not self._carried_out:
            self._rename(source, target)

    def answer(self) -> None:
        self._answer.set()


def tree_below(base: Path) -> None:
    """What was there before the mount."""
    old = base / "backing/old"
    (old / "below").mkdir(parents=True)
    (old / "file").write_bytes(b"content")
    os.symlink("target", old / "link")
    os.setxattr(old / "file", "user.tag", b"kept")
    (old / "below/x").write_bytes(b"")


async def nothing() -> None:
    """Nothing else happens meanwhile."""


async def ask_while_moving(
    w: World,
    moving: SlowMove,
    questions: list[Callable[[], Awaitable[Any]]],
    meanwhile: Callable[[], Awaitable[None]] = nothing,
) -> list[Any]:
    """Let the rename happen; ask; when each question has been answered, or once in vain, and
    `meanwhile` is done, let the rename end.
    """
    answers: list[Any] = [None] * len(questions)

    async def ask(number: int) -> None:
        answers[number] = await questions[number]()

    w.engine.hold(False)
    with trio.fail_after(60):
        await trio.to_thread.run_sync(moving.moved.wait, 60)
        async with trio.open_nursery() as nursery:
            for number in range(len(questions)):
                nursery.start_soon(ask, number)
            while w.fs.statistics().lower_view.overtaken_answers + sum(
                answer is not None for answer in answers
            ) < len(questions):
                await trio.lowlevel.checkpoint()
            await meanwhile()
            moving.answer()
    return answers


async def renamed(w: World) -> tuple[Ino, Ino, Ino, Ino]:
    """Rename old → new in the mount; node numbers of what lies in it, none of it asked about
    before.
    """
    await w.do(w.fs.lookup(ROOT, b"old"))
    directory = (await w.do(w.fs.lookup(ROOT, b"old"))).ino
    inos = [(await w.do(w.fs.lookup(directory, name))).ino for name in (b"file", b"link", b"below")]
    await w.do(w.fs.rename(ROOT, b"old", ROOT, b"new", 0))
    return directory, inos[0], inos[1], inos[2]


@pytest.mark.clause("S3")
def test_what_lies_below_a_directory_that_moves_is_there(tmp_path: Path) -> None:
    tree_below(tmp_path)

    async def scenario(w: World) -> None:
        directory, file, link, below = await renamed(w)
        questions: list[Callable[[], Awaitable[Any]]] = [
            lambda: w.names(directory),
            lambda: w.names(below),
            lambda: w.read(file),
            lambda: w.do(w.fs.readlink(link)),
            lambda: w.do(w.fs.getxattr(file, b"user.tag")),
        ]
        answers = await ask_while_moving(w, SlowMove(w), questions)
        assert answers == [[b"below", b"file", b"link"], [b"x"], b"content", b"target", b"kept"]
        await w.drained()

    run(tmp_path, scenario)


def test_a_file_in_a_directory_that_moves_is_brought_up(tmp_path: Path) -> None:
    tree_below(tmp_path)

    async def scenario(w: World) -> None:
        _directory, file, _link, _below = await renamed(w)

        async def change() -> None:
            opened = await w.do(w.fs.open(file, os.O_WRONLY, CALLER))
            await w.do(w.fs.write(opened.handle, 0, b"C"))
            await w.close(opened)

        await ask_while_moving(w, SlowMove(w), [change])
        await w.drained()
        assert (w.backing / "new/file").read_bytes() == b"Content"

    run(tmp_path, scenario)


@pytest.mark.clause("S18")
def test_the_fsync_mode_of_a_directory_that_moves_is_known(tmp_path: Path) -> None:
    tree_below(tmp_path)
    os.setxattr(tmp_path / "backing/old", "user.acpfs.fsync", b"durable")

    async def scenario(w: World) -> None:
        directory, *_others = await renamed(w)
        node = w.inner.table[directory]

        async def mode() -> str:
            return str((await w.do(w.inner.attributes.fsync_mode_in(node))).value)

        assert await ask_while_moving(w, SlowMove(w), [mode]) == ["durable"]
        await w.drained()

    run(tmp_path, scenario)


def test_a_move_that_hangs_is_waited_for_and_not_asked_about_all_the_time(tmp_path: Path) -> None:
    tree_below(tmp_path)

    async def scenario(w: World) -> None:
        directory, *_others = await renamed(w)
        moving = SlowMove(w, carried_out=False)

        async def look() -> None:
            with pytest.raises(FileNotFoundError):
                await w.do(w.fs.lookup(directory, b"nothing"))

        async def others_ask() -> None:
            for _ in range(200):
                await settled(w.calls.requests.submit("something else", lambda: None))

        before = w.lower.calls()["lstat"]
        await ask_while_moving(w, moving, [look], others_ask)
        assert w.lower.calls()["lstat"] - before < 10
        await w.drained()

    run(tmp_path, scenario)


@pytest.mark.clause("S113", "S140")
def test_an_exchanged_directory_is_settled_when_both_have_their_names(tmp_path: Path) -> None:
    """Each of the two has another name by it: neither counts before."""

    async def scenario(w: World) -> None:
        for name in (b"iter_0000001", b"iter_0000002"):
            directory = await w.do(w.fs.mkdir(ROOT, name, 0o755, CALLER))
            await w.write(b"shard", name, directory.ino)
        await w.drained()
        w.engine.hold(True)
        await w.do(w.fs.rename(ROOT, b"iter_0000001", ROOT, b"iter_0000002", RENAME_EXCHANGE))
        for name in (b"iter_0000001", b"iter_0000002"):
            with w.fs.lock:
                assert not w.inner.changes.is_settled((name,))
                assert [file.is_persisted for file in w.inner.known_files.below(name)] == [False]
        await w.drained()
        for name in (b"iter_0000001", b"iter_0000002"):
            with w.fs.lock:
                assert w.inner.changes.is_settled((name,))
                assert [file.is_persisted for file in w.inner.known_files.below(name)] == [True]

    run(tmp_path, scenario)
