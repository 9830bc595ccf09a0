"""The table of what dies and what is lost: each row names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADING = "## Each fault"
ROWS_MIN = 20
"""A table that was cut short is no table."""


def rows() -> list[list[str]]:
    text = (
        (ROOT / "docs" / "internals" / "clauses" / "training-faults.md")
        .read_text(encoding="utf-8")
        .partition(HEADING)[2]
        .partition("\n## ")[0]
    )
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.clause("T144")
def test_each_row_names_tests_that_there_are() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "tests" / "training").rglob("test_*.py")
    ]
    known = {
        name
        for source in sources
        for name in re.findall(r"^def (test_\w+)\(", source, re.MULTILINE)
    }
    found = {row[0]: re.findall(r"`(test_\w+)`", row[-1]) for row in rows()}
    assert len(found) >= ROWS_MIN
    assert [what for what, names in found.items() if not names] == []
    assert sorted({name for names in found.values() for name in names} - known) == []
