"""Why a mapped read through the mount is slower than from tmpfs: page faults, huge mappings and
addresses, counted.

Usage: python -m bench.mapped_reads [--mib M] [--rounds N]. One file on a tmpfs with pages of 4 KiB,
on one with huge pages, and in mounts, written in pieces of a size and by a lane; and the tier file
behind it. Each is mapped in turn by a process of its own, as torch.load(mmap=True) does it, which
reads a byte of every page. Counts do not depend on what else the machine does; times do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import places
from bench.record import MIB, Report, lower_quartile
from tests.rig.mounts import AcpfsMount

PAGE = 4096
ODD_BYTES = 3 * PAGE
"""Beyond whole MiB: a checkpoint is no multiple of a huge page."""
WRITTEN = {
    "tmpfs, 4 KiB pages": ("never", MIB),
    "tmpfs, huge pages": ("always", MIB),
    "mount without passthrough, by 1 MiB": ("native-direct", MIB),
    "mount, passthrough, by 128 KiB": ("native-passthrough", MIB // 8),
    "mount, passthrough, by 128 KiB, size known": ("native-passthrough", MIB // 8),
    "mount, passthrough, by 1 MiB": ("native-passthrough", MIB),
    "mount, passthrough, by 4 MiB": ("native-passthrough", 4 * MIB),
}
"""What is compared: (huge= of the tmpfs, or what the mount is tested on; bytes of a write)."""
KNOWN = "size known"
"""A file like it was saved before."""


def asked(path: Path) -> dict[str, float]:
    """`bench.mapped_touch` in a process of its own."""
    words = [sys.executable, "-m", "bench.mapped_touch", str(path)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def tier_file(mount: AcpfsMount, size: int) -> Path:
    """The newest one of that size; a version may have a copy for a while."""
    found = [
        path
        for path in (mount.runtime_dir / "tiers").rglob("*")
        if path.is_file() and path.stat().st_size == size
    ]
    return max(found, key=lambda path: path.stat().st_ino)


def files(stack: contextlib.ExitStack, size: int) -> dict[str, Callable[[], Path]]:
    """All that is compared, by name."""
    scratch = stack.enter_context(places.scratch())
    found: dict[str, Callable[[], Path]] = {}
    for number, (name, (kind, piece)) in enumerate(WRITTEN.items()):
        if kind.startswith("native"):
            (backing := scratch / f"backing{number}").mkdir()
            mount = stack.enter_context(
                AcpfsMount(backing, scratch / f"mnt{number}", kind, ram=f"{4 * size // MIB}M")
            )
            if name.endswith(KNOWN):
                save(mount.path / "file", size, piece)
                (mount.path / "file").unlink()
                mount.flush()
            save(mount.path / "file", size, piece)
            mount.flush()
            found[name] = partial(Path, mount.path / "file")
            found[f"its tier file ({number})"] = partial(tier_file, mount, size)
        else:
            save(
                stack.enter_context(places.tmpfs(scratch / f"tmpfs{number}", huge=kind)) / "file",
                size,
                piece,
            )
            found[name] = partial(Path, scratch / f"tmpfs{number}" / "file")
    return found


def save(path: Path, size: int, piece: int) -> None:
    content = os.urandom(piece)
    with open(path, "wb", 0) as file:
        file.writelines(content[: size - at] for at in range(0, size, piece))


def measure(size: int, rounds: int) -> Report:
    columns = [
        "file",
        "page faults",
        "mapped in huge pages",
        "address beyond 2 MiB",
        "open and mmap, ms",
        "touch, ms, best",
        "lower quartile",
    ]
    report = Report(
        "mapped_reads",
        f"Touching every page of a mapped file of {size // MIB} MiB and {size % MIB} bytes",
        columns,
    )
    with contextlib.ExitStack() as stack:
        compared = files(stack, size)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in compared}
        for number in range(rounds + 1):
            for name, path in compared.items():
                answer = asked(path())
                if number:  # the first one warms up
                    found[name].append(answer)
    for name, answers in found.items():
        last = answers[-1]
        touched = [answer["touch_s"] * 1000 for answer in answers]
        huge = f"{last['huge_kib'] / 1024:.0f} of {last['rss_kib'] / 1024:.0f} MiB"
        beyond = ", ".join(
            sorted({f"{int(answer['past_2_mib']) // 1024} KiB" for answer in answers})
        )
        opened = min(answer["open_s"] for answer in answers) * 1000
        report.row(
            name,
            int(last["faults"]),
            huge,
            beyond,
            f"{opened:.2f}",
            f"{min(touched):.2f}",
            f"{lower_quartile(touched):.2f}",
        )
        report.samples[f"{name}: touch, ms"] = touched
        report.samples[f"{name}: open and mmap, ms"] = [
            answer["open_s"] * 1000 for answer in answers
        ]
        report.samples[f"{name}: faults"] = [answer["faults"] for answer in answers]
    report.notes.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    sys.exit(measure(arguments.mib * MIB + ODD_BYTES, arguments.rounds).finish())
