"""An ext4 on a loop device that can be limited, frozen, and lose its power, so that nobody's
processor pays for being slow storage.

`Disk` is the file system. `Limit` is the kernel's block throttle of a control group. `kept_back`
bounds how much that is not written the page cache may hold, as the clients of parallel file systems
do: a page cache that takes all hides what storage costs until it is full. Losing power is ext4's
own: it stops at once, nothing that waits in memory or in the journal is written, and the next mount
replays the journal. Everything is undone in the reverse order, also after a failure;
`release_loops` of tools/environment.sh undoes it after kill -9.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

SECTOR_BYTES = 512
ROOM_BYTES = 256 << 20
"""For the file system's own structures, its journal first of all."""
FREEZE = 0xC0045877
THAW = 0xC0045878
SHUT_DOWN = 0x8004587D
WITHOUT_THE_JOURNAL = struct.pack("I", 2)
PROBE_BYTES = 32 << 20
IN_FLIGHT_S = 0.5
"""What had been given to the device when the power went has arrived by then: at most what is kept
back.
"""
TOOLS = ("losetup", "mkfs.ext4")


class NoThrottleError(Exception):
    """No control group of this machine limits block devices, or none that this process may write
    to.
    """


class NoDiskError(Exception):
    """This machine gives no loop device, or no file system on one."""


def _run(*words: str) -> str:
    return subprocess.run(
        words, check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


class Disk:
    """A file system in an image of its own below `scratch`, with room for `size` bytes; a context
    manager.
    """

    def __init__(self, scratch: Path, size: int, name: str = "disk") -> None:
        self.path = scratch / name
        self._image = scratch / f"{name}.img"
        self._size = size
        self._undo = contextlib.ExitStack()
        self.device = Path()
        self.number = ""

    def __enter__(self) -> Disk:
        """Make and mount it.

        Raises:
            NoDiskError: no loop device, or no rights to mount.
        """
        self.path.mkdir()
        try:
            with open(self._image, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._size + ROOM_BYTES)
            self._undo.callback(self._image.unlink)
            self.device = Path(
                _run("losetup", "--find", "--show", "--direct-io=on", str(self._image))
            )
            self._undo.callback(_run, "losetup", "--detach", str(self.device))
            number = os.stat(self.device).st_rdev
            self.number = f"{os.major(number)}:{os.minor(number)}"
            _run(
                "mkfs.ext4",
                "-q",
                "-F",
                "-m",
                "0",
                "-E",
                "lazy_itable_init=0,lazy_journal_init=0",
                str(self.device),
            )
            self._undo.callback(self._umount)
            self.mount()
        except (OSError, subprocess.SubprocessError) as error:
            self._undo.close()
            raise NoDiskError(f"{error} {getattr(error, 'stderr', '') or ''}".strip()) from error
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._undo.close()

    def mount(self) -> None:
        """Mount it, and replay its journal."""
        _run("mount", str(self.device), str(self.path))

    def _umount(self) -> None:
        subprocess.run(
            ["umount", "-l", str(self.path)], check=False, capture_output=True, timeout=120
        )

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Whoever writes hangs for as long as the context lasts; reads go on."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, FREEZE, 0)
            try:
                yield
            finally:
                fcntl.ioctl(fd, THAW, 0)
        finally:
            os.close(fd)

    def lose_power(self) -> None:
        """From now on every call fails; what was not on the device is lost.

        `come_back` mounts what is left.
        """
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUT_DOWN, WITHOUT_THE_JOURNAL)
        finally:
            os.close(fd)

    def come_back(self, path: Path, timeout_s: float = 60.0) -> None:
        """Mount what a loss of power left at `path`, by a device of its own, with its journal
        replayed.

        The image is what the disk had. Whoever still holds what lost its power, as other mount name
        spaces do, does not matter.
        """
        deadline = time.monotonic() + timeout_s
        while subprocess.run(
            ["umount", str(self.path)], check=False, capture_output=True, timeout=120
        ).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.path} is still in use")
            time.sleep(0.05)
        time.sleep(IN_FLIGHT_S)
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(self._image))
        self._undo.callback(_run, "losetup", "--detach", device)
        path.mkdir()
        _run("mount", device, str(path))
        self._undo.callback(
            subprocess.run,
            ["umount", "-l", str(path)],
            check=False,
            capture_output=True,
            timeout=120,
        )

    def read_bytes(self) -> int:
        """How many bytes were ever read from the device."""
        return int(Path(f"/sys/dev/block/{self.number}/stat").read_text().split()[2]) * SECTOR_BYTES

    def settle(self) -> None:
        """Return when everything is written."""
        _run("sync", "-f", str(self.path))


