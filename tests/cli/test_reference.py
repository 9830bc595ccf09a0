"""docs/reference says what the code says, of everything that is a contract."""

from __future__ import annotations

import re
import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest

from acpfs.cli import ctl, main, train
from acpfs.cli.main import COMMANDS
from acpfs.config import CHANGEABLE, FIELDS, option_name
from acpfs.control import metric_table
from acpfs.control.verb_table import VERBS
from acpfs.errors import ExitCode

ROOT = Path(__file__).parents[2]
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools/write_reference.py"))
PAGES: Path = TOOL["PAGES"]


def page(name: str) -> str:
    return (PAGES / name).read_text(encoding="utf-8")


def test_the_pages_are_current() -> None:
    """If not: `python tools/write_reference.py`."""
    there = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    assert there == TOOL["pages"]()


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_row_with_its_option_and_default(name: str) -> None:
    (cells,) = re.findall(rf"^\| `{name}` \|(.*)\|$", page("settings.md"), re.MULTILINE)
    option, default, changeable, meaning = (
        cell.strip() for cell in re.split(r"(?<!\\)\|", cells)[:4]
    )
    assert option in (f"`--{option_name(name)}`", "argument")
    assert default
    assert (changeable == "yes") == (name in CHANGEABLE)
    assert meaning


def paths(command: click.Command, name: str) -> list[str]:
    """`acpfs deploy slurm` and the like, of a program."""
    found = [name]
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for inner in command.list_commands(context):
            below = command.get_command(context, inner)
            assert below is not None
            found += paths(below, f"{name} {inner}")
    return found


@pytest.mark.parametrize(
    ("name", "command"),
    [("acpfs", main.command), ("acpfs-ctl", ctl.command), ("acpfs-train", train.command)],
)
def test_every_command_and_verb_has_a_section(name: str, command: click.Command) -> None:
    sections = re.findall(r"^#+ (.*)$", page("commands.md"), re.MULTILINE)
    assert [path for path in paths(command, name) if path not in sections] == []


def test_what_is_a_command_is_there_by_the_tables_too() -> None:
    sections = re.findall(r"^#+ (.*)$", page("commands.md"), re.MULTILINE)
    assert {f"acpfs {name}" for name in COMMANDS} <= set(sections)
    assert {f"acpfs-ctl {name}" for name, verb in VERBS.items() if verb.help} <= set(sections)


def test_every_exit_code_and_metric_has_a_row() -> None:
    codes = page("exit-codes.md")
    assert [code for code in ExitCode if f"| {int(code)} | {code.name} |" not in codes] == []
    metrics = page("metrics.md")
    assert [one.name for one in metric_table.rows() if f"| `{one.name}` |" not in metrics] == []


def test_every_answer_of_a_verb_is_described() -> None:
    text = page("json.md")
    for name, verb in VERBS.items():
        if verb.answer:
            assert f"| `{name}` |" in text or re.search(rf"^## .*\b{name}\b", text, re.MULTILINE)


@dataclass
class Undescribed:
    """A record as somebody would add it."""

    told: int
    """What it counts."""
    untold: int = field(default=0)


def test_a_field_that_nothing_is_said_of_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Undescribed\.untold"):
        list(TOOL["columns"](Undescribed))
