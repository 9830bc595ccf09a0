"""How figures of several runs are kept in one file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.outcome import Outcome, save


def outcome(workload: str, *, saves: int) -> Outcome:
    return Outcome(
        workload,
        1,
        4,
        "glusterfs",
        "pointers",
        2.0,
        0.5,
        kills={"worker": 3},
        saves=saves,
        delays_s=[0.5, 1.0],
    )


def test_a_workload_that_is_run_by_itself_is_added_to_what_is_kept(tmp_path: Path) -> None:
    base = tmp_path / "drill.json"
    save(base, [outcome("files", saves=1), outcome("dcp", saves=2)], ["--kills", "6"])
    save(base, [outcome("dcp", saves=3)], ["--workload", "dcp"], add=True)
    kept = json.loads(base.read_text())
    assert [(run["workload"], run["saves"]) for run in kept["runs"]] == [("files", 1), ("dcp", 3)]
    assert kept["commands"] == [
        "tools/cluster-drill --kills 6",
        "tools/cluster-drill --workload dcp",
    ]
    lines = base.with_suffix(".md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")] == [
        "workload",
        "files",
        "dcp",
    ]
    assert "**6 kills, 0 violations**" in base.with_suffix(".md").read_text()
