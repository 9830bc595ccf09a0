"""Looks at the backing directory without a pause while the application works and things die, and
judges afterwards what it saw.

A look is one path at one instant. Looks are made one after the other, and visible states only ever
go forward (S6), so there must be moments of the history, none before the last, that have what each
look saw. A half-written file is no moment of any history (S7).
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.drill.history import History
from tests.drill.spec import DIGEST_BYTES, HIDDEN, Entry

Look = tuple[str, Entry | None]
Seen = tuple[int, int, int, int]
BETWEEN_S = 0.005
READ_BYTES = 1 << 20
LOSSES_MAX = 5
POINTERS = frozenset({"latest_checkpointed_iteration.txt"})
POINTER_BYTES_MAX = 255
NEVER: Callable[[str, Entry | None], bool] = lambda _path, _entry: False  # noqa: E731


class Watch:
    """A thread that looks until `stop`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._looks: list[Look] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._death = ""
        """What ended the thread, in words; from then on nothing is seen."""
        self._known: dict[str, tuple[Seen, Entry]] = {}
        """Path → which file lay there, and its content, so that it is not read again and again."""
        self._pointed: dict[str, str] = {}
        """Pointer → the path that it names."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The last look is over when this returns."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def take(self) -> list[Look]:
        """What was seen since the last time."""
        with self._lock:
            looks = self._looks
            self._looks = []
        return looks

    def judge(
        self, history: History, also: Callable[[str, Entry | None], bool] = NEVER
    ) -> list[str]:
        """What was seen that no moment of the history had, or too late; and whether nobody looks
        any more. `also`: what else is allowed.
        """
        dead = [f"the observer of the backing directory died: {self._death}"] if self._death else []
        return judged(self.take(), history, also) + dead

    def _run(self) -> None:
        try:
            while not self._stop.wait(BETWEEN_S):
                self.look_around()
        except BaseException:  # noqa: BLE001
            # whatever it was, what this drill says is worth nothing from now on
            self._death = traceback.format_exc(limit=-4)

    def look_around(self) -> None:
        """At each path that is there, and those that were; at last at what pointers point at: it
        must be there by then.
        """
        looks: list[Look] = [
            (path, self._look(path)) for path in sorted({*self._paths(), *self._known})
        ]
        looks += [(path, self._look(path)) for path in sorted(self._pointed.values())]
        with self._lock:
            self._looks += looks

    def _paths(self) -> list[str]:
        found = []
        for directory, names, files in os.walk(self._root):
            at = os.path.relpath(directory, self._root)
            prefix = "" if at == "." else at + "/"
            names[:] = [name for name in names if prefix or name != HIDDEN]
            found += [prefix + name for name in files]
        return found

    def _look(self, path: str) -> Entry | None:
        try:
            fd = os.open(self._root / path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            self._known.pop(path, None)
            self._pointed.pop(path, None)
            return None
        try:
            state = os.fstat(fd)
            seen = (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
            known = self._known.get(path)
            if known is not None and known[0] == seen:
                return known[1]
            assert stat.S_ISREG(state.st_mode)
            if path in POINTERS:
                self._note_pointer(
                    path, os.pread(fd, POINTER_BYTES_MAX, 0).decode(errors="replace")
                )
            entry = ("file", _digest(fd))
            self._known[path] = (seen, entry)
            return entry
        finally:
            os.close(fd)

    def _note_pointer(self, path: str, named: str) -> None:
        """One that is still empty names nothing."""
        self._pointed.pop(path, None)
        if named:
            self._pointed[path] = named


def _digest(fd: int) -> str:
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    while block := os.read(fd, READ_BYTES):
        found.update(block)
    return found.hexdigest()


def judged(
    looks: list[Look], history: History, also: Callable[[str, Entry | None], bool] = NEVER
) -> list[str]:
    """See `Watch.judge`."""
    states = history.states
    at = 0
    losses = []
    for path, entry in looks:
        index = next(
            (number for number in range(at, len(states)) if states[number].has(path, entry)), None
        )
        if index is not None:
            at = index
        elif not also(path, entry):
            had = [number for number, state in enumerate(states) if state.has(path, entry)]
            what = f"its states {had} had that" if had else "no state had that"
            losses.append(
                f"seen on the backing directory: {path} was {entry or 'not there'} at state {at} "
                f"of {len(states)} or later; {what}"
            )
    return losses[:LOSSES_MAX]
