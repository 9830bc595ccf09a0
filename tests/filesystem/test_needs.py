"""`user.acpfs.needs` in the file system: which operation takes it, whatever way the pointer is
made.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from acpfs.types import ROOT
from acpfs.writeback.log.ops import OpKind
from tests.filesystem.world import CALLER, World, run

clause = pytest.mark.clause
NEEDS = b"user.acpfs.needs"
CREATE = 1
REPLACE = 2
EXCHANGE = 2


def taken(w: World) -> list[tuple[OpKind, tuple[str, ...]]]:
    return [(op.kind, nodes) for op in w.log if (nodes := w.log.needs.of(op)) is not None]


@clause("S282")
def test_each_way_to_make_a_pointer_takes_it(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        for number, kind in enumerate((OpKind.RENAME, OpKind.LINK, OpKind.EXCHANGE, OpKind.STORE)):
            name = b"latest_%d" % number
            node = b"node%d" % number
            if kind is OpKind.STORE:
                opened, attributes = await w.create(name)
                await w.do(w.fs.write(opened.handle, 0, b"x"))
                await w.do(w.fs.setxattr(attributes.ino, NEEDS, node))
                await w.close(opened)
                continue
            ino = await w.write(b"new", b"x")
            await w.do(w.fs.setxattr(ino, NEEDS, node))
            if kind is OpKind.LINK:
                await w.do(w.fs.link(ino, ROOT, name))
                await w.do(w.fs.unlink(ROOT, b"new"))
            else:
                if kind is OpKind.EXCHANGE:
                    await w.write(name, b"old")
                await w.do(
                    w.fs.rename(
                        ROOT, b"new", ROOT, name, EXCHANGE if kind is OpKind.EXCHANGE else 0
                    )
                )
        directory = await w.do(w.fs.mkdir(ROOT, b"step.tmp", 0o755, CALLER))
        await w.do(w.fs.setxattr(directory.ino, NEEDS, b"node4"))
        await w.do(w.fs.rename(ROOT, b"step.tmp", ROOT, b"step", 0))
        kinds = (OpKind.RENAME, OpKind.LINK, OpKind.EXCHANGE, OpKind.STORE, OpKind.RENAME)
        assert taken(w) == [(kind, (f"node{number}",)) for number, kind in enumerate(kinds)]
        await w.drained()

    run(tmp_path, scenario)


@clause("S286")
def test_pointers_below_a_directory_have_its_word_and_it_keeps_it(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        gasp = await w.do(w.fs.mkdir(ROOT, b"gasp.tmp", 0o755, CALLER))
        await w.write(b"latest_before", b"x", parent=gasp.ino)
        await w.do(w.fs.setxattr(gasp.ino, NEEDS, b"node1"))
        part = await w.do(w.fs.mkdir(gasp.ino, b"part", 0o755, CALLER))
        await w.write(b"plain", b"x", parent=gasp.ino)
        await w.write(b"latest", b"x", parent=gasp.ino)
        metadata = await w.write(b"new", b"x", parent=part.ino)
        await w.do(w.fs.rename(part.ino, b"new", part.ino, b".metadata", 0))
        own, attributes = await w.create(b"latest_own", parent=part.ino)
        await w.do(w.fs.setxattr(attributes.ino, NEEDS, b"node2"))
        await w.close(own)
        await w.do(w.fs.setxattr(part.ino, NEEDS, b"node3"))
        await w.do(w.fs.rename(part.ino, b".metadata", ROOT, b"latest_above", 0))  # out of both
        await w.do(w.fs.rename(ROOT, b"latest_above", part.ino, b".metadata", 0))
        await w.do(w.fs.rename(gasp.ino, b"part", gasp.ino, b"renamed", 0))  # its own
        await w.do(w.fs.rename(ROOT, b"gasp.tmp", ROOT, b"gasp", 0))
        await w.write(b"latest_after", b"x", parent=part.ino)
        found = [
            (op.ino == metadata, nodes) for op in w.log if (nodes := w.log.needs.of(op)) is not None
        ]
        told = [("node1",), ("node1",), ("node2",), ("node3",), ("node3",), ("node1",)]
        assert found == [(number in (1, 3), nodes) for number, nodes in enumerate(told)]
        await w.drained()

    run(tmp_path, scenario)


@clause("S282")
def test_a_close_that_is_taken_back_leaves_it_for_the_real_one(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        opened, attributes = await w.create(b"latest")
        await w.do(w.fs.write(opened.handle, 0, b"first"))
        await w.do(w.fs.setxattr(attributes.ino, NEEDS, b"node1"))
        await w.do(w.fs.flush(opened.handle, 0))  # a copy of the descriptor is closed
        assert taken(w) == [(OpKind.STORE, ("node1",))]
        await w.do(w.fs.write(opened.handle, 0, b"other"))
        assert (taken(w), await w.do(w.fs.getxattr(attributes.ino, NEEDS))) == ([], b"node1")
        await w.close(opened)
        assert taken(w) == [(OpKind.STORE, ("node1",))]
        await w.write(b"latest", b"again")  # for the next version it waits for all
        assert [w.log.needs.of(op) for op in w.log if op.version is not None][-1] is None
        await w.drained()
        assert w.log.needs._taken == {}

    run(tmp_path, scenario)


@clause("S284")
def test_flags_owner_and_names(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"file", b"x")

        async def fails(value: bytes, flags: int = 0, uid: int = 0) -> int | None:
            with pytest.raises(OSError) as caught:
                await w.do(w.fs.setxattr(ino, NEEDS, value, flags, uid))
            return caught.value.errno

        assert await fails(b"a", REPLACE) == errno.ENODATA
        await w.do(w.fs.setxattr(ino, NEEDS, b"a", CREATE))
        assert [await fails(b"a", CREATE), await fails(b"a", uid=7), await fails(b"a,,b")] == [
            errno.EEXIST,
            errno.EPERM,
            errno.EINVAL,
        ]
        assert await w.do(w.fs.listxattr(ino)) == []
        await w.do(w.fs.setxattr(ino, NEEDS, b"b", REPLACE))
        assert await w.do(w.fs.getxattr(ino, NEEDS)) == b"b"
        await w.do(w.fs.removexattr(ino, NEEDS))
        for call in (w.fs.getxattr(ino, NEEDS), w.fs.removexattr(ino, NEEDS)):
            with pytest.raises(OSError):
                await w.do(call)
        await w.do(w.fs.setxattr(ino, NEEDS, b"b"))
        await w.drained()
        assert NEEDS.decode() not in os.listxattr(w.backing / "file")
        assert not [op for op in w.log if op.kind is OpKind.SETXATTR]

    run(tmp_path, scenario)


@clause("S282")
def test_a_file_that_is_deleted_takes_it_along(tmp_path: Path) -> None:
    """The backing directory may give the number to another file."""

    async def scenario(w: World) -> None:
        ino = await w.write(b"deleted", b"x")
        kept = await w.write(b"kept", b"x")
        for one in (ino, kept):
            await w.do(w.fs.setxattr(one, NEEDS, b"node1"))
        await w.do(w.fs.unlink(ROOT, b"deleted"))
        await w.drained()
        for one in (ino, kept):
            w.fs.forget([(one, 1)])
        assert (w.log.needs.told(ino), w.log.needs.told(kept)) == (None, ("node1",))

    run(tmp_path, scenario)
