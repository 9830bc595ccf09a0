"""Commands without a mount: help, exit codes, one line per error, and quick."""

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from acpfs.backing import anchor
from acpfs.cli import show
from acpfs.cli.ctl import COMMANDS as VERBS
from acpfs.cli.main import COMMANDS
from acpfs.cli.verbs import status as status_verb
from acpfs.cli.verbs.status import print_queue, unsafe_lines
from acpfs.config import FIELDS, option_name
from acpfs.errors import ExitCode
from acpfs.training.interrupt import forget_asynchronous
from acpfs.worker import node_reports

HEAVY = (
    "pydantic",
    "trio",
    "rich",
    "pyfuse3",
    "structlog",
    "prometheus_client",
    "sqlite3",
    "xxhash",
)


def run(module: str, *words: str, runtime: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ACPFS_RUNTIME_DIR": str(runtime), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", f"acpfs.cli.{module}", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        check=False,
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, tmp_path: Path) -> None:
    done = run("ctl", verb, "--help", runtime=tmp_path)
    assert done.returncode == 0
    assert "Usage: acpfs-ctl" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, tmp_path: Path) -> None:
    assert run("main", command, "--help", runtime=tmp_path).returncode == 0


def test_every_setting_is_an_option_with_its_default(tmp_path: Path) -> None:
    text = run("main", "mount", "--help", runtime=tmp_path).stdout
    for name in FIELDS:
        if name not in ("backing", "mountpoint"):
            assert re.search(rf"--{option_name(name)}\b", text), name


@pytest.mark.parametrize(
    ("module", "words", "code", "said"),
    [
        ("ctl", ["status"], ExitCode.NOT_MOUNTED, "no acpfs is mounted"),
        ("ctl", ["/nowhere", "status"], ExitCode.NOT_MOUNTED, "/nowhere lies in no acpfs mount"),
        ("ctl", ["wait", "/tmp/x"], ExitCode.NOT_MOUNTED, "/tmp/x lies in no acpfs mount"),
        ("ctl", ["statsu"], ExitCode.USAGE, "No such command 'statsu'"),
        ("ctl", ["flush", "--timeout", "-1"], ExitCode.USAGE, "--timeout"),
        ("ctl", ["set"], ExitCode.USAGE, "KEY=VALUE"),
        ("main", ["mount"], ExitCode.USAGE, "Usage: acpfs mount [OPTIONS] [BACKING] [MOUNTPOINT]"),
        (
            "main",
            ["mount", "/b"],
            ExitCode.USAGE,
            "name BACKING and MOUNTPOINT, or a --config FILE that has them",
        ),
        ("main", ["umount"], ExitCode.USAGE, "Usage: acpfs umount [OPTIONS] [MOUNTPOINT]"),
        (
            "main",
            ["mount", "/b", "/m", "--ram", "lots"],
            ExitCode.USAGE,
            "ram: 'lots' is not a size",
        ),
        ("main", ["mount", "/b", "/m", "--rom", "1"], ExitCode.USAGE, "No such option"),
        ("main", ["mount", "/b", "/m", "--fsync", "never"], ExitCode.USAGE, "fsync = 'never'"),
        ("main", ["mount", "/b", "/m", "--config", "/none.toml"], ExitCode.USAGE, "/none.toml"),
        ("main", ["umount", "/nowhere"], ExitCode.NOT_MOUNTED, "no acpfs is mounted on /nowhere"),
        ("main", ["umount"], ExitCode.USAGE, "name a mount point"),
        ("main", ["mount"], ExitCode.USAGE, "name BACKING and MOUNTPOINT"),
        (
            "main",
            ["mount", "/nowhere", "/tmp"],
            ExitCode.ENVIRONMENT,
            "backing directory /nowhere does not exist",
        ),
        (
            "main",
            ["mount", "/tmp", "/nowhere"],
            ExitCode.ENVIRONMENT,
            "mount point /nowhere does not exist",
        ),
        (
            "main",
            ["mount", "/etc/passwd", "/mnt"],
            ExitCode.ENVIRONMENT,
            "backing directory /etc/passwd is not a directory",
        ),
        (
            "main",
            ["mount", "/tmp", "/etc/passwd"],
            ExitCode.ENVIRONMENT,
            "mount point /etc/passwd is not a directory",
        ),
        (
            "main",
            ["mount", "/tmp", "/mnt", "--ram", "900T"],
            ExitCode.ENVIRONMENT,
            "more than this machine has",
        ),
        ("main", ["mount", "/", "/mnt"], ExitCode.REFUSED, "lie one inside the other"),
    ],
)
def test_a_users_error_is_one_line_and_a_code(
    module: str, words: list[str], code: ExitCode, said: str, tmp_path: Path
) -> None:
    if words[0] == "mount" and "--" not in " ".join(words) and not os.path.exists("/dev/fuse"):
        pytest.skip("needs /dev/fuse")
    done = run(module, *words, runtime=tmp_path)
    assert said in done.stderr
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 4  # click adds two lines of usage


