"""Where a cold file's bytes come from: from members that have them, or read them just now, before
the storage.

Owns who is asked for which part. A member that has the whole version is asked first. Else each part
of 8 MiB belongs to one of those who read the file, by a hash that all of them know: it reads that
part from the storage, and the others get it there. So the storage is read once, whoever comes, and
nobody has to agree on anything: where two differ about who that is, a part is read twice.

Whoever does not answer is left alone for a while. Thread-safe.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.exchange.beside import MemberFailedError
from acpfs.exchange.exchange_records import (
    PART_BYTES,
    Availability,
    Has,
    MemberAddress,
    VersionName,
)
from acpfs.runtime.given import Runtime

GROUP_MAX = 32
"""So many members share what they read: the storage is read once for each group."""
RESTS_S = 5.0
"""So long a member that did not answer is asked for nothing more of the file."""
TRIES_MAX = 2
"""Members that are asked for a range before the storage is."""


class MemberSource(Protocol):
    """Other members, as `acpfs.exchange.beside.Exchange` has them."""

    @property
    def node(self) -> str:
        """This member."""
        ...

    def others(self) -> Sequence[MemberAddress]: ...
    def ask(self, to: MemberAddress, file: VersionName) -> Callable[[], Availability]: ...
    def get(self, to: MemberAddress, file: VersionName, offset: int, size: int) -> int: ...
    def took(self, node: str, size: int) -> None: ...


class Range(NamedTuple):
    """A range in memory."""

    fd: int
    """The caller closes it."""
    node: str
    """Whose bytes they are."""


def group_of(nodes: Iterable[str], own: str) -> list[str]:
    """The members that share what they read with this one, itself among them."""
    everyone = sorted({*nodes, own})
    first = everyone.index(own) // GROUP_MAX * GROUP_MAX
    return everyone[first : first + GROUP_MAX]


def owners(file: VersionName, part: int, nodes: Iterable[str]) -> list[str]:
    """Members in the order in which a part belongs to them; the same for whoever asks."""

    def rank(node: str) -> bytes:
        what = f"{file.identity()} {part} {node}".encode()
        return hashlib.blake2b(what, digest_size=16).digest()

    return sorted(nodes, key=rank, reverse=True)


class FromMembers:
    """For one version of one file."""

    def __init__(self, source: MemberSource, file: VersionName, runtime: Runtime) -> None:
        self._source = source
        self._file = file
        self._now = runtime.clock.now
        self._lock = threading.Lock()
        self._learning = runtime.threads.lock()
        self._has: dict[str, Has] = {}
        self._parts: dict[str, int] = {}
        """Member → parts that it had when it was asked."""
        self._others: dict[str, MemberAddress] = {}
        self._rests_until: dict[str, float] = {}
        self._is_known = False
        self.changes = 0
        """Grows when somebody else has the file, or has not any more."""

    def joined(self, node: str) -> None:
        """Another member reads the file, too. Never waits."""
        with self._lock:
            if self._has.get(node, Has.NO) is Has.NO:
                self._has[node] = Has.COMING
                self.changes += 1

    def get(self, before: LowerStat, offset: int, size: int) -> Range | None:
        """A range of the version, which lies within one part; None: the storage is to be asked.

        `before`: how the file was on the backing directory before its first byte. Waits for
        members, and no longer than they answer.
        """
        if before.identity() != self._file.identity():
            return None
        self._learn()
        for node in self._candidates(offset // PART_BYTES):
            found = self._get(node, offset, size)
            if found is not None:
                return found
        return None

    def took(self, node: str, size: int) -> None:
        """So much of what a member gave is part of the file now."""
        self._source.took(node, size)

    def own_parts(self, count: int) -> list[int]:
        """Of the first `count` parts those that nobody else reads from the storage: first of all
        these, as others wait for them. Waits for members, too.
        """
        self._learn()
        with self._lock:
            if Has.COMING not in self._has.values() or Has.WHOLE in self._has.values():
                return []
        return [part for part in range(count) if not self._candidates(part)]

    def _candidates(self, part: int) -> list[str]:
        """Whom to ask for it; nobody: it is this member's own."""
        now = self._now()
        with self._lock:
            awake = [
                (node, has)
                for node, has in self._has.items()
                if self._rests_until.get(node, now) <= now
            ]
            whole = [node for node, has in awake if has is Has.WHOLE]
            coming = [node for node, has in awake if has is Has.COMING]
            whole += [node for node in coming if self._parts.get(node, 0) >> part & 1]
        own = self._source.node
        ranked = owners(self._file, part, [*coming, own])
        before_own = ranked[: ranked.index(own)]
        return list(dict.fromkeys([*owners(self._file, part, whole), *before_own]))[:TRIES_MAX]

    def _get(self, node: str, offset: int, size: int) -> Range | None:
        with self._lock:
            to = self._others.get(node)
        if to is None:
            to = self._look_up(node)
        if to is None:
            return None
        try:
            fd = self._source.get(to, self._file, offset, size)
        except MemberFailedError:
            self._rests(node)
            return None
        if fd >= 0:
            return Range(fd, node)
        with self._lock:
            is_whole = self._has.get(node) is Has.WHOLE
        if is_whole:  # it has left RAM there, or gives nothing now
            self._forget(node)
        return None

    def _look_up(self, node: str) -> MemberAddress | None:
        found = next((one for one in self._source.others() if one.node == node), None)
        with self._lock:
            if found is not None:
                self._others[node] = found
        return found

    def _forget(self, node: str) -> None:
        with self._lock:
            self._has[node] = Has.NO
            self.changes += 1

    def _rests(self, node: str) -> None:
        with self._lock:
            self._rests_until[node] = self._now() + RESTS_S
            self.changes += 1

    def _learn(self) -> None:
        """Ask all once, all at the same time; whoever needs the answers waits for them."""
        with self._learning:
            if self._is_known:
                return
            others = {one.node: one for one in self._source.others()}
            group = group_of(others, self._source.node)
            others = {node: one for node, one in others.items() if node in group}
            with self._lock:
                self._others |= others
            answers = []
            for node, one in others.items():
                try:
                    answers.append((node, self._source.ask(one, self._file)))
                except MemberFailedError:
                    break  # this member's own process takes nothing now
            for node, answer in answers:
                self._heard(node, answer)
            self._is_known = True

    def _heard(self, node: str, answer: Callable[[], Availability]) -> None:
        try:
            holding = answer()
        except MemberFailedError:
            self._forget(node)
            self._rests(node)
            return
        has = holding.has
        with self._lock:
            self._parts[node] = holding.parts
            # It may have said by itself meanwhile that it reads the file.
            if has is not Has.NO or node not in self._has:
                self._has[node] = has
                self.changes += 1


class Members:
    """Of one mount."""

    def __init__(self, source: MemberSource | None, runtime: Runtime) -> None:
        """None: bytes come from the storage alone."""
        self._source = source
        self._runtime = runtime

    def are_there(self) -> bool:
        """Whether anybody can be asked."""
        return self._source is not None and bool(self._source.others())

    def of(self, path: LowerPath | None, identity: tuple[int, int, int, int]) -> FromMembers | None:
        """Where a version's bytes may come from; None: from the storage alone."""
        if self._source is None or path is None:
            return None
        return FromMembers(self._source, VersionName(b"/".join(path), *identity), self._runtime)
