"""`locks = refuse`: flock and fcntl locks are refused, and never granted by the kernel itself."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from tests.rig.mounts import AcpfsMount

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
F_OFD_SETLK = 37
F_OFD_SETLKW = 38


def flock64(kind: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


ASKED: dict[str, Callable[[IO[Any]], object]] = {
    "flock": lambda file: fcntl.flock(file, fcntl.LOCK_EX),
    "flock, shared": lambda file: fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB),
    "fcntl": lambda file: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
    "fcntl, waiting": lambda file: fcntl.lockf(file, fcntl.LOCK_EX, 1, 7),
    "whether one is there": lambda file: fcntl.fcntl(file, fcntl.F_GETLK, flock64(fcntl.F_WRLCK)),
    "OFD": lambda file: fcntl.fcntl(file, F_OFD_SETLK, flock64(fcntl.F_WRLCK)),
    "OFD, waiting": lambda file: fcntl.fcntl(file, F_OFD_SETLKW, flock64(fcntl.F_WRLCK)),
}


def answers(path: Path) -> dict[str, int]:
    """What each way to lock is answered; 0: granted."""
    found = {}
    for way, ask in ASKED.items():
        with path.open("r+b") as file:
            try:
                ask(file)
            except OSError as error:
                found[way] = error.errno or -1
            else:
                found[way] = 0
    return found


@clause("S460", "X13")
def test_locks_are_refused(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    with AcpfsMount(backing, tmp_path / "mnt", "native", locks="refuse") as mount:
        path = mount.path / "f"
        path.write_bytes(b"1")
        refused = dict.fromkeys(ASKED, errno.ENOLCK)
        assert answers(path) == refused
        with path.open("r+b") as file:  # as programs do in `finally`
            fcntl.flock(file, fcntl.LOCK_UN)
            fcntl.lockf(file, fcntl.LOCK_UN)
            file.write(b"2")
        mount.kill_worker()
        assert answers(path) == refused
        mount.flush()
        assert (backing / "f").read_bytes() == b"2"
        directory = os.open(mount.path, os.O_RDONLY | os.O_DIRECTORY)
        try:  # X13: the kernel does not ask
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(directory)
