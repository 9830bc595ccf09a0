"""The process that has the kernel write back what was changed through mappings: what it touches, and its end."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from acpfs.runtime.threads import Threads
from acpfs.types import Ino
from acpfs.worker import mapped_pages_process
from acpfs.worker.mapped_pages import PROCESSES_MAX, MappedPages
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S475")
STANDS = "import pathlib, signal, sys; pathlib.Path(sys.argv[0]).with_suffix('.begun').touch(); signal.pause()"


def write_back(pages: MappedPages, mountpoint: Path, files: dict[Ino, bytes]) -> dict[Ino, int]:
    async def ask() -> dict[Ino, int]:
        return await pages.write_back(mountpoint, files, REAL.threads)

    return trio.run(ask)


def test_it_goes_nowhere_but_into_a_mount(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    ino = Ino(os.stat(tmp_path / "a").st_ino)
    assert write_back(MappedPages(), tmp_path, {ino: b"a"}) == {ino: errno.ESTALE}
    assert write_back(MappedPages(), tmp_path / "gone", {ino: b"a"}) == {ino: errno.ENOENT}


@pytest.mark.parametrize(
    ("lies_there", "expected"),
    [
        (lambda path: path.symlink_to("../file"), errno.ENOENT),
        (lambda path: path.write_bytes(b"another"), errno.ENOENT),
        (os.mkfifo, errno.ENOENT),
        (lambda path: path.unlink(missing_ok=True), errno.ENOENT),
        (lambda path: os.link(path.parent.parent / "file", path), 0),
    ],
)
def test_it_takes_no_file_for_another(
    tmp_path: Path, lies_there: Callable[[Path], None], expected: int
) -> None:
    (tmp_path / "file").write_bytes(b"a")
    (tmp_path / "directory").mkdir()
    (tmp_path / "way").symlink_to("directory")
    lies_there(tmp_path / "directory" / "name")
    ino = os.stat(tmp_path / "file").st_ino
    root = os.open(tmp_path, os.O_PATH)
    try:
        assert mapped_pages_process.tried(root, b"directory/name", ino) == expected
        assert mapped_pages_process.tried(root, b"way/name", ino) == errno.ENOTDIR
    finally:
        os.close(root)


def test_one_that_does_not_end_is_killed_and_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands = tmp_path / "stands.py"
    stands.write_text(STANDS)
    begun = stands.with_suffix(".begun")
    pages, threads, files = MappedPages(), Threads(), {Ino(7): b"a"}
    asked = partial(pages.write_back, tmp_path, files, threads)

    async def scenario() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(mapped_pages_process, "__file__", str(stands))
            async with trio.open_nursery() as nursery:
                for _ in range(PROCESSES_MAX):
                    nursery.start_soon(asked)
                while pages._running < PROCESSES_MAX or not begun.exists():  # noqa: ASYNC110 - counted by threads
                    await trio.sleep(0.01)
                assert await asked() == {Ino(7): errno.EBUSY}
                nursery.cancel_scope.cancel()
        while pages._running:  # noqa: ASYNC110 - the same
            await trio.sleep(0.01)
        assert await asked() == {Ino(7): errno.ESTALE}

    trio.run(scenario)
