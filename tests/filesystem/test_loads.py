"""Which checkpoints were loaded, from where, is counted where files are opened and closed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.filesystem import loads
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run

pytestmark = pytest.mark.clause("S322")
SIZE = loads.FILE_BYTES_MIN


async def load(w: World, *inos: Ino) -> None:
    for reader in [await w.do(w.fs.open(ino, os.O_RDONLY, CALLER)) for ino in inos]:
        await w.do(w.fs.read(reader.handle, 0, 4096))
        await w.close(reader)


async def checkpoint(w: World, *sizes: int) -> list[Ino]:
    directory = (await w.do(w.fs.mkdir(ROOT, b"step-7", 0o755, CALLER))).ino
    return [
        await w.write(f"{number}.pt".encode(), b"x" * size, directory)
        for number, size in enumerate(sizes)
    ]


def test_a_load_has_its_files_once_and_says_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def saved(w: World) -> None:
        first, second, small = await checkpoint(w, SIZE, 2 * SIZE, 10)
        await load(w, first, second, small)
        await load(w, first)
        await load(w, await w.write(b"notes.txt", b"x" * SIZE))
        assert w.inner.loads.take() == [], "somebody may still go on with it"
        monkeypatch.setattr(loads, "QUIET_S", 0.0)
        ((found, of_it),) = w.inner.loads.take()
        assert (found.path, found.step) == (b"step-7", 7)
        assert (of_it.files, of_it.place) == ({first: SIZE, second: 2 * SIZE}, "ram")
        assert of_it.began <= of_it.ended
        assert w.inner.loads.take() == []
        await w.drained()
        with w.fs.lock:
            assert w.inner.eviction.evict(b"step-7/0.pt").files == 1
        await load(w, first)
        assert [of_it.place for _found, of_it in w.inner.loads.take()] == ["backing"]
        with w.fs.lock:
            w.inner.eviction.evict(b"step-7/0.pt")
        await load(w, first, second)
        assert [of_it.place for _found, of_it in w.inner.loads.take()] == ["mixed"]

    run(tmp_path, saved)


def test_no_more_are_kept_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "LOADS_MAX", 2)
    monkeypatch.setattr(loads, "QUIET_S", 0.0)

    async def scenario(w: World) -> None:
        for number in range(3):
            directory = (await w.do(w.fs.mkdir(ROOT, f"step-{number}".encode(), 0o755, CALLER))).ino
            await load(w, await w.write(b"model.pt", b"x" * SIZE, directory))
        assert [found.step for found, _load in w.inner.loads.take()] == [1, 2]

    run(tmp_path, scenario)
