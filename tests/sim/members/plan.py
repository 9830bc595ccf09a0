"""What a seed decides of a history of members: who they are, how they die and come back, what the
storage shows them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from tests.sim.choices import Choices, Knobs, Profile

NODES = ("a", "b", "c")
CLOCK_BOUND_S = 0.5
NODE_TIMEOUT_S = 30.0
HEARTBEATS_S = (2.0, 5.0)
LIVES_MAX = 3
ABSENCES_S = (0.5, 5.0, 60.0, 150.0)
SET_RIGHT_S = 2.0
JOINS_S = (0.0, 0.0, 5.0, 20.0, 60.0)
CACHED_S = (0.0, 3.0, 30.0)
"""For how long the storage's client may remember a listing and a record: less than what acpfs
reckons with.
"""
DAWDLES = 0.4
DAWDLES_NUMBER = 31
"""With this one no history of the corpus dawdles: those are what they were before any did."""


class Style(enum.Enum):
    """How a job changes its pointer."""

    IN_PLACE = "written in place"
    RENAMED = "renamed to its name"
    LINKED = "a symlink that is renamed to its name"


class Ending(enum.Enum):
    """How a life of a member ends."""

    DAEMON = "its daemon is killed"
    """The next one takes over; programs wait."""
    PROGRAMS = "all its processes are killed"
    """The next daemon mounts anew, with the RAM tier as it was."""
    MACHINE = "its machine is lost"
    """With its RAM tier."""


@dataclass(frozen=True, slots=True)
class Absence:
    """After one life of a member."""

    ending: Ending
    seconds: float
    is_forgotten: bool
    """By an operator, once it is missing."""


@dataclass(frozen=True, slots=True)
class Partition:
    """For some time a member's calls on records fail."""

    from_s: float
    until_s: float
    is_read: bool
    """It cannot read those of others, either."""


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """Of one member."""

    node: str
    joins_s: float
    """When it is first mounted."""
    ahead_s: float
    """Of its wall clock."""
    set_at_s: float
    set_by_s: float
    """Somebody sets its wall clock, and right again `SET_RIGHT_S` later: the clock bound is the
    operator's word. Not where its node's clock begins meanwhile: a wall clock that is wrong then is
    wrong by that word.
    """
    cached_s: float
    lives: tuple[Absence, ...]
    """What comes after each life but the last."""
    returns: bool
    """After its last absence."""
    partition: Partition | None
    knobs: Knobs


@dataclass(frozen=True, slots=True)
class Plan:
    """Of the whole history."""

    members: tuple[MemberPlan, ...]
    heartbeat_s: float
    steps: int
    style: Style
    keeps: int
    """Checkpoints that the job leaves when it rotates."""
    changes_coordinator: bool
    is_guarded: bool
    """`keep_last_persisted`."""
    awaits_news: bool
    """Checkpoints begin at once as somebody is back, or as somebody's clock is set."""
    dawdles: bool
    """The temporary file of a pointer may be stored before it is renamed to the pointer's name."""

    @classmethod
    def drawn(cls, choices: Choices) -> Plan:
        chance = choices.stream("plan")
        nodes = NODES[: chance.choice((2, 2, 3))]
        if choices.profile is Profile.RETURNING:
            return cls._of_news(choices)._of_who_returns()
        if choices.has_habits:
            return cls._of_news(choices)
        return cls(
            members=tuple(_member(choices, node) for node in nodes),
            heartbeat_s=chance.choice(HEARTBEATS_S),
            steps=chance.randrange(2, 6),
            style=chance.choice(list(Style)),
            keeps=chance.choice((1, 1, 2)),
            changes_coordinator=chance.random() < 0.5,
            is_guarded=chance.random() < 0.3,
            awaits_news=False,
            dawdles=False,
        )

    @classmethod
    def _of_news(cls, choices: Choices) -> Plan:
        """A job whose checkpoints begin when something has just changed: others may not know yet.

        All write the pointer, under one temporary name.
        """
        chance = choices.stream("plan of news")
        nodes = NODES[: chance.choice((2, 3, 3))]
        return cls(
            members=tuple(_member(choices, node) for node in nodes),
            heartbeat_s=chance.choice(HEARTBEATS_S),
            steps=chance.randrange(3, 8),
            style=chance.choice((Style.RENAMED, Style.RENAMED, Style.LINKED)),
            keeps=chance.choice((1, 2)),
            changes_coordinator=True,
            is_guarded=False,
            awaits_news=True,
            dawdles=choices.stream("dawdles", DAWDLES_NUMBER).random() < DAWDLES,
        )

    def _of_who_returns(self) -> Plan:
        """Pointers are made beside their names, and stored there, before they are renamed."""
        return replace(self, style=Style.RENAMED, dawdles=True)

    def __str__(self) -> str:
        """For people."""
        words = [
            (
                f"{len(self.members)} members, {self.steps} checkpoints, the pointer is "
                f"{self.style.value}"
            ),
            f"{self.keeps} kept",
            "any member writes the pointer" if self.changes_coordinator else "",
            "the last checkpoint is guarded" if self.is_guarded else "",
            "checkpoints begin as something changes" if self.awaits_news else "",
            "the pointer is renamed some time after it was made" if self.dawdles else "",
            *map(_words_of, self.members),
        ]
        return ", ".join(word for word in words if word)


