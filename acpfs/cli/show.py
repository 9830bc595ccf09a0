"""How numbers, tables and progress look to people. Imports rich only where it draws."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Json = dict[str, Any]
PIPE_COLUMNS = 240
LINE_MAX = 100_000
"""Columns: more than any table has."""
WITHHELD = "EHOSTDOWN"
"""Error of what waits for a node that is missing."""
BETWEEN = "   "
FOLDED_MIN = 20
"""Columns of a terminal below which cells are not folded: lines are, by the terminal."""
LONG_ROWS = 50
"""Tables with more rows than these are not drawn by rich alone."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
    """1536 → `1.5 KiB`."""
    for unit in _UNITS:
        if abs(count) < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable: the last unit returns")


def counted(number: int, noun: str) -> str:
    """1, "file" → `1 file`; 2 → `2 files`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are(number: int, noun: str) -> str:
    """1, "file" → `1 file is`; 2 → `2 files are`."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def owner_share(ram: Json, owner: Json) -> str:
    """What one user has of his share of RAM; both of `status`."""
    waits = f", {owner['waiting_writers']} waiting" if owner["waiting_writers"] else ""
    return f"user {owner['uid']} {size(owner['taken_bytes'])} of {size(ram['share_bytes'])}{waits}"


def duration(seconds: float) -> str:
    """75 → `1 min 15 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def printable(name: str) -> str:
    """A file name that cannot disturb a terminal: not-UTF-8 bytes and control characters as
    escapes.
    """
    text = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(value: Any) -> None:
    """One JSON document, ASCII only, so that every file name survives."""
    click.echo(json.dumps(value, indent=2))


def console(*, stderr: bool = False) -> Console:
    """A rich console; into a pipe or file, lines are wide rather than wrapped."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    named = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else int(named) if named.isdecimal() else PIPE_COLUMNS
    return Console(stderr=stderr, highlight=False, width=width, soft_wrap=not stream.isatty())


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    stderr: bool = False,
) -> None:
    """Print a table; columns named in `numbers` are aligned right."""
    console_ = console(stderr=stderr)
    all_rows: Sequence[Sequence[str]] = [tuple(row) for row in rows]
    long = _long_table(console_, headings, all_rows, numbers) if len(all_rows) > LONG_ROWS else None
    if long is None:
        headings, all_rows = fitted(console_, headings, all_rows)
        drawn = _drawn(headings, all_rows, numbers, folded=_folded(console_, headings, all_rows))
        console_.width = wide_enough(console_, drawn)
        if not console_.soft_wrap:
            console_.print(drawn)
            return
        with console_.capture() as captured:
            console_.print(drawn)
        long = captured.get()
    click.echo(_without_padding(long) if console_.soft_wrap else long, err=stderr)


def _without_padding(drawn: str) -> str:
    """For a pipe or a file: no blanks at ends of lines."""
    return "\n".join(line.rstrip() for line in drawn.splitlines())


