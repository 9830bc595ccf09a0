"""Writes docs/reference from the code: settings, commands, exit codes, metrics, and JSON.

Usage: python tools/write_reference.py [DIRECTORY]. `tests/cli/test_reference.py` fails while the
pages say something else. Texts come from where each thing is defined: a setting's from the schema,
a command's from its help, a field's from the text below it in its record.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
from attrs import NOTHING, Attribute

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from acpfs import errors  # noqa: E402
from acpfs.cli import ctl, main, mount, train  # noqa: E402
from acpfs.config import CHANGEABLE, FIELDS, descriptions, option_name  # noqa: E402
from acpfs.control import metric_table, reports  # noqa: E402
from acpfs.control.verb_table import VERBS  # noqa: E402
from acpfs.drain_records import Verification  # noqa: E402
from acpfs.mounting.doctor import Finding  # noqa: E402
from acpfs.mounting.tier_salvage import Saved  # noqa: E402
from acpfs.training.drill import Verdict  # noqa: E402
from acpfs.training.launcher import options as launcher  # noqa: E402

PAGES = ROOT / "docs/reference"
BY = "This page is made from the code by `tools/write_reference.py`.\n"
SEE_ALSO = {
    "prefault": ("memory that is made ready", "OPERATIONS.md#memory-that-is-made-ready"),
    "reserve": ("files that must not wait", "OPERATIONS.md#files-that-must-not-wait"),
    "stagger_s": ("SCALE", "SCALE.md"),
    "wait_for_peers_s": ("many machines", "OPERATIONS.md#many-machines"),
    "keep_last_persisted": ("the guard", "OPERATIONS.md#what-stays-on-the-backing-directory"),
    "keeper_wait_s": ("a daemon that is killed", "OPERATIONS.md#a-daemon-that-is-killed"),
    "pointer_patterns": ("patterns", "OPERATIONS.md#pointers-and-checkpoints-by-name"),
    "checkpoint_patterns": ("patterns", "OPERATIONS.md#pointers-and-checkpoints-by-name"),
}
"""Setting → what more there is to read about it: the link's text, and its place below docs/."""
PROGRAMS = {"acpfs": main.command, "acpfs-ctl": ctl.command, "acpfs-train": train.command}
ANSWERS: dict[str, tuple[type, str]] = {
    "status": (reports.Status, "one object"),
    "ls": (reports.FileState, "a list of these"),
    "checkpoints": (reports.CheckpointReport, "a list of these"),
    "history": (reports.HistoryEntry, "a list of these"),
    "nodes": (reports.NodeReport, "a list of these"),
    "verify, verify --ram, repair": (Verification, "a list of these"),
    "preload --wait": (reports.PreloadedFile, "a list of these"),
    "doctor": (reports.Fault, "a list of these"),
}
"""Verb → the record that it answers with."""
COMMAND_ANSWERS: dict[str, tuple[type, str]] = {
    "acpfs doctor": (Finding, "a list of these"),
    "acpfs salvage": (Saved, "a list of these"),
    "acpfs-train drill": (Verdict, "a list of these, each with `point`: which drill it was"),
}
"""Command that asks no mount → the record that its `--json` prints."""
OTHER_COMMANDS = {
    "acpfs-train interval": (
        "`job` (what the formula was given: `save_s`, `restart_s`, `fault_s`, `covered`, "
        "`node_share`, `drain_s`), `intervals`: a list of `name`, `interval_s` (null: saving never "
        "pays), `waste`, `lost_s_a_day`, `implied_fault_s`"
    ),
    "acpfs-train plan": (
        "`ranks`, `nodes`, `copies`, `rank_bytes`, `added_bytes`, `checkpoint_bytes`, "
        "`node_bytes`, `ram_wanted_bytes`, `buddy_bytes`, `ram_holds` (null: `--ram` was not "
        "said), `covers`: `any_rank`, `any_node`, `any_two_nodes`, `fatal_nodes`, "
        "`fatal_pairs`, `pairs`"
    ),
    "acpfs-train status": (
        "a list, one of each coordinator of this node: `at`, `job`, `coordinator`, `active`, "
        "`term`, `generation`, `state`, `world`, `connected`, `gate`, `shards`, `tls`, "
        "`coordinators` (number → address), `counts` (name → how often), `text`, `stall` (null: "
        "nobody hangs), `ranks`: a list of `rank`, `node`, `lost` (why; null: it is not), "
        "`unprotected` (why; null: it is not), `stacks`, and once it has begun `done`, `ready`, "
        "`phase`; for people: texts in it may change with any version"
    ),
}
"""`tests/cli/test_train_json.py` runs them, and compares names."""
COMMON = {
    "path": "below the mount point",
    "size": "bytes",
    "since": "seconds since the epoch",
    "at": "seconds since the epoch",
    "error": "what went wrong; null: nothing",
}
"""Fields that mean the same wherever nothing else is written below them."""
TYPES = {
    "int": "number",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "NoneType": "null",
}
COLUMNS = 105
LEVEL_MAX = 4
"""Of headings: deeper ones are not in a table of contents."""


