"""What launchers of a job do together, without I/O: what happened goes in, what to tell whom comes
out.

    GATHERING ──all nodes are there──► RUNNING ──a fault, or SIGTERM──► STOPPING ──nobody runs──►
    ENDED
        ▲                                                                   │
        └───────────────────────── a restart is left ◄──────────────────────┘

Where launchers replace ranks, a node that is lost is no fault: its place is vacant, its ranks'
states are others' too, and a launcher that comes takes the place. A side that has not more than
half of the nodes goes on only where the other one cannot: see `_may_go_on`.

On one node the launcher asks this itself; on several the coordinator does. One that is started anew
learns all of it from what launchers register with. A rank's exit status is what wait(2) gave.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from acpfs.training.coordinator.limits import FAULTS_MAX
from acpfs.training.messages import (
    ExitStatus,
    Launcher,
    Over,
    Replace,
    Start,
    StopRanks,
    ToLauncher,
)

LAST_CALL_S = 30.0
"""So long more nodes may come when there are enough; torchrun's own."""
NODES_S = 600.0
"""So long the first node waits for the others; torchrun's own."""
AWAY_S = 15.0
"""A launcher whose connection ended may come again; its ranks go on meanwhile."""
VACANT_S = 600.0
"""So long the place of a lost node waits for a launcher that takes it."""
QUICK_MAX = 5
QUICK_S = 60.0
"""A rank whose processes die so often in so short a time, none of which has done an update, has a
fault in its program.
"""
NODE_LOST = 69
"""Status of a job that lost a node: EX_UNAVAILABLE of sysexits.h."""


class State(Enum):
    """Where the job is, as launchers see it."""

    GATHERING = "gathering"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.GATHERING: frozenset({State.RUNNING, State.STOPPING, State.ENDED}),
    State.RUNNING: frozenset({State.STOPPING, State.ENDED}),
    State.STOPPING: frozenset({State.GATHERING, State.ENDED}),
    State.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Post:
    """To this launcher."""

    to: str
    message: ToLauncher


@dataclass
class _Node:
    """A launcher, and what is known of its ranks."""

    launcher: Launcher
    start: Start | None
    port: int
    ended: dict[int, int]
    idle: bool
    away_since: float | None = None
    gone_since: float | None = None
    """Lost: nobody comes again, and the place is kept."""

    @property
    def ranks(self) -> range:
        return (
            range(self.start.first_rank, self.start.first_rank + self.launcher.slots)
            if self.start
            else range(0)
        )


