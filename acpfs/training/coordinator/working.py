"""Whether a silent rank's process works, as far as the kernel shows it to others.

Linux; not thread-safe.

It knows processes of this node, and nothing of jobs. A process works when it uses processor time or
moves bytes, or when one of its threads waits for a storage: in state D, or for the answer of a FUSE
mount. One that is stopped (SIGSTOP, a debugger, a frozen container) does not, and neither does one
that only waits, for a minute at most: nothing shows whether that will ever end. Threads that wait
for the interpreter's lock wake up two hundred times per second, which is some thousandths of a
processor: that much is no work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from acpfs.training.coordinator.exiting import Processes

LOOK_S = 1.0
IDLE_S = 60.0
"""So long a silent process may show no work: as long as a job in which nothing moves, before ranks
that hang are named.
"""
BUSY_S = 600.0
"""So long it may be silent at all; a loop in C without end works, too."""
SHARE = 0.03
"""Of a processor."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WAITS_FOR_FUSE = "request_wait_answer"
_FROZEN = ("do_freezer_trap", "__refrigerator")


@dataclass(slots=True)
class _Silence:
    """Of one process, from the first look on."""

    since: float
    worked_at: float
    looked_at: float
    ticks: int
    moved: bytes


@dataclass(frozen=True, slots=True)
class _Threads:
    stopped: bool
    waits_for_storage: bool


class Working:
    """Of this node's ranks.

    `at_work` is called about once per `LOOK_S`, with those that are silent then.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._silences: dict[int, _Silence] = {}

    def at_work(self, silent: Iterable[int], now: float) -> list[int]:
        """Those of these ranks that live and work; who is not asked for has spoken."""
        asked = set(silent)
        self._silences = {
            rank: silence for rank, silence in self._silences.items() if rank in asked
        }
        return sorted(rank for rank in asked if self._works(rank, now))

    def _works(self, rank: int, now: float) -> bool:
        pid = self._processes.pid(rank)
        ticks = self._processes.ticks(rank)
        if pid is None or ticks is None:
            self._silences.pop(rank, None)
            return False  # another node's, or it ends
        threads = _threads(pid)
        moved = _moved(pid)
        if threads.stopped:
            self._silences.pop(rank, None)
            return False
        silence = self._silences.setdefault(rank, _Silence(now, now, now, ticks, moved))
        computes = ticks - silence.ticks > SHARE * TICKS_PER_S * (now - silence.looked_at)
        if computes or moved != silence.moved or threads.waits_for_storage:
            silence.worked_at = now
        silence.looked_at = now
        silence.ticks = ticks
        silence.moved = moved
        return now - silence.worked_at <= IDLE_S and now - silence.since <= BUSY_S


def _threads(pid: int) -> _Threads:
    """What its threads do; one that ended meanwhile does nothing."""
    stopped = False
    waits = False
    for task in _listed(Path(f"/proc/{pid}/task")):
        with suppress(OSError, IndexError):
            state = (task / "stat").read_bytes().rpartition(b")")[2].split()[0]
            waits_in = (task / "wchan").read_text(encoding="ascii") if state in b"SD" else ""
            stopped = stopped or state in b"Tt" or waits_in.startswith(_FROZEN)
            waits = waits or state == b"D" or waits_in.startswith(_WAITS_FOR_FUSE)
    return _Threads(stopped, waits)


def _listed(directory: Path) -> list[Path]:
    with suppress(OSError):
        return list(directory.iterdir())
    return []


def _moved(pid: int) -> bytes:
    """What it has read and written; empty where that may not be seen."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/io").read_bytes()
    return b""
