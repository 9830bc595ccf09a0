"""What launchers of a job do together, without I/O: what happened goes in, what to tell whom comes out.

    GATHERING ──all nodes are there──► RUNNING ──a fault, or SIGTERM──► STOPPING ──nobody runs──► ENDED
        ▲                                                                   │
        └───────────────────────── a restart is left ◄──────────────────────┘

On one node the launcher asks this itself; on several the coordinator does. One that is started anew learns all of it from what launchers
register with. A rank's exit status is what wait(2) gave.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from acpfs.training.messages import ExitStatus, Launcher, Over, Replace, Start, StopRanks, ToLauncher

LAST_CALL_S = 30.0
"""So long more nodes may come when there are enough; torchrun's own."""
NODES_S = 600.0
"""So long the first node waits for the others; torchrun's own."""
AWAY_S = 15.0
"""A launcher whose connection ended may come again; its ranks go on meanwhile."""
REPLACED_MAX = 100
"""A rank that dies so often per node dies for a reason of its own."""
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

    @property
    def ranks(self) -> range:
        return range(self.start.first_rank, self.start.first_rank + self.launcher.slots) if self.start else range(0)


@dataclass
class Launchers:
    """Of one job."""

    state: State = State.GATHERING
    attempt: int = 0
    replaced: int = 0
    wake_at: float = math.inf
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    """In which they came."""
    _since: float | None = None
    _enough_since: float | None = None
    _planned: bool = False
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
        if launcher.start is None and self.state is not State.GATHERING and launcher.name not in self._nodes:
            self._forget_whom_it_replaces(launcher, now)
            if self.state is not State.STOPPING or self._planned:
                self._post([launcher.name], Over(NODE_LOST, "the job runs already, without this node"))
                return self._done(now)
        known = self._nodes.get(launcher.name)
        if launcher.start is None and known is not None and known.start is not None:  # START was lost on its way
            known.away_since = None
            self._post([launcher.name], known.start)
            return self._done(now)
        if launcher.name not in self._order:
            self._order.append(launcher.name)
        idle = launcher.start is None or all(rank in launcher.ended for rank in _ranks(launcher))
        self._nodes[launcher.name] = node = _Node(launcher, launcher.start, launcher.port, {}, idle)
        self.attempt = max(self.attempt, launcher.start.attempt if launcher.start else 0)
        self.replaced = max(self.replaced, launcher.replaced)
        self._planned = self._planned or launcher.planned
        if self.state is State.GATHERING:
            self._begin_if_there(now)
        else:
            self._learn(node, now)
        return self._done(now)

    def _forget_whom_it_replaces(self, launcher: Launcher, now: float) -> None:
        """A launcher that begins where one is away shows that this one does not come again."""
        for name, node in list(self._nodes.items()):
            if node.away_since is not None and launcher.node_rank == node.launcher.node_rank:
                self._lost(name, now)
                return

    def _lost(self, name: str, now: float) -> None:
        node = self._nodes[name]
        self._forget(name)
        self._fault(NODE_LOST << 8, f"node {node.launcher.node} is lost", now)

    def exited(self, name: str, rank: int, status: int, now: float) -> list[Post]:
        """A rank's process was waited for."""
        if (node := self._nodes.get(name)) is not None:
            self._ended(node, rank, status, now)
        return self._done(now)

    def idle(self, name: str, port: int, now: float) -> list[Post]:
        """Nobody runs on this node any more."""
        if (node := self._nodes.get(name)) is not None:
            node.idle, node.port = True, port
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
        for name, node in list(self._nodes.items()):
            if node.away_since is not None and now >= node.away_since + AWAY_S:
                self._lost(name, now)
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
        """Where ranks run already. Nothing is decided before all nodes have told how theirs are, or are lost."""
        assert self._since is not None
        came = [node for node in self._nodes.values() if node.start is not None]
        if len(came) < groups and now < self._since + AWAY_S:
            return
        self._go(State.RUNNING)
        for node in came:
            self._learn(node, now)
        if len(came) < groups:
            self._fault(NODE_LOST << 8, "a node did not come again", now)

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
        if self.state is State.GATHERING and self._since is not None and now >= self._since + NODES_S:
            self._end(NODE_LOST, f"only {len(self._nodes)} nodes came in {NODES_S:g} s")

    def _start(self) -> None:
        names = sorted(self._nodes, key=lambda name: (_place(self._nodes[name].launcher), self._order.index(name)))
        world, first_rank = sum(node.launcher.slots for node in self._nodes.values()), 0
        master = self._nodes[names[0]]
        host = master.launcher.host if len(names) > 1 else "127.0.0.1"
        for group_rank, name in enumerate(names):
            node = self._nodes[name]
            node.start = Start(
                f"{master.launcher.name}-{self.attempt}", self.attempt, group_rank, len(names), first_rank, world, host, master.port
            )
            node.ended, node.idle = {}, False
            first_rank += node.launcher.slots
            self._post([name], node.start)

    def _ended(self, node: _Node, rank: int, status: int, now: float) -> None:
        if rank in node.ended or rank not in node.ranks:
            return
        node.ended[rank] = status
        if status == 0:
            self._end_if_all_did_well()
        elif self._is_replaced(node, status):
            self.replaced += 1
            del node.ended[rank]
            self._post([node.launcher.name], Replace(rank, self.replaced))
        else:
            self._fault(status, f"rank {rank} {told(status)}", now)
            self._begin_anew_if_quiet(now)

    def _is_replaced(self, node: _Node, status: int) -> bool:
        """Not one that left since the whole job does, and none when most others are through."""
        leaves = os.WIFEXITED(status) and os.WEXITSTATUS(status) in _ALL_LEAVE
        enough = self.replaced < REPLACED_MAX * len(self._nodes)
        others_done = any(0 in other.ended.values() for other in self._nodes.values())
        return self.state is State.RUNNING and node.launcher.replaces and not leaves and enough and not others_done

    def _fault(self, status: int, why: str, now: float) -> None:
        self._statuses.append(status)
        if self.state in (State.GATHERING, State.RUNNING):
            self._stop(why, now)

    def _stop(self, why: str, now: float) -> None:
        self._why = why
        self._go(State.STOPPING)
        self._post(self._nodes, StopRanks(why))
        self._begin_anew_if_quiet(now)

    def _begin_anew_if_quiet(self, now: float) -> None:
        if self.state is not State.STOPPING or not all(node.idle for node in self._nodes.values()):
            return
        restarts_max = max((node.launcher.restarts_max for node in self._nodes.values()), default=0)
        if self._planned or self.attempt >= restarts_max:
            self._end(self._status(), self._why)
            return
        self.attempt += 1
        self._since, self._enough_since, self._statuses = now, None, []
        for node in self._nodes.values():
            node.start, node.ended = None, {}
        self._go(State.GATHERING)
        self._begin_if_there(now)

    def _end_if_all_did_well(self) -> None:
        if self.state is State.RUNNING and all(all(rank in node.ended for rank in node.ranks) for node in self._nodes.values()):
            self._end(0, "all ranks have ended")

    def _status(self) -> int:
        """What a scheduler is told: go on from what was saved, or what the first rank that failed said."""
        ends = [*self._statuses, *(status for node in self._nodes.values() for status in node.ended.values())]
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
        times = [node.away_since + AWAY_S for node in self._nodes.values() if node.away_since is not None]
        if self.state is State.GATHERING and self._since is not None:
            times.append(self._since + (AWAY_S if any(node.start for node in self._nodes.values()) else NODES_S))
            if self._enough_since is not None:
                times.append(self._enough_since + LAST_CALL_S)
        self.wake_at = min(times, default=math.inf) if self.state is not State.ENDED else math.inf
        posts, self._posts = self._posts, []
        return posts


_ALL_LEAVE = frozenset({ExitStatus.SAVED, ExitStatus.NOT_SAVED, ExitStatus.OTHER_SIDE})


def _ranks(launcher: Launcher) -> range:
    return range(launcher.start.first_rank, launcher.start.first_rank + launcher.slots) if launcher.start else range(0)


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
