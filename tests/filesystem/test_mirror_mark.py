"""The mark on the backing directory that says which journal counts: where it comes late, it takes none away that is in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.ram.spill import SpillDirectory
from acpfs.ram.state import StateDatabase
from acpfs.writeback.mirror import Mirror, journal_name, read_mark

pytestmark = pytest.mark.clause("S152")
WAIT_S = 20.0


class HangingMarks(BackingDirectory):
    """Writing a mark waits for `go_on`."""

    def __init__(self, path: Path, node_id: str) -> None:
        super().__init__(path, node_id)
        self.began, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def write_own(self, names: LowerPath, content: bytes) -> None:
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        super().write_own(names, content)


@dataclass
class Made:
    """A mirror over a state that nothing but the test changes."""

    mirror: Mirror
    state: StateDatabase
    lower: HangingMarks
    directory: SpillDirectory
    lock: RLock

    def mark(self) -> str:
        return (read_mark(self.lower, "test") or {}).get("token", "")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    for name in ("backing", "tier", "spill"):
        (tmp_path / name).mkdir()
    lower, state = HangingMarks(tmp_path / "backing", "test"), StateDatabase(tmp_path / "tier" / "state.sqlite")
    state.create("CREATE TABLE t (number INTEGER)")
    directory = SpillDirectory(tmp_path / "spill" / "acpfs-test")
    directory.prepare()
    mirror = Mirror(directory, state, lower, "test", patience_s=2.0)
    with closing(state):
        yield Made(mirror, state, lower, directory, RLock())
        lower.go_on.set()
        mirror.close(nothing_left=False)


def wait_until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("never")


def test_a_mark_that_was_late_takes_no_journal_in_use_away(made: Made) -> None:
    """The backing directory hangs while a journal is to be marked that fails meanwhile, and is begun anew."""
    made.lower.go_on.clear()
    with made.lock:
        made.mirror.begin()
    assert made.lower.began.wait(WAIT_S)
    late = made.mirror._token
    with made.mirror._changed:
        made.mirror._fail_locked(late, "the disk failed")
    with made.lock:
        made.mirror.begin()
    wait_until(lambda: made.mirror._seeded)
    made.lower.go_on.set()
    wait_until(lambda: made.mark() == made.mirror._token)
    assert (made.directory.path / journal_name(made.mark())).exists()
