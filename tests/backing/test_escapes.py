"""No path leads out of the backing directory: how the code reaches entries, and a hostile neighbour
who swaps directories for symlinks.
"""

from __future__ import annotations

import ast
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.syscalls import Opener, rename_exchange
from acpfs.writeback.log.ops import Metadata
from tests.rig.runtime import REAL

clause = pytest.mark.clause
PACKAGE = Path(__file__).parents[2] / "acpfs"
TAKES_PATH = frozenset(
    "open stat lstat mkdir makedirs unlink remove rmdir rename replace link symlink readlink "
    "mknod mkfifo chown lchown chmod lchmod utime "
    "scandir listdir statvfs truncate access walk getxattr setxattr listxattr removexattr "
    "chdir".split()
)
NEVER_FOLLOW = frozenset({"stat", "chown", "utime", "link"})
"""With `dir_fd` these follow a symlink unless told otherwise; the others do not, or are told by
O_NOFOLLOW or O_EXCL.
"""
BY_PATH = {
    "backing/anchor.py": {"self._directory.path"},
    "backing/areas.py": {"f'/proc/self/fdinfo/{fd}'"},
    "backing/attributes.py": {"magic", "target"},
    "backing/directory.py": {"path", "target", "f'/proc/self/fd/{fd}'"},
    "backing/identity.py": {"temporary", "directory / f'{volume_id}-{node}'"},
    "backing/late_calls.py": {"path", "there / 'earlier'", "there / 'earlier/staged'"},
    "backing/probe.py": {"directory.path"},
    "backing/syscalls.py": {"'/'"},
    "filesystem/last_close.py": {"self._proc", "task / 'fdinfo'", "task / 'fd' / number"},
    "filesystem/lowerview.py": {"target"},
    "filesystem/salvage.py": {"unfinished"},
    "ram/mapped_records.py": {"path"},
    "transport/native/device.py": {"DEVICE"},
    "transport/native/hold_process.py": {"'/'"},
    "transport/native/kernel_lanes.py": {"f'/proc/self/fd/{fd}'"},
    "transport/native/mount.py": {"DEVICE", "mountpoint"},
    "writeback/copies/copy_buffers.py": {"self._scratch"},
    "writeback/copies/held_copies.py": {"path"},
    "writeback/copies/on_disk.py": {"path"},
    "writeback/copies/on_member.py": {"path"},
}
"""By path, on purpose: the backing directory as the operator named it, an open inode
(/proc/self/fd), runtime directory, RAM tier, spill directory, a directory that a probe has made.
"""
LAYERS_BELOW_CONTROL = ("backing", "filesystem", "writeback", "transport")
ROUNDS_S = 1.5
ROUNDS_S_MAX = 240.0
"""On a machine that has no turn for this test."""
ENOUGH = 100


def path_calls(file: Path) -> Iterator[tuple[ast.Call, str]]:
    """Calls of `os` that resolve a path, with their name; those on a descriptor are left out."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "os"
        ):
            first = ast.unparse(node.args[0]) if node.args else ""
            if node.func.attr in TAKES_PATH and not first.split(".")[-1].endswith("fd"):
                yield node, node.func.attr


def words(call: ast.Call) -> dict[str, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}


def sources() -> list[Path]:
    return sorted(
        file for layer in LAYERS_BELOW_CONTROL for file in (PACKAGE / layer).rglob("*.py")
    )


@clause("S87")
@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_entries_are_reached_by_name_beneath_a_descriptor(file: Path) -> None:
    allowed = BY_PATH.get(str(file.relative_to(PACKAGE)), set())
    wrong = []
    for call, name in path_calls(file):
        given = words(call)
        first = ast.unparse(call.args[0])
        text = f"{call.lineno}: {ast.unparse(call)}"
        if not {"dir_fd", "src_dir_fd"} & given.keys():
            wrong += [] if first in allowed else [text]
        elif (
            name in NEVER_FOLLOW
            and given.get("follow_symlinks") != "False"
            and "link(temporary" not in text
        ):
            wrong.append(text)
    assert wrong == []


@clause("S87")
@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_pathlib_touches_the_backing_directory(file: Path) -> None:
    """Path.read_text and the like resolve paths; those on /proc, /sys and the runtime directory
    have names of their own.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    calls = [
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    wrong = [
        ast.unparse(f)
        for f in calls
        if f.attr
        in ("read_text", "write_text", "read_bytes", "write_bytes", "iterdir", "glob", "resolve")
    ]
    assert [text for text in wrong if "backing" in text or "self._directory" in text] == []


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BackingDirectory]:
    inside = tmp_path / "inside"
    inside.mkdir()
    opened = BackingDirectory(inside, "node-1", REAL)
    opened._entries.opener = Opener(opened.descriptor, openat2=request.param)
    yield opened
    opened.disconnect()