@dataclass(frozen=True)
class Column:
    """One field of a record."""

    name: str
    kind: str
    meaning: str


def row(*cells: str) -> str:
    """One line of a table."""
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def table(*headings: str) -> list[str]:
    """The two lines above the rows."""
    return [row(*headings), "|" + "---|" * len(headings)]


def pages() -> dict[str, str]:
    """File name → text."""
    made = {
        "README.md": contents(),
        "settings.md": settings(),
        "commands.md": commands(),
        "exit-codes.md": exit_codes(),
        "metrics.md": metrics(),
        "json.md": answers(),
    }
    return {name: "\n".join(lines).rstrip() + "\n" for name, lines in made.items()}


def contents() -> list[str]:
    """The page that leads to the others."""
    return [
        "# Reference",
        "",
        BY,
        *table("page", "has"),
        row("[Settings](settings.md)", f"{len(FIELDS)} keys, their options, defaults and meaning"),
        row("[Commands](commands.md)", "every command and verb with its options, as `--help`"),
        row("[Exit codes](exit-codes.md)", "of commands, and of a training job"),
        row("[Metrics](metrics.md)", "names, kinds and meaning"),
        row("[JSON](json.md)", "what `--json` prints and the socket answers, field by field"),
        "",
        (
            "All of it is a contract: names are only added, and what is to go is named in the "
            "changelog before ([rule](../OPERATIONS.md#what-changes-from-version-to-version))."
        ),
    ]


# -- settings


def settings() -> list[str]:
    """All settings, in the order of the schema."""
    known = descriptions()
    lines = [
        "# Settings",
        "",
        BY,
        (
            "A key is for the file that `acpfs mount --config FILE` reads (TOML); the option for "
            "the command line, and without its dashes for `mount -o`."
        ),
        "The command line wins over the file, the file over the defaults.",
        "Sizes are bytes, or `512M`, `64G` … (factors of 1024); keys that end in `_s` are seconds.",
        "What is *changeable* can be set while the mount is in use: `acpfs-ctl set KEY=VALUE`.",
        "An unknown key or a value that makes no sense is an error that names it.",
        "",
        *table("key", "option", "default", "changeable", "meaning"),
    ]
    for name, field in FIELDS.items():
        option = "argument" if name in mount.ARGUMENTS else f"`--{option_name(name)}`"
        more = SEE_ALSO.get(name)
        also = f" More: [{more[0]}](../{more[1]})." if more else ""
        lines.append(
            row(
                f"`{name}`",
                option,
                default(field),
                "yes" if name in CHANGEABLE else "",
                known[name] + also,
            )
        )
    return lines


def default(field: Attribute[Any]) -> str:
    """As the table shows it."""
    value = field.default
    if value is NOTHING:
        return "required"
    shown = value.value if isinstance(value, Enum) else value
    if shown is None:
        return "–"
    if isinstance(shown, bool):
        return "yes" if shown else "no"
    if isinstance(shown, tuple):
        return ", ".join(f"`{one}`" for one in shown)
    return f"`{shown:g}`" if isinstance(shown, float) else f"`{shown}`"


# -- commands


