"""Copies and journal at another member, its *holder*: the same files as in a spill directory, in
its RAM, under a session.

    begin    → the holder makes room for a session, or says why not
    put      → bytes of a file; each is answered when the holder has them
    whole    → a copy has all its bytes
    remove   → files that are not needed any more
    clock    → all that was closed here before then has its copy there, with the journal
    release  → the session is over

A holder that does not answer, or refuses, is left alone for a while, and another one is chosen, in
another failure domain, with a new session. One that has only lost its connection is asked first
whether it has the old session still. Thread-safe; every call may wait for the holder, as long as
the exchange lets it.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from acpfs.backing.filling import write_all
from acpfs.checksum import Checksum
from acpfs.exchange.exchange_records import (
    PUT_BYTES_MAX,
    PUT_BYTES_UNSAID,
    MemberAddress,
    Message,
)
from acpfs.logger import get_logger
from acpfs.ram.spill_directory import MIRROR_PREFIX
from acpfs.ram.state import Statement
from acpfs.runtime.given import Runtime
from acpfs.types import VersionId
from acpfs.writeback.copies import journal_frames as frames
from acpfs.writeback.copies.copy_buffers import CopyBuffer, CopyBuffers
from acpfs.writeback.copies.on_disk import LONG_BYTES, LONG_SEEDS, log_name, seed_name

RECORDED = "member:"
"""Begins what the state says of where copies are, where they are at a holder."""
LEFT_ALONE_S = 30.0
"""A holder that failed or refused is asked again after so long, or when there is no other."""
NAMES_PER_WORD = 200
"""In one message."""
GATHER_S = 0.02
"""So long the removal of files gathers their names: a word takes longer than a name."""
MIRROR_TOKENS = 64
"""Sessions of journals that are remembered, for the mark."""

log = get_logger(__name__)


class HolderError(OSError):
    """The holder's, or that there is none."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EHOSTDOWN, why)


@dataclass(frozen=True, slots=True)
class HolderCandidate:
    """A member that could hold copies."""

    address: MemberAddress
    domain: str
    """It fails with those of the same one."""
    free_bytes: int
    """What it gives to others yet, as it last said."""


class Words(Protocol):
    """How a holder is spoken to: see `acpfs.exchange.beside.Exchange`."""

    def hold(self, to: MemberAddress, said: Message) -> Message: ...
    def put(self, to: MemberAddress, said: Message, fd: int, position: int) -> Message: ...


@dataclass(frozen=True, slots=True)
class HolderSession:
    """What one holder has of us."""

    holder: str
    token: str
    address: MemberAddress

    @classmethod
    def of_mark(cls, mark: Mapping[str, str]) -> HolderSession:
        """As `told` has it; it is not known how the holder is reached."""
        holder = mark.get("holder", "")
        return cls(holder, mark["session"], MemberAddress(holder, (), 0, ""))

    def told(self) -> dict[str, str]:
        """For the mark."""
        return {"holder": self.holder, "session": self.token}


