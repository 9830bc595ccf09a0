"""Directories to measure: a scratch directory on disk, a tmpfs, a limited backing directory,
pyfuse3's example, a mount of acpfs.

Each is a context manager that leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.rig.faultfs import is_mounted
from tests.rig.mounts import AcpfsMount

START_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 600.0
WATCHDOG_S = 3000.0
CHUNK = 8 << 20


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """An empty directory on the disk that $TMPDIR lies on; on a tmpfs /tmp, that of the
    repository.
    """
    base = os.environ.get("TMPDIR", "/tmp")
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", base], capture_output=True, text=True, check=True
    ).stdout.strip()
    directory = Path(
        tempfile.mkdtemp(
            prefix="acpfs-bench-", dir=base if kind != "tmpfs" else Path(__file__).parents[1]
        )
    )
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def tmpfs(path: Path, huge: str = "never") -> Iterator[Path]:
    """A tmpfs of its own, with or without huge pages."""
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size=75%,huge={huge}", "bench", str(path)], check=True
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def served(program: str, source: Path, path: Path, *arguments: str) -> Iterator[Path]:
    """A source directory as one of the file systems here shows it: `bench.passthrough_example` or
    `bench.slow_storage`.
    """
    source.mkdir(exist_ok=True)
    path.mkdir()
    command = [sys.executable, "-m", program, str(source), str(path), *arguments]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_mounted(path):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{program} did not mount")
            time.sleep(0.02)
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def acpfs(
    backing: Path, path: Path, transport: str = "libfuse", ram: str = "40%"
) -> Iterator[AcpfsMount]:
    """acpfs with 40 % of memory as its RAM tier, or so many bytes; transports, and `prefault = 0`,
    as `tests.rig.mounts` has them.
    """
    backing.mkdir(exist_ok=True)
    with AcpfsMount(backing, path, transport, ram=ram, watchdog_s=WATCHDOG_S) as mount:
        yield mount


def warm(path: Path, size: int) -> None:
    """Write so many bytes to a new file on a tmpfs, and free them: what comes next finds memory
    that the host has backed.
    """
    chunk = memoryview(bytes(CHUNK))
    with open(path, "wb", buffering=0) as file:
        file.writelines(chunk[: size - offset] for offset in range(0, size, CHUNK))
    assert path.stat().st_blocks * 512 >= size
    path.unlink()


def forget_pages(path: Path) -> None:
    """Drop a file's clean pages, so that the next read comes from its file system."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
