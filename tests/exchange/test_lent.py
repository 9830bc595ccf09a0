"""Whether bytes of a tier file could have changed since they were lent."""

from __future__ import annotations

import pytest

from acpfs.filesystem.content.lent import Lent
from acpfs.types import TierId

clause = pytest.mark.clause
ONE = TierId(1)
OTHER = TierId(2)


@clause("S543")
def test_bytes_that_nobody_touched_are_the_same() -> None:
    lent = Lent()
    first = lent.begin(ONE)
    second = lent.begin(ONE)
    lent.spoil(OTHER)
    assert lent.end(first)
    assert lent.end(second)


@clause("S543")
def test_all_that_was_lent_of_a_file_is_spoilt_together() -> None:
    lent = Lent()
    before = [lent.begin(ONE), lent.begin(ONE)]
    lent.spoil(ONE)
    after = lent.begin(ONE)
    assert [lent.end(one) for one in (*before, after)] == [False, False, True]


@clause("S544")
def test_what_was_found_without_writers_is_so_until_one_may_come() -> None:
    lent = Lent()
    assert not lent.is_quiet(ONE)
    lent.found_quiet(ONE)
    lent.spoil(OTHER)
    assert lent.is_quiet(ONE)
    lent.spoil(ONE)
    assert not lent.is_quiet(ONE)


@clause("S543")
def test_bytes_are_vouched_for_as_what_they_were_stored_as() -> None:
    """A rename or a mode changes the ctime; another member's file in that place anything."""
    lent = Lent()
    assert not lent.is_vouched(ONE, (1, 2, 3, 4))
    lent.vouch(ONE, (1, 2, 3, 4))
    assert lent.is_vouched(ONE, (1, 2, 3, 99))
    for other in ((9, 2, 3, 4), (1, 9, 3, 4), (1, 2, 9, 4)):
        assert not lent.is_vouched(ONE, other)
    lent.spoil(ONE)
    assert not lent.is_vouched(ONE, (1, 2, 3, 4))
