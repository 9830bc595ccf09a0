"""Which operations show a file, or take one away, that points at others: `latest`, `.metadata`, a
directory under its final name.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable

from acpfs.types import Ino
from acpfs.writeback.log.ops import Op, OpKind

_TAKING = frozenset({OpKind.UNLINK, OpKind.RENAME, OpKind.EXCHANGE})


class Pointers:
    """Knows them by name. Each is asked for once: names of operations do not change."""

    def __init__(self, patterns: Iterable[str], is_directory: Callable[[Ino], bool]) -> None:
        self._pattern = re.compile(
            "|".join(fnmatch.translate(pattern) for pattern in patterns) or r"(?!)"
        )
        self._is_directory = is_directory

    def makes(self, op: Op) -> bool:
        """Whether the operation makes one visible."""
        if op.is_pointer is None:
            op.is_pointer = self._makes(op)
        return op.is_pointer

    def _makes(self, op: Op) -> bool:
        names: tuple[bytes, ...] = ()
        if op.kind in (OpKind.STORE, OpKind.SYMLINK, OpKind.LINK):
            names = (op.name,)
        elif op.kind is OpKind.RENAME:
            names = (op.new_name,)
        elif op.kind is OpKind.EXCHANGE:
            names = (op.name, op.new_name)
        return self._publishes_directory(op) or any(map(self.is_ones_name, names))

    def _publishes_directory(self, op: Op) -> bool:
        """Whether it gives a directory another name: a framework may have written there what it
        publishes by that.
        """
        moved = {OpKind.RENAME: (op.ino,), OpKind.EXCHANGE: (op.ino, op.victim)}.get(op.kind, ())
        return op.new_parent > 0 and any(map(self._is_directory, moved))

    def is_ones_name(self, name: bytes) -> bool:
        """Whether what has that name is one."""
        return self._pattern.match(os.fsdecode(name)) is not None

    def takes(self, op: Op) -> bool:
        """Whether it removes or replaces one."""
        if op.takes_pointer is None:
            op.takes_pointer = op.parent > 0 and op.kind in _TAKING and self.is_ones_name(op.name)
        return op.takes_pointer
