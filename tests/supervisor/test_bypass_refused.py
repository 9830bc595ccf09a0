"""A bypass that does not come about leaves the mount as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from acpfs.control import registry
from tests.rig.mounts import AcpfsMount, CommandError, MakeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.clause("S70", "S170"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]


def _record(mount: AcpfsMount) -> Path:
    return mount.runtime_dir / "beneath" / f"{registry.slug(str(mount.path))}.json"


def _cannot_be_written(mount: AcpfsMount) -> None:
    _record(mount).with_suffix(f".{mount.pid}").mkdir()


def _is_not_known(mount: AcpfsMount) -> None:
    _record(mount).unlink()


@pytest.mark.parametrize("hinder", [_cannot_be_written, _is_not_known])
def test_the_mount_serves_on_and_the_last_commit_wins(
    tmp_path: Path, transport: str, make_mount: MakeMount, hinder: Callable[[AcpfsMount], None]
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport, attr_timeout=60)
    (mount.path / "tracker").write_text("1")
    mount.flush()
    hinder(mount)
    with pytest.raises(CommandError, match="cannot be detached"):
        mount.ctl("bypass", "--reason", "a test")
    assert mount.status()["state"] != "bypassed"
    theirs = mount.backing / ".theirs"
    theirs.write_text("another node's")
    theirs.rename(mount.backing / "tracker")
    (mount.path / "tracker").write_text("2")
    mount.flush()
    assert sorted(os.listdir(mount.backing)) == [".acpfs", "tracker"]
    assert (mount.backing / "tracker").read_text() == "2"
