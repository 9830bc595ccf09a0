"""Several writers of small pieces whose files outgrow RAM: the daemon's processor time per piece,
and bytes per second.

Usage: python -m bench.small_pieces [--writers N] [--piece BYTES] [--file-mib N] [--ram-mib N]. The
backing directory is on a tmpfs, so what is measured is acpfs. A file begins in RAM and goes on in
its staging file; what is reported is the whole of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from bench import places
from bench.native import cpu_s
from bench.record import Report
from tests.rig.mounts import AcpfsMount

MIB = 1 << 20
ROUNDS = 3


def write(path: Path, size: int, piece: int) -> None:
    """One writer: in a process of its own, as its interpreter's lock would else be what is
    measured.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    content = os.urandom(piece)
    for _ in range(size // piece):
        os.write(fd, content)
    os.close(fd)


def together(directory: Path, writers: int, size: int, piece: int) -> float:
    """Seconds until the last of them has closed its file."""
    begun = time.monotonic()
    children = []
    for number in range(writers):
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(OSError):
                write(directory / f"f{number}", size, piece)
                status = 0
            os._exit(status)
        children.append(child)
    for child in children:
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("a writer failed")
    return time.monotonic() - begun


def measure(arguments: argparse.Namespace) -> Report:
    report = Report(
        "small_pieces",
        f"{arguments.writers} writers of {arguments.piece} bytes at a time, {arguments.file_mib} "
        "MiB each, "
        f"through {arguments.ram_mib} MiB of RAM",
        ["round", "MB/s", "daemon's processor time per piece"],
    )
    size = arguments.file_mib * MIB
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        base = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        (base / "backing").mkdir()
        mount = stack.enter_context(
            AcpfsMount(
                base / "backing",
                scratch / "mount",
                "native-direct",
                ram=f"{arguments.ram_mib}M",
                watchdog_s=places.WATCHDOG_S,
            )
        )
        for number in range(ROUNDS):
            home = mount.path / f"round-{number}"
            home.mkdir()
            before = cpu_s(mount.pid)
            seconds = together(home, arguments.writers, size, arguments.piece)
            spent = cpu_s(mount.pid) - before
            total = arguments.writers * size
            per_piece = spent / (total / arguments.piece) * 1e6
            report.row(str(number), f"{total / seconds / 1e6:.1f}", f"{per_piece:.0f} µs")
            report.samples.setdefault("bytes_per_s", []).append(total / seconds)
            report.samples.setdefault("processor us per piece", []).append(per_piece)
            mount.flush()
            for path in home.iterdir():
                path.unlink()
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--piece", type=int, default=4096)
    parser.add_argument("--file-mib", type=int, default=64)
    parser.add_argument("--ram-mib", type=int, default=64)
    parser.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to save what was found",
    )
    options = parser.parse_args()
    sys.exit(measure(options).finish(keep=options.keep))
