"""A backing directory that hangs until no thread is left for further calls, and goes on: what was
given up meanwhile is asked again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from acpfs.backing.attributes import FSYNC_XATTR
from acpfs.config import FsyncMode
from acpfs.types import ROOT, Ino
from tests.filesystem.world import PATIENCE_S, World, run

clause = pytest.mark.clause


@contextmanager
def no_thread_left(w: World) -> Iterator[None]:
    """Every thread for requests is in a call that hangs."""
    over = Event()
    for _ in range(w.calls.requests.threads_max):
        w.calls.requests.submit("hangs", over.wait)
    try:
        yield
    finally:
        over.set()


async def directory(w: World) -> Ino:
    """That lay on the backing directory before, with all its names known, but not its
    attributes.
    """
    ino = (await w.do(w.fs.lookup(ROOT, b"run"))).ino
    assert await w.names(ino) == []
    node = w.inner.table[ino]
    assert await w.do(w.inner.lower_view.knows_acls(node))
    with w.fs.lock:
        node.xattrs = None
    return ino


@clause("S15")
@clause("S18")
def test_fsync_asks_again_for_its_mode_where_the_question_never_reached_the_storage(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        run_directory = await directory(w)
        with no_thread_left(w):
            opened, _ = await w.create(b"log", run_directory)
            await w.do(w.fs.fsync(opened.handle, datasync=False))
        w.fs.settings.patience_s = (
            PATIENCE_S  # what does not hang any more has the time that it takes
        )
        await w.do(w.fs.fsync(opened.handle, datasync=False))
        node = w.inner.table[run_directory]
        await w.do(w.inner.attributes.fsync_mode_in(node))
        assert w.inner.attributes.is_durable(next(one for one in w.inner.table if one.is_file))
        await w.close(opened)

    (tmp_path / "backing/run").mkdir(parents=True)
    os.setxattr(tmp_path / "backing/run", FSYNC_XATTR, FsyncMode.DURABLE.value.encode())
    run(
        tmp_path,
        scenario,
        patience_s=0.1,
        attr_timeout_s=60.0,
        backing_timeout_s=1.0,
        hold=False,
    )
