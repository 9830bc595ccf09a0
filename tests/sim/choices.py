"""What a seed decides: the knobs of a history, and a stream of chance for each decision.

A decision draws from its own stream, which its name says (`stream`): a call of a program, a fault of
a life. So one that is left out (`Choices.without_calls`) changes none of the others, and a history that
fails can be made shorter.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from acpfs.config import FsyncMode, WhenFull


class Profile(enum.Enum):
    """Which knobs a seed may turn."""

    PLAIN = "plain"
    """Everything is killed at once, daemon and programs; the next daemon mounts anew."""
    SESSION = "session"
    """The daemon alone is killed; the next one takes over what is open and what is not answered."""
    POWER = "power"
    """As plain, and after each call: what would the storage have after a loss of power now?"""
    DURABLE = "durable"
    """As power, where an fsync says that the file outlives one."""
    FULL = "full"
    """The storage has too little room, for some time."""
    HANG = "hang"
    """Calls on the storage take long."""


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
    hang_rate: float
    free_bytes: int | None
    """That the storage has beside what is there at first."""
    full_s: float
    """For how long."""
    fsync: FsyncMode
    looks_for_power_loss: bool
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
        profile, faulty = choices.profile, not choices.without_faults
        lives = min(choices.lives_max, chance.randrange(1, 6))
        return cls(
            programs=chance.choice((1, 1, 2, 3)),
            lives=lives,
            calls=chance.randrange(4, 14 * lives + 4),
            error_rate=chance.choice((0.0, 0.0, 0.02, 0.1)) * faulty,
            hang_rate=chance.choice((0.01, 0.1)) * (faulty and profile is Profile.HANG),
            free_bytes=(
                chance.randrange(1, 500_000) if faulty and profile is Profile.FULL else None
            ),
            full_s=chance.choice((1.0, 20.0, 100.0)),
            fsync=FsyncMode.DURABLE if profile is Profile.DURABLE else FsyncMode.ORDERED,
            looks_for_power_loss=profile in (Profile.POWER, Profile.DURABLE),
            when_full=WhenFull.WAIT,
            ram_bytes=8 << 20,
            keeps_session=profile is Profile.SESSION
            or (profile in (Profile.HANG, Profile.FULL) and chance.random() < 0.5),
            counts_subdirectories=chance.random() < 0.7,
            inherited_files=chance.choice((0, 0, 3)),
            sizes=(0, 1, 100, 5000, 60_000, 200_000),
        )
