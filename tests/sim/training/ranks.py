"""A rank in virtual time: the real member over a simulated wire, and a loop in place of training.

What the main thread does at a fault is written down here as `park` does it, without files and
tensors.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import trio

from acpfs.training.interrupt import Interrupted, Interrupter
from acpfs.training.marks import Marks
from acpfs.training.member import TURN_S, Collectives, Member, Order
from acpfs.training.messages import (
    Gate,
    Goodbye,
    Hello,
    Leave,
    Message,
    Phase,
    Publish,
    Published,
    Refused,
    Resume,
    Save,
    Saved,
    SavedFile,
    Sent,
    Settle,
    Settled,
    Stop,
    Stopped,
    Trouble,
    TroubleKind,
    Voted,
)
from acpfs.training.policy import Policy
from acpfs.training.wire import SocketLink
from tests.sim.training.network import MemberEnd

if TYPE_CHECKING:
    from tests.sim.training.world import World

POLICY = Policy()
STEP_S = 0.3
UPDATE_S = 0.1
LOOK_S = 0.25


class _Interrupter:
    """Of a main thread that looks by itself."""

    def __init__(self, armed: Callable[[], object], in_c: Callable[[], bool]) -> None:
        self._armed = armed
        self._in_c = in_c
        self._since: float | None = None

    def arm(self) -> None:
        self._since = trio.current_time() if self._since is None else self._since
        self._armed()

    def disarm(self) -> None:
        self._since = None

    @property
    def stuck(self) -> bool:
        late = self._since is not None and trio.current_time() - self._since > POLICY.stuck_s
        return late and self._in_c()

    def tick(self) -> bool:
        return False


class _Member(Member):
    """Without a thread: the rank's task turns it."""

    broken: Callable[[str], object]
    turn_s = TURN_S
    highest = 0
    """The newest term that this member has voted in, or obeyed a command of."""

    def _take(self, number: int, link: SocketLink, sent: Sent) -> None:
        before = self._order
        super()._take(number, link, sent)
        if self._order is not before:
            self._is_of(sent.header.term)

    def _send(self, link: SocketLink, message: Message, generation: int | None = None) -> None:
        if isinstance(message, Voted) and message.granted:
            self._is_of(message.term)
        super()._send(link, message, generation)

    def _is_of(self, term: int) -> None:
        if term < self.highest:
            self.broken(f"rank {self._hello.rank} obeys term {term} behind term {self.highest}")
        self.highest = max(self.highest, term)

    def _wait(self) -> None:
        """The task has waited."""

    @property
    def turns_at(self) -> float:
        """When it has something to do by itself."""
        if self._order is not None and not isinstance(self._order.command, Resume):
            return trio.current_time() + self.turn_s
        return min(self._beat_at, trio.current_time() + self._policy.beat_s / 2)

    def register(self, links: Mapping[int, SocketLink]) -> None:
        self._links = dict(links)
        self._broadcast(self._hello)

    @property
    def refused(self) -> str | None:
        return self._protected.reason if isinstance(self._protected, Refused) else None

    @property
    def is_protected(self) -> bool:
        return self._protected is not None

    @property
    def is_over(self) -> bool:
        return self._ended and not self._outbox

    def say_goodbye(self, goodbye: Goodbye | None = None) -> None:
        self.tell(goodbye or Goodbye())
        self._ended = True

    @property
    def ended(self) -> bool:
        return self._ended

    def turn(self) -> None:
        self._turn()

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self._cut_off()


