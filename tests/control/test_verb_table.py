"""The table of verbs, and what must agree with it: handlers, commands, and docs/OPERATIONS.md."""

import runpy
from pathlib import Path
from typing import Any, cast

import pytest

from acpfs.cli import verbs
from acpfs.control.verb_table import VERBS
from acpfs.control.verbs import HANDLERS
from acpfs.worker.worker_verbs import WorkerVerbs


def test_each_verb_has_a_handler() -> None:
    nothing = cast("Any", None)
    of_worker = WorkerVerbs(nothing, nothing).answers()
    assert sorted([*HANDLERS, *of_worker]) == sorted(
        name for name, verb in VERBS.items() if verb.has_handler
    )


def test_each_command_is_a_module_of_its_name() -> None:
    modules = {path.stem for path in Path(str(verbs.__file__)).parent.glob("[a-z]*.py")}
    assert sorted(modules) == sorted(name for name, verb in VERBS.items() if verb.help)


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.help])
def test_each_command_says_how_it_is_used(name: str) -> None:
    assert all(usage.split()[0] == name for usage in VERBS[name].usage)
    assert VERBS[name].usage
    assert VERBS[name].does


def test_the_page_says_what_the_table_says() -> None:
    """If not: `python tools/write_tables.py`."""
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools/write_tables.py"))
    page = tool["OPERATIONS"].read_text(encoding="utf-8")
    assert tool["with_tables"](page) == page
    for name, verb in VERBS.items():
        assert all(
            f"| `{usage.replace('|', chr(92) + '|')}`" in page or f", `{usage}`" in page
            for usage in verb.usage
        ), name
