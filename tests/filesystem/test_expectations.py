"""What a name says of the file that is about to be written: its pattern, and what became of the
last one of that pattern.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.filesystem.expectations import PATTERNS_MAX, Expectations, Use, pattern_of
from acpfs.ram.state import StateDatabase
from tests.rig.runtime import REAL

clause = pytest.mark.clause


@clause("S248")
@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["step-1/.tmpzNw8ht", "step-2/.tmpQQ19xy", "step-33/.tmpabcdef"], "step-#/.tmp*"),
        (["a/tmpk3v9x2_a", "a/tmpzzzzzzzz"], "a/tmp*"),
        (["tmpk3v9x2_a.safetensors"], "tmp*.safetensors"),
        (["m.6fb1d6c0e8a94bd2", "m.00aa11bb"], "m.*"),
        (["x/6fb1d6c0-7e8a-4bd2-9c1f-0123456789ab"], "x/*"),
        (["iter_0001/mp_rank_00/model.pt"], "iter_#/mp_rank_#/model.pt"),
        (["deadbeef/12345678", "facade/1"], None),
        (["tmp/model.pt", "tmp_model.pt", "temporary"], None),
    ],
)
def test_names_that_were_made_at_random_are_one_pattern(
    names: list[str], pattern: str | None
) -> None:
    found = {pattern_of(name.encode()).decode() for name in names}
    if pattern is None:
        assert not any("*" in one for one in found), "a word of a language is none"
    else:
        assert found == {pattern}


@clause("S503")
def test_what_files_were_used_for_is_known_until_one_was_used_otherwise(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    known = Expectations(state)
    assert known.use_of(b"step-1/state") is Use.OTHER
    for use in (Use.ONLY_WRITTEN, Use.READ_BACK, Use.ONLY_WRITTEN):
        known.learn_use(b"step-1/state", use)
        assert known.use_of(b"step-2/state") is use
        assert Expectations(state).use_of(b"step-3/state") is use, "by the next worker, too"
    known.learn_use(b"step-2/state", Use.OTHER)
    assert known.use_of(b"step-3/state") is Use.OTHER
    assert Expectations(state).use_of(b"step-3/state") is Use.OTHER
    with state.step():
        for number in range(PATTERNS_MAX + 10):
            known.learn_use(b"x" * number, Use.ONLY_WRITTEN)
    assert known.use_of(b"x" * 9) is Use.OTHER
    assert known.use_of(b"x" * 10) is Use.ONLY_WRITTEN
    state.close()