@pytest.mark.parametrize("module", ["ctl", "main"])
def test_parsing_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, acpfs.cli.{module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
        ).stdout.strip()
        == "[]"
    )


def test_a_status_imports_no_file_system() -> None:
    code = (
        f"import sys, acpfs.cli.verbs.status, acpfs.cli.verbs.flush; print([m for m in {HEAVY!r} "
        "if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1536, "1.5 KiB"),
        (100 << 20, "100 MiB"),
        (5 << 50, "5.0 PiB"),
        (9000 << 50, "9000 PiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert show.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (42, "42 s"), (75, "1 min 15 s"), (7300, "2 h 1 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert show.duration(seconds) == text


def test_a_hostile_file_name_cannot_disturb_a_terminal() -> None:
    assert show.printable("a\x1b[2Jb\n\udcff[bold]") == "a\\x1b[2Jb\\n\\xff[bold]"


PACE = {"in_per_s": 420.0, "out_per_s": 12.5, "falls_behind": True}


def status(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "state": "serving",
        "parked": 0,
        "interrupted": 0,
        "queue": [],
        "queue_length": 0,
        "queue_bytes": 0,
        "oldest_unpersisted_age_s": 0,
        "open_files": 0,
        "ram": {"waiting_writers": 0},
        "backing_health": {"state": "ok", "why": None},
    }
    return {**base, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "safe: everything that was closed"),
        ({"open_files": 2}, "safe when they are closed"),
        (
            {"queue_length": 3, "queue_bytes": 1 << 30, "oldest_unpersisted_age_s": 75},
            "not yet safe: 3 operations, 1.0 GiB, the oldest 1 min 15 s old",
        ),
        (
            {
                "queue_length": 1,
                "queue_bytes": 1,
                "oldest_unpersisted_age_s": 75,
                "queue": [{"state": "staged", "why": "it waits"}],
            },
            "the oldest 1 min 15 s old: it waits",
        ),
        ({"state": "draining"}, "told to end"),
        ({"pace": PACE}, "NOT KEEP UP: 420.0 operations a second come, 12.5 go, and 0 wait"),
        ({"parked": 1}, "REFUSED"),
        (
            {
                "parked": 1,
                "queue": [
                    {
                        "state": "parked",
                        "name": "a\n",
                        "last_error": "EPERM",
                        "last_detail": "the owner\x07 says no",
                    }
                ],
            },
            "; the first: a\\n (EPERM: the owner\\x07 says no)",
        ),
        (
            {"cluster": {"waiting": [], "clock_problem": "pointer files wait 9 s longer"}},
            "pointer files wait 9 s longer",
        ),
        (
            {
                "waiting_calls": [
                    {
                        "path": "run\n",
                        "pid": 7,
                        "command": "ls",
                        "call": "readdir",
                        "waited_s": 75.0,
                    }
                ]
            },
            "run\\n (process 7, ls) waits in readdir for 1 min 15 s",
        ),
        (
            {
                "being_written": [
                    {"path": "f", "since": 0.0, "writers": [{"pid": 7, "command": "dd\x07"}]},
                    {"path": "a save that has just begun", "since": 1e11, "writers": []},
                ]
            },
            "is safe when it is closed: process 7 (dd\\x07)",
        ),
        ({"interrupted": 1}, "not whole"),
        ({"ram": {"waiting_writers": 2}}, "STANDING STILL: 2 writers wait for room"),
        ({"backing_health": {"state": "stuck", "why": None}}, "does not answer"),
        (
            {"backing_health": {"state": "refusing", "why": "store: ENOSPC"}},
            "refuses calls (store: ENOSPC)",
        ),
    ],
)
def test_status_says_first_what_is_not_safe(changes: dict[str, object], said: str) -> None:
    line, *further = unsafe_lines(status(**changes))
    assert said in line
    assert all(line.startswith("safe: ") for line in further)


