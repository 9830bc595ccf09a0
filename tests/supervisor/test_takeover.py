"""Workers die by kill -9 under load, again and again; applications see a pause, and nothing else.

The programs' own account decides.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.rig.mounts import REPOSITORY, AcpfsMount, wait_gone

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
KILLS = int(os.environ.get("ACPFS_STORM_KILLS", "8"))
WATCHDOG_S = 600.0
PAIRS = [
    ["checkpoints", "renames"],
    ["append_log", "small_files"],
    ["mapped", "deleted"],
    ["listings", "overwrites"],
]


def run_through(
    mount: AcpfsMount, names: list[str], stop: Path, kill_every_s: tuple[float, float] = (0.1, 0.5)
) -> None:
    """Run programs until all kills are done; the output has how long each takeover took."""
    programs = {}
    for name in names:
        (mount.path / name).mkdir()
        command = [
            sys.executable,
            "-m",
            "tests.supervisor.storm",
            name,
            str(mount.path / name),
            str(stop),
        ]
        programs[name] = subprocess.Popen(
            command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
        )
    chooser = random.Random(0)
    pauses = list[float]()
    for _ in range(KILLS):
        threading.Event().wait(chooser.uniform(*kill_every_s))
        wait_gone(mount.kill_worker())
        pauses.append(mount.status()["worker"]["pause_s"])
    stop.touch()
    failed = {}
    for name, program in programs.items():
        _out, complaint = program.communicate(timeout=240)
        if program.returncode:
            failed[name] = complaint[-1500:]
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    print(f"pauses: {pauses}")


@pytest.mark.clause("S81")
@pytest.mark.transports("native-direct", "native-passthrough")
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_programs_go_on(
    tmp_path: Path, transport: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACPFS_EARLY_DEATHS_MAX", "1000000")
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S
    ) as mount:
        run_through(mount, names, tmp_path / "stop")
        mount.flush()
        for name in names:
            shown = {
                p.relative_to(mount.path): p.read_bytes()
                for p in (mount.path / name).rglob("*")
                if p.is_file()
            }
            stored = {
                p.relative_to(mount.backing): p.read_bytes()
                for p in (mount.backing / name).rglob("*")
                if p.is_file()
            }
            assert stored == shown
        status = mount.wait_status(
            lambda status: status["open_files"] == 0
        )  # the kernel tells of closes in the background
        assert (status["interrupted"], status["parked"], status["queue_length"]) == (0, 0, 0)
        assert mount.ask("doctor") == {"items": []}
        mount.umount()
        assert mount.leaks() == []


@pytest.mark.clause("S81", "X8")
@pytest.mark.transports("native-direct", "native-passthrough")
@pytest.mark.parametrize("gone_by", ["unlink", "rename", "others"])
def test_a_deleted_file_that_was_never_in_ram_is_read_on_by_the_next_worker(
    tmp_path: Path, transport: str, gone_by: str
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    (backing / "old").write_bytes(b"old content")
    mounted = AcpfsMount(
        backing, tmp_path / "mnt", transport, watchdog_s=WATCHDOG_S, warm_reads="off"
    )
    with (
        mounted as mount,
        open(mount.path / "old", "rb", 0) as file,
        open(mount.path / "old", "rb", 0) as unread,
    ):
        assert os.pread(file.fileno(), 3, 0) == b"old"
        if gone_by == "unlink":
            os.unlink(mount.path / "old")
        elif gone_by == "rename":
            (mount.path / "new").write_bytes(b"new")
            os.rename(mount.path / "new", mount.path / "old")
        else:
            os.unlink(backing / "old")
        mount.flush()
        if gone_by != "others":
            assert os.pread(unread.fileno(), 100, 0) == b"old content"
        for _ in range(2):
            wait_gone(mount.kill_worker())
            if gone_by == "others" and transport == "native-direct":  # who could have known?
                with pytest.raises(OSError) as caught:
                    os.pread(file.fileno(), 100, 0)
                assert caught.value.errno == errno.ESTALE
            else:
                assert os.pread(file.fileno(), 100, 0) == b"old content"
