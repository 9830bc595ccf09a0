"""The look at who has a tier file mapped, and what it leaves of the file's own descriptor."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from acpfs.filesystem.records import OpenFile
from acpfs.ram.tier import Tier
from acpfs.types import Ino, TierId
from tests.filesystem.test_readers_and_room import read_in_the_kernel
from tests.filesystem.world import CALLER, World, run

pytestmark = pytest.mark.clause("S502")
MORE = b"more"


@contextmanager
def lacking(monkeypatch: pytest.MonkeyPatch, want: int, *, to_read: bool = False) -> Iterator[None]:
    """As if the machine had nothing left to open a tier file with: to write, or to read alone."""

    def refuse(_tier: Tier, _tier_id: TierId) -> int:
        raise OSError(want, os.strerror(want))

    with monkeypatch.context() as patched:
        patched.setattr(Tier, "open_to_read" if to_read else "open", refuse)
        yield


async def two_who_may_map(w: World) -> tuple[Ino, OpenFile, OpenFile, OpenFile, bytes]:
    """Beside a reader that the kernel serves itself, whose file they map."""
    ino, reader, data = await read_in_the_kernel(w)
    first = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
    second = await w.do(w.fs.open(ino, os.O_RDWR, CALLER))
    await w.do(w.fs.write(first.handle, 0, MORE))
    return ino, reader, first, second, MORE + data[len(MORE) :]


WANT = pytest.mark.parametrize("want", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])


@WANT
def test_a_look_without_descriptors_leaves_one_that_can_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, want: int
) -> None:
    async def scenario(w: World) -> None:
        ino, reader, first, second, data = await two_who_may_map(w)
        with lacking(monkeypatch, want):
            assert await w.do(w.fs.goes_on_mapped(first.handle))
            await w.do(w.fs.getattr(ino))
            with pytest.raises(OSError, match=os.strerror(want)):
                await w.do(w.fs.write(second.handle, 4, MORE))
        await w.do(w.fs.write(second.handle, 4, MORE))
        assert not await w.do(w.fs.goes_on_mapped(second.handle))
        for opened in (first, second, reader):
            await w.close(opened)
        await w.drained()
        assert (w.backing / "log").read_bytes() == data[:4] + MORE + data[8:]
        assert w.inner.table[ino].body.fd < 0

    run(tmp_path, scenario)


@WANT
def test_what_cannot_be_looked_at_counts_as_mapped_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, want: int
) -> None:
    async def scenario(w: World) -> None:
        _ino, reader, first, second, data = await two_who_may_map(w)
        await w.close(second)
        await w.do(w.fs.flush(first.handle, 0))
        with lacking(monkeypatch, want, to_read=True):
            assert await w.do(w.fs.goes_on_mapped(first.handle))
            await w.do(w.fs.settle_mappings())
            assert w.fs.is_open(first.handle)
        await w.do(w.fs.settle_mappings())
        assert not w.fs.is_open(first.handle)
        await w.close(reader)
        await w.drained()
        assert (w.backing / "log").read_bytes() == data

    run(tmp_path, scenario)
