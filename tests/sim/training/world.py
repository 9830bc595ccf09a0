"""One history of a job: real coordinators, real members, and between them a wire that a seed
decides about, in virtual time.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import trio

from acpfs.training import member as member_module
from acpfs.training.coordinator.connections import Connected, Connection
from acpfs.training.coordinator.server import REDIAL_S, Coordinator, Settings
from acpfs.training.coordinator.successors import Successors
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
PROFILES = ("any", "deaths", "crew")
ANY, DEATHS, CREW = PROFILES
"""What happens in a history: whatever can; deaths alone, of which a job can save all, and then it
has to; or its ranks are replaced.
"""
SAVES_S = {ANY: 5.0, DEATHS: 60.0, CREW: 0.0}
"""So long a rank writes, at most."""
IN_C_S = 40.0


Who = tuple[str, int, int]
"""Kind, number and number of those whom a connection connects."""


class _Time:
    """What the member takes for the module `time`."""

    @staticmethod
    def monotonic() -> float:
        return trio.current_time()


class _Witness(Witness):
    """The directory answers late, or not at all."""

    def __init__(self, directory: Path, claim_s: float, chance: random.Random) -> None:
        super().__init__(directory, claim_s)
        self._place = directory
        self._most_s = claim_s
        self._chance = chance

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

    def __init__(
        self, settings: Settings, world: World, successors: Successors | None = None
    ) -> None:
        super().__init__(settings, successors)
        self.world = world
        self.number = settings.number
        self.ends: dict[object, Ends] = {}
        made = _Connected(settings.job, settings.number, self._phases)
        made.oracles = world.oracles
        made.number = settings.number
        self._connected = made
        self._elections._connected = made
        self._witness = world.witness
        self._elections._witness = world.witness
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

    @property
    def commands(self) -> bool:
        return self._standing.commands

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
            own = self.address if self._settings.replaces else ""
            if other.alive:
                ends = self.world.connect(("coordinators", self.number, number))
                self.ends[number] = ends
                other.accept(self.number, ends)
                connection = Connection(cast("TrioLink", TrioEnd(ends, ends.back, ends.there)))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.send_all)
                    connection.post(
                        self._connected.framed(Watch(self._settings.node, self.number, own))
                    )
                    await self._listen_to(connection, number)
                    connection.cut()
            await trio.sleep(REDIAL_S)


class World:
    """One history."""

    def __init__(
        self,
        seed: int,
        directory: Path,
        profile: str = ANY,
        without: frozenset[int] = frozenset(),
    ) -> None:
        """`without`: harms that are left out, by their numbers."""
        self.seed = seed
        self.job = "job"
        self.profile = profile
        self._without = without
        self.harms = 0
        """So many there were, with those that were left out."""
        self._chance = random.Random(f"{seed} world")
        self.size = self._chance.choice((2, 3, 4, 4, 6))
        self.steps = self._chance.randint(5, 40)
        self.cannot_save = self._chance.choice((0.0, 0.0, 0.3))
        self.save_s = SAVES_S[profile]
        self.latest_s = LATEST_S
        if profile == DEATHS:
            self.cannot_save = 0.0
        self.trace: list[str] = []
        self.counts = Counter[str]()
        """Of places that histories come to."""
        self.oracles = Oracles(lambda rank: self.ranks[rank].marks.now.done)
        (directory / "witness").mkdir()
        self.witness = _Witness(directory / "witness", 2.0, random.Random(f"{seed} witness"))
        self.connections: list[tuple[Who, Ends]] = []
        self._directory = directory
        self.ranks: list[Rank] = []
        self.hearer_dies = False
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

    def connect(self, who: Who) -> Ends:
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
                    self._begin(rank)
                await (self._let_die() if self.profile == DEATHS else self._harm())
                with trio.move_on_at(LATEST_S):
                    while self._goes_on():  # noqa: ASYNC110
                        await trio.sleep(1.0)
                late = self._late()
                if late:
                    self.oracles.lives(f"ranks {late} neither train on nor are told anything")
                self._count()
                if self.profile == DEATHS:
                    self._judge_ends()
                nursery.cancel_scope.cancel()
        finally:
            setattr(member_module, "time", before)  # noqa: B010

    def _begin(self, rank: Rank) -> None:
        self._register(rank)
        self._nursery.start_soon(rank.run)

    def _goes_on(self) -> bool:
        return any(rank.is_waited_for for rank in self.ranks)

    def _late(self) -> list[int]:
        """Who should have ended."""
        return [rank.number for rank in self.ranks if self._must_end(rank)]

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

    def _act(self, text: str, effect: Callable[[], object]) -> None:
        """One harm, unless it is left out: what was drawn for it was drawn all the same."""
        number = self.harms
        self.harms += 1
        if number not in self._without:
            self.note(f"harm {number}", text)
            effect()

    def _kill(self) -> None:
        self._kill_rank(self._chance.choice(self.ranks))

    def _kill_rank(self, rank: Rank) -> None:
        if rank.ended is None:
            self._act(f"rank {rank.number} is killed", rank.kill)

    # -- deaths alone

    async def _let_die(self) -> None:
        """A first fault, and others in its dialogue."""
        while not all(rank.is_protected for rank in self.ranks):  # noqa: ASYNC110
            await trio.sleep(0.1)
        await trio.sleep(self._chance.uniform(0.0, 4.0))
        first = (self._let_a_rank_die, self._own_exception, self._trouble_and_its_hearer)
        self._chance.choice((*first, self._elected_and_gone, self._stuck_and_a_death))()
        for _ in range(self._chance.randint(0, 3)):
            await trio.sleep(self._chance.choice((0.3, 3.0, 20.0)) * self._chance.random())
            self._chance.choice((self._let_a_rank_die, self._let_commander_die))()

    def _let_a_rank_die(self, spared: Rank | None = None) -> None:
        """One that the others can do without: they elect somebody, and have all that it has."""
        rank = self._chance.choice([one for one in self.ranks if one is not spared])
        live = {one.number for one in self.ranks if one.ended is None} - {rank.number}
        shards = {shard: held for one in self.ranks for shard, held in one.holders.items()}
        if 2 * len(live) > self.size and all(live & set(held) for held in shards.values()):
            self._kill_rank(rank)

    def _commander(self) -> _Coordinator | None:
        return next((one for one in self.coordinators if one.alive and one.commands), None)

    def _let_commander_die(self) -> None:
        commander = self._commander()
        if commander is not None and sum(one.alive for one in self.coordinators) > 1:
            text = f"coordinator {commander.number}, which commands, is killed"
            self._act(text, commander.kill)

    def has_trouble(self) -> None:
        """A rank has said so; perhaps whoever hears it dies before it tells the others."""
        if self.hearer_dies:
            self.hearer_dies = False
            self._nursery.start_soon(self._let_commander_die_in, self._chance.uniform(0.0, 0.3))

    async def _let_commander_die_in(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self._let_commander_die()

    def _trouble_and_its_hearer(self) -> None:
        self.hearer_dies = True
        self._own_exception()

    def _elected_and_gone(self) -> None:
        """Who is elected dies, and so does a rank; another one hears all of it afterwards, and is
        needed for the next election.
        """
        self._let_commander_die()
        rank = self._chance.choice(self.ranks)
        for_s = self._chance.uniform(1.0, 3.0)
        self._silence(
            f"rank {rank.number} hears nothing",
            for_s,
            lambda who: who[:2] == ("rank", rank.number),
        )
        self._nursery.start_soon(self._let_elected_die, rank)

    async def _let_elected_die(self, spared: Rank) -> None:
        with trio.move_on_after(10.0):
            while self._commander() is None:  # noqa: ASYNC110  # nobody announces it
                await trio.sleep(0.01)
            await self._let_commander_die_in(self._chance.uniform(0.0, 0.3))
            self._let_a_rank_die(spared)

    def _stuck_and_a_death(self) -> None:
        """A rank's main thread comes out of a call only when another thread has done its part."""
        rank = self._chance.choice(self.ranks)
        until = trio.current_time() + self._chance.uniform(1.0, IN_C_S)
        self._act(f"rank {rank.number} is in C until {until:.1f}", lambda: rank.stay_in_c(until))
        self._nursery.start_soon(self._let_a_rank_die_soon)

    async def _let_a_rank_die_soon(self) -> None:
        await trio.sleep(self._chance.uniform(0.0, 1.0))
        self._let_a_rank_die()

    def _judge_ends(self) -> None:
        may_lack = any(rank.ended == "the end of its loop" for rank in self.ranks)
        for rank in self.ranks:
            self.oracles.leaves(rank.number, str(rank.ended), may_lack=may_lack)

    def _stop_rank(self) -> None:
        rank = self._chance.choice(self.ranks)
        for_s = self._chance.uniform(*HOLDS_S)
        if self._chance.random() < FOR_GOOD and rank.ended is None:
            self._act(f"rank {rank.number} stands still for good", lambda: rank.pause(LATEST_S))
        else:
            self._act(
                f"rank {rank.number} stands still for {for_s:.1f} s", lambda: rank.pause(for_s)
            )

    def _cut(self) -> None:
        who, ends = self._chance.choice(self.connections)
        self._act(f"cut: {who}", ends.cut)

    def _hold(self) -> None:
        (who, ends) = self._chance.choice(self.connections)
        for_s = self._chance.uniform(*HOLDS_S)
        until = trio.current_time() + for_s
        self._act(f"silent for {for_s:.1f} s: {who}", lambda: ends.hold(until))

    def _part(self) -> None:
        """The network between two nodes: coordinators 0 and 2 are with even ranks."""
        for_s = self._chance.uniform(*HOLDS_S)
        self._silence("two sides", for_s, lambda who: who[1] % 2 != who[2] % 2)

    def _apart(self) -> None:
        """Coordinators hear nothing of each other."""
        for_s = self._chance.uniform(*HOLDS_S)
        self._silence("coordinators are apart", for_s, lambda who: who[0] == "coordinators")

    def _silence(self, text: str, for_s: float, concerns: Callable[[Who], bool]) -> None:
        """Nothing comes over these connections."""
        until = trio.current_time() + for_s

        def hold() -> None:
            for who, ends in self.connections:
                if concerns(who):
                    ends.hold(until)

        self._act(f"{text} for {for_s:.1f} s", hold)

    def _silence_coordinator(self, *, first: bool = False) -> None:
        """As one that is stopped: nothing comes to it or from it, and then all of it does."""
        number = 0 if first else self._chance.randrange(COORDINATORS)
        for_s = self._chance.uniform(*HOLDS_S)
        self._silence(
            f"coordinator {number} is silent",
            for_s,
            lambda who: number == who[2] or who[:2] == ("coordinators", number),
        )

    def _kill_coordinator(self, *, first: bool = False) -> None:
        coordinator = self.coordinators[0 if first else self._chance.randrange(COORDINATORS)]
        if coordinator.alive:
            self._act(f"coordinator {coordinator.number} is killed", coordinator.kill)

    def _other_job(self) -> None:
        """The first process of a rank of a job that has the same name."""
        alive = [coordinator for coordinator in self.coordinators if coordinator.alive]
        if alive:
            chosen = self._chance.choice(alive)
            self._act(
                f"another job calls coordinator {chosen.number}",
                lambda: self._nursery.start_soon(self._call_as_another_job, chosen),
            )

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
        step = rank.marks.now.done + 1
        self._act(f"rank {rank.number} is to meet an exception", lambda: rank.meet_trouble(step))


def broken_in(error: BaseException) -> str | None:
    """The rule that was broken."""
    if isinstance(error, BrokenRuleError):
        return str(error)
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())  # of a group
    return next((found for one in inner if (found := broken_in(one))), None)
