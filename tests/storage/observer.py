"""Looks at a directory from another client while an application works, and holds what was seen
against the application's history.

A look is one path at one instant: its kind and digest, or that it is not there. Looks are made one
after the other, and visible states only ever go forward, so there must be moments of the history,
none before the last, that have what each look saw.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import xxhash

from tests.rig.journal import Entry, Tree

Look = tuple[str, Entry | None]
RECENT = 60
"""Looks are for paths of so many of the last states: the old ones are gone or finished."""
BETWEEN_LOOKS_S = 0.002
"""So that looking on leaves the servers, which are on the same machine, time for their work."""


class Observer:
    """A thread that looks until `stop`; a context manager."""

    def __init__(self, root: Path, states: Sequence[Tree], seed: int) -> None:
        """`states`: the application's own list, which grows."""
        self.root = root
        self._states = states
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.looks: list[Look] = []

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the observer's client hangs"

    def _run(self) -> None:
        while not self._stop.is_set():
            for path in self._next():
                if self._stop.wait(BETWEEN_LOOKS_S):
                    return
                self.look(path)

    def _next(self) -> list[str]:
        """A whole state that was, trackers first: what they point at must be there by then."""
        state = self._states[-1 - self._random.randrange(min(RECENT, len(self._states)))]
        paths = list(state)
        self._random.shuffle(paths)
        return sorted(paths, key=lambda path: not path.startswith("latest"))

    def look(self, path: str) -> None:
        """One look."""
        with contextlib.suppress(
            OSError
        ):  # the servers are gone, failing or changing: nothing was seen
            self.looks.append((path, _entry(self.root / path)))

    def check(self) -> int:
        """How many looks there were, all of them true.

        Raises:
            AssertionError: something was seen that the application never had, or not any more.
        """
        return check(self.looks, self._states)


def check(looks: Sequence[Look], states: Sequence[Tree]) -> int:
    """As `Observer.check`."""
    at = 0
    for number, (path, seen) in enumerate(looks):
        found = next((n for n in range(at, len(states)) if states[n].get(path) == seen), None)
        if found is None:
            had = sorted({str(state.get(path)) for state in states[at:]})
            before = (
                "; it had that before"
                if any(state.get(path) == seen for state in states[:at])
                else ""
            )
            raise AssertionError(
                f"look {number} saw {path} as {seen} after state {at} of {len(states)}, since "
                f"when it was {had}{before}"
            )
        at = found
    return len(looks)


def _entry(path: Path) -> Entry | None:
    try:
        st = path.lstat()
        if stat.S_ISDIR(st.st_mode):
            return ("dir", "")
        if stat.S_ISLNK(st.st_mode):
            return ("symlink", os.readlink(path))
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    digest = xxhash.xxh3_128()
    try:
        while chunk := os.read(fd, 1 << 20):
            digest.update(chunk)
    finally:
        os.close(fd)
    return ("file", digest.hexdigest())
