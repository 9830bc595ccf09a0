"""A backing directory whose file system is not mounted is not taken for a new one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest

from acpfs.control import runtime
from acpfs.errors import RefusedError
from acpfs.mounting import expected
from acpfs.worker import assembly
from acpfs.worker.link import Link
from tests.filesystem.world import settings_for
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S199")

OTHER = "0" * 32


class Steps:
    """Nobody to tell."""

    def step(self, _name: str) -> None:
        pass


def mount(base: Path, **options: object) -> str:
    """What a mount does with the backing directory before anything else; its volume."""
    made = runtime.prepare(base / "run")
    directory, identity, _probed = assembly._lower(
        settings_for(base, **options), made, cast("Link", Steps()), REAL
    )
    identity.release()
    directory.disconnect()
    return identity.volume_id


def unmount_file_system(base: Path) -> None:
    """As after a reboot: the bare mount point shows, and RAM is gone."""
    (base / "backing").rename(base / "real")
    (base / "backing").mkdir()


def test_the_bare_mount_point_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    volume = mount(tmp_path)
    unmount_file_system(tmp_path)
    with pytest.raises(
        RefusedError,
        match=(
            rf"not a volume that acpfs has used: {volume} is expected there.* mount once with "
            r"--new-volume"
        ),
    ):
        mount(tmp_path)
    assert os.listdir(tmp_path / "backing") == []
    (tmp_path / "backing").rmdir()
    (tmp_path / "real").rename(tmp_path / "backing")
    assert mount(tmp_path) == volume


def test_another_volume_is_refused_until_it_is_taken_over(tmp_path: Path) -> None:
    volume = mount(tmp_path)
    unmount_file_system(tmp_path)
    new = mount(tmp_path, new_volume=True)
    assert new != volume
    assert mount(tmp_path) == new
    (tmp_path / "backing").rename(tmp_path / "other")
    (tmp_path / "real").rename(tmp_path / "backing")
    with pytest.raises(RefusedError, match=rf"not that volume, but {volume}: {new} is expected"):
        mount(tmp_path)
    assert mount(tmp_path, expect_volume="any") == volume
    assert mount(tmp_path) == volume, "what was mounted last counts"


def test_a_named_volume_is_expected_from_the_first_mount_on(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=f"{OTHER} is expected there"):
        mount(tmp_path, expect_volume=OTHER)
    assert os.listdir(tmp_path / "backing") == []
    volume = mount(tmp_path)
    assert mount(tmp_path, expect_volume=volume) == volume


def test_a_copy_of_the_volume_on_another_kind_of_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected, "kind_at", lambda _fd: "nfs")
    volume = mount(tmp_path)
    monkeypatch.setattr(expected, "kind_at", lambda _fd: "nfs4")
    assert mount(tmp_path) == volume
    monkeypatch.setattr(expected, "kind_at", lambda _fd: "ext4")
    with pytest.raises(RefusedError, match=r"lies on ext4 now, and its volume .* lay on nfs4"):
        mount(tmp_path)
    assert mount(tmp_path, new_volume=True) == volume
    assert mount(tmp_path) == volume


def test_what_cannot_be_remembered_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(runtime.MEMORY_VARIABLE, str(tmp_path / "file"))
    assert mount(tmp_path) == mount(tmp_path)


def test_a_damaged_note_expects_nothing(tmp_path: Path) -> None:
    volume = mount(tmp_path)
    (note,) = (tmp_path / "run/remembered/volumes").iterdir()
    note.write_text("{torn")
    assert mount(tmp_path) == volume


def test_it_outlives_a_reboot_unless_a_runtime_directory_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in (runtime.ENVIRONMENT_VARIABLE, runtime.MEMORY_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/home/u/state")
    kept = Path("/var/lib/acpfs") if os.getuid() == 0 else Path("/home/u/state/acpfs")
    assert runtime.memory_dir(runtime.runtime_dir()) == kept
    assert runtime.memory_dir(Path("/srv/run")) == Path("/srv/run/remembered")
    monkeypatch.setenv(runtime.MEMORY_VARIABLE, "/srv/memory")
    assert runtime.memory_dir(runtime.runtime_dir()) == Path("/srv/memory")
