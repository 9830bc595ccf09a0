"""What the application was writing at a moment, by its own journal."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.drill.spec import Call


@dataclass
class Write:
    """One file from the first call that changes it until its close."""

    began_s: float
    ended_s: float = float("inf")
    size: int = 0
    """Bytes that were handed over until its end."""


class UnderWay:
    """Follows the journals of one stand's applications, one after the other."""

    def __init__(self) -> None:
        self._writes: list[Write] = []
        self._open: dict[int, Write] = {}
        self._moments: list[float] = []

    def note(self, moment_s: float | None = None) -> None:
        """Something dies then, or now."""
        self._moments.append(time.monotonic() if moment_s is None else moment_s)

    def follow(self, calls: list[Call]) -> None:
        """Take over calls; the last one may lack an answer or have failed: then the application is
        at its end.
        """
        for call in calls:
            self._one(call)
            if call.errno:
                self.end()

    def end(self) -> None:
        """The application died, or has given up what it had open."""
        for write in self._open.values():
            write.ended_s = time.monotonic()
        self._open.clear()

    def _one(self, call: Call) -> None:
        words = call.words
        ended_s = float("inf") if call.errno is None else call.ended_s
        if words[0] == "open" and words[3]:
            self._writes.append(Write(call.began_s))
            self._open[words[2]] = self._writes[-1]
        elif words[0] == "write":
            if words[1] not in self._open:
                self._writes.append(Write(call.began_s))
                self._open[words[1]] = self._writes[-1]
            self._open[words[1]].size += words[4]
        elif words[0] == "close" and words[1] in self._open:
            self._open.pop(words[1]).ended_s = ended_s
        elif words[0] in ("store", "sync"):
            self._writes.append(Write(call.began_s, ended_s))

    @property
    def is_on(self) -> bool:
        """Whether a file has got some of its bytes, as far as was followed, and not its close."""
        return any(write.size for write in self._open.values())

    def take(self) -> list[int | None]:
        """For each moment noted: size of the largest file that was being written then; None where
        there was none. Forgets them.
        """
        found = [
            max(
                (write.size for write in self._writes if write.began_s <= moment <= write.ended_s),
                default=None,
            )
            for moment in self._moments
        ]
        self._moments.clear()
        self._writes = list(self._open.values())
        return found
