"""Writes a manual page for each command and subcommand, made from what `--help` says, to docs/man; the wheel brings them to share/man/man1.

Usage: python tools/write_man.py [DIRECTORY]. `tests/cli/test_man.py` fails while the pages say something else.
`acpfs-run` has only its help: it reads its options as torchrun does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click_man.core import generate_man_page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from acpfs import __version__  # noqa: E402
from acpfs.cli import ctl, main, train  # noqa: E402

PAGES = ROOT / "docs/man"
LINE_MAX = 200
PROGRAMS = {"acpfs": main.command, "acpfs-ctl": ctl.command, "acpfs-train": train.command}


def pages() -> dict[str, str]:
    """File name → text, of all commands."""
    return {name: text for program, command in PROGRAMS.items() for name, text in _of(click.Context(command, info_name=program))}


def _of(context: click.Context) -> Iterator[tuple[str, str]]:
    command, path = context.command, context.command_path
    within = (
        {name: command.get_command(context, name) for name in command.list_commands(context)} if isinstance(command, click.Group) else {}
    )
    # the date of a page is that of its release, or each day would make other files
    text = generate_man_page(context, version=__version__, date=f"acpfs {__version__}")
    text = re.sub(r"\x08\n((?:.+\n?)+)", r".nf\n\1.fi\n", text)  # what click is told not to wrap
    text = re.sub(r"(\.SH NAME\n\S+ \\- ).*", lambda found: found[1] + command.get_short_help_str(LINE_MAX), text)
    if within:
        see = ",\n".join(f".BR {_dashed(path)}-{name} (1)" for name in sorted(within))
        text = f"{text.rstrip()}\n.SH SEE ALSO\n{see}\n"
    yield f"{_dashed(path)}.1", text.rstrip() + "\n"
    for name, inner in within.items():
        assert inner is not None
        yield from _of(click.Context(inner, info_name=name, parent=context))


def _dashed(path: str) -> str:
    """`acpfs-ctl [MOUNTPOINT] nodes wait` → `acpfs-ctl-nodes-wait`."""
    return "-".join(word for word in path.split() if not word.startswith("["))


def write(directory: Path) -> None:
    """Bring a directory to what the commands say."""
    directory.mkdir(exist_ok=True)
    current = pages()
    for path in directory.glob("*.1"):
        if path.name not in current:
            path.unlink()
    for name, text in current.items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else PAGES)
