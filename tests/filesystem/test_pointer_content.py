"""What is renamed to a pointer's name, and lay on the backing directory under a temporary one: that
is what shows under the pointer's name, whatever another member has put in that place meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from acpfs.filesystem.names import RENAME_EXCHANGE
from acpfs.filesystem.pointer_content import COMES_ALONG_BYTES_MAX
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.ops import OpKind
from tests.filesystem.world import CALLER, World, run

clause = pytest.mark.clause
TEMPORARY = b"latest.tmp"
POINTER = b"latest"
Move = Callable[[World], Awaitable[None]]


async def rename(w: World) -> None:
    await w.do(w.fs.rename(ROOT, TEMPORARY, ROOT, POINTER, 0))


async def exchange(w: World) -> None:
    await w.do(w.fs.rename(ROOT, TEMPORARY, ROOT, POINTER, RENAME_EXCHANGE))


async def exchange_the_other_way_round(w: World) -> None:
    await w.do(w.fs.rename(ROOT, POINTER, ROOT, TEMPORARY, RENAME_EXCHANGE))


async def link(w: World) -> None:
    await w.do(w.fs.unlink(ROOT, POINTER))
    await w.do(w.fs.link((await w.do(w.fs.lookup(ROOT, TEMPORARY))).ino, ROOT, POINTER))


async def persisted(w: World, name: bytes, data: bytes, *, as_link: bool = False) -> Ino:
    """Made here, persisted, and nothing more until `drained`."""
    if as_link:
        ino = (await w.do(w.fs.symlink(ROOT, name, data, CALLER))).ino
    else:
        ino = await w.write(name, data)
    await w.drained()
    w.engine.hold(True)
    return ino


def put_theirs(w: World, *, as_link: bool) -> None:
    theirs = w.backing / "theirs"
    if as_link:
        theirs.symlink_to("theirs")
    else:
        theirs.write_bytes(b"theirs")
    theirs.rename(w.backing / os.fsdecode(TEMPORARY))


def move_theirs(w: World, *, as_link: bool) -> None:
    """So it is not under the temporary name any more, either."""
    put_theirs(w, as_link=as_link)
    (w.backing / os.fsdecode(TEMPORARY)).rename(w.backing / os.fsdecode(POINTER))


def said(path: Path) -> bytes:
    return os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()


@clause("S401")
@pytest.mark.parametrize("as_link", [False, True], ids=["file", "link"])
@pytest.mark.parametrize(
    ("move", "meanwhile"),
    [
        (rename, put_theirs),
        (rename, move_theirs),
        (link, put_theirs),
        (link, move_theirs),
        (exchange, put_theirs),
        (exchange_the_other_way_round, put_theirs),
    ],
)
def test_a_pointer_is_what_was_closed_whatever_took_its_place_under_the_temporary_name(
    tmp_path: Path, move: Move, meanwhile: Callable[..., None], as_link: bool
) -> None:
    """Found by a test on a busy machine: the pointer never came, and `latest` named what had been
    removed. Every program that syncs its file before it renames it was hit.
    """

    async def scenario(w: World) -> None:
        w.inner.awaited.peers.anybody = True
        await persisted(w, POINTER, b"old", as_link=as_link)
        await persisted(w, TEMPORARY, b"ours", as_link=as_link)
        await move(w)
        meanwhile(w, as_link=as_link)
        await w.drained()
        assert said(w.backing / "latest") == b"ours"

    run(tmp_path, scenario)


@clause("S401")
@pytest.mark.parametrize("as_link", [False, True], ids=["file", "link"])
def test_it_is_logged_right_before_that_once(tmp_path: Path, as_link: bool) -> None:
    content = OpKind.SYMLINK if as_link else OpKind.STORE

    async def scenario(w: World) -> None:
        w.inner.awaited.peers.anybody = True
        for _ in range(2):
            await persisted(w, TEMPORARY, b"ours", as_link=as_link)
            for moves in ((TEMPORARY, POINTER), (POINTER, b"latest_but_one")):
                await w.do(w.fs.rename(ROOT, moves[0], ROOT, moves[1], 0))
            assert [op.kind for op in w.log] == [content, OpKind.RENAME, OpKind.RENAME]
            await w.drained()
            assert said(w.backing / "latest_but_one") == b"ours"
            assert sorted(os.listdir(w.backing)) == [".acpfs", "latest_but_one"]

    run(tmp_path, scenario)


async def of_one_alone(w: World) -> tuple[bytes, bytes]:
    w.inner.awaited.peers.anybody = False
    await persisted(w, TEMPORARY, b"x")
    return TEMPORARY, POINTER


async def to_a_plain_name(w: World) -> tuple[bytes, bytes]:
    await persisted(w, TEMPORARY, b"x")
    return TEMPORARY, b"model.pt"


async def from_a_pointer_s_name(w: World) -> tuple[bytes, bytes]:
    await persisted(w, b"latest_tmp", b"x")
    return b"latest_tmp", POINTER


async def a_large_one(w: World) -> tuple[bytes, bytes]:
    await persisted(w, TEMPORARY, bytes(COMES_ALONG_BYTES_MAX + 1))
    return TEMPORARY, POINTER


async def one_without_bytes_here(w: World) -> tuple[bytes, bytes]:
    ino = await persisted(w, TEMPORARY, b"x")
    with w.fs.lock, w.state.step():
        w.inner.contents.drop(w.inner.table[ino])
    return TEMPORARY, POINTER


async def a_directory(w: World) -> tuple[bytes, bytes]:
    await w.do(w.fs.mkdir(ROOT, TEMPORARY, 0o755, CALLER))
    await w.drained()
    w.engine.hold(True)
    return TEMPORARY, POINTER


NOT_BROUGHT = (
    of_one_alone,
    to_a_plain_name,
    from_a_pointer_s_name,
    a_large_one,
    one_without_bytes_here,
    a_directory,
)


@clause("S401")
@pytest.mark.parametrize("made", NOT_BROUGHT)
def test_nothing_else_is_logged_twice(
    tmp_path: Path, made: Callable[[World], Awaitable[tuple[bytes, bytes]]]
) -> None:
    async def scenario(w: World) -> None:
        w.inner.awaited.peers.anybody = True
        name, new_name = await made(w)
        await w.do(w.fs.rename(ROOT, name, ROOT, new_name, 0))
        assert [op.kind for op in w.log] == [OpKind.RENAME]
        await w.drained()
        assert os.fsdecode(new_name) in os.listdir(w.backing)

    run(tmp_path, scenario)


@clause("S401")
@pytest.mark.parametrize(
    "settings", [{"cluster_order": "off"}, {"pointer_patterns": ("tracker",)}], ids=str
)
def test_nor_where_no_such_rename_waits(tmp_path: Path, settings: dict[str, Any]) -> None:
    async def scenario(w: World) -> None:
        w.inner.awaited.peers.anybody = True
        await persisted(w, TEMPORARY, b"x")
        await rename(w)
        assert [op.kind for op in w.log] == [OpKind.RENAME]
        await w.drained()

    run(tmp_path, scenario, **settings)


@clause("S401", "S81")
def test_the_next_worker_has_it_too(tmp_path: Path) -> None:
    async def dies(w: World) -> None:
        w.inner.awaited.peers.anybody = True
        await persisted(w, TEMPORARY, b"ours")
        await rename(w)
        move_theirs(w, as_link=False)

    async def goes_on(w: World) -> None:
        await w.drained()
        assert (w.backing / "latest").read_bytes() == b"ours"

    run(tmp_path, dies, goes_on, session="one")
