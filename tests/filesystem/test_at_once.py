"""What is answered from memory is what the call would answer, and what has to be asked for is left
to the call.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from acpfs.filesystem.attribute_calls import NEVER_KEPT
from acpfs.filesystem.records import Attributes
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run

NO_SUCH_INO = Ino(1 << 40)


async def directory_of(w: World) -> Ino:
    """One that the backing directory has not got: all about it is known."""
    return (await w.do(w.fs.mkdir(ROOT, b"d", 0o755, CALLER))).ino


def references(w: World, ino: Ino) -> int:
    return w.inner.table[ino].lookups


def test_a_known_name_is_answered_as_by_the_call_and_counted(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        directory = await directory_of(w)
        ino = await w.write(b"f", b"bytes", directory)
        before = references(w, ino)
        found = w.inner.at_once.entry(directory, b"f")
        assert references(w, ino) == before + 1, "the kernel has one more"
        assert isinstance(found, Attributes)
        assert (found.ino, found.size) == (ino, 5)
        assert found == await w.do(w.fs.lookup(directory, b"f"))
        assert w.inner.at_once.attributes(ino) == found == await w.do(w.fs.getattr(ino))

    run(tmp_path, scenario)


def test_names_that_are_not_there(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        directory = await directory_of(w)
        assert w.inner.at_once.entry(directory, b"never") == errno.ENOENT
        await w.write(b"f", b"bytes", directory)
        await w.do(w.fs.unlink(directory, b"f"))
        assert w.inner.at_once.entry(directory, b"f") == errno.ENOENT
        assert w.inner.at_once.entry(ROOT, b"perhaps") is None, "the backing directory may have it"

    run(tmp_path, scenario)


def test_a_name_that_another_node_may_bring_is_not_denied_at_once(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        assert w.inner.at_once.entry(await directory_of(w), b"never") is None

    run(tmp_path, scenario, wait_for_peers_s=5.0)


def test_what_others_may_have_changed_is_asked_for(tmp_path: Path) -> None:
    """Once it is persisted, and its time is up: here none is given."""

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"bytes")
        assert isinstance(w.inner.at_once.entry(ROOT, b"f"), Attributes), (
            "only this mount knows it yet"
        )
        await w.drained()
        before = references(w, ino)
        (w.backing / "f").write_bytes(b"changed outside")
        assert w.inner.at_once.entry(ROOT, b"f") is None
        assert w.inner.at_once.attributes(ino) is None
        assert references(w, ino) == before
        assert (await w.do(w.fs.lookup(ROOT, b"f"))).size == len(b"changed outside")

    run(tmp_path, scenario, attr_timeout_s=0.0)


def test_a_file_that_the_kernel_writes_to_is_looked_at(tmp_path: Path) -> None:
    """That may change its row, which takes a step."""

    async def scenario(w: World) -> None:
        opened, attributes = await w.create(b"f")
        node = w.inner.table[attributes.ino]
        w.inner.contents.kernel.expect(node)
        before = references(w, node.ino)
        assert w.inner.at_once.entry(ROOT, b"f") is None
        assert w.inner.at_once.attributes(node.ino) is None
        assert references(w, node.ino) == before
        node.kernel_writers -= 1
        await w.close(opened)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "name", [b".", b"..", b".acpfs", b"n" * 256], ids=["dot", "dots", "own", "long"]
)
def test_names_with_rules_of_their_own_go_to_the_call(tmp_path: Path, name: bytes) -> None:
    async def scenario(w: World) -> None:
        assert w.inner.at_once.entry(await directory_of(w), name) is None

    run(tmp_path, scenario)


def test_what_is_no_directory_or_not_known_goes_to_the_call(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        opened, attributes = await w.create(b"f", flags=os.O_RDONLY)
        assert w.inner.at_once.entry(attributes.ino, b"below") is None
        assert w.inner.at_once.entry(NO_SUCH_INO, b"below") is None
        assert w.inner.at_once.attributes(NO_SUCH_INO) is None
        await w.close(opened)

    run(tmp_path, scenario)


def test_attributes_that_no_file_has_are_refused_as_by_the_call(tmp_path: Path) -> None:
    """The kernel asks for one of them before each write, where it cannot leave set-uid bits to
    us.
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"bytes")
        for name in NEVER_KEPT:
            refused = w.fs.never_kept_at_once(name)
            with pytest.raises(OSError) as caught:
                await w.do(w.fs.getxattr(ino, name))
            assert caught.value.errno == refused
        assert w.fs.never_kept_at_once(b"user.mine") is None

    run(tmp_path, scenario)
