"""Names that only one may make, where other members make names, too: the backing directory is asked
anew.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from acpfs.filesystem.names import RENAME_NOREPLACE
from acpfs.types import ROOT
from tests.filesystem.test_slow_backing import SHORT, hanging
from tests.filesystem.world import CALLER, World, run

clause = pytest.mark.clause
OLD_S = 3600.0
"""What is known of the backing directory never gets too old by itself."""
NAME = b"once"


async def a_file(w: World) -> None:
    opened, _ = await w.create(NAME, flags=os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    await w.close(opened)


async def a_directory(w: World) -> None:
    await w.do(w.fs.mkdir(ROOT, NAME, 0o755, CALLER))


async def a_fifo(w: World) -> None:
    await w.do(w.fs.mknod(ROOT, NAME, stat.S_IFIFO | 0o644, 0, CALLER))


async def a_symlink(w: World) -> None:
    await w.do(w.fs.symlink(ROOT, NAME, b"target", CALLER))


async def a_link(w: World) -> None:
    one = await w.do(w.fs.lookup(ROOT, b"mine"))
    await w.do(w.fs.link(one.ino, ROOT, NAME))


async def a_rename(w: World) -> None:
    await w.do(w.fs.rename(ROOT, b"mine", ROOT, NAME, RENAME_NOREPLACE))


async def known_to_be_absent(w: World) -> None:
    """As the kernel asks before each of these calls; and a file of our own."""
    await w.write(b"mine", b"mine")
    with suppress(FileNotFoundError):
        await w.do(w.fs.lookup(ROOT, NAME))


@clause("S459")
@pytest.mark.parametrize("make", [a_file, a_directory, a_fifo, a_symlink, a_link, a_rename])
@pytest.mark.parametrize("theirs", ["file", "directory"])
def test_a_name_that_another_member_has_made_is_taken(
    tmp_path: Path, make: Callable[[World], Awaitable[None]], theirs: str
) -> None:
    async def scenario(w: World) -> None:
        await known_to_be_absent(w)
        w.inner.awaited.peers.others = True
        there = w.backing / os.fsdecode(NAME)
        if theirs == "file":
            there.write_bytes(b"theirs")
        else:
            there.mkdir()
        with pytest.raises(FileExistsError):
            await make(w)
        found = await w.do(w.fs.lookup(ROOT, NAME))
        assert stat.S_ISDIR(found.mode) == (theirs == "directory")
        await w.drained()
        assert there.is_dir() if theirs == "directory" else there.read_bytes() == b"theirs"

    run(tmp_path, scenario, attr_timeout_s=OLD_S)


@clause("S459", "S3")
@pytest.mark.parametrize("make", [a_file, a_directory, a_symlink, a_rename])
def test_where_no_other_member_lives_nothing_is_asked(
    tmp_path: Path, make: Callable[[World], Awaitable[None]]
) -> None:
    async def scenario(w: World) -> None:
        await known_to_be_absent(w)
        before = w.calls.requests.statistics().calls
        await make(w)
        assert w.calls.requests.statistics().calls == before

    run(tmp_path, scenario, attr_timeout_s=OLD_S)


@clause("S459", "S3")
def test_while_the_backing_directory_hangs_what_is_known_has_to_do(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await known_to_be_absent(w)
        w.inner.awaited.peers.others = True
        with hanging(w, "lstat", "listdir"):
            await a_directory(w)
        await w.drained()
        assert (w.backing / os.fsdecode(NAME)).is_dir()

    run(tmp_path, scenario, **{**SHORT, "attr_timeout_s": OLD_S})
