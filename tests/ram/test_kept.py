"""What a worker leaves to the next one: bounded, and never a reason to refuse a call."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

import pytest

from acpfs.ram import kept as kept_module
from acpfs.ram.kept import Kept
from acpfs.ram.mounts import mount_tmpfs, unmount

pytestmark = pytest.mark.clause("S203")
NAMES = [b"%d" % n * 8 for n in range(10)]


def test_listings_are_kept_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "LISTINGS_BYTES_MAX", 190)
    kept = Kept(tmp_path / "session", "a")
    for number in (1, 2, 3, 4):
        kept.write_listing(number, NAMES)
    assert [kept.read_listing(number) for number in (1, 2, 3, 4)] == [NAMES, NAMES, None, None]
    kept.write_listing(1, NAMES[:2])  # read from its beginning again
    assert kept.read_listing(1) == NAMES[:2]
    kept.remove_listing(2)
    kept.close()
    again = Kept(tmp_path / "session", "a")
    assert (again.taken_over, again.read_listing(1), again.read_listing(2)) == (
        True,
        NAMES[:2],
        None,
    )
    again.write_listing(5, NAMES)
    again.write_listing(6, NAMES)
    assert (again.read_listing(5), again.read_listing(6)) == (NAMES, None), (
        "those of the last worker count"
    )
    again.close()


def test_a_listing_that_finds_no_room_is_a_listing_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path / "session", "a")
    kept.write_listing(1, NAMES)

    def full(_path: Path, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        kept.write_listing(1, NAMES[:3])
        kept.write_listing(2, NAMES)
    assert (kept.read_listing(1), kept.read_listing(2)) == (None, None)
    kept.write_listing(2, NAMES)
    assert kept.read_listing(2) == NAMES
    kept.close()


@pytest.mark.clause("S81", "S202")
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a tmpfs")
def test_the_next_worker_takes_over_where_not_one_page_is_free(tmp_path: Path) -> None:
    mount_tmpfs(tmp_path, "size=1M")
    try:
        kept = Kept(tmp_path / "session", "a")
        kept.record("uid", 7)
        kept.close()
        with open(tmp_path / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            file.writelines(bytes(mmap.PAGESIZE) for _ in range(512))
        assert os.statvfs(tmp_path).f_bfree == 0
        for generation in (2, 3):
            again = Kept(tmp_path / "session", "a")
            assert (again.taken_over, again.generation, again.fact("uid")) == (True, generation, 7)
            again.close()
    finally:
        unmount(str(tmp_path), detach=True)
