"""Directories that two members make, before the backing directory has heard of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.types import ROOT, Ino
from tests.filesystem.test_slow_backing import SHORT, hanging
from tests.filesystem.world import CALLER, World, run

clause = pytest.mark.clause
OLD_S = 3600.0
"""What is known of the backing directory never gets too old by itself."""


async def made(w: World, name: bytes = b"run", parent: Ino = ROOT) -> Ino:
    return (await w.do(w.fs.mkdir(parent, name, 0o755, CALLER))).ino


def made_by_another(w: World, *below: str) -> Path:
    """The same directory, with a file."""
    there = w.backing.joinpath("run", *below)
    there.mkdir(parents=True)
    (there / "theirs").write_bytes(b"theirs")
    return there


@clause("S632")
@pytest.mark.parametrize("below", [(), ("step",)])
def test_what_another_member_has_put_into_a_directory_made_here_is_seen(
    tmp_path: Path, below: tuple[str, ...]
) -> None:
    """Found by simulation: `rmdir` succeeded, and was refused by the storage for ever."""

    async def scenario(w: World) -> None:
        w.engine.hold(True)
        w.inner.awaited.peers.others = True
        directory = await made(w)
        above = ROOT
        name = b"run"
        for one in below:
            above = directory
            name = one.encode()
            directory = await made(w, name, directory)
        there = made_by_another(w, *below)
        assert await w.names(directory) == [b"theirs"]
        with pytest.raises(OSError, match="not empty"):
            await w.do(w.fs.rmdir(above, name))
        theirs = await w.do(w.fs.lookup(directory, b"theirs"))
        assert await w.read(theirs.ino) == b"theirs"
        await w.write(b"ours", b"ours", directory)
        await w.drained()
        assert sorted(path.name for path in there.iterdir()) == ["ours", "theirs"]
        w.engine.hold(True)
        for leaf in (b"ours", b"theirs"):
            await w.do(w.fs.unlink(directory, leaf))
        await w.do(w.fs.rmdir(above, name))
        await w.drained()
        assert not there.exists()

    run(tmp_path, scenario, attr_timeout_s=0.0)


@clause("S632")
def test_it_is_seen_also_where_the_making_was_carried_out_meanwhile(tmp_path: Path) -> None:
    """What was made here counted as empty for as long as a listing is good."""

    async def scenario(w: World) -> None:
        w.engine.hold(True)
        w.inner.awaited.peers.others = True
        directory = await made(w)
        made_by_another(w)
        await w.drained()
        with pytest.raises(OSError, match="not empty"):
            await w.do(w.fs.rmdir(ROOT, b"run"))
        assert await w.names(directory) == [b"theirs"]

    run(tmp_path, scenario, attr_timeout_s=OLD_S)


@clause("S459", "S632")
def test_a_name_that_is_taken_there_is_not_made_once_more(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.engine.hold(True)
        w.inner.awaited.peers.others = True
        directory = await made(w)
        assert await w.names(directory) == []
        made_by_another(w)
        with pytest.raises(FileExistsError):
            await made(w, b"theirs", directory)

    run(tmp_path, scenario, attr_timeout_s=OLD_S)


@clause("S632")
def test_one_that_is_to_be_removed_before_is_not_taken_for_it(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await made(w)
        await w.drained()
        w.engine.hold(True)
        w.inner.awaited.peers.others = True
        await w.do(w.fs.rmdir(ROOT, b"run"))
        directory = await made(w)
        (w.backing / "run" / "theirs").write_bytes(b"theirs")
        assert await w.names(directory) == []

    run(tmp_path, scenario, attr_timeout_s=OLD_S)


@clause("S632", "S3")
def test_where_no_other_member_lives_a_directory_made_here_is_not_asked_for(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        w.engine.hold(True)
        directory = await made(w)
        before = w.calls.requests.statistics().calls
        await w.names(directory)
        await w.do(w.fs.rmdir(ROOT, b"run"))
        assert w.calls.requests.statistics().calls == before

    run(tmp_path, scenario, attr_timeout_s=OLD_S)


@clause("S632", "S3")
def test_while_the_backing_directory_hangs_a_directory_made_here_is_used(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.engine.hold(True)
        w.inner.awaited.peers.others = True
        with hanging(w, "lstat", "listdir"):
            directory = await made(w)
            await w.write(b"ours", b"ours", directory)
            assert await w.names(directory) == [b"ours"]
        await w.drained()
        assert (w.backing / "run" / "ours").read_bytes() == b"ours"

    run(tmp_path, scenario, **{**SHORT, "attr_timeout_s": OLD_S})
