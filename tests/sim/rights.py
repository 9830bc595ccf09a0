"""What others may do with a file on the storage, by what was told of its mode.

A mode that gives less has its place in the order: nothing that began after it was told is shown
while the file, with whichever content, can be used by more (S595). One that gives more may come
with a later content. When all is persisted, nobody has more than was set last.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from acpfs.filesystem.records import AttributeChange
from tests.sim.oracles import Told
from tests.sim.shown import MODE, Shown, attribute
from tests.sim.trace import Finding

SHARE = 0.4
"""Of histories of several processes that have it."""
NUMBER = 235
"""With it, no history that is named anywhere has it: they are what they were before."""
CHANGES = 0.3
"""Share of calls behind which some attribute of a file is set."""
MODES = (0o600, 0o640, 0o644, 0o666)
XATTR = b"user.a"


class Rights:
    """Of one file."""

    def __init__(self) -> None:
        """It is there, or will be, with those that programs give it."""
        self._told = [(0, 0o644)]
        """(event of the answer, mode)."""
        self._pending: int | None = None
        self.xattr: bytes | None = None

    @property
    def mode(self) -> int:
        """As it was set last."""
        return self._told[-1][1]

    def begin(self, mode: int) -> None:
        """A call would make it so."""
        self._pending = mode

    def end(self, event: int) -> None:
        """It was told that it is so."""
        assert self._pending is not None
        self._told.append((event, self._pending))
        self._pending = None

    def is_new(self) -> None:
        """Another file has the name."""
        self._told.append((self._told[-1][0], 0o644))
        self.xattr = None

    def shown(self, mode: int) -> None:
        """The mount shows this after a decision: no more than was set last.

        Raises:
            Finding: it is more.
        """
        if mode & ~self.mode:
            raise Finding("RIGHTS", f"shown as {mode:o} after discard, set last to {self.mode:o}")
        self._told.append((self._told[-1][0], mode))

    def allowed(self, began: int) -> int:
        """What anybody may do when the storage shows what began then."""
        before = [at for at, (event, _mode) in enumerate(self._told) if event < began]
        allowed = self._pending or 0
        for _event, mode in self._told[before[-1] if before else 0 :]:
            allowed |= mode
        return allowed

    def at_the_end(self, path: str) -> Shown:
        """Attributes that it has."""
        found = {attribute(path.encode(), MODE): b"%o" % self.mode}
        if self.xattr is not None:
            found[attribute(path.encode(), XATTR)] = self.xattr
        return found

    def judge(self, path: str, attributes: Shown, allowed: int, *, is_persisted: bool) -> None:
        """What the storage has of it.

        Raises:
            Finding: somebody may do more, or what is persisted is not there.
        """
        text = attributes.get(attribute(path.encode(), MODE))
        if text is None:
            return
        if (mode := int(text, 8)) & ~allowed:
            raise Finding("RIGHTS", f"{path} is there with mode {mode:o}, and may have {allowed:o}")
        xattr = attributes.get(attribute(path.encode(), XATTR))
        if is_persisted and self.xattr is not None and xattr != self.xattr:
            raise Finding("RIGHTS", f"{path} is persisted with {xattr!r}, and not {self.xattr!r}")


def drawn(chance: random.Random) -> AttributeChange | bytes:
    """A mode, or a value for the attribute."""
    if chance.random() < 0.7:
        return AttributeChange(mode=chance.choice(MODES))
    return chance.randbytes(5)


def judge_in_order(
    files: Iterable[tuple[str, Told, Rights]], others: Iterable[Told], attributes: Shown
) -> None:
    """Whatever is shown of `others` now."""
    seen = [(told, told.moments[told.at].began) for told in others]
    for path, told, rights in files:
        latest = max((began for other, began in seen if other is not told), default=0)
        rights.judge(path, attributes, rights.allowed(latest), is_persisted=False)
