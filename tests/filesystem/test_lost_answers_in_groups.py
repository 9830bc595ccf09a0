"""A commit group whose last change was carried out and failed, and whose flush fails, too: what
came before it is found where it is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from acpfs.backing.lower import LowerPath
from acpfs.filesystem.names import RENAME_EXCHANGE
from acpfs.types import ROOT
from tests.filesystem.test_lost_answers import ino_of, lost_answer
from tests.filesystem.world import CALLER, World, run

clause = pytest.mark.clause
CARRIED_OUT = pytest.mark.parametrize(
    "carried_out", [True, False], ids=["carried_out", "not_carried_out"]
)


class FlushFails:
    """The flush of a directory, once a change of its group has failed."""

    def __init__(self, w: World, happens: Callable[[], object] = lambda: None) -> None:
        """`happens`: what the server does then."""
        self.failed = False
        self._happens = happens
        self._w = w
        self._sync = w.lower.sync_directory
        w.lower.sync_directory = self.sync  # type: ignore[method-assign]

    def sync(self, path: LowerPath) -> None:
        if not self.failed and self._w.log.in_doubt():
            self.failed = True
            self._happens()
            raise OSError(errno.EIO, "the server has died")
        self._sync(path)


async def rename_file(w: World) -> None:
    await w.write(b"a.tmp", b"content of a")
    await _by_way_of_a_part(w)


async def _by_way_of_a_part(w: World) -> None:
    """The first rename goes with the content; the one that fails is the second."""
    await w.do(w.fs.rename(ROOT, b"a.tmp", ROOT, b"a.part", 0))
    await w.do(w.fs.rename(ROOT, b"a.part", ROOT, b"a", 0))


async def exchange_files(w: World) -> None:
    await w.write(b"b", b"content of a")
    await w.write(b"a", b"this is of b")
    await w.do(w.fs.rename(ROOT, b"a", ROOT, b"b", RENAME_EXCHANGE))


async def rename_symlink(w: World) -> None:
    await w.do(w.fs.symlink(ROOT, b"a.tmp", b"target", CALLER))
    await _by_way_of_a_part(w)


async def replace_file(w: World) -> None:
    await w.write(b"a", b"old content")
    await w.write(b"a.tmp", b"content of a")
    await _by_way_of_a_part(w)


def state(backing: Path) -> dict[str, bytes]:
    names = [name for name in os.listdir(backing) if name != ".acpfs"]
    return {
        name: os.readlink(path).encode()
        if (path := backing / name).is_symlink()
        else path.read_bytes()
        for name in names
    }


CHANGES = [
    (rename_file, "rename", {"a": b"content of a"}),
    (exchange_files, "exchange", {"a": b"content of a", "b": b"this is of b"}),
    (rename_symlink, "rename", {"a": b"target"}),
    (replace_file, "rename", {"a": b"content of a"}),
]


@clause("S252")
@CARRIED_OUT
@pytest.mark.parametrize(
    ("change", "call", "after"), CHANGES, ids=lambda one: getattr(one, "__name__", None)
)
def test_what_was_committed_is_found(
    tmp_path: Path,
    change: Callable[[World], Awaitable[None]],
    call: str,
    after: dict[str, bytes],
    carried_out: bool,
) -> None:
    async def scenario(w: World) -> None:
        await change(w)
        bytes_logged = w.log.sizes.dirty_bytes
        flush = FlushFails(w)
        async with lost_answer(w, f"{call}_of_name", carried_out=carried_out):
            assert flush.failed
            assert (state(w.backing) == after) == carried_out
        assert state(w.backing) == after
        statistics = w.engine.statistics()
        assert (statistics.counters.repairs, statistics.counters.streamed_bytes) == (
            0,
            bytes_logged,
        )

    run(tmp_path, scenario)


@clause("S252")
@CARRIED_OUT
@pytest.mark.parametrize(
    ("change", "call", "after", "forgotten"),
    [
        (rename_file, "rename", {"a": b"content of a"}, "a"),
        (exchange_files, "exchange", {"a": b"content of a", "b": b"this is of b"}, "b"),
    ],
)
def test_what_the_server_forgot_is_stored_again(
    tmp_path: Path,
    change: Callable[[World], Awaitable[None]],
    call: str,
    after: dict[str, bytes],
    forgotten: str,
    carried_out: bool,
) -> None:
    """And over nothing that is there."""

    async def scenario(w: World) -> None:
        before = "a" if call == "exchange" else "a.part"
        await change(w)
        flush = FlushFails(w, lambda: os.unlink(w.backing / (forgotten if carried_out else before)))
        async with lost_answer(w, f"{call}_of_name", carried_out=carried_out):
            for name, content in after.items():
                assert await w.read(await ino_of(w, name.encode())) == content
        assert flush.failed
        assert state(w.backing) == after
        assert w.engine.statistics().counters.repairs > 0

    run(tmp_path, scenario)


async def _straight_file(w: World) -> None:
    await w.write(b"a.tmp", b"content of a")
    await w.do(w.fs.rename(ROOT, b"a.tmp", ROOT, b"a", 0))


async def _straight_link(w: World) -> None:
    await w.do(w.fs.symlink(ROOT, b"a.tmp", b"target", CALLER))
    await w.do(w.fs.rename(ROOT, b"a.tmp", ROOT, b"a", 0))


@clause("S630", "S252")
@CARRIED_OUT
@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize(
    ("change", "content"), [(_straight_file, b"content of a"), (_straight_link, b"target")]
)
def test_what_goes_straight_to_its_last_name_is_found_there(
    tmp_path: Path,
    change: Callable[[World], Awaitable[None]],
    content: bytes,
    replaces: bool,
    carried_out: bool,
) -> None:
    """And is stored once."""

    async def scenario(w: World) -> None:
        if replaces:
            await w.write(b"a", b"old content")
            await w.drained()
        await change(w)
        bytes_logged = w.log.sizes.dirty_bytes
        before = w.engine.statistics().counters.streamed_bytes
        async with lost_answer(w, "rename", carried_out=carried_out):
            assert (state(w.backing).get("a") == content) == carried_out
            assert b"a.tmp" not in await w.names(ROOT)
            assert await w.names(ROOT) == [b"a"]
        assert state(w.backing) == {"a": content}
        assert w.engine.statistics().counters.streamed_bytes - before == bytes_logged

    run(tmp_path, scenario)
