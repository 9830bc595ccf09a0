"""Where the bytes of files are, through everything that moves them: after each of many random calls
every rule holds.

RAM is small, so that files are spilled, overflow to staging files, are drained, leave RAM (some of
them in part) and come back. What is read is what was written.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from acpfs.filesystem.content import retention
from acpfs.filesystem.records import AttributeChange
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run, violations

KIB = 1 << 10
BUDGET = 4096 * KIB
LARGEST = 3072 * KIB
STEPS = 80


class Random:
    """Random calls on a few files, and what they must hold."""

    def __init__(self, w: World, seed: int) -> None:
        self.w = w
        self.random = random.Random(seed)
        self.files: dict[Ino, bytearray] = {}
        self.names: dict[bytes, Ino] = {}
        self.places: Counter[str] = Counter()

    async def create(self) -> None:
        await self.write(
            b"f%d" % self.random.randrange(6),
            self.random.choice([0, 5, 64 * KIB, LARGEST // 2, LARGEST]),
        )

    async def write(self, name: bytes, size: int) -> None:
        data = self.data(size)
        ino = await self.w.write(name, data)
        self.names[name] = ino
        self.files[ino] = bytearray(data)
        self.check()

    def data(self, size: int) -> bytes:
        return self.random.randbytes(64) * (size // 64) + bytes(size % 64)

    async def change(self) -> None:
        """Some of it is written to anew, or behind its end."""
        ino = await self.to_change()
        known = self.files[ino]
        at = self.random.randrange(len(known) + 1)
        data = self.data(self.random.choice([7, 4 * KIB, LARGEST // 3]))
        opened = await self.w.do(self.w.fs.open(ino, os.O_WRONLY, CALLER))
        await self.w.do(self.w.fs.write(opened.handle, at, data))
        known[at : at + len(data)] = data
        await self.w.close(opened)

    async def truncate(self) -> None:
        ino = await self.to_change()
        size = self.random.choice([0, 1, len(self.files[ino]) // 2, len(self.files[ino]) + 5])
        await self.w.do(self.w.fs.setattr(ino, AttributeChange(size=size), None, CALLER))
        self.files[ino] = self.files[ino][:size].ljust(size, b"\0")

    async def rename(self) -> None:
        name = self.random.choice(list(self.names))
        await self.w.do(self.w.fs.rename(ROOT, name, ROOT, b"renamed", 0))
        self.files.pop(self.names.pop(b"renamed", Ino(0)), None) if name != b"renamed" else None
        self.names[b"renamed"] = self.names.pop(name)

    async def remove(self) -> None:
        name = self.random.choice(list(self.names))
        await self.w.do(self.w.fs.unlink(ROOT, name))
        del self.files[self.names.pop(name)]

    async def drain(self) -> None:
        await self.w.drained()
        self.w.engine.hold(True)

    async def make_room(self) -> None:
        with self.w.fs.lock:
            self.w.tier.ladder.make_room(self.random.randrange(BUDGET))
            self.w.state.commit()

    async def read(self) -> None:
        ino = self.one()
        assert await self.w.read(ino, 2 * LARGEST) == self.files[ino]

    def one(self) -> Ino:
        return self.random.choice(list(self.names.values()))

    async def to_change(self) -> Ino:
        """One of them; drained before, where it waits for that, or has no room beside a version of
        it.
        """
        ino = self.one()
        body = self.w.inner.table[ino].body
        if not body.is_cold and (body.sealed or self.w.tier.free_bytes() < len(self.files[ino])):
            await self.drain()
        return ino

    async def step(self) -> None:
        calls = [
            self.create,
            self.create,
            self.change,
            self.change,
            self.truncate,
            self.rename,
            self.remove,
            self.drain,
            self.make_room,
            self.read,
        ]
        await (self.random.choice(calls) if self.names else self.create)()
        self.check()

    def check(self) -> None:
        assert violations(self.w) == []
        with self.w.fs.lock:
            for node in self.w.inner.table:
                assert not node.body.wrong()
                self.places["spilled"] += node.body.is_spilled
                self.places["staging"] += node.body.is_overflowed


@pytest.mark.parametrize("spills", [True, False])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))]
)
def test_every_byte_is_somewhere_after_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, spills: bool
) -> None:
    monkeypatch.setattr(retention, "CUT_FILE_BYTES_MIN", 512 * KIB)
    monkeypatch.setattr(retention, "CUT_BYTES_MIN", 128 * KIB)
    monkeypatch.setattr(retention, "ALIGNMENT_BYTES", 64 * KIB)

    async def scenario(w: World) -> None:
        one = Random(w, seed)
        for name in (b"f0", b"f1"):  # more than RAM has, and nothing is drained
            await one.write(name, LARGEST)
        assert one.places["staging"] or (
            spills and one.places["spilled"]
        )  # a spill that is slow on a busy machine is not waited for
        for _ in range(STEPS):
            await one.step()
        await w.drained()
        for name, ino in one.names.items():
            assert (w.backing / os.fsdecode(name)).read_bytes() == one.files[ino]

    changes: dict[str, Any] = {"spill": tmp_path / "spill"} if spills else {}
    run(tmp_path, scenario, budget_bytes=BUDGET, when_full="native", **changes)
