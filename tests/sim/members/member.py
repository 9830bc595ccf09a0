"""One member of a history: its daemons one after the other, and what an operator does while it is
missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from acpfs.writeback.members.cluster import Cluster
from tests.sim.choices import Choices
from tests.sim.kernel import Process, Serving
from tests.sim.life import Life, Seat
from tests.sim.members.plan import (
    CLOCK_BOUND_S,
    NODE_TIMEOUT_S,
    SET_RIGHT_S,
    Absence,
    Ending,
    MemberPlan,
    Plan,
)
from tests.sim.members.view import MemberStorage
from tests.sim.programs import Calls, Died
from tests.sim.storage import Storage
from tests.sim.trace import Trace
from tests.sim.virtual import MACHINE


class Member(Serving):
    """See above."""

    def __init__(
        self,
        plan: MemberPlan,
        whole: Plan,
        storage: Storage,
        choices: Choices,
        base: Path,
        trace: Trace,
        look: Callable[[], None],
    ) -> None:
        """`look`: whoever judges looks at the storage."""
        super().__init__(plan.knobs)
        self.plan = plan
        self.node = plan.node
        self._choices = choices
        self._base = base
        self._trace = trace
        self._look = look
        self._began_s = MACHINE.moment_s
        self._clock_since_s = math.inf
        """When its node's clock began, from the wall clock."""
        self.view = MemberStorage(storage, plan, self._began_s)
        self.seat = Seat(
            self._wall,
            {
                "cluster_order": "pointers",
                "heartbeat_s": whole.heartbeat_s,
                "clock_bound_s": CLOCK_BOUND_S,
                "node_timeout_s": NODE_TIMEOUT_S,
                "keep_last_persisted": whole.is_guarded,
                "guard_time_s": 60.0,
            },
            plan.cached_s > 0,
            self.view.caller_of,
        )
        self.process = Process(self)
        self.calls = Calls(self.process)
        self.counts: Counter[str] = Counter()
        self.lost = 0
        """How often its RAM tier was."""
        self.machine = 0
        """How often its programs ended."""
        self.is_away = False
        self.is_gone = False
        """For now; for good."""
        self.came_s = math.inf
        """When it was first mounted; anew, if it had not served by then, or was forgotten, or
        missing, since.
        """
        self.is_forgotten = False
        """By an operator, since it was last mounted."""

    @property
    def clock_set_s(self) -> float:
        """When its clock is set wrong, virtual time; infinity: never."""
        at_s = self._began_s + self.plan.set_at_s
        return at_s if self.plan.set_by_s else math.inf

    def _wall(self) -> float:
        since_s = MACHINE.moment_s - self._began_s - self.plan.set_at_s
        is_set = 0 <= since_s < SET_RIGHT_S and self._clock_since_s < MACHINE.moment_s - since_s
        wrong_s = self.plan.set_by_s if is_set else 0.0  # who begins with a wrong one has no word
        return MACHINE.wall() + self.plan.ahead_s + wrong_s

    def look(self) -> None:
        self._look()

    def judge_durable(self, path: bytes, content: bytes) -> None:
        """No program of a job asks for it."""

    async def serving(self) -> Life:
        """Programs that end with their machine do not wait for the next one."""
        if not self.knobs.keeps_session and self.serves is None:
            raise Died(self.process.mount)
        return await super().serving()

    # -- its lives

    async def live(self, missing: Callable[[Member, Absence], None]) -> None:
        """All of them. `missing`: it is away from now on."""
        base = self._base / self.node / "life-0"
        await trio.sleep(self.plan.joins_s)
        has_served = False
        was_missing = False
        for number in range(self.knobs.lives):
            if self.is_forgotten or was_missing or not has_served:
                self.came_s = MACHINE.moment_s
                self.is_forgotten = False
            if not base.exists():
                self._clock_since_s = MACHINE.moment_s
            life = Life(number, base, self.view, self._choices, self.knobs, self._trace, self.seat)
            self.life = life
            self.counts["lives"] += 1
            if number and not self.knobs.keeps_session:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._begin_anew, life)
                    await life.live()
                    nursery.cancel_scope.cancel()
            else:
                await life.live()
            assert life.left is not None
            has_served = has_served or life.answered > 0
            self.count(life)
            life.bury()
            self.view.forget_descriptors()
            absence = self.plan.lives[number]
            base = life.left if absence.ending is not Ending.MACHINE else self._new_tier(number)
            missing(self, absence)
            if number == self.knobs.lives - 2 and not self.plan.returns:
                self.life = None
                self.is_gone = True
                return
            await trio.sleep(absence.seconds)
            was_missing = absence.seconds > NODE_TIMEOUT_S
            self.is_away = False

    def _new_tier(self, number: int) -> Path:
        self.lost += 1
        self._trace.note(self.node, "loses its RAM")
        return self._base / self.node / f"machine-{number + 1}"

    async def _begin_anew(self, life: Life) -> None:
        """Its programs begin again. What was half written is discarded, as an operator would."""
        while not life.is_serving:  # noqa: ASYNC110 - threads end lives, too
            await trio.sleep(0.02)
        if not life.turns.is_over:
            life.discard_halves()
        self.process.begin_at(life.number)
        self.machine += 1

    @property
    def may_be_overlooked(self) -> bool:
        """Whether others may have begun before they knew of it."""
        return self.came_s > self._began_s

    @property
    def has_come(self) -> bool:
        """Whether it was ever mounted."""
        return self.came_s < math.inf

    @property
    def is_up(self) -> bool:
        """Whether a program can run there."""
        life = self.life
        return (
            life is not None
            and life.is_serving
            and not life.turns.is_over
            and (self.knobs.keeps_session or self.process.mount == life.number)
        )

    @property
    def serves(self) -> Life | None:
        """Its daemon, if it answers."""
        life = self.life
        return life if life is not None and life.is_serving and not life.turns.is_over else None

    async def ask_cluster(self, life: Life, act: Callable[[Cluster], Awaitable[bool]]) -> bool:
        """What an operator or a program asks the daemon's cluster; False where it dies meanwhile,
        or the storage fails.
        """
        assert life.cluster is not None
        cluster = life.cluster
        answer = False
        with life.asked(math.inf):
            try:
                answer = await act(cluster)
            except OSError:
                pass
            except BaseException as failure:
                if isinstance(failure, trio.Cancelled) or not life.is_of_death(failure):
                    raise
        return answer and not life.turns.is_over

    def count(self, life: Life) -> None:
        """What it has come to."""
        self.counts["turns"] += life.turns.count
        self.counts["kills"] += life.left is not None
        self.counts["answers"] += life.answered
        assert life.cluster is not None
        self.counts["pointers that waited and passed"] += life.cluster.pointers_passed
        self.counts["pointers withheld"] += life.cluster.pointers_withheld
        for name, value in life.reached().items():
            self.counts[f"lives with {name}"] += value > 0
