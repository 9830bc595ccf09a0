"""What people ask: which files are where, in which state, and up to which number the log covers a
path.

Reads only; used under the file system's lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator

from acpfs.errors import errno_name
from acpfs.filesystem.closes import Closes
from acpfs.filesystem.eviction import below
from acpfs.filesystem.handles import Handles
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.op_paths import OperationPaths
from acpfs.filesystem.records import FileReport, IncompleteFile, WrittenFile
from acpfs.filesystem.upper import UpperLayer
from acpfs.types import Ino, Seq
from acpfs.writeback.log.ops import Op, VersionState


class Reports:
    """Views over nodes and log."""

    def __init__(
        self,
        upper: UpperLayer,
        handles: Handles,
        closes: Closes,
        paths: OperationPaths,
    ) -> None:
        self._wall = upper.runtime.clock.wall
        self._table = upper.table
        self._log = upper.log
        self._handles = handles
        self._closes = closes
        self._paths = paths

    def files(self, prefix: bytes) -> list[FileReport]:
        """One row per regular file that is in RAM or in the log."""
        rows = []
        for node in self._table.recorded():
            is_in_ram = not node.body.is_only_backing
            if node.is_file and node.names and (is_in_ram or self._log.is_active(node.ino)):
                path = self._table.path(node.ino)
                if below(path, prefix):
                    rows.append(self._file(node, path))
        return sorted(rows, key=lambda row: row.path)

    def _file(self, node: Node, path: bytes) -> FileReport:
        op = self._log.last_active_of(node.ino)
        return FileReport(
            path=path,
            size=node.size,
            lane=self._handles.lane_of(node),
            tier=self._tier(node),
            state=self._state(node, op),
            checksum=op.version.digest if op is not None and op.version is not None else "",
            error=errno_name(op.last_error) if op is not None and op.last_error else "",
            age_s=self._log.clock.age_s(op.logged_at)
            if op is not None
            else max(0.0, self._wall() - node.mtime_ns / 1e9),
            ino=node.ino,
            writers=self._closes.at_it(node) if node.body.modified else [],
        )

    def being_written(self, limit: int) -> list[WrittenFile]:
        """Files that somebody writes, those first that have been so for longest."""
        nodes = (
            one
            for one in self._handles.open_nodes()
            if one.body.modified and not self._closes.is_half(one)
        )
        oldest = heapq.nsmallest(limit, nodes, key=lambda one: one.body.modified_since)
        return [
            WrittenFile(self._table.path(one.ino), one.body.modified_since, self._closes.at_it(one))
            for one in oldest
        ]

    @staticmethod
    def _tier(node: Node) -> str:
        if node.body.is_spilled:
            return "spill"
        if not node.body.tier:
            return "backing"
        return "ram" if node.identity is None and not node.body.is_cold else "ram+backing"

    def _state(self, node: Node, op: Op | None) -> str:
        if self._closes.is_half(node):
            return "interrupted"
        if node.body.modified:
            return "writing" if node.handles else "complete"
        if op is None:
            return "clean"
        if op.parked:
            return "parked"
        return op.version.state.value if op.version is not None else VersionState.COMPLETE.value

    def incomplete(self, paths: Collection[bytes]) -> list[IncompleteFile]:
        """Files at and below the paths that are not complete, by any of their names."""
        found = []
        for node in self._table.recorded():
            if not node.is_file or not (node.body.modified or self._log.is_active(node.ino)):
                continue
            op = self._log.last_but_attributes_of(node.ino)
            in_doubt = op is not None and op.tentative
            if not (node.body.modified or in_doubt):
                continue
            path = self._named_below(node, paths)
            if path is not None:
                is_half = self._closes.is_half(node) or bool(node.body.failed and not node.handles)
                is_stored_log = self._closes.is_log(node) and not node.unlogged
                versions = node.versions - in_doubt
                writers = self._closes.at_it(node)
                found.append(
                    IncompleteFile(node.ino, path, is_half, is_stored_log, versions, writers)
                )
        return found

    def has_directory(self, end: bytes) -> bool:
        """See `FileSystem.has_directory`."""
        last = end.rpartition(b"/")[2]
        return any(
            (b"/" + self._name(parent, name)).endswith(b"/" + end)
            for node in self._table
            if node.is_dir and node.lookups
            for parent, name in node.names
            if name == last
        )

    def maybe_mapped(self, paths: Collection[bytes]) -> dict[Ino, bytes]:
        """See `FileSystem.maybe_mapped`."""
        found = {}
        for node in self._handles.open_nodes():
            # In passthrough the mapping is one of the tier file: the kernel has nothing to send.
            if node.is_file and node.open_writers and node.daemon_mappers > node.bound_handles:
                path = self._named_below(node, paths)
                if path is not None:
                    found[node.ino] = path
        return found

    def changed_in_kernel(self, paths: Collection[bytes]) -> list[Node]:
        """Those at and below the paths that may be changed through a mapping of the tier file,
        which leaves no trace.
        """
        nodes = self._handles.mapped_in_kernel()
        return [node for node in nodes if self._named_below(node, paths) is not None]

    def _named_below(self, node: Node, paths: Collection[bytes]) -> bytes | None:
        names = (self._name(parent, name) for parent, name in node.names)
        return next((one for one in names if any(below(one, path) for path in paths)), None)

    def _name(self, parent: Ino, name: bytes) -> bytes:
        above = self._table.path(parent)
        return above + b"/" + name if above else name

    def complete_until(self, paths: Iterable[bytes]) -> Seq:
        """See `FileSystem.complete_until`."""
        wanted = list(paths)
        return (
            max((op.seq for op in self.operations(wanted)), default=Seq(0))
            if wanted
            else self._log.last_seq
        )

    def operations(self, paths: Collection[bytes]) -> Iterator[Op]:
        """Pending operations on what lies at and below the paths; all where none is named."""
        if not paths:
            return iter(self._log)
        # A file lies at each of its names; of each it is asked once, for it may have thousands.
        lies_there: dict[Ino, bool] = {}
        return (op for op in self._log if self._is_about(op, paths, lies_there))

    def _is_about(self, op: Op, paths: Collection[bytes], lies_there: dict[Ino, bool]) -> bool:
        """Whether it changes what lies at or below one of the paths: by any name of its file, or by
        the one that it mentions, which may be another file's by now.
        """
        found = lies_there.get(op.ino)
        if found is None:
            node = self._table.get(op.ino)
            found = node is not None and self._named_below(node, paths) is not None
            lies_there[op.ino] = found
        if found:
            return True
        mentioned = self._paths.named(op)
        return any(below(mentioned, path) for path in paths)

    def _lies_below(self, node: Node, prefix: bytes) -> bool:
        if not node.names:
            return below(self._table.path(node.ino), prefix)
        return self._named_below(node, (prefix,)) is not None

    def interrupted(self, prefix: bytes) -> list[Node]:
        """Files whose writer was lost, and with which nobody goes on."""
        return [
            node
            for node in self._table.recorded()
            if self._closes.is_half(node) and self._lies_below(node, prefix)
        ]
