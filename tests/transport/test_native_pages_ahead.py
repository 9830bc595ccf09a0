"""Pages taken at the open for a file that is expected, on a real mount: they are not published,
whoever dies in the middle.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rig.mounts import AcpfsMount, MakeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.clause("S272"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]
MIB = 1 << 20
FILE = 40 * MIB
PIECE = os.urandom(128 << 10)


def write(path: Path, size: int) -> None:
    with open(path, "wb", buffering=0) as file:
        file.writelines(PIECE for _ in range(size // len(PIECE)))


def used(mount: AcpfsMount) -> int:
    return int(mount.status()["ram"]["used_bytes"])


@pytest.fixture
def mount(make_mount: MakeMount, tmp_path: Path) -> AcpfsMount:
    """It knows how large `model-N.pt` is."""
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", "native-passthrough", ram="256M")
    if "passthrough" not in mount.status()["lanes"]:
        pytest.skip("this kernel has no passthrough")
    write(mount.path / "model-0.pt", FILE)
    mount.flush()
    (mount.path / "model-0.pt").unlink()
    mount.flush()
    mount.wait_status(
        lambda status: status["ram"]["used_bytes"] == 0
    )  # the kernel tells of the last close in the background
    return mount


def test_a_worker_that_is_killed_in_the_middle_leaves_no_padding(mount: AcpfsMount) -> None:
    with open(mount.path / "model-1.pt", "wb", buffering=0) as file:
        mount.wait_status(lambda status: status["ram"]["used_bytes"] == FILE)
        file.write(PIECE * 8)
        mount.kill_worker()
        file.write(PIECE * 8)
        assert os.fstat(file.fileno()).st_size == 2 * MIB
    mount.flush()
    assert (mount.backing / "model-1.pt").read_bytes() == PIECE * 16
    assert (mount.path / "model-1.pt").read_bytes() == PIECE * 16
    mount.wait_status(lambda status: status["ram"]["used_bytes"] <= 4 * MIB)


def test_a_writer_that_is_killed_in_the_middle_leaves_no_padding(mount: AcpfsMount) -> None:
    path = mount.path / "model-1.pt"
    program = (
        f"import os; f = open({str(path)!r}, 'wb', 0); f.write(bytes({MIB})); "
        "os.kill(os.getpid(), 9)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    )
    mount.wait_status(lambda status: 0 < status["ram"]["used_bytes"] <= 2 * MIB)
    assert path.read_bytes() == bytes(MIB)
    mount.run("acpfs-ctl", str(mount.path), "discard", str(path))


def test_the_next_mount_finds_what_was_written_and_no_more(mount: AcpfsMount) -> None:
    path = mount.path / "model-1.pt"
    with (
        contextlib.suppress(OSError),
        open(path, "wb", buffering=0) as file,
    ):  # ENOTCONN: the mount is gone
        mount.wait_status(lambda status: status["ram"]["used_bytes"] == FILE)
        file.write(PIECE * 8)
        mount.kill_processes()
    mount.start()
    assert path.read_bytes() == PIECE * 8
    assert used(mount) <= 2 * MIB
    mount.run("acpfs-ctl", str(mount.path), "discard", str(path))


def test_small_writes_are_mapped_in_large_pages(mount: AcpfsMount) -> None:
    if not mount.status()["ram"]["huge_pages"].startswith("within_size"):
        pytest.skip("this kernel gives a tmpfs no huge pages")
    refused = huge_pages_refused()
    write(mount.path / "model-1.pt", FILE)
    with (
        open(mount.path / "model-1.pt", "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert sum(mapped[at] == PIECE[0] for at in range(0, FILE, len(PIECE))) == FILE // len(
            PIECE
        )
        mapped_kib = huge_kib()
    if not mapped_kib and huge_pages_refused() > refused:
        pytest.skip("this machine's memory is in pieces: the kernel had no huge page")
    assert mapped_kib > 0


def huge_pages_refused() -> int:
    """How often since its start this machine had none for a file."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("thp_file_fallback "))


def huge_kib() -> int:
    """Of what this process has mapped of files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found: Any = next(
        (
            line.split()[1]
            for line in lines
            if line.startswith(("ShmemPmdMapped", "FilePmdMapped")) and line.split()[1] != "0"
        ),
        0,
    )
    return int(found)