# -- limits


@contextlib.contextmanager
def kept_back(disk: Disk, size: int) -> Iterator[bool]:
    """The page cache keeps at most `size` bytes of this disk that are not written; yields whether
    the kernel can (Linux 6.2).
    """
    place = Path(f"/sys/class/bdi/{disk.number}")
    try:
        try:
            (place / "strict_limit").write_text("1")
            (place / "max_bytes").write_text(str(size))
        except OSError:
            yield False
        else:
            yield True
    finally:
        for name, usual in (("max_ratio", "100"), ("strict_limit", "0")):
            with contextlib.suppress(OSError):
                (place / name).write_text(usual)


def _limits(number: str, reads: int, writes: int) -> list[tuple[Path, str]]:
    """(file, words) for this process' control groups, and for what the kernel writes by itself; 0:
    no limit.

    Raises:
        NoThrottleError: no control group of this machine limits block devices.
    """
    found: dict[Path, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _hierarchy, controllers, group = line.split(":", 2)
        for top in (
            Path("/sys/fs/cgroup"),
            Path("/sys/fs/cgroup/unified"),
            Path("/sys/fs/cgroup/blkio"),
        ):
            below = top / group.lstrip("/")
            if (
                "blkio" in controllers.split(",")
                and (below / "blkio.throttle.read_bps_device").exists()
            ):
                for place in {
                    below,
                    top,
                }:  # version 1: what the page cache writes back belongs to the topmost
                    found[place / "blkio.throttle.read_bps_device"] = f"{number} {reads}"
                    found[place / "blkio.throttle.write_bps_device"] = f"{number} {writes}"
            if not controllers and (below / "io.max").exists():
                found[below / "io.max"] = f"{number} rbps={reads or 'max'} wbps={writes or 'max'}"
    if not found:
        raise NoThrottleError(
            "no control group limits block devices here (blkio.throttle of version 1, io.max of "
            "version 2)"
        )
    return list(found.items())


@contextlib.contextmanager
def limited(disk: Disk, reads: int, writes: int = 0) -> Iterator[None]:
    """Bytes per second that the device takes and gives; 0: no limit.

    Raises:
        NoThrottleError: this machine has no such limit, or what it has does not hold for writes.
    """
    undo = contextlib.ExitStack()
    with undo:
        for (file, words), (_, none) in zip(
            _limits(disk.number, reads, writes), _limits(disk.number, 0, 0), strict=True
        ):
            try:
                file.write_text(words)
            except OSError as error:
                raise NoThrottleError(f"{file}: {error.strerror}") from error
            undo.callback(file.write_text, none)
        if writes and (speed := _written_per_s(disk)) > 2 * writes:
            raise NoThrottleError(
                "the control group's limit does not hold for what the page cache writes "
                f"({speed / 1e6:.0f} MB/s)"
            )
        yield


def _written_per_s(disk: Disk) -> float:
    """Bytes per second through the page cache, with fsync."""
    path = disk.path / "probe"
    begun = time.monotonic()
    with open(path, "wb", buffering=0) as file:
        file.write(bytes(PROBE_BYTES))
        os.fsync(file.fileno())
    seconds = time.monotonic() - begun
    path.unlink()
    return PROBE_BYTES / seconds