@dataclass
class Launchers:
    """Of one job."""

    state: State = State.GATHERING
    succeeds: bool = False
    """Whether launchers met somewhere else before."""
    has_witness: bool = False
    """Whether somebody can be asked which of two equal halves goes on."""
    claim: bool | None = None
    """What the witness said in this attempt."""
    wants_claim: bool = False
    attempt: int = 0
    replaced: int = 0
    wake_at: float = math.inf
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    """In which they came."""
    _since: float | None = None
    _enough_since: float | None = None
    _planned: bool = False
    _fruitless_at: dict[int, list[float]] = field(default_factory=dict)
    """When processes of each rank died that had done no update, since one did."""
    _undecided: str = ""
    """Why it is not known yet whether this side goes on."""
    _is_minority: bool = False
    """Most nodes are somewhere else, and may go on there."""
    _statuses: list[int] = field(default_factory=list)
    """Exit statuses of this attempt, the first fault's first."""
    _why: str = ""
    _over: Over = field(default_factory=lambda: Over(0, ""))
    _posts: list[Post] = field(default_factory=list)

    # -- what happens

    def registered(self, launcher: Launcher, now: float) -> list[Post]:
        """A launcher came, or came again."""
        self._since = now if self._since is None else self._since
        if self.state is State.ENDED:
            return [Post(launcher.name, self._over)]
        if (
            launcher.start is None
            and self.state is not State.GATHERING
            and launcher.name not in self._nodes
        ):
            self._forget_whom_it_replaces(launcher, now)
            if self._takes_a_place(launcher):
                return self._done(now)
            if self.state is not State.STOPPING or self._planned:
                self._post(
                    [launcher.name], Over(NODE_LOST, "the job runs already, without this node")
                )
                return self._done(now)
        if launcher.start is not None and self._is_taken(launcher):
            self._post([launcher.name], Over(NODE_LOST, "another launcher has this node's place"))
            return self._done(now)
        known = self._nodes.get(launcher.name)
        if (
            launcher.start is None and known is not None and known.start is not None
        ):  # START was lost on its way
            known.away_since = None
            self._post([launcher.name], known.start)
            return self._done(now)
        if launcher.name not in self._order:
            self._order.append(launcher.name)
        idle = launcher.start is None or all(rank in launcher.ended for rank in _ranks(launcher))
        node = _Node(launcher, launcher.start, launcher.port, {}, idle)
        self._nodes[launcher.name] = node
        self.attempt = max(self.attempt, launcher.start.attempt if launcher.start else 0)
        self.replaced = max(self.replaced, launcher.replaced)
        self._planned = self._planned or launcher.planned
        if self.state is State.GATHERING:
            self._begin_if_there(now)
        else:
            self._learn(node, now)
            if self.state is State.RUNNING and self._undecided:
                self._go_on_without(self._undecided, now)
        return self._done(now)

    def _forget_whom_it_replaces(self, launcher: Launcher, now: float) -> None:
        """A launcher that begins where one is away shows that this one does not come again."""
        for name, node in list(self._nodes.items()):
            if node.away_since is not None and launcher.node_rank == node.launcher.node_rank:
                self._lost(name, now)
                return

    def _takes_a_place(self, launcher: Launcher) -> bool:
        """Of a lost node, in a job that goes on."""
        for name, node in list(self._nodes.items()):
            fits = (launcher.slots, launcher.node_rank) == (
                node.launcher.slots,
                node.launcher.node_rank,
            )
            if (
                self.state is State.RUNNING
                and node.gone_since is not None
                and fits
                and node.start is not None
            ):
                self.replaced += 1
                self._forget(name)
                self._order.append(launcher.name)
                start = replace(node.start, generation=self.replaced)
                self._nodes[launcher.name] = _Node(launcher, start, launcher.port, {}, idle=False)
                self._post([launcher.name], start)
                return True
        return False

    def _is_taken(self, launcher: Launcher) -> bool:
        others = [
            node.start
            for name, node in self._nodes.items()
            if name != launcher.name and node.start is not None
        ]
        return any(
            launcher.start is not None and other.group_rank == launcher.start.group_rank
            for other in others
        )

    def _lost(self, name: str, now: float) -> None:
        if (node := self._nodes.get(name)) is None:  # it was forgotten with the one before
            return
        node.away_since = None
        node.gone_since = now
        if self.state is State.RUNNING:
            self._go_on_without(f"node {node.launcher.node} is lost", now)
        else:
            self._forget(name)
            self._fault(NODE_LOST << 8, f"node {node.launcher.node} is lost", now)

    def _go_on_without(self, why: str, now: float) -> None:
        """Some are lost: whether this side goes on, and whether the others run meanwhile.

        Who is only away may come again.
        """
        groups = max(
            (node.start.groups for node in self._nodes.values() if node.start is not None),
            default=1,
        )
        here = [
            node
            for node in self._nodes.values()
            if node.gone_since is None and node.start is not None
        ]
        present = [node for node in here if node.away_since is None]
        may = self._may_go_on(len(present), groups)
        waits = may is not True and len(present) < len(here)
        self._undecided = why if waits else ""
        self.wants_claim = may is None and not waits
        if may is None or waits:
            return
        self._is_minority = not may
        if not may:
            self._fault(NODE_LOST << 8, f"{why}, and the others may go on without this node", now)
        elif not all(node.launcher.replaces for node in here):
            self._fault(NODE_LOST << 8, why, now)

    def _may_go_on(self, here: int, groups: int) -> bool | None:
        """None: the witness has to be asked.

        Without one, of two halves that one goes on where launchers have met all the time.
        """
        if 2 * here != groups:
            return 2 * here > groups
        return self.claim if self.has_witness else not self.succeeds

    def claimed(self, ours: bool, now: float) -> list[Post]:
        """The witness has answered."""
        self.claim = ours
        self.wants_claim = False
        if self.state is State.RUNNING and any(
            node.gone_since is not None for node in self._nodes.values()
        ):
            self._go_on_without("half of the nodes are lost", now)
        return self._done(now)

    @property
    def attempt_name(self) -> str:
        """Of the ranks that run."""
        return next(
            (node.start.name for node in self._nodes.values() if node.start is not None), ""
        )

    def exited(
        self, name: str, rank: int, status: int, now: float, *, updated: bool = False
    ) -> list[Post]:
        """A rank's process was waited for. `updated`: it had done an update."""
        if (node := self._nodes.get(name)) is not None:
            self._ended(node, rank, status, now, updated=updated)
        return self._done(now)

    def idle(self, name: str, port: int, now: float) -> list[Post]:
        """Nobody runs on this node any more."""
        if (node := self._nodes.get(name)) is not None:
            node.idle = True
            node.port = port
            self._begin_anew_if_quiet(now)
        return self._done(now)

    def planned(self, name: str, now: float) -> list[Post]:
        """Somebody wants the job to end."""
        self._planned = True
        if self.state in (State.GATHERING, State.RUNNING):
            self._stop("SIGTERM", now)
        return self._done(now)

    def away(self, name: str, now: float) -> list[Post]:
        """A launcher's connection ended."""
        if (node := self._nodes.get(name)) is not None:
            node.away_since = now
            if node.start is None:
                self._forget(name)
        return self._done(now)

    def tick(self, now: float) -> list[Post]:
        """Time has passed."""
        if self.state is State.ENDED:
            return self._done(now)
        lost = [
            name
            for name, node in self._nodes.items()
            if node.away_since is not None and now >= node.away_since + AWAY_S
        ]
        for name in lost:
            self._nodes[name].away_since = None
            self._nodes[name].gone_since = now
        for name in lost:
            self._lost(name, now)
        if any(
            node.gone_since is not None and now >= node.gone_since + VACANT_S
            for node in self._nodes.values()
        ):
            self._fault(NODE_LOST << 8, f"nobody took a lost node's place in {VACANT_S:g} s", now)
        if self.state is State.GATHERING:
            self._begin_if_there(now)
        self._give_up_if_late(now)
        return self._done(now)

    # -- all together

    def _begin_if_there(self, now: float) -> None:
        nodes = list(self._nodes.values())
        if not nodes:
            return
        old = [node.start for node in nodes if node.start is not None]
        if old:  # this is a coordinator that was started anew
            self._go_on_if_all_came(old[0].groups, now)
            return
        first = nodes[0].launcher
        if len(nodes) < first.nodes_max:
            if len(nodes) < first.nodes_min:
                self._enough_since = None
                return
            self._enough_since = now if self._enough_since is None else self._enough_since
            if now < self._enough_since + LAST_CALL_S:
                return
        self._go(State.RUNNING)
        self._start()

    def _go_on_if_all_came(self, groups: int, now: float) -> None:
        """Where ranks run already.

        Nothing is decided before all nodes have told how theirs are, or are lost.
        """
        assert self._since is not None
        came = [node for node in self._nodes.values() if node.start is not None]
        if len(came) < groups and now < self._since + AWAY_S:
            return
        self._go(State.RUNNING)
        self._keep_places_of_missing(came, groups, now)
        for node in came:
            self._learn(node, now)
        if len(came) < groups:
            self._go_on_without("a node did not come again", now)
        for name, node in list(self._nodes.items()):
            if node.start is None:  # one that begins, and came first
                self._forget(name)
                if not self._takes_a_place(node.launcher):
                    self._post([name], Over(NODE_LOST, "the job runs already, without this node"))

    def _keep_places_of_missing(self, came: list[_Node], groups: int, now: float) -> None:
        """Nodes have one number of ranks each where anybody else can take their places."""
        known = came[0]
        assert known.start is not None
        there = {node.start.group_rank for node in came if node.start is not None}
        if known.start.world != groups * known.launcher.slots:
            return
        for group_rank in set(range(groups)) - there:
            name = f"lost-{group_rank}"
            slots = known.launcher.slots
            number = None if known.launcher.node_rank is None else group_rank
            launcher = Launcher(name, name, "", 0, slots, number, replaces=known.launcher.replaces)
            start = replace(known.start, group_rank=group_rank, first_rank=group_rank * slots)
            self._nodes[name] = _Node(launcher, start, 0, {}, idle=True, gone_since=now)
            self._order.append(name)

    def _learn(self, node: _Node, now: float) -> None:
        """What a launcher told when it came again."""
        launcher = node.launcher
        if launcher.start is None:
            return
        for rank, status in launcher.ended.items():
            self._ended(node, rank, status, now)
        if (launcher.stopping or launcher.planned) and self.state is State.RUNNING:
            self._stop("it was being stopped", now)
        if self.state is State.STOPPING and not launcher.stopping:
            self._post([launcher.name], StopRanks(self._why))

    def _give_up_if_late(self, now: float) -> None:
        if (
            self.state is State.GATHERING
            and self._since is not None
            and now >= self._since + NODES_S
        ):
            self._end(NODE_LOST, f"only {len(self._nodes)} nodes came in {NODES_S:g} s")

    def _start(self) -> None:
        names = sorted(
            self._nodes,
            key=lambda name: (_place(self._nodes[name].launcher), self._order.index(name)),
        )
        world = sum(node.launcher.slots for node in self._nodes.values())
        first_rank = 0
        master = self._nodes[names[0]]
        host = master.launcher.host if len(names) > 1 else "127.0.0.1"
        for group_rank, name in enumerate(names):
            node = self._nodes[name]
            node.start = Start(
                *(
                    f"{master.launcher.name}-{self.attempt}",
                    self.attempt,
                    group_rank,
                    len(names),
                    first_rank,
                    world,
                    host,
                    master.port,
                ),
                hosts=tuple(self._nodes[other].launcher.host for other in names)
                if len(names) > 1
                else (),
            )
            node.ended = {}
            node.idle = False
            first_rank += node.launcher.slots
            self._post([name], node.start)

    def _ended(
        self, node: _Node, rank: int, status: int, now: float, *, updated: bool = False
    ) -> None:
        if rank in node.ended or rank not in node.ranks:
            return
        node.ended[rank] = status
        if status == 0:
            self._end_if_all_did_well()
        elif self._is_replaced(node, status, updated=updated) and not self._fails_by_itself(
            rank, now, updated=updated
        ):
            self.replaced += 1
            del node.ended[rank]
            self._post([node.launcher.name], Replace(rank, self.replaced))
        else:
            self._fault(status, f"rank {rank} {told(status)}", now)
            self._begin_anew_if_quiet(now)

    def _is_replaced(self, node: _Node, status: int, *, updated: bool) -> bool:
        """Not one that left since the whole job does.

        When another is through, only one that had done an update and said so: then all is done, and
        the next process is told so. That one does no update, so it is the last. Of a program that
        says nothing of updates, it would wait for ranks that have ended.
        """
        leaves = os.WIFEXITED(status) and os.WEXITSTATUS(status) in _ALL_LEAVE
        others_done = any(0 in other.ended.values() for other in self._nodes.values())
        return (
            self.state is State.RUNNING
            and node.launcher.replaces
            and not leaves
            and (updated or not others_done)
        )

    def _fails_by_itself(self, rank: int, now: float, *, updated: bool) -> bool:
        """Whether another process would die as well.

        However often one dies that did updates, the next one has the next updates to do.
        """
        before = [] if updated else self._fruitless_at.get(rank, [])
        self._fruitless_at[rank] = [*before, now] if not updated else []
        return len(before) >= FAULTS_MAX or (
            len(before) >= QUICK_MAX and now < before[-QUICK_MAX] + QUICK_S
        )

    def _fault(self, status: int, why: str, now: float) -> None:
        self._statuses.append(status)
        if self.state in (State.GATHERING, State.RUNNING):
            self._stop(why, now)

    def _stop(self, why: str, now: float) -> None:
        self._why = why
        for name in [name for name, node in self._nodes.items() if node.gone_since is not None]:
            self._forget(name)
        self._go(State.STOPPING)
        self._post(self._nodes, StopRanks(why))
        self._begin_anew_if_quiet(now)

    def _begin_anew_if_quiet(self, now: float) -> None:
        if self.state is not State.STOPPING or not all(node.idle for node in self._nodes.values()):
            return
        restarts_max = max((node.launcher.restarts_max for node in self._nodes.values()), default=0)
        if self._planned or self._is_minority or self.attempt >= restarts_max:
            self._end(self._status(), self._why)
            return
        self.attempt += 1
        self._since = now
        self._enough_since = None
        self._statuses = []
        self.claim = None
        self.succeeds = False
        for node in self._nodes.values():
            node.start = None
            node.ended = {}
        self._go(State.GATHERING)
        self._begin_if_there(now)

    def _end_if_all_did_well(self) -> None:
        if self.state is State.RUNNING and all(
            all(rank in node.ended for rank in node.ranks) for node in self._nodes.values()
        ):
            self._end(0, "all ranks have ended")

    def _status(self) -> int:
        """What a scheduler is told: go on from what was saved, or what the first rank that failed
        said.
        """
        ends = [
            *self._statuses,
            *(status for node in self._nodes.values() for status in node.ended.values()),
        ]
        if any(status == ExitStatus.SAVED << 8 for status in ends):
            return int(ExitStatus.SAVED)
        failed = [exit_status(status) for status in ends if status]
        if failed:
            return failed[0]
        return int(ExitStatus.SAVED) if self._planned else 0

    def _end(self, status: int, text: str) -> None:
        self._go(State.ENDED)
        self._over = Over(status, text)
        self._post(self._nodes, self._over)

    def _forget(self, name: str) -> None:
        del self._nodes[name]
        self._order.remove(name)

    def _go(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} → {state}"
        self.state = state

    def _post(self, to: Iterable[str], message: ToLauncher) -> None:
        self._posts += [Post(name, message) for name in to]

    def _done(self, now: float) -> list[Post]:
        times = [
            node.away_since + AWAY_S for node in self._nodes.values() if node.away_since is not None
        ]
        times += [
            node.gone_since + VACANT_S
            for node in self._nodes.values()
            if node.gone_since is not None
        ]
        if self.state is State.GATHERING and self._since is not None:
            times.append(
                self._since
                + (AWAY_S if any(node.start for node in self._nodes.values()) else NODES_S)
            )
            if self._enough_since is not None:
                times.append(self._enough_since + LAST_CALL_S)
        self.wake_at = min(times, default=math.inf) if self.state is not State.ENDED else math.inf
        posts = self._posts
        self._posts = []
        return posts


_ALL_LEAVE = frozenset({ExitStatus.SAVED, ExitStatus.NOT_SAVED, ExitStatus.OTHER_SIDE})


def _ranks(launcher: Launcher) -> range:
    return (
        range(launcher.start.first_rank, launcher.start.first_rank + launcher.slots)
        if launcher.start
        else range(0)
    )


def _place(launcher: Launcher) -> tuple[bool, int]:
    return launcher.node_rank is None, launcher.node_rank or 0


def exit_status(status: int) -> int:
    """What a shell makes of a status of wait(2)."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def told(status: int) -> str:
    """The same in words."""
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with status {os.WEXITSTATUS(status)}"
