"""Little room for the state: new names are refused before anything is changed, and what was
promised goes on.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from acpfs.filesystem.steps import Call, T
from acpfs.ram.kept import Kept
from acpfs.ram.state import Recording
from acpfs.ram.state_space import StateSpace
from acpfs.transport.native.references import References
from acpfs.types import ROOT
from tests.filesystem.test_late_state import fill
from tests.filesystem.world import CALLER, World, run

pytestmark = pytest.mark.clause("S203")


async def refused(w: World, call: Call[T]) -> int:
    with pytest.raises(OSError) as failed:
        await w.do(call)
    return failed.value.errno or 0


def test_new_names_are_refused_and_what_is_there_can_be_written_deleted_and_drained(
    tmp_path: Path,
) -> None:
    free = [1 << 30]

    async def scenario(w: World) -> None:
        old = await w.write(b"old", b"x")
        await w.write(b"other", b"x")
        free[0] = 1 << 20
        nodes = len(list(w.inner.table))
        length = len(w.log)
        assert (
            await refused(w, w.fs.create(ROOT, b"new", 0o644, os.O_WRONLY, CALLER)) == errno.ENOSPC
        )
        assert await refused(w, w.fs.mkdir(ROOT, b"new", 0o755, CALLER)) == errno.ENOSPC
        assert await refused(w, w.fs.symlink(ROOT, b"new", b"target", CALLER)) == errno.ENOSPC
        assert await refused(w, w.fs.mknod(ROOT, b"new", 0o100644, 0, CALLER)) == errno.ENOSPC
        assert await refused(w, w.fs.link(old, ROOT, b"new")) == errno.ENOSPC
        assert await refused(w, w.fs.setxattr(old, b"user.a", b"v" * 60_000)) == errno.ENOSPC
        assert (len(list(w.inner.table)), len(w.log)) == (nodes, length), "nothing was changed"
        opened = await w.do(w.fs.open(old, os.O_WRONLY | os.O_TRUNC, CALLER))
        await w.do(w.fs.write(opened.handle, 0, b"anew"))
        await w.close(opened)
        await w.do(w.fs.unlink(ROOT, b"other"))
        await w.do(w.fs.rename(ROOT, b"old", ROOT, b"moved", 0))
        await w.drained()
        assert (w.backing / "moved").read_bytes() == b"anew"
        free[0] = 1 << 30
        await w.write(b"new", b"y")

    run(tmp_path, scenario, state_space=StateSpace(lambda: free[0]))


def test_a_transaction_without_room_is_made_again_at_once_where_the_tmpfs_grows(
    tmp_path: Path,
) -> None:
    worlds: list[World] = []

    def grow() -> bool:
        worlds[0].state._db.execute(f"PRAGMA max_page_count={1 << 30}")
        return True

    async def scenario(w: World) -> None:
        worlds.append(w)
        with w.fs.lock:
            fill(w.state)
        for i in range(100):
            await w.do(w.fs.mkdir(ROOT, b"%s%d" % (b"d" * 200, i), 0o755, CALLER))
        assert w.state.recording is Recording.CURRENT
        assert w.state.late_since > 0, "it was full"

    run(tmp_path, scenario, state_space=StateSpace(grow=grow))


def test_the_xattrs_of_a_file_are_bounded(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"file", b"x")
        await w.do(w.fs.setxattr(ino, b"user.a", b"v" * 65_536))
        await w.do(w.fs.setxattr(ino, b"user.b", b"v" * 60_000))
        assert await refused(w, w.fs.setxattr(ino, b"user.c", b"v" * 60_000)) == errno.ENOSPC
        assert await w.do(w.fs.listxattr(ino)) == [b"user.a", b"user.b"]
        await w.do(w.fs.setxattr(ino, b"user.b", b"w" * 60_000))
        await w.do(w.fs.removexattr(ino, b"user.a"))
        await w.do(w.fs.setxattr(ino, b"user.c", b"v" * 60_000))

    run(tmp_path, scenario)


def test_a_file_whose_record_finds_no_room_is_not_opened_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_values: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    async def scenario(w: World) -> None:
        ino = await w.write(b"file", b"x")
        directory = await w.do(w.fs.mkdir(ROOT, b"d", 0o755, CALLER))
        before = w.fs.statistics().open_files, w.inner.contents.writers
        with monkeypatch.context() as patched:
            patched.setattr(w.inner.kept.handles, "add", full)
            patched.setattr(w.inner.kept.directories, "add", full)
            for flags in (os.O_RDONLY, os.O_RDWR):
                assert await refused(w, w.fs.open(ino, flags, CALLER)) == errno.ENOSPC
            assert (
                await refused(w, w.fs.create(ROOT, b"new", 0o644, os.O_WRONLY, CALLER))
                == errno.ENOSPC
            )
            assert await refused(w, w.fs.opendir(directory.ino)) == errno.ENOSPC
        assert (w.fs.statistics().open_files, w.inner.contents.writers) == before
        assert [node.handles for node in w.inner.table] == [0] * len(w.inner.table)
        assert await w.read(ino) == b"x"
        await w.do(w.fs.rmdir(ROOT, b"d"))
        await w.drained()

    run(tmp_path, scenario)


def test_a_reference_whose_record_finds_no_room_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept()

    def full(*_values: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    references = References(kept)
    with monkeypatch.context() as patched:
        patched.setattr(kept.references, "add", full)
        references.given((5,))
    references.given((6,))
    references.taken_back([(5, 1), (6, 1)])
    assert len(references) == 0
