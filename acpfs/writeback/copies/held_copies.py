"""What this member holds for others: copies of their versions and journals, each origin's in a
directory of its own in the RAM tier, and counted there.

    data/held/ORIGIN/SESSION/about.json             until when all is there
    data/held/ORIGIN/SESSION/acpfs-VOLUME-ORIGIN/   the files of a spill directory
    data/held/.gone-…                               sessions that are over, until all of it is away

Everything that comes is somebody else's word: names have a form, files a place below the session of
whoever has shown the key of that node, and all together a budget. Nothing that is held is read,
carried out or shown here; whoever adopts it does. A session that nobody speaks of any more goes
when the mark of its origin names another one (`judge`). Thread-safe. Its books are under the file
system's lock. What is large and goes is renamed, and deleted later in a thread of its own
(`delete_gone`, by `bell`): a tmpfs needs a while for it, and all members wait for the exchange's
thread.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

from acpfs.config import share_of
from acpfs.exchange.exchange_records import PUT_BYTES_MAX, Message, whole_number
from acpfs.logger import get_logger
from acpfs.ram.tier import HELD, Tier
from acpfs.runtime.file_locks import locked
from acpfs.runtime.given import Runtime

SESSIONS_MAX = 64
"""Of all origins together."""
FILES_MAX = 200_000
"""Of one session."""
NAMES_MAX = 400
"""In one answer."""
PAGE_BYTES = 4096
SMALL_BYTES = 64 << 10
"""A file up to here is deleted in the time that it takes to rename it."""
ABOUT = "about.json"
_GONE = ".gone-"
LEFT_S = 60.0
"""A session of which nobody spoke for so long is looked after: is it the one that counts?"""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TOKEN = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"[1-9][0-9]{0,18}-[0-9a-f]{12}|mirror-[0-9a-f]{16}\.(?:seed|log)")

log = get_logger(__name__)


class RefusedWordError(Exception):
    """What a member asks is not done; the text is for it."""


@dataclass(slots=True)
class CopySession:
    """Of one origin."""

    origin: str
    token: str
    path: Path
    until: float = 0.0
    """All that was closed there before then is here, by its clock."""
    heard_at: float = 0.0
    files: dict[str, int] = field(default_factory=dict)
    """Name → bytes that it takes of the budget."""
    is_frozen: bool = False
    """It takes nothing any more: somebody claims, or has claimed, the log."""
    is_shut: bool = False
    """The same, while it is only looked whether the log may be claimed."""

    @property
    def is_closed(self) -> bool:
        """It takes nothing."""
        return self.is_frozen or self.is_shut

    def files_at(self, volume: str) -> Path:
        """Where they are: what is a spill directory for whoever adopts it."""
        return self.path / f"acpfs-{volume}-{self.origin}"

    @property
    def bytes(self) -> int:
        """Of the budget."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True)
class HeldStatistics:
    """What `status`, the metrics and the tests see of one session."""

    origin: str
    session: str
    files: int
    bytes: int
    until: float
    silent_s: float
    is_frozen: bool


