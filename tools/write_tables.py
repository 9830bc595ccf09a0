"""Writes into docs/OPERATIONS.md what the table of control verbs says: which there are, who may
call them, what has no command.

Usage: python tools/write_tables.py. `tests/control/test_verb_table.py` fails while the page says
something else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from acpfs.control.verb_table import VERBS, Verb

OPERATIONS = Path(__file__).parents[1] / "docs/OPERATIONS.md"


def shown(name: str, verb: Verb) -> str:
    """A verb as the page names it: the command without its arguments, or the verb itself."""
    found = re.match(r"[a-z]+( (--)?[a-z]+(?= |$))*", verb.usage[0] if verb.usage else name)
    return f"`{found[0] if found else name}`"


def row(*cells: str) -> str:
    """One line of a table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def listed(names: Iterable[str]) -> str:
    """`a`, `b` and `c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}"


def with_rows(page: str, heading: str, rows: list[str]) -> str:
    """The page with these rows below a heading of a table."""
    table = re.compile(rf"({re.escape(heading)}\n\|---\|---\|\n)(?:\|.*\n)*")
    return table.sub(lambda found: found[1] + "".join(f"{line}\n" for line in rows), page)


def with_tables(page: str) -> str:
    """The page with what follows from the table."""
    usages = [
        row(", ".join(f"`{usage}`" for usage in verb.usage), verb.does)
        for verb in VERBS.values()
        if verb.usage
    ]
    page = with_rows(page, "| verb | does |", usages)
    owners = listed(
        dict.fromkeys(shown(name, verb) for name, verb in VERBS.items() if verb.owner_only)
    )
    page = re.sub(r"(?<=who may do all but )[^;]*(?=;)", lambda _found: owners, page)
    beside = [
        f"`{name}`" + (f" ({shown(name, verb)})" if verb.usage else "")
        for name, verb in VERBS.items()
        if not verb.help
    ]
    return re.sub(
        r"(?<=^The verbs are those of `acpfs-ctl`, and ).*(?=\.$)",
        lambda _found: listed(beside),
        page,
        flags=re.MULTILINE,
    )


def main() -> None:
    """Write the page."""
    OPERATIONS.write_text(with_tables(OPERATIONS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
