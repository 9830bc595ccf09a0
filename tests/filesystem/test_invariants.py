"""What `acpfs-ctl doctor` looks for is found, in pieces; and what is as it must be, or changes
meanwhile, is not complained of.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from acpfs.filesystem import invariants
from acpfs.filesystem.content.body import BACKING, Body, MovingOut, SpillCopy, Staging
from acpfs.filesystem.content.runs import NOTHING, Runs
from acpfs.filesystem.known_names import KnownName
from acpfs.types import NO_TIER, ROOT, Ino
from tests.filesystem.world import CALLER, World, run, violations

pytestmark = pytest.mark.clause("S234")


def path_of_bytes(w: World, ino: Ino) -> Path:
    return w.tier.directory / "data" / str(w.inner.table[ino].body.tier)


def put_right(
    w: World, wrong: Callable[[], object], right: Callable[[], object], said: str
) -> None:
    """Nothing is said before and after."""
    assert violations(w) == []
    wrong()
    found = violations(w)
    right()
    assert any(said in text for text in found), found
    assert violations(w) == []


def test_names_that_nodes_and_directories_do_not_agree_on(tmp_path: Path) -> None:
    async def main(w: World) -> None:
        ino = await w.write(b"f", b"bytes")
        node = w.inner.table[ino]
        children = w.inner.table[ROOT].dir.children
        put_right(
            w,
            lambda: node.names.append((ROOT, b"g")),
            node.names.pop,
            "f: it counts a name that no directory has (g)",
        )
        put_right(
            w, lambda: node.names.append((ROOT, b"f")), node.names.pop, "f: it counts a name twice"
        )
        more = {b"g": KnownName(ino)}
        put_right(
            w,
            lambda: children.update(more),
            lambda: children.pop(b"g"),
            "g: the file does not count this name",
        )

    run(tmp_path, main)


def test_a_name_of_a_node_that_is_not_there(tmp_path: Path) -> None:
    async def main(w: World) -> None:
        children = w.inner.table[ROOT].dir.children
        nobody = KnownName(Ino(4711))
        put_right(
            w,
            lambda: children.update({b"g": nobody}),
            lambda: children.pop(b"g"),
            "g: the name leads to a file that is not there",
        )

    run(tmp_path, main)


def test_a_count_that_is_too_high(tmp_path: Path) -> None:
    async def main(w: World) -> None:
        opened, attributes = await w.create(b"f")
        node = w.inner.table[attributes.ino]
        put_right(
            w,
            lambda: setattr(node, "unseen_links", 3),
            lambda: setattr(node, "unseen_links", 0),
            "f: its link count is 4, and it has 1 names",
        )
        await w.close(opened)

    run(tmp_path, main)


def test_bytes_that_can_never_leave_ram(tmp_path: Path) -> None:
    """As deleted files had them that nobody took notice of."""

    async def main(w: World) -> None:
        opened, attributes = await w.create(b"f")
        await w.do(w.fs.unlink(ROOT, b"f"))
        node = w.inner.table[attributes.ino]
        put_right(
            w,
            lambda: setattr(node, "handles", 0),
            lambda: setattr(node, "handles", 1),
            "it has bytes in RAM, but no name",
        )
        await w.close(opened)

    run(tmp_path, main)


@pytest.mark.parametrize("persisted", [True, False])
def test_bytes_that_are_not_there(tmp_path: Path, persisted: bool) -> None:
    async def main(w: World) -> None:
        ino = await w.write(b"f", b"bytes")
        if persisted:
            await w.drained()
        path = path_of_bytes(w, ino)
        put_right(
            w,
            lambda: os.truncate(path, 3),
            lambda: path.write_bytes(b"bytes"),
            "f: RAM has 3 of its 5 bytes",
        )
        away = path.with_name("away")
        put_right(
            w,
            lambda: path.rename(away),
            lambda: away.rename(path),
            "f: its bytes are not in RAM any more",
        )

    run(tmp_path, main)


def test_bytes_in_a_place_that_nothing_keeps(tmp_path: Path) -> None:
    async def main(w: World) -> None:
        node = w.inner.table[await w.write(b"f", b"bytes")]
        body = node.body
        version = w.log.pending_of(node.ino)[0].version
        assert version is not None

        def give(one: object, values: dict[str, object]) -> None:
            for name, value in values.items():
                setattr(one, name, value)
            if isinstance(one, Body):
                one._placed()

        def check(said: str, one: object, **values: object) -> None:
            before = {name: getattr(one, name) for name in values}
            put_right(w, lambda: give(one, values), lambda: give(one, before), said)

        gone = {"tier": NO_TIER, "here": NOTHING}
        check("f: its bytes are said to be in 0", body, tier=NO_TIER)
        check("and else at Staging(name='staging')", body, rest=Staging("staging"))
        check(
            "and else at Staging(name='staging')",
            body,
            **gone,
            rest=Staging("staging"),
            moving_out=MovingOut(),
        )
        check("and else at BackingFile()", body, rest=BACKING)
        check("no version keeps its copy there", body, **gone, rest=SpillCopy(version.vid))
        check(
            "it has changed since its copy was made",
            body,
            **gone,
            rest=SpillCopy(version.vid),
            modified=True,
        )
        check(
            "it waits for a version of it that is not in the log",
            body,
            **gone,
            rest=Staging("staging"),
            sealed=True,
        )
        check("its version is in RAM and in the spill directory", version, spilled=True)
        check("its version is nowhere", version, tier_id=NO_TIER)
        check(
            "the first bytes of an earlier content are still in RAM",
            body,
            here=Runs.first(6),
            rest=BACKING,
        )

    run(tmp_path, main)


def test_a_file_that_is_written_on_is_looked_at_with_what_was_fixed_of_it(tmp_path: Path) -> None:
    async def main(w: World) -> None:
        ino = await w.write(b"f", b"first")
        opened = await w.do(w.fs.open(ino, os.O_WRONLY | os.O_APPEND, CALLER))
        await w.do(w.fs.write(opened.handle, 5, b" second"))
        assert violations(w) == []
        await w.close(opened)

    run(tmp_path, main)


def test_the_lock_is_had_for_moments_and_what_changes_meanwhile_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a quarter of a piece at each look: never more than four places at
    a time.
    """

    async def main(w: World) -> None:
        for number in range(50):
            await w.write(b"f%d" % number, b"bytes")
        ticks = count()
        monkeypatch.setattr(
            w.inner.invariants, "_now", lambda: next(ticks) * invariants.PIECE_S / 4
        )
        pieces = w.inner.invariants.pieces()
        number = 0
        while True:  # under each piece, another file goes and another comes
            with w.fs.lock:
                piece = next(pieces, None)
            if piece is None:
                break
            assert piece == []
            await w.do(w.fs.unlink(ROOT, b"f%d" % number))
            await w.write(b"g%d" % number, b"bytes")
            number += 1
        assert number > 20
        assert next(ticks) < 5 * number + 10, (
            "four places, and a look at the clock before them, for each piece"
        )

    run(tmp_path, main)
