"""Records of fixed size, and what a next process finds of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from acpfs.ram.mapped_records import FIRST_SLOTS, Slots


@pytest.mark.parametrize("words", [1, 2, 9])
def test_the_next_process_finds_what_was_left(tmp_path: Path, words: int) -> None:
    rng = random.Random(words)
    slots = Slots(tmp_path / "records", words)
    known = dict[int, list[int]]()
    for step in range(4 * FIRST_SLOTS):
        if rng.random() < 0.8 or not known:
            values = [rng.randrange(1 << 64) for _ in range(words)]
            known[slots.add(*values)] = values
        elif rng.random() < 0.5:
            slot = rng.choice(list(known))
            word = rng.randrange(words)
            known[slot][word] = step
            slots.record(slot)[word] = step
        else:
            slot = rng.choice(list(known))
            del known[slot]
            slots.free(slot)
        if step % 100 == 0:
            slots.close()
            slots = Slots(tmp_path / "records", words)
        assert len(slots) == len(known)
    expected = {slot: tuple(values) for slot, values in known.items()}
    assert dict(slots) == expected
    assert [slot for slot, _values in slots] == sorted(known)
    slots.close()
    again = Slots(tmp_path / "records", words)
    assert dict(again) == expected
    assert again.add(*range(words)) not in known
    again.clear()
    assert not len(again)
    assert list(again) == []
    again.close()