class HeldCopies:
    """See above; implements `acpfs.exchange.beside.CopyKeeper`."""

    def __init__(
        self, tier: Tier, lock: RLock, volume: str, budget: int | str, runtime: Runtime
    ) -> None:
        """Takes up what an earlier worker held. `budget`: bytes, or a share of the tier's."""
        self._volume = volume
        self._tier = tier
        self._lock = lock
        self._budget = budget
        self._now = runtime.clock.now
        self.bell = runtime.threads.event()
        """Rung when something is to be deleted."""
        self._held_at = tier.directory / "data" / HELD
        self._sessions: dict[tuple[str, str], CopySession] = {}
        self._going: list[tuple[Path, int]] = []
        """What nobody needs any more, with the bytes of the budget that it takes until then."""
        self._gone_count = 0
        self.refusals = 0
        self._take_up()

    # -- what is here

    def has_place(self) -> bool:
        """Whether something may be held here already; an empty place is taken away."""
        with contextlib.suppress(OSError):
            self._held_at.rmdir()
        return self._held_at.exists()

    def _take_up(self) -> None:
        for left in self._held_at.glob("seed-*"):
            left.unlink(missing_ok=True)  # of our own, by a worker that was killed
        if not self._held_at.is_dir():
            return
        for left in self._held_at.glob(f"{_GONE}*"):
            self._goes(left, 0)  # not counted, and not waited for: a takeover is short
            self._gone_count = max(self._gone_count, int(left.name.removeprefix(_GONE)))
        for path in sorted(self._held_at.glob("[!.]*/*")):
            session = CopySession(path.parent.name, path.name, path, heard_at=self._now())
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                about = json.loads((path / ABOUT).read_bytes())
                session.until = float(about.get("clock", 0.0))
                session.is_frozen = about.get("frozen") is True
            files_at = session.files_at(self._volume)
            files_at.mkdir(mode=0o700, exist_ok=True)  # the worker may have died before that
            for file in files_at.iterdir():
                if _NAME.fullmatch(file.name):
                    self._count(session, file.name, file.stat().st_size, force=True)
            self._sessions[session.origin, session.token] = session

    def budget_bytes(self) -> int:
        """Under the lock."""
        return share_of(self._budget, self._tier.budget_bytes)

    def free_bytes(self) -> int:
        """What others can still get."""
        with self._lock:
            return max(0, self.budget_bytes() - self._tier.held_bytes)

    def offered(self) -> int:
        """For our record: what others can still get; -1: nothing at any time."""
        with self._lock:
            return self.free_bytes() if self.budget_bytes() > 0 else -1

    def statistics(self) -> list[HeldStatistics]:
        """Of all sessions, the largest first."""
        now = self._now()
        with self._lock:
            found = [
                HeldStatistics(
                    one.origin,
                    one.token,
                    len(one.files),
                    one.bytes,
                    one.until,
                    now - one.heard_at,
                    one.is_frozen,
                )
                for one in self._sessions.values()
            ]
        return sorted(found, key=lambda one: -one.bytes)

    # -- what members say

    def heed(self, origin: str, said: object) -> Message:
        """See `acpfs.exchange.beside.CopyKeeper`."""
        try:
            if not isinstance(said, dict) or not _NODE.fullmatch(origin):
                raise RefusedWordError("that is no word about copies")
            with self._lock:
                answer = self._heed(origin, said)
        except (RefusedWordError, ValueError) as error:
            self.refusals += 1
            return {"refused": str(error)}
        except OSError as error:
            self.refusals += 1
            return {"refused": f"its RAM tier says: {error.strerror}"}
        return answer

    def _heed(self, origin: str, said: Message) -> Message:
        token = said.get("session")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise RefusedWordError("that is no session")
        what = said.get("what")
        if what == "begin":
            return self._begin(origin, token, resume=said.get("resume") is True)
        session = self._known(origin, token)
        if what == "names":
            return self._names(session, said.get("after"))
        if what == "whole":
            size = whole_number(said, "size", 0, 1 << 62)
            return self._whole(session, _name(said.get("name")), size)
        if what == "remove":
            return self._remove(session, said.get("names"))
        if what == "wrote":
            return {"ok": True}  # it still takes what comes: nobody has claimed the log meanwhile
        if what == "clock":
            return self._hear_clock(session, said.get("clock"))
        if what == "release":
            self._drop(session)
            return {"ok": True}
        raise RefusedWordError("that is no word about copies")

    def _known(self, origin: str, token: str) -> CopySession:
        session = self._sessions.get((origin, token))
        if session is None:
            raise RefusedWordError("there is no such session here")
        session.heard_at = self._now()
        if session.is_closed:
            raise RefusedWordError("the log was claimed, and nothing more is taken")
        return session

    def _begin(self, origin: str, token: str, *, resume: bool) -> Message:
        if not resume and (origin, token) not in self._sessions:  # else our answer did not come
            if any(one.is_closed for one in self._of(origin)):
                raise RefusedWordError("the log was claimed, and nothing more is taken")
            if self.budget_bytes() <= 0:
                raise RefusedWordError("it holds nothing for others")
            if len(self._sessions) >= SESSIONS_MAX:
                raise RefusedWordError("it holds copies of too many members")
            path = self._held_at / origin / token
            session = CopySession(origin, token, path, heard_at=self._now())
            session.files_at(self._volume).mkdir(mode=0o700, parents=True)
            self._sessions[origin, token] = session
        self._known(origin, token)
        room = max(0, self.budget_bytes() - self._tier.held_bytes)
        return {"ok": True, "room": room, "piece": PUT_BYTES_MAX}

    def _of(self, origin: str) -> Iterator[CopySession]:
        return (one for one in list(self._sessions.values()) if one.origin == origin)

    @staticmethod
    def _names(session: CopySession, after: object) -> Message:
        if not isinstance(after, str):
            raise RefusedWordError("names after what?")
        found = heapq.nsmallest(NAMES_MAX + 1, (name for name in session.files if name > after))
        return {"names": found[:NAMES_MAX], "more": len(found) > NAMES_MAX}

    def _whole(self, session: CopySession, name: str, size: int) -> Message:
        """The file is so long: with a hole at its end, which nobody sends, or empty."""
        self._count(session, name, max(size, session.files.get(name, 0)))
        fd = _opened(session.files_at(self._volume) / name)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)
        return {"ok": True}

    def _remove(self, session: CopySession, names: object) -> Message:
        if not isinstance(names, list) or len(names) > NAMES_MAX:
            raise RefusedWordError("that are no names")
        directory = os.fspath(session.files_at(self._volume))
        freed = 0
        try:
            for name in map(_name, names):
                freed += self._remove_one(session, name, f"{directory}/{name}")
        finally:
            self._tier.let_held_go(freed)
        return {"ok": True}

    def _remove_one(self, session: CopySession, name: str, path: str) -> int:
        """How much of the budget is free at once. Names come by the hundred."""
        size = session.files.pop(name, 0)
        with contextlib.suppress(FileNotFoundError):
            if size > SMALL_BYTES:
                gone = self._gone()
                os.rename(path, gone)
                self._goes(gone, size)
                return 0
            os.unlink(path)
        return size

    def _gone(self) -> Path:
        """A name that nothing has, for what is to be deleted."""
        self._gone_count += 1
        return self._held_at / f"{_GONE}{self._gone_count}"

    def _goes(self, gone: Path, size: int) -> None:
        """It is deleted soon, and has `size` bytes of the budget until then."""
        self._going.append((gone, size))
        self.bell.set()

    def delete_gone(self) -> None:
        """What is to go, without the lock: not for who has it, nor for the exchange's thread. Who
        comes meanwhile helps.
        """
        while True:
            with self._lock:
                if not self._going:
                    return
                path, size = self._going.pop()
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            with self._lock:
                self._tier.let_held_go(size)

    def _hear_clock(self, session: CopySession, clock: object) -> Message:
        if not isinstance(clock, int | float) or isinstance(clock, bool):
            raise RefusedWordError("that is no time")
        session.until = max(session.until, float(clock))
        self._write_about(session)
        return {"ok": True}

    @staticmethod
    def _write_about(session: CopySession) -> None:
        temporary = session.path / f".{ABOUT}"
        about = {"clock": session.until, "frozen": session.is_frozen}
        temporary.write_text(json.dumps(about), encoding="ascii")
        temporary.rename(session.path / ABOUT)

    # -- bytes

    def room(self, origin: str, said: object) -> tuple[Message, int]:
        """See `acpfs.exchange.beside.CopyKeeper`."""
        try:
            if not isinstance(said, dict):
                raise RefusedWordError("that is nothing to be held")
            size = whole_number(said, "size", 1, PUT_BYTES_MAX)
            position = whole_number(said, "at", 0, (1 << 62) - size)
            name = _name(said.get("name"))
            with self._lock:
                session = self._known(origin, str(said.get("session")))
                end = max(position + size, session.files.get(name, 0))
                self._count(session, name, end)
                return {"ok": True}, _opened(session.files_at(self._volume) / name)
        except (RefusedWordError, ValueError) as error:
            self.refusals += 1
            return {"refused": str(error)}, -1
        except OSError as error:
            self.refusals += 1
            return {"refused": f"its RAM tier says: {error.strerror}"}, -1

    def _count(self, session: CopySession, name: str, size: int, *, force: bool = False) -> None:
        """Take room for a file of that size, before it is there.

        A hole counts as what it could become. `force`: it is there already.
        """
        had = session.files.get(name, 0)
        wanted = max(PAGE_BYTES, -(-size // PAGE_BYTES) * PAGE_BYTES)
        more = wanted - had
        if not force:
            if name not in session.files and len(session.files) >= FILES_MAX:
                raise RefusedWordError("it holds too many files of that member")
            if self._tier.held_bytes + more > self.budget_bytes():
                raise RefusedWordError("what it gives to others is full")
        if not self._tier.hold(more, force=force):
            raise RefusedWordError("its RAM is full")
        session.files[name] = wanted

    # -- adoption

    def shut(self, origin: str, token: str) -> Path:
        """Nothing more is taken of that session, nor of others of that origin, until `unshut`: it
        is looked whether its log may be claimed. A next worker takes what comes again.

        Raises:
            KeyError: there is no such session.
        """
        with self._lock:
            session = self._sessions[origin, token]
            session.is_shut = True
            return session.path

    def unshut(self, origin: str) -> None:
        """What `shut` did is over; what is claimed takes nothing all the same."""
        with self._lock:
            for one in self._of(origin):
                one.is_shut = False

    def claim(self, origin: str, token: str) -> Path:
        """Nothing more is taken of that session, nor of others of that origin: its log is to be
        claimed. Returns where it lies.

        Raises:
            KeyError: there is no such session.
            OSError: it cannot be written down, so the next worker would not know it.
        """
        with self._lock:
            session = self._sessions[origin, token]
            session.is_frozen = True
            self._write_about(session)
            return session.path

    def unclaim(self, origin: str, is_claimed: Callable[[], bool]) -> bool:
        """Nobody has claimed its log after all: it may go on with what is held. Whether that was
        so: not while somebody is about to claim it, nor where `is_claimed` says that this member
        has; asked without the lock, as it may hang.

        Raises:
            OSError: that is not known now, or cannot be written down.
        """
        with self._lock:
            frozen = [one for one in self._of(origin) if one.is_frozen]
        for one in frozen:
            with locked(claiming(one.path), may_wait=False) as is_alone:
                if not is_alone or is_claimed():
                    return False
                with self._lock:
                    one.is_frozen = False
                    self._write_about(one)
        return True

    def claimed(self, origin: str) -> list[str]:
        """Sessions of an origin whose log is claimed."""
        with self._lock:
            return [one.token for one in self._of(origin) if one.is_frozen]

    def adopted(self, origin: str) -> None:
        """The log is drained: all that is held of that origin goes."""
        with self._lock:
            for one in self._of(origin):
                self._drop(one)

    # -- the end of a session

    def _drop(self, session: CopySession) -> None:
        self._sessions.pop((session.origin, session.token), None)
        gone = self._gone()
        session.path.rename(gone)
        self._goes(gone, session.bytes)
        session.files.clear()
        with contextlib.suppress(OSError):
            session.path.parent.rmdir()

    def idle(self) -> list[str]:
        """Origins of sessions of which nobody spoke for a while."""
        now = self._now()
        with self._lock:
            return sorted(
                {
                    one.origin
                    for one in self._sessions.values()
                    if not one.is_closed and now - one.heard_at > LEFT_S
                }
            )

    def judge(self, origin: str, counts: Callable[[str], bool]) -> None:
        """Drop idle sessions of an origin that do not count: `counts` says so of a session."""
        now = self._now()
        with self._lock:
            for one in self._of(origin):
                idle = now - one.heard_at > LEFT_S
                if idle and not one.is_closed and not counts(one.token):
                    log.info("a copy that counts no more is dropped", origin=origin)
                    self._drop(one)


def claiming(session: Path) -> Path:
    """The file that is locked while the mount that adopts claims the log of a session's origin, and
    while the session is opened again: one of both.
    """
    return session / "claiming"


def is_closed_at(session: Path) -> bool:
    """Whether a session takes nothing any more, whichever worker there is."""
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((session / ABOUT).read_bytes())
        return isinstance(about, dict) and about.get("frozen") is True
    return False


def held_scratch(tier: Tier) -> Path:
    """Where our own seeds are made, before they are sent."""
    directory = tier.directory / "data" / HELD
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise RefusedWordError("that is no name of a copy")
    return value


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)
