"""POSIX ACLs in histories: which ones are set, and what a thing has that is made.

By streams of chance of their own, and in some histories alone (`sets_acls`): all others are what
they were before there were any.
"""

from __future__ import annotations

import random

from acpfs.backing import posix_acl
from acpfs.backing.posix_acl import (
    ACCESS,
    DEFAULT,
    GROUP,
    GROUP_OBJ,
    MASK,
    OTHER,
    USER,
    USER_OBJ,
    Entry,
)
from tests.sim.choices import Choices, Knobs, Profile
from tests.sim.shown import MODE, Shown, attribute

SHARE = 0.25
"""Of histories of programs that have them, where the storage has."""
NUMBER = 11766
"""With it, no history that is named anywhere has them: they are what they were."""
CREW_NUMBER = 2
"""The same, of several processes."""
CREW_SHARE = 0.5
"""Of those histories of several processes that set rights."""
CHANGES = 0.25
"""Share of calls behind which one is set, or removed."""
REMOVES = 0.25
DEFAULTS = 0.6
"""Share of those of directories that are for what is made there."""
PROFILES = (
    Profile.PLAIN,
    Profile.SESSION,
    Profile.POWER,
    Profile.DURABLE,
    Profile.FULL,
    Profile.SHORT,
    Profile.MIRROR,
    Profile.FORGETTING,
)
USERS = (1000, 1001)
GROUPS = (100, 101)
MAY = (0, 4, 6, 7)


def sets_acls(choices: Choices, knobs: Knobs) -> bool:
    """Whether programs do; what others make again has none (`Knobs.is_torn`)."""
    return (
        knobs.has_acls
        and not knobs.is_torn
        and choices.profile in PROFILES
        and choices.stream("acls", NUMBER).random() < SHARE
    )


def hands_on(choices: Choices) -> bool:
    """Whether directories get some for what is made there: after a loss of RAM there may be one
    that got nothing since it was made.
    """
    return choices.profile is not Profile.MIRROR


def drawn(chance: random.Random) -> bytes:
    """One for a file or a directory; some say no more than a mode."""
    if chance.random() < 0.15:
        return posix_acl.of_mode(chance.choice((0o600, 0o640, 0o644)))
    users = [Entry(USER, chance.choice(MAY), uid) for uid in USERS if chance.random() < 0.6]
    groups = [Entry(GROUP, chance.choice(MAY), gid) for gid in GROUPS if chance.random() < 0.4]
    return posix_acl.encode(
        [
            Entry(USER_OBJ, chance.choice((6, 7))),
            *users,
            Entry(GROUP_OBJ, chance.choice(MAY)),
            *groups,
            Entry(MASK, chance.choice(MAY)),
            Entry(OTHER, chance.choice((0, 4))),
        ]
    )


def words(value: bytes | None) -> str:
    """For people."""
    if value is None:
        return "none"
    kinds = {USER_OBJ: "u", USER: "u", GROUP_OBJ: "g", GROUP: "g", MASK: "m", OTHER: "o"}
    return ",".join(
        f"{kinds[one.tag]}{one.id if one.tag in (USER, GROUP) else ''}:{one.may}"
        for one in posix_acl.decode(value)
    )


def of_new(place: bytes, asked: int, now: Shown) -> Shown:
    """Rights of what is made there with this mode, by what is so `now`."""
    above = place.rstrip(b"/").rpartition(b"/")[0] + b"/"
    default = now.get(attribute(above, DEFAULT))
    if default is None:
        return {attribute(place, MODE): b"%o" % asked}
    mode, access = posix_acl.inherited(default, asked)
    found = {attribute(place, MODE): b"%o" % mode}
    if access is not None:
        found[attribute(place, ACCESS)] = access
    if place.endswith(b"/"):
        found[attribute(place, DEFAULT)] = default
    return found


def changed(shown: Shown, place: bytes, name: bytes, value: bytes | None) -> None:
    """Set one, or remove it (None); the mode goes with it."""
    shown.pop(attribute(place, name), None)
    if value is None:
        return
    if name == DEFAULT:
        shown[attribute(place, name)] = value
        return
    shown[attribute(place, MODE)] = b"%o" % posix_acl.mode_bits(value)
    if posix_acl.says_more(value):
        shown[attribute(place, name)] = value


def mode_changed(shown: Shown, place: bytes) -> None:
    """The mode has been set: the ACL goes with it."""
    access = shown.get(attribute(place, ACCESS))
    if access is not None:
        mode = int(shown[attribute(place, MODE)], 8)
        shown[attribute(place, ACCESS)] = posix_acl.after_chmod(access, mode)
