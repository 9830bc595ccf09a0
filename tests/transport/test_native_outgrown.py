"""Files that outgrow RAM in passthrough, on a real mount over a backing directory of limited
bandwidth.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount, wait_gone
from tests.rig.processes import Child
from tests.transport.test_native_hold import (
    BLOCK,
    BUDGET,
    MIB,
    SLACK,
    WATCHDOG_S,
    Peak,
    checksum,
    paced,
    wait_lock_taker,
    write,
)

pytestmark = [
    pytest.mark.mount,
    pytest.mark.clause("S61"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]
BANDWIDTH = 150 * MIB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultFs]:
    with FaultFs(tmp_path / "disk", tmp_path / "seen", bandwidth=BANDWIDTH) as faults:
        yield faults


@pytest.fixture(params=["native-passthrough", "native-direct"])
def mount(request: pytest.FixtureRequest, tmp_path: Path, disk: FaultFs) -> Iterator[AcpfsMount]:
    with AcpfsMount(
        tmp_path / "seen", tmp_path / "mnt", request.param, ram=f"{BUDGET}", watchdog_s=WATCHDOG_S
    ) as mounted:
        yield mounted


only_passthrough = pytest.mark.parametrize("mount", ["native-passthrough"], indirect=True)


def stored(tmp_path: Path, name: str) -> str:
    return checksum(tmp_path / "disk" / name)


def test_a_file_three_times_the_budget(mount: AcpfsMount, tmp_path: Path) -> None:
    peak = Peak(mount)
    peak.start()
    digest = write(mount.path / "big", 3 * BUDGET)
    assert peak.end() <= BUDGET + SLACK // 2
    assert checksum(mount.path / "big") == digest
    mount.flush()
    assert stored(tmp_path, "big") == digest


@pytest.mark.clause("S60")
def test_four_writers_at_once_with_three_times_the_budget(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    peak = Peak(mount)
    peak.start()
    names = [f"rank{n}" for n in range(4)]
    children = [Child(partial(write, mount.path / name, 3 * BUDGET // 4)) for name in names]
    digests = [child.result(WATCHDOG_S) for child in children]
    assert peak.end() <= BUDGET + SLACK
    mount.flush()
    assert [stored(tmp_path, name) for name in names] == digests


@only_passthrough
@pytest.mark.clause("S60")
def test_one_write_far_beyond_the_limit_takes_no_more_ram_and_its_rest_waits(
    mount: AcpfsMount, tmp_path: Path
) -> None:
    """It cannot be held, and ends short where its beginning does not move to the backing directory
    as fast as it writes.
    """
    data = memoryview(BLOCK * 132)
    wait_lock_taker(mount)  # while it starts, 50 ms on an idle machine, nobody can hold a writer
    peak = Peak(mount)
    peak.start()
    with open(mount.path / "giant", "wb", buffering=0) as file:
        done = 0
        while done < len(data):
            done += file.write(data[done:])  # ENOSPC here would be the failure
    assert peak.end() <= BUDGET + SLACK
    mount.flush()
    assert stored(tmp_path, "giant") == hashlib.sha256(data).hexdigest()


@only_passthrough
def test_it_is_read_as_soon_as_it_is_closed(mount: AcpfsMount, tmp_path: Path) -> None:
    with open(mount.path / "big", "wb", buffering=0) as file:
        for _ in paced(range(64)):
            assert file.write(BLOCK) == len(BLOCK)
        moved(mount, tmp_path)
        with pytest.raises(OSError) as error:
            (mount.path / "big").read_bytes()
        assert error.value.errno == errno.EBUSY
    with open(mount.path / "big", "rb") as reader:
        assert reader.read() == BLOCK * 64
        with mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == BLOCK * 64


@only_passthrough
def test_a_file_that_is_deleted_while_it_outgrows_ram(mount: AcpfsMount) -> None:
    with open(mount.path / "big", "wb", buffering=0) as file:
        for n in paced(range(80)):
            assert file.write(BLOCK) == len(BLOCK)
            if n == 50:
                os.unlink(mount.path / "big")
        assert os.fstat(file.fileno()).st_size == 80 * len(BLOCK)
    mount.wait_status(lambda status: status["ram"]["used_bytes"] == 0)
    assert os.listdir(mount.path) == []


@only_passthrough
def test_a_backing_directory_that_fails_meanwhile_only_delays_it(
    mount: AcpfsMount, disk: FaultFs, tmp_path: Path
) -> None:
    path = mount.path / "big"
    rule = disk.fail("EIO", ["write"])
    child = Child(lambda: write(path, 2 * BUDGET))
    mount.wait_status(lambda status: status["held_files"])
    disk.wait_hits(rule, 2)
    os.stat(path)  # or the watchdog ends it with an error
    disk.clear()
    digest = child.result(WATCHDOG_S)
    mount.flush()
    assert stored(tmp_path, "big") == digest


@only_passthrough
def test_what_cannot_be_told_fails_at_close(mount: AcpfsMount, tmp_path: Path) -> None:
    with open(mount.path / "step-1", "wb", buffering=0) as file:
        for _ in paced(range(64)):
            assert file.write(BLOCK) == len(BLOCK)
        moved(mount, tmp_path)
        os.pwrite(file.fileno(), b"header", 8 * MIB + 100)
        with pytest.raises(OSError) as error:
            os.fsync(file.fileno())
        assert error.value.errno == errno.EIO
        with pytest.raises(OSError):
            file.close()
    assert not (tmp_path / "disk/step-1").exists()
    assert "overwritten where its bytes had left RAM" in mount.log.read_text() + "".join(
        p.read_text(errors="replace") for p in mount.runtime_dir.rglob("*.log")
    )


@pytest.mark.clause("S81")
@only_passthrough
def test_workers_killed_while_a_file_moves_out_of_ram(mount: AcpfsMount, tmp_path: Path) -> None:
    path = mount.path / "big"
    told, tell = os.pipe()
    child = Child(lambda: write(path, 3 * BUDGET, before_last=lambda: os.read(told, 1)))
    staging = tmp_path / "disk" / ".acpfs"
    for share in (8, 4, 2):  # of the budget, on the backing directory before the file is complete
        mount.wait_status(lambda _status, least=BUDGET // share: largest(staging) >= least)
        wait_gone(mount.kill_worker())
    os.write(tell, b".")
    digest = child.result()
    os.close(told)
    os.close(tell)
    assert mount.status()["worker"]["number"] == 4
    assert checksum(path) == digest
    mount.flush()
    assert stored(tmp_path, "big") == digest
    assert [p for p in staging.rglob("*") if p.is_file() and p.stat().st_size >= BUDGET] == []


def moved(mount: AcpfsMount, tmp_path: Path) -> None:
    """Wait until the first 10 MiB of the file that outgrows RAM, but for what stays, are on the
    backing directory alone.
    """
    mount.wait_status(lambda _status: largest(tmp_path / "disk" / ".acpfs") >= 12 * MIB)


def largest(directory: Path) -> int:
    """Bytes that the fullest file has, holes not counted."""
    sizes = [0]
    for file in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(file.stat().st_blocks * 512 if file.is_file() else 0)
    return max(sizes)


@pytest.mark.clause("S504")
@pytest.mark.parametrize("when_full", ["wait", "error"])
def test_what_may_be_read_while_it_is_written_does_not_move_and_fails_loudly(
    tmp_path: Path, disk: FaultFs, when_full: str
) -> None:
    """Opened to read and write, and expected to be small: its reader would find holes."""
    new = os.O_RDWR | os.O_CREAT | os.O_EXCL
    where = tmp_path / "seen", tmp_path / "mnt", "native-passthrough"
    with AcpfsMount(*where, ram=f"{BUDGET}", when_full=when_full) as mount:
        for step in (1, 2, 3):
            (mount.path / f"step-{step}").mkdir()
        with os.fdopen(os.open(mount.path / "step-1/state", new), "wb", buffering=0) as file:
            file.write(BLOCK)
        mount.ctl("wait", str(mount.path / "step-1/state"))
        wait_lock_taker(mount)
        path = mount.path / "step-2/state"
        with pytest.raises(OSError) as error:
            grow(os.open(path, new), BUDGET + 2 * SLACK)
        assert error.value.errno == errno.ENOSPC
        assert mount.status()["lane_choices"]["passthrough"] == 1
        mount.flush()
        assert not (tmp_path / "disk/step-2/state").exists()
        path.unlink()
        digest = grow(os.open(mount.path / "step-3/state", new), BLOCK_COUNT * len(BLOCK))
        assert mount.status()["lane_choices"]["passthrough"] == 1, (
            "files like it are not expected to fit"
        )
        mount.flush()
        assert stored(tmp_path, "step-3/state") == digest


BLOCK_COUNT = 16


def grow(fd: int, size: int) -> str:
    """Write through a descriptor, read some of it, and close it; returns the checksum of what was
    written.
    """
    digest = hashlib.sha256()
    with os.fdopen(fd, "r+b", buffering=0) as file:
        for done in paced(range(0, size, len(BLOCK))):
            piece = memoryview(BLOCK)
            while piece:
                count = file.write(piece)
                assert count
                digest.update(piece[:count])
                piece = piece[count:]
            assert os.pread(file.fileno(), 16, done) == BLOCK[:16]
    return digest.hexdigest()
