"""Writes a manual page for each command and subcommand, made from what `--help` says, to docs/man;
the wheel brings them to share/man/man1.

Usage: python tools/write_man.py [DIRECTORY]. `tests/cli/test_man.py` fails while the pages say
something else. `acpfs-run` reads its options as torchrun does, so its page is made of argparse's
parser.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click_man.core import generate_man_page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from acpfs import __version__  # noqa: E402
from acpfs.cli import ctl, main, mount, train  # noqa: E402
from acpfs.training.launcher import options  # noqa: E402

PAGES = ROOT / "docs/man"
LINE_MAX = 200
PROGRAMS = {"acpfs": main.command, "acpfs-ctl": ctl.command, "acpfs-train": train.command}


def pages() -> dict[str, str]:
    """File name → text, of all commands."""
    found = {
        name: text
        for program, command in PROGRAMS.items()
        for name, text in _of(click.Context(command, info_name=program))
    }
    return {**found, "acpfs-run.1": launcher_page()}


def launcher_page() -> str:
    """Of acpfs-run."""
    parser = options.command_line()
    lines = [
        f'.TH "ACPFS-RUN" "1" "acpfs {__version__}" "{__version__}" "acpfs-run Manual"',
        ".SH NAME",
    ]
    lines += [
        rf"acpfs\-run \- {parser.description}",
        ".SH SYNOPSIS",
        r".B acpfs\-run",
        "[OPTIONS] PROGRAM [ARGUMENTS]...",
        ".SH DESCRIPTION",
    ]
    lines += [
        (
            f"{parser.description} Options are torchrun's, and may be written with _ or \\-; "
            "PET_NAME is the default of \\-\\-name."
        )
    ]
    for title, group in (
        ("OPTIONS", parser._optionals),  # noqa: SLF001  # noqa: SLF001
        ("OPTIONS THAT TORCHRUN HAS NOT", parser._action_groups[2]),  # noqa: SLF001  # noqa: SLF001
    ):
        lines += [
            f".SH {title}",
            *(line for action in group._group_actions for line in _option(action)),  # noqa: SLF001
        ]
    lines += [
        ".SH EXIT STATUS",
        *(
            line
            for status, when in options.STATUSES.items()
            for line in (".TP", status, f"{when}.")
        ),
    ]
    return "\n".join(lines) + "\n"


def _option(action: argparse.Action) -> list[str]:
    if action.help == argparse.SUPPRESS or not action.option_strings:
        return []
    value = (
        ""
        if action.nargs == 0
        else " "
        + (str(action.metavar or "") or "|".join(action.choices or ()) or action.dest.upper())
    )
    shown = action.default not in (None, "", False, argparse.SUPPRESS) and action.default != []
    default = f" [default: {action.default}]" if shown else ""
    names = ", ".join(rf"\fB{name}\fP".replace("-", r"\-") for name in action.option_strings)
    return [".TP", f"{names}{value}", f"{action.help or ''}.{default}"]


def _of(context: click.Context) -> Iterator[tuple[str, str]]:
    command = context.command
    path = context.command_path
    within = (
        {name: command.get_command(context, name) for name in command.list_commands(context)}
        if isinstance(command, click.Group)
        else {}
    )
    if isinstance(command, mount.DescribedCommand):
        command.describe()
    # the date of a page is that of its release, or each day would make other files
    text = generate_man_page(context, version=__version__, date=f"acpfs {__version__}")
    text = re.sub(r"\x08\n((?:.+\n?)+)", r".nf\n\1.fi\n", text)  # what click is told not to wrap
    text = re.sub(
        r"(\.SH NAME\n\S+ \\- ).*",
        lambda found: found[1] + command.get_short_help_str(LINE_MAX),
        text,
    )
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
