"""Files that are brought to RAM by name, before anybody reads them: which ones, and the newest
checkpoint among them.

Asks the backing directory through `LowerView` as a lookup or a listing does, and hands files to
`Warming` one by one. Does not know who asked, nor how many come at the same time. Coroutines wait
as described in `steps`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from acpfs.backing.lower import LowerEntry
from acpfs.checkpoints import Checkpoint, Checkpoints
from acpfs.filesystem.content.reads import Reads
from acpfs.filesystem.content.warming import Warming
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.filesystem.paths import Paths
from acpfs.types import ROOT, Ino

TRACKERS = (
    b"latest_checkpointed_iteration.txt",
    b"latest",
    b"latest_checkpoint",
    b"latest_checkpoint.txt",
)
"""Files of one line that name the checkpoint beside them: Megatron writes a number, DeepSpeed and
others a name.
"""
TRACKER_BYTES_MAX = 4096
SAVE_DIR_DEPTH_MAX = 3
"""How deep below the mount point save_dirs are looked for."""


@dataclass(frozen=True, slots=True)
class Found:
    """A regular file."""

    path: bytes
    ino: Ino
    size: int


class Preloading:
    """See above."""

    def __init__(
        self,
        table: NodeTable,
        view: LowerView,
        reads: Reads,
        warming: Warming,
        checkpoints: Checkpoints,
        closed: Callable[[Node], None],
        paths: Paths,
    ) -> None:
        """`closed`: one user of a node less."""
        self._paths = paths
        self._table = table
        self._view = view
        self._reads = reads
        self._warming = warming
        self._checkpoints = checkpoints
        self._closed = closed

    async def files(self, path: bytes) -> list[Found]:
        """Regular files at and below a path, as they are now; symlinks are not followed.

        Raises:
            OSError: ENOENT when there is nothing.
        """
        found = []
        todo = [(path, await self._paths.find(path))]
        while todo:
            where, node = todo.pop()
            if node.is_file:
                await self._view.renew(node)
                found.append(Found(where, node.ino, node.size))
            elif node.is_dir:
                todo += [
                    (where + b"/" + name if where else name, child)
                    for name, child in reversed(await self._children(node))
                ]
        return found

    async def bring(self, ino: Ino) -> tuple[str, str]:
        """Bring one file; how it ended (as `Warming.bring` says) and its checksum, where it was
        read.

        Raises:
            OSError: it is gone, or the backing directory does not give it.
        """
        node = self._table.get(ino)
        if node is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        node.handles += 1
        try:
            await self._view.renew(node)
            return await self._warming.bring(node)
        finally:
            self._closed(node)

    def came(self, ino: Ino) -> int:
        """Bytes of a file that are in RAM by now."""
        node = self._table.get(ino)
        return 0 if node is None else self._warming.there_bytes(node)

    # -- the newest checkpoint

    async def latest(self) -> list[bytes]:
        """Paths of the newest checkpoint: the one that a tracker file names, else the newest that
        is as whole as the one before it.

        Of several save_dirs, the one that was written to last. Nothing found: no paths.
        """
        candidates: list[tuple[int, list[bytes]]] = []
        todo: list[tuple[int, bytes, Node]] = [(0, b"", self._table[ROOT])]
        while todo:
            depth, path, node = todo.pop()
            children = await self._children(node)
            named = await self._tracked(path, children) or await self._newest(path, children)
            if named:
                candidates.append((max(child.mtime_ns for name, child in children), named))
            elif depth < SAVE_DIR_DEPTH_MAX:
                todo += [
                    (depth + 1, path + b"/" + name if path else name, child)
                    for name, child in children
                    if child.is_dir
                ]
        return max(candidates, default=(0, []))[1]

    async def _tracked(self, path: bytes, children: Sequence[tuple[bytes, Node]]) -> list[bytes]:
        names = dict(children)
        for tracker in TRACKERS:
            node = names.get(tracker)
            if node is None or not node.is_file or not 0 < node.size <= TRACKER_BYTES_MAX:
                continue
            text = (await self._text(node)).strip()
            number = int(text) if text.isdigit() else -1
            for name, _child in children:
                checkpoint = self._checkpoints.of(_join(path, name), directory=True)
                is_it = name == text or (
                    number >= 0 and checkpoint is not None and checkpoint.step == number
                )
                if is_it and name not in TRACKERS:
                    return [_join(path, name), _join(path, tracker)]
        return []

    async def _text(self, node: Node) -> bytes:
        """As the mount has it: what names the newest checkpoint may not be on the backing directory
        yet.
        """
        node.handles += 1
        try:
            if not node.body.is_cold:
                return await self._reads.content(node, node.body, 0, node.size)
            fd = await self._view.open_lower(node)
            try:
                return await self._view.questions.call("read", os.pread, fd, node.size, 0)
            finally:
                self._view.close_later(fd)
        finally:
            self._closed(node)

    async def _newest(self, path: bytes, children: Sequence[tuple[bytes, Node]]) -> list[bytes]:
        groups: dict[Checkpoint, list[tuple[bytes, Node]]] = {}
        for name, child in children:
            checkpoint = self._checkpoints.of(_join(path, name), directory=child.is_dir)
            if checkpoint is not None and checkpoint.save_dir == path:
                groups.setdefault(checkpoint, []).append((_join(path, name), child))
        ranked = sorted(
            groups,
            key=lambda c: (c.order, max(child.mtime_ns for _path, child in groups[c])),
            reverse=True,
        )
        for number, newer in enumerate(ranked):
            older = ranked[number + 1] if number + 1 < len(ranked) else None
            if older is None or await self._count(groups[newer]) >= await self._count(
                groups[older]
            ):
                return [where for where, _child in groups[newer]]
        return []

    async def _count(self, group: Sequence[tuple[bytes, Node]]) -> int:
        return sum([len(await self.files(path)) for path, _child in group])

    # -- names

    async def _children(self, parent: Node) -> list[tuple[bytes, Node]]:
        names = await self._view.names(parent)
        await self._view.fill(
            parent, [name for name, known in names.items() if isinstance(known, LowerEntry)]
        )
        found = [(name, await self._paths.child(parent, name)) for name in sorted(names)]
        return [(name, child) for name, child in found if child is not None]


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name
