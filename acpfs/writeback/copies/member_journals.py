"""Where the journal is of what is copied to another member: there, and on the storage while that
one is out of reach.

The mark on the storage names a holder's session, whose copies count, and a journal that goes with
them. What was said to be copied stays there until it is persisted, or another holder has all of it:

    the holder answers      a journal there, and the mark names both
    it is out of reach      a journal on the storage, with the copies that it has
    it is back with its RAM a journal there again
    another one has all     a journal there, with its copies; the old session goes

Never does the mark name a journal at a session that lacks what an earlier one has and that is
needed still (`CopyPlace.lacks`). Thread-safe.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading

from acpfs.runtime.given import Runtime
from acpfs.writeback.copies.journal_marks import read_mark
from acpfs.writeback.copies.journal_place import Journal, JournalSite
from acpfs.writeback.copies.on_member import HolderError, HolderSession, MemberPlace
from acpfs.writeback.copies.on_storage import StoredJournals

AWAY_S = 30.0
"""A holder that was too slow, and did not lose its connection, gets a journal again after that."""
FENCED = {"fenced": "1"}
"""In the mark: what this node still does after a claim is refused, or was told before it began
(`backing.own_files`, `adopting.under_way`); not in that of an older acpfs.
"""
ON_STORAGE = "storage"
"""In the mark: where the journal is, if not at the holder."""


class HolderSite:
    """See `journal_place.JournalSite`: a session at a holder."""

    has_copies = True

    def __init__(self, journals: MemberJournals, session: HolderSession) -> None:
        self._journals = journals
        self.session = session

    def begin(self, token: str, snapshot: sqlite3.Connection) -> Journal:
        """See `journal_place.JournalSite`."""
        return self._journals.begin_at_holder(self.session, token, snapshot)


class StorageSite:
    """See `journal_place.JournalSite`: the backing directory."""

    has_copies = False

    def __init__(self, journals: MemberJournals) -> None:
        self._journals = journals

    def begin(self, token: str, snapshot: sqlite3.Connection) -> Journal:
        """See `journal_place.JournalSite`."""
        return self._journals.begin_on_storage(token, snapshot)


class MemberJournals:
    """See `journal_place.JournalPlace`."""

    def __init__(self, place: MemberPlace, stored: StoredJournals, runtime: Runtime) -> None:
        self._place = place
        self._stored = stored
        self._threads = runtime.threads
        self._now = runtime.clock.now
        self._lock = threading.Lock()
        self._learning = runtime.threads.lock()
        self._is_known = False
        self._is_marked = False
        self._counting: HolderSession | None = None
        """Whose copies count, by the mark."""
        self._tokens: set[str] = set()
        """Of journals on the storage."""
        self._at_holder: HolderSite | None = None
        self._on_storage = StorageSite(self)
        self._is_away = False
        """The journal is, or is to be, on the storage."""
        self._away_at = 0.0
        self._away_begins = 0
        """How often a session had been begun by then."""

    # -- what counts

    def learn(self) -> bool:
        """See `journal_place.JournalPlace`."""
        with self._learning:
            if not self._is_known:
                self._learn()
        return self._is_marked

    def _learn(self) -> None:
        mark: dict[str, str] | None = {}
        with contextlib.suppress(ValueError):  # damaged: it names nothing, and is to be withdrawn
            mark = read_mark(self._stored.lower, self._stored.node)
        tokens = self._stored.tokens()
        with self._lock:
            self._is_marked = mark is not None
            if mark is not None and "session" in mark:
                self._counting = HolderSession.of_mark(mark)
            self._tokens |= set(tokens)
            self._is_known = True

    @property
    def counts_at(self) -> str:
        """See `journal_place.JournalPlace`."""
        with self._lock:
            return "" if self._counting is None else self._counting.holder

    @property
    def site(self) -> JournalSite | None:
        """See `journal_place.JournalPlace`."""
        session = self._place.session
        with self._lock:
            if session is None or not self._has_all(session):
                return self._on_storage if self._is_away else None
            if self._is_away and not self._may_return(session):
                return self._on_storage
            if self._at_holder is None or self._at_holder.session.token != session.token:
                self._at_holder = HolderSite(self, session)
            return self._at_holder

    def _has_all(self, session: HolderSession) -> bool:
        """That was said to be copied, and is needed."""
        counting = self._counting
        return counting is None or counting.token == session.token or not self._place.lacks

    def _may_return(self, session: HolderSession) -> bool:
        """To a holder: another one, or one that was away."""
        is_other = self._counting is not None and self._counting.token != session.token
        is_back = self._place.begins != self._away_begins
        return is_other or is_back or self._now() - self._away_at > AWAY_S

    def goes_elsewhere(self, failed: JournalSite | None) -> bool:
        """See `journal_place.JournalPlace`."""
        self.learn()
        with self._lock:
            if self._counting is None or failed is self._on_storage:
                return False
            self._is_away = True
            self._away_at = self._now()
            self._away_begins = self._place.begins
            return True

    def marked(self, token: str) -> None:
        """See `journal_place.JournalPlace`."""
        with self._lock:
            self._is_known = True
            self._is_away = token in self._tokens
            if not self._is_away:
                self._counting = self._place.session_of(token)

    def withdrawn(self) -> None:
        """See `journal_place.JournalPlace`."""
        with self._lock:
            self._is_known = True
            self._is_away = False
            self._counting = None
            tokens = list(self._tokens)
        for token in tokens:
            self._remove_stored(token)

    # -- journals

    def begin_at_holder(
        self, session: HolderSession, token: str, snapshot: sqlite3.Connection
    ) -> Journal:
        """In a session that has all that counts."""
        try:
            self.learn()
            with self._lock:
                if not self._has_all(session):
                    raise HolderError("it has not all yet that another one holds")
        except OSError:
            snapshot.close()
            raise
        return self._place.begin_journal(token, snapshot)

    def begin_on_storage(self, token: str, snapshot: sqlite3.Connection) -> Journal:
        """Beside what lies there."""
        with self._lock:
            self._tokens.add(token)
        return self._stored.begin(token, snapshot)

    def tokens(self) -> list[str]:
        """See `journal_place.JournalPlace`: as far as is known here, and at once."""
        with self._lock:
            return sorted({*self._place.tokens(), *self._tokens})

    def remove(self, token: str) -> None:
        """See `journal_place.JournalPlace`."""
        with self._lock:
            is_stored = token in self._tokens
        if is_stored:
            self._remove_stored(token)
        else:
            self._place.remove_journal(token)

    def _remove_stored(self, token: str) -> None:
        """Behind whoever asks, which is the commit thread."""
        self._threads.start("journal on storage", self._remove, token)

    def _remove(self, token: str) -> None:
        with contextlib.suppress(OSError):  # the next mount looks for it
            self._stored.remove(token)
            with self._lock:
                self._tokens.discard(token)

    def described(self, token: str) -> dict[str, str]:
        """See `journal_place.JournalPlace`."""
        with self._lock:
            is_stored = token in self._tokens
            counting = self._counting
        if is_stored:
            told = {} if counting is None else counting.told()
            return {**told, **FENCED, "journal": ON_STORAGE}
        return {**self._place.session_of(token).told(), **FENCED}
