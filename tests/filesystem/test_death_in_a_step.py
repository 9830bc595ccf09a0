"""What a worker leaves that dies between the end of a tier file and the end of the step's transaction."""

from __future__ import annotations

from pathlib import Path

from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier


def test_a_tier_file_outlives_the_state_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "tier" / "data").mkdir(parents=True)
    state, tier = StateDatabase(tmp_path / "state"), Tier(tmp_path / "tier", 1 << 20)
    tier.when_safe = state.after_commit
    tier_id = tier.create()
    tier.remove(tier_id)
    assert tier.ids() == []
    assert (tmp_path / "tier" / "data" / str(tier_id)).exists(), "the next worker would find a state without its bytes"
    state.commit()
    assert not (tmp_path / "tier" / "data" / str(tier_id)).exists()


def test_a_tier_file_that_is_gone_already_is_no_bug(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 1 << 20)
    (tmp_path / "data" / str(tier.create())).unlink()
    tier.remove(tier.ids()[0])
    assert tier.used_bytes == 0
