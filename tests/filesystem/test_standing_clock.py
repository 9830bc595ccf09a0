"""What came before what is no matter of clocks: one may stand still between two looks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import trio

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerEntry, LowerPath
from acpfs.filesystem.recognition import Recognition, Seen
from acpfs.types import ROOT
from tests.filesystem.world import World, run
from tests.rig.runtime import runtime_of

ASKED_MAX = 20


def test_an_answer_counts_that_was_asked_for_after_an_operation_was_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a history in which time stands still: it was asked for ever."""
    look = Recognition.look
    numbers = itertools.count(1)

    def counted(recognition: Recognition, path: LowerPath) -> Seen:
        assert next(numbers) < ASKED_MAX
        return look(recognition, path)

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"bytes")
        await w.drained()
        with w.fs.lock:
            w.inner.table.ask_anew(w.inner.table[ino])
        monkeypatch.setattr(Recognition, "look", counted)
        assert (await w.do(w.fs.getattr(ino))).size == 5
        assert next(numbers) == 2

    run(tmp_path, scenario, runtime=runtime_of(lambda: 1000.0))


def test_a_listing_counts_that_was_asked_for_after_one_that_was_made_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a history of members: a directory was listed for ever, as each listing was no
    newer.
    """
    listdir = BackingDirectory.listdir
    numbers = itertools.count(1)

    def counted(lower: BackingDirectory, path: LowerPath) -> list[LowerEntry]:
        assert next(numbers) < ASKED_MAX
        return listdir(lower, path)

    async def scenario(w: World) -> None:
        (w.backing / "d").mkdir()
        (w.backing / "d" / "old").write_bytes(b"1")
        directory = await w.do(w.fs.lookup(ROOT, b"d"))
        await w.write(b"new", b"bytes", directory.ino)
        node = w.inner.table[directory.ino]
        while not node.dir.listed_ahead:
            await trio.lowlevel.checkpoint()
        monkeypatch.setattr(BackingDirectory, "listdir", counted)
        assert sorted(await w.names(directory.ino)) == [b"new", b"old"]

    run(tmp_path, scenario, runtime=runtime_of(lambda: 1000.0))
