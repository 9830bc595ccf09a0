"""A backing directory that lies in one that other mounts use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.errors import RefusedError
from acpfs.mounting import checks
from acpfs.mounting.nested import volume_above
from acpfs.ram import mounts
from tests.rig.mounts import MakeMount

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


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Path]:
    """A bind mount of a directory below one that others mount, from where nothing is above."""
    if os.geteuid() != 0:
        pytest.skip("mounts")
    inner = tmp_path / "ckpt/team/run1"
    inner.mkdir(parents=True)
    volume(tmp_path / "ckpt", a=NodeState.LIVE)
    place = tmp_path / "part"
    place.mkdir()
    mounts.bind(tmp_path / "ckpt/team", place)
    yield place
    mounts.unmount(os.fspath(place))


@pytest.mark.clause("S439")
def test_a_bind_mount_of_a_part_of_one_is_refused(part: Path) -> None:
    top = part.parent / "ckpt"
    assert volume_above(part / "run1") == volume_above(part) == (top, ["a"])
    with pytest.raises(RefusedError, match="there would be no order"):
        checks.check_not_nested(part / "run1")


@pytest.mark.clause("S439")
def test_so_is_a_directory_in_a_mount_of_acpfs(make_mount: MakeMount, tmp_path: Path) -> None:
    """Its `.acpfs` is not seen by way of the mount."""
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, "native")
    (mount.path / "team/run1").mkdir(parents=True)
    mount.flush()
    place = tmp_path / "part"
    place.mkdir()
    mounts.bind(mount.path / "team", place)
    try:
        found = volume_above(mount.path / "team/run1")
        assert found is not None
        assert found[0] == backing
        assert volume_above(place / "run1") == volume_above(place) == found
    finally:
        mounts.unmount(os.fspath(place))


@pytest.mark.clause("S439")
def test_what_another_mount_lies_over_is_not_looked_at(part: Path) -> None:
    ckpt = part.parent / "ckpt"
    (part.parent / "other").mkdir()
    volume(part.parent / "other", b=NodeState.LIVE)
    (part.parent / "other/team/run1").mkdir(parents=True)
    mounts.bind(part.parent / "other", ckpt)
    try:
        assert volume_above(part / "run1") is None
        assert volume_above(ckpt / "team/run1") == (ckpt, ["b"])
    finally:
        mounts.unmount(os.fspath(ckpt))


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
