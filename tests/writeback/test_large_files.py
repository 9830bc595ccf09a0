"""Large files through the real backing directory: direct writes, odd ends, holes, limits; every
byte and the checksum.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from acpfs.backing import filling
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.probe import probe
from acpfs.writeback.sources import source
from acpfs.writeback.streams import checksums, streams
from tests.rig.runtime import REAL
from tests.writeback.conftest import Run
from tests.writeback.world import World

MIB = 1 << 20
PAGE = 4096


def made(tmp_path: Path, **settings: Any) -> tuple[World, Path]:
    path = tmp_path / "backing"
    path.mkdir()
    directory = BackingDirectory(path, "node", REAL)
    probe(directory)
    return World(tmp_path, directory, **settings), path


def with_holes(size: int) -> bytes:
    """Data, a hole, data that does not end with a page."""
    return os.urandom(3 * PAGE) + bytes(2 * MIB) + os.urandom(size - 2 * MIB - 3 * PAGE)


@pytest.mark.parametrize("size", [MIB + 1, 2 * MIB, 3 * MIB + PAGE, 5 * MIB + 511])
@pytest.mark.parametrize(
    "settings",
    [{}, {"bandwidth": 1 << 33}, {"verify_after_write": True}],
    ids=["plain", "limited", "verified"],
)
def test_every_size_arrives_whole(
    tmp_path: Path, run: Run, size: int, settings: dict[str, object]
) -> None:
    world, path = made(tmp_path, **settings)
    data = os.urandom(size)
    world.store("f", data)
    run(world.drain)
    assert (path / "f").read_bytes() == data
    assert world.manifest.digest((b"f",)) == xxhash.xxh3_128_hexdigest(data)


@pytest.mark.parametrize("end", [0, 1, PAGE + 7])
def test_holes_arrive_as_holes(tmp_path: Path, run: Run, end: int) -> None:
    world, path = made(tmp_path)
    data = with_holes(4 * MIB + end)
    op = world.store("f", data)
    assert op.version is not None
    fd = world.tier.open(op.version.tier_id)
    os.ftruncate(fd, 3 * PAGE)  # and up again: the middle is not allocated
    os.ftruncate(fd, len(data))
    os.pwrite(fd, data[2 * MIB + 3 * PAGE :], 2 * MIB + 3 * PAGE)
    os.close(fd)
    run(world.drain)
    assert (path / "f").read_bytes() == data
    assert (path / "f").stat().st_blocks * 512 < len(data)
    assert world.manifest.digest((b"f",)) == xxhash.xxh3_128_hexdigest(data)


def test_large_files_are_written_directly_and_small_ones_are_not(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _path = made(tmp_path)
    if not filling.wants_direct(world.lower._root_fd):
        pytest.skip("the file system under the tests is none that direct writes are used on")
    direct: list[int] = []
    go_direct = filling.go_direct

    def noted(fd: int) -> None:
        direct.append(fd)
        go_direct(fd)

    monkeypatch.setattr(filling, "go_direct", noted)
    world.store("small", os.urandom(PAGE))
    run(world.drain)
    assert not direct
    world.store("large", os.urandom(2 * MIB))
    run(world.drain)
    assert len(direct) == 1


TIB = 1 << 40


@pytest.mark.clause("S229")
@pytest.mark.parametrize("settings", [{}, {"verify_after_write": True}], ids=["plain", "verified"])
def test_holes_of_a_terabyte_hold_nothing_up(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    """Its zeros would be hashed for minutes, and what was closed after it would wait."""
    hashed: list[int] = []
    for module in (streams, checksums):
        monkeypatch.setattr(module, "hash_zeros", lambda _hasher, count: hashed.append(count))
    world, path = made(tmp_path, **settings)
    world.store("f", b"old")
    world.store("other", b"before")
    run(world.drain)
    op = world.store("f", b"begin")
    assert op.version is not None
    fd = world.tier.open(op.version.tier_id)
    os.ftruncate(fd, TIB)
    os.pwrite(fd, b"end", TIB - 3)
    os.close(fd)
    op.version.size = TIB
    world.store("other", b"after")
    run(world.drain)
    assert sum(hashed) == 0
    assert (path / "other").read_bytes() == b"after"
    with open(path / "f", "rb") as file:
        assert (file.read(8), file.seek(TIB - 4), file.read()) == (
            b"begin" + bytes(3),
            TIB - 4,
            b"\0end",
        )
    assert (path / "f").stat().st_blocks * 512 < MIB
    assert world.manifest.digest((b"f",)) == ""
    assert world.manifest.digest((b"other",)) == xxhash.xxh3_128_hexdigest(b"after")
    assert "user.acpfs.xxh3" not in os.listxattr(path / "f")


@pytest.mark.clause("S229")
def test_holes_up_to_the_bound_are_a_part_of_the_checksum(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "HOLES_HASHED_BYTES_MAX", 4 * MIB)
    world, _path = made(tmp_path)
    for name, size in (("in", 4 * MIB), ("beyond", 4 * MIB + PAGE)):
        op = world.store(name, b"")
        assert op.version is not None
        fd = world.tier.open(op.version.tier_id)
        os.ftruncate(fd, size)
        os.close(fd)
        op.version.size = size
    run(world.drain)
    assert world.manifest.digest((b"in",)) == xxhash.xxh3_128_hexdigest(bytes(4 * MIB))
    assert world.manifest.digest((b"beyond",)) == ""


def test_one_wide_buffer_is_kept(world: World) -> None:
    """Its pages are made once, and not for each file; two files at a time have two."""
    streamer = world.engine._streamer
    size = 4 << 20
    with (
        streamer._buffer(size, whole_turns=True) as first,
        streamer._buffer(size, whole_turns=True) as second,
    ):
        assert first.obj is not second.obj
        kept = second.obj
    assert streamer._wide == [kept]
    with streamer._buffer(size, whole_turns=True) as third:
        assert third.obj is kept
