"""Trees that are deeper than the interpreter's stack: a user can make them, name by name, and no
path of them fits into a call.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.checkpoints import DEFAULT_PATTERNS, Checkpoints
from acpfs.types import ROOT, Ino
from acpfs.writeback.evidence.verify import Verifier
from acpfs.writeback.guard import survey
from acpfs.writeback.manifest.manifest import Manifest
from tests.filesystem.world import CALLER, World, run
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S253")

FRAMES = 300
DEPTH = 320
"""Python's stack has 1,000 frames; with fewer the tests take a tenth of the time."""


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """Neither Python nor pytest can remove such a tree."""
    path = tmp_path / "base"
    frames = sys.getrecursionlimit()
    path.mkdir()
    sys.setrecursionlimit(FRAMES)
    yield path
    sys.setrecursionlimit(frames)
    subprocess.run(["rm", "-rf", os.fspath(path)], check=True)


async def make(w: World, top: bytes) -> list[tuple[Ino, bytes]]:
    """Directories in each other, and a file in the last one; returns parents and names."""
    found = list[tuple[Ino, bytes]]()
    parent = ROOT
    for name in (top, *[b"d"] * DEPTH):
        found.append((parent, name))
        parent = (await w.do(w.fs.mkdir(parent, name, 0o755, CALLER))).ino
    await w.write(b"f", b"content", parent)
    return [*found, (parent, b"f")]


async def remove(w: World, made: list[tuple[Ino, bytes]]) -> None:
    parent, name = made.pop()
    await w.do(w.fs.unlink(parent, name))
    for parent, name in reversed(made):
        await w.do(w.fs.rmdir(parent, name))


def test_it_is_stored_read_checked_and_removed(base: Path) -> None:
    async def scenario(w: World) -> None:
        made = await make(w, b"run")
        await w.drained()
        path = tuple(name for _parent, name in made)
        assert w.lower.lstat(path).size == len(b"content")
        assert await w.read((await w.do(w.fs.lookup(*made[-1]))).ino) == b"content"
        with w.fs.lock:
            manifest = Manifest(w.state, w.lower, w.fs.lock, "test")
        verifier = Verifier(manifest, w.lower, w.fs.lock, REAL.threads)
        assert [(found.path, found.status) for found in verifier.verify([(b"run",)])] == [
            (os.fsdecode(b"/".join(path)), "ok")
        ]
        await remove(w, made)
        await w.drained()
        assert [name for name in os.listdir(w.backing) if name != ".acpfs"] == []

    run(base, scenario)


def test_others_move_it_away(base: Path) -> None:
    async def scenario(w: World) -> None:
        made = await make(w, b"run")
        await w.drained()
        os.rename(w.backing / "run", base / "elsewhere")
        assert b"run" not in await w.names()
        with pytest.raises(FileNotFoundError):
            await w.do(w.fs.lookup(*made[0]))
        await w.write(b"other", b"content")
        await w.drained()

    run(base, scenario, attr_timeout_s=0.0)


@pytest.mark.clause("S140")
def test_it_is_a_checkpoint_that_is_removed(base: Path) -> None:
    async def scenario(w: World) -> None:
        made = await make(w, b"checkpoint-100")
        await w.drained()
        recogniser = Checkpoints(DEFAULT_PATTERNS)
        checkpoint = recogniser.of(b"checkpoint-100", directory=True)
        assert checkpoint is not None
        own = (((b"checkpoint-100",), (b"checkpoint-100",)),)
        found = survey.look(w.lower, recogniser, survey.Question(checkpoint, own, (), here=True))
        assert (found.own.files, found.own.size_bytes) == (1, len(b"content"))
        await remove(w, made)
        await w.drained()

    run(base, scenario, keep_last_persisted=False)
