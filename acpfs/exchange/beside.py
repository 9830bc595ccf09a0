"""A worker's side of its exchange process: keeps one going, asks it for ranges, and has it ask what
this member lends.

The process may die at any time: what it was asked fails, whoever asked helps himself, and another
one takes its place, with the same sockets to listen on. Thread-safe.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from acpfs.exchange.channel_ends import Answer, ChannelEnd, ExchangeGoneError, Reply
from acpfs.exchange.exchange_records import Availability, MemberAddress, Message, VersionName
from acpfs.exchange.member_links import unknown_exchange
from acpfs.logger import get_logger
from acpfs.runtime.clock import Clock
from acpfs.runtime.given import Runtime
from acpfs.runtime.threads import Running

HAS_PATIENCES = 4
"""One more than the process takes for a question to a member that is gone, by its connection."""
GET_MAX_S = 20.0
"""So long a range may take; the process ends each by itself, unless it stands still."""
HOLD_PATIENCE_S = 5.0
"""So long a member may say nothing to whoever has copies kept there: then another one is chosen."""
HOLD_MAX_S = 40.0
"""The process ends each such question by itself before that, unless it stands still."""
NO_KEEPER: Message = {"refused": "it holds nothing for others"}
FAILURES_MAX = 3
LEFT_ALONE_S = 5.0
SILENT_MAX = 3
"""A process that does not answer so often in a row, though it ends each wait by itself, stands
still: another one takes its place.
"""
END_WAIT_S = 2.0
SAID_AGAIN_S = 60.0
AGAIN_S = 1.0
"""Between the ends of a process and the begin of the next."""

log = get_logger(__name__)


class MemberFailedError(OSError):
    """A member does not answer, or this one's exchange process does not."""


@dataclass(frozen=True, slots=True)
class Loan:
    """A range that a member gives, as it is in the RAM tier now."""

    fd: int
    """The lender's; good until the loan ends."""
    size: int
    to: str
    token: object = None
    """The lender's."""


class Lender(Protocol):
    """What this member gives to others. Called in the exchange's thread: nothing here may wait."""

    def has(self, file: VersionName, asker: str) -> Availability:
        """What there is of a version. Who asks reads it."""
        ...

    def lend(self, file: VersionName, offset: int, size: int, asker: str) -> Future[Loan | None]:
        """A range of it, when it is there; None: nothing is lent."""
        ...

    def end(self, loan: Loan) -> bool:
        """It is not needed any more: whether its bytes are what they were when it began."""
        ...


class CopyKeeper(Protocol):
    """What this member keeps for others. Called in the exchange's thread: nothing here may wait."""

    def heed(self, origin: str, said: object) -> Message:
        """What a member says of what it has kept here; the answer."""
        ...

    def room(self, origin: str, said: object) -> tuple[Message, int]:
        """A descriptor of the file into which its bytes go, the caller's to close; -1: it gets
        none, and the answer says why.
        """
        ...


class KnownMembers(Protocol):
    """Who the members are."""

    def others(self) -> Sequence[MemberAddress]:
        """Those that live, and can be asked."""
        ...

    def knows(self, node: str, key: str) -> Future[bool]:
        """Whether a member has that key, by its record; read anew where that may say more."""
        ...


@dataclass(slots=True)
class ExchangeCounts:
    """For people; bytes by member."""

    got: Counter[str] = field(default_factory=Counter)
    given: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    """Times that a member did not answer."""
    processes: int = 0
    """Exchange processes that were started."""


@dataclass(frozen=True, slots=True)
class ExchangePlace:
    """What an exchange process begins with."""

    volume: str
    node: str
    directory: Path
    """Of key and certificate."""
    is_plain: bool
    listeners: tuple[socket.socket, ...]


@dataclass(slots=True)
class _Trust:
    """How a member has answered lately."""

    failures: int = 0
    alone_until: float = 0.0


