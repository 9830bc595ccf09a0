"""What acpfs has inside a rank: one thread, a connection to each coordinator, and the last word
that came over one.

The thread works while the main thread sits in a collective. It tells where the marks are, and at
STOP it holds them, ends all collectives and arms the interrupter; everything else of a fault is the
main thread's (`park`). Commands do not queue: the newest replaces the one before, since a
coordinator sends the next one only when this one is answered, or void. What the main thread has to
say goes through the outbox, also from a signal handler: it takes no lock that the thread might
hold. It waits there while nobody commands, and what was said since the last command is said again
to a coordinator that takes over.

Whatever goes wrong in the thread ends the protection of this rank, never its training: it says
goodbye, as at the end of a loop.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from acpfs.errors import RefusedError
from acpfs.logger import get_logger
from acpfs.training.calling import Calling
from acpfs.training.coordinator.election import Ballot
from acpfs.training.interrupt import Interrupter
from acpfs.training.marks import Marks
from acpfs.training.messages import (
    Active,
    Beat,
    Done,
    FromMember,
    Goodbye,
    Header,
    Hello,
    Leave,
    Message,
    Protected,
    Publish,
    Refused,
    Resume,
    Save,
    Sent,
    Settle,
    ShowStacks,
    Stacks,
    Stop,
    StoreAnswer,
    StoreAsk,
    StoreVerb,
    Vote,
    Voted,
    Welcome,
)
from acpfs.training.policy import Policy
from acpfs.training.records import MalformedError
from acpfs.training.stacks import all_stacks
from acpfs.training.wire import LinkClosedError, LinkTimeoutError, SocketLink

log = get_logger(__name__)
TURN_S = 0.05
"""How often the thread looks at what has no descriptor, once it was told to stop."""
LEAVE_S = 20.0
"""A main thread that has not left so long after LEAVE never will."""
SILENT_BEATS = 2
"""The active coordinator answers each beat.

When so many have no answer it is as good as gone, and this rank votes for another.
"""
FAREWELL_S = 5.0
"""For all coordinators together, to take what was said last."""
Command = Stop | Settle | Save | Publish | Leave | Resume | Done


def bytes_written() -> int:
    """By this process so far, into whatever; 0 where the kernel does not say."""
    with (
        contextlib.suppress(OSError, StopIteration),
        open("/proc/self/io", encoding="ascii") as told,
    ):
        return int(next(line for line in told if line.startswith("wchar:")).split()[1])
    return 0


class OtherJobError(RefusedError):
    """The coordinators are those of another job that has the same name."""


class GenerationOverError(Exception):
    """A newer command came: what is being done is void."""


@dataclass(frozen=True, slots=True)
class Order:
    """A command, and which of all it is."""

    number: int
    generation: int
    command: Command


@dataclass(frozen=True, slots=True)
class Collectives:
    """Those of this process."""

    abort: Callable[[], int]
    """Ends them all; called by the member's thread."""
    clues: Callable[[], Mapping[str, int]] = dict
    """What beats say of them."""


