"""A coordinator that died, or was never started, gets a successor, so that the next death finds a
standby. Started by whoever commands.

It stands by like any other: ranks are told of its address, call it, and register. It runs on the
node of the one that starts it; on which node the dead one was may not be known, and that node may
be dead as well. Knows processes, and nothing of what coordinators say.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from acpfs.logger import get_logger

_log = get_logger(__name__)
GONE_S = 3.0
"""So long one may be away: a connection ends, and is made again."""
AGAIN_S = 15.0
"""Until the next one is started, where it did not come: a machine that is short of memory kills
this one too.
"""


@dataclass
class Successors:
    """Of one coordinator. Not thread-safe; never waits."""

    words: tuple[str, ...]
    """The command, but for the number, and whom it is to call."""
    wanted: int = 0
    """So many the job is to have: on one node nobody else starts the second one."""
    _gone_since: dict[int, float] = field(default_factory=dict)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def look(self, known: Mapping[int, str], present: Iterable[int], now: float) -> list[int]:
        """Addresses of the job's coordinators, and the numbers of those that are there: who is
        started now.
        """
        self._started = [process for process in self._started if process.poll() is None]
        gone = (known.keys() | set(range(self.wanted))) - set(present)
        self._gone_since = {number: self._gone_since.get(number, now) for number in gone}
        due = sorted(number for number, since in self._gone_since.items() if now >= since + GONE_S)
        for number in due:
            self._gone_since[number] = now + AGAIN_S - GONE_S
            self._start(
                number,
                [
                    f"--peer={other}={address}"
                    for other, address in known.items()
                    if other not in gone
                ],
            )
        return due

    def dismiss(self) -> None:
        """Nobody needs those that were started here any more."""
        for process in self._started:
            process.terminate()

    def _start(self, number: int, peers: list[str]) -> None:
        _log.warning("a coordinator is missing: one is started", number=number)
        try:
            self._started.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "acpfs.training.coordinator",
                        *self.words,
                        "--number",
                        str(number),
                        *peers,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        except OSError as error:
            _log.error("it cannot be started", number=number, error=str(error))
