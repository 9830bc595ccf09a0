"""What happened in a history: its last events for people, and a digest of all of them."""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Iterable, Sequence

from tests.sim.virtual import MACHINE, START_S

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

EVENTS_MAX = 100_000
TEXT_MAX = 60


class Finding(AssertionError):  # noqa: N818 - it is what the simulation is for
    """A history is wrong."""

    def __init__(self, oracle: str, sentence: str) -> None:
        """`oracle`: which rule was broken."""
        super().__init__(f"{oracle}: {sentence}")
        self.oracle = oracle
        self._sentence = sentence

    def __reduce__(self) -> tuple[type[Finding], tuple[str, str]]:
        """For another process."""
        return type(self), (self.oracle, self._sentence)


class Event:
    """One line; its text is made when somebody wants to read it."""

    __slots__ = ("_arguments", "_outcome", "_what", "_who", "at_s")

    def __init__(self, who: str, what: str, arguments: Sequence[object], outcome: str) -> None:
        self.at_s = MACHINE.moment_s - START_S
        self._who = who
        self._what = what
        self._outcome = outcome
        self._arguments = [text_of(argument) for argument in arguments]

    def __str__(self) -> str:
        words = " ".join([self._what, *self._arguments])
        arrow = f" → {self._outcome}" if self._outcome else ""
        return f"{self.at_s:10.4f}  {self._who:8} {words}{arrow}"


class Trace:
    """Of one history."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.digest = 0
        """The same for two runs of one history, in whatever process."""

    def note(
        self, who: str, what: str, arguments: Iterable[object] = (), outcome: str = ""
    ) -> None:
        event = Event(who, what, tuple(arguments), outcome)
        self.events.append(event)
        self.digest = zlib.crc32(str(event).encode(), self.digest)


def text_of(argument: object) -> str:
    """Of an argument of a call, short."""
    if isinstance(argument, tuple) and all(isinstance(part, bytes) for part in argument):
        return b"/".join(argument).decode(errors="backslashreplace") or "."
    if isinstance(argument, bytes | memoryview) and len(argument) > 20:
        return f"<{len(argument)} bytes>"
    if not isinstance(argument, int | str | bytes):
        return type(argument).__name__  # an address would be another one in each process
    text = str(argument)
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"


def causes(failure: BaseException) -> list[BaseException]:
    """The failures of a group, one by one."""
    if not isinstance(failure, BaseExceptionGroup):
        return [failure]
    return [cause for one in failure.exceptions for cause in causes(one)]
