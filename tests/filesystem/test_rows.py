"""What a request writes to the state database: few rows, whole ones only where much has changed,
and always what is so.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from acpfs.filesystem.nodes import _INSERT_NODE, _UPDATE_NODE, _as_written, _row_values
from acpfs.filesystem.records import AttributeChange
from acpfs.filesystem.steps import Steps
from acpfs.ram.state import StateDatabase, storable
from acpfs.types import NO_INO, ROOT
from tests.filesystem.world import CALLER, World, run

COLUMNS = (
    "mode, uid, gid, rdev, lower_ino, identity, target, xattrs, nlink, size, blocks, atime_ns, "
    "mtime_ns, ctime_ns, unlogged, tier_id"
)
XATTRS = COLUMNS.split(", ").index("xattrs")
STEPS = 80


def check_rows(w: World) -> None:
    """Every row says of its node what memory says."""
    with w.fs.lock:
        rows = {row[0]: row[1:] for row in w.state.rows(f"SELECT ino, {COLUMNS} FROM node")}
        for node in w.inner.table.recorded():
            seldom, often = _row_values(node)
            expected = tuple(storable((*_as_written(seldom), *often)))[: len(COLUMNS.split(", "))]
            found = rows.pop(node.ino)
            if (
                found[XATTRS] is None
            ):  # they were looked at since: the next worker does that by itself
                expected = (*expected[:XATTRS], None, *expected[XATTRS + 1 :])
            assert found == expected, w.inner.table.path(node.ino)
        assert not rows


async def change(w: World, rng: random.Random) -> None:
    """One call on one of a few names; it may find nothing to do."""
    name, other, content = (b"n%d" % rng.randrange(5) for _ in range(3))
    found = w.inner.table[ROOT].dir.children.get(name)
    ino = found.ino if found is not None else NO_INO
    if not ino:
        await w.write(name, content * rng.randrange(1, 9))
        return
    setattr_to = rng.choice(
        [
            AttributeChange(mode=rng.choice([0o600, 0o644])),
            AttributeChange(uid=rng.randrange(3), gid=rng.randrange(3)),
            AttributeChange(mtime_ns=rng.choice([-5, 7, 1 << 65]), atime_ns=3),
        ]
    )
    steps = [
        lambda: w.write(name, content * rng.randrange(1, 9)),
        lambda: w.do(w.fs.setattr(ino, setattr_to, None, CALLER)),
        lambda: w.do(w.fs.setxattr(ino, b"user.x", content, 0)),
        lambda: w.do(w.fs.rename(ROOT, name, ROOT, other, 0)),
        lambda: w.do(w.fs.unlink(ROOT, name)),
        w.drained,
    ]
    await rng.choice(steps)()


@pytest.mark.parametrize("seed", range(2))
def test_rows_say_what_is_so(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    async def scenario(w: World) -> None:
        for _ in range(STEPS):
            await change(w, rng)
            w.engine.hold(True)
            check_rows(w)

    run(tmp_path, scenario)


def test_a_small_file_costs_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows that a call writes in its own steps: the drain of what was there before has rows to
    write behind it.
    """
    counts: Counter[str] = Counter()
    change = StateDatabase.change
    step = Steps.step
    stepping: set[int] = set()

    def counted(state: StateDatabase, sql: str, values: Sequence[Any] = ()) -> None:
        if threading.get_ident() in stepping:
            counts["any"] += 1
            counts["whole"] += sql == _INSERT_NODE
            counts["part"] += sql == _UPDATE_NODE
        change(state, sql, values)

    def one_step(steps: Steps, call: Any, done: Any) -> Any:
        stepping.add(threading.get_ident())
        try:
            return step(steps, call, done)
        finally:
            stepping.discard(threading.get_ident())

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.mkdir(ROOT, b"d", 0o755, CALLER))).ino
        opened, _ = await w.create(b"first", directory)
        await w.close(opened)
        await w.drained()
        w.engine.hold(True)
        monkeypatch.setattr(StateDatabase, "change", counted)
        monkeypatch.setattr(Steps, "step", one_step)

        async def costs(call: Any, rows: int, whole: int, part: int) -> Any:
            counts.clear()
            found = await w.do(call)
            assert (counts["any"] <= rows, counts["whole"], counts["part"]) == (
                True,
                whole,
                part,
            ), counts
            return found

        opened, made = await costs(
            w.fs.create(directory, b"f", 0o644, os.O_WRONLY | os.O_CREAT, CALLER), 4, 1, 1
        )
        await costs(w.fs.write(opened.handle, 0, bytes(4096)), 1, 0, 1)
        await costs(w.fs.flush(opened.handle), 3, 0, 1)
        await costs(w.fs.release(opened.handle), 0, 0, 0)
        await costs(w.fs.lookup(directory, b"f"), 0, 0, 0)
        await costs(w.fs.getattr(made.ino, None), 0, 0, 0)
        await costs(w.fs.unlink(directory, b"f"), 5, 0, 2)
        monkeypatch.undo()

    run(tmp_path, scenario)
