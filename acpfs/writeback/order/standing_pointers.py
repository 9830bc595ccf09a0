"""What pointers on the backing directory say that are about to be changed: what makes room must not take what they still name.

A removal that passes an operation without room passes the changes of pointers behind that, too. What these pointers say until then is read
from the backing directory, on a thread; as long as that is not known, the removal does not pass. Asked under the file system's lock.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterable

from acpfs.backing.lower import LowerPath
from acpfs.writeback.log.ops import Op
from acpfs.writeback.parts import DrainParts

TEXT_BYTES_MAX = 1 << 16
"""Of a pointer; a larger one may name anything."""
SAID_FOR_S = 10.0
"""What was read is read anew after so long."""
_NUMBER = re.compile(rb"[0-9]+")


class StandingPointers:
    """Knows for a while what they say."""

    def __init__(self, parts: DrainParts) -> None:
        self._lower = parts.lower
        self._tree = parts.tree
        self._lock = parts.lock
        self._is_directory = parts.listener.is_directory
        self._said: dict[LowerPath, bytes | None] = {}
        """None: it may name anything."""
        self._known_since = (-math.inf, 0)
        self.wanted: set[LowerPath] = set()
        """Pointers to be read."""

    def renew(self, now: float, pointer_seq: int) -> None:
        """Forget what was read long ago, or before the last pointer was persisted."""
        read_at, seq = self._known_since
        if now > read_at + SAID_FOR_S or seq != pointer_seq:
            self._said.clear()
            self._known_since = (now, pointer_seq)

    def name(self, changes: Iterable[Op], removal: Op) -> bool:
        """Whether one of the pointers that these operations change may name what is to be removed."""
        removed = self._tree.path_at(removal.parent, removal.name)
        if removed is None:
            return True
        return any(
            self._names(path, removed) for change in changes for path in self._standing(change)
        )

    def _standing(self, change: Op) -> set[LowerPath]:
        """Where what it replaces or removes lies now."""
        places = {*change.touches(), *self._tree.places(change.ino)}
        nodes = {place: self._tree.node_at(*place) for place in places}
        paths = {
            self._tree.path_at(*place)
            for place, node in nodes.items()
            if node is not None and not self._is_directory(node)
        }
        return {path for path in paths if path is not None}

    def _names(self, pointer: LowerPath, removed: LowerPath) -> bool:
        if pointer not in self._said:
            self.wanted.add(pointer)
            return True
        text = self._said[pointer]
        if text is None:
            return True
        shared = 0
        while shared < len(pointer) - 1 and pointer[: shared + 1] == removed[: shared + 1]:
            shared += 1
        return any(_mentions(text, name) for name in removed[shared:])

    def read(self) -> None:
        """Read what is wanted. On a thread; blocks as the backing directory does."""
        with self._lock:
            wanted = list(self.wanted)
        said = {path: self._text(path) for path in wanted}
        with self._lock:
            self.wanted.difference_update(said)
            self._said.update(said)

    def _text(self, path: LowerPath) -> bytes | None:
        try:
            st = self._lower.lstat(path)
            if stat.S_ISLNK(st.mode):
                return self._lower.readlink(path)
            if not stat.S_ISREG(st.mode) or st.size > TEXT_BYTES_MAX:
                return None
            return self._content(path, st.size)
        except FileNotFoundError:
            return b""
        except OSError:
            return None

    def _content(self, path: LowerPath, size: int) -> bytes:
        buffer = bytearray(size)
        fd = self._lower.open_read(path)
        try:
            return bytes(buffer[: self._lower.read(fd, memoryview(buffer), 0)])
        finally:
            self._lower.close(fd)


def _mentions(text: bytes, name: bytes) -> bool:
    """By the name itself, or by a number in it: `latest_checkpointed_iteration.txt` says 1000 of `iter_0001000`."""
    numbers = {int(found) for found in _NUMBER.findall(text)}
    return name in text or any(int(found) in numbers for found in _NUMBER.findall(name))