@pytest.mark.clause("S521")
@pytest.mark.parametrize(
    ("changes", "is_safe"),
    [
        ({}, True),
        ({"queue_length": 1}, False),
        ({"parked": 1}, False),
        ({"interrupted": 1}, False),
    ],
)
def test_trouble_of_the_storage_hides_not_whether_all_is_safe(
    changes: dict[str, object], is_safe: bool
) -> None:
    """Somebody who has removed what did not fit must be told that nothing is left."""
    trouble = {"backing_health": {"state": "refusing", "why": "stream: No space left on device"}}
    lines = unsafe_lines(status(**trouble, **changes))
    assert [line for line in lines if "refuses calls" in line]
    assert any(line.startswith("safe: ") for line in lines) is is_safe


def test_status_puts_who_stands_still_above_what_is_not_safe_yet() -> None:
    lines = unsafe_lines(
        status(
            queue_length=3,
            parked=1,
            ram={"waiting_writers": 2},
            waiting_calls=[
                {"path": "f", "pid": 7, "command": "ls", "call": "readdir", "waited_s": 75.0}
            ],
        )
    )
    words = ["STANDING STILL", "waits in readdir", "REFUSED", "not yet safe"]
    assert [word for word, line in zip(words, lines, strict=True) if word in line] == words


WAITS: dict[str, object] = {
    "path": "f",
    "pid": 7,
    "command": "python",
    "since": 0.0,
    "wanted_bytes": 1,
    "purpose": "write",
    "reason": "RAM is full",
}
POINTER: dict[str, object] = {"path": "latest", "withheld": True, "waits_for": {"n2": "missing"}}
EVERYTHING: list[dict[str, object]] = [
    {},
    {"bypassed_since": 1.0, "bypass_reason": "asked for"},
    {"conflicts_total": 1, "conflicts": [{"path": "f", "kept_as": "g", "operation": "store"}]},
    {"parked": 1},
    {"cluster": {"waiting": [POINTER]}},
    {"cluster": {"waiting": [POINTER | {"withheld": False}]}},
    {"cluster": {"waiting": [], "awaited": ["f"]}},
    {"interrupted": 1},
    {"being_written": [{"path": "f", "since": 0.0, "writers": []}]},
    {"state": "draining"},
    {"queue_length": 1},
    {"pace": PACE},
    {"ram": {"waiting_writers": 2}},
    {"waiting": [WAITS]},
    {"waiting": [WAITS] * 11},
    {
        "waiting_calls": [
            {"path": "f", "pid": 7, "command": "ls", "call": "readdir", "waited_s": 75.0}
        ]
    },
    {"backing_health": {"state": "slow", "why": "stream is out for 5 s"}},
    {"backing_health": {"state": "refusing", "why": "store: ENOSPC"}},
    {"backing_health": {"state": "stuck", "why": None}},
    {
        "backing_health": {
            "state": "ok",
            "why": None,
            "problem": "/b cannot be opened (No such file or directory)",
        }
    },
    {
        "backing_health": {
            "state": "ok",
            "why": None,
            "problem": "/b shows another volume: is its file system unmounted?",
        }
    },
    {
        "backing_health": {
            "state": "ok",
            "why": None,
            "problem": "/b shows a directory that acpfs has never used: is it unmounted?",
        }
    },
    {
        "cluster": {
            "waiting": [],
            "clock_problem": (
                "each pointer file waits up to 9 s longer because of wall clocks: n2 differs"
            ),
        }
    },
]
WORDS_OF_OTHERS: dict[ModuleType, tuple[str, ...]] = {
    anchor: ("cannot be opened", "another volume", "a directory that acpfs has never used"),
    node_reports: ("longer because of wall clocks",),
}
"""`status` shows sentences of these as they are."""
HELD = "HELD by a keeper for 3 s, without a daemon: calls in /mnt/acp wait"