def commands() -> list[str]:
    """Every command and verb."""
    lines = [
        "# Commands",
        "",
        BY,
        "The same is in the manual pages (`man acpfs-mount`) and in `--help`.",
        (
            "`acpfs-ctl` talks to the daemon through a socket, never through the mount, and "
            "answers while the storage hangs."
        ),
        "Its MOUNTPOINT may be left out when there is only one mount, or when the PATHs say it.",
        (
            "`acpfs-run`, which starts ranks in place of torchrun, is in "
            "[TRAINING](../TRAINING.md#acpfs-run)."
        ),
    ]
    for name, command in PROGRAMS.items():
        lines += ["", *described(click.Context(command, info_name=name), 2)]
    return lines


def described(context: click.Context, level: int) -> Iterator[str]:
    """A command: usage, what it does, options; then those below it."""
    command = context.command
    yield f"{'#' * min(level, LEVEL_MAX)} {named(context)}"
    yield ""
    usage = command.collect_usage_pieces(context)
    yield f"`{' '.join([named(context), *usage])}`"
    yield ""
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    for part in text.split("\n\n"):
        yield from textwrap.wrap(
            " ".join(part.split()), COLUMNS, break_long_words=False, break_on_hyphens=False
        )
        yield ""
    if isinstance(command, mount.DescribedCommand):
        yield f"And an option for each of the [{len(FIELDS)} settings](settings.md)."
        yield ""
    options = list(own_options(context))
    if options:
        yield from table("option", "meaning")
        yield from (row(f"`{names}`", text) for names, text in options)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield ""
            yield from described(click.Context(inner, info_name=name, parent=context), level + 1)


def own_options(context: click.Context) -> Iterator[tuple[str, str]]:
    """Names and meaning of a command's options, but for `--help` and those that are settings."""
    is_mount = isinstance(context.command, mount.DescribedCommand)
    for one in context.command.params:
        if isinstance(one, click.Option) and not (is_mount and one.name in FIELDS):
            record = one.get_help_record(context)
            assert record is not None
            yield record


def named(context: click.Context) -> str:
    """`acpfs-ctl nodes wait`: without the arguments that stand between."""
    return " ".join(word for word in context.command_path.split() if not word.startswith("["))


# -- exit codes


def exit_codes() -> list[str]:
    """Of commands, and of the launcher."""
    texts = below(errors, "ExitCode")
    lines = [
        "# Exit codes",
        "",
        BY,
        "Of `acpfs` and `acpfs-ctl`; a user's error is one line on stderr, never a traceback.",
        "",
        *table("code", "name", "meaning"),
    ]
    lines += [
        row(str(int(code)), code.name, texts.get(code.name, "done")) for code in errors.ExitCode
    ]
    lines += [
        row("130", "–", "interrupted"),
        "",
        "`mount.acpfs` has mount(8)'s: 1 for a bad option, 32 for a mount that failed.",
        "",
        "## acpfs-run",
        "",
        (
            "What each means for a rank, and what to do: "
            "[of a training job](../OPERATIONS.md#of-a-training-job)."
        ),
        "",
        *table("status", "when"),
    ]
    return lines + [row(status, when) for status, when in launcher.STATUSES.items()]


# -- metrics


def metrics() -> list[str]:
    """Those with a name of their own."""
    return [
        "# Metrics",
        "",
        BY,
        (
            "`acpfs-ctl metrics` prints them; `metrics_port` serves them over HTTP, `metrics_file` "
            "writes them for a node exporter."
        ),
        "They have the labels `mount` and `node`.",
        "What ends in `_total` and is not in this table is one of the `counters` of `status`.",
        "A dashboard and alerts: [Operating acpfs](../OPERATIONS.md#dashboard-and-alerts).",
        "",
        *table("metric", "kind", "meaning"),
        *(row(f"`{one.name}`", one.kind.value, one.text) for one in metric_table.rows()),
    ]


# -- JSON


