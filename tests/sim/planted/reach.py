"""In how many histories the lines are executed at which a bug would be planted.

A bug that is not found where its lines are never executed is not reached: the generator lacks
something. One that is not found though they are is not judged, or nobody can notice it.
"""

from __future__ import annotations

import difflib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.sim.planted.bug import Bug

Tracer = Callable[[FrameType, str, Any], Any]


class Watch:
    """Notes which bugs' lines are executed, in all threads of this process."""

    current: Watch
    """Threads outlive the histories in which they began, and are watched for good."""

    def __init__(self, bugs: Sequence[Bug], package: Path) -> None:
        """`package`: the directory of the sources that are imported."""
        self.reached: set[str] = set()
        """Names of those whose lines were executed since `begin`."""
        self._lines: dict[str, dict[int, list[str]]] = {}
        """By file, and number of a line: names."""
        self._watched: dict[CodeType, dict[int, list[str]]] = {}
        for bug in bugs:
            path = package / bug.file
            found = self._lines.setdefault(str(path), {})
            for line in lines_of(bug, path.read_text(encoding="utf-8")):
                found.setdefault(line, []).append(bug.name)

    def begin(self) -> None:
        """Another history."""
        self.reached = set()
        Watch.current = self
        threading.settrace(_entered)  # for threads that begin from here on
        sys.settrace(_entered)

    def entered(self, frame: FrameType) -> Tracer | None:
        """A function begins, or goes on; how its lines are watched."""
        lines = self._watched.get(frame.f_code)
        if lines is None:
            lines = self._of_code(frame.f_code)
            self._watched[frame.f_code] = lines
        return self._stepped if lines else None

    def _of_code(self, code: CodeType) -> dict[int, list[str]]:
        wanted = self._lines.get(code.co_filename, {})
        own = {line for _start, _end, line in code.co_lines() if line is not None}
        return {line: names for line, names in wanted.items() if line in own}

    def _stepped(self, frame: FrameType, event: str, _what: object) -> Tracer:
        if event == "line":
            self.reached.update(self._watched[frame.f_code].get(frame.f_lineno, ()))
        return self._stepped


def _entered(frame: FrameType, _event: str, _what: object) -> Tracer | None:
    return Watch.current.entered(frame)


def lines_of(bug: Bug, text: str) -> Iterator[int]:
    """Numbers of the lines that the bug changes, or before which it puts something."""
    for old, new in ((bug.old, bug.new), *bug.also):
        before = text[: text.index(old)]
        first = before.count("\n") + 1
        # whole lines: a bug may begin in the middle of one
        head = before.rpartition("\n")[2]
        old_lines = (head + old).splitlines()
        matcher = difflib.SequenceMatcher(None, old_lines, (head + new).splitlines(), False)
        for tag, start, end, _new_start, _new_end in matcher.get_opcodes():
            if tag == "insert":
                yield first + min(start, len(old_lines) - 1)
            elif tag != "equal":
                yield from range(first + start, first + end)


def counts(
    watch: Watch, histories: Sequence[Callable[[], object]]
) -> tuple[Counter[str], dict[str, int]]:
    """In how many histories each was reached, and the number of the first, from 1 on."""
    found = Counter[str]()
    first: dict[str, int] = {}
    for number, run in enumerate(histories, 1):
        watch.begin()
        try:
            run()
        finally:
            sys.settrace(None)
            threading.settrace(None)
        found.update(watch.reached)
        for name in watch.reached:
            first.setdefault(name, number)
    return found, first