class Rank:
    """One."""

    def __init__(
        self,
        world: World,
        number: int,
        node: str,
        holders: Mapping[str, tuple[int, ...]],
        process: int = 0,
    ) -> None:
        """`process`: which of this rank's, one after the other."""
        self.world = world
        self.number = number
        self.node = node
        own = f" process {process}" if process else ""
        self._chance = random.Random(f"{world.seed} rank {number}{own}")
        self.marks = Marks()
        self.holders = holders
        self.wake = trio.Event()
        self.paused_until = 0.0
        self.is_frozen = False
        self.ended: str | None = None
        """How, in words."""
        self.published: int | None = None
        self.trouble_at = -1
        """The step in which it meets an exception of its own."""
        pid = 1000 * (process + 1) + number
        first = process == 0
        hello = Hello(number, world.size, node, pid, 1, Gate.EXPLICIT, holders, first=first)
        self.member = _Member(
            world.job,
            hello,
            self.marks,
            Collectives(self.ring),
            cast("Interrupter", _Interrupter(self.ring, lambda: self._is_in_c)),
            POLICY,
            on_stuck=self._stand_in,
        )
        self.member.broken = world.oracles.outdated
        self.in_c_until = 0.0
        """So long the main thread comes out of nothing."""
        self._is_in_c = False
        self._is_stood_in = False
        self._nursery: trio.Nursery
        self.links: dict[int, MemberEnd] = {}
        self.scope = trio.CancelScope()
        self._handled = 0

    def ring(self) -> int:
        """Something is new for the main thread or the member."""
        self.wake.set()
        self.wake = trio.Event()
        return 0

    def note(self, text: str) -> None:
        self.world.note(f"rank {self.number}", text)

    # -- harm

    def kill(self) -> None:
        self.ended = "killed"
        self.scope.cancel()

    def pause(self, seconds: float) -> None:
        """For good, where it is longer than a history."""
        self.is_frozen = self.is_frozen or seconds >= self.world.latest_s
        self.paused_until = max(self.paused_until, trio.current_time() + seconds)

    def stay_in_c(self, until: float) -> None:
        self.in_c_until = until

    def meet_trouble(self, step: int) -> None:
        self.trouble_at = step

    # -- life

    async def run(self) -> None:
        """Both threads, until it has ended or is killed."""
        with self.scope:
            async with trio.open_nursery() as self._nursery:
                nursery = self._nursery
                nursery.start_soon(self._turn_member)
                try:
                    await self._train()
                except Interrupted as interrupted:
                    self.note(f"out of the loop: {interrupted}")
                    await self._park_unless_stood_in()
                if self.member.ended:
                    self.ended = self.ended or "the end of its loop"
                else:
                    self.member.say_goodbye()
                    self.ring()
                    self.ended = self.ended or "the end of its loop"
                while not self.member.is_over:
                    await self._until(lambda: self.member.is_over, LOOK_S)
                nursery.cancel_scope.cancel()
        self._is_over()

    def _is_over(self) -> None:
        self.note(f"has ended: {self.ended or 'killed'}")
        self.member.close()
        for link in self.links.values():
            link.ends.cut(loses=False)

    async def _turn_member(self) -> None:
        while True:
            await self._awake()
            self.member.turn()
            coming = [
                link.ends.back.next_at for link in self.links.values() if not link.ends.is_cut
            ]
            until = min([self.member.turns_at, *(at for at in coming if at > trio.current_time())])
            wake = self.wake
            with trio.move_on_at(until):
                await wake.wait()

    async def _awake(self) -> None:
        """A stopped process does nothing."""
        await trio.lowlevel.checkpoint()
        while trio.current_time() < self.paused_until:  # noqa: ASYNC110  # it may be stopped again
            await trio.sleep_until(self.paused_until)

    async def _until(self, there: Callable[[], bool], most_s: float) -> bool:
        """Wait for something."""
        deadline = trio.current_time() + most_s
        while True:
            await self._awake()
            if there():
                return True
            if trio.current_time() >= deadline:
                return False
            wake = self.wake
            with trio.move_on_at(min(deadline, trio.current_time() + LOOK_S)):
                await wake.wait()

    async def _pass(self, seconds: float) -> None:
        """Time of work; a stop ends it."""
        if await self._until(lambda: self.member.stopped, seconds):
            raise Interrupted("stopped")

    # -- the loop

    async def _train(self) -> None:
        if not await self._until(
            lambda: self.member._protected is not None or self.member.stopped, POLICY.protected_s
        ):
            self.ended = "no protection: not all came"
            return
        if self.member.refused is not None:
            self.ended = f"refused: {self.member.refused}"
            return
        while self.marks.now.done < self.world.steps:
            await self._pass(self._chance.uniform(0.1, STEP_S))
            if self.marks.now.done + 1 == self.trouble_at:
                self.note("meets an exception of its own")
                self.member.tell(Trouble(TroubleKind.ERROR, "its own"))
                self.ring()
                self.world.has_trouble()
                raise Interrupted("its own exception")
            step = self.marks.ready()
            await self._gate(step)
            await self._in_c()
            self._begin()
            await self._until(lambda: False, self._chance.uniform(0.0, UPDATE_S))
            self.marks.end()

    async def _gate(self, step: int) -> None:
        """A collective: the connection to a process that has ended tells so, to one of a stopped
        one nothing.
        """
        while not self.world.all_are_ready(step):
            await self._until(lambda: self.member.stopped or self.world.all_are_ready(step), LOOK_S)
            if self.world.all_are_ready(step):
                return
            if self.member.stopped:
                raise Interrupted("in the gate")
            if self.world.somebody_left_before(step):
                self.member.tell(Trouble(TroubleKind.COLLECTIVE, "a peer is gone"))
                self.ring()
                raise Interrupted("a peer is gone")

    def _begin(self) -> None:
        """The update, unless it may not begin."""
        if not self._is_stood_in:
            self.marks.begin()
            return
        with contextlib.suppress(AssertionError):  # it found the marks where the other thread is
            self.marks.begin()
        self.world.oracles.holds(f"rank {self.number} goes on though another thread parked it")

    async def _in_c(self) -> None:
        """A call that nothing ends, and from which the main thread comes back some time."""
        self._is_in_c = trio.current_time() < self.in_c_until
        await trio.sleep_until(self.in_c_until)
        self._is_in_c = False

    # -- a fault

    def _stand_in(self) -> None:
        """Another thread does what the main thread would."""
        if not self._is_stood_in:
            self._is_stood_in = True
            self.world.counts["stand-ins"] += 1
            self.note("another thread stands in for the main thread")
            self._nursery.start_soon(self._park_in_its_place)

    async def _park_in_its_place(self) -> None:
        await self._park()
        if not self.member.ended:
            self.member.say_goodbye()
            self.ring()
        while not self.member.is_over:
            await self._until(lambda: self.member.is_over, LOOK_S)
        self._nursery.cancel_scope.cancel()

    async def _park_unless_stood_in(self) -> None:
        if self._is_stood_in:  # the process ends by the other thread
            await trio.sleep_forever()
        self.member._interrupter.disarm()
        await self._park()

    async def _park(self) -> None:
        commanded_at = trio.current_time()
        while True:
            order = self.member.order(self._handled, 0.0)
            if order is not None:
                self._handled = order.number
                commanded_at = trio.current_time()
                self.note(f"obeys {order.command}")
                if isinstance(order.command, Leave):
                    self.ended = f"told to leave: {order.command.text}"
                    return
                await self._obey(order)
                continue
            if self.member.commanded:
                commanded_at = trio.current_time()
            elif trio.current_time() - commanded_at > POLICY.command_s:
                self.ended = "cut off: there is no coordinator"
                return
            await self._until(lambda: self.member.order(self._handled, 0.0) is not None, LOOK_S)

    def _void(self, order: Order) -> bool:
        return self.member.order(order.number, 0.0) is not None

    async def _obey(self, order: Order) -> None:
        command = order.command
        mark = self.marks.now
        if isinstance(command, Stop):
            self.member.tell(Stopped(mark.done, mark.ready, mark.phase, (), None, self.published))
        elif isinstance(command, Settle):
            self.world.oracles.settles(self.number, order.generation, command.step)
            if (mark.done, mark.ready, mark.phase) == (command.step - 1, command.step, Phase.READY):
                self.marks.begin(settling=True)
                self.marks.end()
            done = self.marks.now.done
            self.member.tell(Settled(done, {shard: f"{shard}@{done}" for shard in self.holders}))
        elif isinstance(command, Save):
            await self._save(order, command)
        elif isinstance(command, Publish):
            self.world.oracles.publishes(self.number, command)
            self.published = command.manifest.step
            self.member.tell(Published(command.name))
        self.ring()

    async def _save(self, order: Order, command: Save) -> None:
        if self.number not in command.savers:
            return
        self.world.oracles.saves(self.number, order.generation, command, self.marks.now.done)
        takes_s = self._chance.uniform(0.1, self.world.save_s)
        if await self._until(lambda: self._void(order), takes_s):
            return
        if self._chance.random() < self.world.cannot_save:
            self.member.tell(Trouble(TroubleKind.SAVE, "no room"))
            return
        mine = [shard for shard, rank in command.cover.items() if rank == self.number]
        self.member.tell(
            Saved(tuple(SavedFile(f"{command.directory}/{shard}", 1, "00") for shard in mine))
        )

    @property
    def is_protected(self) -> bool:
        return self.member.is_protected

    @property
    def is_cut_off(self) -> bool:
        return self.member.cut_off_since is not None

    @property
    def is_waited_for(self) -> bool:
        """Whether it has to end; one that stands still for good cannot."""
        return self.ended is None and not self.is_frozen
