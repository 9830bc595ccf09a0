"""Profiles that aim at one kind of place, to which drawn histories hardly ever come.

Each has the knobs of any history, but for some, by a stream of its own; `habits` and `faults` know
what else they do. So all other profiles are what they were before there were these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.sim.choices import KINDS, Choices, Knobs, Profile

COLD_SIZES = (5000, 60_000)
SAME_SIZE = (5000,)


def knobs_of(choices: Choices) -> Knobs:
    """The world of one history."""
    knobs = Knobs.drawn(choices)
    aim = AIMS.get(choices.profile)
    return knobs if aim is None else replace(knobs, **aim(choices, knobs))


def _often(**kinds: float) -> tuple[float, ...]:
    """Calls that come, and how often; no others."""
    return tuple(float(kinds.get(kind.replace(" ", "_"), 0)) for kind in KINDS)


def _lives(choices: Choices, least: int, most: int) -> dict[str, Any]:
    lives = choices.stream("aimed lives").randrange(least, most + 1)
    return {
        "lives": min(choices.lives_max, lives),
        "calls": choices.stream("aimed calls").randrange(6, 10 * lives + 7),
    }


def _forgetting(choices: Choices, knobs: Knobs) -> dict[str, Any]:
    chance = choices.stream("aim")
    faulty = not choices.without_faults
    return {
        **_lives(choices, 2, 5),
        "error_rate": chance.choice((0.0, 0.0, 0.03)) * faulty,
        "forget_rate": chance.choice((0.1, 0.3)) * faulty,
        "outage_s": chance.choice((0.0, 0.3)) * faulty,
        "keeps_session": chance.random() < 0.5,
        "reuses_numbers": False,
        "has_coarse_times": False,
        "is_tidied": False,
    }


def _cold(choices: Choices, knobs: Knobs) -> dict[str, Any]:
    chance = choices.stream("aim")
    faulty = not choices.without_faults
    return {
        **_lives(choices, 1, 3),
        "programs": chance.choice((1, 2)),
        "error_rate": 0.0,
        "outage_s": 0.0,
        "slow_rate": chance.choice((0.1, 0.3)) * faulty,
        "keeps_session": chance.random() < 0.5,
        "inherited_files": 8,
        "sizes": COLD_SIZES,
        "ram_bytes": (ram_bytes := chance.choice((400, 8192)) << 10),
        "later_ram_bytes": ram_bytes,
        "has_coarse_times": False,
        "is_tidied": False,
        "has_reader": True,
        "kinds": _often(
            save=1,
            overwrite=3,
            append=3,
            cut=1,
            rename=1,
            replace=2,
            exchange=2,
            set_time=2,
            change_mode=2,
            read=3,
            set_xattr=1,
        ),
    }


def _narrow(choices: Choices, knobs: Knobs) -> dict[str, Any]:
    chance = choices.stream("aim")
    faulty = not choices.without_faults
    return {
        **_lives(choices, 2, 5),
        "programs": 1,
        "error_rate": chance.choice((0.0, 0.03, 0.1)) * faulty,
        "outage_s": chance.choice((0.0, 0.3, 3.0)) * faulty,
        "keeps_session": chance.random() < 0.5,
        "reuses_numbers": True,
        "sizes": SAME_SIZE,
        "data_sizes": SAME_SIZE,
        "is_tidied": faulty and chance.random() < 0.6,
        "is_emptied": True,
        "kinds": _often(save=1, overwrite=3, link=3, rename=1, replace=3, delete=1, fsync=1),
    }


def _outdated(choices: Choices, knobs: Knobs) -> dict[str, Any]:
    chance = choices.stream("aim")
    faulty = not choices.without_faults
    return {
        **_lives(choices, 3, 5),
        "programs": 1,
        "spill_bytes": 64 << 20,
        "hang_rate": chance.choice((0.0, 0.1, 0.3)) * faulty,
        "outage_s": chance.choice((0.0, 3.0, 20.0)) * faulty,
        "ram_bytes": 2 << 20,
        "later_ram_bytes": 2 << 20,
        "journal_error_rate": 0.0,
        "journal_hang_rate": 0.0,
        "keeps_session": False,
    }


def _left(choices: Choices, knobs: Knobs) -> dict[str, Any]:
    chance = choices.stream("aim")
    faulty = not choices.without_faults
    return {
        **_lives(choices, 2, 4),
        "programs": chance.choice((1, 2)),
        "ram_bytes": 768 << 10,
        "later_ram_bytes": chance.choice((64, 128)) << 10,
        "share_bytes": 0,
        "spill_bytes": None,
        "outage_s": chance.choice((0.0, 3.0, 10.0)) * faulty,
        "keeps_session": False,
        "leaves_writers": True,
        "reads_on": False,
    }


def _held(choices: Choices, knobs: Knobs) -> dict[str, Any]:
    chance = choices.stream("aim")
    return {
        **_lives(choices, 1, 2),
        "programs": chance.choice((1, 1, 2)),
        "ram_bytes": 512 << 10,
        "later_ram_bytes": 512 << 10,
        "share_bytes": 0,
        "spill_bytes": None,
        "error_rate": 0.0,
        "hang_rate": 0.0,
        "outage_s": 0.0,
        "leaves_writers": False,
        "reads_on": False,
    }


def _mapped(choices: Choices, knobs: Knobs) -> dict[str, Any]:
    chance = choices.stream("aim")
    faulty = not choices.without_faults
    often = dict(zip(KINDS, _often(save=1, fsync=4, write_on=1, close=1), strict=True))
    return {
        **_lives(choices, 1, 3),
        "programs": 1,
        "ram_bytes": 2 << 20,
        "later_ram_bytes": 2 << 20,
        "share_bytes": 0,
        "spill_bytes": None,
        "error_rate": chance.choice((0.0, 0.1)) * faulty,
        "hang_rate": chance.choice((0.0, 0.1, 0.3)) * faulty,
        "outage_s": chance.choice((0.0, 0.3)) * faulty,
        "leaves_writers": False,
        "is_tidied": faulty,
        "is_emptied": True,
        # map, store, unmap, be killed
        "kinds": (*often.values(), 3.0, 4.0, 1.0, 0.0),
    }


def _handed_on(choices: Choices, knobs: Knobs) -> dict[str, Any]:
    return {
        **_lives(choices, 3, 5),
        "programs": 1,
        "calls": choices.stream("aimed calls").randrange(20, 70),
    }


AIMS: dict[Profile, Callable[[Choices, Knobs], dict[str, Any]]] = {
    Profile.FORGETTING: _forgetting,
    Profile.COLD: _cold,
    Profile.NARROW: _narrow,
    Profile.OUTDATED: _outdated,
    Profile.LEFT: _left,
    Profile.HELD: _held,
    Profile.MAPPED: _mapped,
    Profile.HANDED_ON: _handed_on,
}
