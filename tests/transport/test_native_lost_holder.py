"""Who holds writers is killed, again and again, while RAM is full: nobody who writes is told of
it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from acpfs.ram.place import slack_bytes
from tests.rig.mounts import AcpfsMount
from tests.rig.processes import Child
from tests.transport.test_native_hold import (
    BLOCK,
    MIB,
    WATCHDOG_S,
    holds_a_lock,
    lock_takers,
    wait_until,
)

pytestmark = [
    pytest.mark.mount,
    pytest.mark.clause("S436", "S60"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]

BUDGET = 64 * MIB
WRITERS = 2
SIZE_MAX = 500 * MIB
ROUNDS_MAX = 100


def write(path: Path, enough: Path) -> int:
    """As fast as it goes, until there is enough; returns how much was written."""
    done = 0
    with open(path, "wb", buffering=0) as file:
        while done < SIZE_MAX and not enough.exists():
            count = file.write(BLOCK)
            assert count
            done += count
    return done


def used(data: Path) -> int:
    """Bytes that the tmpfs holds."""
    info = os.statvfs(data)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def is_held(mount: AcpfsMount) -> bool:
    return any(map(holds_a_lock, lock_takers(mount)))


def has_ended(writers: list[Child]) -> bool:
    """Whether somebody writes no more: told of an error, or having written all that it may."""
    return not all(writer.running(0) for writer in writers)


# Two writers at full speed fill the slack of the tmpfs in a tenth of a second, and meet its end
# where who holds them gets no processor for as long, as beside other tests: one by one it is sure.
@pytest.mark.long
def test_what_is_written_while_nobody_holds_is_refused_to_nobody(tmp_path: Path) -> None:
    """More than budget and slack, in the gaps between one who holds and the next."""
    (tmp_path / "backing").mkdir()
    enough = tmp_path / "enough"
    with AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        "native-passthrough",
        ram=f"{BUDGET}",
        bandwidth="1",
        watchdog_s=WATCHDOG_S,
    ) as mount:
        wait_until(lambda: bool(lock_takers(mount)))
        data = Path(mount.status()["ram"]["directory"]) / "data"
        (mount.path / "before").write_bytes(BLOCK * 8)
        paths = [mount.path / f"model-{n}.pt" for n in range(WRITERS)]
        writers = [Child(partial(write, path, enough)) for path in paths]
        # one that was refused is told below
        mount.wait_status(lambda status: bool(status["held_files"]) or has_ended(writers))
        for _ in range(ROUNDS_MAX):
            if used(data) > BUDGET + slack_bytes(BUDGET) + 16 * MIB:
                break
            for pid in lock_takers(mount):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda: is_held(mount) or has_ended(writers))
            if has_ended(writers):
                break
        enough.touch()
        mount.ask("set", key="bandwidth", value="0")
        sizes = [writer.result() for writer in writers]
        mount.flush()
        assert [(mount.backing / path.name).stat().st_size for path in paths] == sizes
