"""Where the bytes of one file are, as a value: ranges beside a set of numbers, every verb from
every place, and rows.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from acpfs.filesystem.content.body import (
    BACKING,
    COLD,
    OUTGROWN_PIECE_BYTES,
    Body,
    SpillCopy,
    Staging,
    from_row,
    head,
    in_ram,
    overflowed,
    to_row,
)
from acpfs.filesystem.content.runs import ALL, END, NOTHING, Runs
from acpfs.types import NO_TIER, TierId, VersionId

TIER = TierId(7)
PIECE = OUTGROWN_PIECE_BYTES


def outgrown() -> Body:
    body = in_ram(TIER, modified=True)
    body.move_out(Staging("beside"), 0, 0)
    return body


def spilled() -> Body:
    body = in_ram(TIER)
    body.move_out(SpillCopy(VersionId(3)))
    return body


def test_ranges_are_sets_of_numbers() -> None:
    chosen = random.Random(5)
    largest = 40
    runs = NOTHING
    expected = set[int]()
    for _ in range(2000):
        start, end = (chosen.randrange(largest + 1) for _ in range(2))
        if chosen.random() < 0.5:
            runs = runs.plus(start, end)
            expected = expected | set(range(start, end))
        else:
            runs = runs.minus(start, end)
            expected = expected - set(range(start, end))
        assert {n for first, last in runs for n in range(first, last)} == expected
        assert runs.size == len(expected)
        assert runs.covers(start, end) == expected.issuperset(range(start, end))
        assert all(first < last for first, last in runs)
        assert all(
            one[1] < other[0] for one, other in zip(runs.pairs, runs.pairs[1:], strict=False)
        ), "they would be one"
        gaps = runs.gaps()
        assert gaps.gaps() == runs
        assert not any(gaps.covers(n, n + 1) for n in expected)
    assert ALL.minus(0, END) == NOTHING == Runs.first(0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (COLD, "cold only"),
        (head(TIER, PIECE), "cold"),
        (in_ram(TIER), "ram writable"),
        (overflowed("beside"), "overflowed writable"),
        (overflowed("beside", sealed=True), "overflowed"),
        (outgrown(), "outgrown"),
        (spilled(), "spilled"),
    ],
)
def test_each_place_has_its_words(body: Body, said: str) -> None:
    words = {
        "cold": body.is_cold,
        "only": body.is_only_backing,
        "ram": body.is_whole_in_ram,
        "overflowed": body.is_overflowed,
        "outgrown": body.is_outgrown,
        "spilled": body.is_spilled,
        "writable": body.is_writable,
    }
    assert {word for word, holds in words.items() if holds} == set(said.split())
    assert not body.wrong()


def test_a_row_says_the_same() -> None:
    moved = outgrown()
    for piece in (2, 3, 9):
        moved.move_out(Staging("beside"), piece * PIECE, (piece + 1) * PIECE)
    for body in (
        COLD,
        head(TIER, 3 * PIECE),
        in_ram(TIER, modified=True),
        overflowed("beside"),
        outgrown(),
        moved,
        spilled(),
    ):
        again = from_row(to_row(body), 0.0)
        assert (again.tier, again.here, again.rest, again.modified) == (
            body.tier,
            body.here,
            body.rest,
            body.modified,
        )
        assert (again.moving_out is None) == (body.moving_out is None)


def test_bytes_go_and_come_back() -> None:
    body = outgrown()
    body.move_out(Staging("beside"), 2 * PIECE, 3 * PIECE)
    assert body.here.gaps() == Runs(((2 * PIECE, 3 * PIECE),))
    body.fetch(TIER, 2 * PIECE, 3 * PIECE)
    assert (body.here, body.is_outgrown) == (ALL, True), "the next piece goes there too"
    body.move_out(Staging("beside"))
    assert (body.is_overflowed, body.tier, body.moving_out) == (True, NO_TIER, None)
    body = spilled()
    body.fetch(TIER)
    assert (body.is_whole_in_ram, body.tier) == (True, TIER)
    body.cut(2 * PIECE)
    assert (body.is_cold, body.head_bytes, body.rest) == (True, 2 * PIECE, BACKING)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AssertionError):
        in_ram(TIER, modified=True).cut(PIECE)  # the backing directory has other bytes
    with pytest.raises(AssertionError):
        in_ram(TIER).rebind(Staging("beside"))
    with pytest.raises(AssertionError):
        in_ram(TIER).move_out(
            SpillCopy(VersionId(3)), 0, PIECE
        )  # a copy of a version has all of it
    with pytest.raises(AssertionError):
        spilled().fetch(TIER, 0, PIECE)
    for name, value in product(["modified", "tier", "fd"], [1]):
        with pytest.raises(AssertionError):
            setattr(COLD, name, value)  # of all files at once