class Exchange:
    """Of one worker."""

    def __init__(
        self,
        place: ExchangePlace,
        directory: KnownMembers,
        lender: Callable[[], Lender],
        runtime: Runtime,
        keeper: Callable[[], CopyKeeper | None] = lambda: None,
        *,
        patience_s: float,
    ) -> None:
        """`lender`, `keeper`: asked for when the first member wants something. `patience_s`: so
        long a member may say nothing to whoever reads.
        """
        self._place = place
        self._directory = directory
        self._lender = lender
        self._keeper = keeper
        self._patience_s = patience_s
        self._threads = runtime.threads
        self._clock: Clock = runtime.clock
        self._lock = threading.Lock()
        self._end: ChannelEnd | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = runtime.threads.event()
        self._loans: dict[int, Loan] = {}
        self._last_loan = 0
        self._trust: dict[str, _Trust] = {}
        self._strange: dict[str, str] = {}
        """Of members whose records are known: strangers do not get as far."""
        self._ways: dict[str, str] = {}
        self._spoilt_at: dict[str, float] = {}
        """Member → when it was last said that its bytes were changed on their way."""
        self._keeping: Running | None = None
        self._silent = 0
        self.counts = ExchangeCounts()

    @property
    def node(self) -> str:
        """This member."""
        return self._place.node

    @property
    def pid(self) -> int:
        """Of the process; 0: there is none now."""
        with self._lock:
            return 0 if self._child is None else self._child.pid

    # -- the process

    def begin(self) -> None:
        """Have a process from now on."""
        self._keeping = self._threads.start("exchange", self._keep_one)

    def close(self) -> None:
        """The mount ends."""
        self._stopping.set()
        with self._lock:
            end = self._end
            child = self._child
        if end is not None:
            end.close()
        if child is not None:
            child.kill()
        if self._keeping is not None:
            self._keeping.end(END_WAIT_S)  # what it asks of the lender comes before that one ends
        for listener in self._place.listeners:
            listener.close()

    def _keep_one(self) -> None:
        while not self._stopping.is_set():
            try:
                self._run_one()
            except OSError as error:
                log.warning("the exchange process cannot be started", error=str(error))
            if not self._stopping.is_set():
                self._end_loans()
            if self._stopping.wait(AGAIN_S):
                return
            log.warning("the exchange process has ended: another one begins")

    def _run_one(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            child = _started(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        end = ChannelEnd(ours, self._heed)
        with self._lock:
            self._end = end
            self._child = child
            self.counts.processes += 1
        try:
            with contextlib.suppress(OSError):
                end.ask(self._begins(), [one.fileno() for one in self._place.listeners])
            if self._stopping.is_set():
                end.close()
            end.run()
        finally:
            with self._lock:
                self._end = None
                self._child = None
            child.kill()
            child.wait()

    def _begins(self) -> Message:
        place = self._place
        return {
            "do": "begin",
            "volume": place.volume,
            "node": place.node,
            "directory": os.fspath(place.directory),
            "plain": place.is_plain,
        }

    # -- what the process asks

    def _heed(self, message: Message, _fds: list[int], reply: Reply) -> None:
        if self._strange and "from" in message:  # it has been updated
            with self._lock:
                self._strange.pop(message["from"], None)
        match message["do"]:
            case "knows":
                known = self._directory.knows(message["node"], message["key"])
                known.add_done_callback(
                    lambda done: reply({"known": done.exception() is None and done.result()})
                )
            case "has":
                file = VersionName.heard(message["file"])
                reply(self._lender().has(file, message["from"]).told())
            case "lend":
                file = VersionName.heard(message["file"])
                lent = self._lender().lend(
                    file, message["offset"], message["size"], message["from"]
                )
                lent.add_done_callback(lambda done: self._lent(done, reply))
            case "hold":
                keeper = self._keeper()
                said = message["said"]
                reply(NO_KEEPER if keeper is None else keeper.heed(message["from"], said))
            case "room":
                self._make_room(message["from"], message["said"], reply)
            case "same":
                reply({"same": self._ended(message["loan"], counts=True)})
            case "end":
                self._ended(message["loan"], counts=False)
            case "speaks":
                self._speaks(message["node"], message["version"])
            case "linked":
                with self._lock:
                    self._ways[message["node"]] = message["way"]
            case "spoilt":
                self._spoilt(message["node"])

    def _make_room(self, origin: str, said: object, reply: Reply) -> None:
        keeper = self._keeper()
        answer, fd = (NO_KEEPER, -1) if keeper is None else keeper.room(origin, said)
        try:
            reply(answer, [fd] if fd >= 0 else [])
        finally:
            if fd >= 0:
                os.close(fd)

    def _lent(self, lent: Future[Loan | None], reply: Reply) -> None:
        loan = None if lent.exception() is not None else lent.result()
        if loan is None:
            reply({"size": 0})
            return
        with self._lock:
            self._last_loan += 1
            number = self._last_loan
            self._loans[number] = loan
        if not reply({"size": loan.size, "loan": number}, [loan.fd]):
            self._ended(number, counts=False)

    def _ended(self, number: int, *, counts: bool) -> bool:
        with self._lock:
            loan = self._loans.pop(number, None)
        is_same = loan is not None and self._lender().end(loan)
        if counts and is_same and loan is not None:
            with self._lock:
                self.counts.given[loan.to] += loan.size
        return is_same

    def _end_loans(self) -> None:
        """The process that had them is gone."""
        with self._lock:
            loans = list(self._loans.values())
            self._loans.clear()
        for loan in loans:
            self._lender().end(loan)

    # -- what the worker asks

    def others(self) -> list[MemberAddress]:
        """Members that can be asked now: those who did not answer lately are left alone."""
        now = self._clock.now()
        with self._lock:
            alone = {node for node, trust in self._trust.items() if trust.alone_until > now}
        return [one for one in self._directory.others() if one.node not in alone]

    def ask(self, to: MemberAddress, file: VersionName) -> Callable[[], Availability]:
        """Ask what a member has of a version; what is returned waits for the answer.

        It raises MemberFailedError where there is none.
        """
        message: Message = {"do": "has", "to": to.told(), "file": file.told()}
        asked = self._asked(message, (), self._patience_s)

        def answer() -> Availability:
            limit_s = HAS_PATIENCES * self._patience_s
            return Availability.heard(self._answer(to, *asked, limit_s).said)

        return answer

    def get(self, to: MemberAddress, file: VersionName, offset: int, size: int) -> int:
        """A descriptor of memory with a range, which the caller closes; -1: that member gives
        nothing of it. May take as long as the bytes do.

        Raises:
            MemberFailedError: it does not answer.
        """
        message = {
            "do": "get",
            "to": to.told(),
            "file": file.told(),
            "offset": offset,
            "size": size,
        }
        answer = self._answer(to, *self._asked(message, (), self._patience_s), GET_MAX_S)
        if answer.said.get("got") != size or len(answer.fds) != 1:
            answer.close()
            return -1
        return answer.fds[0]

    def hold(self, to: MemberAddress, said: Message) -> Message:
        """Say something to a member that holds copies of ours; its answer.

        Raises:
            MemberFailedError: there is none.
        """
        message: Message = {"do": "hold", "to": to.told(), "said": said}
        return self._answer(to, *self._asked(message, (), HOLD_PATIENCE_S), HOLD_MAX_S).said

    def put(self, to: MemberAddress, said: Message, fd: int, position: int) -> Message:
        """Send it bytes of a file, `said["size"]` from that position of the descriptor on; its
        answer.

        Raises:
            MemberFailedError: it does not take them, or says nothing.
        """
        message: Message = {"do": "put", "to": to.told(), "said": said, "from": position}
        return self._answer(to, *self._asked(message, (fd,), HOLD_PATIENCE_S), HOLD_MAX_S).said

    def took(self, node: str, size: int) -> None:
        """Bytes of a member became part of a file here."""
        with self._lock:
            self.counts.got[node] += size

    def _asked(
        self, message: Message, fds: Sequence[int], patience_s: float
    ) -> tuple[ChannelEnd, int, Future[Answer]]:
        with self._lock:
            end = self._end
        if end is None:
            raise MemberFailedError("there is no exchange process now")
        try:
            return end, *end.ask({**message, "patience_s": patience_s}, fds)
        except ExchangeGoneError as error:
            raise MemberFailedError(str(error)) from error

    def _answer(
        self,
        to: MemberAddress,
        end: ChannelEnd,
        number: int,
        future: Future[Answer],
        timeout_s: float,
    ) -> Answer:
        try:
            answer = end.wait(number, future, timeout_s)
        except ExchangeGoneError as error:
            raise MemberFailedError(str(error)) from error
        self._heard(answer)
        if answer is None or "failed" in answer.said:
            if answer is not None and "speaks" in answer.said:
                self._speaks(to.node, answer.said["speaks"])
            if answer is not None and "spoilt" in answer.said:
                self._spoilt(to.node)
            self._fails(to.node)
            raise MemberFailedError("no answer" if answer is None else answer.said["failed"])
        with self._lock:
            self._trust.pop(to.node, None)
            self._strange.pop(to.node, None)
        return answer

    def _heard(self, answer: Answer | None) -> None:
        """Whether the process itself is well."""
        with self._lock:
            self._silent = 0 if answer is not None else self._silent + 1
            if self._silent < SILENT_MAX or self._child is None:
                return
            self._silent = 0
            child = self._child
        log.warning("the exchange process stands still: another one takes its place")
        child.kill()

    def strange(self) -> dict[str, str]:
        """Live member → why nothing is exchanged with it: it speaks another version."""
        live = {one.node for one in self._directory.others()}
        with self._lock:
            return {node: why for node, why in self._strange.items() if node in live}

    def ways(self) -> dict[str, str]:
        """Live member → how what goes to and from it is protected, as of the last connection."""
        live = {one.node for one in self._directory.others()}
        with self._lock:
            return {node: way for node, way in self._ways.items() if node in live}

    def _spoilt(self, node: str) -> None:
        """Who changes bytes on their way could do it often: not each time is said."""
        now = self._clock.now()
        with self._lock:
            is_news = now - self._spoilt_at.get(node, -math.inf) >= SAID_AGAIN_S
            if is_news:
                self._spoilt_at[node] = now
        if is_news:
            log.warning(
                "bytes of another node were changed on their way, or left out: none of them is "
                "used, and the connection is closed",
                node=node,
            )

    def _speaks(self, node: str, version: object) -> None:
        """A member has called, or answered, in a version that is not ours."""
        why = unknown_exchange(version)
        with self._lock:
            is_news = self._strange.get(node) != why
            self._strange[node] = why
        if is_news:
            log.warning("another node speaks another version", node=node, why=why)

    def _fails(self, node: str) -> None:
        with self._lock:
            self.counts.failures += 1
            trust = self._trust.setdefault(node, _Trust())
            trust.failures += 1
            if trust.failures >= FAILURES_MAX:
                trust.failures = 0
                trust.alone_until = self._clock.now() + LEFT_ALONE_S


def _started(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """With the code of this acpfs, wherever it lies, and nothing of its environment."""
    above = os.fspath(Path(__file__).parents[2])
    code = (
        f"import sys; sys.path.insert(0, {above!r}); "
        "from acpfs.exchange.exchange_process import main; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        cwd="/",
    )
