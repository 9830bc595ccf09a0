"""One state has one word, whichever command says it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from acpfs.cli import show
from acpfs.cli.top_screen import queue_row
from acpfs.cli.verbs import ls
from acpfs.cli.verbs.status import print_queue

pytestmark = pytest.mark.clause("S417")
CLI = Path(show.__file__).parent
RAW = re.compile(r'\b(entry|f|one|file|report)\["state"\](?! (==|!=|in|not in) )')
"""A state that is shown, and not compared."""


def entry(**fields: Any) -> show.Json:
    return {
        "name": "run/f",
        "path": "run/f",
        "operation": "store",
        "size": 1,
        "state": "complete",
        "age_s": 1.0,
        "tries": 0,
        "last_error": None,
        "next_attempt": None,
        "why": "",
        "tier": "ram",
        "lane": "direct",
        "checksum": "",
        "error": "",
        "files": 2,
        "persisted_files": 0,
        **fields,
    }


def ls_says(monkeypatch: pytest.MonkeyPatch, one: show.Json) -> str:
    class Target:
        def with_paths(self, paths: list[str]) -> tuple[None, list[str]]:
            return None, paths

    monkeypatch.setattr(ls, "ask", lambda *_arguments, **_options: {"items": [one]})
    command: click.Command = ls.command
    done = CliRunner().invoke(command, [], obj=Target(), catch_exceptions=False)
    return str(done.output)


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("complete", "only in RAM"),
        ("clean", "persisted"),
        ("committed", "committing"),
        ("staged", "staged"),
        ("parked", "parked"),
    ],
)
def test_all_say_the_same(
    state: str, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = entry(state=state)
    assert show.checkpoint_state(one) == word
    assert queue_row(one)[3] == word
    print_queue({"queue": [one], "queue_length": 1})
    show.left_over({"left": [one]})
    told = capsys.readouterr()
    for output in (told.out, told.err, ls_says(monkeypatch, one)):
        assert word in output
        assert word == state or not re.search(rf"\b{state}\b", output)


def test_what_is_withheld_is_not_called_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    output = ls_says(monkeypatch, entry(state="parked", error="EHOSTDOWN"))
    assert "withheld" in output
    assert "parked" not in output


def test_no_command_shows_a_state_by_itself() -> None:
    found = [
        f"{path.name}: {line.strip()}"
        for path in CLI.rglob("*.py")
        if path.name != "show.py"
        for line in path.read_text().splitlines()
        if RAW.search(line)
    ]
    assert found == []
