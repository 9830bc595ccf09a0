"""`acpfs-train` as a user calls it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from acpfs.cli.target import Target
from acpfs.cli.train import command
from acpfs.cli.training import interval as interval_command
from acpfs.cli.training.status import told
from acpfs.cli.training.units import long_duration, time
from acpfs.errors import AcpfsError, RefusedError
from acpfs.training.interval import Job, best_s

FAULTS = ["--mtbf", "8h"]


def call(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(command, list(words))


def answer(*words: str) -> dict[str, Any]:
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert isinstance(found, dict)
    return found


def test_the_advice_is_that_of_the_formula() -> None:
    found = answer("interval", "--save", "2s", "--restart", "5m", "--node-share", "0", *FAULTS)
    best = next(row for row in found["intervals"] if row["name"] == "best")
    assert best["interval_s"] == pytest.approx(
        best_s(Job(save_s=2, restart_s=300, fault_s=8 * 3600))
    )
    assert found["job"]["fault_s"] == 8 * 3600


def test_people_see_every_row_and_the_curve() -> None:
    found = call(
        "interval", "--save", "2s", "--today", "30m", "--step", "1.5", "--covered", "0.5", *FAULTS
    )
    assert found.exit_code == 0
    for words in (
        "best",
        "Young",
        "Daly",
        "today",
        "MindIO",
        "lost steps a day",
        "if none were covered",
        "← best",
    ):
        assert words in found.output


def test_faults_of_nodes_and_faults_that_were_seen() -> None:
    def fault_s(*words: str) -> float:
        return float(answer("interval", "--save", "1s", *words)["job"]["fault_s"])

    assert fault_s("--node-mtbf", "1y", "--nodes", "365") == pytest.approx(86400 * 365.25 / 365)
    assert fault_s("--faults", "1", "--observed", "10d") == 5 * 86400
    assert fault_s("--observed", "10d", "--mtbf", "2d") == 12 * 86400


def test_where_every_fault_is_covered_there_is_nothing_to_say_but_so() -> None:
    found = answer("interval", "--save", "1s", "--covered", "1", *FAULTS)
    assert found["intervals"][0]["interval_s"] is None
    assert "never" in call("interval", "--save", "1s", "--covered", "1", *FAULTS).output


def test_what_a_save_costs_comes_from_the_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [
        {"save_s": 1.0, "persist_s": 10.0},
        {"save_s": 3.0, "persist_s": 30.0},
        {"save_s": 2.0, "persist_s": None},
        {"save_s": None, "persist_s": None},
    ]
    monkeypatch.setattr(Target, "record", lambda _self: None)
    monkeypatch.setattr(interval_command, "ask", lambda *_words, **_how: {"items": items})
    job = answer("interval", *FAULTS)["job"]
    assert (job["save_s"], job["drain_s"]) == (2.0, 20.0)
    items.clear()
    assert "the mount has seen no save yet" in call("interval", *FAULTS).output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["interval", "--save", "1s"], "how often do faults come?"),
        (["interval", "--save", "1s", "--node-mtbf", "1y"], "--nodes"),
        (["interval", "--save", "1s", "--faults", "3"], "--observed"),
        (["interval", "--save", "soon", *FAULTS], "is not a time"),
        (["interval", "--save", "0s", *FAULTS], "save_s must be more than 0"),
        (["interval", "--save", "1s", "--covered", "2", *FAULTS], "--covered"),
        (["plan", "--params", "1e9", "--dp", "8", "--replicas", "3"], "do not divide"),
        (["plan", "--params", "-1", "--dp", "8"], "params"),
        (["plan", "--params", "1e9", "--dp", "8", "--ram", "much"], "is not a size"),
    ],
)
def test_bad_input_is_one_line(words: list[str], why: str) -> None:
    found = call(*words)
    assert found.exit_code == 2
    assert why in found.output
    assert "Traceback" not in found.output


def test_a_plan_for_people_and_for_programs() -> None:
    words = [
        "plan",
        "--params",
        "70e9",
        "--tp",
        "8",
        "--pp",
        "4",
        "--dp",
        "16",
        "--replicas",
        "2",
        "--ram",
        "200G",
        "--storage-rate",
        "20G",
    ]
    text = call(*words).output
    for part in (
        "512 ranks on 64 nodes",
        "MindIO's formula: 840 GB",
        "all but 32 of 2016 pairs",
        "200 GiB is enough",
        "drain",
    ):
        assert part in text
    found = answer(*words)
    assert found["added_bytes"] == 840e9
    assert found["ram_holds"] is True
    assert found["covers"]["fatal_pairs"] == 32


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dp", "16"], "nothing: each shard is held by one rank"),
        (["--dp", "14", "--sharding", "fsdp"], "1.9 GiB of each rank's host keep copies"),
        (["--dp", "2", "--tp", "4", "--replicas", "2"], "not any node: of all of them"),
        (["--dp", "24", "--sharding", "ddp"], "any one rank, any one node, any two nodes"),
        (["--dp", "16", "--ram", "1G"], "is too little"),
    ],
)
def test_what_a_layout_covers(words: list[str], text: str) -> None:
    assert text in call("plan", "--params", "1e9", *words).output


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("15m", 900),
        ("2h", 7200),
        ("1.5d", 129600),
        ("250ms", 0.25),
        ("1e3s", 1000),
    ],
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert time(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "250 ms"),
        (12.3, "12.3 s"),
        (1860, "31 min"),
        (9000, "2.5 h"),
        (864000, "10 d"),
        (float("inf"), "never"),
    ],
)
def test_estimates_are_short(seconds: float, text: str) -> None:
    assert long_duration(seconds) == text


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="matplotlib is optional, and not in the environment of the tests",
)
def test_a_picture(tmp_path: Path) -> None:
    assert (
        call("interval", "--save", "2s", *FAULTS, "--plot", str(tmp_path / "waste.svg")).exit_code
        == 0
    )
    assert (tmp_path / "waste.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is there"
)
def test_a_picture_without_matplotlib_is_one_line(tmp_path: Path) -> None:
    found = call("interval", "--save", "2s", *FAULTS, "--plot", str(tmp_path / "waste.svg"))
    assert isinstance(found.exception, RefusedError)
    assert "matplotlib" in str(found.exception)


def test_status_says_in_one_line_that_nothing_runs(tmp_path: Path) -> None:
    directory = tmp_path / ".acpfs-job" / "old"
    directory.mkdir(parents=True)
    (directory / "coordinator-0").write_text('{"status": "acpfs-coordinator-none"}')
    (directory / "coordinator-1").write_text("{")
    for words in ([], ["--job", "other"]):
        result = call("status", str(tmp_path), *words)
        assert (result.exit_code, isinstance(result.exception, AcpfsError)) == (1, True)
        assert "no coordinator" in str(result.exception)


def test_status_shows_who_is_lost_and_who_hangs() -> None:
    answer = {
        "job": "j",
        "coordinator": 0,
        "active": True,
        "term": 2,
        "generation": 1,
        "state": "stopping",
        "connected": 3,
        "world": 4,
        "tls": False,
        "shards": 2,
        "gate": "explicit",
        "ranks": [
            {"rank": 1, "lost": "its process is exiting"},
            {"rank": 2, "lost": None},
            {"rank": 3, "lost": None, "unprotected": "KeyError: 'a'"},
        ],
        "stall": {"behind": [2], "group": "world", "waited_s": 75.0},
        "counts": {"refused_tls": 3},
    }
    lines = dict(told(answer))
    assert lines["tls"] == "off: everybody on this network may join"
    assert lines["lost"] == "rank 1: its process is exiting"
    assert lines["unprotected"] == "rank 3: KeyError: 'a'"
    assert lines["behind"] == "ranks 2 in world: nothing moved for 1 min 15 s"
    assert lines["refused"] == "refused_tls 3"
