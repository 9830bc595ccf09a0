"""Slow shared storage for measurements: a limited disk where the kernel can limit one, else the
tests' pass-through file system.

It can be frozen and lose its power. `how` says in words what it is, because it decides what the
figures are worth.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench.disk import Disk, NoDiskError, NoThrottleError, kept_back, limited
from tests.rig.faultfs import FaultFs

KEPT_BACK_BYTES = 64 << 20
WATCHDOG_S = 1800.0
MB = 1_000_000


class Storage:
    """`path` is a directory on it."""

    def __init__(self, path: Path, how: str, disk: Disk | None, process: FaultFs | None) -> None:
        self.path = path
        self.how = how
        self._disk = disk
        self._process = process

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Who writes hangs."""
        if self._process is not None:
            self._process.freeze(["writes"])
            try:
                yield
            finally:
                self._process.thaw()
        else:
            assert self._disk is not None
            with self._disk.frozen():
                yield

    @property
    def can_lose_power(self) -> bool:
        return self._disk is not None

    def lose_power(self) -> None:
        """Every call fails from now on."""
        assert self._disk is not None
        self._disk.lose_power()

    def come_back(self, path: Path) -> Path:
        """What was left is mounted at `path`, without limit; returns where in it the storage's
        directory is.
        """
        assert self._disk is not None
        if self._process is None:
            self._disk.come_back(path)
            return path
        self._process.abort()
        self._disk.come_back(path)
        return path / self._process.source.relative_to(self._disk.path)

    def settle(self) -> None:
        """Return when all is on the disk."""
        if self._disk is not None:
            self._disk.settle()
        else:
            subprocess.run(["sync", "-f", str(self.path)], check=True, timeout=300)


@contextlib.contextmanager
def slow_storage(scratch: Path, size: int, bytes_per_s: int) -> Iterator[Storage]:
    """Storage with room for `size` bytes that takes and gives so many bytes per second."""
    speed = f"{bytes_per_s // MB} MB/s"
    with contextlib.ExitStack() as stack:
        disk: Disk | None = None
        why = ""
        try:
            disk = stack.enter_context(Disk(scratch, size))
        except NoDiskError as error:
            why = f"no disk of its own ({str(error)[:80]}), so power cannot be taken from it"
        if disk is not None:
            try:
                stack.enter_context(limited(disk, bytes_per_s, bytes_per_s))
                bounded = stack.enter_context(kept_back(disk, KEPT_BACK_BYTES))
            except NoThrottleError as error:
                why = str(error)
            else:
                if not bounded:
                    subprocess.run(
                        ["mount", "-o", "remount,sync", str(disk.path)], check=True, timeout=60
                    )
                kept = (
                    f"its client keeps back at most {KEPT_BACK_BYTES >> 20} MiB"
                    if bounded
                    else "each write waits for it"
                )
                yield Storage(
                    disk.path,
                    f"an ext4 of its own that the kernel holds to {speed}; {kept}, as for shared "
                    "storage",
                    disk,
                    None,
                )
                return
        source = disk.path / "source" if disk is not None else scratch / "source"
        process = stack.enter_context(
            FaultFs(
                source, scratch / "storage", bandwidth=bytes_per_s, sync=True, watchdog_s=WATCHDOG_S
            )
        )
        how = (
            f"a process that passes {speed} on and takes the same cores as everything else "
            f"(which makes all rows worse): {why}"
        )
        yield Storage(process.path, how, disk, process)
