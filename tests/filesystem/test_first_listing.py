"""The first listing of a directory that only the backing directory has costs one look per name, and
no row per file.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from acpfs.backing.lower import LowerPath
from acpfs.backing.syscalls import Opener
from acpfs.filesystem.records import DirEntry
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run, violations, world
from tests.rig.storage.servers import until

FILES = 600
ROOM = 100
"""Entries in one answer, at most."""


def has_room(names: Sequence[bytes]) -> int:
    return min(ROOM, len(names))


def fill(base: Path, count: int) -> None:
    (base / "backing/data").mkdir(parents=True)
    for number in range(count):
        (base / f"backing/data/f{number}").write_bytes(b"x" * number)


async def listed(w: World, directory: Ino) -> list[DirEntry]:
    """All entries but the dots, as `ls -l` gets them."""
    handle = await w.do(w.fs.opendir(directory))
    found = []
    offset = 0
    while entries := await w.do(
        w.fs.readdir(handle, offset, with_attributes=True, fitting=has_room)
    ):
        found += entries
        offset = entries[-1].next_offset
    await w.do(w.fs.releasedir(handle))
    return found[2:]


def test_one_look_per_name_and_no_row_per_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, FILES)
    opened: Counter[LowerPath] = Counter()
    open_directory = Opener.open_directory

    def counted(opener: Opener, path: LowerPath) -> int:
        opened[path] += 1
        return open_directory(opener, path)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"data"))).ino
        monkeypatch.setattr(Opener, "open_directory", counted)
        looks = w.lower.calls()["lstat"]
        changes = w.state.changes
        entries = await listed(w, directory)
        assert w.lower.calls()["lstat"] - looks == FILES
        assert opened[b"data",] <= FILES // ROOM + 2, "the directory is reached once for many names"
        assert w.state.changes - changes <= 10
        with w.fs.lock:
            rows = w.state.rows("SELECT ino FROM node")
        assert rows == [(ROOT,), (directory,)]
        sizes = {
            entry.name: entry.attributes.size for entry in entries if entry.attributes is not None
        }
        assert sizes == {b"f%d" % number: number for number in range(FILES)}
        assert not violations(w)

    run(tmp_path, scenario)


def test_no_more_nodes_are_made_than_an_answer_has_room_for(tmp_path: Path) -> None:
    fill(tmp_path, FILES)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"data"))).ino
        handle = await w.do(w.fs.opendir(directory))
        before = len(w.inner.table)
        entries = await w.do(w.fs.readdir(handle, 0, with_attributes=True, fitting=has_room))
        assert len(entries) == ROOM
        assert len(w.inner.table) - before == ROOM - 2
        await w.do(w.fs.releasedir(handle))

    run(tmp_path, scenario)


def test_what_is_seen_first_in_a_listing_is_a_file_like_any_other(tmp_path: Path) -> None:
    """It can be written to, renamed, removed and forgotten; others' changes are seen."""
    fill(tmp_path, 10)
    os.link(tmp_path / "backing/data/f0", tmp_path / "backing/data/same")
    os.symlink("f1", tmp_path / "backing/data/to-f1")

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"data"))).ino
        found = {entry.name: entry for entry in await listed(w, directory)}
        assert found[b"same"].ino == found[b"f0"].ino
        assert await w.do(w.fs.readlink(found[b"to-f1"].ino)) == b"f1"
        assert await w.write(b"f2", b"anew", directory) == found[b"f2"].ino
        await w.do(w.fs.rename(directory, b"f3", directory, b"moved", 0))
        await w.do(w.fs.unlink(directory, b"f4"))
        w.fs.forget([(entry.ino, 1) for entry in found.values()])
        (w.backing / "data/f5").write_bytes(b"by somebody else")
        assert (await w.do(w.fs.lookup(directory, b"f5"))).size == 16
        await w.drained()
        names = {entry.name for entry in await listed(w, directory)}
        assert (
            names
            == found.keys() - {b"f3", b"f4"} | {b"moved"}
            == {os.fsencode(name) for name in os.listdir(w.backing / "data")}
        )
        assert (w.backing / "data/f2").read_bytes() == b"anew"
        assert not violations(w)

    run(tmp_path, scenario, attr_timeout_s=0.0)


@pytest.mark.clause("S6", "S486")
@pytest.mark.parametrize("removes", [False, True])
def test_what_a_server_has_forgotten_can_be_listed_before_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    """It was made here, and is not persisted: so nobody has put anything there."""

    async def main() -> None:
        async with world(tmp_path, hold=False) as w:

            def refuse(_directory: LowerPath) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            monkeypatch.setattr(w.lower, "sync_directory", refuse)
            await w.do(w.fs.mkdir(ROOT, b"new", 0o755, CALLER))
            await trio.to_thread.run_sync(until, (w.backing / "new").is_dir, "it is there")
        monkeypatch.undo()
        async with world(tmp_path) as w:
            os.rmdir(w.backing / "new")
            new = (await w.do(w.fs.lookup(ROOT, b"new"))).ino
            assert await w.names(new) == []
            if removes:
                await w.do(w.fs.rmdir(ROOT, b"new"))
            w.engine.hold(False)
            await w.drained()
            assert (w.backing / "new").is_dir() is not removes

    trio.run(main)
