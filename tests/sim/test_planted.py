"""The suite of planted bugs moves with the code: each of them can still be planted."""

from __future__ import annotations

from pathlib import Path

from tests.sim.planted.bugs import BUGS

PACKAGE = Path(__file__).parents[2] / "acpfs"


def test_each_bug_has_its_place_in_the_code() -> None:
    lost = [
        (bug.name, old)
        for bug in BUGS
        for old in (bug.old, *(old for old, _new in bug.also))
        if old not in (PACKAGE / bug.file).read_text()
    ]
    assert lost == []