@contextlib.contextmanager
def swapping(inside: Path, outside: Path) -> Iterator[list[int]]:
    """`inside/d/e` is a directory and a symlink to `outside` in turn, as fast as can be,
    `inside/d/f` a file and a symlink to one there.
    """
    for name in ("d", "d/e", "d/e/sub"):
        (inside / name).mkdir()
    (inside / "d/f").write_bytes(b"inside")
    (inside / "d/e/f").write_bytes(b"inside")
    (inside / "d/e.").symlink_to(outside)
    (inside / "d/f.").symlink_to(outside / "f")
    stop = threading.Event()
    swaps = [0]
    fd = os.open(inside / "d", os.O_PATH)

    def swap() -> None:
        while not stop.is_set():
            rename_exchange(fd, b"e", fd, b"e.")
            rename_exchange(fd, b"f", fd, b"f.")
            swaps[0] += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield swaps
    finally:
        stop.set()
        thread.join()
        os.close(fd)


def state(outside: Path) -> list[tuple[str, tuple[int, ...], bytes]]:
    found: list[tuple[str, tuple[int, ...], bytes]] = []
    for path in sorted([outside, *outside.rglob("*")]):
        st = path.lstat()
        found.append(
            (
                str(path),
                (st.st_mode, st.st_uid, st.st_mtime_ns, st.st_ctime_ns),
                path.read_bytes() if path.is_file() else b"",
            )
        )
    return found


def read_all(directory: BackingDirectory, path: tuple[bytes, ...]) -> bytes:
    fd = directory.open_read(path)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def put(directory: BackingDirectory, path: tuple[bytes, ...]) -> None:
    directory.close(directory.create_staging("put"))
    directory.rename(directory.staging_path("put"), path)


@clause("S87")
def test_a_swapped_directory_leads_nowhere(directory: BackingDirectory, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "f").write_bytes(b"outside")
    (outside / "only-here").touch()
    before = state(outside)
    new = Metadata(
        permissions=0o777, uid=12345, gid=12345, atime_ns=1, mtime_ns=1, xattrs={b"user.x": b"1"}
    )
    e = (b"d", b"e")
    f = (b"d", b"f")
    seen: set[bytes] = set()
    attempts: list[Callable[[], object]] = [
        lambda: seen.add(read_all(directory, (*e, b"f"))),
        lambda: seen.add(read_all(directory, f)),
        lambda: seen.update(entry.name for entry in directory.listdir(e)),
        lambda: put(directory, (*e, b"new")),
        lambda: directory.mkdir((*e, b"made")),
        lambda: directory.rmdir((*e, b"made")),
        lambda: directory.unlink((*e, b"new")),
        lambda: directory.symlink(b"x", (*e, b"link")),
        lambda: directory.unlink((*e, b"link")),
        lambda: directory.link((*e, b"f"), (*e, b"g")),
        lambda: directory.unlink((*e, b"g")),
        lambda: directory.apply((*e, b"f"), new),
        lambda: directory.apply(f, new),
        lambda: directory.apply(e, new),
        lambda: directory.set_times((*e, b"f"), 1, 1),
        lambda: directory.rename((*e, b"sub"), (*e, b"sub")),
        lambda: seen.update(directory.xattrs(f)),
    ]
    done = {True: 0, False: 0}
    with swapping(tmp_path / "inside", outside) as swaps:
        begun = time.monotonic()
        while (took_s := time.monotonic() - begun) < ROUNDS_S or (
            took_s < ROUNDS_S_MAX and min(swaps[0], done[True], done[False]) <= ENOUGH
        ):
            for attempt in attempts:
                try:
                    attempt()
                    done[True] += 1
                except OSError:
                    done[False] += 1
    assert min(swaps[0], done[True], done[False]) > ENOUGH  # both were met
    assert b"outside" not in seen
    assert b"only-here" not in seen
    assert state(outside) == before
