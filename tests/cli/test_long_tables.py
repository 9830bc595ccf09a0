"""A long table looks as rich draws it, which alone would take seconds for some thousand rows."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence

import pytest
from rich.console import Console

from acpfs.cli import show

HEADINGS = ("name", "size", "last error")


def rows(chance: random.Random, count: int, longest: int) -> list[tuple[str, str, str]]:
    letters = "abc 日é_[b]-"

    def word() -> str:
        return "".join(chance.choice(letters) for _ in range(chance.randrange(longest)))

    def number() -> str:
        return str(chance.randrange(10**6)) + chance.choice(["", "", " ", "  "])

    return [(word(), number(), word()) for _ in range(count)]


@pytest.mark.parametrize("columns", ["240", "60", "20"])
def test_a_long_table_is_what_rich_draws(
    columns: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    chance = random.Random(seed)
    for longest in (1, 12, 40):
        many = rows(chance, show.LONG_ROWS + 20, longest)
        show.table(HEADINGS, many, numbers=("size",))
        ours = capsys.readouterr().out
        console = show.console()
        drawn = show._drawn(HEADINGS, many, ("size",))
        console.width = show.wide_enough(console, drawn)
        console.print(drawn)
        lines = capsys.readouterr().out.splitlines()
        assert ours.splitlines() == [line.rstrip() for line in lines]


def test_the_rows_of_a_long_table_are_not_left_to_rich(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    many = rows(random.Random(1), show.LONG_ROWS + 1, 12)
    assert show._long_table(show.console(), HEADINGS, many, ("size",)) is not None
    many[7] = ("x" * 300, "1", "")
    assert show._long_table(show.console(), HEADINGS, many, ("size",)) is None, "it is folded"
    many[7] = ("a\tb", "1", "")
    assert show._long_table(show.console(), HEADINGS, many, ("size",)) is None


@pytest.mark.parametrize("columns", ["80", "20", ""])
def test_a_table_fits_a_pipe_however_narrow_the_terminal_is(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who pipes into grep has COLUMNS of his terminal, and wants whole lines."""
    monkeypatch.setenv("COLUMNS", columns)
    headings = tuple("abcdefghi")
    many = [("word " * 9,) * len(headings)]
    show.table(headings, many)
    lines = capsys.readouterr().out.splitlines()
    assert sum("word" in line for line in lines) == 1
    assert next(line for line in lines if "word" in line).count("word") == 9 * len(headings)


@pytest.mark.clause("S523")
@pytest.mark.parametrize("count", [1, show.LONG_ROWS + 20])
@pytest.mark.parametrize("stderr", [False, True])
def test_no_line_in_a_pipe_ends_with_blanks(
    count: int, stderr: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """`awk '{print $NF}'` and editors have them as a part of the last column."""
    show.table(HEADINGS, [("name", "1", "no")] * count, numbers=("size",), stderr=stderr)
    lines = capsys.readouterr()[stderr].split("\n")
    assert sum("name" in line for line in lines) == count + 1
    assert [line for line in lines if line != line.rstrip()] == []


def in_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, headings: Sequence[str], *many: Sequence[str]
) -> list[str]:
    """Lines of a table in a terminal of so many columns."""
    drawn = io.StringIO()
    terminal = Console(file=drawn, width=columns, force_terminal=True, color_system=None)
    monkeypatch.setattr(show, "console", lambda *, stderr=False: terminal)
    show.table(headings, many, numbers=("size",))
    return [line.rstrip() for line in drawn.getvalue().splitlines()]


FILES = ("state", "size", "tier", "xxh3-128", "error", "written by", "path")


def test_a_narrow_terminal_gets_no_empty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """`acpfs-ctl ls` in 80 columns cut each word in the middle."""
    row = ("persisted", "24.0 MiB", "ram+backing", "c" * 32, "", "", "run1/a.pt")
    lines = in_terminal(monkeypatch, 80, FILES, row)
    assert max(map(len, lines)) <= 80
    assert "error" not in "".join(lines)
    assert all(any(cell in line for line in lines) for cell in row if "c" not in cell)


def test_only_the_widest_column_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ("streaming", "24.0 MiB", "ram+backing", "why " * 20, "EIO", "12 python", "a.pt")
    lines = in_terminal(monkeypatch, 100, FILES, row)
    assert max(map(len, lines)) <= 100
    assert all(any(cell in line for line in lines) for cell in row if not cell.startswith("why"))
    assert sum(line.count("why") for line in lines) == 20


def test_where_that_does_not_help_lines_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    row = tuple(f"{heading} is not empty" for heading in FILES)
    lines = in_terminal(monkeypatch, 60, FILES, row)
    assert any(all(cell in line for cell in row) for line in lines)
