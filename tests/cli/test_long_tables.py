"""A long table looks as rich draws it, which alone would take seconds for some thousand rows."""

from __future__ import annotations

import random

import pytest

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
        assert ours == capsys.readouterr().out


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
