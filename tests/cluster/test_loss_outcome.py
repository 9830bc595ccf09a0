"""How losses of several runs, and of clusters side by side, are added up and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.loss_drills import Plan
from tests.cluster.loss_outcome import Outcome, Terms, kept, save, summed

TERMS = Terms(3, 0.4, 4.0, "6.1", "abc")


def outcome(kind: str, seed: int) -> Outcome:
    steps = {"saves": [1.0]}
    return Outcome(kind, [seed], 2, 6, 6, 3, 2, [0.1], [8.0], [1.0], steps, ["wrong"], 30.0)


def test_runs_of_one_commit_are_added_up_by_kind(tmp_path: Path) -> None:
    base = tmp_path / "losses.json"
    save(base, summed([outcome("loss", 1), outcome("loss", 2), outcome("cut", 2)]), ["a"], TERMS)
    commands, before = kept(base, TERMS)
    save(base, summed([*before, outcome("loss", 3)]), [*commands, "b"], TERMS)
    commands, found = kept(base, TERMS)
    assert commands == ["a", "b"]
    assert [(one.kind, one.seeds, one.times, one.told) for one in found] == [
        ("loss", [1, 2, 3], 6, 18),
        ("cut", [2], 2, 6),
    ]
    assert found[0].steps_s == {"saves": [1.0] * 3}
    text = base.with_suffix(".md").read_text()
    assert "**8 losses, 4 violations**" in text
    assert "seeds 1, 2, 3" in text
    with pytest.raises(ValueError, match="of other terms"):
        kept(base, replace(TERMS, commit="other"))


def test_clusters_side_by_side_share_what_is_to_be_done() -> None:
    shares = Plan(5, losses=7, partitions=2, parallel=3).shares()
    assert [(one.seed, one.losses, one.partitions) for one in shares] == [
        (5, 3, 1),
        (6, 2, 1),
        (7, 2, 0),
    ]
