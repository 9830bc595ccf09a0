"""Who waits, for the contracts of `acpfs.control.reports`: writers for room in RAM, and calls for whatever they wait for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from acpfs.control.reports import WaitingCallReport, WaitingReport
from acpfs.filesystem.records import WaitingWriter
from acpfs.processes import directory_of
from acpfs.types import Ino

TOLD_AFTER_S = 2.0
"""Calls that wait for less are ordinary."""
TOLD_MAX = 20


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
