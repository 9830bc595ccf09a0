"""What a RAM tier has that no mount takes is copied out of it, under its name where anything says
that, and nothing is made up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import xxhash

from acpfs.errors import ConfigError, ExitCode, RefusedError
from acpfs.mounting.tier_salvage import Saved, salvage
from acpfs.types import Ino
from tests.filesystem.world import CALLER, World, world
from tests.rig.mounts import AcpfsMount, CommandError, MakeMount

pytestmark = pytest.mark.clause("S237")

SAVED = {"d/f": b"saved in a directory", "g": b"saved", "rewritten": b"the new one"}


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """What a worker leaves: files that are persisted, that wait, that wait in two versions, and one
    that is being written.
    """

    async def fill(w: World) -> None:
        await w.write(b"clean", b"is on the backing directory")
        await w.write(b"rewritten", b"the old one")
        await w.drained()
        w.engine.hold(True)
        directory = (await w.do(w.fs.mkdir(Ino(1), b"d", 0o755, CALLER))).ino
        await w.write(b"f", SAVED["d/f"], directory)
        await w.write(b"g", SAVED["g"])
        await w.write(b"rewritten", SAVED["rewritten"])
        for op in w.log:
            if op.name == b"g" and op.version is not None:
                op.version.digest = xxhash.xxh3_128_hexdigest(SAVED["g"])
                with w.fs.lock:
                    w.log.save_version(op.version)
        opened, _attributes = await w.create(b"half")
        await w.do(w.fs.write(opened.handle, 0, b"being written"))

    async def main() -> None:
        async with world(tmp_path) as w:
            await fill(w)

    trio.run(main)
    return tmp_path / "tier"


def files(target: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(target)): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file() and path.suffix != ".json"
    }


def by_target(saved: list[Saved]) -> dict[str | None, str]:
    return {one.target: one.problem for one in saved}


def change(tier: Path, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(tier / "state.sqlite")) as db:
        db.execute(statement, values)
        db.commit()


def test_what_is_not_persisted_is_copied_under_its_name(tier: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in tier.rglob("*") if path.is_file()}
    saved = salvage(tier, tmp_path / "target")
    assert files(tmp_path / "target") == {
        f"files/{name}": data
        for name, data in {**SAVED, "half.being-written": b"being written"}.items()
    }
    assert {one.problem for one in saved} == {""}
    assert {one.checksum for one in saved} >= {
        xxhash.xxh3_128_hexdigest(data) for data in SAVED.values()
    }
    assert {path: path.read_bytes() for path in tier.rglob("*") if path.is_file()} == before, (
        "nothing is changed there"
    )
    assert (tmp_path / "target/salvaged.json").exists()
    assert (tmp_path / "target").stat().st_mode & 0o077 == 0


def test_all_is_copied_where_that_is_wanted(tier: Path, tmp_path: Path) -> None:
    salvage(tier, tmp_path / "target", everything=True)
    assert files(tmp_path / "target")["files/clean"] == b"is on the backing directory"


@pytest.mark.parametrize("damage", ["gone", "garbage", "half of it"])
def test_without_a_state_all_is_copied_without_names(
    tier: Path, tmp_path: Path, damage: str
) -> None:
    state = tier / "state.sqlite"
    if damage == "gone":
        state.unlink()
    elif damage == "garbage":
        state.write_bytes(os.urandom(8192))
    else:
        state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    saved = salvage(tier, tmp_path / "target")
    assert {one.size for one in saved} >= {len(data) for data in SAVED.values()}
    assert set(files(tmp_path / "target").values()) >= {
        *SAVED.values(),
        b"being written",
        b"is on the backing directory",
    }
    assert all(one.problem for one in saved)
    assert "saved in a direc" in [one.begins for one in saved]


def test_a_state_of_an_earlier_moment_is_not_believed_that_a_file_is_persisted(
    tier: Path, tmp_path: Path
) -> None:
    (tier / "state.sqlite-in-use").touch()  # and the write-ahead log that belongs to it is gone
    saved = salvage(tier, tmp_path / "target")
    assert files(tmp_path / "target")["files/clean"] == b"is on the backing directory"
    assert all("write-ahead log is gone" in one.problem for one in saved)


def test_bytes_that_changed_or_are_missing_are_named(tier: Path, tmp_path: Path) -> None:
    for path in (tier / "data").iterdir():
        if path.read_bytes() == SAVED["g"]:
            path.write_bytes(b"flipp")
        elif path.read_bytes() == SAVED["d/f"]:
            os.truncate(path, 3)
    problems = by_target(salvage(tier, tmp_path / "target"))
    assert "not those that were written" in problems["files/g"]
    assert problems["files/d/f"] == "only 3 of its 20 bytes are there"
    assert problems["files/rewritten"] == ""


@pytest.mark.parametrize("name", [b"..", b"../../evil", b"x" * 300], ids=["above", "path", "long"])
def test_names_that_no_file_can_have_lead_nowhere(tier: Path, tmp_path: Path, name: bytes) -> None:
    change(tier, "UPDATE child SET name = ? WHERE name = ?", name, b"g")
    change(tier, "UPDATE op SET name = ? WHERE name = ?", name, b"g")
    salvage(tier, tmp_path / "target")
    found = files(tmp_path / "target")
    assert [
        path for path, data in found.items() if data == SAVED["g"] and path.startswith("unnamed/")
    ]
    assert not (tmp_path / "evil").exists()


def test_a_tier_in_use_and_a_target_in_use_are_refused(tier: Path, tmp_path: Path) -> None:
    with open(tmp_path / "tier.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match="is in use: read its files in the mount"):
            salvage(tier, tmp_path / "target")
    salvage(tier, tmp_path / "target")
    with pytest.raises(ConfigError, match="is not empty"):
        salvage(tier, tmp_path / "target")
    with pytest.raises(ConfigError, match="is not a RAM tier"):
        salvage(tmp_path / "backing", tmp_path / "another")


def test_what_cannot_be_written_is_named_and_the_rest_is_copied(
    tier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for one file."""
    real: Callable[[int], None] = os.fsync
    failing = [OSError(28, "No space left on device")] * 2

    def fsync(fd: int) -> None:
        if failing:
            raise failing.pop()
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    saved = salvage(tier, tmp_path / "target")
    (problem,) = [one.problem for one in saved if one.target is None]
    assert "could not be copied: No space left on device" in problem
    assert len(files(tmp_path / "target")) == len(saved) - 1 == 3


@pytest.mark.mount
@pytest.mark.timeout(1800)
def test_a_refused_mount_says_how_and_the_command_does_it(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    (tmp_path / "backing").mkdir()
    mount: AcpfsMount = make_mount(tmp_path / "backing", transport, bandwidth=1)
    data = os.urandom(100_000)
    (mount.path / "f").write_bytes(data)
    tier = Path(mount.status()["ram"]["directory"])
    refused = mount.run("acpfs", "salvage", str(tier), str(tmp_path / "early"), check=False)
    assert refused.returncode == ExitCode.REFUSED
    mount.kill()
    (tier / "state.sqlite").unlink()
    with pytest.raises(CommandError, match=rf"acpfs salvage {tier} TARGET"):
        mount.start()
    done = mount.run("acpfs", "salvage", str(tier), str(tmp_path / "target"), check=False)
    assert done.returncode == ExitCode.FAILED
    assert "its name is not known" in done.stdout
    assert list(files(tmp_path / "target").values()) == [data]
