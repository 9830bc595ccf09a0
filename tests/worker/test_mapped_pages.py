"""The process that has the kernel write back what was changed through mappings: what it touches,
and its end.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from acpfs.types import Ino
from acpfs.worker import mapped_pages, mapped_pages_process
from acpfs.worker.mapped_pages import PROCESSES_MAX, MappedPages
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S475")
STANDS = """
import pathlib, sys, tempfile
sys.stdin.read()
here = pathlib.Path(sys.argv[0]).parent
tempfile.mkstemp(dir=here / "begun")
with open(here / "may end", "rb", buffering=0) as file:
    file.read(1)
print("[]")
"""
"""In place of the process: leaves a file when it begins, and ends when somebody has the fifo open
to write.
"""


def write_back(mountpoint: Path, files: dict[Ino, bytes]) -> dict[Ino, int]:
    return trio.run(MappedPages(mountpoint, REAL.threads).write_back, files)


@dataclass(frozen=True)
class Stand:
    """`STANDS`, in a directory of its own."""

    directory: Path

    def begun(self) -> int:
        return len(os.listdir(self.directory / "begun"))

    async def have_begun(self, processes: int) -> None:
        while self.begun() < processes:  # noqa: ASYNC110 - counted by processes
            await trio.sleep(0.01)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """All end that have begun, or begin meanwhile."""
        fd = os.open(self.directory / "may end", os.O_RDWR)
        try:
            os.write(fd, b"e" * 64)
            yield
        finally:
            os.close(fd)


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    directory = tmp_path / "stand"
    (directory / "begun").mkdir(parents=True)
    os.mkfifo(directory / "may end")
    (directory / "stands.py").write_text(STANDS)
    monkeypatch.setattr(mapped_pages_process, "__file__", str(directory / "stands.py"))
    return Stand(directory)


def test_it_goes_nowhere_but_into_a_mount(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    ino = Ino(os.stat(tmp_path / "a").st_ino)
    assert write_back(tmp_path, {ino: b"a"}) == {ino: errno.ESTALE}
    assert write_back(tmp_path / "gone", {ino: b"a"}) == {ino: errno.ENOENT}


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


def asking(
    pages: MappedPages, answers: list[dict[Ino, int]]
) -> Callable[[dict[Ino, bytes]], Awaitable[None]]:
    async def ask(files: dict[Ino, bytes]) -> None:
        answers.append(await pages.write_back(files))

    return ask


def files_of(*numbers: int) -> dict[Ino, bytes]:
    return {Ino(number): b"%d" % number for number in numbers}


@pytest.mark.clause("S490")
def test_who_asks_when_there_are_as_many_as_there_may_be_stands_in_a_queue(
    tmp_path: Path, stand: Stand
) -> None:
    pages = MappedPages(tmp_path, REAL.threads)
    answers = list[dict[Ino, int]]()
    more = 3

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(PROCESSES_MAX + more):
                nursery.start_soon(asking(pages, answers), files_of(number))
            await stand.have_begun(PROCESSES_MAX)
            await trio.testing.wait_all_tasks_blocked()
            assert (answers, stand.begun()) == ([], PROCESSES_MAX)
            with stand.ending():
                await stand.have_begun(PROCESSES_MAX + more)
                while len(answers) < PROCESSES_MAX + more:  # noqa: ASYNC110 - by processes
                    await trio.sleep(0.01)

    trio.run(scenario)
    assert answers == [{}] * (PROCESSES_MAX + more)


@pytest.mark.clause("S490")
def test_who_asks_for_the_same_shares_a_look_that_began_after_the_question(
    tmp_path: Path, stand: Stand
) -> None:
    pages = MappedPages(tmp_path, REAL.threads)
    answers = list[dict[Ino, int]]()
    ask = asking(pages, answers)

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, files_of(7))
            await stand.have_begun(1)
            for _ in range(3 * PROCESSES_MAX):
                nursery.start_soon(ask, files_of(7))
            nursery.start_soon(ask, files_of(7, 8))  # comes no further than who asks for 7
            nursery.start_soon(ask, files_of(8))
            await stand.have_begun(2)
            await trio.testing.wait_all_tasks_blocked()
            assert (answers, stand.begun()) == ([], 2), "8 waits for nobody"
            with stand.ending():
                while len(answers) < 3 * PROCESSES_MAX + 3:  # noqa: ASYNC110 - by processes
                    await trio.sleep(0.01)

    trio.run(scenario)
    assert stand.begun() == 4, "another for all who asked for 7 when the first had begun"


@pytest.mark.clause("S490")
def test_who_shares_a_look_may_go_before_it_ends(tmp_path: Path, stand: Stand) -> None:
    pages = MappedPages(tmp_path, REAL.threads)
    answers = list[dict[Ino, int]]()
    ask = asking(pages, answers)

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, files_of(7))
            await stand.have_begun(1)
            impatient = await nursery.start(_cancellable, ask, files_of(7))
            nursery.start_soon(ask, files_of(7))
            await trio.testing.wait_all_tasks_blocked()
            impatient.cancel()
            with stand.ending():
                while len(answers) < 2:  # noqa: ASYNC110 - by processes
                    await trio.sleep(0.01)

    trio.run(scenario)
    assert stand.begun() == 2


async def _cancellable(
    ask: Callable[[dict[Ino, bytes]], Awaitable[None]],
    files: dict[Ino, bytes],
    task_status: trio.TaskStatus[trio.CancelScope],
) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await ask(files)


def test_one_that_does_not_end_is_killed_and_keeps_no_other_from_it(
    tmp_path: Path, stand: Stand
) -> None:
    pages = MappedPages(tmp_path, REAL.threads)
    answers = list[dict[Ino, int]]()

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            ask = asking(pages, answers)
            for number in range(PROCESSES_MAX):
                nursery.start_soon(ask, files_of(number))
            await stand.have_begun(PROCESSES_MAX)
            waits = await nursery.start(_cancellable, ask, files_of(PROCESSES_MAX))
            await trio.testing.wait_all_tasks_blocked()
            waits.cancel()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with stand.ending():
            assert await pages.write_back(files_of(0)) == {}

    trio.run(scenario)
    assert not answers
    assert stand.begun() == PROCESSES_MAX + 1, "who went while he waited left nothing behind"


@pytest.mark.clause("S490")
@pytest.mark.parametrize("want", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_a_machine_without_processes_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, want: int
) -> None:
    there_is = subprocess.Popen
    tries = []

    def start(*arguments: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(want, os.strerror(want))
        return there_is(*arguments, **options)

    monkeypatch.setattr(mapped_pages, "AGAIN_S", 0.001)
    monkeypatch.setattr(subprocess, "Popen", start)
    assert write_back(tmp_path, files_of(7)) == {Ino(7): errno.ESTALE}
