"""Paths that are named and not opened: followed as the kernel would, without it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from acpfs.types import ROOT
from tests.filesystem.world import CALLER, World, run

pytestmark = pytest.mark.clause("S217")


async def why_not(w: World, path: bytes) -> int | None:
    with pytest.raises(OSError) as caught:
        await w.do(w.inner.paths.follow(path))
    assert caught.value.filename == path
    return caught.value.errno


def test_what_is_there_only_below_only_above_or_not_at_all(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        (w.backing / "run").mkdir()
        (w.backing / "run" / "old").write_bytes(b"x")
        (w.backing / "gone").write_bytes(b"x")
        await w.write(b"new", b"x")
        await w.do(w.fs.unlink(ROOT, b"gone"))
        assert [await w.do(w.inner.paths.follow(path)) for path in (b"", b"run/old", b"new")] == [
            [b""],
            [b"run/old"],
            [b"new"],
        ]
        assert [
            await why_not(w, path)
            for path in (b"none", b"run/none/x", b"new/x", b"gone", b".acpfs")
        ] == [errno.ENOENT] * 5

    run(tmp_path, scenario)


def test_symlinks_count_and_what_they_lead_to(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        mountpoint = os.fsencode(w.fs.settings.mountpoint)
        run_dir = await w.do(w.fs.mkdir(ROOT, b"run", 0o755, CALLER))
        await w.write(b"model", b"x", run_dir.ino)
        for name, target in (
            (b"latest", b"run"),
            (b"up", b"run/../latest/./"),
            (b"whole", mountpoint + b"/latest"),
            (b"loop", b"loop"),
        ):
            await w.do(w.fs.symlink(ROOT, name, target, CALLER))
        for name, target in (
            (b"away", b"/etc"),
            (b"beside", mountpoint + b"-2/x"),
            (b"above", b"run/../../x"),
            (b"broken", b"none"),
        ):
            await w.do(w.fs.symlink(ROOT, name, target, CALLER))
        assert await w.do(w.inner.paths.follow(b"latest/model")) == [b"latest", b"run/model"]
        assert await w.do(w.inner.paths.follow(b"up")) == [b"up", b"latest", b"run"]
        assert await w.do(w.inner.paths.follow(b"whole/model")) == [
            b"whole",
            b"latest",
            b"run/model",
        ]
        assert [await why_not(w, path) for path in (b"away", b"beside", b"above")] == [
            errno.EXDEV
        ] * 3
        assert [await why_not(w, path) for path in (b"broken", b"loop")] == [
            errno.ENOENT,
            errno.ELOOP,
        ]

    run(tmp_path, scenario)
