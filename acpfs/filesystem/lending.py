"""What this member gives to others: ranges of clean files of which RAM has all bytes, and of files
that are on their way to RAM.

Dirty bytes are given to nobody: who asks knows a file by what it looks like on the storage, and
there they are not. A range counts for who asked only if nobody could change it from the moment it
was lent until all of it had arrived (`lent`); and nothing is lent of a file that somebody may
write to, be it through a mapping alone. Waits for nothing; thread-safe, under the file system's
lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from acpfs.exchange.beside import Loan
from acpfs.exchange.exchange_records import Availability, Has, VersionName
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.fill import Coming, Fills
from acpfs.filesystem.content.lent import LentBytes
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.mending import Mending
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.upper import UpperLayer
from acpfs.types import NO_TIER, TierId

BUSY_BYTES = 64 << 20
"""With more than that to be stored, a member's network is its own drain's."""


class _Token(NamedTuple):
    lent: LentBytes
    fd: int


class Lending:
    """See above; implements `acpfs.exchange.beside.Lender`."""

    def __init__(
        self, upper: UpperLayer, contents: Contents, fills: Fills, view: LowerView, mending: Mending
    ) -> None:
        self._lock = upper.lock
        self._table = upper.table
        self._tier = upper.tier
        self._log = upper.log
        self._step = upper.state.step
        self._contents = contents
        self._fills = fills
        self._view = view
        self._mending = mending

    def has(self, file: VersionName, asker: str) -> Availability:
        """What there is of a version; who asks reads it, too."""
        with self._lock:
            node = self._node(file)
            if node is None or self._is_busy():
                return Availability(Has.NO)
            coming = self._coming(node, file)
            if coming is not None:
                if coming.fill.members is not None:
                    coming.fill.members.joined(asker)
                return Availability(Has.COMING, coming.fill.parts_there())
            return Availability(Has.WHOLE if self._whole(node) else Has.NO)

    def lend(self, file: VersionName, offset: int, size: int, asker: str) -> Future[Loan | None]:
        """A range, when it is there."""
        done: Future[Loan | None] = Future()
        with self._lock:
            node = self._node(file)
            coming = None if node is None else self._coming(node, file)
            waits = None if coming is None else coming.fill.give(offset, size)
            if waits is None and coming is not None:
                done.set_result(None)
                return done
        _after(waits or [], lambda: done.set_result(self._now(file, offset, size, asker)))
        return done

    def end(self, loan: Loan) -> bool:
        """The range has arrived, or nobody wants it: whether it is what it was."""
        token = loan.token
        assert isinstance(token, _Token)
        with self._lock, self._step():
            self._tier.read_done(token.lent.tier_id, token.fd)  # its bytes may count no more
            return self._fills.lent.end(token.lent)

    def _now(self, file: VersionName, offset: int, size: int, asker: str) -> Loan | None:
        """A range that is there; None: it is not."""
        with self._lock:
            node = self._node(file)
            if node is None or self._is_busy():
                return None
            coming = self._coming(node, file)
            if coming is not None:
                before = coming.fill.before
                is_there = (
                    before is not None
                    and before.identity() == file.identity()
                    and coming.fill.has(offset, size)
                )
                return self._lent(coming.tier_id, size, asker) if is_there else None
            tier_id = self._whole(node)
            return self._lent(tier_id, size, asker) if tier_id else None

    def _lent(self, tier_id: TierId, size: int, asker: str) -> Loan | None:
        try:
            fd = self._tier.read_long(tier_id)
        except OSError:  # no descriptor left
            return None
        return Loan(fd, size, asker, _Token(self._fills.lent.begin(tier_id), fd))

    def _node(self, file: VersionName) -> Node | None:
        """The node that is that version, by all that the backing directory says of it."""
        path = tuple(file.path.split(b"/"))
        for node in self._table.by_lower(file.ino):
            if (
                node.is_file
                and node.identity == file.identity()
                and self._view.path(node) == path
                and not self._view.held(node)
            ):
                return node
        return None

    def _coming(self, node: Node, file: VersionName) -> Coming | None:
        coming = node.body.filling
        return coming if coming is not None and coming.identity == file.identity() else None

    def _whole(self, node: Node) -> TierId:
        """The tier file that has all of it, and that nobody can write to; 0: there is none."""
        clean = self._mending.clean(node.ino)
        if clean is None or not self._contents.is_as_stored(node):
            return NO_TIER
        return clean.tier_id if self._contents.is_quiet(node) else NO_TIER

    def _is_busy(self) -> bool:
        return self._log.sizes.unstored_bytes > BUSY_BYTES or self._tier.waiting() > 0


def _after(waits: Sequence[Future[None]], then: Callable[[], object]) -> None:
    """Call when all are done, in the thread of the last."""
    if not waits:
        then()
    else:
        waits[0].add_done_callback(lambda _done: _after(waits[1:], then))
