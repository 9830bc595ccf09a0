"""What a call costs under the lock does not grow with what is known of other files."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from acpfs.config import WarmReads
from acpfs.filesystem import nodes
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.steps import Call, T
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run
from tests.rig.python_calls import counted

RENAME_EXCHANGE = 2


def test_a_directory_rename_looks_only_at_what_lies_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"first", b"x")
        await w.drained()  # the drain looks at all nodes once, before it begins
        w.engine.hold(paused=True)
        directory = await w.do(w.fs.mkdir(ROOT, b"tmp", 0o755, CALLER))
        inner = await w.do(w.fs.mkdir(directory.ino, b"rank0", 0o755, CALLER))
        await w.write(b"shard", b"x", inner.ino)
        other = await w.do(w.fs.mkdir(ROOT, b"other", 0o755, CALLER))
        await w.write(b"shard", b"x", other.ino)
        recognise = w.inner.catalogue.recognise
        catalogue = w.inner.catalogue
        before, after = (recognise(b"checkpoint-%d" % n, directory=True) for n in (1, 2))
        assert before is not None
        assert after is not None
        with monkeypatch.context() as patched:
            patched.setattr(
                NodeTable,
                "__iter__",
                lambda _table: pytest.fail("all nodes were walked, whatever their number"),
            )
            await w.do(w.fs.rename(ROOT, b"tmp", ROOT, b"checkpoint-1", 0))
            assert (catalogue.is_settled(before), catalogue.is_settled(after)) == (False, True)
            await w.do(w.fs.rename(ROOT, b"checkpoint-1", ROOT, b"checkpoint-2", 0))
            assert (catalogue.is_settled(before), catalogue.is_settled(after)) == (True, False)
            await w.do(w.fs.rename(ROOT, b"checkpoint-2", ROOT, b"other", RENAME_EXCHANGE))
            assert not catalogue.is_settled(after), (
                "now the other directory is it, and its file waits"
            )
        w.engine.hold(paused=False)
        await w.drained()
        assert catalogue.is_settled(after)

    run(tmp_path, scenario)


@pytest.mark.clause("S203")
def test_absent_names_are_remembered_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user can ask for names without end, and a job that writes beside and renames leaves one
    for each file.
    """
    monkeypatch.setattr(nodes, "ABSENT_NAMES_MAX", 8)

    async def scenario(w: World) -> None:
        there = await w.write(b"there", b"x")
        for n in range(30):
            with pytest.raises(FileNotFoundError):
                await w.do(w.fs.lookup(ROOT, b"absent%d" % n))
            await w.write(b"f%d.tmp" % n, b"x")
            await w.do(w.fs.rename(ROOT, b"f%d.tmp" % n, ROOT, b"f%d" % n, 0))
        await w.do(w.fs.unlink(ROOT, b"f0"))
        with pytest.raises(FileNotFoundError):
            await w.do(w.fs.lookup(ROOT, b"f0"))
        await w.drained()
        with w.engine.section():
            children = w.inner.table[ROOT].dir.children
            assert sum(not child.ino for child in children.values()) <= 8
        for name in (b"f0", b"absent0", b"absent29", b"f3.tmp", b"f29.tmp"):
            with pytest.raises(FileNotFoundError):
                await w.do(w.fs.lookup(ROOT, name))
        assert await w.read(there) == b"x"
        assert sorted(await w.names()) == sorted([b"there", *(b"f%d" % n for n in range(1, 30))])
        await w.write(b"absent0", b"now")
        assert b"absent0" in await w.names()

    run(tmp_path, scenario)


