"""The mark on the backing directory that says which journal counts: where it comes late, it takes
none away that is in use.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.ram.state import StateDatabase, Statement
from acpfs.runtime.given import Runtime
from acpfs.types import ROOT, Ino, TierId
from acpfs.writeback.copies.journal_marks import read_mark
from acpfs.writeback.copies.journal_place import Journal, JournalSite
from acpfs.writeback.copies.on_disk import DiskJournal, DiskPlace, log_name
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.sources.mirror import DISK_PATIENCE, JournalStage, Mirror
from tests.rig.runtime import REAL

pytestmark = pytest.mark.clause("S152")
WAIT_S = 120.0
HOLDER_WAIT_S = 0.1


class HangingMarks(BackingDirectory):
    """Writing a mark waits for `go_on`."""

    def __init__(self, path: Path, node_id: str, runtime: Runtime) -> None:
        super().__init__(path, node_id, runtime)
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.written: list[str] = []

    def write_own(self, names: LowerPath, content: bytes) -> None:
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        self.written.append(content.decode())
        super().write_own(names, content)


@dataclass
class Made:
    """A mirror over a state that nothing but the test changes."""

    mirror: Mirror
    state: StateDatabase
    log: OperationLog
    lower: HangingMarks
    directory: SpillDirectory
    lock: RLock

    def mark(self) -> str:
        return (read_mark(self.lower, "test") or {}).get("token", "")


class Elsewhere:
    """A site beside which no copies are made, as the storage is one beside a holder."""

    has_copies = False

    def __init__(self, place: DiskPlace) -> None:
        self._place = place

    def begin(self, token: str, snapshot: sqlite3.Connection) -> Journal:
        return self._place.begin(token, snapshot)


class TwoSites(DiskPlace):
    """The journal goes on elsewhere as soon as it has to, as that of a holder does."""

    def __init__(self, directory: SpillDirectory) -> None:
        super().__init__(directory)
        self.elsewhere: Elsewhere | None = None

    @property
    def site(self) -> JournalSite:
        return self.elsewhere or self

    def goes_elsewhere(self, _failed: JournalSite | None) -> bool:
        if self.elsewhere is not None:
            return False
        self.elsewhere = Elsewhere(self)
        return True


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    with mirror_over(tmp_path, DiskPlace) as one:
        yield one


@contextmanager
def mirror_over(tmp_path: Path, place: Callable[[SpillDirectory], DiskPlace]) -> Iterator[Made]:
    for name in ("backing", "tier", "spill"):
        (tmp_path / name).mkdir()
    lower = HangingMarks(tmp_path / "backing", "test", REAL)
    state = StateDatabase(tmp_path / "tier" / "state.sqlite", REAL)
    log = OperationLog(state, REAL.clock)
    directory = SpillDirectory(tmp_path / "spill" / "acpfs-test", REAL.chance)
    directory.prepare()
    mirror = Mirror(
        place(directory), state, log, lower, "test", REAL, replace(DISK_PATIENCE, wait_s=WAIT_S)
    )
    with closing(state):
        yield Made(mirror, state, log, lower, directory, RLock())
        lower.go_on.set()
        mirror.close(nothing_left=False)


@pytest.mark.clause("S225")
def test_of_a_run_none_is_forgotten_when_the_journal_is_waited_for(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows of none that it was carried out: what comes over the first is known to be so."""
    marked(made)
    syncs: list[str] = []
    sync = made.mirror._sync

    def synced_one(token: str) -> bool:
        syncs.append(token)
        is_known = sync(token)
        with made.lock:  # asked for by itself, the second would be waited for once more
            made.log.save(run[1])
            made.state.commit()
        return is_known

    monkeypatch.setattr(made.mirror, "_sync", synced_one)
    # as if it had nothing that it is not waited for
    monkeypatch.setattr(made.mirror._pending, "appended", lambda: None)
    run = [stored(made, 1), stored(made, 2)]
    made.mirror.before(run)
    assert len(syncs) == 1
    with made.lock:
        over = made.log.append(OpKind.STORE, Ino(9), parent=ROOT, name=run[0].name)
    made.mirror._known_changes = made.mirror._pending.changes
    made.mirror.before([over])
    assert len(syncs) == 2


