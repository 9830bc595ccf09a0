"""What this process has mounted goes when this process goes, even by SIGKILL: a second process
watches it.

`arm` before something is mounted, `disarm` after it was taken down. One watcher (`watcher.py`) per
process, started by the first `arm`, in a session of its own so that a signal to the group of this
process does not reach it. It waits on this process, not on a pipe from it, since children inherit
pipes; and it is the watchdog too: a deadline is kept even where this process hangs in a system
call.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

_NOT_INHERITED = ("ACPFS_STARTED_BELOW",)
"""By this tools/test finds what was left running; the watcher ends by itself when it has cleaned
up.
"""
_lock = threading.Lock()
_orders: dict[int, int] = {}
"""Descriptor to write to, by the process that started the watcher: a forked child must not speak
for its parent, it gets one of its own.
"""


def arm(path: Path, runtime_dir: Path | None = None, deadline_s: float | None = None) -> None:
    """Take down the acpfs at `path`, or without `runtime_dir` all mounts at and below `path`, when
    this process ends or at the deadline.

    Again for the same path: the deadline begins anew.
    """
    _tell(arm=str(path), runtime_dir=runtime_dir and str(runtime_dir), deadline_s=deadline_s)


def disarm(path: Path) -> None:
    """It was taken down; nothing where it was never armed."""
    if os.getpid() in _orders:
        _tell(disarm=str(path))


def _tell(**words: object) -> None:
    with _lock:
        if os.getpid() not in _orders:
            _orders[os.getpid()] = _start_watcher()
        line = json.dumps(words).encode() + b"\n"
        if os.write(_orders[os.getpid()], line) != len(line):
            raise RuntimeError("the watcher of mounts takes no orders")


def _start_watcher() -> int:
    """Start it and wait until it watches.

    Not through subprocess, which complains of a child that outlives us: this one is to.
    """
    orders, orders_end = os.pipe()
    answer_end, answer = os.pipe()
    env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    command = [sys.executable, "-m", "tests.rig.watcher", str(os.getpid())]
    moves = [(os.POSIX_SPAWN_DUP2, orders, 0), (os.POSIX_SPAWN_DUP2, answer, 1)]
    root = str(Path(__file__).parents[2])
    os.posix_spawn(
        sys.executable,
        command,
        env | {"PYTHONPATH": root, "PYTHONSAFEPATH": "1"},
        file_actions=moves,
        setsid=True,
    )
    os.close(orders)
    os.close(answer)
    with open(answer_end, "rb") as stream:
        if stream.readline() != b"ready\n":
            raise RuntimeError("the watcher of mounts did not start")
    return orders_end
