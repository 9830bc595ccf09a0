"""One history of members from its seed to its verdict."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import trio

from acpfs.writeback.members.cluster import Cluster
from tests.sim.choices import Choices, Knobs
from tests.sim.history import DRAIN_MAX_S, Outcome, worst
from tests.sim.life import Life
from tests.sim.members.job import Job
from tests.sim.members.member import Member
from tests.sim.members.oracles import Judge
from tests.sim.members.plan import NODE_TIMEOUT_S, Absence, Plan
from tests.sim.programs import Died
from tests.sim.rounds import MachineClock, Rounds
from tests.sim.shown import Shown, bare, differences
from tests.sim.storage import Storage
from tests.sim.trace import Finding, Trace
from tests.sim.virtual import MACHINE

LOOK_S = 0.5
TAKES_TURNS = 0.9
"""Share of times that a life takes its turn."""
ASK_AGAIN_S = 5.0
CACHES_S = 3.0
"""After which each member asks the storage anew."""
LAST_LIVES_S = 1200.0
"""What waits for who is gone, and whom only the operator of the end gives up, looks twice a second,
so a life in which nothing else is done comes to the most turns that one may have.
"""


class MembersHistory:
    """Makes the members, gives them turns, and is their operator."""

    def __init__(self, choices: Choices, base: Path) -> None:
        """`base`: a directory for RAM tiers."""
        self.choices = choices
        self.base = base
        self.trace = Trace()
        self.plan = Plan.drawn(choices)
        knobs = Knobs.drawn(choices)
        self.storage = Storage()
        self.storage.counts_subdirectories = knobs.counts_subdirectories
        self.storage.features = replace(self.storage.features, acls=knobs.has_acls)
        MACHINE.begin(choices.seed, self.storage)
        self.members = [
            Member(one, self.plan, self.storage, choices, base, self.trace, self.look)
            for one in self.plan.members
        ]
        self.job = Job(
            self.members, self.plan, choices, self.trace, self._judge_waited, self._attend
        )
        self._judge = Judge(self.job, self.storage, choices.stream("power"))
        self._chance = choices.stream("turns of members")
        self._counts = Counter[str]()
        self._operators: trio.Nursery

    def run(self) -> Outcome:
        outcome = Outcome(self.choices, self.trace)
        try:
            trio.run(self._main, clock=MachineClock())
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt):
                raise
            outcome.failure = worst(failure)
        finally:
            self._end_all()
            shutil.rmtree(self.base, ignore_errors=True)
        outcome.counts.update(self._counts)
        for member in self.members:
            outcome.counts.update(member.counts)
        return outcome

    def look(self) -> None:
        """Whoever judges looks at the storage."""
        self._judge.look()

    def _judge_waited(self, paths: dict[str, bytes]) -> None:
        self._counts["waits for other members"] += 1
        self._judge.judge_waited(paths)

    def _end_all(self) -> None:
        for member in self.members:
            if member.life is not None:
                member.life.turns.is_over = True
                member.life.bury()

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            self._operators = nursery
            rounds = Rounds(self, nursery.cancel_scope.cancel)
            for member in self.members:
                nursery.start_soon(member.live, self._missing)
            await self.job.run()
            await self._end()
            nursery.cancel_scope.cancel()
        if rounds.failure is not None:
            raise rounds.failure

    # -- turns (`rounds.Takes`)

    def _lives(self) -> list[Life]:
        return [one.life for one in self.members if one.life is not None]

    def step(self) -> bool:
        """Of all of them: one may be slower than the others."""
        did = False
        chance = self._chance.random
        for one in self.members:
            life = one.life
            if life is not None and (life.turns.is_over or chance() < TAKES_TURNS):
                did = life.step() or did
        return did

    def is_anyone_ready(self) -> bool:
        """See `Takes`."""
        for one in self.members:
            life = one.life
            if life is not None and not life.turns.is_over and life.turns.is_anyone_ready:
                return True
        return False

    def next_s(self) -> float:
        """See `Takes`."""
        return min((life.timers.next_s() for life in self._lives()), default=math.inf)

    # -- the operator

    def _missing(self, member: Member, absence: Absence) -> None:
        member.is_away = True
        self._counts[f"times that {absence.ending.value}"] += 1
        if absence.is_forgotten:
            self._operators.start_soon(self._forget_while_away, member)

    async def _forget_while_away(self, member: Member) -> None:
        await trio.sleep(NODE_TIMEOUT_S)
        while member.is_away:
            if await self._forget(member):
                return
            await trio.sleep(ASK_AGAIN_S)

    async def _forget_at_last(self, member: Member) -> None:
        while not await self._forget(member):  # noqa: ASYNC110 - an operator asks again
            await trio.sleep(ASK_AGAIN_S)

    async def _forget(self, member: Member) -> bool:
        """On all others; whether all have."""
        done = True
        for other in self.members:
            life = other.serves
            if other is member or life is None or other.is_gone:
                continue
            assert life.cluster is not None
            self._judge.gives_up(member)  # before anybody can see what comes of it
            forgotten = await self._asked(other, member.node)
            member.is_forgotten |= forgotten
            done = done and forgotten
            self._counts["members forgotten"] += forgotten
            self.trace.note("operator", "forgets", (member.node, "on", other.node), str(forgotten))
        return done

    async def _asked(self, other: Member, node: str) -> bool:
        life = other.serves
        if life is None:
            return False

        async def forget(cluster: Cluster) -> bool:
            peers = {one.node for one in cluster.statistics().peers}
            return await cluster.forget(node) or node not in peers

        return await other.ask_cluster(life, forget)

    async def _forgive(self, member: Member) -> None:
        """An operator says that what it has lost is lost."""
        life = member.serves
        if life is None or life.cluster is None or life.cluster.statistics().lost is None:
            return
        self._judge.forgets_loss(member)
        self._counts["losses forgotten"] += 1
        await self._asked(member, member.node)

    async def _attend(self) -> None:
        """An operator comes, as all wait: what only a person can end ends."""
        self._counts["times that an operator came to who waits"] += 1
        for member in self.members:
            if member.is_gone:
                await self._forget(member)
            else:
                await self._forgive(member)
            if member.serves:
                member.serves.engine.retry()

    # -- the end

    def _still(self) -> list[Member]:
        return [one for one in self.members if not one.is_gone]

    async def _end(self) -> None:
        """Faults have stopped when all live their last lives; then an operator gives up what will
        not come.
        """
        await self._until_last_lives()
        for member in self.members:
            if member.is_gone:
                await self._forget_at_last(member)
        await self._until_drained()
        self.look()
        self._judge.judge_end(self.members)
        await self._judge_shown()
        for member in self._still():
            assert member.life is not None
            member.count(member.life)
        self._counts["pointers seen"] = self._judge.pointers

    async def _until_drained(self) -> None:
        began_s = MACHINE.moment_s
        while waiting := [one for one in self._still() if not _is_drained(one.life)]:
            self.look()
            for member in self._still():
                await self._forgive(member)
                if member.serves:
                    member.serves.engine.retry()
            if MACHINE.moment_s - began_s > DRAIN_MAX_S:
                raise Finding("LIVENESS", self._why_not_drained(waiting))
            await trio.sleep(LOOK_S)

    async def _until_last_lives(self) -> None:
        began_s = MACHINE.moment_s
        while any(not self._is_at_last(one) for one in self.members):
            self.look()
            if MACHINE.moment_s - began_s > LAST_LIVES_S:
                for member in self.members:
                    self._end_early(member)
            for member in self.members:
                if member.serves is not None and not len(member.serves.log):
                    self._end_early(member)  # what it leaves is all that there is
            await trio.sleep(LOOK_S)

    def _end_early(self, member: Member) -> None:
        if member.life is not None and member.life.number < member.knobs.lives - 1:
            member.life.death.turn = 0

    def _is_at_last(self, member: Member) -> bool:
        if member.is_gone:
            return True
        life = member.serves
        is_last = life is not None and life.number == member.knobs.lives - 1
        return is_last and (member.knobs.keeps_session or member.is_up)

    def _why_not_drained(self, waiting: list[Member]) -> str:
        words = []
        for member in waiting:
            life = member.life
            if life is None or life.cluster is None:
                continue
            kinds = [f"{op.kind.name} {op.name.decode()}" for op in life.log][:3]
            told = [dict(one.missing) for one in life.cluster.statistics().waiting]
            words.append(f"{member.node} has {kinds}, which wait for {told}")
        return f"not drained {DRAIN_MAX_S:.0f} s after faults stopped: {'; '.join(words)}"

    async def _judge_shown(self) -> None:
        """Each member shows what is stored, its own and that of others."""
        await trio.sleep(CACHES_S)
        stored = bare(self.storage.visible())
        for member in self._still():
            try:
                got: Shown = await member.calls.tree("")
            except Died as death:
                raise Finding("SHOWN AT THE END", f"{member.node} is gone") from death
            if got != stored:
                raise Finding("SHOWN AT THE END", f"on {member.node}: {differences(got, stored)}")


def _is_drained(life: Life | None) -> bool:
    """Whether nothing is to come, of what a guard holds either."""
    return life is not None and not len(life.log) and not any(True for _op in life.log.all_aside())
