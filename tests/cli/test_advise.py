"""`acpfs-ctl advise`: figures from a history, and an advice that a simulation of the same job
cannot better.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from acpfs.cli.target import Target
from acpfs.cli.verbs import advise as advise_command
from acpfs.cli.verbs.advise import advise, command, measured
from acpfs.training.interval import Job, best_s
from tests.training.simulation import simulate

pytestmark = pytest.mark.clause("S323")

FACTORS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)
MIB = 1 << 20


def entry(
    number: int,
    *,
    directory: str = "run",
    began: float = 0.0,
    save_s: float = 2.0,
    persist_s: float = 42.0,
) -> dict[str, Any]:
    path = f"{directory}/step-{number}"
    return {
        "kind": "checkpoint",
        "path": path,
        "began_at": began,
        "save_s": save_s,
        "persist_s": persist_s,
        "bytes": 100 * MIB,
    }


def history() -> list[dict[str, Any]]:
    """Saves every ten minutes, another run's in between, and one that was slow."""
    saves = [entry(number, began=1000.0 + 602.0 * number) for number in range(5)]
    saves += [
        entry(number, directory="other", began=1100.0 + 602.0 * number) for number in range(4)
    ]
    return [
        {"kind": "storage", "path": "", "began_at": None},
        *saves,
        entry(5, began=1000.0 + 602.0 * 5, save_s=30.0, persist_s=600.0),
    ]


def random_job(number: int) -> Job:
    draw = random.Random(number)
    fault_s = math.exp(draw.uniform(math.log(1800), math.log(7 * 86400)))
    return Job(
        save_s=math.exp(draw.uniform(math.log(0.2), math.log(min(300.0, fault_s / 10)))),
        restart_s=draw.uniform(10, 900),
        fault_s=fault_s,
        covered=draw.choice([0.0, draw.uniform(0, 0.9)]),
        node_share=draw.random(),
        drain_s=draw.uniform(0, 600),
    )


def beside_the_optimum(number: int, faults: int) -> None:
    job = random_job(number)
    advice = advise(job, None, None, None, 0)
    assert advice.interval_s is not None
    wasted = {
        factor: simulate(job, advice.interval_s * factor, faults, number) for factor in FACTORS
    }
    assert wasted[1.0] <= 1.05 * min(wasted.values()), job


@pytest.mark.parametrize("number", range(8))
def test_the_advice_is_within_five_percent_of_the_simulated_optimum(number: int) -> None:
    beside_the_optimum(number, faults=3_000)


@pytest.mark.long
@pytest.mark.parametrize("number", range(50))
def test_the_same_for_fifty_jobs(number: int) -> None:
    beside_the_optimum(number, faults=20_000)


def test_figures_are_medians_and_of_one_run_at_a_time() -> None:
    found = measured(history())
    assert (found.saves, found.save_s, found.drain_s, found.interval_s, found.bytes) == (
        10,
        2.0,
        40.0,
        600.0,
        100 * MIB,
    )
    assert measured([]).saves == 0
    assert measured(history()[:1]).save_s is None


def test_a_storage_that_is_too_slow_and_ram_that_is_too_small_are_told() -> None:
    job = Job(save_s=1.0, restart_s=60.0, fault_s=1800.0, node_share=0.2, drain_s=600.0)
    advice = advise(job, 3600.0, 64, 10, 15)
    assert not advice.storage_keeps_up
    assert advice.interval_min_s == 599.0
    assert (advice.ram_wanted_bytes, advice.ram_budget_bytes) == (20, 15)
    assert advice.today_waste is not None
    assert advice.gpu_hours_a_day == pytest.approx((advice.today_waste - advice.waste) * 64 * 24)
    assert (
        advise(Job(save_s=1, restart_s=1, fault_s=10, covered=1.0), None, 8, None, 0).interval_s
        is None
    )


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Any:
    def answer(_record: object, verb: str, **_more: object) -> dict[str, Any]:
        return {"items": history()} if verb == "history" else {"ram": {"budget_bytes": 256 * MIB}}

    monkeypatch.setattr(advise_command, "ask", answer)
    monkeypatch.setattr(Target, "record", lambda _self: None)

    def run(*words: str) -> Result:
        return CliRunner(env={"COLUMNS": "200"}).invoke(command, list(words), obj=Target(None))

    return run


def test_people_see_what_to_do_and_what_it_is_worth(call: Any) -> None:
    found = call("--mtbf", "8h", "--gpus", "64")
    assert found.exit_code == 0, found.output
    for words in (
        "from 10 saves",
        "2 s",
        "save every",
        "today it is every 10 min",
        "device-hours a day",
        "two checkpoints",
        "enough",
        "← best",
    ):
        assert words in found.output


def test_programs_get_the_same(call: Any) -> None:
    found = json.loads(call("--mtbf", "8h", "--save", "3s", "--json").output)
    assert found["measured"]["save_s"] == 3.0
    assert found["advice"]["interval_s"] == pytest.approx(best_s(Job(**found["job"])))
    assert found["job"]["drain_s"] == 40.0


def test_a_picture_is_drawn(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert call("--mtbf", "8h", "--plot", str(tmp_path / "waste.svg")).exit_code == 0
    assert "<svg" in (tmp_path / "waste.svg").read_text()


def test_without_faults_and_without_saves_it_says_what_is_missing(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "how often do faults come?" in call().output
    monkeypatch.setattr(advise_command, "ask", lambda *_a, **_k: {"items": []})
    assert "has no save in its history yet" in call("--mtbf", "8h").output
