"""The committed tree, with files of several names: what it says, and what a next worker reads."""

from __future__ import annotations

import random
from pathlib import Path

from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.lower_tree import LowerTree, Place
from tests.rig.runtime import REAL

FILES = [Ino(number) for number in range(10, 14)]
NAMES = [b"n%d" % number for number in range(8)]
STEPS = 2000


def change(tree: LowerTree, plain: dict[Place, Ino], chance: random.Random) -> None:
    """`plain`: what lies where, the oldest places first."""
    one, other = ((ROOT, chance.choice(NAMES)) for _ in range(2))
    ino = chance.choice(FILES)
    choice = chance.randrange(4)
    if choice == 0:
        tree.remove(*one)
        plain.pop(one, None)
    elif choice == 1 and one != other:
        tree.move(one, other)
        moved = plain.pop(one, None)
        if moved is not None and plain.get(other) != moved:
            plain.pop(other, None)
            plain[other] = moved
    elif choice == 2 and one != other:
        tree.exchange(one, other)
        first = plain.pop(one, None)
        second = plain.pop(other, None)
        plain.update({one: second} if second is not None else {})
        plain.update({other: first} if first is not None else {})
    else:
        tree.add(ino, *one)
        if plain.get(one) != ino:
            plain.pop(one, None)
            plain[one] = ino


def check(tree: LowerTree, plain: dict[Place, Ino]) -> None:
    assert dict(tree) == plain
    for ino in FILES:
        places = [place for place, there in plain.items() if there == ino]
        assert tree.places(ino) == places
        assert tree.places_count(ino) == len(places)
        assert tree.first_places(ino, 2) == places[:2]
        assert (ino in tree) is bool(places)
        assert tree.place(ino) == (places[0] if places else None)
        assert tree.path(ino) == ((places[0][1],) if places else None)


def test_any_changes_against_a_plain_table(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    state = StateDatabase(tmp_path / "state", REAL)
    tree = LowerTree(state)
    plain: dict[Place, Ino] = {}
    for _ in range(STEPS):
        change(tree, plain, chance)
        check(tree, plain)
    state.commit()
    assert dict(LowerTree(state)) == plain
    state.close()
