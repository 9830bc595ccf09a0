"""The RAM tier's directory: taken over, refused to others, removed when nothing is left."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.errors import MachineError, RefusedError
from acpfs.ram import place as places
from acpfs.ram.mounts import bind, mount_table, mount_tmpfs, mounted_at, unmount
from acpfs.ram.state_space import RESERVE_BYTES

BACKING = Path("/backing")
MIB = 1 << 20
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts a tmpfs")


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "tiers"
    for entry in reversed(mount_table()):
        if entry.path.startswith(str(tmp_path)):
            unmount(entry.path, detach=True)


@pytest.fixture
def no_mounting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(places, "mount_tmpfs", refuse)


@needs_root
def test_a_tier_outlives_its_daemon_and_is_found_again(tiers: Path) -> None:
    first = places.take(tiers, "vol", "n1", BACKING, 8 * MIB)
    (first.directory / "kept").write_text("x")
    places.let_go(first)
    second = places.take(tiers, "vol", "n1", BACKING, 16 * MIB)
    assert (first.found, second.found, second.own_tmpfs) == (False, True, True)
    assert (second.directory / "kept").read_text() == "x"
    assert os.statvfs(second.directory).f_blocks * os.statvfs(second.directory).f_frsize >= 16 * MIB
    places.give_up(second)
    assert mounted_at(str(second.directory)) is None
    assert not second.directory.exists()


@needs_root
def test_bytes_that_fill_their_tmpfs_leave_room_for_the_state(tiers: Path) -> None:
    place = places.take(tiers, "vol", "n1", BACKING, 2 * MIB)
    capacity = 2 * MIB + places.slack_bytes(2 * MIB)
    with open(place.directory / "data/big", "wb", buffering=0) as big:
        os.posix_fallocate(big.fileno(), 0, capacity)
        with pytest.raises(OSError, match="No space left"):
            os.posix_fallocate(big.fileno(), capacity, 4096)
    (place.directory / "state").write_bytes(bytes(MIB))
    places.give_up(place)
    assert mounted_at(str(place.directory / "data")) is None


@needs_root
def test_a_copy_of_the_mount_in_another_name_space_keeps_no_memory(tiers: Path) -> None:
    place = places.take(tiers, "vol", "n1", BACKING, 8 * MIB)
    (place.directory / "data/clean").write_bytes(bytes(MIB))
    copy = os.open(
        place.directory / "data", os.O_RDONLY | os.O_DIRECTORY
    )  # holds the file system like a copy of the mount
    try:
        places.give_up(place)
        info = os.fstatvfs(copy)
        assert info.f_blocks == info.f_bfree
    finally:
        os.close(copy)


@needs_root
def test_nobody_else_can_enter(tiers: Path) -> None:
    place = places.take(tiers, "vol", "n1", BACKING, 8 * MIB)
    assert place.directory.stat().st_mode & 0o777 == 0o700
    places.give_up(place)


@needs_root
def test_a_second_daemon_is_refused_and_a_second_node_is_not(tiers: Path) -> None:
    place = places.take(tiers, "vol", "n1", BACKING, 8 * MIB)
    with pytest.raises(RefusedError, match="identity is in use"):
        places.take(tiers, "vol", "n1", BACKING, 8 * MIB)
    other = places.take(tiers, "vol", "n2", BACKING, 8 * MIB)
    places.give_up(other)
    places.give_up(place)


@needs_root
def test_a_tier_left_under_another_node_id_is_pointed_out(tiers: Path) -> None:
    places.let_go(places.take(tiers, "vol", "old", BACKING, 8 * MIB))
    places.give_up(places.take(tiers, "vol", "gone", BACKING, 8 * MIB))
    place = places.take(tiers, "vol", "new", BACKING, 8 * MIB)
    assert len(place.warnings) == 1
    assert "--node-id old" in place.warnings[0]


@needs_root
def test_a_tier_of_another_backing_directory_is_refused(tiers: Path) -> None:
    place = places.take(tiers, "vol", "n1", BACKING, 8 * MIB)
    (place.directory / "meta.json").write_text(
        json.dumps({"volume_id": "other", "node_id": "n1", "backing": "/elsewhere"})
    )
    places.let_go(place)
    with pytest.raises(RefusedError, match="belongs to /elsewhere"):
        places.take(tiers, "vol", "n1", BACKING, 8 * MIB)


@needs_root
def test_damaged_meta_is_refused_not_overwritten(tiers: Path) -> None:
    place = places.take(tiers, "vol", "n1", BACKING, 8 * MIB)
    (place.directory / "meta.json").write_text("{")
    places.let_go(place)
    with pytest.raises(RefusedError, match="damaged"):
        places.take(tiers, "vol", "n1", BACKING, 8 * MIB)


@pytest.mark.clause("S197")
@pytest.mark.parametrize("own", [pytest.param(True, marks=needs_root), False])
def test_what_is_left_is_never_thrown_away_because_its_record_is_gone(
    tiers: Path, tmp_path: Path, request: pytest.FixtureRequest, own: bool
) -> None:
    if not own:
        request.getfixturevalue("no_mounting")
    first = places.take(tiers, "vol", "n1", BACKING, 8 * MIB, shared_memory=tmp_path / "shm")
    (first.directory / "data").mkdir(exist_ok=True)
    (first.directory / "data/1").write_bytes(b"dirty")
    (first.directory / "meta.json").unlink()
    places.let_go(first)
    second = places.take(tiers, "vol", "n1", BACKING, 8 * MIB, shared_memory=tmp_path / "shm")
    assert second.found
    assert (second.directory / "data/1").read_bytes() == b"dirty"
    assert any("was gone, and was made anew" in warning for warning in second.warnings)
    assert "1 files of 5 bytes" in places.way_out(second)
    places.give_up(second)


@pytest.mark.clause("S197")
@pytest.mark.parametrize("own", [pytest.param(True, marks=needs_root), False])
def test_a_tier_whose_removal_was_cut_off_is_removed(
    tiers: Path, tmp_path: Path, request: pytest.FixtureRequest, own: bool
) -> None:
    if not own:
        request.getfixturevalue("no_mounting")
    first = places.take(tiers, "vol", "n1", BACKING, 8 * MIB, shared_memory=tmp_path / "shm")
    (first.directory / "data").mkdir(exist_ok=True)
    (first.directory / "data/1").write_bytes(b"clean")
    (first.directory / "given-up").touch()
    places.let_go(first)
    second = places.take(tiers, "vol", "n1", BACKING, 8 * MIB, shared_memory=tmp_path / "shm")
    assert not second.found
    assert not (second.directory / "data/1").exists()
    places.give_up(second)


def capacity(place: places.Place) -> int:
    info = os.statvfs(place.directory / "data")
    return info.f_blocks * info.f_frsize


@needs_root
def test_a_smaller_budget_than_what_is_left_keeps_what_is_left_and_is_followed_as_it_goes(
    tiers: Path,
) -> None:
    slack = places.slack_bytes(2 * MIB)
    first = places.take(tiers, "vol", "n1", BACKING, 64 * MIB)
    big = first.directory / "data/big"
    big.write_bytes(bytes(slack + 32 * MIB))
    places.let_go(first)
    second = places.take(tiers, "vol", "n1", BACKING, 2 * MIB)
    assert not places.fit(second)
    assert capacity(second) == slack + 64 * MIB, "as large as it was"
    assert big.stat().st_size == slack + 32 * MIB
    os.truncate(big, 16 * MIB)
    assert not places.fit(second)
    assert capacity(second) == slack + 16 * MIB
    big.unlink()
    assert places.fit(second)
    assert capacity(second) == slack + 2 * MIB
    places.give_up(second)


@needs_root
@pytest.mark.clause("S436")
def test_memory_is_lent_beside_what_is_there_and_given_back_as_it_goes(
    tiers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slack = places.slack_bytes(2 * MIB)
    place = places.take(tiers, "vol", "n1", BACKING, 2 * MIB)
    monkeypatch.setattr(places, "available_bytes", lambda: slack)
    places.lend(place)
    assert capacity(place) == slack + 2 * MIB, "there is a whole slack still"
    with open(place.directory / "data/big", "wb", buffering=0) as big:
        os.posix_fallocate(big.fileno(), 0, slack + 2 * MIB)
        monkeypatch.setattr(places, "available_bytes", lambda: -1)
        places.lend(place)
        assert capacity(place) == slack + 2 * MIB, "the machine has no memory for it"
        monkeypatch.setattr(places, "available_bytes", lambda: 8 * MIB)
        places.lend(place)
        assert capacity(place) == slack + 10 * MIB
        os.posix_fallocate(big.fileno(), 0, slack + 10 * MIB)
        os.ftruncate(big.fileno(), 0)
    monkeypatch.setattr(places, "available_bytes", lambda: 4 * slack)
    places.lend(place)
    assert capacity(place) == 2 * slack
    monkeypatch.setattr(places, "available_bytes", no_descriptor)
    places.lend(place)
    assert not places.fit(place)
    assert capacity(place) == 2 * slack, "it is looked at every 20 ms, and this may come between"
    assert places.fit(place)
    assert capacity(place) == slack + 2 * MIB
    places.give_up(place)


def no_descriptor() -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@needs_root
@pytest.mark.clause("S203")
def test_the_tmpfs_of_the_state_grows_when_little_of_it_is_free(tiers: Path) -> None:
    place = places.take(tiers, "vol", "n1", BACKING, 8 * MIB)
    space = places.state_space(place)
    before = os.statvfs(place.directory)
    mount_tmpfs(place.directory, f"size={8 * MIB}", remount=True)
    assert os.statvfs(place.directory).f_blocks < before.f_blocks
    assert not space.is_short()
    assert os.statvfs(place.directory).f_bavail * before.f_frsize >= RESERVE_BYTES
    places.give_up(place)


@pytest.mark.clause("S203")
def test_a_shared_tmpfs_that_the_budget_may_fill_is_not_short_when_it_does() -> None:
    for capacity, budget in ((64, 48), (64, 60), (64, 64), (300, 290), (4096, 1024)):
        reserve = places.shared_reserve_bytes(capacity * MIB, budget * MIB)
        assert 2 * reserve <= (capacity - budget) * MIB, "as ballast, and free beside it"
    assert places.shared_reserve_bytes(4096 * MIB, 1024 * MIB) == RESERVE_BYTES


@pytest.mark.usefixtures("no_mounting")
def test_without_permission_shared_memory_is_used_with_a_warning(
    tiers: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    place = places.take(tiers, "vol", "n1", BACKING, MIB, shared_memory=shared)
    assert not place.own_tmpfs
    assert places.SMALL_PAGES in place.warnings[0]
    places.let_go(place)
    again = places.take(tiers, "vol", "n1", BACKING, MIB, shared_memory=shared)
    assert again.found
    places.give_up(again)
    assert not place.directory.exists()


@pytest.mark.usefixtures("no_mounting")
def test_shared_memory_that_is_too_small_is_an_error_that_says_so(
    tiers: Path, tmp_path: Path
) -> None:
    with pytest.raises(MachineError, match="has only"):
        places.take(tiers, "vol", "n1", BACKING, 1 << 60, shared_memory=tmp_path)
    places.take(tiers, "vol", "n1", BACKING, MIB, shared_memory=tmp_path)  # the lock was given back


@pytest.mark.usefixtures("no_mounting")
@pytest.mark.parametrize("trap", ["symlink", "open"])
def test_somebody_elses_directory_under_our_name_is_refused(
    tiers: Path, tmp_path: Path, trap: str
) -> None:
    shared = tmp_path / "shm"
    target = tmp_path / "target"
    shared.mkdir()
    target.mkdir(mode=0o700)
    mine = shared / f"acpfs-{os.getuid()}"
    if trap == "symlink":
        mine.symlink_to(target)
    else:
        mine.mkdir()
        mine.chmod(0o777)
    with pytest.raises(RefusedError, match="not a private directory"):
        places.take(tiers, "vol", "n1", BACKING, MIB, shared_memory=shared)


def test_the_mount_table_decodes_what_the_kernel_escapes(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(b"36 35 98:0 / /mnt/a\\040b\\011c rw - fuse.acpfs src\\134x rw\n")
    (entry,) = mount_table(table)
    assert (entry.path, entry.kind, entry.source) == ("/mnt/a b\tc", "fuse.acpfs", "src\\x")


@needs_root
@pytest.mark.clause("S60")
def test_what_is_written_beyond_the_budget_makes_no_more_room(tiers: Path) -> None:
    """A passthrough writer in one giant write cannot be held: it ends where the tmpfs does, however
    long it takes.
    """
    place = places.take(tiers, "vol", "n1", BACKING, 2 * MIB)
    slack = places.slack_bytes(2 * MIB)
    (place.directory / "data/big").write_bytes(bytes(slack))
    assert places.fit(place)
    assert capacity(place) == slack + 2 * MIB
    places.give_up(place)


def moved_away(tiers: Path) -> tuple[places.Place, Path]:
    """A tier with something in it, with files of its mount and of another one beside it; and where
    all that lies now.
    """
    for name in ("sockets/ours-1.sock", "sockets/theirs-1.sock", "remembered/volumes/v.json"):
        (tiers.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (tiers.parent / name).write_text(name)
    place = places.take(tiers, "vol", "n1", BACKING, 8 * MIB)
    (place.directory / "kept").write_text("x")
    moved = tiers.parent.with_name("moved")
    tiers.parent.rename(moved)
    return place, moved / "tiers" / place.directory.name


@needs_root
@pytest.mark.clause("S418")
@pytest.mark.parametrize("killed", [False, True])
def test_a_tier_that_was_moved_away_is_shown_at_its_place_alone(
    tmp_path: Path, tiers: Path, killed: bool
) -> None:
    """Who was killed when it was shown at its place left its memory mounted at the other one, where
    nobody looked again.
    """
    place, moved = moved_away(tmp_path / "run" / "tiers")
    if killed:
        place.directory.mkdir(mode=0o700, parents=True)
        bind(moved, place.directory)
    names = ("vol", "n1", BACKING, 8 * MIB)
    found = places.take(
        tmp_path / "run" / "tiers", *names, lock_fd=place.lock_fd, names=("ours-1",)
    )
    assert (found.directory / "kept").read_text() == "x"
    assert (mounted_at(str(moved)), found.found) == (None, True)
    assert not places.find_again(found.directory, found.lock_fd, ("ours-1",))
    # what another mount has in the run directory stays with it; the lock keeps others out again
    run = tmp_path / "run"
    assert os.listdir(run / "sockets") == ["ours-1.sock"]
    assert os.listdir(tmp_path / "moved/sockets") == ["theirs-1.sock"]
    assert (run / "remembered/volumes/v.json").exists()
    with pytest.raises(RefusedError):
        places.take(tmp_path / "run" / "tiers", *names)
    places.give_up(found)
    assert not [entry for entry in mount_table() if entry.path.startswith(str(tmp_path))]


@needs_root
@pytest.mark.clause("S418")
def test_what_lies_at_a_moved_place_of_another_tier_is_left(tmp_path: Path, tiers: Path) -> None:
    place, moved = moved_away(tmp_path / "run" / "tiers")
    other = places.take(tmp_path / "run" / "tiers", "vol", "n1", BACKING, 8 * MIB)
    assert not places.find_again(place.directory, place.lock_fd)
    assert (moved / "kept").read_text() == "x"
    for one in (other, place):
        places.let_go(one)
