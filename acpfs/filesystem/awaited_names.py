"""Lookups of names that are not there, but that another member has made and is about to persist:
they wait for it (`wait_for_peers`).

Knows what other members say is pending (`writeback.members.peer_names`) and asks the backing
directory anew at each news; and says what is pending here, for their sake. Used under the file
system's lock, which is free while a lookup waits; the kernel holds the lock of the directory.
"""

from __future__ import annotations

from collections.abc import Iterator

from acpfs.backing.name_filter import PATHS_MAX
from acpfs.config import Settings
from acpfs.filesystem.lowerview import HIDDEN, LowerView
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.steps import wait
from acpfs.runtime.clock import Clock
from acpfs.types import NO_INO, ROOT, Ino
from acpfs.writeback.log.log import CREATING, OperationLog
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.members.peer_names import PeerNames, Pending

_NAMING = CREATING | {OpKind.RENAME, OpKind.LINK}


class AwaitedNames:
    """Lookups that wait for other members, and what other members' lookups may wait for."""

    def __init__(
        self,
        settings: Settings,
        table: NodeTable,
        view: LowerView,
        log: OperationLog,
        peers: PeerNames,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._table = table
        self._view = view
        self._log = log
        self._now = clock.now
        self.peers = peers
        """Nobody has anything, until somebody tells it."""

    async def child(self, parent: Node, name: bytes) -> Ino:
        """As `LowerView.child`, which has just found nothing, for a name that may still come."""
        if not self._settings.wait_for_peers_s:
            return NO_INO
        directory = self._table.path(parent.ino)
        if self._is_ours(parent, name) or not self.peers.may_come(directory, name):
            return NO_INO
        place = (directory, name)
        until = self.peers.begin(place)
        if until is None:
            return NO_INO
        waited = False
        ino = NO_INO
        try:
            while True:
                comes = self.peers.may_come(
                    directory, name
                )  # before the look: what is not pending any more is there to be seen
                ino = await self._view.child(parent, name, anew=True)
                if ino and waited:
                    self._view.trusted_since = (
                        self._now()
                    )  # more of that node may have come, where it was not yet a moment ago
                if (
                    ino
                    or not comes
                    or self.peers.is_over(until)
                    or not self._settings.wait_for_peers_s
                ):
                    return ino
                waited = True
                await wait(self.peers.news(until))
        except InterruptedError:
            return NO_INO
        finally:
            self.peers.end(place, waited=waited, found=ino != NO_INO)

    @staticmethod
    def _is_ours(parent: Node, name: bytes) -> bool:
        """Whether nobody else has a say: a name that was removed here, and is not yet on the
        backing directory.
        """
        known = parent.dir.children.get(name)
        return (known is not None and known.pins > 0) or (parent.ino == ROOT and name == HIDDEN)

    # -- what is pending here

    def pending(self) -> Pending:
        """For our own record: the names that were made here and are not persisted; with very many,
        the directories that have them.
        """
        directories: dict[Ino, bytes | None] = {}
        if len(self._log) <= PATHS_MAX:
            return Pending(
                [path for op in self._log for path in self._made(op, directories)],
                of_directories=False,
            )
        found = [
            self._path(directory, directories) for directory in self._log.directories(PATHS_MAX)
        ]
        return Pending([path for path in found if path is not None], of_directories=True)

    def _made(self, op: Op, directories: dict[Ino, bytes | None]) -> Iterator[bytes]:
        """The path that an operation makes, if it is there (still) as the application sees it, and
        nothing has to be decided first.
        """
        if op.kind not in _NAMING or op.parked:
            return
        directory, name = (
            (op.new_parent, op.new_name) if op.kind is OpKind.RENAME else (op.parent, op.name)
        )
        path = self._path(directory, directories)
        if path is None:
            return
        child = self._table[directory].dir.children.get(name)
        if child is not None and child.ino:
            yield path + b"/" + name if path else name

    def _path(self, directory: Ino, known: dict[Ino, bytes | None]) -> bytes | None:
        """Where a directory is, as the application sees it; None: nowhere."""
        if directory not in known:
            node = self._table.get(directory)
            known[directory] = (
                self._table.path(directory)
                if node is not None and node.is_dir and not node.is_removed
                else None
            )
        return known[directory]