class MemberPlace:
    """See `copy_place.CopyPlace` and `journal_place.JournalPlace`: one of each."""

    frees_ram = False
    lacks = False

    def __init__(
        self,
        words: Words,
        candidates: Callable[[], Sequence[HolderCandidate]],
        own: HolderCandidate,
        scratch: Path,
        runtime: Runtime,
        earlier: str = "",
    ) -> None:
        """`candidates`: members that live and hold for others, as far as is known. `scratch`: a
        directory of a tmpfs. `earlier`: where an earlier worker had them, as `recorded` has it.
        """
        self._words = words
        self._candidates = candidates
        self._own = own
        self._scratch = scratch
        self.buffers = CopyBuffers(scratch)
        self.piece_bytes = PUT_BYTES_UNSAID
        self._chance = runtime.chance
        self._threads = runtime.threads
        self._now = runtime.clock.now
        self._lock = threading.Lock()
        self._beginning = runtime.threads.lock()
        """Held while a session is begun: copies and journal ask for one at the same time."""
        self._session = _session_of(earlier)
        self._is_broken = True
        self._settled = ""
        """Token of the session of which it is known what it has."""
        self._why = "no holder was chosen yet"
        self._failed: dict[str, float] = {}
        """Member → when it failed or refused."""
        self._asked: dict[str, str] = {}
        """Member → token of a session that it was asked for, and may have made: its answer did not
        come. It is asked for the same one again, so that it holds for none that nobody uses.
        """
        self._free_bytes = 0
        self._needed_bytes = 0
        self._tokens: set[str] = set()
        """Of journals that the session has."""
        self._of_journal: dict[str, HolderSession] = {}
        """Token → where it is; the newest ones."""
        self.sessions = 0
        """That were begun."""
        self.begins = 0
        """The same, with those that were gone on with."""

    # -- the holder

    @property
    def where(self) -> str:
        with self._lock:
            return "" if self._session is None else self._session.holder

    @property
    def recorded(self) -> str:
        """See `copy_place.CopyPlace`."""
        with self._lock:
            one = self._session
            return "" if one is None else f"{RECORDED}{one.holder}:{one.token}"

    @property
    def why(self) -> str:
        """Why there is no holder now; "": there is one."""
        with self._lock:
            return self._why if self._is_broken else ""

    @property
    def is_broken(self) -> bool:
        with self._lock:
            return self._is_broken

    @property
    def session(self) -> HolderSession | None:
        """That is in use, and of which it is known what it has."""
        with self._lock:
            one = self._session
            if one is None or self._is_broken or one.token != self._settled:
                return None
            return one

    def settled(self) -> None:
        """See `copy_place.CopyPlace`."""
        with self._lock:
            if self._session is not None and not self._is_broken:
                self._settled = self._session.token

    def begin(self) -> None:
        """Go on with the session that there is, if its holder has it still; else choose another.

        Raises:
            HolderError: nobody takes it now.
        """
        with self._beginning:
            with self._lock:
                session = self._session
                if not self._is_broken:
                    return
            ranked = self._ranked()
            if session is not None:
                try:
                    if self._resumed(session):
                        return
                except HolderError:  # it has not got it any more
                    pass
                except OSError:  # it does not answer yet, and may have it: not a second one there
                    ranked = [one for one in ranked if one.address.node != session.holder]
            self._begin_at(ranked)

    def _resumed(self, session: HolderSession) -> bool:
        """By its address as it is now: it may have begun anew at another port. False: it is not
        known where it is.

        Raises:
            HolderError: it refuses.
            OSError: it does not answer.
        """
        found = [one for one in self._candidates() if one.address.node == session.holder]
        if found:
            self._begun(HolderSession(session.holder, session.token, found[0].address), resume=True)
        return bool(found)

    def _ranked(self) -> list[HolderCandidate]:
        """Whom to ask, the first one first: the ring of node ids from our own on, so that all hold
        for about as many; who failed lately comes last.
        """
        now = self._now()
        own = self._own
        others = [one for one in self._candidates() if one.domain != own.domain]

        def rank(one: HolderCandidate) -> tuple[bool, bool, bool, str]:
            node = one.address.node
            failed = self._failed.get(node)
            is_left_alone = failed is not None and now - failed < LEFT_ALONE_S
            is_small = one.free_bytes < self._needed_bytes
            return is_left_alone, is_small, node < own.address.node, node

        return sorted(others, key=rank)

    def _begin_at(self, ranked: Sequence[HolderCandidate]) -> None:
        why = "no member in another failure domain holds copies"
        for one in ranked:
            token = self._asked.setdefault(one.address.node, self._chance.token(8))
            session = HolderSession(one.address.node, token, one.address)
            try:
                self._begun(session, resume=False)
            except OSError as error:
                why = f"{one.address.node}: {error.strerror or error}"
                self._failed[one.address.node] = self._now()
                continue
            del self._asked[session.holder]
            log.info("another member holds copies", holder=session.holder)
            return
        with self._lock:
            self._why = why
        raise HolderError(why)

    def _begun(self, session: HolderSession, *, resume: bool) -> None:
        answer = self._say_to(session, {"what": "begin", "resume": resume})
        room = answer.get("room")
        piece = answer.get("piece")
        with self._lock:
            takes = piece if isinstance(piece, int) else 0
            self.piece_bytes = min(max(takes, PUT_BYTES_UNSAID), PUT_BYTES_MAX)
            self._session = session
            self._is_broken = False
            self._why = ""
            self._free_bytes = room if isinstance(room, int) else 0
            if not resume:
                self._tokens.clear()
            self.sessions += not resume
            self.begins += 1

    def is_too_small(self, size: int) -> None:
        """See `copy_place.CopyPlace`: a session at another member, where one says that it has so
        much.
        """
        with self._lock:
            session = self._session
            self._needed_bytes = size
            if session is None or self._is_broken:
                return
        failed = self._failed.get(session.holder)
        if failed is not None and self._now() - failed < LEFT_ALONE_S:
            return  # it was tried a moment ago
        others = [one for one in self._candidates() if one.address.node != session.holder]
        if any(one.domain != self._own.domain and one.free_bytes >= size for one in others):
            self._breaks(session, HolderError("it has too little room"))
            with self._lock:
                self._session = None

    def _say(self, said: Message) -> Message:
        session = self._current()
        try:
            return self._say_to(session, said)
        except OSError as error:
            self._breaks(session, error)
            raise

    def _current(self, token: str = "") -> HolderSession:
        """The session, of that token where one is given: who began in another one has nothing of
        this one.
        """
        with self._lock:
            session = self._session
            if session is None or self._is_broken or token not in ("", session.token):
                raise HolderError(self._why or "the session is over")
            return session

    def _say_to(self, session: HolderSession, said: Message) -> Message:
        return _heard(self._words.hold(session.address, {**said, "session": session.token}))

    def _breaks(self, session: HolderSession, error: OSError) -> None:
        with self._lock:
            if session is not self._session or self._is_broken:
                return
            self._is_broken = True
            self._why = f"{session.holder}: {error.strerror or error}"
            self._failed[session.holder] = self._now()

    # -- files

    def names(self) -> list[str]:
        """See `copy_place.CopyPlace`."""
        return list(self._names())

    def _names(self) -> Iterator[str]:
        last = ""
        while True:
            answer = self._say({"what": "names", "after": last})
            found = answer.get("names")
            if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
                raise HolderError("its list of names is none")
            with self._lock:
                # beside what is known: a journal that is being begun may have no file there yet
                self._tokens |= {
                    one.removeprefix(MIRROR_PREFIX).partition(".")[0]
                    for one in found
                    if one.startswith(MIRROR_PREFIX)
                }
            yield from found
            if not found or answer.get("more") is not True or found[-1] <= last:
                return
            last = found[-1]

    def free_bytes(self) -> int:
        """What the holder said when the session began."""
        with self._lock:
            return self._free_bytes

    def new_name(self, vid: VersionId) -> str:
        """See `copy_place.CopyPlace`."""
        return f"{vid}-{self._chance.token(6)}"

    def new_copy(self, name: str) -> MemberCopy:
        """See `copy_place.CopyPlace`."""
        return MemberCopy(self, self._current().token, name)

    def open(self, name: str) -> int:
        """Nothing is read from there: what has a copy stays in RAM."""
        raise HolderError(f"{name} is not read from a holder")

    def put(self, token: str, name: str, position: int, fd: int, size: int) -> None:
        """Have the first bytes of a descriptor written into a file of the holder.

        Raises:
            OSError: it did not take them, or the session of that token is over.
        """
        session = self._current(token)
        said = {"session": session.token, "name": name, "at": position, "size": size}
        try:
            _heard(self._words.put(session.address, said, fd, 0))
        except OSError as error:
            self._breaks(session, error)
            raise

    def whole(self, token: str, name: str, size: int) -> None:
        """A file has all its bytes, and is so long."""
        self._current(token)
        self._say({"what": "whole", "name": name, "size": size})

    def gather(self) -> None:
        """See `copy_place.CopyPlace`."""
        self._threads.event().wait(GATHER_S)

    def remove(self, names: Sequence[str]) -> None:
        """See `copy_place.CopyPlace`; a file of a session that is over went with it."""
        for at in range(0, len(names), NAMES_PER_WORD):
            with suppress(OSError):
                self._say({"what": "remove", "names": names[at : at + NAMES_PER_WORD]})

    def tell_clock(self, clock: float) -> None:
        """All that was closed here before then is there."""
        with suppress(OSError):
            self._say({"what": "clock", "clock": clock})

    def sync_names(self) -> None:
        """Names are there with the first byte."""

    def give_up(self) -> None:
        """Nothing is left that the storage has not got: the session is over."""
        with suppress(OSError):
            self._say({"what": "release"})

    # -- journals

    def begin_journal(self, token: str, snapshot: sqlite3.Connection) -> MemberJournal:
        """See `journal_place.JournalSite.begin`."""
        session = self._current()
        with self._lock:
            # behind that: a session that begins now forgets it, and takes nothing of it
            self._tokens.add(token)
        fd, path = tempfile.mkstemp(prefix="seed-", dir=self._scratch)
        try:
            with (
                closing(snapshot),
                closing(sqlite3.connect(path, isolation_level=None)) as seed,
            ):
                seed.execute("PRAGMA synchronous=OFF")
                snapshot.backup(seed)
                seed.execute("PRAGMA journal_mode=DELETE")
            digest, size = self._send_seed(session.token, token, path)
        finally:
            os.close(fd)
            os.unlink(path)
        journal = MemberJournal(self, session.token, log_name(token), size)
        journal.begin(frames.header({"token": token, "seed": digest}))
        with self._lock:
            self._of_journal[token] = session
            while len(self._of_journal) > MIRROR_TOKENS:
                del self._of_journal[next(iter(self._of_journal))]
        return journal

    def _send_seed(self, session: str, token: str, path: str) -> tuple[str, int]:
        hasher = Checksum()
        position = 0
        name = seed_name(token)
        with (
            closing(MemberCopy(self, session, name)) as copy,
            open(path, "rb", buffering=0) as seed,
        ):
            while count := seed.readinto(copy.buffer(self.piece_bytes)):
                piece = copy.buffer(count)
                hasher.update(piece)
                copy.write(piece, position)
                position += count
            copy.finish(position)
        return hasher.hexdigest(), position

    def tokens(self) -> list[str]:
        """See `journal_place.JournalPlace`: as far as is known here, and at once."""
        with self._lock:
            return sorted(self._tokens)

    def remove_journal(self, token: str) -> None:
        """See `journal_place.JournalPlace.remove`: behind whoever asks, which is the commit
        thread.
        """
        with self._lock:
            self._tokens.discard(token)
        self._threads.start("journal at holder", self._remove_journal, token)

    def _remove_journal(self, token: str) -> None:
        self.remove([log_name(token), seed_name(token)])

    def session_of(self, token: str) -> HolderSession:
        """Where a journal is, that was begun lately."""
        with self._lock:
            return self._of_journal[token]


