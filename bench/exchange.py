"""Reading on a node what another one has in RAM, against reading it from the storage; and how often
the storage is read by several that read one cold file together.

Usage: python -m bench.exchange [--mib M] [--rounds N] [--members N] [--look]. As root. All members
are on this machine and reach each other by its loopback, so they share its cores and its page
cache: the time of the second part says nothing, and what is counted is what members asked the
storage for, whoever answered. `--look` keeps nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.record import MB, MIB, Report, lower_quartile
from bench.storage import slow_storage
from tests.rig.mounts import AcpfsMount

BANDWIDTH = 300 * MB
FASTER_MIN = 3.0
READS_MAX = 1.2
OFF = "from the storage"
WAYS: dict[str, dict[str, object]] = {
    OFF: {},
    "from the member that has it": {"exchange": "127.0.0.1"},
    "the same, not encrypted": {"exchange": "127.0.0.1", "no_peer_encryption": True},
}


@contextlib.contextmanager
def members(
    backing: Path, scratch: Path, count: int, ram_bytes: int, options: dict[str, object]
) -> Iterator[list[AcpfsMount]]:
    """Mounts of one backing directory that know each other."""
    made: list[AcpfsMount] = []
    with contextlib.ExitStack() as stack:
        for number in range(count):
            settings: dict[str, Any] = {"node_id": f"n{number}", "heartbeat": 0.5, **options}
            path = scratch / f"n{number}"
            made.append(
                stack.enter_context(
                    AcpfsMount(
                        backing, path, "native", ram=str(ram_bytes), watchdog_s=1200, **settings
                    )
                )
            )
        for one in made:
            one.wait_status(lambda status: status["cluster"]["live"] >= count - 1)
        yield made


def forget_pages(path: Path) -> None:
    """What the kernel has of a file goes."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def read_s(path: Path, size: int) -> float:
    """Time to read a file."""
    buffer = bytearray(16 * MIB)
    began = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        left = size
        while left:
            got = file.readinto(buffer)
            assert got
            left -= got
    return time.monotonic() - began


def reads(
    backing: Path, scratch: Path, size: int, rounds: int, options: dict[str, object]
) -> list[float]:
    """Seconds that a member takes for a file that another one has just saved."""
    found = []
    with members(backing, scratch, 2, 3 * size, options) as (saves, loads):
        data = os.urandom(size)
        for number in range(rounds + 1):
            path = f"model-{number}"
            (saves.path / path).write_bytes(data)
            saves.flush()
            forget_pages(backing / path)
            found.append(read_s(loads.path / path, size))
            for one in (saves, loads):
                one.wait_status(lambda status: not status["counters"].get("warming"))
                (one.path / path).unlink(missing_ok=True)
                one.flush()
        got = loads.status()["counters"]["exchange_got_bytes"]
        assert (got > 0) == bool(options), got
    return found[1:]  # without the first, which connects


def together(backing: Path, scratch: Path, count: int, size: int) -> float:
    """How many times the storage is asked for a file that so many read at the same time."""
    (backing / "cold").write_bytes(os.urandom(size))
    options: dict[str, object] = {"exchange": "127.0.0.1"}
    with (
        members(backing, scratch, count, size + 32 * MIB, options) as made,
        ThreadPoolExecutor(count) as readers,
    ):
        list(readers.map(lambda one: read_s(one.path / "cold", size), made))
        for one in made:
            one.wait_status(lambda status: status["counters"]["warmed_files"] >= 1)
        got = sum(one.status()["counters"]["exchange_got_bytes"] for one in made)
    return float(count * size - got) / size


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--mib", type=int, default=192)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--members", type=int, default=8)
    options.add_argument("--together-mib", type=int, default=96)
    options.add_argument("--look", action="store_true")
    given = options.parse_args()
    size = given.mib * MIB
    report = Report(
        "exchange",
        "Reading what another node has in RAM",
        ["way", "MB/s", "times as fast"],
    )
    with (
        tempfile.TemporaryDirectory(prefix="acpfs-exchange-") as directory,
        slow_storage(Path(directory), 4 * size + 512 * MIB, BANDWIDTH) as storage,
    ):
        scratch = Path(directory)
        report.notes.append(f"storage: {storage.how}")
        took: dict[str, float] = {}
        for number, (name, settings) in enumerate(WAYS.items()):
            backing = storage.path / f"backing{number}"
            backing.mkdir()
            samples = reads(backing, scratch / f"way{number}", size, given.rounds, settings)
            report.samples[f"{name}_s"] = samples
            took[name] = lower_quartile(samples)
            report.row(name, f"{size / took[name] / MB:.0f}", f"{took[OFF] / took[name]:.2f}")
        for name in list(WAYS)[1:]:
            faster = took[OFF] / took[name]
            report.bar(
                f"{name}: at least {FASTER_MIN:g} times as fast as a storage of 300 MB/s",
                f"{faster:.2f}",
                met=faster >= FASTER_MIN,
            )
        backing = storage.path / "together"
        backing.mkdir()
        asked = together(backing, scratch / "together", given.members, given.together_mib * MIB)
        report.notes.append(
            f"{given.members} members that read a cold file of {given.together_mib} MiB together "
            f"asked the storage for {asked:.2f} times its bytes"
        )
        report.bar(
            f"{given.members} members, one cold file: at most {READS_MAX:g} times its bytes from "
            "the storage",
            f"{asked:.2f}",
            met=asked <= READS_MAX,
        )
    return report.finish(keep=not given.look)


if __name__ == "__main__":
    sys.exit(main())
