"""Directories: large ones, listing while they change, positions, fsync."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.rig.syscalls import Directory
from tests.rig.targets import Target

clause = pytest.mark.clause
PADDING = "-" * 230
"""Long names make a listing of many system calls (32 KiB each, of the C library) from few files,
which are what costs time.
"""


def fill(directory: Path, count: int, prefix: str = "f") -> None:
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(count):
        os.close(os.open(f"{prefix}{number}", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=directory_fd))
    os.close(directory_fd)


@clause("S46")
def test_listing_has_every_entry_with_its_type(d: Path) -> None:
    (d / "file").touch()
    (d / "dir").mkdir()
    (d / "link").symlink_to("file")
    os.mkfifo(d / "fifo")
    with os.scandir(d) as entries:
        kinds = {
            e.name: (
                e.is_file(follow_symlinks=False),
                e.is_dir(follow_symlinks=False),
                e.is_symlink(),
                e.inode(),
            )
            for e in entries
        }
    assert {name: kind[:3] for name, kind in kinds.items()} == {
        "file": (True, False, False),
        "dir": (False, True, False),
        "link": (False, False, True),
        "fifo": (False, False, False),
    }
    assert all(os.lstat(d / name).st_ino == kind[3] for name, kind in kinds.items())


@clause("S46")
def test_dot_and_dotdot_are_listed(d: Path, target: Target) -> None:
    if not target.can("dots"):
        pytest.skip("POSIX leaves it open whether they are listed")
    (d / "x").mkdir()
    names = []
    with Directory(d / "x") as stream:
        while (name := stream.next()) is not None:
            names.append(name)
    assert sorted(names) == [b".", b".."]


@clause("S46")
def test_large_directory(d: Path) -> None:
    """tests/transport/test_large_directory.py has 100,000: other tests on this mount would wait
    minutes for their drain.
    """
    count = 1_000
    gone = 100
    fill(d, count, PADDING)
    assert len(os.listdir(d)) == count
    assert set(os.listdir(d)) == {f"{PADDING}{n}" for n in range(count)}
    for number in random.Random(1).sample(range(count), gone):
        assert (d / f"{PADDING}{number}").exists()
        os.unlink(d / f"{PADDING}{number}")
    assert len(os.listdir(d)) == count - gone


@clause("S46")
def test_listing_while_entries_come_and_go(d: Path) -> None:
    """While the first four of six system calls are made that the whole listing takes."""
    staying = 600
    turns = 120
    fill(d, staying, "stay" + PADDING)
    fill(d, turns, "go" + PADDING)
    seen = []
    with Directory(d) as stream:
        for turn in range(turns):
            seen += [stream.next() for _ in range(4)]
            os.unlink(d / f"go{PADDING}{turn}")
            (d / f"new{PADDING}{turn}").touch()
        seen += stream.rest()
    stayed = [name for name in seen if name and name.startswith(b"stay")]
    assert len(stayed) == len(set(stayed)) == staying


@clause("S46")
def test_remove_all_while_listing(d: Path) -> None:
    fill(d, 400, PADDING)
    with os.scandir(d) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert os.listdir(d) == []


@clause("S46")
def test_rewind_shows_new_entries(d: Path) -> None:
    fill(d, 10)
    with Directory(d) as stream:
        assert len(stream.rest()) == 10
        (d / "new").touch()
        stream.rewind()
        assert b"new" in stream.rest()


@clause("S46")
def test_seekdir_goes_back_to_telldir(d: Path) -> None:
    fill(d, 500)
    with Directory(d) as stream:
        for _ in range(200):
            stream.next()
        position = stream.tell()
        rest = stream.rest()
        stream.seek(position)
        assert stream.rest() == rest


@clause("S46")
def test_lseek_to_the_start_lists_again(d: Path) -> None:
    fill(d, 5)
    fd = os.open(d, os.O_RDONLY | os.O_DIRECTORY)
    assert len(os.listdir(fd)) == 5
    (d / "more").touch()
    os.lseek(fd, 0, os.SEEK_SET)
    assert len(os.listdir(fd)) == 6
    os.close(fd)


@clause("S51")
def test_fsync_of_directories(d: Path) -> None:
    (d / "x").mkdir()
    for path in (d, d / "x"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.fdatasync(fd)
        os.close(fd)


@clause("S41")
def test_directory_times_follow_its_entries(d: Path) -> None:
    (d / "x").mkdir()
    os.utime(d / "x", ns=(1, 1))
    (d / "x" / "f").touch()
    first = (d / "x").stat().st_mtime_ns
    assert first > 1
    os.utime(d / "x", ns=(1, 1))
    (d / "x" / "f").write_bytes(b"content changes nothing of the directory")
    assert (d / "x").stat().st_mtime_ns == 1
    os.unlink(d / "x" / "f")
    assert (d / "x").stat().st_mtime_ns > 1


@clause("S46")
def test_link_count_of_a_directory(d: Path) -> None:
    start = d.stat().st_nlink
    for number in range(3):
        (d / f"sub{number}").mkdir()
    assert d.stat().st_nlink in (start + 3, 1)
    (d / "sub0").rmdir()
    assert d.stat().st_nlink in (start + 2, 1)
