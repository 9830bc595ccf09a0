"""Fifos, sockets and devices stay what they are, whatever is done to them before they are
persisted.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.records import AttributeChange
from acpfs.types import ROOT, Ino
from acpfs.writeback.log.ops import Metadata
from tests.filesystem.world import CALLER, World, world

pytestmark = pytest.mark.clause("S38")
NULL = os.makedev(1, 3)
root = pytest.mark.skipif(os.geteuid() != 0, reason="devices are root's")
KINDS = [
    pytest.param(stat.S_IFIFO, 0, id="fifo"),
    pytest.param(stat.S_IFSOCK, 0, id="socket"),
    pytest.param(stat.S_IFCHR, NULL, id="device", marks=root),
]


async def change_mode(w: World, ino: Ino) -> str:
    await w.do(w.fs.setattr(ino, AttributeChange(mode=0o604), None, CALLER))
    return "f"


async def change_mode_twice(w: World, ino: Ino) -> str:
    await w.do(w.fs.setattr(ino, AttributeChange(mode=0), None, CALLER))
    return await change_mode(w, ino)


async def change_owner(w: World, ino: Ino) -> str:
    await w.do(w.fs.setattr(ino, AttributeChange(uid=0, mtime_ns=7), None, CALLER))
    return await change_mode(w, ino)


async def rename(w: World, _ino: Ino) -> str:
    await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0))
    await change_mode(w, _ino)
    return "g"


async def rename_what_was_changed(w: World, ino: Ino) -> str:
    await change_mode(w, ino)
    await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 0))
    return "g"


async def link(w: World, ino: Ino) -> str:
    await w.do(w.fs.link(ino, ROOT, b"g"))
    await change_mode(w, ino)
    await w.do(w.fs.unlink(ROOT, b"f"))
    return "g"


async def exchange(w: World, ino: Ino) -> str:
    await w.write(b"g", b"regular")
    await w.do(w.fs.rename(ROOT, b"f", ROOT, b"g", 2))
    await change_mode(w, ino)
    return "g"


CHANGES = [
    change_mode,
    change_mode_twice,
    change_owner,
    rename,
    rename_what_was_changed,
    link,
    exchange,
]


async def make(w: World, kind: int, device: int) -> Ino:
    return (await w.do(w.fs.mknod(ROOT, b"f", kind | 0o600, device, CALLER))).ino


def check(w: World, name: str, kind: int, device: int) -> None:
    st = os.lstat(w.backing / name)
    assert (stat.S_IFMT(st.st_mode), st.st_rdev) == (kind, device)
    assert stat.S_IMODE(st.st_mode) == 0o604


@pytest.mark.parametrize("takes_over", [False, True], ids=["", "by the next worker"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("kind", "device"), KINDS)
def test_a_special_file_is_persisted_as_what_it_is(
    tmp_path: Path,
    kind: int,
    device: int,
    change: Callable[[World, Ino], Awaitable[str]],
    *,
    takes_over: bool,
) -> None:
    async def main() -> None:
        async with world(tmp_path, session="s") as w:
            name = await change(w, await make(w, kind, device))
            if not takes_over:
                await w.drained()
                check(w, name, kind, device)
        async with world(tmp_path, session="s") as w:
            await w.drained()
            check(w, name, kind, device)
            found = await w.do(w.fs.lookup(ROOT, name.encode()))
            assert stat.S_IFMT(found.mode) == kind

    trio.run(main)


def test_one_whose_type_an_earlier_acpfs_lost_has_it_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, session="s") as w:
            await make(w, stat.S_IFIFO, 0)
            await change_mode(w, w.inner.table[ROOT].dir.children[b"f"].ino)
            (op,) = w.log
            row = json.loads(op.meta.to_json())
            row[0] = stat.S_IMODE(row[0])
            with w.fs.lock:
                w.state.change("UPDATE op SET meta = ? WHERE seq = ?", (json.dumps(row), op.seq))
                w.state.commit()
        async with world(tmp_path, session="s") as w:
            await w.drained()
            check(w, "f", stat.S_IFIFO, 0)

    trio.run(main)


@pytest.mark.parametrize("kind", [0, stat.S_IFIFO, stat.S_IFSOCK])
@pytest.mark.parametrize("permissions", [None, 0, 0o7777])
def test_a_row_has_type_and_permissions(kind: int, permissions: int | None) -> None:
    if kind and permissions is None:
        return  # what is made has both
    meta = Metadata(permissions=permissions, file_type=kind)
    assert Metadata.from_json(meta.to_json()) == meta
    meta.merge(Metadata(permissions=0o640))
    assert (meta.permissions, meta.file_type) == (0o640, kind)
