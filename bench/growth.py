"""What saved files cost later: memory per file of the worker, and a takeover with all of them.

Usage: python -m bench.growth [--files N …]. One mount; files of some bytes are saved through it
until there are as many as each N, persisted, and the worker is killed. "answered" is from its death
to an answer that only the next worker can give. On a machine that does other work trust processor
time and counts.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench import places
from bench.fresh_mount import processor_s
from bench.record import Report
from bench.start import FILES_PER_DIRECTORY, takeover
from tests.rig.mounts import AcpfsMount

CONTENT = b"x" * 64
TAKEOVER_S_MAX = 0.2
MEMORY_BYTES_MAX = 1 << 30
NAMES = 1_000_000
"""That are to fit this."""


def save(directory: Path, first: int, end: int) -> None:
    for number in range(first, end):
        if number % FILES_PER_DIRECTORY == 0:
            (directory / f"d{number // FILES_PER_DIRECTORY}").mkdir()
        path = directory / f"d{number // FILES_PER_DIRECTORY}" / f"f{number}"
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(descriptor, CONTENT)
        os.close(descriptor)


def anonymous_bytes(pid: int) -> int:
    """Memory that is the process' own, not the RAM tier's."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
        kib = next(line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kib) << 10


def state_bytes(mount: AcpfsMount) -> int:
    """Of the state database, which lies in memory as well."""
    return sum(
        path.stat().st_size
        for path in mount.runtime_dir.rglob("state*")
        if path.is_file() and not path.is_symlink()
    )


def measure(counts: list[int]) -> Report:
    report = Report(
        "growth",
        "Memory and takeover by the number of saved files",
        [
            "files",
            "worker's own memory, MiB",
            "bytes per file",
            "state database, bytes per file",
            "next worker answered, s",
            "its processor s by then",
            "its own memory, MiB",
        ],
    )
    with places.scratch() as scratch:
        (scratch / "backing").mkdir()
        with AcpfsMount(scratch / "backing", scratch / "mnt", "native", ram="64M") as mount:
            empty = anonymous_bytes(mount.pid)
            own = empty
            saved = 0
            state = 0
            answered_s = 0.0
            for count in counts:
                save(mount.path, saved, count)
                saved = count
                mount.flush()
                mount.wait_drained()
                own = anonymous_bytes(mount.pid)
                state = state_bytes(mount)
                answered_s = takeover(mount)
                used_s = processor_s(mount.pid)
                report.row(
                    f"{count:,}",
                    f"{own / (1 << 20):.0f}",
                    f"{(own - empty) / count:.0f}",
                    f"{state / count:.0f}",
                    f"{answered_s:.3f}",
                    f"{used_s:.2f}",
                    f"{anonymous_bytes(mount.pid) / (1 << 20):.0f}",
                )
    per_file = (own - empty + state) / saved
    report.notes.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    report.bar(
        f"takeover within {TAKEOVER_S_MAX} s",
        f"{answered_s:.3f} with {saved:,} files",
        met=answered_s <= TAKEOVER_S_MAX,
    )
    report.bar(
        f"{NAMES:,} names within 1 GiB",
        f"{per_file * NAMES / (1 << 20):.0f} MiB by {saved:,}",
        met=per_file * NAMES + empty <= MEMORY_BYTES_MAX,
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, nargs="+", default=[1_000, 20_000, 100_000])
    arguments = parser.parse_args()
    sys.exit(measure(arguments.files).finish())
