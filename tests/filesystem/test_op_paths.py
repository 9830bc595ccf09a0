"""Paths by which operations are shown: such that `retry` and `discard` take them, whatever has
become of their directories.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from acpfs.types import ROOT
from tests.filesystem.world import CALLER, World, run

pytestmark = pytest.mark.clause("S406")


def refused(w: World) -> list[bytes]:
    """All that is in the log is, for good; how that is shown."""
    with w.fs.lock:
        for op in w.log:
            op.last_error = errno.EACCES
            w.log.park(op)
    return [w.inner.changes.display_path(op) for op in w.log.parked()]


def test_what_was_removed_with_its_directory(tmp_path: Path) -> None:
    """Found by attack: it was shown as `?/latest`."""

    async def scenario(w: World) -> None:
        run_ino = (await w.do(w.fs.mkdir(ROOT, b"run", 0o755, CALLER))).ino
        step = (await w.do(w.fs.mkdir(run_ino, b"step", 0o755, CALLER))).ino
        await w.write(b"latest", b"1", step)
        await w.drained()
        w.engine.hold(True)
        await w.do(w.fs.unlink(step, b"latest"))
        await w.do(w.fs.rmdir(run_ino, b"step"))
        await w.do(w.fs.rmdir(ROOT, b"run"))
        assert refused(w) == [b"run/step/latest", b"run/step", b"run"]

    run(tmp_path, scenario, keep_last_persisted=False)


def test_what_was_never_on_the_backing_directory(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        run_ino = (await w.do(w.fs.mkdir(ROOT, b"run", 0o755, CALLER))).ino
        await w.write(b"latest", b"1", run_ino)
        await w.do(w.fs.unlink(run_ino, b"latest"))
        await w.do(w.fs.rmdir(ROOT, b"run"))
        paths = refused(w)
        assert paths
        assert set(paths) <= {b"run", b"run/latest"}
        assert [op.seq for op in w.inner.reports.operations([b"run"])] == [op.seq for op in w.log]

    run(tmp_path, scenario, keep_last_persisted=False)