def fitted(
    console_: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Where a terminal has no room for all columns, those in which anything stands."""
    is_pipe = console_.soft_wrap
    if is_pipe or not rows or _needed(_widths(headings, rows)) <= console_.width:
        return headings, rows
    kept = [n for n, _heading in enumerate(headings) if any(row[n] for row in rows)]
    return [headings[n] for n in kept], [[row[n] for n in kept] for row in rows]


def _folded(
    console_: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> str | None:
    """The column whose cells are folded, so that a terminal has room for the table.

    Words that are cut in the middle, in each column, are worse to read than lines that are.
    None: nothing is folded, as there is room, or would not be even so.
    """
    widths = _widths(headings, rows)
    widest = max(widths)
    over = _needed(widths) - console_.width
    if console_.soft_wrap or not 0 < over <= widest - FOLDED_MIN:
        return None
    return headings[widths.index(widest)]


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Of each column: of its longest cell."""
    from rich.cells import cell_len

    return [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]


def _needed(widths: Sequence[int]) -> int:
    """Columns of a whole table, with what stands between."""
    return sum(widths) + len(BETWEEN) * (len(widths) - 1) + 2


def wide_enough(console_: Console, drawn: Table) -> int:
    """Columns for a table: at least as many as it cannot do without."""
    from rich.measure import Measurement

    wanted = Measurement.get(console_, console_.options.update(width=LINE_MAX), drawn)
    whole = console_.soft_wrap or all(column.no_wrap for column in drawn.columns)
    return max(console_.width, wanted.maximum if whole else wanted.minimum)


def _drawn(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[str],
    widths: Sequence[int | None] | None = None,
    folded: str | None = None,
) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, width in zip(headings, widths or [None] * len(headings), strict=True):
        drawn.add_column(
            heading,
            justify="right" if heading in numbers else "left",
            overflow="fold",
            min_width=width,
            no_wrap=heading != folded,
        )
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def _long_table(
    console_: Console,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Sequence[str],
) -> str | None:
    """What rich would draw, which takes 0.6 ms for each row: it draws the heading and one row, and
    the others are made like that one.

    None: they cannot be, as a cell would be folded or has what no line shows.
    """
    from rich.cells import cell_len

    if any(len(row) != len(headings) for row in rows):
        return None
    columns = list(zip(headings, *rows, strict=True))
    if not all(cell.isprintable() for column in columns for cell in column):
        return None
    widths = _widths(headings, rows)
    is_right = [heading in numbers for heading in headings]
    if _needed(widths) > console_.width:
        return None

    def line(row: Sequence[str]) -> str:
        cells = []
        for cell, width, right in zip(row, widths, is_right, strict=True):
            shown = cell.rstrip() if right else cell  # as rich has it
            space = " " * (width - cell_len(shown))
            cells.append(space + shown if right else shown + space)
        return f" {BETWEEN.join(cells)} "

    with console_.capture() as captured:
        console_.print(_drawn(headings, rows[:1], numbers, widths))
    around = captured.get().splitlines()
    if around.count(line(rows[0])) != 1:
        return None
    at = around.index(line(rows[0]))
    return "\n".join([*around[:at], *map(line, rows), *around[at + 1 :]])


STATE_WORDS = {"complete": "only in RAM", "clean": "persisted", "committed": "committing"}
"""What people see instead of a state of the records, whichever command says it; all other states
are words already.
"""


def state(report: Json) -> str:
    """The state of a file, of an entry of the queue or of a checkpoint: one word for each."""
    if report["state"] == "parked" and report.get("error") == WITHHELD:
        return "withheld"  # `ls` has no state of its own for it
    return STATE_WORDS.get(report["state"], str(report["state"]))


def checkpoint_state(report: Json) -> str:
    """How safe a checkpoint is."""
    if report["state"] == "persisting":
        return f"persisted {report['persisted_files']} of {report['files']}"
    return state(report)


def last_error(entry: Json) -> str:
    """Why an operation failed, in the daemon's own words."""
    detail = entry.get("last_detail")
    return (entry["last_error"] or "") + (f": {printable(detail)}" if detail else "")


def left_over(details: Json) -> None:
    """What an error says is left, as a table on stderr."""
    left = details.get("left") or []
    if not left:
        return
    rows = [
        (
            printable(entry["name"]),
            entry["operation"],
            size(entry["size"]),
            state(entry),
            str(entry["tries"]),
            last_error(entry),
        )
        for entry in left
    ]
    table(
        ("name", "operation", "size", "state", "tries", "last error"),
        rows,
        numbers=("size", "tries"),
        stderr=True,
    )
    more = details.get("left_operations", len(left)) - len(left)
    if more > 0:
        print(f"… and {more} more", file=sys.stderr)


@contextmanager
def progress(text: str) -> Iterator[Callable[[Json], None]]:
    """A progress bar on stderr, if that is a terminal; yields what takes the daemon's progress
    events.

    What may keep the drain from its end is told in any case, once: a command that waits must not be
    silent about it.
    """
    told = set[str]()

    def complain(event: Json) -> None:
        trouble = event.get("trouble")
        if trouble and trouble not in told:
            told.add(trouble)
            print(f"{text}: {printable(trouble)}", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield complain
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[left]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None, left="")
        most = 0

        def take(event: Json) -> None:
            nonlocal most
            complain(event)
            if event.get("event") != "progress":
                return
            weight = event["bytes"] + event["operations"]
            most = max(most, weight)
            left = f"{counted(event['operations'], 'operation')}, {size(event['bytes'])} left"
            bar.update(task, total=max(1, most), completed=most - weight, left=left)

        yield take
