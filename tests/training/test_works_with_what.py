"""The table of what works with what: it is the tests' own, and these are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.training.works_with_what import DOUBLE, PAGE, ROWS, RUNS, parted, table

TESTS = Path(__file__).parent
WORDS_MAX = 500
"""Two minutes to read."""


@pytest.mark.clause("T208")
def test_the_page_has_the_table() -> None:
    _, rows, _ = parted(PAGE.read_text(encoding="utf-8"))
    assert rows == table(), "python -m tests.training.works_with_what writes it"


@pytest.mark.clause("T208")
def test_what_is_said_was_tested() -> None:
    """Each row that runs, or is refused, names tests; what ran on the double is a job there."""
    sources = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    tests = re.compile(r"^def (test_\w+)\(", re.MULTILINE)
    known = {name for one in sources for name in tests.findall(one)}
    jobs = (TESTS / "ranks" / "behind.py").read_text(encoding="utf-8").partition("LAYOUTS: ")[2]
    kinds = set(re.findall(r'^    "([^"]+)": \w+,$', jobs.partition("\n}\n")[0], re.MULTILINE))
    assert {name for row in ROWS for name in row.tests} <= known
    assert {kind for row in ROWS for kind in row.kinds} == kinds
    for row in ROWS:
        says = [cell for cell in row.cells if cell in (RUNS, DOUBLE) or "refused" in cell]
        assert bool(says) == bool(row.tests), row.what
        is_framework = any("on_the_double" in name for name in row.tests)
        assert (DOUBLE in row.cells) == (bool(row.kinds) or is_framework), row.what


@pytest.mark.clause("T208")
def test_it_takes_two_minutes() -> None:
    before, rows, behind = parted(PAGE.read_text(encoding="utf-8"))
    section = before.rpartition("\n## ")[2] + rows + behind.partition("\n## ")[0]
    assert len(re.findall(r"\w+", section)) <= WORDS_MAX
