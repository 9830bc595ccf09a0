"""Copies that go together."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from acpfs.backing.calls import CallPool
from acpfs.writeback.copies.copy_place import CopyPlace
from acpfs.writeback.copies.removals import Removals
from tests.rig.runtime import REAL
from tests.rig.storage.servers import until


class Place:
    """Says what it was asked to remove."""

    def __init__(self) -> None:
        self.removed: list[list[str]] = []
        self.gathered = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def gather(self) -> None:
        self.gathered += 1
        self.meanwhile()

    def remove(self, names: Sequence[str]) -> None:
        self.removed.append(list(names))
        if names[0] == "fails":
            raise OSError(errno.EIO, "the disk fails")


def made(place: Place, calls: Any = None) -> Removals:
    return Removals(cast("CopyPlace", place), calls or CallPool("removals", 1, REAL))


@pytest.mark.clause("S583")
def test_what_is_named_while_names_are_gathered_goes_with_them() -> None:
    place = Place()
    removals = made(place)

    def meanwhile() -> None:
        removals.add("b")
        removals.add("c")

    place.meanwhile = meanwhile
    removals.add("a")
    until(lambda: bool(place.removed), "they are removed")
    assert place.removed == [["a", "b", "c"]]
    place.meanwhile = lambda: None
    until(lambda: not removals._is_removing, "nothing is left")
    removals.add("d")
    until(lambda: len(place.removed) == 2, "a later one begins anew")
    assert place.removed[1] == ["d"]
    assert place.gathered == 2


@pytest.mark.clause("S583")
def test_one_that_fails_keeps_none_that_comes_later() -> None:
    place = Place()
    removals = made(place)
    removals.add("fails")
    until(lambda: not removals._is_removing, "it has failed")
    removals.add("later")
    until(lambda: len(place.removed) == 2, "the later one goes")
    assert place.removed == [["fails"], ["later"]]


@pytest.mark.clause("S583")
def test_a_removal_that_nobody_begins_goes_with_the_next_one() -> None:
    """As many calls wait already as may."""
    place = Place()
    calls = CallPool("removals", 1, REAL)
    removals = made(place, calls)
    calls._closed = True
    removals.add("refused")
    assert not place.removed
    calls._closed = False
    removals.add("next")
    until(lambda: bool(place.removed), "both go")
    assert place.removed == [["refused", "next"]]