def test_each_line_of_the_status_has_a_row_in_troubleshooting_and_each_row_a_line() -> None:
    """What a person at three in the morning looks for."""
    page = (Path(__file__).parents[2] / "docs/TROUBLESHOOTING.md").read_text()
    table = page.partition("| `status` says | it means | do |\n|---|---|---|\n")[2].partition(
        "\n\n"
    )[0]
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    lines = [line for changes in EVERYTHING for line in unsafe_lines(status(**changes))] + [HELD]
    assert [line for line in lines if not any(row in line for row in rows)] == []
    assert [row for row in rows if not any(row in line for line in lines)] == []
    for module, words in WORDS_OF_OTHERS.items():
        # a sentence may be written as several literals, one below the other
        written = re.sub(r'"\s*\n\s*f?"', "", inspect.getsource(module))
        assert [word for word in words if word not in written] == []


def says(function: Callable[..., object]) -> Iterator[tuple[range, set[str]]]:
    """Each place in a function that adds lines: where it is, and which functions make them."""
    source, first = inspect.getsourcelines(function)
    for node in ast.walk(ast.parse(textwrap.dedent("".join(source)))):
        adds = isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "lines"
        if adds or (
            isinstance(node, ast.Expr) and ast.unparse(node.value).startswith("lines.append(")
        ):
            assert isinstance(node, ast.stmt)
            made_by = {
                ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)
            }
            last = node.end_lineno or node.lineno
            yield (
                range(first + node.lineno - 1, first + last),
                {name for name in made_by if name.startswith("_")},
            )


def reached(call: Callable[[], object]) -> tuple[set[int], set[str]]:
    """Lines of the module of `status`, and its functions, that this carries out."""
    lines = set[int]()
    called = set[str]()

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != status_verb.__file__:
            return None
        called.add(frame.f_code.co_name)
        if event == "line":
            lines.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    forget_asynchronous()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines, called


def test_a_new_line_of_the_status_is_to_be_in_everything() -> None:
    """Each place in `unsafe_lines` that says something is reached by EVERYTHING: so the test above
    sees all there are.
    """
    lines, called = reached(lambda: [unsafe_lines(status(**changes)) for changes in EVERYTHING])
    places = [
        *says(unsafe_lines),
        *says(status_verb._withheld),
        *says(status_verb._who_waits),
    ]
    assert len(places) > 10, "this test does not see them any more"
    assert [place for place, _made_by in places if not lines & set(place)] == []
    assert {name for _place, made_by in places for name in made_by} - called == set()
    assert "HELD by a keeper for" in inspect.getsource(status_verb._tell_held)


@pytest.mark.clause("S292")
def test_the_queue_has_a_column_that_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    entry = {
        "state": "held",
        "operation": "store",
        "size": 1,
        "age_s": 1.0,
        "tries": 0,
        "last_error": None,
        "next_attempt": None,
    }
    print_queue(
        status(
            queue=[{**entry, "name": "f", "why": "it may name what was refused"}], queue_length=1
        )
    )
    assert "it may name what was refused" in capsys.readouterr().out


@pytest.mark.clause("S219")
def test_who_waits_is_told_once_what_for(capsys: pytest.CaptureFixture[str]) -> None:
    with show.progress("flushing") as take:
        for trouble in ("", "/b is\x1b gone", "/b is\x1b gone", ""):
            take({"event": "progress", "operations": 1, "bytes": 1, "trouble": trouble})
        take(
            {"event": "progress", "operations": 1, "bytes": 1}
        )  # of an older daemon, or of `preload`
    assert capsys.readouterr().err == "flushing: /b is\\x1b gone\n"
