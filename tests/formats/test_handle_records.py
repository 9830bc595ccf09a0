"""Records of open files whose words have two fields: what an acpfs makes of them that knows only
the lower one.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from acpfs.filesystem.kept_handles import Handle, KeptHandles
from acpfs.filesystem.nodes import Node
from acpfs.ram.kept import HANDLE_WORDS, Kept
from acpfs.ram.mapped_records import Slots
from acpfs.ram.state import StateDatabase
from acpfs.types import HandleId, Ino
from tests.rig.runtime import REAL

FLAGS = 3
"""The word of a record that has the flags of the open."""
IN_DOUBT = 8
"""The one that has the number of the close that is in doubt."""
LOWER = (1 << 32) - 1
ACCESS = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR)
FURTHER = (0, os.O_APPEND, os.O_NOATIME, os.O_DSYNC, os.O_SYNC | os.O_APPEND)


@pytest.mark.clause("S515", "S526")
@pytest.mark.parametrize("flags", [one | other for one, other in product(ACCESS, FURTHER)])
def test_who_takes_all_of_the_word_for_flags_reads_the_same_ones(
    tmp_path: Path, flags: int
) -> None:
    """As acpfs did before the time of the latest close stood above them: it asks for single bits,
    and writes that word only when a file is opened.
    """
    kept = Kept(tmp_path / "session", "s")
    node = Node(Ino(7), 0o100644)
    handle = Handle(HandleId(1), node, flags)
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    records = KeptHandles(kept, state)
    with state.step():
        records.opened(handle)
    with state.step():
        handle.closed_at = 123456.78
        records.changed(handle)
    state.close()
    kept.close()
    slots = Slots(tmp_path / "session" / "handles.slots", HANDLE_WORDS)
    ((_slot, words),) = slots
    slots.close()
    assert (words[FLAGS] & LOWER, words[FLAGS] >> 32) == (flags, 1234567)
    older = Handle(HandleId(1), node, words[FLAGS])
    for asked in (
        "writable",
        "may_map",
        "synchronous",
        "leaves_trace",
        "maps_unseen",
        "rewrites_unseen",
    ):
        assert getattr(older, asked) == getattr(handle, asked), asked


def test_a_close_is_in_doubt_until_it_is_recorded_that_it_is_not(tmp_path: Path) -> None:
    """A worker that dies before that has a successor that reads the state as it was before: there
    the close is, and without the doubt it would publish a half.
    """
    kept = Kept(tmp_path / "session", "s")
    handle: Any = Handle(HandleId(1), Node(Ino(7), 0o100644), os.O_WRONLY)
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    records = KeptHandles(kept, state)
    told: list[int] = []

    def tell() -> None:
        told.append(next(words for _slot, words in kept.handles)[IN_DOUBT])

    with state.step():
        records.opened(handle)
    with state.step():
        handle.store = SimpleNamespace(seq=5)
        records.changed(handle)
    tell()
    with state.step():
        handle.store = None
        records.changed(handle)
        state.after_commit(tell)  # ahead of what the records have for after it
    tell()
    state.close()
    kept.close()
    assert told == [5, 5, 0]