def test_what_is_reported_is_not_looked_for_among_all_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backing").mkdir()
    for n in range(20):
        (tmp_path / "backing" / f"f{n}").write_bytes(b"x")

    async def scenario(w: World) -> None:
        for n in range(20):
            await w.do(w.fs.lookup(ROOT, b"f%d" % n))
        await w.write(b"new", b"y" * 5000)
        with w.fs.lock, monkeypatch.context() as patched:
            patched.setattr(
                NodeTable,
                "__iter__",
                lambda _table: pytest.fail("all nodes were walked, whatever their number"),
            )
            w.fs.statistics()
            assert [report.path for report in w.fs.files_report()] == [b"new"]
            assert not w.inner.eviction.evict(b"").files
        await w.drained()
        with w.fs.lock:
            assert w.inner.eviction.evict(b"").files == 1

    run(tmp_path, scenario)


def test_a_takeover_looks_for_no_node_that_only_the_kernel_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before(w: World) -> None:
        known = await w.write(b"known", b"x")
        for ino in range(10_000, 13_000):
            w.inner.kept.references.add(ino, 2)
        w.inner.kept.references.add(known, 7)

    async def after(w: World) -> None:
        assert w.inner.table[(await w.do(w.fs.lookup(ROOT, b"known"))).ino].lookups == 7 + 1
        assert len(w.inner.kept.references) == 3001

    run(tmp_path, before, session="s")
    looks = Counter[str]()
    make = NodeTable.__init__

    def counting(table: NodeTable, *arguments: Any) -> None:
        make(table, *arguments)
        get = table.get

        def counted(ino: Ino) -> Node | None:
            looks["get"] += 1
            return get(ino)

        table.get = counted

    monkeypatch.setattr(NodeTable, "__init__", counting)
    run(tmp_path, after, session="s")
    assert looks["get"] < 1000


FEW = 10
MANY = 1000


@pytest.mark.clause("S414")
def test_a_call_costs_the_same_on_a_file_with_many_names(tmp_path: Path) -> None:
    """They were found on the backing directory, each with a row that came and went with each
    open.
    """
    costs: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)

    def scenario(names: int) -> Callable[[World], Awaitable[None]]:
        async def on(w: World) -> None:
            ino = (await w.do(w.fs.lookup(ROOT, b"f"))).ino
            for number in range(names - 1):
                assert (await w.do(w.fs.lookup(ROOT, b"l%d" % number))).ino == ino

            def cost(what: str, call: Call[T]) -> T:
                rows = w.state.changes
                with counted() as calls:
                    result = w.fs.steps.run(call, 60)
                costs[what][names] = (calls[0], w.state.changes - rows)
                return result

            with counted() as calls:  # in a thread of the pool, else
                w.inner.lower_view._recognition.look((b"l%d" % (names - 1),))
            costs["recognition"][names] = (calls[0], 0)
            await w.close(await w.do(w.fs.open(ino, os.O_RDONLY, CALLER)))  # the rows come
            opened = cost("open", w.fs.open(ino, os.O_RDONLY, CALLER))
            cost("flush", w.fs.flush(opened.handle))
            cost("release", w.fs.release(opened.handle))
            cost("getattr", w.fs.getattr(ino))
            w.engine.hold(paused=True)
            cost("link", w.fs.link(ino, ROOT, b"new"))
            cost("unlink", w.fs.unlink(ROOT, b"l%d" % (FEW - 2)))
            cost("rename", w.fs.rename(ROOT, b"l0", ROOT, b"moved", 0))

        return on

    for names in (FEW, MANY):
        base = tmp_path / str(names)
        (base / "backing").mkdir(parents=True)
        (base / "backing/f").write_bytes(b"bytes")
        for number in range(names):
            os.link(base / "backing/f", base / f"backing/l{number}")
        run(base, scenario(names), warm_reads=WarmReads.OFF, attr_timeout_s=3600)
    # The first call of a kind does a little more; what grows with the names is a hundred times as
    # much.
    grown = {what: by for what, by in costs.items() if by[MANY][0] > 2 * by[FEW][0]}
    assert grown == {}
    assert {what: by for what, by in costs.items() if by[MANY][1] > by[FEW][1]} == {}
