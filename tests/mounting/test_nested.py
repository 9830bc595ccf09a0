"""A backing directory that lies in one that other mounts use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.errors import RefusedError
from acpfs.mounting import checks
from acpfs.mounting.nested import volume_above

pytestmark = pytest.mark.clause("S457")


def volume(top: Path, **members: NodeState) -> None:
    nodes = top / ".acpfs/nodes"
    nodes.mkdir(parents=True)
    (top / ".acpfs/volume").write_text("0" * 32)
    for name, state in members.items():
        (nodes / name).write_bytes(NodeRecord(name, state=state).to_bytes())
    (nodes / ".mark").write_bytes(b"")


def test_a_directory_below_one_in_use_is_refused(tmp_path: Path) -> None:
    top = tmp_path / "ckpt"
    inner = top / "team/run1"
    inner.mkdir(parents=True)
    assert volume_above(inner) is None
    volume(top, a=NodeState.LIVE, b=NodeState.LEFT, c=NodeState.AWAY)
    assert volume_above(inner) == (top, ["a", "c"])
    assert volume_above(top) is None
    (tmp_path / "link").symlink_to(inner)
    with pytest.raises(RefusedError, match="there would be no order"):
        checks.check_not_nested(tmp_path / "link")


def test_one_that_nobody_uses_any_more_is_none(tmp_path: Path) -> None:
    (tmp_path / "ckpt/run1").mkdir(parents=True)
    volume(tmp_path / "ckpt", a=NodeState.LEFT, b=NodeState.GONE)
    checks.check_not_nested(tmp_path / "ckpt/run1")


def test_what_cannot_be_read_counts_as_in_use(tmp_path: Path) -> None:
    (tmp_path / "ckpt/run1").mkdir(parents=True)
    volume(tmp_path / "ckpt")
    (tmp_path / "ckpt/.acpfs/nodes/torn").write_bytes(b'{"sum":')
    assert volume_above(tmp_path / "ckpt/run1") == (tmp_path / "ckpt", ["torn"])


def test_what_hangs_above_keeps_nobody_from_mounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ckpt/run1").mkdir(parents=True)
    volume(tmp_path / "ckpt")
    os.mkfifo(tmp_path / "ckpt/.acpfs/nodes/hangs")  # as a record on a storage that hangs
    monkeypatch.setattr(checks, "NESTED_WAIT_S", 0.2)
    checks.check_not_nested(tmp_path / "ckpt/run1")
