"""An application that opens files without end gets an error; the drain does not, and neither do
other users.
"""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
import trio

from acpfs.filesystem.records import Attributes, Caller, OpenFile
from acpfs.ram import descriptor_limits
from acpfs.types import ROOT
from tests.filesystem.world import CALLER, World, world
from tests.rig.runtime import REAL

SOMEBODY = 1001
SOMEBODY_ELSE = 2**32 - 2
REQUESTS = itertools.count(1)
Opened = list[tuple[OpenFile, Attributes]]


def limit_to(monkeypatch: pytest.MonkeyPatch, files: int) -> int:
    """As if this process might have so many more descriptors, and as many again for its reserve;
    returns how many that are.
    """
    count = 2 * (descriptor_limits.taken() + files)
    monkeypatch.setattr(descriptor_limits, "limit", lambda: count)
    monkeypatch.setattr(descriptor_limits, "reserve", lambda count: count // 2)
    return count


async def fill(w: World, name: str, uid: int = 0, most: int = 100_000) -> Opened:
    """Make files as that user, and leave them open, until that is an error."""
    opened: Opened = []
    for number in range(most):
        path = f"{name}{number}".encode()
        try:
            opened.append(
                await w.do(
                    w.fs.create(
                        ROOT, path, 0o666, os.O_WRONLY, Caller(uid, 0, 1, unique=next(REQUESTS))
                    )
                )
            )
        except OSError as error:
            if error.errno != errno.ENFILE or path in await w.names():
                raise
            break
    return opened


@pytest.mark.clause("S220")
def test_open_files_leave_descriptors_for_the_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            await w.write(b"waits for the drain", b"x")
            limit_to(monkeypatch, 100)
            opened = await fill(w, "f")
            assert len(opened) > 20
            with pytest.raises(OSError):
                await w.do(w.fs.open(opened[0][1].ino, os.O_RDONLY, CALLER))
            await w.drained()
            assert (w.backing / "waits for the drain").read_bytes() == b"x"
            for one, _attributes in opened:
                await w.close(one)
            await w.close((await w.create(b"again"))[0])
            await w.do(w.fs.unlink(ROOT, b"again"))

    trio.run(main)


@pytest.mark.clause("S220")
def test_what_is_closed_in_between_opens_no_way_into_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest free number, behind which all are taken, says nothing."""

    async def main() -> None:
        async with world(tmp_path, allow_other=False) as w:
            count = limit_to(monkeypatch, 100)
            opened = await fill(w, "f")
            for _ in range(5):
                await w.close(opened.pop(0)[0])
                opened += await fill(w, f"g{len(opened)}-", most=50)
            assert (
                descriptor_limits.taken()
                <= count - descriptor_limits.reserve(count) + descriptor_limits.PER_OPEN
            )
            for one, _attributes in opened:
                await w.close(one)

    trio.run(main)


@pytest.mark.clause("S220")
def test_a_file_that_was_opened_and_not_read_has_its_descriptor_still_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next worker opens what it finds when it is read; until then nobody else is given those
    descriptors.
    """

    async def main() -> None:
        async with world(tmp_path, session="s", allow_other=False) as w:
            opened = await fill(w, "f", most=100)
        async with world(tmp_path, session="s", allow_other=False) as w:
            base = descriptor_limits.taken()
            monkeypatch.setattr(descriptor_limits, "limit", lambda: 2 * (base + 110))
            monkeypatch.setattr(descriptor_limits, "reserve", lambda count: count // 2)
            opened += await fill(w, "g", most=200)
            assert len(opened) <= base + 110
            for one, _attributes in opened:
                await w.do(w.fs.write(one.handle, 0, b"x"))
            assert descriptor_limits.taken() <= 2 * base + 120
            for one, _attributes in opened:
                await w.close(one)

    trio.run(main)


@pytest.mark.clause("S340")
def test_a_user_who_opens_files_without_end_leaves_some_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to root, also in the life of the next worker, and more as soon as he closes some."""

    async def main() -> None:
        opened: Opened = []

        async def open_as(w: World, uid: int, number: int) -> OpenFile:
            return await w.do(
                w.fs.open(
                    opened[number][1].ino, os.O_RDONLY, Caller(uid, 0, 1, unique=next(REQUESTS))
                )
            )

        async with world(tmp_path, session="s") as w:
            limit_to(monkeypatch, 200)
            opened += await fill(w, "f", SOMEBODY)
            assert 100 < len(opened) < 190
            others = [
                await open_as(w, uid, number) for uid in (SOMEBODY_ELSE, 0) for number in range(3)
            ]
            opened += await fill(
                w, "more", SOMEBODY
            )  # he has his share still; a few where threads have closed something meanwhile
            assert len(opened) < 190
        async with world(tmp_path, session="s") as w:
            assert w.inner.handles.files_of(SOMEBODY_ELSE)[0] == 3
            assert w.inner.handles.files_of(SOMEBODY)[0] == len(opened)
            monkeypatch.setattr(
                descriptor_limits, "taken", lambda: descriptor_limits.limit() // 2 - 30
            )  # this worker opens later
            with pytest.raises(OSError):
                await open_as(w, SOMEBODY, 0)
            others.append(await open_as(w, 0, 0))
            for one in [*others, *(one for one, _attributes in opened)]:
                await w.close(one)
            assert w.inner.handles.files_of(SOMEBODY)[0] == 0
            await w.close(await open_as(w, SOMEBODY, 0))

    trio.run(main)


def test_a_kernel_that_does_not_count_is_not_asked_for_a_list_at_each_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux before 6.2: whoever is at the end of his share must not have all descriptors listed
    again and again; others find room.
    """
    asked: list[None] = []

    def taken() -> int:
        asked.append(None)
        return 80

    monkeypatch.setattr(descriptor_limits, "limit", lambda: 128)
    monkeypatch.setattr(descriptor_limits, "reserve", lambda _count: 28)
    monkeypatch.setattr(descriptor_limits, "taken", taken)
    monkeypatch.setattr(descriptor_limits, "OWN", "/proc/self/attr")  # of size 0 on every kernel
    monkeypatch.setattr(descriptor_limits, "LISTED_AGAIN_S", 3600.0)
    files = descriptor_limits.Reserve(True, REAL.clock)
    for _ in range(10):
        with pytest.raises(OSError):
            files.before_open(80, 80)
    files.before_open(0, 80)
    assert len(asked) == 1
