"""Whether a pointer names a path, by what it says."""

from __future__ import annotations

import pickle

import pytest

from acpfs.writeback.members.naming import Mentions, may_mention, mentions

pytestmark = pytest.mark.clause("S161")


@pytest.mark.parametrize("says", [may_mention, mentions])
@pytest.mark.parametrize("text", [b"step-1", b"ckpt/step-1\n", b'{"last": "step-1"}', b"1\n"])
def test_text_names_what_it_says(says: Mentions, text: bytes) -> None:
    assert says(text, b"step-1")


@pytest.mark.parametrize("says", [may_mention, mentions])
@pytest.mark.parametrize("text", [b"", b"step-10", b"ckpt/step-100\n", b"10", "süd-10\n".encode()])
def test_text_does_not_name_a_part_of_what_it_says(says: Mentions, text: bytes) -> None:
    assert not says(text, b"step-1")


def test_only_what_may_go_first_heeds_parts_of_names() -> None:
    """A removal that goes first is not to take what may be named."""
    assert may_mention(b"xstep-7", b"step-7")
    assert not mentions(b"xstep-7 8", b"step-7")


@pytest.mark.parametrize("says", [may_mention, mentions])
@pytest.mark.parametrize("protocol", range(1, pickle.HIGHEST_PROTOCOL + 1))
def test_a_name_in_what_is_no_text_ends_where_that_says(says: Mentions, protocol: int) -> None:
    """Behind it may be a byte that looks like a letter or a digit."""
    assert says(pickle.dumps({"last": "step-1"}, protocol), b"step-1")
    assert says(b"\x0a\x06step-12\x01", b"step-1")
