"""Files that were open for writing when everything of acpfs was killed: what the next mount takes them for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.rig.faultfs import FaultFs
from tests.rig.mounts import MakeMount
from tests.rig.processes import Child

clause = pytest.mark.clause
SIZE = 1 << 20
OLD, NEW = b"o" * SIZE, b"n" * SIZE


@contextmanager
def open_elsewhere(files: dict[Path, Callable[[int], Any]]) -> Iterator[None]:
    """Another process opens each file for writing, does something with it, and keeps all open until the end."""
    heard, told = os.pipe()
    never, end = os.pipe()

    def work() -> None:
        for path, then in files.items():
            then(os.open(path, os.O_WRONLY))
        os.write(told, b"x")
        os.read(never, 1)

    child = Child(work)
    try:
        assert os.read(heard, 1) == b"x"
        yield
    finally:
        os.close(end)
        for fd in (heard, told, never):
            os.close(fd)
        child.kill()


def overwrite(fd: int) -> None:
    os.pwrite(fd, NEW, 0)


def set_times(fd: int) -> None:
    os.utime(fd, ns=(10**18, 4 * 10**18))


HARMLESS = {"nothing": lambda _fd: None, "fsync": os.fsync, "times": set_times}


@clause("S22", "S82")
def test_an_overwrite_of_the_same_size_is_seen_and_what_was_only_open_is_as_it_was(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    names = {f"{origin}-{then}" for origin, then in product(("mount", "below"), (*HARMLESS, "overwrite"))}
    for name in names:
        if name.startswith("below"):
            (backing / name).write_bytes(OLD)
    mount = make_mount(backing, transport, max_dirty_age=0)
    for name in names:
        if name.startswith("mount"):
            (mount.path / name).write_bytes(OLD)
    mount.flush()
    works = HARMLESS | {"overwrite": overwrite}
    with open_elsewhere({mount.path / name: works[name.partition("-")[2]] for name in names}):
        untouched = [name for name in names if not name.endswith("overwrite")]
        before = {name: os.stat(mount.path / name) for name in untouched}
        mount.kill()
    mount.start()
    assert mount.status()["interrupted"] == len(names) - len(untouched)
    for name in names:
        assert (mount.path / name).read_bytes() == (OLD if name in untouched else NEW), name
        assert (backing / name).read_bytes() == OLD, name
    for name in untouched:
        after = os.stat(mount.path / name)
        assert (after.st_size, after.st_mtime_ns) == (before[name].st_size, before[name].st_mtime_ns), name
    mount.run("acpfs-ctl", "retry", str(mount.path))
    mount.flush()
    assert all((backing / name).read_bytes() == (OLD if name in untouched else NEW) for name in names)


@clause("S22", "S82")
def test_what_was_closed_before_is_complete_and_what_came_after_is_not(transport: str, make_mount: MakeMount, fault_fs: FaultFs) -> None:
    """The first content was closed and not persisted; a second writer overwrites it, which nobody closes."""
    mount = make_mount(fault_fs.path, transport, max_dirty_age=0)
    os.listdir(mount.path)
    rule = fault_fs.fail("EIO", ["fsync"])
    (mount.path / "f").write_bytes(OLD)
    with open_elsewhere({mount.path / "f": overwrite}):
        mount.kill()
    fault_fs.clear(rule)
    mount.start()
    mount.flush()
    assert (fault_fs.source / "f").read_bytes() == OLD
    assert mount.status()["interrupted"] == 1
    assert (mount.path / "f").read_bytes() == NEW
    mount.run("acpfs-ctl", "retry", str(mount.path / "f"))
    mount.flush()
    assert (fault_fs.source / "f").read_bytes() == NEW
