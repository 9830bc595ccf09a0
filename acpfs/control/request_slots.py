"""How many control connections there may be at a time, so that none keeps the others out.

For one task at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from acpfs.errors import AcpfsError

GROUP_SHARE = 2
"""Members of the control group together have one place in so many: the mount's owner and root
always find one.
"""
ROOT_SHARE = 16
"""One place in so many is root's alone, who may have to look after a mount whose owner has taken
all others.
"""


class NoPlaceError(AcpfsError):
    """There are too many already."""


class RequestSlots:
    """Places for connections of one kind."""

    def __init__(self, count: int, what: str) -> None:
        """`what`: what there are too many of, when there are."""
        self.count = count
        self._what = what
        self.taken = 0
        self._taken_by_group = 0

    @contextmanager
    def one(self, *, owner: bool, root: bool = False) -> Iterator[None]:
        """Take a place; `owner`: for the mount's owner or root; `root`: for root.

        Raises:
            NoPlaceError: there is none.
        """
        places = self.count if root else self.count - self.count // ROOT_SHARE
        if self.taken >= places:
            raise NoPlaceError(f"too many {self._what} ({places})")
        if not owner and self._taken_by_group >= self.count // GROUP_SHARE:
            raise NoPlaceError(
                f"too many {self._what} of the control group ({self.count // GROUP_SHARE})"
            )
        self.taken += 1
        self._taken_by_group += not owner
        try:
            yield
        finally:
            self.taken -= 1
            self._taken_by_group -= not owner
