"""What a mount has learnt about sizes is there at the next one, although its RAM tier is gone; and
it is a help, no more.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.filesystem import expectations
from acpfs.filesystem.expectations import Expectations
from acpfs.ram.state import StateDatabase
from acpfs.worker import learned
from acpfs.worker.learned import LearnedSizes
from tests.filesystem.world import settings_for
from tests.rig.mounts import AcpfsMount
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S248")

MIB = 1 << 20


@pytest.mark.mount
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
)
@pytest.mark.parametrize("damaged", [False, True], ids=["kept", "damaged"])
def test_the_next_mount_expects_what_the_last_one_has_learnt(
    tmp_path: Path, *, damaged: bool
) -> None:
    (tmp_path / "backing").mkdir()
    unknown = "its size is not known from an earlier file"
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "native") as mount:
        assert lane_of_a_dump(mount) == {unknown: 1}
        mount.umount()
        (kept,) = mount.runtime_dir.glob("remembered/sizes/*")
        if damaged:
            kept.write_bytes(b'{"dump": "large", "\xff')
        mount.start()
        assert lane_of_a_dump(mount) == {unknown if damaged else "passthrough": 1}


def lane_of_a_dump(mount: AcpfsMount) -> object:
    """Of a large file that nothing else speaks for; nothing is left of it."""
    (mount.path / "dump").write_bytes(b"x" * 2 * MIB)
    choices = mount.status()["lane_choices"]
    mount.flush()
    (mount.path / "dump").unlink()
    mount.flush()
    return choices


def test_the_newest_are_kept_and_a_name_is_any_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "SIZES_MAX", 2)
    settings = settings_for(tmp_path)
    kept = LearnedSizes(settings, tmp_path)
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    sizes = Expectations(state)
    for name, size in (
        (b"old", MIB),
        (b"step-1/\xff", 3 * MIB),
        (b"never", expectations.UNBOUNDED_BYTES),
        (b"new", 2 * MIB),
    ):
        sizes.learn(name, size)
    kept.keep(sizes)
    state.close()
    state = StateDatabase(tmp_path / "another.sqlite", REAL)
    found = Expectations(state)
    kept.recall(found)
    assert [found.expect(name) for name in (b"old", b"step-7/\xff", b"never", b"new")] == [
        None,
        3 * MIB,
        None,
        2 * MIB,
    ]
    state.close()


@pytest.mark.clause("S271")
def test_how_large_a_save_is_is_the_sum_of_its_files(tmp_path: Path) -> None:
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    sizes = Expectations(state)
    assert sizes.largest_save() == 0
    sizes.learn(b"data", 4 * MIB)
    assert sizes.largest_save() == 4 * MIB
    for name, size in (
        ("step-1/model.pt", 3),
        ("step-1/rank-0/optimizer.pt", 5),
        ("step-2/model.pt", 4),
        ("run-7/step-1/model.pt", 2),
    ):
        sizes.learn(name.encode(), size * MIB)
    sizes.learn(b"step-3/huge", expectations.UNBOUNDED_BYTES)
    assert sizes.largest_save() == 9 * MIB
    state.close()


def test_where_nothing_can_be_kept_the_mount_ends_as_ever(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    (tmp_path / "remembered").write_bytes(b"")
    state = StateDatabase(tmp_path / "state.sqlite", REAL)
    sizes = Expectations(state)
    sizes.learn(b"a", MIB)
    LearnedSizes(settings, tmp_path).keep(sizes)
    LearnedSizes(settings, tmp_path).recall(sizes)
    state.close()
