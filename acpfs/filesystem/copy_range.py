"""copy_file_range(2) inside the RAM tier, in pieces: room for each is asked for as if it were
written.

Knows contents and descriptors, not handles. Runs as a call does, under the file system's lock
between its waits.
"""

from __future__ import annotations

import os

from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.nodes import Node

COPY_RANGE_PIECE_BYTES = 8 << 20
"""Room is asked for in such pieces."""


async def copy_pieces(
    contents: Contents, source_fd: int, source_offset: int, node: Node, offset: int, size: int
) -> int | None:
    """Returns how many bytes; None: not even the first piece has room."""
    total = 0
    done = 1
    while total < size and done:
        piece = min(COPY_RANGE_PIECE_BYTES, size - total)
        at = offset + total
        try:
            count = await contents.change(
                node, at, piece, _copy_range, source_fd, source_offset + total, at, piece
            )
        except OSError:
            if not total:
                raise
            return total
        if count is None:
            return total or None
        done = count
        total = total + count
    return total


def _copy_range(target_fd: int, source_fd: int, source_offset: int, offset: int, size: int) -> int:
    return os.copy_file_range(source_fd, target_fd, size, source_offset, offset)
