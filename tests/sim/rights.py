"""What others may do with a file on the storage, by what was told of its mode, owner and group.

Who may do less by a change is so from its place in the order on: nothing that began after it was
told is shown while he can use the file, with whichever content, for more (S595). What gives more
may come with a later content. When all is persisted, nobody has more than was set last.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import NamedTuple

from acpfs.backing import posix_acl
from acpfs.backing.posix_acl import ACCESS, GROUP, GROUP_OBJ, MASK, USER
from acpfs.filesystem.records import AttributeChange
from tests.sim import acls
from tests.sim.oracles import Told
from tests.sim.shown import MODE, OWNER, Shown, attribute
from tests.sim.trace import Finding

SHARE = 0.4
"""Of histories of several processes that have it."""
NUMBER = 235
"""With it, no history that is named anywhere has it: they are what they were before."""
CHANGES = 0.3
"""Share of calls behind which some attribute of a file is set."""
OWNERS_NUMBER = 1
"""With it, histories with rights that are named somewhere have no changes of owners."""
OWNERS = 0.5
"""Share of those with rights in which somebody gives files away, too."""
GIVES = 0.4
"""Share of changes there."""
UIDS = (0, 1000, 1001)
GIDS = (0, 100, 101)
PEOPLE = ((1000, 100), (1001, 101), (1000, 101), (1002, 100), (1002, 102))
"""Who may use a file, or not: owner and group of each, but for root, who may all."""
MODES = (0o600, 0o640, 0o644, 0o666)
XATTR = b"user.a"


class Look(NamedTuple):
    """What rights a file gives."""

    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    acl: bytes | None = None
    """For access; None: the mode says all."""

    def changed(self, change: AttributeChange) -> Look:
        """After a call."""
        mode = self.mode if change.mode is None else change.mode
        return Look(
            mode,
            self.uid if change.uid is None else change.uid,
            self.gid if change.gid is None else change.gid,
            None if self.acl is None else posix_acl.after_chmod(self.acl, mode),
        )

    def with_acl(self, value: bytes | None) -> Look:
        """After it is set, or removed (None)."""
        if value is None:
            return self._replace(acl=None)
        says_more = posix_acl.says_more(value)
        return self._replace(mode=posix_acl.mode_bits(value), acl=value if says_more else None)

    def may(self) -> tuple[int, ...]:
        """What each of `PEOPLE` may do, as bits of a mode."""
        return tuple(
            self.mode >> (6 if uid == self.uid else 3 if gid == self.gid else 0) & 7
            if self.acl is None or uid == self.uid
            else self._may_by(posix_acl.decode(self.acl), uid, gid)
            for uid, gid in PEOPLE
        )

    def _may_by(self, entries: list[posix_acl.Entry], uid: int, gid: int) -> int:
        """Who is no owner: by his name, else by his groups, else as all others."""
        mask = next(entry.may for entry in entries if entry.tag == MASK)
        named = [entry.may for entry in entries if (entry.tag, entry.id) == (USER, uid)]
        of_group = [
            entry.may
            for entry in entries
            if (entry.tag, entry.id) == (GROUP, gid) or (entry.tag == GROUP_OBJ and gid == self.gid)
        ]
        found = named or of_group
        return functools.reduce(int.__or__, found) & mask if found else self.mode & 7

    def __str__(self) -> str:
        acl = "" if self.acl is None else f" with {acls.words(self.acl)}"
        return f"{self.mode:o} of {self.uid}:{self.gid}{acl}"


def look_of(path: str, attributes: Shown) -> Look | None:
    """As a tree shows it; None: it is not there."""
    mode = attributes.get(attribute(path.encode(), MODE))
    if mode is None:
        return None
    uid, _colon, gid = attributes[attribute(path.encode(), OWNER)].partition(b":")
    acl = attributes.get(attribute(path.encode(), ACCESS))
    return Look(int(mode, 8), int(uid), int(gid), acl)


def is_more(look: Look, allowed: tuple[int, ...]) -> bool:
    """Whether somebody may do more than that."""
    return any(has & ~may for has, may in zip(look.may(), allowed, strict=True))


class Rights:
    """Of one file."""

    def __init__(self) -> None:
        """It is there, or will be, with those that programs give it."""
        self._told = [(0, Look())]
        """(event of the answer, what it gives)."""
        self._pending: Look | None = None
        self.xattr: bytes | None = None

    @property
    def last(self) -> Look:
        """As it was set last."""
        return self._told[-1][1]

    def begin(self, look: Look) -> None:
        """A call would make it so."""
        self._pending = look

    def end(self, event: int) -> None:
        """It was told that it is so."""
        assert self._pending is not None
        self._told.append((event, self._pending))
        self._pending = None

    def is_new(self) -> None:
        """Another file has the name."""
        self._told.append((self._told[-1][0], Look()))
        self.xattr = None

    def shown(self, look: Look) -> None:
        """The mount shows this after a decision: no more than was set last.

        Raises:
            Finding: it is more.
        """
        if is_more(look, self.last.may()):
            raise Finding("RIGHTS", f"shown as {look} after discard, set last to {self.last}")
        self._told.append((self._told[-1][0], look))

    def allowed(self, began: int) -> tuple[int, ...]:
        """What each of `PEOPLE` may do when the storage shows what began then."""
        before = [at for at, (event, _look) in enumerate(self._told) if event < began]
        looks = [look for _event, look in self._told[before[-1] if before else 0 :]]
        looks += [] if self._pending is None else [self._pending]
        allowed = [0] * len(PEOPLE)
        for look in looks:
            allowed = [one | more for one, more in zip(allowed, look.may(), strict=True)]
        return tuple(allowed)

    def at_the_end(self, path: str) -> Shown:
        """Attributes that it has."""
        found = {
            attribute(path.encode(), MODE): b"%o" % self.last.mode,
            attribute(path.encode(), OWNER): b"%d:%d" % self.last[1:3],
        }
        if self.xattr is not None:
            found[attribute(path.encode(), XATTR)] = self.xattr
        if self.last.acl is not None:
            found[attribute(path.encode(), ACCESS)] = self.last.acl
        return found

    def judge(
        self, path: str, attributes: Shown, allowed: tuple[int, ...], *, is_persisted: bool
    ) -> None:
        """What the storage has of it.

        Raises:
            Finding: somebody may do more, or what is persisted is not there.
        """
        look = look_of(path, attributes)
        if look is None:
            return
        if is_more(look, allowed):
            may = dict(zip(PEOPLE, allowed, strict=True))
            raise Finding("RIGHTS", f"{path} is there with mode {look}, and may have {may}")
        xattr = attributes.get(attribute(path.encode(), XATTR))
        if is_persisted and self.xattr is not None and xattr != self.xattr:
            raise Finding("RIGHTS", f"{path} is persisted with {xattr!r}, and not {self.xattr!r}")


def drawn(chance: random.Random) -> AttributeChange | bytes:
    """A mode, or a value for the attribute."""
    if chance.random() < 0.7:
        return AttributeChange(mode=chance.choice(MODES))
    return chance.randbytes(5)


def given_away(chance: random.Random) -> AttributeChange:
    """To another owner, another group, or both."""
    owner = chance.choice((*UIDS, None))
    group = chance.choice(GIDS if owner is None else (*GIDS, None))
    return AttributeChange(uid=owner, gid=group)


def judge_in_order(
    files: Iterable[tuple[str, Told, Rights]], others: Iterable[Told], attributes: Shown
) -> None:
    """Whatever is shown of `others` now."""
    seen = [(told, told.moments[told.at].began) for told in others]
    for path, told, rights in files:
        latest = max((began for other, began in seen if other is not told), default=0)
        rights.judge(path, attributes, rights.allowed(latest), is_persisted=False)
