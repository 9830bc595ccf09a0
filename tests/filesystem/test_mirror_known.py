"""What the mirror's journal has to know before an operation is carried out, so that the next mount
knows its own work again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acpfs.filesystem.names import RENAME_EXCHANGE
from acpfs.types import ROOT
from acpfs.writeback.log.ops import OpKind
from tests.filesystem.stuck_journal import Batch, StuckJournal
from tests.filesystem.test_mirror import lose_ram, mirrored, run, tree
from tests.filesystem.test_spilling import until
from tests.filesystem.world import World

pytestmark = pytest.mark.clause("S225")


def after_the_loss_of_ram(
    base: Path,
    change: Callable[[World, StuckJournal], Any],
    sticks: Callable[[Batch], bool] = lambda _batch: True,
) -> dict[str, bytes | str]:
    """What is stored in the end of what `change` does, with the drain held, after "a" and "b" were
    stored.

    It says when the disk may stick. Then the drain goes on as far as it may, and RAM is lost.
    """
    journal = StuckJournal(sticks)
    found = {}

    async def first(made: World) -> None:
        await mirrored(made)
        await made.write(b"a", b"a")
        await made.write(b"b", b"b")
        await made.drained()
        made.engine.hold(True)
        await change(made, journal)
        made.engine.hold(False)
        await until(made, lambda: not len(made.log) or journal.is_waited_for())

    async def second(made: World) -> None:
        await made.drained()
        found.update(tree(made.backing))

    try:
        with journal.installed():
            run(base, first)
        lose_ram(base)
        run(base, second)
    finally:
        journal.end()
    return found


def test_a_file_that_was_stored_before_the_journal_knew_it_to_be_staged_is_no_conflict(
    tmp_path: Path,
) -> None:
    """The next mount found it under its name, took it for another's, and put its own beside: no
    moment of the history.
    """

    async def change(made: World, journal: StuckJournal) -> None:
        await made.write(b"new", b"1" * 5000)
        await made.write(b"latest", b"new")
        await mirrored(made)
        journal.begin(made)

    assert after_the_loss_of_ram(tmp_path, change) == {
        "a": b"a",
        "b": b"b",
        "new": b"1" * 5000,
        "latest": b"new",
    }


def test_what_was_left_out_is_not_carried_out_after_all_over_what_came_in_its_place(
    tmp_path: Path,
) -> None:
    async def change(made: World, journal: StuckJournal) -> None:
        await made.write(b"new", b"first")
        await mirrored(made)
        journal.begin(made)
        await made.write(
            b"new", b"second"
        )  # stands for the first, of which alone the journal knows
        await made.write(b"later", b"third")

    assert after_the_loss_of_ram(tmp_path, change) == {"a": b"a", "b": b"b", "new": b"first"}


def test_an_exchange_of_which_the_journal_does_not_know_what_was_exchanged_is_not_undone(
    tmp_path: Path,
) -> None:
    async def change(made: World, journal: StuckJournal) -> None:
        journal.begin(made)
        await made.do(made.fs.rename(ROOT, b"a", ROOT, b"b", RENAME_EXCHANGE))

    def has_numbers(batch: Batch) -> bool:
        rows = [
            values
            for statements in batch
            for sql, values, _many in statements
            if sql.startswith("INSERT OR REPLACE INTO op ")
        ]
        return any(
            kind == OpKind.EXCHANGE.value and payload
            for _seq, kind, *_names, payload, _vid in (row[:11] for row in rows)
        )

    assert after_the_loss_of_ram(tmp_path, change, has_numbers) == {"a": b"b", "b": b"a"}


def test_what_was_put_beside_is_not_put_there_twice(tmp_path: Path) -> None:
    """The journal did not know that the name leads beside, and the next mount found others' file
    under it again.
    """

    async def change(made: World, journal: StuckJournal) -> None:
        await made.write(b"a", b"ours")
        await mirrored(made)
        (made.backing / "a").write_bytes(b"others'")
        with made.fs.lock:
            made.engine.expect_foreign_changes(made.log.last_seq)
        await mirrored(made)
        journal.begin(made)

    def puts_beside(batch: Batch) -> bool:
        return any(
            sql.startswith("INSERT OR REPLACE INTO aside ")
            for statements in batch
            for sql, _values, _many in statements
        )

    expected = {"a": b"others'", "b": b"b", "a.acpfs-conflict-1": b"ours"}
    assert after_the_loss_of_ram(tmp_path, change, puts_beside) == expected
