"""What a call costs under the lock does not grow with what is known of other files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from acpfs.filesystem import nodes
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, run

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
        recognise, catalogue = w.inner.catalogue.recognise, w.inner.catalogue
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
    """Any user can ask for names without end, and a job that writes beside and renames leaves one for each file."""
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
    get = NodeTable.get

    def counted(table: NodeTable, ino: Ino) -> Node | None:
        looks["get"] += 1
        return get(table, ino)

    monkeypatch.setattr(NodeTable, "get", counted)
    run(tmp_path, after, session="s")
    assert looks["get"] < 1000