def _session_of(recorded: str) -> HolderSession | None:
    if not recorded.startswith(RECORDED):
        return None
    holder, _colon, token = recorded.removeprefix(RECORDED).rpartition(":")
    return HolderSession(holder, token, MemberAddress(holder, (), 0, ""))


class MemberCopy:
    """See `copy_place.CopyFile`. Pieces go out one after the other, from shared memory."""

    def __init__(self, place: MemberPlace, session: str, name: str) -> None:
        self._place = place
        self._session = session
        self._name = name
        self._end = 0
        self._buffer: CopyBuffer | None = None
        self._is_sending = False
        """Or has failed to: then it may go on."""

    def buffer(self, size: int) -> memoryview:
        """See `copy_place.CopyFile`."""
        if self._buffer is not None and size > len(self._buffer.memory):
            self._give_back(self._buffer)
            self._buffer = None
        if self._buffer is None:
            self._buffer = self._place.buffers.take(size)
        return memoryview(self._buffer.memory)[:size]

    def write(self, piece: bytes | memoryview, position: int) -> None:
        """A piece that lies at the beginning of the buffer."""
        assert self._buffer is not None
        self._is_sending = True
        self._place.put(self._session, self._name, position, self._buffer.fd, len(piece))
        self._is_sending = False
        self._end = position + len(piece)

    def clear(self) -> None:
        """See `copy_place.CopyFile`."""
        self._end = 0
        # not by its removal, which may come when there is something new
        self._place.whole(self._session, self._name, 0)

    def finish(self, size: int) -> None:
        """See `copy_place.CopyFile`."""
        if not size or self._end != size:  # else it is so long
            self._place.whole(self._session, self._name, size)

    def close(self) -> None:
        """See `copy_place.CopyFile`."""
        if self._buffer is not None:
            self._give_back(self._buffer)
            self._buffer = None

    def _give_back(self, buffer: CopyBuffer) -> None:
        if self._is_sending:
            buffer.close()
        else:
            self._place.buffers.give_back(buffer)