def _words_of(plan: MemberPlan) -> str:
    ends = [
        f"{one.ending.value} for {one.seconds} s{' and forgotten' * one.is_forgotten}"
        for one in plan.lives
    ]
    back = "" if plan.returns else " for good"
    comes = f"comes after {plan.joins_s} s, " if plan.joins_s else ""
    lives = "; ".join(ends) or "lives"
    return f"{plan.node}: {comes}clock {plan.ahead_s:+.2f} s, {lives}{back}"


def _member(choices: Choices, node: str) -> MemberPlan:
    chance = choices.stream("member", node)
    is_session = chance.random() < 0.3
    count = min(chance.choice((1, 1, 2, LIVES_MAX)), choices.lives_max)
    lives = tuple(_absence(choices, node, at, is_session=is_session) for at in range(count - 1))
    from_s = chance.uniform(0.0, 120.0)
    partition = Partition(from_s, from_s + chance.choice((10.0, 60.0)), chance.random() < 0.5)
    return MemberPlan(
        node,
        joins_s=choices.stream("joins", node).choice(JOINS_S) * (node != NODES[0]),
        ahead_s=chance.uniform(-0.5, 0.5) * CLOCK_BOUND_S,
        set_at_s=chance.uniform(5.0, 60.0),
        set_by_s=chance.choice((0.0, 0.0, 0.0, -3.0, 3.0)),
        cached_s=chance.choice(CACHED_S),
        lives=lives,
        returns=is_session or chance.random() < 0.7 or choices.profile is Profile.RETURNING,
        partition=partition if chance.random() < 0.25 and not choices.without_faults else None,
        knobs=replace(
            Knobs.drawn(choices),
            lives=count,
            keeps_session=is_session,
            error_rate=chance.choice((0.0, 0.0, 0.03)) * (not choices.without_faults),
            hang_rate=0.0,
            outage_s=0.0,
            last_faults_s=0.0,
        ),
    )


def _absence(choices: Choices, node: str, at: int, *, is_session: bool) -> Absence:
    chance = choices.stream("absence", node, at)
    if choices.profile is Profile.RETURNING and not is_session:
        seconds = chance.choice((5.0, 60.0, 60.0, 150.0))
        return Absence(Ending.PROGRAMS, seconds, chance.random() < 0.7)
    if is_session:
        return Absence(Ending.DAEMON, chance.choice((0.0, 1.0)), is_forgotten=False)
    ending = chance.choice((Ending.PROGRAMS, Ending.MACHINE))
    return Absence(ending, chance.choice(ABSENCES_S), chance.random() < 0.4)
