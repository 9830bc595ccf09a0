"""One history of a job whose ranks are replaced: the real crew, processes that come and go, and
coordinators that are started anew.

Where a rank's state comes from is a word here: whoever of a generation has done most has it for
all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import trio

from acpfs.training.calling import Calling
from acpfs.training.coordinator.server import Settings
from acpfs.training.coordinator.successors import Successors
from acpfs.training.interrupt import Interrupted
from acpfs.training.member import Order
from acpfs.training.messages import (
    Done,
    Finished,
    Goodbye,
    Leave,
    Resume,
    Running,
    Stop,
    Stopped,
    Trouble,
    TroubleKind,
)
from acpfs.training.wire import SocketLink
from tests.sim.training.network import MemberEnd
from tests.sim.training.ranks import LOOK_S, POLICY, UPDATE_S, Rank
from tests.sim.training.world import COORDINATORS, World, _Coordinator

if TYPE_CHECKING:
    from collections.abc import Mapping

STARTS_S = 5.0
"""So long a launcher takes, at most, until a process is there in the place of one that has
ended.
"""
CALLS_S = 0.5
LATEST_S = 300.0
"""Behind the last fault: coordinators that wait for somebody who never comes do so longer."""
OWN_MAX = 2
"""Exceptions of a program's own: three in one update and the job is given up."""


class _Calling(Calling):
    """In a task of the world."""

    def __init__(self, process: Process) -> None:
        super().__init__(None)
        self._process = process

    def call(self, number: int, address: str, wake: Callable[[], object]) -> None:
        if (number, address) not in self._called:
            self._called.add((number, address))
            self._process.world.meet(self._process, number, address, self._answered.append)


class _Successors(Successors):
    """The process that is started is one here."""

    world: CrewWorld

    def _start(self, number: int, peers: list[str]) -> None:
        self.world.start_coordinator(number)


class Process(Rank):
    """One process of a rank."""

    world: CrewWorld

    def __init__(self, world: CrewWorld, number: int, node: str, count: int) -> None:
        super().__init__(world, number, node, {}, count)
        self.member._calling = _Calling(self)
        self.member.turn_s = LOOK_S
        self.count = count
        self.generation = 0
        """In which it makes updates."""
        self.has_state = False

    def note(self, text: str) -> None:
        self.world.note(f"rank {self.number}.{self.count}", text)

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                self.member.parked = True
                nursery.start_soon(self._turn_member)
                await self._serve()
                self.member.say_goodbye(Goodbye(all_done=self.ended == "all is done"))
                self.ring()
                while not self.member.is_over:
                    await self._until(lambda: self.member.is_over, LOOK_S)
                nursery.cancel_scope.cancel()
        self._is_over()

    def _park_at(self, parked: bool) -> None:
        self.member.parked = parked
        self.ring()

    def _has_news(self) -> bool:
        return self.member.order(self._handled, 0.0) is not None

    async def _serve(self) -> None:
        def is_registered() -> bool:
            return self.member.is_protected or self.member.stopped

        if not await self._until(is_registered, POLICY.protected_s):
            self.ended = "no protection: not all came"
            return
        if self.member.refused is not None:
            self.ended = f"refused: {self.member.refused}"
            return
        while self.ended is None:
            order = await self._next()
            if order is None:
                self.ended = "cut off: there is no coordinator"
                return
            self._handled = order.number
            self.note(f"obeys {order.command} of generation {order.generation}")
            await self._obey(order)

    async def _obey(self, order: Order) -> None:
        command = order.command
        mark = self.marks.now
        if isinstance(command, Stop):
            self._park_at(True)
            self.member.tell(Stopped(mark.done, mark.ready, mark.phase))
            self.ring()
        elif isinstance(command, Resume):
            self.world.enters(self, order.generation)
            try:
                await self._enter(order.generation)
            except Interrupted as interrupted:
                self.note(f"out of the loop: {interrupted}")
        elif isinstance(command, Done):
            self.world.is_told_done(self)
            self.ended = "all is done"
        elif isinstance(command, Leave):
            self.ended = f"told to leave: {command.text}"

    async def _next(self) -> Order | None:
        commanded_at = trio.current_time()
        while True:
            if (order := self.member.order(self._handled, 0.0)) is not None:
                return order
            if self.member.commanded:
                commanded_at = trio.current_time()
            elif trio.current_time() - commanded_at > POLICY.command_s:
                return None
            await self._until(self._has_news, LOOK_S)

    async def _enter(self, generation: int) -> None:
        self.generation = generation
        await self._together(lambda: self.world.group_of(generation) is not None)
        self.marks.resume(self.world.step_of(generation))
        self.has_state = True
        updates = 0
        while self.marks.now.done < self.world.steps:
            if await self._until(self._has_news, self._chance.uniform(0.1, 0.3)):
                raise Interrupted("stopped")
            if self.marks.now.done + 1 == self.trouble_at:
                self.trouble_at = -1
                self._fails(TroubleKind.ERROR, "its own exception")
            await self._update(generation)
            updates += 1
            if updates == 1:
                self._park_at(False)
                self.member.tell(Running())
                self.ring()
        self._park_at(False)
        self.member.tell(Finished())
        self.ring()

    async def _update(self, generation: int) -> None:
        step = self.marks.ready()
        await self._together(lambda: self.world.is_ready(generation, step))
        self.marks.begin()
        await self._until(lambda: False, self._chance.uniform(0.0, UPDATE_S))
        self.marks.end()

    async def _together(self, there: Callable[[], bool]) -> None:
        """A collective: it ends where a process of its group has; one of a stopped process only
        waits.
        """
        while not there():
            await self._until(lambda: self._has_news() or there(), LOOK_S)
            if there():
                return
            if self._has_news():
                raise Interrupted("in a collective")
            if self.world.misses_somebody(self.generation):
                self._fails(TroubleKind.COLLECTIVE, "a peer is gone")

    def _fails(self, kind: TroubleKind, text: str) -> None:
        self._park_at(True)
        if not self._has_news():
            self.member.tell(Trouble(kind, text))
            self.ring()
        raise Interrupted(text)


