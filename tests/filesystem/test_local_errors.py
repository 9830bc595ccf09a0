"""What the backing directory refuses in one place does not hold up the others."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from acpfs.types import ROOT
from tests.filesystem.world import CALLER, World, run


@pytest.mark.clause("S207")
def test_entries_of_somebody_else_keep_their_times_and_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group-writable project directory: everybody may write there, only its owner may set its
    times.
    """
    (tmp_path / "backing/project").mkdir(parents=True)

    def refuse(*_arguments: Any, **_words: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    async def scenario(w: World) -> None:
        for name in ("utime", "chmod"):
            monkeypatch.setattr(os, name, refuse)
        directory = (await w.do(w.fs.lookup(ROOT, b"project"))).ino
        step = (await w.do(w.fs.mkdir(directory, b"step-1", 0o755, CALLER))).ino
        await w.write(b"shard", b"x", step)
        await w.write(b"latest", b"1", directory)
        await w.write(b"top", b"t")
        await w.drained()
        assert (w.backing / "project/latest").read_bytes() == b"1"
        assert w.engine.statistics().counters.retries == 0
        refused = w.lower.refused_attributes()
        assert refused["times"] >= 4
        assert refused["mode"] >= 1

    run(tmp_path, scenario, hold=False)


@pytest.mark.clause("S29", "S208")
def test_a_directory_that_others_remove_comes_back_with_what_is_written_in_it(
    tmp_path: Path,
) -> None:
    """A training log that is open while another node removes the whole run: what is appended had no
    place, and held up everything.
    """

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.mkdir(ROOT, b"run", 0o755, CALLER))).ino
        ino = await w.write(b"log", b"1", directory)
        await w.drained()
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_APPEND, CALLER))
        shutil.rmtree(w.backing / "run")
        await w.do(w.fs.lookup(ROOT, b"run"))
        await w.do(w.fs.write(opened.handle, 1, b"2"))
        await w.close(opened)
        await w.write(b"latest", b"1")
        await w.drained()
        assert (w.backing / "run/log").read_bytes() == b"12"
        shutil.rmtree(w.backing / "run")
        with pytest.raises(FileNotFoundError):  # nobody has it open any more
            await w.do(w.fs.lookup(ROOT, b"run"))

    run(tmp_path, scenario, hold=False, attr_timeout_s=0, patience_s=15.0)


@pytest.mark.clause("S29")
@pytest.mark.parametrize("others", [False, True])
def test_nothing_is_moved_or_made_in_a_directory_that_is_removed(
    tmp_path: Path, others: bool
) -> None:
    """The kernel refuses it where this mount removed the directory; where another did, it asks."""

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.mkdir(ROOT, b"gone", 0o755, CALLER))).ino
        ino = await w.write(b"file", b"x")
        await w.drained()
        if others:
            os.rmdir(w.backing / "gone")
            with pytest.raises(FileNotFoundError):
                await w.do(w.fs.lookup(ROOT, b"gone"))
        else:
            await w.do(w.fs.rmdir(ROOT, b"gone"))
        for call in (
            w.fs.rename(ROOT, b"file", directory, b"file", 0),
            w.fs.link(ino, directory, b"file"),
            w.fs.mkdir(directory, b"sub", 0o755, CALLER),
        ):
            with pytest.raises(OSError) as caught:
                await w.do(call)
            assert caught.value.errno in {errno.ENOENT, errno.ESTALE}
        await w.drained()
        assert sorted(os.listdir(w.backing)) == [".acpfs", "file"]

    run(tmp_path, scenario, hold=False, attr_timeout_s=0)
