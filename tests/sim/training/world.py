"""One history of a job: real coordinators, real members, and between them a wire that a seed decides about, in virtual time."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import trio

from acpfs.training import member as member_module
from acpfs.training.coordinator.connections import Connected, Connection
from acpfs.training.coordinator.server import REDIAL_S, Coordinator, Settings
from acpfs.training.coordinator.witness import Claimant, Witness, owner_after
from acpfs.training.messages import Gate, Header, Hello, Message, Refused, Sent, Watch
from acpfs.training.wire import LinkClosedError, SocketLink, TrioLink
from tests.sim.training.network import Ends, MemberEnd, TrioEnd
from tests.sim.training.oracles import BrokenRuleError, Oracles
from tests.sim.training.ranks import Rank

FAULTS_UNTIL_S = 12.0
LATEST_S = 6000.0
"""Virtual time in which everybody has trained on to the end, or has been told otherwise."""
HOLDS_S = (0.5, 30.0)
FOR_GOOD = 0.3
"""Of stopped ranks, which never go on."""
COORDINATORS = 3
ELECTIONS = 0.4
"""Of histories, which begin with the end of whoever commands."""


class _Time:
    """What the member takes for the module `time`."""

    @staticmethod
    def monotonic() -> float:
        return trio.current_time()


class _Witness(Witness):
    """The directory answers late, or not at all."""

    def __init__(self, directory: Path, claim_s: float, chance: random.Random) -> None:
        super().__init__(directory, claim_s)
        self._place, self._most_s, self._chance = directory, claim_s, chance

    async def owner(self, claimant: Claimant, generation: int) -> Claimant | None:
        takes_s = self._chance.uniform(0.0, 1.2 * self._most_s)
        await trio.sleep(min(takes_s, self._most_s))
        if takes_s > self._most_s:
            return None
        return owner_after(self._place, generation, claimant)


class _Connected(Connected):
    """Tells what is said to members."""

    oracles: Oracles

    def to_members(
        self, message: Message, ranks: Iterable[int] | None = None, term: int | None = None
    ) -> None:
        own = self._dated.term if term is None else term
        self.oracles.says(self.number, own, self._dated.generation, message)
        super().to_members(message, ranks, term)

    number = -1


class _Coordinator(Coordinator):
    """Without a socket."""

    def __init__(self, settings: Settings, world: World) -> None:
        super().__init__(settings)
        self.world, self.number = world, settings.number
        self.ends: dict[object, Ends] = {}
        made = _Connected(settings.job, settings.number, self._phases)
        made.oracles, made.number = world.oracles, settings.number
        self._connected = self._elections._connected = made
        self._witness = self._elections._witness = world.witness
        self.address = f"coordinator:{settings.number}"
        self.alive = False

    def _dial(self) -> None:
        """Who calls whom is fixed here."""

    async def live(self) -> None:
        """Until it is killed, or has no more to do."""
        self.alive = True
        async with trio.open_nursery() as self._nursery:
            if self._settings.first:
                self._elections.begin()
            for task in (self._tick, self._tell_active, self._end_unused, self._elections.run):
                self._nursery.start_soon(task)
            for other in range(self.number):
                self._nursery.start_soon(self._call, other)
        self.alive = False
        self.world.note(f"coordinator {self.number}", "has ended")
        for ends in self.ends.values():
            ends.cut(loses=False)

    def knows(self, rank: int) -> bool:
        return rank in self._phases.hellos

    def kill(self) -> None:
        self._nursery.cancel_scope.cancel()

    def accept(self, who: object, ends: Ends) -> None:
        self.ends[who] = ends
        if self._nursery.cancel_scope.cancel_called:  # it was killed at this very moment
            ends.cut()
            return
        self._nursery.start_soon(self._serve_end, TrioEnd(ends, ends.there, ends.back))

    async def _serve_end(self, end: TrioEnd) -> None:
        connection = Connection(cast("TrioLink", end))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.send_all)
            try:
                first = await connection.receive()
                await self._admitted(connection, first, "simulated")
            except LinkClosedError:
                pass
            connection.cut()

    async def _call(self, number: int) -> None:
        while True:
            other = self.world.coordinators[number]
            if other.alive:
                ends = self.world.connect(("coordinators", self.number, number))
                self.ends[number] = ends
                other.accept(self.number, ends)
                connection = Connection(cast("TrioLink", TrioEnd(ends, ends.back, ends.there)))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.send_all)
                    connection.post(
                        self._connected.framed(Watch(self._settings.node, self.number, ""))
                    )
                    await self._listen_to(connection, number)
                    connection.cut()
            await trio.sleep(REDIAL_S)


class World:
    """One history."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.seed, self.job = seed, "job"
        self._chance = random.Random(f"{seed} world")
        self.size = self._chance.choice((2, 3, 4, 4, 6))
        self.steps = self._chance.randint(5, 40)
        self.cannot_save = self._chance.choice((0.0, 0.0, 0.3))
        self.trace: list[str] = []
        self.counts = Counter[str]()
        """Of places that histories come to."""
        self.oracles = Oracles(lambda rank: self.ranks[rank].marks.now.done)
        (directory / "witness").mkdir()
        self.witness = _Witness(directory / "witness", 2.0, random.Random(f"{seed} witness"))
        self.connections: list[tuple[object, Ends]] = []
        self._directory = directory
        self.ranks: list[Rank] = []
        self.coordinators: list[_Coordinator] = []

    def _make(self) -> None:
        """In trio, whose clock they read."""
        shards = self._shards()
        self.ranks = [
            Rank(
                self,
                rank,
                f"node{rank % 2}",
                {shard: held for shard, held in shards.items() if rank in held},
            )
            for rank in range(self.size)
        ]
        self.coordinators = [
            _Coordinator(
                Settings(
                    self.job,
                    number,
                    self._directory,
                    f"elsewhere{number}",
                    first=number == 0,
                    tls=False,
                    witness=self._directory / "witness",
                    coordinators=COORDINATORS,
                ),
                self,
            )
            for number in range(COORDINATORS)
        ]

    def _shards(self) -> dict[str, tuple[int, ...]]:
        if self.size % 2 or self._chance.random() < 0.5:
            return {"all": tuple(range(self.size))}
        half = self.size // 2
        return {f"part{n}": (n, n + half) for n in range(half)}

    # -- what parts ask

    def note(self, who: str, what: str) -> None:
        self.trace.append(f"{trio.current_time():9.3f}  {who:14} {what}")

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]

    def all_are_ready(self, step: int) -> bool:
        """Whether the gate of this update opens. Who is dead was ready, or will never be."""
        return all(max(rank.marks.now.ready, rank.marks.now.done) >= step for rank in self.ranks)

    def somebody_left_before(self, step: int) -> bool:
        """Whether a process has ended whose gradients of this update never come."""
        return any(rank.ended is not None and rank.marks.now.ready < step for rank in self.ranks)

    def connect(self, who: object) -> Ends:
        ends = Ends(random.Random(f"{self.seed} {who} {len(self.connections)}"))
        self.connections.append((who, ends))
        return ends

    # -- the history

    async def run(self) -> None:
        """To its end.

        Raises:
            BrokenRuleError: what must not be was.
        """
        self._make()
        before = vars(member_module)["time"]
        setattr(member_module, "time", _Time)  # noqa: B010  # it has no other clock
        try:
            async with trio.open_nursery() as self._nursery:
                nursery = self._nursery
                for coordinator in self.coordinators:
                    nursery.start_soon(coordinator.live)
                await trio.sleep(0.01)
                for rank in self.ranks:
                    self._register(rank)
                    nursery.start_soon(rank.run)
                await self._harm()
                with trio.move_on_at(LATEST_S):
                    while any(rank.is_waited_for for rank in self.ranks):  # noqa: ASYNC110
                        await trio.sleep(1.0)
                late = [rank.number for rank in self.ranks if self._must_end(rank)]
                if late:
                    self.oracles.lives(f"ranks {late} neither train on nor are told anything")
                self._count()
                nursery.cancel_scope.cancel()
        finally:
            setattr(member_module, "time", before)  # noqa: B010

    def _must_end(self, rank: Rank) -> bool:
        """One to which no coordinator is left waits in a collective as it would without acpfs."""
        waits = any(other.is_frozen for other in self.ranks) and rank.is_cut_off
        return rank.is_waited_for and not waits

    def _count(self) -> None:
        for rank in self.ranks:
            self.counts[f"ranks: {str(rank.ended).partition(':')[0]}"] += 1
        self.counts["take-overs"] += len(self.oracles.acts.keys() - {1})
        self.counts["second faults"] += max(0, len(self.oracles.steps) - 1)
        self.counts["checkpoints"] += len(self.oracles.published)
        self.counts["claims refused"] += sum("split" in str(rank.ended) for rank in self.ranks)

    def _register(self, rank: Rank) -> None:
        links: dict[int, SocketLink] = {}
        for coordinator in self.coordinators:
            ends = self.connect(("rank", rank.number, coordinator.number))
            ends.back.on_news = rank.ring
            coordinator.accept(("rank", rank.number), ends)
            rank.links[coordinator.number] = MemberEnd(ends)
            links[coordinator.number] = cast("SocketLink", rank.links[coordinator.number])
        rank.member.register(links)

    async def _harm(self) -> None:
        await trio.sleep(self._chance.uniform(0.3, 2.0))
        if self._chance.random() < ELECTIONS:  # nobody commands, and no standby hears of another
            self._chance.choice((self._silence_coordinator, self._kill_coordinator))(first=True)
            self._chance.choice((self._apart, self._hold, int))()
        for _ in range(self._chance.randint(0, 5)):
            await trio.sleep(self._chance.choice((0.0, 0.02, self._chance.uniform(0, 3.0))))
            harm = self._chance.choice(
                (
                    *(self._kill, self._kill, self._stop_rank, self._cut, self._hold, self._part),
                    *(self._kill_coordinator, self._silence_coordinator, self._apart),
                    *(self._own_exception, self._other_job),
                )
            )
            harm()

    def _kill(self) -> None:
        rank = self._chance.choice(self.ranks)
        if rank.ended is None:
            self.note("harm", f"rank {rank.number} is killed")
            rank.ended = "killed"
            rank.scope.cancel()

    def _stop_rank(self) -> None:
        rank, for_s = self._chance.choice(self.ranks), self._chance.uniform(*HOLDS_S)
        if self._chance.random() < FOR_GOOD and rank.ended is None:
            self.note("harm", f"rank {rank.number} stands still for good")
            rank.is_frozen = True
            for_s = LATEST_S
        else:
            self.note("harm", f"rank {rank.number} stands still for {for_s:.1f} s")
        rank.paused_until = max(rank.paused_until, trio.current_time() + for_s)

    def _cut(self) -> None:
        who, ends = self._chance.choice(self.connections)
        self.note("harm", f"cut: {who}")
        ends.cut()

    def _hold(self) -> None:
        (who, ends), for_s = self._chance.choice(self.connections), self._chance.uniform(*HOLDS_S)
        self.note("harm", f"silent for {for_s:.1f} s: {who}")
        ends.hold(trio.current_time() + for_s)

    def _part(self) -> None:
        """The network between two nodes: coordinators 0 and 2 are with even ranks."""
        for_s = self._chance.uniform(*HOLDS_S)
        self.note("harm", f"two sides for {for_s:.1f} s")
        for who, ends in self.connections:
            assert isinstance(who, tuple)
            if who[1] % 2 != who[2] % 2:
                ends.hold(trio.current_time() + for_s)

    def _apart(self) -> None:
        """Coordinators hear nothing of each other."""
        for_s = self._chance.uniform(*HOLDS_S)
        self.note("harm", f"coordinators are apart for {for_s:.1f} s")
        for who, ends in self.connections:
            if isinstance(who, tuple) and who[0] == "coordinators":
                ends.hold(trio.current_time() + for_s)

    def _silence_coordinator(self, *, first: bool = False) -> None:
        """As one that is stopped: nothing comes to it or from it, and then all of it does."""
        number = 0 if first else self._chance.randrange(COORDINATORS)
        for_s = self._chance.uniform(*HOLDS_S)
        self.note("harm", f"coordinator {number} is silent for {for_s:.1f} s")
        for who, ends in self.connections:
            assert isinstance(who, tuple)
            if number == who[2] or who[:2] == ("coordinators", number):
                ends.hold(trio.current_time() + for_s)

    def _kill_coordinator(self, *, first: bool = False) -> None:
        coordinator = self.coordinators[0 if first else self._chance.randrange(COORDINATORS)]
        if coordinator.alive:
            self.note("harm", f"coordinator {coordinator.number} is killed")
            coordinator.kill()

    def _other_job(self) -> None:
        """The first process of a rank of a job that has the same name."""
        alive = [coordinator for coordinator in self.coordinators if coordinator.alive]
        if alive:
            self._nursery.start_soon(self._call_as_another_job, self._chance.choice(alive))

    async def _call_as_another_job(self, coordinator: _Coordinator) -> None:
        number = self._chance.randrange(self.size)
        rank = self.ranks[number]
        known = self.coordinators[coordinator.number].knows(number)
        ends = self.connect(("another job", number, coordinator.number))
        coordinator.accept(("another job", number), ends)
        hello = Hello(number, self.size, "far", 7, 7, Gate.EXPLICIT, rank.holders, first=True)
        self.note("another job", f"rank {number} registers with coordinator {coordinator.number}")
        end = TrioEnd(ends, ends.back, ends.there)
        try:
            ends.there.put(Sent(Header(self.job, 0, 0, f"rank {number}"), hello))
            with trio.move_on_after(60.0):
                answer = (await end.receive()).message
                self.counts["other jobs refused"] += isinstance(answer, Refused)
                if known and not (isinstance(answer, Refused) and answer.is_other_job):
                    self.oracles.mixes(f"rank {number} of another job is answered {answer}")
        except LinkClosedError:
            return  # that coordinator has ended, or was cut off

    def _own_exception(self) -> None:
        rank = self._chance.choice(self.ranks)
        rank.trouble_at = rank.marks.now.done + 1


def broken_in(error: BaseException) -> str | None:
    """The rule that was broken."""
    if isinstance(error, BrokenRuleError):
        return str(error)
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())  # of a group
    return next((found for one in inner if (found := broken_in(one))), None)
