"""Writes a manual page for each command and subcommand, made from what `--help` says, to docs/man,
and of what mount(8) and umount(8) call, made from what they take, to docs/man8; the wheel brings
them to share/man.

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
from acpfs.cli import ctl, main, mount, system_mount, train  # noqa: E402
from acpfs.config import FIELDS, descriptions  # noqa: E402
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
    return {**found, "acpfs-run.1": launcher_page(), **helper_pages()}


def helper_pages() -> dict[str, str]:
    """Of the programs behind `mount -t acpfs` and `umount`."""
    options = [
        line
        for name, about in descriptions().items()
        if name not in ("backing", "mountpoint")
        for line in (
            ".TP",
            rf"\fB{_escaped(name)}\fP" + ("" if FIELDS[name].type is bool else "=VALUE"),
            _escaped(" ".join(about.partition("\n\n")[0].split())),
        )
    ]
    refused = [
        line
        for name, why in system_mount.REFUSED.items()
        for line in (".TP", rf"\fB{name}\fP", f"Refused: {_escaped(why)}.")
    ]
    passed_over = ", ".join(sorted({*system_mount.IGNORED, *system_mount.IGNORED_PREFIXES}))
    statuses = [
        line
        for status, when in (
            (0, "Done."),
            (system_mount.MOUNT_USAGE, "An option that is unknown, or that cannot be honoured."),
            (system_mount.MOUNT_FAILED, "Anything else; the line on standard error says what."),
        )
        for line in (".TP", str(status), when)
    ]
    mount_page = [
        *_head("mount.acpfs", "what mount(8) and fstab call for a file system of type acpfs"),
        ".SH SYNOPSIS",
        r"\fBmount\fP \-t acpfs BACKING MOUNTPOINT [\-o OPTION[=VALUE],...]",
        ".PP",
        r"\fBmount.acpfs\fP BACKING MOUNTPOINT [\-sfnvw] [\-N NS] [\-t TYPE] [\-o OPTIONS]",
        ".SH DESCRIPTION",
        "Mounts MOUNTPOINT over BACKING, as \\fBacpfs mount\\fP does, and returns when it serves.",
        "Options are names of settings, with _ or \\-; those that are yes or no need no value.",
        "mount(8) looks for it in /sbin: link it there from where acpfs is installed.",
        ".SH OPTIONS",
        ".TP",
        r"\fB\-s\fP",
        "Pass over options that are unknown.",
        ".TP",
        r"\fB\-f\fP",
        "Look at the options, and mount nothing.",
        ".SH MOUNT OPTIONS",
        ".TP",
        r"\fBconfig\fP=FILE",
        "A configuration file (TOML); options here count before it.",
        *options,
        *refused,
        ".PP",
        f"Passed over, as they are for others or hold anyway: {_escaped(passed_over)}",
        ".SH EXIT STATUS",
        *statuses,
        ".SH EXAMPLE",
        ".nf",
        "/shared/ckpt /mnt/acp acpfs ram=64G,_netdev,nofail 0 0",
        ".fi",
        ".SH SEE ALSO",
        ".BR acpfs-mount (1),",
        ".BR acpfs-umount (1),",
        ".BR umount.fuse.acpfs (8),",
        ".BR mount (8)",
    ]
    umount_page = [
        *_head("umount.fuse.acpfs", "what umount(8) calls for a mount of acpfs"),
        ".SH SYNOPSIS",
        r"\fBumount\fP MOUNTPOINT",
        ".PP",
        r"\fBumount.fuse.acpfs\fP MOUNTPOINT [\-nlfvr] [\-t TYPE] [\-N NS]",
        ".SH DESCRIPTION",
        "Copies what is not persisted yet, and unmounts, as \\fBacpfs umount\\fP does.",
        ".SH OPTIONS",
        ".TP",
        r"\fB\-l\fP, \fB\-f\fP",
        "Leave what is not persisted in the RAM tier, for the next mount.",
        ".SH EXIT STATUS",
        *statuses,
        ".SH SEE ALSO",
        ".BR acpfs-umount (1),",
        ".BR mount.acpfs (8)",
    ]
    return {
        "mount.acpfs.8": "\n".join(mount_page) + "\n",
        "umount.fuse.acpfs.8": "\n".join(umount_page) + "\n",
    }


def _head(name: str, about: str) -> list[str]:
    title = f'.TH "{name.upper()}" "8" "acpfs {__version__}" "{__version__}" "{name} Manual"'
    return [title, ".SH NAME", rf"{name} \- {about}"]


def _escaped(text: str) -> str:
    """As roff wants it."""
    return text.replace("\\", r"\e").replace("-", r"\-")


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
    current = pages()
    sections = {".1": directory, ".8": directory.with_name("man8")}
    for suffix, section in sections.items():
        section.mkdir(exist_ok=True)
        for path in section.glob(f"*{suffix}"):
            if path.name not in current:
                path.unlink()
    for name, text in current.items():
        (sections[Path(name).suffix] / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else PAGES)
