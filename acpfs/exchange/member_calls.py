"""The side of an exchange process that takes: asks other members what they have, and gets ranges.

Few connections to each member, which wait for the next range. What arrives goes to memory of its
own, never to a file of the RAM tier: a member that answers late could write into what that file is
by then.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from acpfs.exchange.exchange_records import Availability, MemberAddress, VersionName
from acpfs.exchange.link_streams import LinkFailedError
from acpfs.exchange.member_links import MemberLink, OwnName

LINKS_MAX = 2
"""To one member at the same time: more bring nothing, and a group of 32 has room for no more
(`listening.MEMBERS_MAX`).
"""
STALE_S = 20.0
"""A connection that was not used for so long is made anew: the other side ends it at some time."""
WORDS_MAX_S = 10.0
"""So long a member may say that a range will come; it says so for half that time."""
RANGE_MAX_S = 5.0
"""A member that takes longer for the bytes of a range is slower than any storage."""
CONNECTS = 2
"""So many times the patience with a word that is awaited: a handshake takes several, and keys."""
TURN_S = 5.0
"""So long a range waits for one of these connections."""


Linked = Callable[[str, str], object]
"""Told of each new connection: to which member, and in which way."""


def nobody(_node: str, _way: str) -> None:
    """Nobody wants to know."""


class MemberCalls:
    """To all members."""

    def __init__(
        self,
        own: OwnName,
        linked: Linked = nobody,
        links_max: int = LINKS_MAX,
    ) -> None:
        """`links_max`: to one member at the same time."""
        self._own = own
        self._linked = linked
        self._links_max = links_max
        self._changed = threading.Condition()
        self._idle: dict[MemberAddress, list[MemberLink]] = {}
        self._used: Counter[MemberAddress] = Counter()
        self._failed: Counter[MemberAddress] = Counter()

    def has(self, to: MemberAddress, file: VersionName, patience_s: float) -> Availability:
        """What a member has of a version. It learns that we read it.

        Raises:
            LinkFailedError: no answer.
        """
        with self.link(to, patience_s) as link:
            link.limit(patience_s)
            link.send({"do": "has", "file": file.told()})
            return Availability.heard(link.receive())

    def get(
        self, to: MemberAddress, file: VersionName, offset: int, size: int, patience_s: float
    ) -> int:
        """A descriptor of memory that has the range; -1: the member gives nothing of it.

        `patience_s`: without a byte, or a word that there will be some.

        Raises:
            LinkFailedError: it does not answer.
        """
        with self.link(to, patience_s) as link:
            link.limit(patience_s)
            link.send({"do": "get", "file": file.told(), "offset": offset, "size": size})
            until = time.monotonic() + WORDS_MAX_S
            said = link.receive()
            while said.get("wait") is True:
                if time.monotonic() >= until:
                    raise LinkFailedError("it says that the bytes come, and they do not")
                said = link.receive()
            if said.get("size") != size:
                return -1
            memory = os.memfd_create("acpfs-range", os.MFD_CLOEXEC)
            try:
                os.ftruncate(memory, size)
                with _mapped(memory, size) as view:
                    link.receive_into(view, RANGE_MAX_S)
                link.send({"do": "same"})
                is_same = link.receive().get("same") is True
            except BaseException:
                os.close(memory)
                raise
            if is_same:
                return memory
            os.close(memory)
            return -1

    def close(self) -> None:
        """End the connections that nobody uses."""
        with self._changed:
            for links in self._idle.values():
                for link in links:
                    link.close()
            self._idle.clear()

    @contextlib.contextmanager
    def link(self, to: MemberAddress, patience_s: float) -> Iterator[MemberLink]:
        """A connection, for as long as the block takes; it is closed where that fails."""
        link = self._taken(to, patience_s)
        try:
            yield link
        except BaseException:
            link.close()
            self._left(to, None)
            raise
        link.used_at = time.monotonic()
        self._left(to, link)

    def _taken(self, to: MemberAddress, patience_s: float) -> MemberLink:
        until = time.monotonic() + TURN_S
        with self._changed:
            failed = self._failed[to]
            while self._used[to] >= self._links_max:
                self._changed.wait(max(0.0, until - time.monotonic()))
                # Who waits behind a member that is gone has no time-out of his own to spend on it.
                if self._failed[to] != failed or time.monotonic() >= until:
                    raise LinkFailedError("the member is busy, or gone")
            self._used[to] += 1
            idle = self._idle.get(to, [])
            while idle:
                link = idle.pop()
                if time.monotonic() - link.used_at < STALE_S and not link.is_spent:
                    return link
                link.close()
        try:
            link = MemberLink.called(self._own, to, CONNECTS * patience_s)
        except BaseException:
            self._left(to, None)
            raise
        self._linked(to.node, link.way)
        return link

    def _left(self, to: MemberAddress, link: MemberLink | None) -> None:
        with self._changed:
            self._used[to] -= 1
            if link is not None:
                self._idle.setdefault(to, []).append(link)
            else:
                self._failed[to] += 1
                for one in self._idle.pop(to, []):  # they lead to the same place
                    one.close()
            self._changed.notify_all()


@contextlib.contextmanager
def _mapped(fd: int, size: int) -> Iterator[memoryview]:
    mapped = mmap.mmap(fd, size)
    try:
        with memoryview(mapped) as view:
            yield view
    finally:
        with contextlib.suppress(BufferError):  # an error's stack has a part: it goes with that
            mapped.close()
