"""Bytes that keeping the manifest costs the storage: 100,000 files saved, then single changes.

Usage: python -m bench.manifest [--files N] [--changes N]. Below transports: only the manifest, in
parts as it is written and, for comparison, as one file that is written whole each time. The storage
is a directory of its own on the machine's temporary file system.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.ram.state import StateDatabase
from acpfs.runtime.real import real_runtime
from acpfs.writeback.manifest.manifest import PART_LINES, Manifest
from bench.record import Report

SAVED_AT_ONCE = 1000
"""Files between two writings while they are saved."""
LIMIT = 20.0
"""A single change has to cost so many times less than the whole."""


class Counting(BackingDirectory):
    """Counts bytes and files."""

    written = 0
    files = 0

    def write_own(self, names: LowerPath, content: bytes) -> None:
        self.written += len(content)
        self.files += 1
        super().write_own(names, content)


def path(number: int) -> LowerPath:
    """As a job saves them: 100 files to a checkpoint."""
    return (b"runs", b"step-%06d" % (number // 100), b"shard-%05d.safetensors" % (number % 100))


def phases(files: int, changes: int, part_lines: int) -> dict[str, tuple[int, int, float]]:
    """Per phase: bytes, files and seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        given = real_runtime()
        lower = Counting(Path(scratch), "node", given)
        manifest = Manifest(
            StateDatabase(Path(scratch) / "state.db", given),
            lower,
            threading.RLock(),
            "node",
            part_lines,
        )
        found = {"saving": _phase(lower, lambda: _save(manifest, files))}
        found["single changes"] = _phase(lower, lambda: _change(manifest, files, changes))
        lower.disconnect()
        return found


def _phase(lower: Counting, work: Callable[[], None]) -> tuple[int, int, float]:
    lower.written = 0
    lower.files = 0
    began = time.perf_counter()
    work()
    return lower.written, lower.files, time.perf_counter() - began


def _save(manifest: Manifest, files: int) -> None:
    for number in range(files):
        manifest.put(path(number), f"{number:032x}", 1)
        if number % SAVED_AT_ONCE == SAVED_AT_ONCE - 1:
            manifest.write()


def _change(manifest: Manifest, files: int, changes: int) -> None:
    for number in range(changes):
        manifest.put(path(number * 7919 % files), f"{files + number:032x}", 1)
        manifest.write()


def measure(files: int, changes: int) -> Report:
    """Both ways, one after the other."""
    columns = [
        "what",
        "bytes, whole",
        "bytes, in parts",
        "times less",
        "files written",
        "whole",
        "in parts",
    ]
    report = Report("manifest", f"Bytes written for the manifest of {files:,} files", columns)
    in_parts = phases(files, changes, PART_LINES)
    whole = phases(files, changes, files)
    for phase, (size, count, seconds) in in_parts.items():
        before, _count, before_s = whole[phase]
        report.row(
            phase,
            f"{before:,}",
            f"{size:,}",
            f"{before / size:.1f}",
            f"{count:,}",
            f"{before_s:.1f} s",
            f"{seconds:.1f} s",
        )
        report.samples |= {f"{phase}: whole_bytes": [before], f"{phase}: in_parts_bytes": [size]}
    ratio = whole["single changes"][0] / in_parts["single changes"][0]
    report.bar(
        f"a single change writes at least {LIMIT:g} times less",
        f"{ratio:.1f} times",
        met=ratio >= LIMIT,
    )
    report.notes.append(
        f"saving: a writing after every {SAVED_AT_ONCE:,} files; single changes: {changes}, a "
        "writing after each"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--changes", type=int, default=50)
    arguments = parser.parse_args()
    sys.exit(measure(arguments.files, arguments.changes).finish())
