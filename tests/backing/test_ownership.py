"""A `.acpfs` that somebody else made, or may write to, is not used: its owner could exchange what
lies in it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.backing import ownership
from acpfs.backing.ownership import check_own
from acpfs.errors import ExitCode, RefusedError
from tests.rig.mounts import AcpfsMount, CommandError
from tests.rig.processes import NOBODY
from tests.rig.runtime import REAL

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
clause = pytest.mark.clause


@pytest.fixture
def top(tmp_path: Path) -> Iterator[int]:
    """Of a backing directory with a `.acpfs` as acpfs makes it."""
    (tmp_path / ".acpfs").mkdir(mode=0o755)
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_our_own_is_used_and_nothing_is_left_in_it(tmp_path: Path, top: int) -> None:
    check_own(top, tmp_path, REAL.chance)
    (tmp_path / ".acpfs").chmod(0o775)
    with pytest.raises(RefusedError, match=r"mode 775.*chmod go-w"):
        check_own(top, tmp_path, REAL.chance)
    assert os.listdir(tmp_path / ".acpfs") == []


@clause("S245")
def test_one_of_another_user_is_refused(tmp_path: Path, top: int) -> None:
    os.chown(tmp_path / ".acpfs", NOBODY, NOBODY)
    with pytest.raises(RefusedError, match=f"belongs to user {NOBODY}"):
        check_own(top, tmp_path, REAL.chance)


def test_where_what_we_make_has_that_owner_and_mode_too_it_is_ours(
    tmp_path: Path, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root squash; file systems that are mounted with an owner and a mode for all."""
    made = tmp_path / "made"
    made.mkdir()
    for path in (made, tmp_path / ".acpfs"):
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o777)
    monkeypatch.setattr(ownership, "look_made", lambda _fd, _chance: made.stat())
    check_own(top, tmp_path, REAL.chance)
    made.chmod(0o755)
    with pytest.raises(RefusedError):
        check_own(top, tmp_path, REAL.chance)


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_storage_is_drained_to_all_the_same(
    tmp_path: Path, top: int, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    def refuse(*_arguments: object, **_how: object) -> None:
        raise OSError(full, os.strerror(full))

    (tmp_path / ".acpfs").chmod(0o777)
    monkeypatch.setattr(os, "mkdir", refuse)
    check_own(top, tmp_path, REAL.chance)


def test_a_link_is_not_followed(tmp_path: Path, top: int) -> None:
    (tmp_path / ".acpfs").rename(tmp_path / "elsewhere")
    (tmp_path / ".acpfs").symlink_to("elsewhere")
    with pytest.raises(OSError, match="Not a directory"):
        check_own(top, tmp_path, REAL.chance)


@clause("S245")
@pytest.mark.mount
@pytest.mark.transports("libfuse")
@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse")
def test_a_mount_over_one_that_was_made_before_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "backing" / ".acpfs"
    own.mkdir(parents=True)
    os.chown(own, NOBODY, NOBODY)
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "libfuse")
    try:
        with pytest.raises(CommandError, match=f"belongs to user {NOBODY}") as refused:
            mount.start()
        assert refused.value.code == ExitCode.REFUSED
        os.chown(own, 0, 0)
        mount.start()
        mount.umount()
    finally:
        mount.abort()
