"""Settings: from the environment, from the caller, and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.errors import ConfigError
from acpfs.training.coordinator.limits import Limits
from acpfs.training.policy import Policy


def test_the_environment_and_then_the_caller() -> None:
    environment = {
        "ACPFS_TRAIN_BEAT_S": "0.5",
        "ACPFS_TRAIN_TLS": "off",
        "ACPFS_TRAIN_NAME": "iter_{step:07d}",
        "HOME": "/",
    }
    policy = Policy.from_environment(environment, beat_s=1.5)
    assert (policy.beat_s, policy.tls, policy.name) == (1.5, False, "iter_{step:07d}")
    assert policy.tracker == Policy().tracker


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("ACPFS_TRAIN_BEAT_S", "soon", "BEAT_S"),
        ("ACPFS_TRAIN_BEAT_S", "0", "beat_s"),
        ("ACPFS_TRAIN_TLS", "perhaps", "TLS"),
        ("ACPFS_TRAIN_BEATS", "1", "no such setting"),
        ("ACPFS_TRAIN_NAME", "step", "step"),
        ("ACPFS_TRAIN_TRACKER", "a/b", "tracker"),
        ("ACPFS_TRAIN_COORDINATORS", "4", "coordinators"),
        ("ACPFS_TRAIN_ON_STALL", "kill", "on_stall"),
    ],
)
def test_what_makes_no_sense_is_named(variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Policy.from_environment({variable: text})


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="beats"):
        Policy.from_environment({}, beats=1)


@pytest.mark.clause("T48", "T77")
def test_the_document_says_the_times_that_hold() -> None:
    clauses = Path(__file__).parents[2] / "docs" / "internals" / "clauses"
    text = "".join(page.read_text(encoding="utf-8") for page in clauses.glob("training-*.md"))
    policy = Policy()
    assert (
        f"It does so after {policy.interrupt_after_s} seconds and again each "
        f"{policy.interrupt_every_s} seconds" in text
    )
    assert f"in {Limits().replace_s:.0f} seconds (`replace_s`)" in text