class Member:
    """Of one rank. `start` and what follows it belong to the main thread, unless said otherwise."""

    def __init__(  # noqa: PLR0915  # one statement for each part
        self,
        job: str,
        hello: Hello,
        marks: Marks,
        collectives: Collectives,
        interrupter: Interrupter,
        policy: Policy,
        call: Callable[[str], SocketLink] | None = None,
        *,
        on_stuck: Callable[[], None] = lambda: None,
    ) -> None:
        """`call`: a coordinator that came later; may wait.

        `on_stuck`: called in each turn in which the main
        thread has not come out of C after a STOP.
        """
        self._calling = Calling(call)
        self._job = job
        self._hello = hello
        self._marks = marks
        self._abort = collectives.abort
        self._interrupter = interrupter
        self._policy = policy
        self._links: dict[int, SocketLink] = {}
        self._ballot = Ballot()
        self._outbox: deque[tuple[int, FromMember]] = deque()
        """What is to be said, and in which generation it was true."""
        self._said: list[tuple[int, FromMember]] = []
        """Since the last command: who takes over has not heard it."""
        self._heard: dict[int, float] = {}
        """When each coordinator last said something."""
        self._turned_at = math.inf
        self._in_vain_since: float | None = None
        """Since when coordinators ask for votes, and none is elected."""
        self._commanded_at = math.inf
        """When somebody was last there who commands, in a save."""
        self._left_save: Order | None = None
        """The one that nobody commanded any more."""
        self._wake_reads, self._wake_writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="acpfs-member", daemon=True)
        self._news = threading.Event()
        self._answered = threading.Event()
        self._answers: dict[int, StoreAnswer | MalformedError] = {}
        """By request; an error where it could not be sent."""
        self._requests = count(1)
        self._numbers = count(1)
        self._generation = 0
        self._order: Order | None = None
        self._protected: Protected | Refused | None = None
        self._ended = False
        self._beat_at = 0.0
        self._leave_at: float | None = None
        self.cut_off_since: float | None = None
        """Since when no coordinator is connected, or nobody listens here any more: the thread has
        failed.
        """
        self.long_operation = False
        self._parked = False
        self._clues = collectives.clues
        self._on_stuck = on_stuck
        self.on_leave_late: Callable[[Leave], None] = lambda leave: os._exit(leave.status)

    # -- life

    def start(self, links: Mapping[int, SocketLink], timeout_s: float) -> None:
        """Register with these coordinators; returns when all ranks have.

        Raises:
            RefusedError: there is no protection; the message says why.
        """
        self._links = dict(links)
        self._broadcast(self._hello)
        try:
            self._thread.start()
        except BaseException:  # of a signal's handler: the thread may run all the same
            self._ended = True
            raise
        deadline = time.monotonic() + timeout_s
        while (
            self._protected is None and time.monotonic() < deadline and self.cut_off_since is None
        ):
            self._news.wait(TURN_S)
            self._news.clear()
        if isinstance(self._protected, Refused):
            raise (OtherJobError if self._protected.is_other_job else RefusedError)(
                f"no protection: {self._protected.reason}"
            )
        if self._protected is None and self._order is None:
            raise RefusedError(
                "no protection: "
                + (
                    "the coordinator is gone"
                    if self.cut_off_since
                    else f"not all ranks came in {timeout_s:g} s"
                )
            )

    def end(self) -> None:
        """Leave in order; what was said before is sent. May be called twice."""
        if self._thread.is_alive():
            self.tell(
                Goodbye(all_done=self._order is not None and isinstance(self._order.command, Done))
            )
            self._ended = True
            self._wake()
            self._thread.join()
        self._calling.close()
        deadline = time.monotonic() + FAREWELL_S
        for link in self._links.values():
            link.farewell(max(0.0, deadline - time.monotonic()))
        self._links.clear()

    def leave(self, why: str) -> None:
        """Training goes on without protection. Does not wait, and `end` may still be called."""
        self.tell(Goodbye(why=why))
        self._ended = True
        self._wake()

    # -- the main thread's side

    @property
    def parked(self) -> bool:
        """Where ranks are replaced: outside of the loop, or before its first update.

        All coordinators are told at once.
        """
        return self._parked

    @parked.setter
    def parked(self, parked: bool) -> None:
        self._parked = parked
        self._beat_at = 0.0
        self._wake()

    @property
    def stopped(self) -> bool:
        """Whether a STOP has come, ever."""
        return self._order is not None

    @property
    def commanded(self) -> bool:
        """Whether there is a connection to the coordinator that commands, and somebody here who
        listens to it.
        """
        return self._ballot.connected and self.cut_off_since is None

    @property
    def _commander(self) -> tuple[int, int | None]:
        """Who commands, and since which term.

        Both change in the member's thread, and what is seen in between is neither.
        """
        return self._ballot.term, self._ballot.active

    def tell(self, message: FromMember) -> None:
        """Say something to the active coordinator; also from a signal handler."""
        self._outbox.append((self._generation, message))
        self._wake()

    def order(self, after: int, timeout_s: float) -> Order | None:
        """The newest command, if it is another than number `after`; waits for one."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._news.clear()
            if self._order is not None and self._order.number > after:
                return self._order
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._news.wait(min(left, 1.0))

    def ask(
        self, verb: StoreVerb, keys: tuple[str, ...], value: str, expected: str, timeout_s: float
    ) -> StoreAnswer:
        """An operation in the generation's store.

        Raises:
            GenerationOverError: nobody will answer any more.
            MalformedError: it is longer than a message may be.
        """
        request = next(self._requests)
        order = self._order
        commander = self._commander
        self.tell(StoreAsk(request, verb, keys, value, expected, timeout_s))
        while True:
            self._answered.clear()
            if (answer := self._answers.pop(request, None)) is not None:
                if isinstance(answer, MalformedError):
                    raise answer
                return answer
            if (
                self._order is not order or not self.commanded or self._commander != commander
            ):  # the store ends with its coordinator
                raise GenerationOverError(
                    "this generation's store has ended, or its coordinator has"
                )
            self._answered.wait(1.0)

    def _wake(self) -> None:
        try:
            os.write(self._wake_writes, b"x")
        except BlockingIOError:
            return  # it has a thousand reasons to wake up

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._ended or self._outbox:
                self._turn()
            self._cut_off()
        except Exception as error:
            log.exception("this rank is not protected any more: its member failed")
            with contextlib.suppress(Exception):
                self._broadcast(Goodbye(why=f"its member failed: {type(error).__name__}: {error}"))
            self._cut_off()

    def _turn(self) -> None:
        self._wait()
        for number, link in list(self._links.items()):
            self._receive(number, link)
        self._meet_those_that_came()
        self._look_at_active()
        self._look_whether_alone()
        self._look_whether_savers_are_alone()
        self._send_outbox()
        self._beat()
        if self._interrupter.tick():
            # a group that was being made had connections later; no order for a new one came since
            self._end_collectives()
        if self._interrupter.stuck:
            self._on_stuck()
        if (
            self._leave_at is not None
            and time.monotonic() > self._leave_at
            and self._order is not None
        ):
            assert isinstance(self._order.command, Leave)
            self.on_leave_late(self._order.command)

    def _meet_those_that_came(self) -> None:
        """Register with coordinators that were started in the place of dead ones."""
        for number, link in self._calling.answered():
            if number in self._links or self._ended:
                link.close()
                continue
            log.info("another coordinator stands by", coordinator=number)
            self._links[number] = link
            self._heard[number] = time.monotonic()
            self.cut_off_since = None
            self._send(link, self._hello)

    def _look_at_active(self) -> None:
        """Vote for another one where the active coordinator says nothing: it is stopped, or only
        the network to it is gone.
        """
        now = time.monotonic()
        patience = SILENT_BEATS * self._policy.beat_s
        if (
            now - self._turned_at > patience / 2
        ):  # this process stood still: what was said meanwhile was not heard yet
            self._heard = dict.fromkeys(self._heard, now)
        self._turned_at = now
        active = self._ballot.active
        if (
            active in self._links
            and self._ballot.connected
            and now - self._heard.setdefault(active, now) > patience
        ):
            log.warning("the active coordinator says nothing", coordinator=active)
            self._ballot.disconnected(active)

    def _look_whether_alone(self) -> None:
        """Too few are left here to elect anybody, so the others are gone, or go on without them:
        only a time-out would end a collective.
        """
        trains = isinstance(self._protected, Protected) and (
            self._order is None or isinstance(self._order.command, Resume)
        )
        if (
            self._in_vain_since is not None
            and trains
            and time.monotonic() - self._in_vain_since > self._policy.command_s
        ):
            log.warning("nobody is elected: out of the loop", seconds=self._policy.command_s)
            self._command(
                self._generation + 1, Stop(())
            )  # who commands after all hears that this rank was stopped already

    @property
    def _saves(self) -> bool:
        return self._order is not None and isinstance(self._order.command, Save)

    def _look_whether_savers_are_alone(self) -> None:
        """Savers wait for each other as long as somebody commands, who knows when to give up: their
        group has no time-out of its own.
        """
        now = time.monotonic()
        if not self._saves or self.commanded:
            self._commanded_at = now
        elif now - self._commanded_at > self._policy.command_s:
            log.warning("nobody commands a save: out of its group", seconds=self._policy.command_s)
            self._commanded_at = now
            self._end_collectives()
            if (
                self._left_save is not self._order
            ):  # once: what comes behind it is not to be interrupted
                self._left_save = self._order
                # it may wait for somebody who has not called: no connection's end brings it back
                self._interrupter.arm()

    def _wait(self) -> None:
        if any(link.buffered for link in self._links.values()):
            return
        waiting = select.poll()
        for link in self._links.values():
            waiting.register(link, select.POLLIN)
        waiting.register(self._wake_reads, select.POLLIN)
        # before a STOP all that can happen has a descriptor, but for beats: this thread takes no
        # time of the one that trains
        until_s = min(
            self._beat_at - time.monotonic(), self._policy.beat_s / 2
        )  # longer looks as if the process had stood still
        trains = self._order is None or isinstance(self._order.command, Resume)
        turn_s = max(0.0, until_s) if trains else TURN_S
        waiting.poll(math.ceil(turn_s * 1000))
        try:
            os.read(self._wake_reads, 4096)
        except BlockingIOError:
            return  # it was a link, or time

    def _receive(self, number: int, link: SocketLink) -> None:
        # An answer may find the connection gone, and what came over it before is in the link yet:
        # whoever heard an ACTIVE there would believe in a commander that nothing ever takes back.
        while self._links.get(number) is link:
            try:
                sent = link.receive(0.0)
                self._heard[number] = time.monotonic()
                self._take(number, link, sent)
            except LinkTimeoutError:
                return
            except (LinkClosedError, MalformedError) as error:
                self._drop(number, error)
                return

    def _drop(self, number: int, error: Exception) -> None:
        link = self._links.pop(number, None)
        if link is None:
            return
        link.close()
        self._ballot.disconnected(number)
        if not self._ended:
            log.warning("a coordinator is gone", coordinator=number, error=str(error))
        if not self._links:
            self._cut_off()

    def _cut_off(self) -> None:
        """Tell who waits that nobody will answer."""
        self.cut_off_since = time.monotonic()
        self._news.set()
        self._answered.set()

    def _take(self, number: int, link: SocketLink, sent: Sent) -> None:
        """One message."""
        message = sent.message
        header = sent.header
        if header.job != self._job:
            raise MalformedError(f"a message of job {header.job}")
        if isinstance(message, Vote):
            self._ballot.disconnected(
                number
            )  # whoever asks does not command: one that did has stood back
            if not self.commanded and self._in_vain_since is None:
                self._in_vain_since = time.monotonic()
            self._send(link, Voted(message.term, self._ballot.vote(message.term)))
        elif isinstance(message, Welcome):
            if message.active:
                self._hears(max(header.term, self._ballot.term), number)
                for other, address in message.coordinators.items():
                    if other not in self._links:
                        self._calling.call(other, address, self._wake)
        elif isinstance(message, Refused):
            self._protected = self._protected or message
            self._news.set()
        elif not self._hears(header.term, number):
            log.warning(
                "a word of a coordinator that commands no more",
                coordinator=number,
                term=header.term,
            )
        else:
            self._obey(header.generation, link, message)

    def _hears(self, term: int, number: int) -> bool:
        """A word of whoever commands; one that has just begun to is told what the one before was
        told. False: it commands no more.
        """
        before = self._commander
        if not self._ballot.hears(term, number):
            return False
        self._in_vain_since = None
        if before != self._commander:
            self._outbox.extendleft(reversed(self._said))
            self._said.clear()
            self._answered.set()  # what the one before was asked has no answer
        return True

    def _obey(self, generation: int, link: SocketLink, message: Message) -> None:
        """A word of the active coordinator."""
        if isinstance(message, Protected):
            self._protected = message
            self._news.set()
        elif isinstance(message, StoreAnswer):
            if generation == self._generation:
                self._answers[message.request] = message
                self._answered.set()
        elif isinstance(message, ShowStacks):
            self._send(link, Stacks(all_stacks()))
        elif isinstance(message, Command):
            self._command(generation, message)
        elif not isinstance(message, Active):
            raise MalformedError(f"{type(message).__name__} is no word of a coordinator")

    def _command(self, generation: int, command: Command) -> None:
        if isinstance(command, Stop | Resume) and generation > self._generation:
            self._generation = generation
        elif isinstance(command, Stop) or (
            generation != self._generation and not isinstance(command, Leave | Done)
        ):
            return  # of a generation that is over, or said again
        if isinstance(command, Leave):
            self._leave_at = time.monotonic() + LEAVE_S
        if isinstance(command, Stop | Leave):
            self._marks.hold()
            ended = self._end_collectives()
            self._interrupter.arm()
            log.warning(
                "out of all collectives",
                command=type(command).__name__,
                generation=self._generation,
                connections=ended,
            )
        self._said.clear()
        # last: whoever sees the order disarms the interrupter
        self._order = Order(next(self._numbers), self._generation, command)
        self._news.set()
        self._answered.set()

    def _end_collectives(self) -> int:
        """How many connections; a main thread that stays in one all the same is stuck, and stood in
        for.
        """
        try:
            return self._abort()
        except Exception:
            log.exception("collectives could not be ended")
            return 0

    def _send_outbox(self) -> None:
        while self._outbox:
            (generation, message) = self._outbox[0]
            active = self._ballot.active
            if active not in self._links and not (
                isinstance(message, Goodbye | StoreAsk) or self._ended
            ):
                return  # whoever takes over is told
            self._outbox.popleft()
            if isinstance(message, Goodbye):
                self._broadcast(message)
            elif active in self._links:
                if isinstance(message, StoreAsk):
                    self._send_to_store(self._links[active], message, generation)
                    continue
                self._said.append((generation, message))
                self._send(self._links[active], message, generation)

    def _send_to_store(self, link: SocketLink, asked: StoreAsk, generation: int) -> None:
        """Not said again to who takes over: the store goes with its coordinator.

        How long it is, is the program's doing: no bug here.
        """
        try:
            self._send(link, asked, generation)
        except MalformedError as error:
            self._answers[asked.request] = error
            self._answered.set()

    def _broadcast(self, message: FromMember) -> None:
        for link in list(self._links.values()):
            self._send(link, message)

    def _send(self, link: SocketLink, message: Message, generation: int | None = None) -> None:
        """`generation`: of what it says; by default the one that runs."""
        own = self._generation if generation is None else generation
        header = Header(self._job, own, self._ballot.term, f"rank {self._hello.rank}")
        try:
            link.send(Sent(header, message))
        except LinkClosedError as error:
            for number in [number for number, other in self._links.items() if other is link]:
                self._drop(number, error)

    def _beat(self) -> None:
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + self._policy.beat_s
        mark = self._marks.now
        moved = bytes_written() if self._saves else 0
        self._broadcast(
            Beat(
                mark.done,
                mark.ready,
                mark.phase,
                self._clues_now(),
                self.long_operation,
                self._parked,
                moved,
            )
        )

    def _clues_now(self) -> Mapping[str, int]:
        """None where groups are being made or destroyed right now."""
        try:
            return self._clues()
        except Exception:
            log.exception("no clues")
            return {}
