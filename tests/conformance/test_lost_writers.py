"""Files that were open for writing when everything of acpfs was killed: what the next mount takes
them for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.rig.faultfs import FaultFs
from tests.rig.mounts import MakeMount
from tests.rig.processes import Child

clause = pytest.mark.clause
pytestmark = pytest.mark.every_lane
SIZE = 1 << 20
OLD = b"o" * SIZE
NEW = b"n" * SIZE


@contextmanager
def open_elsewhere(files: dict[Path, Callable[[int], Any]]) -> Iterator[None]:
    """Another process opens each file for writing, does something with it, and keeps all open until
    the end.
    """
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
    names = {
        f"{origin}-{then}" for origin, then in product(("mount", "below"), (*HARMLESS, "overwrite"))
    }
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
        assert (after.st_size, after.st_mtime_ns) == (
            before[name].st_size,
            before[name].st_mtime_ns,
        ), name
    mount.run("acpfs-ctl", "retry", str(mount.path))
    mount.flush()
    assert all(
        (backing / name).read_bytes() == (OLD if name in untouched else NEW) for name in names
    )


@clause("S22", "S82")
def test_what_was_closed_before_is_complete_and_what_came_after_is_not(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    """The first content was closed and not persisted; a second writer overwrites it, which nobody
    closes.
    """
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


# -- one program ends, acpfs goes on

WRITE = (
    "import os, threading, time; fd = os.open(PATH, os.O_WRONLY | os.O_TRUNC); os.write(fd, b'n' "
    "* 4096)"
)
THREADS = (
    "[threading.Thread(target=time.sleep, args=(600,), daemon=True).start() for _ in range(3)]"
)
READY = "print('ready', flush=True); time.sleep(600)"
WRITE_IN_THREAD = """
import ctypes, os, threading, time
def write():
    global fd
    fd = os.open(PATH, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"n" * 4096)
    written.set()
    then()
written = threading.Event()
thread = threading.Thread(target=write, daemon=True)
def end_first_thread():
    ctypes.CDLL(None).syscall(EXIT, 0)
def await_that():
    stat = f"/proc/self/task/{os.getpid()}/stat"
    while open(stat).read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
"""
"""A background save: another thread than the first one opens the file."""
THREAD_EXIT = {"x86_64": 60}.get(os.uname().machine, 93)


def python(*lines: str) -> list[str]:
    return [
        sys.executable,
        "-S",
        "-c",
        "import sys; PATH = sys.argv[1]\n" + dedent("\n".join(lines)),
    ]


def shell(line: str) -> list[str]:
    return ["sh", "-c", f"F=$0; {line}"]


KILLED = {
    "kill": (python(WRITE, READY), "KILL"),
    "terminate": (python(WRITE, READY), "TERM"),
    "kill-threads": (python(WRITE, THREADS, READY), "KILL"),
    "kill-thread-that-opened": (
        python(WRITE_IN_THREAD, "then = time.time; thread.start(); thread.join()", READY),
        "KILL",
    ),
    "terminate-thread-that-goes-on": (
        python(
            WRITE_IN_THREAD,
            "then = lambda: time.sleep(600)",
            "thread.start(); written.wait()",
            READY,
        ),
        "TERM",
    ),
    "kill-without-first-thread": (
        python(
            f"EXIT = {THREAD_EXIT}",
            WRITE_IN_THREAD,
            f"def then():\n    await_that(); {READY}",
            "thread.start(); end_first_thread()",
        ),
        "KILL",
    ),
    "abort": (
        python(
            WRITE, "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()"
        ),
        "",
    ),
    "copy": (shell("exec dd of=$F bs=4096 status=none conv=notrunc"), "KILL"),
}
ENDED = {
    "exit": python(WRITE, "os._exit(0)"),
    "exit-badly": python(WRITE, "os._exit(3)"),
    "exit-threads": python(WRITE, THREADS, "os._exit(0)"),
    "exit-from-thread": python(
        WRITE, "threading.Thread(target=lambda: os._exit(0)).start()", "time.sleep(600)"
    ),
    "exit-thread-that-opened": python(
        WRITE_IN_THREAD, "then = time.time; thread.start(); thread.join(); os._exit(0)"
    ),
    "exit-without-first-thread": python(
        f"EXIT = {THREAD_EXIT}",
        WRITE_IN_THREAD,
        "def then():\n    await_that(); os._exit(0)",
        "thread.start(); end_first_thread()",
    ),
    "close-without-first-thread": python(
        f"EXIT = {THREAD_EXIT}",
        WRITE_IN_THREAD,
        "def then():\n    await_that(); os.close(fd); os._exit(0)",
        "thread.start(); end_first_thread()",
    ),
    "unclosed": python("file = open(PATH, 'r+b', buffering=0)", "file.write(b'n' * 4096)"),
    "echo": shell("echo n > $F"),
    "shell-descriptor": shell("exec 3>$F; echo n >&3"),
}


def end(command: list[str], path: Path, signal: str) -> None:
    """Run a program that writes to a file until it ends, or has written and is sent the signal."""
    with subprocess.Popen(
        [*command, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if signal:
            if "dd" in command[-1]:
                process.stdin.write(NEW[:4096])
                process.stdin.flush()
                while path.read_bytes() == OLD:
                    assert process.poll() is None
            else:
                assert process.stdout.readline()
            subprocess.run(["kill", f"-{signal}", str(process.pid)], check=True)
        process.wait(60)


@clause("S181", "S536")
def test_what_a_killed_process_left_is_kept_back_and_what_an_ended_one_left_is_published(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    for name in (*KILLED, *ENDED):
        (backing / name).write_bytes(OLD)
    mount = make_mount(backing, transport, max_dirty_age=0)
    for name, (command, signal) in KILLED.items():
        end(command, mount.path / name, signal)
    for name, command in ENDED.items():
        end(command, mount.path / name, "")
    assert mount.wait_status(lambda s: s["open_files"] == 0)
    mount.flush()
    assert {name for name in ENDED if (backing / name).read_bytes() == OLD} == set(), (
        "not published"
    )
    assert {name for name in KILLED if (backing / name).read_bytes() != OLD} == set(), "published"
    assert mount.status()["interrupted"] == len(KILLED)
    for name in KILLED:
        assert (mount.path / name).read_bytes() != OLD
    mount.run("acpfs-ctl", "discard", str(mount.path / "kill"))
    assert (mount.path / "kill").read_bytes() == OLD
    mount.run("acpfs-ctl", "retry", str(mount.path))
    mount.flush()
    assert (
        (backing / "terminate").read_bytes()
        == (mount.path / "terminate").read_bytes()
        == NEW[:4096]
    )
    assert mount.status()["interrupted"] == 0