class MemberJournal:
    """See `journal_place.Journal`."""

    is_lazy = False

    def __init__(self, place: MemberPlace, session: str, name: str, seed_bytes: int) -> None:
        self._place = place
        self._session = session
        self._name = name
        self._seed_bytes = seed_bytes
        self._length = 0
        self._encoder = frames.Encoder()

    @property
    def is_long(self) -> bool:
        """See `journal_place.Journal`."""
        return self._length > max(LONG_BYTES, LONG_SEEDS * self._seed_bytes)

    def begin(self, header: bytes) -> None:
        """Its first frame."""
        self._write(header)

    def append(self, batch: Sequence[Sequence[Statement]]) -> None:
        """See `journal_place.Journal`."""
        self._write(b"".join(self._encoder.transaction(statements) for statements in batch))

    def _write(self, data: bytes) -> None:
        fd = os.memfd_create("acpfs-journal", os.MFD_CLOEXEC)
        try:
            for start in range(0, len(data), PUT_BYTES_UNSAID):
                piece = data[start : start + PUT_BYTES_UNSAID]
                write_all(fd, piece, 0)
                self._place.put(self._session, self._name, self._length, fd, len(piece))
                self._length += len(piece)
        finally:
            os.close(fd)

    def close(self) -> None:
        """See `journal_place.Journal`."""


def _heard(answer: Message) -> Message:
    """What a holder answers.

    Raises:
        HolderError: it refuses.
    """
    why = answer.get("refused")
    if why is not None:
        raise HolderError(str(why)[:200])
    return answer
