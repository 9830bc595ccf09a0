"""Sets of names as node records have them: whatever was put in is found, and hardly anything else,
within the room that there is.
"""

from __future__ import annotations

import itertools
import random

import pytest

from acpfs.backing.member_records import NodeRecord
from acpfs.backing.name_filter import BITS_MAX, PATHS_MAX, NameFilter

RECORD_BYTES = 2300
LOOKUPS = 2000


def paths(count: int) -> list[bytes]:
    return [b"run/iter_%07d/__%d_0.distcp" % (number % 3, number) for number in range(count)]


def told(count: int, seed: int = 7) -> NameFilter:
    """As the other node has it."""
    made = NameFilter.of(paths(count), seed)
    assert made is not None
    found = NameFilter.from_text(made.to_text())
    assert found == made
    return found


def mistaken(names: NameFilter) -> set[bytes]:
    return {
        name
        for name in (b"new%d" % number for number in range(LOOKUPS))
        if names.may_have(b"run/iter_0000001", name)
    }


@pytest.mark.parametrize("count", [1, 2, 20, 100, 768, PATHS_MAX])
def test_what_was_put_in_is_found_and_little_else(count: int) -> None:
    for seed in range(5):
        names = told(count, seed << 37)
        assert all(names.may_have(*path.rsplit(b"/", 1)) for path in paths(count))
        assert len(mistaken(names)) < LOOKUPS / 100
        assert (len(names.to_text()) < RECORD_BYTES, 8 * len(names.bits) <= BITS_MAX) == (
            True,
            True,
        )


def test_a_mistake_is_not_one_under_the_next_seed() -> None:
    """So it costs a node that makes a file of that name about a heartbeat, and not as long as the
    other node drains.
    """
    found = [
        mistaken(told(PATHS_MAX, random.Random(number).getrandbits(40))) for number in range(8)
    ]
    assert any(found)
    assert all(not (one & other) for one, other in itertools.pairwise(found))


def test_names_at_the_top_and_bytes_that_are_no_text() -> None:
    names = NameFilter.of([b"latest", b"run/\xff\xfe"], 3)
    assert names is not None
    assert (
        names.may_have(b"", b"latest"),
        names.may_have(b"run", b"\xff\xfe"),
        names.may_have(b"run", b"latest"),
    ) == (True, True, False)


def test_of_too_many_the_directories_are_told() -> None:
    names = NameFilter.of([b"", b"run/iter_0000001"], 3, of_directories=True)
    assert names is not None
    names = NameFilter.from_text(names.to_text())
    assert names is not None
    assert [
        names.may_have(directory, b"any")
        for directory in (b"", b"run/iter_0000001", b"run", b"run/iter_0000002")
    ] == [
        True,
        True,
        False,
        False,
    ]


def test_nothing_is_told_of_nothing() -> None:
    assert NameFilter.of([], 3) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "names",
        "names:1:2:",
        "other:1:2:AAAA",
        "names:x:2:AAAA",
        "names:1:0:AAAA",
        "names:1:2:!!",
        "names:1:99:AAAA",
        "names:-1:2:AAAA",
        "names:1:2:" + "A" * 4096,
    ],
)
def test_what_a_newer_acpfs_or_anybody_wrote_there_says_nothing(text: str) -> None:
    assert NameFilter.from_text(text) is None


def test_a_record_of_an_older_acpfs_says_nothing() -> None:
    record = NodeRecord.from_bytes(b'{"node": "b", "beat": 1, "clock": 1.0, "watermark": 1.0}')
    assert (record.pending, NameFilter.from_text(record.pending)) == ("", None)
