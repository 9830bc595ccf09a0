"""A file that was only looked at is not in the state database; what a next worker needs is, from
the step on in which it is needed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.filesystem.records import AttributeChange
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run

pytestmark = pytest.mark.clause("S204")
FILES = 40
LARGE = 3 << 20
"""Not brought to RAM by its open."""


def tree_of_files(base: Path) -> None:
    directory = base / "backing" / "data"
    directory.mkdir(parents=True)
    for i in range(FILES):
        (directory / f"f{i}").write_bytes(b"content %d" % i)
    (directory / "large").write_bytes(bytes(LARGE))
    (directory / "link").symlink_to("f0")


def rows(w: World) -> dict[str, int]:
    with w.fs.lock:
        return {
            table: w.state.rows(f"SELECT count(*) FROM {table}")[0][0]
            for table in ("node", "child", "place")
        }


async def look(w: World, *, plus: bool = False) -> tuple[Ino, dict[bytes, Ino]]:
    """Look at all files, as find does or as readdirplus."""
    directory = (await w.do(w.fs.lookup(ROOT, b"data"))).ino
    found = {}
    if plus:
        handle = await w.do(w.fs.opendir(directory))
        for entry in await w.do(w.fs.readdir(handle, 0, with_attributes=True)):
            found[entry.name] = entry.ino
        await w.do(w.fs.releasedir(handle))
    else:
        for name in await w.names(directory):
            found[name] = (await w.do(w.fs.lookup(directory, name))).ino
    return directory, found


@pytest.mark.parametrize("plus", [False, True])
def test_looking_at_files_leaves_no_rows(tmp_path: Path, plus: bool) -> None:
    tree_of_files(tmp_path)
    numbers: dict[bytes, Ino] = {}

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"data"))).ino
        before = rows(w)
        numbers.update((await look(w, plus=plus))[1])
        assert len(numbers) >= FILES + 2
        assert rows(w) == before
        with pytest.raises(FileNotFoundError):
            await w.do(w.fs.lookup(directory, b"absent"))
        assert rows(w) == before

    async def after_a_kill(w: World) -> None:
        assert (await look(w))[1].items() <= numbers.items(), (
            "the same numbers: the kernel's are still right"
        )

    run(tmp_path, scenario)
    run(tmp_path, after_a_kill)


def test_an_open_file_has_a_row_until_it_is_closed(tmp_path: Path) -> None:
    tree_of_files(tmp_path)

    async def scenario(w: World) -> None:
        _directory, found = await look(w)
        before = rows(w)
        first = await w.do(w.fs.open(found[b"large"], os.O_RDONLY, CALLER))
        second = await w.do(w.fs.open(found[b"large"], os.O_RDONLY, CALLER))
        assert rows(w) == {table: count + 1 for table, count in before.items()}
        await w.close(first)
        assert rows(w) == {table: count + 1 for table, count in before.items()}
        await w.close(second)
        assert rows(w) == before

    run(tmp_path, scenario)


def test_what_is_logged_of_files_that_were_only_looked_at_outlives_the_worker(
    tmp_path: Path,
) -> None:
    tree_of_files(tmp_path)

    async def scenario(w: World) -> None:
        directory, found = await look(w)
        await w.do(w.fs.unlink(directory, b"f0"))
        await w.do(w.fs.rename(directory, b"f1", directory, b"renamed", 0))
        await w.do(w.fs.rename(directory, b"f2", directory, b"f3", 0))
        await w.do(w.fs.link(found[b"f4"], directory, b"linked"))
        await w.do(w.fs.rename(directory, b"f5", directory, b"f6", 2))
        await w.do(w.fs.setattr(found[b"f7"], AttributeChange(mode=0o600), None, CALLER))
        await w.do(w.fs.setxattr(found[b"f8"], b"user.a", b"b"))
        await w.do(w.fs.rename(directory, b"link", ROOT, b"link", 0))
        await w.write(b"f9", b"rewritten", directory)
        other = await w.do(w.fs.mkdir(ROOT, b"other", 0o755, CALLER))
        await w.do(w.fs.rename(directory, b"f10", other.ino, b"f10", 0))

    async def after_a_kill(w: World) -> None:
        await check(w)
        await w.drained()
        await check(w)
        data = w.backing / "data"
        assert (data / "f6").read_bytes() == b"content 5"
        assert (data / "f4").stat().st_ino == (data / "linked").stat().st_ino
        assert (data / "f7").stat().st_mode & 0o777 == 0o600
        assert os.readlink(w.backing / "link") == "f0"
        assert sorted(os.listdir(data)) == sorted(os.fsdecode(name) for name in (await look(w))[1])
        assert sorted(os.listdir(w.backing / "other")) == ["f10"]

    async def check(w: World) -> None:
        directory, found = await look(w)
        assert not {b"f0", b"f1", b"f2", b"f10", b"link"} & found.keys()
        want = {b"renamed": 1, b"f3": 2, b"linked": 4, b"f5": 6, b"f6": 5, b"f11": 11}
        for name, number in want.items():
            assert await w.read(found[name]) == b"content %d" % number, name
        assert await w.read(found[b"f9"]) == b"rewritten"
        assert found[b"f4"] == found[b"linked"]
        assert (await w.do(w.fs.getattr(found[b"f4"]))).nlink == 2
        assert await w.do(w.fs.getxattr(found[b"f8"], b"user.a")) == b"b"
        assert directory

    run(tmp_path, scenario)
    run(tmp_path, after_a_kill)


def test_rows_go_when_what_needed_them_is_done(tmp_path: Path) -> None:
    tree_of_files(tmp_path)

    async def scenario(w: World) -> None:
        directory, found = await look(w)
        before = rows(w)
        await w.do(w.fs.rename(directory, b"f1", directory, b"renamed", 0))
        await w.do(w.fs.setattr(found[b"f7"], AttributeChange(mode=0o600), None, CALLER))
        assert rows(w)["node"] == before["node"] + 2
        await w.drained()
        with w.engine.section():
            pass
        assert rows(w) == before

    run(tmp_path, scenario)
