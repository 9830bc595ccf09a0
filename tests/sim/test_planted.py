"""The suite of planted bugs moves with the code: each of them can still be planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.sim.planted.bug import Bug
from tests.sim.planted.bugs import BUGS
from tests.sim.planted.reach import Watch, counts, lines_of

PACKAGE = Path(__file__).parents[2] / "acpfs"


def test_each_bug_has_its_place_in_the_code() -> None:
    lost = [
        (bug.name, old)
        for bug in BUGS
        for old in (bug.old, *(old for old, _new in bug.also))
        if old not in (PACKAGE / bug.file).read_text()
    ]
    assert lost == []


def test_each_bug_has_lines_that_a_history_may_come_to() -> None:
    for bug in BUGS:
        text = (PACKAGE / bug.file).read_text()
        lines = list(lines_of(bug, text))
        assert lines, bug.name
        assert max(lines) <= len(text.splitlines()), bug.name


EXAMINED = """
def examined():
    seen = {}
    if len(seen) > 1:
        seen["twice"] = True
    seen["once"] = True
"""


def test_a_bug_is_reached_where_its_lines_are_executed(tmp_path: Path) -> None:
    path = tmp_path / "examined.py"
    path.write_text(EXAMINED)
    names: dict[str, Any] = {}
    exec(compile(EXAMINED, path, "exec"), names)
    bugs = [
        Bug("never", "", path.name, '["twice"] = True', "[2] = True"),
        Bug("always", "", path.name, '["once"] = True', "[1] = True"),
    ]
    watch = Watch(bugs, tmp_path)
    found, first = counts(watch, [lambda: None, names["examined"], names["examined"]])
    assert (dict(found), first) == ({"always": 2}, {"always": 2})
