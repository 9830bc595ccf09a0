"""Whether what lies at the backing directory's path is still what was opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.backing.anchor import Anchor
from acpfs.backing.directory import BackingDirectory
from tests.rig.runtime import REAL


@pytest.mark.clause("S74", "S219")
def test_a_problem_is_confirmed_as_of_now(tmp_path: Path) -> None:
    path = tmp_path / "backing"
    (path / ".acpfs").mkdir(parents=True)
    (path / ".acpfs" / "volume").write_text("v1")
    anchor = Anchor(BackingDirectory(path, "node", REAL), "v1")
    assert anchor.confirmed() == ""
    path.rename(tmp_path / "elsewhere")
    anchor.look()
    assert "cannot be opened" in anchor.confirmed()
    path.mkdir()
    anchor.look()
    assert "never used" in anchor.confirmed()
    path.rmdir()
    (tmp_path / "elsewhere").rename(path)
    assert anchor.problem
    assert anchor.confirmed() == ""
