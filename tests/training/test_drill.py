"""`acpfs-train drill`: what it has ranks do, and how it judges.

The jobs here are scripts of their own, without torch.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from acpfs.cli.train import command
from acpfs.errors import ConfigError
from acpfs.training.drill import FAULTS, JOBS, NOTES, Drill, Kill, judge, parsed
from acpfs.training.manifest import saved_file, write_manifest
from acpfs.training.marks import Marks
from acpfs.training.messages import Manifest
from tests.rig.processes import Child

clause = pytest.mark.clause


@clause("T57")
@pytest.mark.parametrize(
    "text", ["1", "1:nowhere:3", "x:gated:3", "1:gated", "1:gated:0", "1:saving:2", "1:gated:3,2"]
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parsed(text)


@clause("T57")
def test_who_is_to_die_dies_there_and_says_so(tmp_path: Path) -> None:
    kills = parsed("1:gated:2,0:saving")
    assert kills == (Kill(1, "gated", 2), Kill(0, "saving"))
    assert ",".join(map(str, kills)) == "1:gated:2,0:saving"

    def rank(number: int) -> str:
        marks = Marks(10)
        drill = Drill(kills, number, marks, tmp_path)
        for _ in range(3):
            marks.ready()
            drill("ready")
            drill("gated")
            marks.begin()
            marks.end()
            drill("updated")
        drill("saving")
        return "lives"

    assert Child(lambda: rank(2)).result() == "lives"
    for number in (0, 1):
        with pytest.raises(Exception, match=r".*"):
            Child(partial(rank, number)).result()
    noted = [json.loads(line) for line in (tmp_path / NOTES).read_text().splitlines()]
    assert noted == [
        {"rank": 0, "point": "saving", "update": 0, "done": 13, "ready": 13},
        {"rank": 1, "point": "gated", "update": 2, "done": 11, "ready": 12},
    ]


def job(
    directory: Path,
    step: int = 5,
    *,
    status: str = "SAVED",
    note: bool = True,
    tracker: str = "step-5",
) -> None:
    """What a job leaves whose rank 1 died behind the gate of update 6."""
    (directory / JOBS / "job").mkdir(parents=True)
    if note:
        (directory / JOBS / "job" / NOTES).write_text(
            '{"rank": 1, "point": "gated", "update": 6, "done": 5, "ready": 6}\n'
        )
    fault = {"status": status, "text": "why", "gasp": f"/mnt/run/step-{step}", "took_s": 0.25}
    (directory / JOBS / "job" / FAULTS).write_text(json.dumps(fault) + "\n")
    (directory / f"step-{step}").mkdir()
    (directory / f"step-{step}" / "w").write_bytes(b"weights")
    files = (saved_file(directory / f"step-{step}", directory / f"step-{step}" / "w"),)
    write_manifest(
        directory / f"step-{step}", Manifest("job", 1, step, (1,), {"all": 0}, files, {}, ("node",))
    )
    (directory / "latest").write_text(f"{tracker}\n")


KILLS = (Kill(1, "gated", 6),)


@clause("T57")
def test_a_right_checkpoint_is_right(tmp_path: Path) -> None:
    job(tmp_path)
    verdict = judge(tmp_path, set(), KILLS, "latest")
    assert (verdict.wrong, verdict.step, verdict.lost, verdict.took_s, verdict.gasp) == (
        "",
        5,
        0,
        0.25,
        "step-5",
    )
    assert judge(tmp_path, {"job"}, KILLS, "latest").wrong.startswith("no rank began")


@clause("T57")
@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"status": "NOT_SAVED"}, "not saved: why"),
        ({"note": False}, "never came there"),
        ({"step": 3, "tracker": "step-3"}, "2 steps are lost"),
        ({"tracker": "step-4"}, "latest names step-4"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, made: dict[str, object], said: str) -> None:
    job(tmp_path, **made)  # type: ignore[arg-type]
    assert said in judge(tmp_path, set(), KILLS, "latest").wrong


@clause("T57")
def test_a_torn_checkpoint_is_torn(tmp_path: Path) -> None:
    job(tmp_path)
    (tmp_path / "step-5" / "w").write_bytes(b"weighty")
    assert "another checksum" in judge(tmp_path, set(), KILLS, "latest").wrong


@clause("T57")
def test_the_command_runs_the_job_and_its_exit_code_tells(tmp_path: Path) -> None:
    script = (
        "import os; from tests.training.test_drill import job, Path; "
        f"d = Path({str(tmp_path)!r}); os.environ['ACPFS_TRAIN_DRILL']; job(d)"
    )
    words = [
        "drill",
        "--point",
        "gated",
        "--update",
        "6",
        str(tmp_path),
        sys.executable,
        "-c",
        script,
    ]
    done = CliRunner().invoke(command, words, standalone_mode=False)
    assert "right" in done.output, done.output
    assert done.return_value == 0
    again = CliRunner().invoke(
        command, words, standalone_mode=False
    )  # nobody new began protection: the job's directory was there
    assert again.return_value == 1
    for second in ("1:saving", "0:gated:1"):
        refused = CliRunner().invoke(command, ["drill", "--second", second, str(tmp_path), "true"])
        assert isinstance(refused.exception, ConfigError)
