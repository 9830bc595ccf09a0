"""Who waits, for the contracts of `acpfs.control.reports`: writers for room in RAM, and calls for
whatever they wait for.

And who is waited for: processes that are in the middle of a file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from acpfs.control.reports import (
    OpenWriter,
    WaitingCallReport,
    WaitingReport,
    WrittenFileReport,
)
from acpfs.filesystem.records import WaitingWriter, WrittenFile
from acpfs.processes import directory_of
from acpfs.types import Ino

TOLD_AFTER_S = 2.0
"""Calls that wait for less are ordinary."""
TOLD_MAX = 20
WRITERS_MAX = 8
"""Of one file."""


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A request that has not got its answer."""

    call: str
    ino: Ino
    """What it is about: a file, or the directory of the name."""
    pid: int
    since_s: float
    """Monotonic time."""


def writer(one: WaitingWriter) -> WaitingReport:
    """Of those who wait for room."""
    return WaitingReport(
        os.fsdecode(one.path),
        one.pid or None,
        _command(one.pid),
        one.purpose,
        one.wanted_bytes,
        one.since,
        one.reason,
    )


def calls(
    waiting: Iterable[WaitingCall], path_of: Callable[[Ino], bytes], now: float
) -> list[WaitingCallReport]:
    """Those that have waited for some time, the longest first. `now`: monotonic, seconds."""
    long = sorted(
        (one for one in waiting if now - one.since_s >= TOLD_AFTER_S), key=lambda one: one.since_s
    )[:TOLD_MAX]
    return [
        WaitingCallReport(
            os.fsdecode(path_of(one.ino)),
            one.pid or None,
            _command(one.pid),
            one.call,
            now - one.since_s,
        )
        for one in long
    ]


def open_writers(pids: Iterable[int]) -> list[OpenWriter]:
    """Of processes that are in the middle of a file."""
    return [OpenWriter(pid, _command(pid)) for pid in itertools.islice(pids, WRITERS_MAX)]


def written(files: Iterable[WrittenFile], now: float, wall: float) -> list[WrittenFileReport]:
    """Files that somebody writes. `now`: monotonic, seconds; `wall`: the same moment for people."""
    return [
        WrittenFileReport(
            os.fsdecode(one.path), wall - (now - one.since_s), open_writers(one.writers)
        )
        for one in files
    ]


def _command(pid: int) -> str | None:
    directory = directory_of(pid)
    try:
        return (
            None
            if directory is None
            else (directory / "comm").read_text(errors="backslashreplace").rstrip("\n")
        )
    except OSError:
        return None