class CrewWorld(World):
    """`ranks` has the newest process of each."""

    def __init__(
        self, seed: int, directory: Path, profile: str, without: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(seed, directory, profile, without)
        self._entered: dict[int, dict[int, Process]] = {}
        """Generation → who runs in it."""
        self._steps: dict[int, int] = {}
        self.latest_s = LATEST_S
        self._lives = 0
        self._own = 0
        self._is_done = False
        self.over: set[int] = set()
        """Ranks that nobody starts again."""

    def _make(self) -> None:
        self.ranks = [Process(self, rank, f"node{rank % 2}", 0) for rank in range(self.size)]
        self.coordinators = [self._coordinator(number) for number in range(COORDINATORS)]

    def _coordinator(self, number: int) -> _Coordinator:
        successors = _Successors((), COORDINATORS)
        successors.world = self
        first = number == 0 and not self._lives
        made = _Coordinator(
            Settings(
                self.job,
                number,
                self._directory,
                f"elsewhere{number}",
                first=first,
                tls=False,
                replaces=True,
                coordinators=COORDINATORS,
            ),
            self,
            successors,
        )
        self._lives += 1
        made.address = f"coordinator:{self._lives}"
        return made

    def start_coordinator(self, number: int) -> None:
        """In the place of one that is gone."""
        if not self.coordinators[number].alive:
            self.note("coordinators", f"another number {number} is started")
            self.counts["coordinators started again"] += 1
            self.coordinators[number] = self._coordinator(number)
            self._nursery.start_soon(self.coordinators[number].live)

    # -- processes

    def _begin(self, rank: Rank) -> None:
        self._nursery.start_soon(self._launch, rank.number)

    async def _launch(self, number: int) -> None:
        """As a launcher: a process, and another one in its place until one has ended in order."""
        chance = random.Random(f"{self.seed} launcher {number}")
        while True:
            process = cast("Process", self.ranks[number])
            if not any(one.alive for one in self.coordinators):
                self.note("launcher", f"rank {number} finds nobody: the job is over")
                if not self._is_done:
                    self.oracles.lives(
                        f"all coordinators have left, and rank {number} is not through"
                    )
                self.counts["processes that found nobody"] += 1
                break
            self._register(process)
            await process.run()
            if process.ended == "all is done":
                break
            await trio.sleep(chance.uniform(0.2, STARTS_S))
            self.counts["processes started again"] += 1
            self.ranks[number] = Process(self, number, process.node, process.count + 1)
        self.over.add(number)

    def meet(
        self,
        process: Process,
        number: int,
        address: str,
        answered: Callable[[tuple[int, SocketLink]], object],
    ) -> None:
        """A process calls a coordinator that was started later."""

        async def call() -> None:
            await trio.sleep(self._calls.uniform(0.0, CALLS_S))
            other = self.coordinators[number]
            if other.alive and other.address == address and process.ended is None:
                answered((number, cast("SocketLink", self._connected_to(process, other))))
                self.counts["coordinators met later"] += 1
                process.ring()

        self._nursery.start_soon(call)

    @property
    def _calls(self) -> random.Random:
        return random.Random(f"{self.seed} call {len(self.connections)}")

    def _connected_to(self, rank: Rank, coordinator: _Coordinator) -> MemberEnd:
        ends = self.connect(("rank", rank.number, coordinator.number))
        ends.back.on_news = rank.ring
        coordinator.accept(("rank", rank.number, len(self.connections)), ends)
        rank.links[coordinator.number] = MemberEnd(ends)
        return rank.links[coordinator.number]

    def _register(self, rank: Rank) -> None:
        links: Mapping[int, SocketLink] = {
            one.number: cast("SocketLink", self._connected_to(rank, one))
            for one in self.coordinators
            if one.alive
        }
        rank.member.register(links)

    # -- what a loop asks

    def enters(self, process: Process, generation: int) -> None:
        """Told to run in this generation."""
        entered = self._entered.setdefault(generation, {})
        known = entered.setdefault(process.number, process)
        if known is not process:
            self.oracles.crowds(
                f"processes {known.count} and {process.count} of rank {process.number} are both "
                f"told to run in generation {generation}"
            )

    def group_of(self, generation: int) -> dict[int, Process] | None:
        """Who runs in this generation, once all do."""
        entered = self._entered[generation]
        return entered if len(entered) == self.size else None

    def step_of(self, generation: int) -> int:
        """Where it goes on: at what the furthest of its processes has."""
        has = [one.marks.now.done for one in self._entered[generation].values() if one.has_state]
        return self._steps.setdefault(generation, max(has, default=0))

    def is_ready(self, generation: int, step: int) -> bool:
        group = self.group_of(generation)
        assert group is not None
        return all(
            one.generation == generation and max(one.marks.now.ready, one.marks.now.done) >= step
            for one in group.values()
        )

    def misses_somebody(self, generation: int) -> bool:
        """Whether a process of this generation has ended, or is out of it."""
        return any(
            one.ended is not None or one.generation != generation
            for one in self._entered[generation].values()
        )

    def is_told_done(self, process: Process) -> None:
        self._is_done = True
        short = [one.number for one in self.ranks if one.marks.now.done < self.steps]
        fresh = [one.number for one in self.ranks if not cast("Process", one).has_state]
        if set(short) - set(fresh):
            self.oracles.ends_early(
                f"rank {process.number} is told so, and {short} are not through"
            )

    # -- the history

    async def _harm(self) -> None:
        await trio.sleep(self._chance.uniform(0.3, 4.0))
        for _ in range(self._chance.randint(1, 6)):
            harms = (
                *(self._kill, self._kill, self._stop_rank, self._cut, self._hold, self._part),
                *(self._kill_coordinator, self._silence_coordinator, self._own_exception),
                self._kill_unheard,
            )
            self._chance.choice(harms)()
            await trio.sleep(self._chance.choice((0.0, 0.3, 3.0, 30.0)) * self._chance.random())

    def _stop_rank(self) -> None:
        rank = self._chance.choice(self.ranks)
        for_s = self._chance.uniform(0.5, 30.0)
        self._act(f"rank {rank.number} stands still for {for_s:.1f} s", lambda: rank.pause(for_s))

    def _kill_unheard(self) -> None:
        """As with a node that hangs: the process in its place calls before the end of this one is
        heard.
        """
        rank = self._chance.choice(self.ranks)
        for_s = self._chance.uniform(3.0, 8.0)
        text = f"rank {rank.number} is not heard"
        self._silence(text, for_s, lambda who: who[:2] == ("rank", rank.number))
        self._kill_rank(rank)

    def _kill_coordinator(self, *, first: bool = False) -> None:
        if all(one.alive for one in self.coordinators):
            super()._kill_coordinator(first=first)

    def _own_exception(self) -> None:
        if self._own < OWN_MAX:
            self._own += 1
            super()._own_exception()

    def _goes_on(self) -> bool:
        return bool(self._late())

    def _late(self) -> list[int]:
        return sorted(set(range(self.size)) - self.over)

    def _count(self) -> None:
        self.counts["jobs that trained on to the end"] += not self._late()
        self.counts["generations"] += len(self._steps)
        self.counts["take-overs"] += len(self.oracles.acts.keys() - {1})
