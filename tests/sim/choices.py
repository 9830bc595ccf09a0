"""What a seed decides: the knobs of a history, and a stream of chance for each decision.

A decision draws from its own stream, which its name says (`stream`): a call of a program, a fault of
a life. So one that is left out (`Choices.without_calls`) changes none of the others, and a history that
fails can be made shorter.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from acpfs.config import WhenFull


class Profile(enum.Enum):
    """Which knobs a seed may turn."""

    PLAIN = "plain"
    """Everything is killed at once, daemon and programs; the next daemon mounts anew."""
    SESSION = "session"
    """The daemon alone is killed; the next one takes over what is open and what is not answered."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Which history, and what is left out of it."""

    seed: int
    profile: Profile
    without_calls: frozenset[tuple[str, int]] = frozenset()
    """(program, number of its call)."""
    without_faults: bool = False
    lives_max: int = 99
    in_order: bool = False
    """Threads have their turns in the order in which they came."""

    def stream(self, *name: object) -> random.Random:
        """The chance of one decision."""
        return random.Random(f"{self.seed}/{self.profile.value}/{name}")


@dataclass(frozen=True, slots=True)
class Knobs:
    """The world of one history."""

    programs: int
    lives: int
    calls: int
    """Of each program."""
    error_rate: float
    """Share of the storage's calls that fail, before or after they had their effect."""
    when_full: WhenFull
    ram_bytes: int
    keeps_session: bool
    counts_subdirectories: bool
    inherited_files: int
    """Of each program, on the storage before anybody mounts it."""
    sizes: tuple[int, ...]

    @classmethod
    def drawn(cls, choices: Choices) -> Knobs:
        chance = choices.stream("knobs")
        lives = min(choices.lives_max, chance.randrange(1, 6))
        return cls(
            programs=chance.choice((1, 1, 2, 3)),
            lives=lives,
            calls=chance.randrange(4, 14 * lives + 4),
            error_rate=0.0 if choices.without_faults else chance.choice((0.0, 0.0, 0.02, 0.1)),
            when_full=WhenFull.WAIT,
            ram_bytes=8 << 20,
            keeps_session=choices.profile is Profile.SESSION,
            counts_subdirectories=chance.random() < 0.7,
            inherited_files=chance.choice((0, 0, 3)),
            sizes=(0, 1, 100, 5000, 60_000, 200_000),
        )
