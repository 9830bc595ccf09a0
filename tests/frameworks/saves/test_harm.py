"""Saves that fail, are killed, or run beside a fork; storages that are not in host memory."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from acpfs.torch import ArchiveWriteError, load, loading, save, saving, side_by_side, windows
from acpfs.torch.originals import original_load, original_save
from acpfs.torch.skeleton import skeleton
from acpfs.torch.storage_bytes import NoWayError, StorageBytes, memory_of
from tests.frameworks.saves.corpus import NAMED
from tests.frameworks.saves.test_same_bytes import same_bytes

clause = pytest.mark.clause
STATE_BYTES = 24 << 20


def state() -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.randn(STATE_BYTES // 4 // 8) for number in range(8)}


def descriptors() -> set[str]:
    """What this process has open, by name."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 8 MiB, which is taken for a mount."""
    path = tmp_path / "full"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", path], check=True)
    monkeypatch.setattr(saving, "lies_in_mount", lambda _path: True)
    yield path
    subprocess.run(["umount", path], check=True)


class InterruptError(Exception):
    """What a signal's handler raises."""


@clause("T219")
@pytest.mark.parametrize("begins", ["at once", "behind the call"])
def test_a_thread_whose_start_is_interrupted_writes_nothing_later(
    begins: str, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Thread.start` had a thread that nobody knew of: it wrote to whatever had got the number of
    the descriptor.
    """
    started = list[threading.Thread]()
    go = threading.Event()
    start = threading.Thread.start
    run = threading.Thread.run

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise InterruptError

    def held(thread: threading.Thread) -> None:
        go.wait()
        run(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    if begins == "behind the call":
        monkeypatch.setattr(threading.Thread, "run", held)
    monkeypatch.setattr(saving, "usable_threads", lambda: 2)
    path = full / "model.pt"
    before = descriptors()
    with pytest.raises(InterruptError):
        save({"w": torch.randn(7 << 18)}, path)  # four windows: two threads
    assert descriptors() == before
    with open(full / "another", "wb", buffering=0) as another:  # gets the number
        another.write(b"mine")
        go.set()
        for thread in started:
            thread.join()
    assert (full / "another").read_bytes() == b"mine"
    assert path.stat().st_size == 0
    assert len(started) == 1


@clause("T219")
def test_no_room(full: Path) -> None:
    """An error with its number, that who expects torch's catches as well."""
    path = full / "model.pt"
    with pytest.raises(RuntimeError) as caught:
        save(state(), path)
    assert isinstance(caught.value, ArchiveWriteError)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOSPC
    assert str(path) not in descriptors()
    assert [one.name for one in threading.enumerate()] == ["MainThread"]
    assert path.stat().st_size == 0
    save(torch.ones(3), path)
    assert load(path).tolist() == [1, 1, 1]


@clause("T219")
def test_an_exception_in_the_middle(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a signal's handler: it comes out, all threads have ended, and nothing is open."""
    path = mounted / "model.pt"
    whole = saving.ArchiveWriting._put
    left = iter(range(3))
    told = threading.Event()

    def interrupted(self: saving.ArchiveWriting, fd: int, lane: Any, begin: int) -> None:
        whole(self, fd, lane, begin)
        if threading.current_thread() is not threading.main_thread():
            told.wait()  # else the others could do all that there is to do
        elif next(left, None) is None:
            told.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(saving.ArchiveWriting, "_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save({f"w{number}": torch.randn(1 << 20) for number in range(20)}, path)
    assert str(path) not in descriptors()
    assert [one.name for one in threading.enumerate()] == ["MainThread"]
    with pytest.raises(EOFError):
        original_load(path)


@clause("T219")
def test_an_exception_in_another_thread() -> None:
    begun = threading.Event()

    def fails(_piece: int) -> None:
        begun.set()
        raise OSError(errno.EIO, "here")

    with pytest.raises(OSError, match="here"):
        side_by_side.side_by_side([lambda _piece: begun.wait(), fails], range(1000))


KILLED = """
import os, signal, sys, torch
from acpfs.torch import saving
saving.ArchiveWriting._finish = lambda self, fd: os.kill(os.getpid(), signal.SIGKILL)
saving.save({f"w{n}": torch.ones(1 << 20) for n in range(3)}, sys.argv[1])
"""


@clause("T219")
def test_killed_before_the_directory_is_there(mounted: Path) -> None:
    """All storages are in the file, and no reader takes it for whole."""
    path = mounted / "model.pt"
    words = [sys.executable, "-c", KILLED, str(path)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    assert path.stat().st_size > 3 << 22
    with pytest.raises(RuntimeError, match="central directory"):
        original_load(path)


@clause("T221")
def test_a_fork_meanwhile(mounted: Path) -> None:
    """Children that are forked beside a save end, and it is whole."""
    value = state()
    is_over = threading.Event()

    def saves() -> None:
        for _ in range(5):
            save(value, mounted / "model.pt")
        is_over.set()

    saver = threading.Thread(target=saves)
    saver.start()
    while not is_over.is_set():
        child = os.fork()
        if not child:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    saver.join()
    with zipfile.ZipFile(mounted / "model.pt") as archive:
        assert archive.testzip() is None


@clause("T221")
def test_a_forked_child_saves_and_loads(mounted: Path) -> None:
    save(state(), mounted / "model.pt")
    child = os.fork()
    if not child:
        status = 1
        try:
            save(load(mounted / "model.pt"), mounted / "child.pt")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert original_load(mounted / "child.pt").keys() == state().keys()


@clause("T221")
def test_no_thread_can_be_started(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter ends, or the machine has none left."""

    def none(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    value = state()
    save(value, mounted / "model.pt")
    assert all(torch.equal(one, value[name]) for name, one in load(mounted / "model.pt").items())


@clause("T217")
def test_a_file_that_becomes_shorter_while_it_is_read(mounted: Path) -> None:
    path = mounted / "model.pt"
    save(state(), path)
    with loading.DividedFile(path) as file:
        target = bytearray(STATE_BYTES)
        os.truncate(path, 1000)
        assert file.readinto(target) == 1000


class LateCopier:
    """Stands for a device: what it was asked for comes when it is waited for, in pieces."""

    def __init__(self, _device: torch.device, length: int) -> None:
        self._room = memoryview(bytearray(length))
        self._asked: list[Callable[[], None]] = []

    @property
    def room(self) -> memoryview:
        return self._room

    def copy(self, storage: Any, start: int, target: memoryview) -> None:
        def come() -> None:
            target[:] = memory_of(storage)[start : start + len(target)]

        target[:] = b"\xaa" * len(target)
        self._asked.append(come)

    def wait(self) -> None:
        while self._asked:
            self._asked.pop()()


@clause("T222")
@pytest.mark.parametrize("name", ["trained", "tied", "many small", "every type", "empty", "large"])
@pytest.mark.parametrize("window", [5000, 1 << 20])
def test_storages_of_a_device(
    name: str, window: int, mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are on it and some are not; each byte is asked for and waited for before it is used."""
    monkeypatch.setattr(saving, "DEVICE_WINDOW_BYTES", window)
    value = NAMED[name]()
    path = mounted / "model.pt"
    with skeleton(value, "model.pt", {}) as (archive, storages):
        here = set(list(storages)[::3])
        of_host = {id(one) for key, one in storages.items() if key in here}
        brought = StorageBytes(storages, is_host=lambda one: id(one) in of_host, copier=LateCopier)
        plan = saving.ArchiveWriting(archive, brought)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        plan.write(fd, str(path))
    original_save(value, tmp_path / "model.pt")
    assert same_bytes(path, tmp_path / "model.pt")


@clause("T222")
def test_a_device_without_a_way(mounted: Path) -> None:
    """torch saves it, before a byte was written: here torch knows no accelerator."""
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with skeleton(torch.ones(9), "model.pt", {}) as (archive, storages):
        away = StorageBytes(storages, is_host=lambda _storage: False)
        with pytest.raises(NoWayError):
            saving.ArchiveWriting(archive, away)


@clause("T216")
def test_more_than_four_gibibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of 64 bits, in a file that is nearly all hole; nobody compares it with torch's own,
    which would take as much memory.
    """
    whole = windows.write_all

    def holes(fd: int, views: list[memoryview], at: int) -> None:
        for view in views:
            if len(view) < 100_000:
                whole(fd, [view], at)
            at += len(view)

    monkeypatch.setattr(windows, "write_all", holes)
    monkeypatch.setattr(saving, "lies_in_mount", lambda _path: True)
    value = [torch.zeros(9 << 29, dtype=torch.uint8), torch.ones(1000), torch.arange(7)]
    path = tmp_path / "model.pt"
    save(value, path)
    monkeypatch.undo()
    with zipfile.ZipFile(path) as archive:
        sums = [one.CRC for one in archive.infolist() if "/data/" in one.filename]
        assert archive.testzip() is None
    assert len(sums) == 3
    loaded = original_load(str(path), mmap=True)
    assert (loaded[0].shape, loaded[2].tolist()) == (value[0].shape, list(range(7)))
    assert torch.equal(loaded[1], value[1])
