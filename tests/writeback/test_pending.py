"""What a journal has not got yet is gathered a moment after it was appended to."""

from __future__ import annotations

from acpfs.writeback.copies.pending import LAZY_STATEMENTS, PendingTransactions

ROW: tuple[str, list[int], bool] = ("INSERT INTO t VALUES (?)", [1], False)


class Times:
    """That a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_comes_first_waits_for_nothing_and_what_follows_is_gathered() -> None:
    times = Times()
    pending = PendingTransactions(times, 0.5)
    assert pending.gathers_s(is_lazy=False) is None
    pending.add([ROW], 1)
    assert pending.gathers_s(is_lazy=False) == 0.0
    assert pending.take() == [[ROW]]
    pending.appended()
    pending.add([ROW], 1)
    pending.add([ROW, ROW], 3)
    assert pending.gathers_s(is_lazy=False) == 0.5
    times.now += 0.4
    assert 0.0 < (pending.gathers_s(is_lazy=False) or 0.0) < 0.2
    times.now += 0.4
    assert pending.gathers_s(is_lazy=False) == 0.0
    assert pending.take() == [[ROW], [ROW, ROW]]
    assert not pending.take()


def test_a_lazy_journal_is_appended_to_where_it_is_asked_or_far_behind() -> None:
    pending = PendingTransactions(Times(), 0.0)
    pending.add([ROW], 1)
    assert pending.gathers_s(is_lazy=True) is None
    pending.add([ROW] * LAZY_STATEMENTS, 1 + LAZY_STATEMENTS)
    assert pending.gathers_s(is_lazy=True) == 0.0


def test_the_journal_has_the_changes_of_what_it_was_appended() -> None:
    pending = PendingTransactions(Times(), 0.0)
    pending.begin(5)
    assert (pending.changes, pending.known_changes) == (5, 5)
    pending.add([ROW], 6)
    pending.take()
    pending.add([ROW], 7)
    assert pending.known_changes == 5
    pending.forget()
    pending.appended()
    assert (pending.changes, pending.known_changes) == (7, 6)
