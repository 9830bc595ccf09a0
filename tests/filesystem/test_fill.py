"""A cold file read right into the mapped tier file: every size, the end of the last page, and a
tier file that is cut off meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from acpfs.backing.calls import CallPools
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.progress import Progress
from acpfs.filesystem.content.fill import PIECE_BYTES, Fill, FillSource
from acpfs.ram.mounts import mount_tmpfs, unmount
from tests.rig.runtime import REAL

WAIT_S = 120.0
PAGE = 4096


@pytest.fixture
def lower(tmp_path: Path) -> BackingDirectory:
    (tmp_path / "backing").mkdir()
    return BackingDirectory(tmp_path / "backing", "node", REAL)


@pytest.fixture
def pools() -> Iterator[CallPools]:
    made = CallPools.make(REAL, requests=4, streams=1, syncs=1)
    yield made
    made.close()


def begun(
    lower: BackingDirectory, pools: CallPools, data: bytes, size: int, *, direct: bool = False
) -> tuple[Fill, Path]:
    """A fill of the first `size` bytes of a file with that data, and its tier file."""
    source = lower.path / "cold"
    target = lower.path.with_name("tier")
    source.write_bytes(data)
    fd = os.open(source, os.O_RDONLY)
    made = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    if direct:
        lower.expect_bulk(fd)
    os.ftruncate(made, size)
    return Fill(
        FillSource(lower, fd, direct),
        made,
        size,
        requests=pools.requests,
        ahead=pools.fills,
        progress=Progress(),
    ), target


@pytest.mark.clause("S100", "S102")
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("longer", [0, 7, 3 * PAGE])
@pytest.mark.parametrize(
    "size", [1, PAGE - 1, PAGE, PIECE_BYTES + 1, 3 * PIECE_BYTES - 5, 5 * PIECE_BYTES]
)
def test_what_comes_is_the_file_and_nothing_lies_behind_its_end(
    lower: BackingDirectory, pools: CallPools, size: int, longer: int, direct: bool
) -> None:
    """Also where others append to it meanwhile: what the tier file gets when it is extended is
    zeros.
    """
    data = os.urandom(size + longer)
    fill, target = begun(lower, pools, data, size, direct=direct)
    fill.lead()
    assert fill.done.result(WAIT_S) == xxhash.xxh3_128_hexdigest(data[:size])
    fill.unuse()
    os.truncate(target, size + 2 * PAGE)
    assert target.read_bytes() == data[:size] + bytes(2 * PAGE)


@pytest.mark.clause("S103")
def test_a_tier_file_is_cut_off_while_the_backing_directory_is_read_into_it(
    lower: BackingDirectory, pools: CallPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room is free at once, and the read that comes back late finds nothing to write to; a
    touch would be a SIGBUS.
    """
    read = lower.read
    asked = threading.Event()
    goes_on = threading.Event()
    outcome = threading.Event()
    errors: list[int | None] = []

    def late(fd: int, buffer: memoryview, offset: int) -> int:
        asked.set()
        assert goes_on.wait(WAIT_S)
        try:
            return read(fd, buffer, offset)
        except OSError as error:
            errors.append(error.errno)
            raise
        finally:
            outcome.set()

    monkeypatch.setattr(lower, "read", late)
    fill, target = begun(lower, pools, os.urandom(2 * PIECE_BYTES), 2 * PIECE_BYTES)
    fill.lead()
    assert asked.wait(WAIT_S)
    fill.give_up()
    os.truncate(target, 0)
    goes_on.set()
    assert outcome.wait(WAIT_S)
    with pytest.raises(OSError) as error:
        fill.done.result(WAIT_S)
    assert (error.value.errno, errors[:1]) == (errno.ECANCELED, [errno.EFAULT])
    fill.unuse()
    assert target.stat().st_blocks == 0


@pytest.mark.clause("S103")
def test_giving_up_waits_for_who_touches_the_mapping(
    lower: BackingDirectory, pools: CallPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum of one piece, a fraction of a millisecond; the next piece is not touched any
    more.
    """
    touching = threading.Event()
    goes_on = threading.Event()
    pieces: list[int] = []

    class Hasher:
        def update(self, piece: memoryview) -> None:
            pieces.append(len(piece))
            touching.set()
            assert goes_on.wait(WAIT_S)
            assert piece[-1] is not None

    fill, target = begun(lower, pools, bytes(4 * PIECE_BYTES), 4 * PIECE_BYTES)
    monkeypatch.setattr(fill, "_hasher", Hasher())
    fill.lead()
    assert touching.wait(WAIT_S)

    def give_up() -> None:
        fill.give_up()
        os.truncate(target, 0)

    given_up = threading.Thread(target=give_up)
    given_up.start()
    given_up.join(0.2)
    assert given_up.is_alive()
    goes_on.set()
    given_up.join(WAIT_S)
    assert not given_up.is_alive()
    assert pieces == [PIECE_BYTES]
    fill.unuse()


@pytest.mark.clause("S101", "S103")
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a tmpfs")
@pytest.mark.parametrize("size", [100, PIECE_BYTES + 100])
def test_a_tmpfs_that_is_full_ends_the_fill_and_not_the_worker(
    lower: BackingDirectory, pools: CallPools, size: int
) -> None:
    """Others fill the shared memory that the RAM tier lies in: the last part of a page was written
    where there was no page, a SIGBUS.
    """
    ram = lower.path.with_name("ram")
    ram.mkdir()
    mount_tmpfs(ram, f"size={4 * PIECE_BYTES}")
    try:
        made = os.open(ram / "tier", os.O_RDWR | os.O_CREAT)
        os.ftruncate(made, size)
        full = os.open(ram / "others", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):  # ENOSPC
            while os.write(full, bytes(PAGE)):
                pass
        os.close(full)
        (lower.path / "cold").write_bytes(os.urandom(size))
        source = os.open(lower.path / "cold", os.O_RDONLY)
        fill = Fill(
            FillSource(lower, source, direct=False),
            made,
            size,
            requests=pools.requests,
            ahead=pools.fills,
            progress=Progress(),
        )
        last = size // PIECE_BYTES * PIECE_BYTES
        for piece in fill.ask(last, size - last):
            piece.result(WAIT_S)
        assert not fill.has(last, size - last)
        with pytest.raises(OSError, match="No space left"):
            fill.done.result(WAIT_S)
        fill.unuse()
    finally:
        unmount(ram, detach=True)


def test_the_last_one_unmaps(
    lower: BackingDirectory, pools: CallPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is unlinked while it is mapped would keep its room."""
    fill, target = begun(lower, pools, bytes(PIECE_BYTES), PIECE_BYTES)
    target_fd = fill._target_fd
    close = os.close
    closed = threading.Event()

    def noticed(fd: int) -> None:
        close(fd)
        if fd == target_fd:
            closed.set()

    monkeypatch.setattr(os, "close", noticed)
    assert os.fspath(target) in Path("/proc/self/maps").read_text()
    fill.lead()
    fill.done.result(WAIT_S)
    assert not closed.is_set()
    fill.unuse()
    assert closed.wait(WAIT_S)
    assert os.fspath(target) not in Path("/proc/self/maps").read_text()
