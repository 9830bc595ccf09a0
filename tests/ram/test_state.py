"""The state database: its transactions."""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.ram.state import StateDatabase


@pytest.mark.clause("S81")
def test_a_layer_that_changes_rows_as_it_reads_them_may_come_before_another_creates_its_tables(tmp_path: Path) -> None:
    """Found by the drill with the guard: the mount after a kill failed with "no transaction is active", and so did every later one."""
    state = StateDatabase(tmp_path / "state")
    state.create("CREATE TABLE IF NOT EXISTS first (value INTEGER);")
    state.change("INSERT INTO first VALUES (1)")
    state.create("CREATE TABLE IF NOT EXISTS second (value INTEGER);")
    state.commit()
    state.change("INSERT INTO second VALUES (2)")
    state.commit()
    state.close()
    again = StateDatabase(tmp_path / "state")
    assert (again.rows("SELECT value FROM first"), again.rows("SELECT value FROM second")) == ([(1,)], [(2,)])
    again.close()


@pytest.mark.clause("S200")
def test_numbers_beyond_64_bits_come_back_as_they_were(tmp_path: Path) -> None:
    numbers = [(1 << 64) - 1, 10_413_792_000_123_456_789, -(1 << 63), 1 << 63, 5]
    state = StateDatabase(tmp_path / "state")
    state.create("CREATE TABLE IF NOT EXISTS some (at INTEGER PRIMARY KEY, value INTEGER);")
    state.change_many("INSERT INTO some VALUES (?, ?)", [(n, value) for n, value in enumerate(numbers)])
    for n, value in enumerate(numbers):
        state.change("INSERT INTO some VALUES (?, ?)", (100 + n, value))
    state.close()
    again = StateDatabase(tmp_path / "state")
    assert [int(value) for (value,) in again.rows("SELECT value FROM some ORDER BY at")] == 2 * numbers
    again.close()