@pytest.mark.clause("S225")
def test_what_the_journal_has_by_itself_it_is_not_waited_for(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = marked(made)
    made.mirror.before([stored(made, 9)])  # what comes first is waited for
    monkeypatch.setattr(made.mirror, "_sync", lambda _token: pytest.fail("it was waited for"))
    ops = [stored(made, 1), stored(made, 2)]
    wait_until(lambda: not made.mirror.statistics().pending_transactions)
    made.mirror.before(ops)
    known = stored(made, 3)
    changed = stored(made, 4)
    wait_until(lambda: not made.mirror.statistics().pending_transactions)
    with made.lock:
        made.log.save(changed)  # that is not recorded, so the journal has not got it
        assert made.mirror.statistics().pending_transactions == 1
        assert made.mirror._is_behind(token, [changed])
        assert not made.mirror._is_behind(token, [known])
        made.state.commit()
    wait_until(lambda: not made.mirror.statistics().pending_transactions)
    assert made.mirror._is_behind("another", [changed])


@pytest.mark.clause("S225")
def test_a_journal_that_fails_has_what_it_was_given_and_no_more(made: Made) -> None:
    """Found by reading: what is pending is forgotten while it is appended to."""
    token = marked(made)
    mirror = made.mirror
    mirror.before([stored(made, 9)])
    append = mirror._apply
    began = threading.Event()
    go_on = threading.Event()

    def appends(journal: Journal, batch: list[list[Statement]]) -> None:
        began.set()
        assert go_on.wait(WAIT_S)
        append(journal, batch)

    mirror._apply = appends  # type: ignore[method-assign]
    first = stored(made, 1)
    assert began.wait(WAIT_S)
    second = stored(made, 2)
    with mirror._changed:
        mirror._fail_locked(token, "the test says so")
    go_on.set()
    wait_until(lambda: not mirror._is_behind(token, [first]))
    assert mirror._is_behind(token, [second])


def wait_until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("never")


def test_a_mark_that_was_late_takes_no_journal_in_use_away(made: Made) -> None:
    """The backing directory hangs while a journal is to be marked that fails meanwhile, and is
    begun anew.
    """
    made.lower.go_on.clear()
    with made.lock:
        made.mirror.begin()
    assert made.lower.began.wait(WAIT_S)
    late = made.mirror._token
    with made.mirror._changed:
        made.mirror._fail_locked(late, "the disk failed")
    with made.lock:
        made.mirror.begin()
    wait_until(lambda: made.mirror._stage is JournalStage.FOLLOWING)
    made.lower.go_on.set()
    wait_until(lambda: made.mark() == made.mirror._token)
    assert (made.directory.path / log_name(made.mark())).exists()


@pytest.mark.clause("S625")
@pytest.mark.parametrize("moment", ["before it is made", "while it is made"])
def test_a_journal_that_another_one_has_replaced_already_leaves_nothing(
    made: Made, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its thread came late; by then the others had been removed."""
    tokens: list[str] = []
    began = threading.Event()
    go_on = threading.Event()
    ended = threading.Event()
    run = made.mirror._run
    begin = DiskPlace.begin

    def waits() -> None:
        began.set()
        assert go_on.wait(WAIT_S)

    def runs(token: str, snapshot: sqlite3.Connection) -> None:
        tokens.append(token)
        if token == tokens[0] and moment == "before it is made":
            waits()
        run(token, snapshot)
        if token == tokens[0]:
            ended.set()

    def begins(place: DiskPlace, token: str, snapshot: sqlite3.Connection) -> DiskJournal:
        if token == tokens[0] and moment == "while it is made":
            waits()
        return begin(place, token, snapshot)

    monkeypatch.setattr(made.mirror, "_run", runs)
    monkeypatch.setattr(DiskPlace, "begin", begins)
    with made.lock:
        made.mirror.begin()
    assert began.wait(WAIT_S)
    second = marked(made)
    go_on.set()
    assert ended.wait(WAIT_S)
    assert second == made.mark() == made.mirror.token != tokens[0]
    assert {name.partition(".")[0] for name in made.directory.names()} == {f"mirror-{second}"}


def stored(made: Made, number: int) -> Op:
    """A STORE, logged and recorded."""
    with made.lock:
        version = made.log.new_version(Ino(number), TierId(number), 1)
        op = made.log.append(
            OpKind.STORE, Ino(number), parent=ROOT, name=b"%d" % number, version=version
        )
        made.state.commit()
    return op


def marked(made: Made) -> str:
    """The token of the journal that counts, which is begun."""
    with made.lock:
        made.mirror.begin()
    wait_until(lambda: made.mirror.statistics().state == "on")
    return made.mark()


@pytest.mark.clause("S582")
@pytest.mark.parametrize("waits", [True, False])
def test_a_journal_at_a_holder_that_fails_leaves_the_mark_to_the_next_one(
    made: Made, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """What counts as copied counts on. Not where nobody is to wait, as with a disk."""
    made.mirror._patience = replace(made.mirror._patience, waits_for_next=waits)
    first = marked(made)
    made.mirror.before([stored(made, 1)])
    is_waited_for = threading.Event()
    sync = made.mirror._sync

    def synced(token: str) -> bool:
        is_waited_for.set()
        return sync(token)

    def fail(_journal: DiskJournal, _batch: object) -> None:
        assert is_waited_for.wait(WAIT_S)
        monkeypatch.undo()
        raise OSError("the connection was lost")

    monkeypatch.setattr(made.mirror, "_sync", synced)
    monkeypatch.setattr(DiskJournal, "append", fail)
    ahead = threading.Thread(target=made.mirror.before, args=([stored(made, 2)],))
    ahead.start()
    wait_until(lambda: made.mirror.statistics().state == "off")
    if not waits:
        ahead.join(WAIT_S)
    with made.lock:
        made.mirror.begin()
    ahead.join(WAIT_S)
    assert not ahead.is_alive()
    wait_until(lambda: made.mark() not in ("", first))
    assert ("{}" in [text.strip() for text in made.lower.written]) == (not waits)


@pytest.mark.clause("S582", "S602")
def test_journals_that_fail_one_after_the_other_have_the_time_of_one(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder that takes each new journal's word, and then refuses it."""
    made.mirror._patience = replace(made.mirror._patience, waits_for_next=True)
    marked(made)
    made.mirror.before([stored(made, 1)])
    times = [0.0]
    monkeypatch.setattr(made.mirror._outage, "_now", lambda: times[0])

    def refuse(_token: str, _snapshot: sqlite3.Connection) -> Journal:
        raise OSError("no room")

    monkeypatch.setattr(made.mirror, "_seed", refuse)
    made.mirror.broken()
    for times[0] in (0.6 * WAIT_S, 1.2 * WAIT_S):
        with made.lock:
            made.mirror.begin()
        wait_until(lambda: made.mirror.statistics().why == "no room")
    made.mirror.before([stored(made, 2)])  # and waits no longer
    assert made.mark() == ""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Made]:
    """What is copied to a holder: the journal may go on at the storage."""
    with mirror_over(tmp_path, TwoSites) as one:
        one.mirror._patience = replace(one.mirror._patience, waits_for_next=True)
        yield one


def look_until_done(made: Made, ahead: threading.Thread) -> None:
    """Begin journals, as the daemon does each second, until who waits ahead of an operation may
    carry it out.
    """

    def is_done() -> bool:
        with made.lock:
            made.mirror.look()
        return not ahead.is_alive()

    wait_until(is_done)


@pytest.mark.clause("S601")
def test_a_journal_that_fails_before_it_is_marked_gives_up_no_copy_beside_the_one_before(
    holder: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has become long and is begun anew, and the holder goes just then: what it has
    been told is needed still, and goes on with a journal on the storage.
    """
    first = marked(holder)
    holder.mirror.before([stored(holder, 1)])
    with holder.lock:
        holder.mirror.look()  # what was needed at the mount's beginning is not needed any more

    def refuse(_token: str, _snapshot: sqlite3.Connection) -> Journal:
        monkeypatch.undo()
        raise OSError("the connection was lost")

    monkeypatch.setattr(holder.mirror, "_seed", refuse)
    holder.mirror._outage.wait_s = HOLDER_WAIT_S
    with holder.lock:
        holder.mirror.begin()
    wait_until(lambda: holder.mirror.statistics().why == "the connection was lost")
    ahead = threading.Thread(target=holder.mirror.before, args=([stored(holder, 2)],))
    ahead.start()
    look_until_done(holder, ahead)
    assert holder.mark() not in ("", first)
    assert holder.mirror.statistics().state == "away"
    assert "{}" not in [text.strip() for text in holder.lower.written]


@pytest.mark.clause("S601")
@pytest.mark.parametrize("answers", [True, False])
def test_a_storage_that_is_slow_is_no_reason_to_give_up_what_was_copied(
    holder: Made, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The drain waits on it anyway; but not for ever for a journal alone."""
    marked(holder)
    holder.mirror.before([stored(holder, 1)])
    is_waited_for = threading.Event()
    is_over = threading.Event()
    wait = holder.mirror._wait
    seed = holder.mirror._seed

    def noted(token: str, condition: Callable[[], bool]) -> bool:
        if not holder.mirror._has_copies():
            is_waited_for.set()
        return wait(token, condition)

    def late(token: str, snapshot: sqlite3.Connection) -> Journal:
        assert is_waited_for.wait(WAIT_S)
        is_over.wait(5 * HOLDER_WAIT_S if answers else WAIT_S)
        return seed(token, snapshot)

    monkeypatch.setattr(holder.mirror, "_wait", noted)
    monkeypatch.setattr(holder.mirror, "_seed", late)
    holder.mirror._outage.wait_s = HOLDER_WAIT_S
    holder.mirror._patience = replace(
        holder.mirror._patience, elsewhere_wait_s=WAIT_S if answers else HOLDER_WAIT_S
    )
    holder.mirror.broken()
    ahead = threading.Thread(target=holder.mirror.before, args=([stored(holder, 2)],))
    ahead.start()
    look_until_done(holder, ahead)
    is_over.set()
    assert bool(holder.mark()) == answers


class Hanging:
    """The journal's disk takes nothing until `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mirror: Mirror) -> None:
        self.go_on = threading.Event()
        apply = mirror._apply

        def late(journal: Journal, batch: list[list[Statement]]) -> None:
            assert self.go_on.wait(WAIT_S)
            apply(journal, batch)

        monkeypatch.setattr(mirror, "_apply", late)


@pytest.fixture
def waiting(made: Made, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set while somebody waits for the journal."""
    wait = made.mirror._wait
    event = threading.Event()

    def noted(token: str, condition: Callable[[], bool]) -> bool:
        with made.mirror._changed:  # let go when the wait has begun
            event.set()
            return wait(token, condition)

    monkeypatch.setattr(made.mirror, "_wait", noted)
    return event


def fail_and_begin_anew(made: Made) -> None:
    """In one, so that whoever waits for the old one finds the new one."""
    with made.lock, made.mirror._changed:
        made.mirror._fail_locked(made.mirror._token, "the test says so")
        made.mirror.begin()


@pytest.mark.clause("S225")
def test_who_waits_for_a_journal_does_not_go_on_because_of_the_next_one(
    made: Made, monkeypatch: pytest.MonkeyPatch, waiting: threading.Event
) -> None:
    """The next one has all from its beginning; the mark still was that of the one that failed, and
    knew nothing of the operation.
    """
    first = marked(made)
    disk = Hanging(monkeypatch, made.mirror)
    seeding = threading.Event()
    seed = made.mirror._seed

    def seed_later(token: str, snapshot: sqlite3.Connection) -> Journal:
        assert seeding.wait(WAIT_S)
        return seed(token, snapshot)

    monkeypatch.setattr(made.mirror, "_seed", seed_later)
    op = stored(made, 1)
    ahead = threading.Thread(target=made.mirror.before, args=([op],))
    ahead.start()
    assert waiting.wait(WAIT_S)
    fail_and_begin_anew(made)
    ahead.join(WAIT_S)
    assert not ahead.is_alive()
    assert made.mark() == ""
    assert made.mirror._token != first
    disk.go_on.set()
    seeding.set()
    wait_until(lambda: made.mark() == made.mirror._token)


@pytest.mark.clause("S225")
def test_a_journal_that_failed_is_not_marked_because_the_next_one_is_seeded(
    made: Made, monkeypatch: pytest.MonkeyPatch, waiting: threading.Event
) -> None:
    seeding = threading.Event()
    seed = made.mirror._seed
    tokens = list[str]()

    def seed_later(token: str, snapshot: sqlite3.Connection) -> Journal:
        tokens.append(token)
        if token == tokens[0]:
            assert seeding.wait(WAIT_S)
        return seed(token, snapshot)

    monkeypatch.setattr(made.mirror, "_seed", seed_later)
    with made.lock:
        made.mirror.begin()
    op = stored(made, 1)
    ahead = threading.Thread(target=made.mirror.before, args=([op],))
    ahead.start()
    assert waiting.wait(WAIT_S)
    fail_and_begin_anew(made)
    ahead.join(WAIT_S)
    assert not ahead.is_alive()
    wait_until(lambda: made.mark() == made.mirror._token)
    assert not [text for text in made.lower.written if tokens[0] in text]
    seeding.set()


@pytest.mark.clause("S225")
@pytest.mark.parametrize("change", ["nothing", "another", "itself", "its version", "left out"])
def test_an_operation_waits_for_the_journal_to_know_it_as_it_is(
    made: Made, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Where the disk hangs, the mark goes instead."""
    left_out = stored(made, 1)
    first = stored(made, 2)
    op = stored(made, 3)
    marked(made)
    made.mirror.before([first])  # waits, as whatever comes first
    made.mirror.before([stored(made, 4)])
    disk = Hanging(monkeypatch, made.mirror)
    # not before: what is waited for above comes in its time
    made.mirror._outage.wait_s = 0.1
    with made.lock:
        if change == "itself":
            made.log.save(op)
        elif change == "its version":
            assert op.version is not None
            made.log.save_version(op.version)
        elif change == "left out":
            made.log.withdraw(left_out)
        made.state.commit()
    if change == "another":
        stored(made, 5)
    made.mirror.before([op])
    disk.go_on.set()
    assert bool(made.mark()) == (change in ("nothing", "another"))