def answers() -> list[str]:
    """What verbs answer, and the records in it."""
    lines = [
        "# JSON",
        "",
        BY,
        "What `--json` prints, and the socket answers.",
        "Fields are not removed and keep their meaning; new ones may come.",
        (
            "Sizes are bytes, durations seconds (`…_s`), points in time seconds since the epoch "
            "(`…_at`, `since`, `at`, `next_attempt`); absent is `null`."
        ),
        "Errors, the socket, names that are not UTF-8: [Operating acpfs](../OPERATIONS.md#json).",
    ]
    shown: set[type] = set()
    for verb, (record, how) in ANSWERS.items():
        lines += ["", f"## {verb}", "", f"{how[0].upper()}{how[1:]}.", ""]
        lines += _tables(record, shown)
    lines += ["", "## Other verbs", "", *table("verb", "answer")]
    for name, verb_entry in VERBS.items():
        if verb_entry.answer and name not in ANSWERS:
            lines.append(row(f"`{name}`", verb_entry.answer))
    for name, (record, how) in COMMAND_ANSWERS.items():
        lines += ["", f"## {name}", "", f"{how[0].upper()}{how[1:]}.", ""]
        lines += _tables(record, shown)
    lines += ["", "## Other commands", "", *table("command", "answer")]
    lines += [row(f"`{name}`", text) for name, text in OTHER_COMMANDS.items()]
    return lines


def _tables(record: type, shown: set[type]) -> Iterator[str]:
    """The fields of a record, and then those of the records in them that were not shown yet."""
    shown.add(record)
    yield from table("field", "is", "meaning")
    within: list[tuple[str, type]] = []
    for column, inner in columns(record):
        yield row(f"`{column.name}`", column.kind, column.meaning)
        within += [(column.name, one) for one in inner if one not in shown]
    for name, one in within:
        if one in shown:
            continue
        yield ""
        yield f"### {name}"
        yield ""
        yield " ".join((inspect.getdoc(one) or "").split())
        yield ""
        yield from _tables(one, shown)


def columns(record: type) -> Iterator[tuple[Column, list[type]]]:
    """Each field of a record, and the records that are in it.

    Raises:
        ValueError: nothing says what a field means.
    """
    texts = below(sys.modules[record.__module__], record.__name__)
    hints = get_type_hints(record)
    for field in dataclasses.fields(record):
        meaning = texts.get(field.name) or field.metadata.get(reports.GAUGE)
        meaning = meaning or COMMON.get(field.name)
        if meaning is None:
            raise ValueError(f"{record.__name__}.{field.name} has no text below it")
        meaning = re.sub(r"\bNone\b", "null", meaning)
        kind, inner = shape(hints[field.name])
        yield Column(field.name, kind, meaning), inner


def shape(hint: Any) -> tuple[str, list[type]]:
    """A type in words, and the records in it."""
    arguments = get_args(hint)
    name = getattr(hint, "__name__", str(hint))
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return "an object", [hint]
    if not arguments:
        return TYPES[name], []
    is_list = name == "list" or (name == "tuple" and arguments[-1] is ...)
    parts = [shape(one) for one in arguments if one is not ...]
    inner = [one for _words, found in parts for one in found]
    words = [text for text, _found in parts]
    if is_list:
        return ("a list of objects" if inner else f"a list: {words[0]}"), inner
    if name == "dict":
        return f"an object: name → {'object' if inner else words[1]}", inner
    if name == "tuple":
        return f"a pair: {words[0]}", inner
    return " or ".join(dict.fromkeys(words)), inner


def below(module: Any, name: str) -> dict[str, str]:
    """Name → the text below it in the body of a class."""
    tree = ast.parse(inspect.getsource(module))
    (body,) = (
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
    )
    found = {}
    for line, under in itertools.pairwise(body):
        if not (
            isinstance(under, ast.Expr)
            and isinstance(under.value, ast.Constant)
            and isinstance(under.value.value, str)
        ):
            continue
        if isinstance(line, ast.AnnAssign):
            found[ast.unparse(line.target)] = under.value.value
        elif isinstance(line, ast.Assign):
            found[ast.unparse(line.targets[0])] = under.value.value
    return found


def write(directory: Path) -> None:
    """Bring a directory to what the code says."""
    directory.mkdir(exist_ok=True)
    current = pages()
    for path in directory.glob("*.md"):
        if path.name not in current:
            path.unlink()
    for name, text in current.items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else PAGES)
