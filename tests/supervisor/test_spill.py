"""The spill tier of real mounts: saves larger than RAM go on while the storage is slow, through
deaths of the worker and of all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig.mounts import AcpfsMount, CommandError, mounts_below, wait_gone

pytestmark = [
    pytest.mark.mount,
    pytest.mark.clause("S150"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
MIB = 1 << 20
HEARTBEAT_S = 0.25
"""After a reboot a record is watched for four of these."""
WATCHDOG_S = 600.0
FILES = 12
FILE_BYTES = 6 * MIB
"""More than twice the RAM tier of 32 MiB."""


def content(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() * (FILE_BYTES // 32)


def save(directory: Path, numbers: range = range(FILES)) -> None:
    for number in numbers:
        (directory / f"shard{number}").write_bytes(content(number))


def check(directory: Path, numbers: range = range(FILES)) -> None:
    for number in numbers:
        assert (directory / f"shard{number}").read_bytes() == content(number), number


def spilled(mount: AcpfsMount) -> list[str]:
    return [row["path"] for row in mount.ctl("ls") if row["tier"] == "spill"]


def of(mount: AcpfsMount) -> Path:
    return next(Path(str(mount.options["spill"])).glob("acpfs-*"))


@pytest.fixture
def mount(tmp_path: Path, transport: str) -> Iterator[AcpfsMount]:
    (tmp_path / "backing").mkdir()
    (tmp_path / "disk").mkdir()
    options = {
        "ram": "32M",
        "spill": tmp_path / "disk",
        "bandwidth": "1",
        "watchdog_s": WATCHDOG_S,
        "heartbeat": HEARTBEAT_S,
    }
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, **options) as mounted:  # type: ignore[arg-type]
        yield mounted


def drain(mount: AcpfsMount) -> None:
    mount.ctl("set", "bandwidth=0")
    mount.flush()


@pytest.mark.transports("libfuse", "native-passthrough")
def test_a_save_larger_than_ram_does_not_wait_for_slow_storage(mount: AcpfsMount) -> None:
    save(mount.path)
    status = mount.status()
    assert status["ram"]["used_bytes"] <= 32 * MIB
    assert status["spill"]["state"] == "ok"
    assert status["queue_bytes"] > 40 * MIB  # nothing can have been stored
    assert spilled(mount)
    check(mount.path)
    assert "acpfs_spill_used_bytes" in mount.run("acpfs-ctl", str(mount.path), "metrics").stdout
    assert "spill    ok" in mount.run("acpfs-ctl", str(mount.path), "status").stdout
    drain(mount)
    check(mount.backing)
    check(mount.path)
    mount.umount()
    assert not list(Path(str(mount.options["spill"])).iterdir())


@pytest.mark.transports("native-direct")
def test_the_worker_dies_while_files_move_and_the_save_goes_on(mount: AcpfsMount) -> None:
    for number in range(FILES):
        save(mount.path, range(number, number + 1))
        if number % 3 == 2:
            wait_gone(mount.kill_worker())
    check(mount.path)
    assert mount.status()["ram"]["used_bytes"] <= 32 * MIB
    drain(mount)
    check(mount.backing)


@pytest.mark.transports("libfuse")
def test_the_next_mount_drains_from_the_spill_directory_also_without_the_option(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    save(mount.path)
    mount.wait_status(lambda status: not status["spill"]["copying_files"])
    assert spilled(mount)
    mount.kill()
    other = tmp_path / "elsewhere"
    other.mkdir()
    with pytest.raises(CommandError, match="mount with --spill"):
        mount.start(spill=other)
    del mount.options["spill"]
    mount.start(bandwidth="0")
    assert mount.status()["spill"]["state"] in ("ok", "closed")
    check(mount.path)
    mount.flush()
    check(mount.backing)
    mount.options["spill"] = tmp_path / "disk"
    mount.umount()
    assert not list((tmp_path / "disk").glob("acpfs-*/*"))


@pytest.mark.clause("S151")
@pytest.mark.transports("native")
def test_a_spill_directory_that_is_gone_costs_nothing_but_room(mount: AcpfsMount) -> None:
    directory = of(mount)
    directory.rmdir()
    directory.write_text("in the way")
    mount.ctl("set", "bandwidth=0")
    save(mount.path)
    mount.flush()
    check(mount.backing)
    counters = mount.status()["counters"]
    assert counters["spill_copied_files"] == 0
    directory.unlink()


def reboot(mount: AcpfsMount) -> None:
    """All processes gone, and all that lay in memory: RAM tier, runtime directory, node id."""
    mount.kill()
    for below in mounts_below(mount.runtime_dir):
        subprocess.run(["umount", str(below)], check=True, timeout=60)
    shutil.rmtree(mount.runtime_dir)


def is_mirrored(status: dict[str, Any]) -> bool:
    mirror = status["spill"]["mirror"]
    return bool(
        mirror["state"] == "on"
        and not mirror["behind_files"]
        and not mirror["pending"]
        and not status["spill"]["copying_files"]
    )


@pytest.mark.clause("S152")
@pytest.mark.transports("native")
def test_what_was_mirrored_is_drained_after_a_reboot(mount: AcpfsMount, tmp_path: Path) -> None:
    mount.umount()
    mount.start(spill_mode="mirror")
    node = mount.status()["node"]
    (mount.path / "run").mkdir()
    save(mount.path / "run", range(5))
    (mount.path / "run" / "tmp").write_text("shard0 to shard4")
    (mount.path / "run" / "tmp").rename(mount.path / "latest")
    wait_gone(mount.kill_worker())
    mount.wait_status(is_mirrored)
    fd = os.open(mount.path / "open", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"never closed before the power went")
    reboot(mount)
    with contextlib.suppress(OSError):
        os.close(fd)
    assert not (mount.backing / "latest").exists()
    with pytest.raises(
        CommandError, match="mirrored in"
    ):  # nothing of it is forgotten by a mount without the mirror
        mount.start(spill_mode="move")
    mount.start(spill_mode="mirror")
    assert mount.status()["node"] == node
    assert sorted(os.listdir(mount.path)) == ["latest", "run"]
    check(mount.path / "run", range(5))
    drain(mount)
    check(mount.backing / "run", range(5))
    assert (mount.backing / "latest").read_text() == "shard0 to shard4"
    mount.umount()
    assert not list((tmp_path / "disk").glob("acpfs-[!n]*/[0-9m]*"))
    assert not list(mount.backing.glob(".acpfs/mirrors/*"))


@pytest.mark.clause("S152")
@pytest.mark.transports("native")
@pytest.mark.parametrize("mode", ["mirror", "move"])
def test_after_a_reboot_the_ram_tier_is_found_again_as_before_it(
    mount: AcpfsMount, mode: str
) -> None:
    """The node id comes from the spill directory then; neither a worker that takes over nor a mount
    without the mirror makes up another.
    """
    mount.umount()
    mount.start(spill_mode="mirror")
    node = mount.status()["node"]
    save(mount.path, range(2))
    mount.wait_status(is_mirrored)
    reboot(mount)
    mount.start()
    wait_gone(mount.kill_worker())
    save(mount.path, range(2, 5))
    mount.kill()
    mount.start(spill_mode=mode)
    assert mount.status()["node"] == node
    check(mount.path, range(5))
    drain(mount)
    check(mount.backing, range(5))


@pytest.mark.clause("S130")
@pytest.mark.transports("native")
def test_its_budget_changes_in_use_and_the_next_worker_knows_it(mount: AcpfsMount) -> None:
    assert mount.ctl("set", "spill_budget=3M") == {"spill_budget": 3 * MIB}
    assert mount.status()["spill"]["budget_bytes"] == 3 * MIB
    wait_gone(mount.kill_worker())
    mount.wait_status(lambda status: status["spill"]["budget_bytes"] == 3 * MIB)
    mount.ctl("set", "spill_budget=50%")
    assert mount.status()["spill"]["budget_bytes"] > 3 * MIB


@pytest.mark.transports("libfuse")
@pytest.mark.parametrize("place", ["backing/below", "mnt", "nowhere"])
def test_places_that_cannot_be_a_spill_directory_are_refused(
    tmp_path: Path, transport: str, place: str
) -> None:
    (tmp_path / "backing" / "below").mkdir(parents=True)
    (tmp_path / "mnt").mkdir()
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, spill=tmp_path / place)
    try:
        with pytest.raises(CommandError, match=r"lie one inside the other|does not exist"):
            mount.start()
    finally:
        mount.abort()
